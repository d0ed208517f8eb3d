package world

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"github.com/gopacket/gopacket/pcapgo"
	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
	"gotest.tools/v3/poll"

	"github.com/isthmus-net/isthmus/appliance/nettest"
	"github.com/isthmus-net/isthmus/lab/internal/pods"
)

const token = "5ca1ab1e5ca1ab1e"

func frame(t *testing.T, l ...gopacket.SerializableLayer) []byte {
	t.Helper()
	b := gopacket.NewSerializeBuffer()
	assert.NilError(t, gopacket.SerializeLayers(b, gopacket.SerializeOptions{FixLengths: true}, l...))
	return bytes.Clone(b.Bytes())
}

func TestDecodeFindsTheInnermost(t *testing.T) {
	mac := net.HardwareAddr{2, 0, 0, 0, 0, 1}
	eth := func(proto layers.EthernetType) *layers.Ethernet {
		return &layers.Ethernet{SrcMAC: mac, DstMAC: mac, EthernetType: proto}
	}
	ip4 := func(src, dst string, proto layers.IPProtocol) *layers.IPv4 {
		return &layers.IPv4{Version: 4, TTL: 64, Protocol: proto, SrcIP: net.ParseIP(src).To4(), DstIP: net.ParseIP(dst).To4()}
	}
	ip6 := &layers.IPv6{Version: 6, NextHeader: layers.IPProtocolUDP, SrcIP: net.ParseIP("fd00::1"), DstIP: net.ParseIP("fd00::2")}
	udp := func(src, dst layers.UDPPort) *layers.UDP { return &layers.UDP{SrcPort: src, DstPort: dst} }
	text := gopacket.Payload(token + ">")
	inner := frame(t, eth(layers.EthernetTypeIPv4), ip4("10.0.0.5", "10.1.0.6", layers.IPProtocolTCP), &layers.TCP{SrcPort: 999, DstPort: 8080, DataOffset: 5}, text)
	geneve := append([]byte{0x01, 0, 0x65, 0x58, 0, 0, 7, 0, 1, 2, 3, 4}, inner...) // one word of options
	vxlan := append([]byte{0x08, 0, 0, 0, 0, 0, 7, 0}, inner...)
	echo := func(kind uint8) []byte {
		return frame(t, eth(layers.EthernetTypeIPv4), ip4("10.0.0.5", "10.1.0.6", layers.IPProtocolICMPv4), &layers.ICMPv4{TypeCode: layers.CreateICMPv4TypeCode(kind, 0)}, text)
	}
	echo6 := func(kind uint8) []byte {
		ip := &layers.IPv6{Version: 6, NextHeader: layers.IPProtocolICMPv6, SrcIP: ip6.SrcIP, DstIP: ip6.DstIP}
		return frame(t, ip, &layers.ICMPv6{TypeCode: layers.CreateICMPv6TypeCode(kind, 0)}, &layers.ICMPv6Echo{}, text)
	}
	quoted := frame(t, ip4("10.0.0.5", "10.1.0.6", layers.IPProtocolUDP), udp(1, 2), text)

	for _, tt := range []struct {
		name     string
		hatype   uint16
		protocol uint16
		data     []byte
		want     string // outer, its addresses, src, dst, proto, marker
	}{
		{"plain", unix.ARPHRD_ETHER, 0, inner, " invalid IP invalid IP 10.0.0.5:999 10.1.0.6:8080 tcp >"},
		{"Geneve", unix.ARPHRD_ETHER, 0,
			frame(t, eth(layers.EthernetTypeIPv4), ip4("172.18.1.11", "10.0.0.9", layers.IPProtocolUDP), udp(5555, geneveOurs), gopacket.Payload(geneve)),
			"geneve 172.18.1.11 10.0.0.9 10.0.0.5:999 10.1.0.6:8080 tcp >"},
		{"VXLAN", unix.ARPHRD_ETHER, 0,
			frame(t, eth(layers.EthernetTypeIPv4), ip4("172.18.1.11", "172.18.1.12", layers.IPProtocolUDP), udp(5555, vxlanOurs), gopacket.Payload(vxlan)),
			"vxlan 172.18.1.11 172.18.1.12 10.0.0.5:999 10.1.0.6:8080 tcp >"},
		{"WireGuard's device has no link layer", unix.ARPHRD_NONE, unix.ETH_P_IPV6, frame(t, ip6, udp(7, 8), text), " invalid IP invalid IP [fd00::1]:7 [fd00::2]:8 udp >"},
		{"an ICMP error that quotes it", unix.ARPHRD_ETHER, 0,
			frame(t, eth(layers.EthernetTypeIPv4), ip4("10.9.0.1", "10.0.0.5", layers.IPProtocolICMPv4), &layers.ICMPv4{TypeCode: layers.CreateICMPv4TypeCode(3, 4)}, gopacket.Payload(quoted)),
			" invalid IP invalid IP 10.9.0.1:0 10.0.0.5:0 icmp !"},
		{"an echo request", unix.ARPHRD_ETHER, 0, echo(layers.ICMPv4TypeEchoRequest), " invalid IP invalid IP 10.0.0.5:0 10.1.0.6:0 icmp >"},
		{"an echo reply, which repeats the request's payload", unix.ARPHRD_ETHER, 0, echo(layers.ICMPv4TypeEchoReply), " invalid IP invalid IP 10.0.0.5:0 10.1.0.6:0 icmp <"},
		{"an ICMPv6 echo request", unix.ARPHRD_NONE, unix.ETH_P_IPV6, echo6(layers.ICMPv6TypeEchoRequest), " invalid IP invalid IP [fd00::1]:0 [fd00::2]:0 icmpv6 >"},
		{"an ICMPv6 echo reply", unix.ARPHRD_NONE, unix.ETH_P_IPV6, echo6(layers.ICMPv6TypeEchoReply), " invalid IP invalid IP [fd00::1]:0 [fd00::2]:0 icmpv6 <"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := &capture{ring: newRing(1 << 20)}
			c.ring.add(packet{time: time.Now(), hatype: tt.hatype, protocol: tt.protocol, data: tt.data, length: len(tt.data)})
			got := c.sightings("h", SightingQuery{Token: token})
			assert.Equal(t, len(got), 1)
			s := got[0]
			assert.Equal(t, fmt.Sprint(s.Outer, " ", s.OuterSrc, " ", s.OuterDst, " ", s.Src, " ", s.Dst, " ", s.Proto, " ", s.Marker), tt.want)
		})
	}
}

// Damaged and short packets are shown as what they are, and do no harm.
func FuzzDecode(f *testing.F) {
	f.Add([]byte{0x01, 0, 0x65, 0x58, 0, 0, 7, 0}, uint16(unix.ARPHRD_ETHER), uint16(unix.ETH_P_IP))
	f.Add([]byte{0x45}, uint16(unix.ARPHRD_NONE), uint16(unix.ETH_P_IP))
	f.Fuzz(func(t *testing.T, data []byte, hatype, protocol uint16) {
		if d := decode(packet{data: data, hatype: hatype, protocol: protocol}); d.proto == "" {
			t.Errorf("no proto for %x", data)
		}
	})
}

func TestRingKeepsTheNewest(t *testing.T) {
	r := newRing(100 * (packetOverhead + 4))
	start := time.Now()
	at := func(i int) time.Time { return start.Add(time.Duration(i) * time.Millisecond) }
	for i := range 5000 {
		r.add(packet{time: at(i), data: []byte(fmt.Sprintf("%04d", i))})
	}
	all, lost := r.between(time.Time{}, time.Time{})
	assert.Equal(t, len(all), 100)
	assert.Equal(t, string(all[0].data), "4900")
	assert.Equal(t, lost, 4900)
	some, lost := r.between(at(4950), at(4959))
	assert.Equal(t, len(some), 10)
	assert.Equal(t, lost, 0, "what was lost is older")
	_, lost = r.between(at(4000), time.Time{})
	assert.Equal(t, lost, 4900, "an absence would prove nothing")
}

func TestCaptureOfANamespace(t *testing.T) {
	nettest.NeedRoot(t)
	a, err := NewNamespace()
	assert.NilError(t, err)
	defer a.Close()
	b, err := NewNamespace()
	assert.NilError(t, err)
	defer b.Close()
	c, err := startCapture(a.File, "a", []netip.AddrPort{netip.MustParseAddrPort("10.96.0.1:443")})
	assert.NilError(t, err)
	// Links that come later are captured too, and known by the name they got.
	assert.NilError(t, Wire(a, "tmp0", b, "eth0"))
	assert.NilError(t, a.rename("tmp0", "late0"))
	assert.NilError(t, a.up("late0"))
	assert.NilError(t, a.AddAddress("late0", netip.MustParsePrefix("192.0.2.1/24")))
	assert.NilError(t, b.AddAddress("eth0", netip.MustParsePrefix("192.0.2.2/24")))
	send := func(n *Namespace, network, to string) {
		err := n.Do(func() error {
			conn, err := net.DialTimeout(network, to, 10*time.Second)
			if err != nil {
				return err
			}
			defer conn.Close()
			_, err = conn.Write([]byte(token + ">"))
			return err
		})
		assert.NilError(t, err)
	}
	listen := func(port string) {
		assert.NilError(t, b.Do(func() error {
			l, err := net.Listen("tcp", "192.0.2.2:"+port)
			if err == nil {
				t.Cleanup(func() { l.Close() })
			}
			return err
		}))
	}
	listen("6443")
	listen("8443")
	send(a, "tcp", "192.0.2.2:6443")
	send(b, "udp", "192.0.2.1:9")
	send(a, "tcp", "192.0.2.2:8443")
	var got []string
	poll.WaitOn(t, func(poll.LogT) poll.Result {
		got = nil
		for _, s := range c.sightings("a", SightingQuery{Token: token}) {
			if s.Marker != MarkerError { // nobody listens on the port
				got = append(got, fmt.Sprintf("%s %s %s %d", s.Interface, s.Direction, s.Proto, s.Dst.Port()))
			}
		}
		if len(got) < 2 || slices.ContainsFunc(got, func(s string) bool { return !strings.HasPrefix(s, "late0 ") }) {
			return poll.Continue("%v", got) // the new name of the link comes by another socket, perhaps later
		}
		return poll.Success()
	}, poll.WithTimeout(time.Minute))
	assert.Check(t, is.DeepEqual(got, []string{"late0 in udp 9", "late0 out tcp 8443"}), "the control plane's port is left out")

	// Paused it sees nothing, and an absence proves nothing; then it goes on.
	ports := func() (seen []uint16) {
		for _, s := range c.sightings("a", SightingQuery{Token: token}) {
			if s.Proto == "udp" && s.Marker != MarkerError {
				seen = append(seen, s.Dst.Port())
			}
		}
		return seen
	}
	paused := time.Now()
	assert.NilError(t, c.pause())
	send(b, "udp", "192.0.2.1:10")
	assert.NilError(t, c.resume())
	send(b, "udp", "192.0.2.1:11")
	poll.WaitOn(t, func(poll.LogT) poll.Result {
		if seen := ports(); len(seen) < 2 {
			return poll.Continue("%v", seen)
		}
		return poll.Success()
	})
	assert.DeepEqual(t, ports(), []uint16{9, 11})
	_, lost := c.between(paused, time.Time{})
	assert.Assert(t, lost > 0)

	c.close()
	var file bytes.Buffer
	assert.NilError(t, writePcap(&file, []namedCapture{{"host", c}}))
	r, err := pcapgo.NewNgReader(&file, pcapgo.NgReaderOptions{WantMixedLinkType: true})
	assert.NilError(t, err)
	last, n := time.Time{}, 0
	for {
		_, ci, err := r.ReadPacketData()
		if err != nil {
			break
		}
		assert.Check(t, !ci.Timestamp.Before(last), "in the order of time")
		last = ci.Timestamp
		n++
	}
	packets, _ := c.between(time.Time{}, time.Time{})
	assert.Equal(t, n, len(packets))
}

// TestCaptureOfABurst sends many packets while nobody reads them. Who asks has
// all of them, at once.
func TestCaptureOfABurst(t *testing.T) {
	nettest.NeedRoot(t)
	n, err := NewNamespace()
	assert.NilError(t, err)
	defer n.Close()
	c, err := startCapture(n.File, "a", nil)
	assert.NilError(t, err)
	defer c.close()
	const many = 5000
	began := time.Now()
	assert.NilError(t, n.Do(func() error {
		to, err := net.ListenPacket("udp", "127.0.0.1:0") // so that nothing is refused
		if err != nil {
			return err
		}
		defer to.Close()
		conn, err := net.Dial("udp", to.LocalAddr().String())
		if err != nil {
			return err
		}
		defer conn.Close()
		for range many {
			if _, err := conn.Write([]byte(token + ">")); err != nil {
				return err
			}
		}
		return nil
	}))
	directions := map[Direction]int{}
	for _, s := range c.sightings("a", SightingQuery{Token: token}) {
		directions[s.Direction]++
	}
	assert.DeepEqual(t, directions, map[Direction]int{In: many, Out: many})
	_, lost := c.between(began, time.Time{})
	assert.Equal(t, lost, 0)
}

// TestPauseCaptures pauses by a request, and goes on when it has ended, also
// for captures that were started in between.
func TestPauseCaptures(t *testing.T) {
	nettest.NeedRoot(t)
	a := &agent{registry: pods.NewRegistry(), cfg: AgentConfig{Logger: slog.New(slog.DiscardHandler)}}
	capture := func(name string) *Namespace {
		n, err := NewNamespace()
		assert.NilError(t, err)
		assert.NilError(t, a.captures.Start(n.File, name, func() string { return name }, nil))
		t.Cleanup(func() {
			a.captures.End(name)
			assert.NilError(t, n.Close())
		})
		return n
	}
	// send sends a packet over a loopback; captured tells whether it is known.
	sent := 0
	send := func(n *Namespace) (word string) {
		sent++
		word = fmt.Sprintf("%s%04d", token, sent)
		assert.NilError(t, n.Do(func() error {
			conn, err := net.Dial("udp", "127.0.0.1:9")
			if err != nil {
				return err
			}
			defer conn.Close()
			_, err = conn.Write([]byte(word + ">"))
			return err
		}))
		return word
	}
	captured := func(word string) bool {
		got, err := a.captures.Sightings(SightingQuery{Token: word})
		assert.NilError(t, err)
		return len(got) > 0
	}
	server := httptest.NewServer(a.routes(t.Context()))
	defer server.Close()
	client := newClient(func(ctx context.Context) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "tcp", server.Listener.Addr().String())
	})
	await := func(n *Namespace) {
		poll.WaitOn(t, func(poll.LogT) poll.Result {
			if word := send(n); !captured(word) {
				return poll.Continue("%s is not captured", word)
			}
			return poll.Success()
		})
	}

	early := capture("early")
	await(early)
	resume, err := client.PauseCaptures(t.Context())
	assert.NilError(t, err)
	late := capture("late")
	meanwhile := []string{send(early), send(late)}
	assert.NilError(t, resume())
	await(early) // packets are captured in their order
	await(late)
	for _, word := range meanwhile {
		assert.Assert(t, !captured(word), word)
	}
}
