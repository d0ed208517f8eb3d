package world

import (
	"encoding/binary"
	"net"
	"slices"
	"testing"
	"time"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"
)

// A tunnelWorld has the captures of two gateways, of a node and of the WAN.
type tunnelWorld struct {
	t        *testing.T
	captures []namedCapture
	start    time.Time
	counters map[string]uint64
}

func newTunnelWorld(t *testing.T) *tunnelWorld {
	w := &tunnelWorld{t: t, start: time.Unix(1000, 0), counters: map[string]uint64{}}
	for _, host := range []string{"milan/gateway", "rome/gateway", "milan/node-1", "wan"} {
		w.captures = append(w.captures, namedCapture{host, &capture{ring: newRing(1 << 20)}})
	}
	return w
}

func (w *tunnelWorld) add(host string, at time.Duration, direction Direction, hatype uint16, data []byte) {
	i := slices.IndexFunc(w.captures, func(c namedCapture) bool { return c.host == host })
	w.captures[i].ring.add(packet{
		time: w.start.Add(at * time.Millisecond), hatype: hatype, protocol: unix.ETH_P_IP, direction: direction, data: data[:min(len(data), snapLength)], length: len(data),
	})
}

// plain is a packet that passes the interface of a tunnel.
func (w *tunnelWorld) plain(host string, at time.Duration, direction Direction, text string) int {
	data := frame(w.t, &layers.IPv4{Version: 4, TTL: 64, Protocol: layers.IPProtocolUDP, SrcIP: net.IP{10, 0, 0, 5}, DstIP: net.IP{10, 1, 0, 6}},
		&layers.UDP{SrcPort: 999, DstPort: 8080}, gopacket.Payload(text))
	w.add(host, at, direction, unix.ARPHRD_NONE, data)
	return len(data)
}

// message is the next encrypted message of a sender with a packet of a length.
func (w *tunnelWorld) message(sender string, length int) []byte {
	m := make([]byte, sealedHeader+(length+sealedPadding-1)/sealedPadding*sealedPadding+sealedTag)
	m[0] = 4
	copy(m[4:], sender)
	for i := sealedHeader; i < len(m); i++ {
		m[i] = byte(i) | 0x80 // looks like nothing else
	}
	binary.LittleEndian.PutUint64(m[8:], w.counters[sender])
	w.counters[sender]++
	return m
}

// datagram is a datagram as it passes a network.
func (w *tunnelWorld) datagram(host string, at time.Duration, direction Direction, messages ...[]byte) {
	mac := net.HardwareAddr{2, 0, 0, 0, 0, 1}
	w.add(host, at, direction, unix.ARPHRD_ETHER, frame(w.t, &layers.Ethernet{SrcMAC: mac, DstMAC: mac, EthernetType: layers.EthernetTypeIPv4},
		&layers.IPv4{Version: 4, TTL: 64, Protocol: layers.IPProtocolUDP, SrcIP: net.IP{198, 51, 100, 1}, DstIP: net.IP{198, 51, 100, 2}},
		&layers.UDP{SrcPort: 51840, DstPort: 31840}, gopacket.Payload(slices.Concat(messages...))))
}

// TestSealed: what proves that a packet passed encrypted is the message that it
// is in, and nothing else that passes.
func TestSealed(t *testing.T) {
	const request, other = token + ">", "are you there, peer?" // of one length once padded
	for _, tc := range []struct {
		name   string
		passes func(w *tunnelWorld)
		want   []SealedPacket // Time is not compared
	}{
		{"there and back", func(w *tunnelWorld) {
			n := w.plain("milan/gateway", 0, Out, request)
			m := w.message("A", n)
			w.datagram("milan/gateway", 1, Out, m)
			w.datagram("wan", 2, In, m)
			w.plain("rome/gateway", 3, In, request)
			back := w.message("B", w.plain("rome/gateway", 4, Out, token+"<"))
			w.datagram("rome/gateway", 5, Out, back)
			w.datagram("wan", 6, In, back)
			w.plain("milan/gateway", 7, In, token+"<")
		}, []SealedPacket{{Host: "milan/gateway", Sealed: true, Passed: 1}, {Host: "rome/gateway", Sealed: true, Passed: 1}}},
		{"only the gateways' own", func(w *tunnelWorld) {
			n := w.plain("milan/gateway", 0, Out, other)
			w.plain("milan/gateway", 0, Out, request)
			m := w.message("A", n)
			w.datagram("milan/gateway", 1, Out, m)
			w.datagram("wan", 2, In, m)
			w.plain("rome/gateway", 3, In, other)
			w.plain("rome/gateway", 3, In, request)
		}, []SealedPacket{{Host: "milan/gateway"}}},
		{"after one that is for nobody", func(w *tunnelWorld) {
			w.plain("milan/gateway", 0, Out, "is any router there") // the kernel asks, on every link
			m := w.message("A", w.plain("milan/gateway", 1, Out, request))
			w.datagram("milan/gateway", 2, Out, m)
			w.datagram("wan", 3, In, m)
			w.plain("rome/gateway", 4, In, request)
		}, []SealedPacket{{Host: "milan/gateway", Sealed: true, Passed: 1}}},
		{"too late", func(w *tunnelWorld) {
			n := w.plain("milan/gateway", 0, Out, request)
			w.plain("rome/gateway", 1, In, request)
			m := w.message("A", n)
			w.datagram("milan/gateway", 2, Out, m)
			w.datagram("wan", 3, In, m)
		}, []SealedPacket{{Host: "milan/gateway"}}},
		{"of another length", func(w *tunnelWorld) {
			n := w.plain("milan/gateway", 0, Out, request)
			for _, length := range []int{0, n + sealedPadding, n - sealedPadding} {
				m := w.message("A", length)
				w.datagram("milan/gateway", 1, Out, m)
				w.datagram("wan", 2, In, m)
			}
			w.plain("rome/gateway", 3, In, request)
		}, []SealedPacket{{Host: "milan/gateway"}}},
		{"past the network", func(w *tunnelWorld) {
			n := w.plain("milan/gateway", 0, Out, request)
			w.datagram("milan/gateway", 1, Out, w.message("A", n))
			w.datagram("wan", 2, In, w.message("A", n))
			w.plain("rome/gateway", 3, In, request)
		}, []SealedPacket{{Host: "milan/gateway", Sealed: true}}},
		{"several in a datagram", func(w *tunnelWorld) {
			long := w.plain("milan/gateway", 0, Out, other+other)
			n := w.plain("milan/gateway", 0, Out, request)
			a, b := w.message("A", long), w.message("A", n)
			w.datagram("milan/gateway", 1, Out, a, b)
			w.datagram("wan", 2, In, a, b)
			w.plain("rome/gateway", 3, In, request)
		}, []SealedPacket{{Host: "milan/gateway", Sealed: true, Passed: 1}}},
		{"sent by the node", func(w *tunnelWorld) {
			m := w.message("A", w.plain("milan/gateway", 0, Out, request))
			w.datagram("milan/node-1", 1, Out, m)
			w.datagram("wan", 2, In, m)
			w.plain("rome/gateway", 3, In, request)
		}, []SealedPacket{{Host: "milan/gateway", Sealed: true, Passed: 1}}},
		{"lost, then sent again", func(w *tunnelWorld) {
			lost := w.message("A", w.plain("milan/gateway", 0, Out, request))
			w.datagram("milan/gateway", 1, Out, lost)
			m := w.message("A", w.plain("milan/gateway", 500, Out, request))
			w.datagram("milan/gateway", 501, Out, m)
			w.datagram("wan", 502, In, m)
			w.plain("rome/gateway", 503, In, request)
		}, []SealedPacket{{Host: "milan/gateway", Sealed: true, Passed: 1}}},
		{"never came out", func(w *tunnelWorld) {
			m := w.message("A", w.plain("milan/gateway", 0, Out, request))
			w.datagram("milan/gateway", 1, Out, m)
			w.datagram("wan", 2, In, m)
		}, nil},
		{"in clear text only", func(w *tunnelWorld) {
			w.datagram("wan", 2, In, []byte(request))
		}, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := newTunnelWorld(t)
			tc.passes(w)
			passed, _ := w.captures[3].ring.between(time.Time{}, time.Time{})
			got := sealed(w.captures, SealedQuery{Token: token}, passed).Packets
			for i := range got {
				got[i].Time = time.Time{}
			}
			assert.DeepEqual(t, got, tc.want)
		})
	}
}
