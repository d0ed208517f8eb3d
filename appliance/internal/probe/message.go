package probe

import (
	"encoding/json"
	"fmt"
	"maps"
	"strings"
	"time"
)

// The message types of the protocol.
const (
	typePing = "PING"
	typePong = "PONG"
)

// typeName is the name of the type in the JSON object.
const typeName = "msgType"

// maxMessage is the longest datagram that is read. Both implementations of
// the protocol write less than 200 bytes.
const maxMessage = 1024

// A message is one datagram. Its JSON names and the text form of the time
// (RFC 3339 with nanoseconds) are those of the public system.
type message struct {
	ClusterID string    `json:"clusterID"`
	Type      string    `json:"msgType"`
	Time      time.Time `json:"timeStamp"`
	// MTU of a PING is the longest packet that the network below the sender has
	// room for in the tunnel; 0: it does not say. The public system knows
	// nothing of it, neither sends it nor minds it.
	MTU int `json:"mtu,omitempty"`
}

// encode returns the datagram of m.
func (m message) encode() ([]byte, error) {
	b, err := json.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("encode conncheck message: %w", err)
	}
	return b, nil
}

// decode parses a datagram.
func decode(b []byte) (message, error) {
	var m message
	if err := json.Unmarshal(b, &m); err != nil {
		return message{}, fmt.Errorf("decode conncheck message: %w", err)
	}
	if m.Type != typePing && m.Type != typePong {
		return message{}, fmt.Errorf("decode conncheck message: unknown msgType %q", m.Type)
	}
	return m, nil
}

// answer returns the reply to the PING b: the same object, whatever else is in
// it, with the type turned round. decode takes a name for the type's in any case,
// so all of them go: a reply that is read as a PING would be answered, and that
// again, for ever.
func answer(b []byte) ([]byte, error) {
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(b, &fields); err != nil {
		return nil, fmt.Errorf("answer conncheck message: %w", err)
	}
	maps.DeleteFunc(fields, func(name string, _ json.RawMessage) bool { return strings.EqualFold(name, typeName) })
	fields[typeName] = json.RawMessage(`"` + typePong + `"`)
	out, err := json.Marshal(fields)
	if err != nil {
		return nil, fmt.Errorf("answer conncheck message: %w", err)
	}
	if len(out) > maxMessage { // characters that JSON escapes make six of one
		return nil, fmt.Errorf("answer conncheck message: the reply would have %d bytes, of which %d are read", len(out), maxMessage)
	}
	return out, nil
}
