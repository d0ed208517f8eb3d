// Package exchange is what the two gateways of a peering tell each other, by a
// connection through the tunnel, which authenticates them: what each cluster has to know of
// the other, as it is now. It only says what a message is and how it is read; package daemon
// decides when, and what comes of it.
//
// Both ends write one [Message] and read one, each a line of JSON of at most [MaxMessage]
// bytes. Gateways of different versions read each other: a reader ignores the fields that it
// does not know, whatever number [Message.Version] has, and a field keeps its meaning for
// ever. A field that a reader does know must be as it is written here, or the whole message
// is refused: half of one would contradict the rest.
package exchange

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"regexp"
	"slices"
	"strings"

	"github.com/isthmus-net/isthmus/appliance/internal/rotation"
)

// Version is the number of the messages that are written here.
const Version = 1

// Bounds of a message. With all of them reached at once it may still be longer than
// MaxMessage, and is refused then.
const (
	MaxMessage   = 4 << 10 // in bytes, with the end of the line
	MaxNetworks  = 32      // of a kind; more would not fit with IPv6
	MaxAddresses = 8       // of an endpoint: a client tries one after the other
	MaxFeatures  = 16
)

// Bounds of the MTU of a tunnel: every IPv4 host takes packets of 576 bytes (RFC 791), of
// which the outer headers of WireGuard over IPv6 take 80.
const (
	minMTU = 576 - 80
	maxMTU = 65535
)

// maxName is how long a name of the DNS can be (RFC 1035, 2.3.4, as text).
const maxName = 253

var (
	program = regexp.MustCompile(`^[0-9A-Za-z][-+.0-9A-Za-z_]{0,63}$`)
	feature = regexp.MustCompile(`^[a-z][-.0-9a-z]{0,31}$`)
	name    = regexp.MustCompile(`^[0-9A-Za-z_]([-0-9A-Za-z_]{0,61}[0-9A-Za-z_])?(\.[0-9A-Za-z_]([-0-9A-Za-z_]{0,61}[0-9A-Za-z_])?)*\.?$`)
)

// A Message is what a gateway says of its cluster. All but the version and the program may
// be absent. What is absent is not told; it may be there.
type Message struct {
	// Version is [Version], or more from a newer gateway.
	Version int `json:"version"`
	// Program is the version of Isthmus.
	Program string `json:"program"`
	// Features are what the gateway can do beyond the fields of this message.
	Features []string `json:"features,omitempty"`
	// Networks are those of its cluster.
	Networks *Networks `json:"networks,omitempty"`
	// Endpoint is where its WireGuard can be dialled; that of a client is absent.
	Endpoint *Endpoint `json:"endpoint,omitempty"`
	// MTU is what the tunnel would have, in bytes, if this gateway alone decided; 0: it
	// does not say. Both gateways give it the smaller one.
	MTU int `json:"mtu,omitempty"`
	// Keys is about changes of keys. It may have a pre-shared key, which is for the tunnel
	// only: it is told and not kept with the rest.
	Keys *rotation.Message `json:"keys,omitempty"`
}

// Networks are those of a cluster, as it calls them itself.
type Networks struct {
	Pod      []netip.Prefix `json:"pod"`
	External []netip.Prefix `json:"external"`
}

// An Endpoint is all the places where a server can be dialled, the best first.
type Endpoint struct {
	Addresses []string `json:"addresses"` // or names
	Port      uint16   `json:"port"`      // UDP
}

// NewNetworks returns the networks of a cluster as they can be told; nil: they can't, for
// there are too many, or some overlap. Some of them alone would be wrong.
func NewNetworks(pod, external []netip.Prefix) *Networks {
	if len(pod)+len(external) == 0 || CheckNetworks("", pod, external) != nil {
		return nil
	}
	return &Networks{Pod: pod, External: external}
}

// CheckNetworks returns why the networks of a cluster can't be told, which are in the fields
// pod and external of this one; nil: they can.
func CheckNetworks(field string, pod, external []netip.Prefix) error {
	return cmp.Or(checkNetworks(field+".pod", pod), checkNetworks(field+".external", external))
}

// NewEndpoint returns the first addresses of an endpoint that can be told. It returns nil if
// no address can be told.
func NewEndpoint(addresses []string, port uint16) *Endpoint {
	e := Endpoint{Port: port}
	for _, a := range addresses {
		if dialled(a) && !slices.Contains(e.Addresses, a) && len(e.Addresses) < MaxAddresses {
			e.Addresses = append(e.Addresses, a)
		}
	}
	if e.check() != nil {
		return nil
	}
	return &e
}

// Encode returns a message as one line.
func Encode(m Message) ([]byte, error) {
	m.Version = Version
	if err := m.check(); err != nil {
		return nil, err
	}
	b, err := json.Marshal(m)
	if err != nil {
		return nil, err
	}
	if len(b) >= MaxMessage {
		return nil, tooLong(len(b) + 1)
	}
	return append(b, '\n'), nil
}

func tooLong(n int) error {
	return fmt.Errorf("the message has %d bytes; a message between gateways has at most %d", n, MaxMessage)
}

// Decode reads a message; see the package for what is refused.
func Decode(b []byte) (Message, error) {
	if len(b) > MaxMessage {
		return Message{}, tooLong(len(b))
	}
	var m Message
	d := json.NewDecoder(bytes.NewReader(b))
	if err := d.Decode(&m); err != nil {
		return Message{}, fmt.Errorf("the message is not what a gateway says: %w", err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return Message{}, errors.New("there is more after the end of the message")
	}
	if err := m.check(); err != nil {
		return Message{}, err
	}
	return m, nil
}

// Read reads one message and no more than [MaxMessage] bytes.
func Read(r io.Reader) (Message, error) {
	line, err := bufio.NewReaderSize(io.LimitReader(r, MaxMessage), MaxMessage).ReadBytes('\n')
	if err != nil {
		return Message{}, fmt.Errorf("the message ends too soon, or has more than %d bytes: %w", MaxMessage, err)
	}
	return Decode(line)
}

// Meet is one exchange: it tells the gateway at the other end and returns what that tells.
// Neither waits for the other before it writes: a message fits into the buffers of a
// connection. How long it takes is limited by the deadline of the connection.
func Meet(c io.ReadWriter, own Message) (Message, error) {
	b, err := Encode(own)
	if err != nil {
		return Message{}, fmt.Errorf("what this gateway tells: %w", err)
	}
	if _, err := c.Write(b); err != nil {
		return Message{}, err
	}
	return Read(c)
}

// Equal reports whether two messages say the same.
func (m Message) Equal(o Message) bool {
	return m.Program == o.Program && m.MTU == o.MTU && slices.Equal(m.Features, o.Features) &&
		m.Networks.equal(o.Networks) && m.Endpoint.equal(o.Endpoint)
}

func (n *Networks) equal(o *Networks) bool {
	if n == nil || o == nil {
		return n == o
	}
	return slices.Equal(n.Pod, o.Pod) && slices.Equal(n.External, o.External)
}

func (e *Endpoint) equal(o *Endpoint) bool {
	if e == nil || o == nil {
		return e == o
	}
	return slices.Equal(e.Addresses, o.Addresses) && e.Port == o.Port
}

func (m Message) check() error {
	switch {
	case m.Version < 1:
		return errors.New("version: is missing; write 1 or more")
	case !program.MatchString(m.Program):
		return errors.New("program: is not the version of a program, of up to 64 letters, digits and + - . _")
	case len(m.Features) > MaxFeatures:
		return fmt.Errorf("features: has %d; it can have %d", len(m.Features), MaxFeatures)
	case slices.ContainsFunc(m.Features, func(f string) bool { return !feature.MatchString(f) }):
		return errors.New("features: has one that is not up to 32 lower-case letters, digits, hyphens and dots")
	case m.MTU != 0 && (m.MTU < minMTU || m.MTU > maxMTU):
		return fmt.Errorf("mtu: %d is not the MTU of a tunnel; that is %d to %d", m.MTU, minMTU, maxMTU)
	}
	if m.Networks != nil {
		for _, list := range []struct {
			field    string
			prefixes []netip.Prefix
		}{{"networks.pod", m.Networks.Pod}, {"networks.external", m.Networks.External}} {
			if err := checkNetworks(list.field, list.prefixes); err != nil {
				return err
			}
		}
	}
	if m.Keys != nil {
		if err := m.Keys.Check(); err != nil {
			return fmt.Errorf("keys.%w", err)
		}
	}
	if m.Endpoint != nil {
		return m.Endpoint.check()
	}
	return nil
}

func checkNetworks(field string, list []netip.Prefix) error {
	if len(list) > MaxNetworks {
		return fmt.Errorf("%s: has %d networks; it can have %d", field, len(list), MaxNetworks)
	}
	for i, p := range list {
		switch {
		case !p.IsValid() || p != p.Masked() || p.Addr().Is4In6():
			return fmt.Errorf("%s[%d]: is not a network, such as 10.0.0.0/16 or fd00::/64", field, i)
		case slices.ContainsFunc(list[:i], p.Overlaps):
			return fmt.Errorf("%s[%d]: %v overlaps one before it", field, i, p)
		}
	}
	return nil
}

func (e Endpoint) check() error {
	switch {
	case e.Port == 0:
		return errors.New("endpoint.port: is missing")
	case len(e.Addresses) == 0 || len(e.Addresses) > MaxAddresses:
		return fmt.Errorf("endpoint.addresses: has %d; it can have 1 to %d", len(e.Addresses), MaxAddresses)
	}
	for i, text := range e.Addresses {
		if !dialled(text) {
			return fmt.Errorf("endpoint.addresses[%d]: is neither the address of another host nor a name of the DNS", i)
		}
		if slices.Contains(e.Addresses[:i], text) {
			return fmt.Errorf("endpoint.addresses[%d]: is there twice", i)
		}
	}
	return nil
}

// Elsewhere reports whether another host may be at an address that a peer tells, by itself
// or by a name. Addresses of a link are not among them: a peer must not have us knock at what
// only this host reaches.
func Elsewhere(a netip.Addr) bool {
	a = a.Unmap()
	return a.IsValid() && a.Zone() == "" && !a.IsUnspecified() && !a.IsLoopback() && !a.IsMulticast() && !a.IsLinkLocalUnicast()
}

// dialled reports whether a peer may be dialled at an address or name.
func dialled(text string) bool {
	if a, err := netip.ParseAddr(text); err == nil {
		return Elsewhere(a)
	}
	// A name that ends in a number is an address with a slip in it.
	last := text[strings.LastIndex(strings.TrimSuffix(text, "."), ".")+1:]
	return len(text) <= maxName && name.MatchString(text) && strings.Trim(last, "0123456789.") != ""
}
