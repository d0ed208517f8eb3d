package world

import (
	"bytes"
	"encoding/binary"
	"maps"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// A SealedQuery asks what became of the packets with a token that were sent into
// WireGuard tunnels.
type SealedQuery struct {
	Token string    `json:"token"`
	On    string    `json:"on"` // where the encrypted packets should have passed, as in a WireQuery
	Since time.Time `json:"since,omitzero"`
}

// A SealedReport is what became of them.
type SealedReport struct {
	// Packets are those that came out of the tunnel at its other end, each time
	// that they were sent into one.
	Packets []SealedPacket `json:"packets"`
}

// A SealedPacket is a packet that was sent into a tunnel and came out of it.
type SealedPacket struct {
	Time   time.Time `json:"time"`   // when it was sent into the tunnel
	Host   string    `json:"host"`   // that sent it: "milan/gateway"
	Sealed bool      `json:"sealed"` // an encrypted message of its length left the host in the meantime
	Passed int       `json:"passed"` // frames with that very message on the network asked for
}

// WireGuard's data message: a header of 16 bytes, which are its type, whom it is
// for and a counter, then the packet, padded to a multiple of 16 bytes, then a
// tag of 16 bytes. No two messages of a lab have the same header.
const (
	sealedHeader  = 16
	sealedTag     = 16
	sealedPadding = 16
)

// A sealedMessage is an encrypted packet.
type sealedMessage struct {
	time   time.Time
	header [sealedHeader]byte
	length int // of the whole message
	used   bool
}

// sealedMessages are WireGuard's data messages in a packet. The kernel may put
// several of one length into one datagram, as the sender handed them over, of
// which only the last may be shorter (UDP segmentation offload).
func sealedMessages(p packet) []sealedMessage {
	d := decode(p)
	if d.proto != "udp" || d.icmpError || !isSealed(d.payload) {
		return nil
	}
	var out []sealedMessage
	length := p.length - (len(p.data) - len(d.payload)) // of the datagram, of which the end may not have been captured
	for at := 0; ; {
		m := sealedMessage{time: p.time, header: [sealedHeader]byte(d.payload[at:]), length: length - at}
		next := m.header
		counter := next[sealedHeader/2:]
		binary.LittleEndian.PutUint64(counter, binary.LittleEndian.Uint64(counter)+1)
		end := bytes.Index(d.payload[at+sealedHeader:], next[:])
		if end < 0 {
			return append(out, m)
		}
		m.length = sealedHeader + end
		out = append(out, m)
		at += m.length
	}
}

func isSealed(payload []byte) bool {
	return len(payload) >= sealedHeader+sealedTag && bytes.Equal(payload[:4], []byte{4, 0, 0, 0})
}

// fits tells whether a message can have a packet of that length in it.
func (m sealedMessage) fits(packet int) bool {
	inside := m.length - sealedHeader - sealedTag
	return packet <= inside && inside < packet+sealedPadding
}

// throughTunnel tells whether a packet passed an interface without a link layer,
// as those of tunnels are, and so in clear text.
func (p packet) throughTunnel() bool { return p.hatype == unix.ARPHRD_NONE }

// A passage is a packet that passed a tunnel's interface.
type passage struct {
	packet
	host  string
	asked bool      // it has the token
	came  time.Time // of one that was sent: when it came out; zero: it was lost, or was for nobody
}

// kind is the same of a packet that is sent and of the one that comes: what is
// in a tunnel is not changed. Of packets with the token, which the kernel may put
// together with others, it is the token and the byte behind it.
func (p *passage) kind(token []byte) string {
	if !p.asked {
		return string(p.data)
	}
	i := bytes.Index(p.data, token)
	return string(p.data[i:min(len(p.data), i+len(token)+1)])
}

// sealed follows the packets with a token from where they were sent into a
// tunnel to where they came out of it. In between, whoever sent them must have
// sent an encrypted message of the right length. All that it sent into the tunnel
// and that came out is taken to be in messages of its own, in that order: no
// message stands for two packets. passed has the packets of the network that is asked about.
func sealed(captures []namedCapture, q SealedQuery, passed []packet) SealedReport {
	token := []byte(q.Token)
	packets, sent := map[string][]packet{}, map[string][]*passage{}
	var came []*passage
	for _, c := range captures {
		all, _ := c.between(q.Since, time.Time{})
		packets[c.host] = append(packets[c.host], all...)
		for _, p := range all {
			if !p.throughTunnel() {
				continue
			}
			one := &passage{packet: p, host: c.host, asked: bytes.Contains(p.data, token)}
			if p.direction == Out {
				sent[c.host] = append(sent[c.host], one)
			} else {
				came = append(came, one)
			}
		}
	}
	pair(slices.Concat(slices.Collect(maps.Values(sent))...), came, token)

	var r SealedReport
	for _, host := range slices.Sorted(maps.Keys(sent)) {
		if !slices.ContainsFunc(sent[host], func(p *passage) bool { return p.asked }) {
			continue
		}
		messages := sentMessages(packets, host)
		for _, p := range sent[host] {
			if p.came.IsZero() {
				continue
			}
			m := take(messages, p)
			if !p.asked {
				continue
			}
			one := SealedPacket{Time: p.time, Host: host}
			if m != nil {
				one.Sealed, one.Passed = true, m.countIn(passed)
			}
			r.Packets = append(r.Packets, one)
		}
	}
	return r
}

// pair notes when the packets that were sent came out of a tunnel: each that came
// is the last of its kind that another host had sent by then. Those that are left
// were lost, and perhaps sent again, or were for nobody.
func pair(sent, came []*passage, token []byte) {
	byTime := func(a, b *passage) int { return a.time.Compare(b.time) }
	slices.SortStableFunc(sent, byTime)
	slices.SortStableFunc(came, byTime)
	kinds := map[string][]*passage{}
	for _, s := range sent {
		kinds[s.kind(token)] = append(kinds[s.kind(token)], s)
	}
	for _, c := range came {
		for _, s := range slices.Backward(kinds[c.kind(token)]) {
			if s.host != c.host && s.came.IsZero() && !s.time.After(c.time) {
				s.came = c.time
				break
			}
		}
	}
}

// take returns the first message that may have a packet in it and that has none
// yet: one that was sent after it was, and before it came out.
func take(messages []sealedMessage, p *passage) *sealedMessage {
	for i := range messages {
		m := &messages[i]
		if !m.used && !m.time.Before(p.time) && !m.time.After(p.came) && m.fits(p.length) {
			m.used = true
			return m
		}
	}
	return nil
}

// sentMessages are the messages that a host sent, each once, in the order of
// time. A tunnel that was moved into a namespace sends them where it was made: on
// the node.
func sentMessages(packets map[string][]packet, host string) []sealedMessage {
	from := []string{host}
	if !slices.ContainsFunc(packets[host], func(p packet) bool { return !p.throughTunnel() && len(sealedMessages(p)) > 0 }) {
		cluster, _, _ := strings.Cut(host, "/")
		from = nil
		for h := range packets {
			if strings.HasPrefix(h, cluster+"/node-") {
				from = append(from, h)
			}
		}
	}
	first := map[[sealedHeader]byte]sealedMessage{}
	for _, h := range from {
		for _, p := range packets[h] {
			if p.throughTunnel() || p.direction != Out {
				continue
			}
			for _, m := range sealedMessages(p) {
				if seen, ok := first[m.header]; !ok || m.time.Before(seen.time) {
					first[m.header] = m
				}
			}
		}
	}
	return slices.SortedFunc(maps.Values(first), func(a, b sealedMessage) int { return a.time.Compare(b.time) })
}

// countIn is the number of packets that have the message in them.
func (m sealedMessage) countIn(packets []packet) int {
	n := 0
	for _, p := range packets {
		if bytes.Contains(p.data, m.header[:]) {
			n++
		}
	}
	return n
}
