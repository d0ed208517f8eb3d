package trace

import (
	"fmt"
	"net/netip"
	"strings"
)

// Transport protocols, as netstate names them.
const (
	TCP    = "tcp"
	UDP    = "udp"
	ICMP   = "icmp"
	ICMPv6 = "icmpv6"
)

// An ICMPKind is what an ICMP or ICMPv6 message says.
type ICMPKind string

// The messages that a walk knows.
const (
	Echo         ICMPKind = "echo"
	EchoReply    ICMPKind = "echo reply"
	NoRoute      ICMPKind = "unreachable"
	Refused      ICMPKind = "port unreachable"
	TooBig       ICMPKind = "too big" // ICMP: fragmentation needed
	TimeExceeded ICMPKind = "time exceeded"
)

// firstTTL is net.ipv4.ip_default_ttl.
const firstTTL = 64

// A Packet is an IP packet, as far as hosts look at it.
type Packet struct {
	Src, Dst netip.Addr // Src invalid: the sending host chooses
	Proto    string
	// SrcPort and DstPort are of TCP and UDP; an echo has its identifier in
	// both.
	SrcPort, DstPort uint16
	ICMP             ICMPKind
	// Quoted is the packet that an ICMP error is about, MTU what TooBig
	// says would fit.
	Quoted *Packet
	MTU    int

	Size int  // of the whole packet in bytes
	DF   bool // never fragment it; always so with IPv6
	MSS  int  // of a TCP SYN, in bytes; 0: it is none
	TTL  int  // 0: as hosts send it

	// inside is what a tunnel's outer packet carries.
	inside *capsule
	// about is the connection of the packet that an ICMP error is about, on
	// the host that makes the error: the kernel attaches it, and looks for none.
	about direction
}

// A capsule is a packet in a tunnel, with what the other end looks at.
type capsule struct {
	p        Packet
	kind     string
	vni      uint32
	mac      [6]byte
	next     netip.Addr // who must answer at the other end; invalid: nobody
	from, to [32]byte   // public keys of WireGuard
	mark     uint32
}

// Is6 reports whether it is an IPv6 packet.
func (p Packet) Is6() bool { return p.Dst.Is6() }

// Error reports whether it is an ICMP message about another packet.
func (p Packet) Error() bool { return p.Quoted != nil }

// dontFragment reports whether a router may not cut the packet.
func (p Packet) dontFragment() bool { return p.DF || p.Is6() }

// Reply is the packet that who gets p sends in answer to it.
func (p Packet) Reply() Packet {
	r := Packet{
		Src: p.Dst, Dst: p.Src, Proto: p.Proto, SrcPort: p.DstPort, DstPort: p.SrcPort,
		Size: p.Size, DF: p.DF, MSS: p.MSS,
	}
	switch p.ICMP {
	case Echo:
		r.ICMP = EchoReply
	case EchoReply:
		r.ICMP = Echo
	}
	return r
}

// Ping returns an echo request.
func Ping(src, dst netip.Addr) Packet {
	p := Packet{Src: src, Dst: dst, Proto: ICMP, ICMP: Echo, SrcPort: 7, DstPort: 7, Size: 84}
	if dst.Is6() {
		p.Proto, p.Size = ICMPv6, 104
	}
	return p
}

// Connect returns the first packet of a TCP connection, of a host whose link
// has an MTU of 1500 bytes.
func Connect(src, dst netip.AddrPort) Packet {
	p := Packet{Src: src.Addr(), Dst: dst.Addr(), Proto: TCP, SrcPort: src.Port(), DstPort: dst.Port(), Size: 60, DF: true, MSS: 1460}
	if dst.Addr().Is6() {
		p.Size, p.MSS = 80, 1440
	}
	return p
}

// Datagram returns a UDP packet of a size.
func Datagram(src, dst netip.AddrPort, size int) Packet {
	return Packet{Src: src.Addr(), Dst: dst.Addr(), Proto: UDP, SrcPort: src.Port(), DstPort: dst.Port(), Size: size}
}

// String returns the packet without names.
func (p Packet) String() string { return p.text(func(netip.Addr) string { return "" }) }

// text returns the packet with the names that its addresses have.
func (p Packet) text(name func(netip.Addr) string) string {
	ports := p.Proto == TCP || p.Proto == UDP
	end := func(a netip.Addr, port uint16) string {
		s := "?"
		switch {
		case a.IsValid() && ports:
			s = netip.AddrPortFrom(a, port).String()
		case a.IsValid():
			s = a.String()
		}
		if n := name(a); a.IsValid() && n != "" {
			s += " (" + n + ")"
		}
		return s
	}
	var b strings.Builder
	b.WriteString(p.Proto)
	if p.ICMP != "" {
		fmt.Fprintf(&b, " %s", p.ICMP)
		if p.ICMP == TooBig {
			fmt.Fprintf(&b, " mtu %d", p.MTU)
		}
	}
	fmt.Fprintf(&b, " %s → %s", end(p.Src, p.SrcPort), end(p.Dst, p.DstPort))
	if p.Quoted != nil {
		fmt.Fprintf(&b, " about [%s]", p.Quoted.text(name))
	}
	return b.String()
}

// A side is one of the two that NAT changes.
type side bool

const (
	source      side = false
	destination side = true
)

// A tuple is what a connection is recognised by, in one direction.
type tuple struct {
	src, dst     netip.Addr
	proto        string
	sport, dport uint16
	icmp         ICMPKind
}

func tupleOf(p Packet) tuple {
	return tuple{p.Src, p.Dst, p.Proto, p.SrcPort, p.DstPort, p.ICMP}
}

// inverted is what an answer looks like.
func (t tuple) inverted() tuple {
	switch t.icmp {
	case Echo:
		t.icmp = EchoReply
	case EchoReply:
		t.icmp = Echo
	}
	t.src, t.dst, t.sport, t.dport = t.dst, t.src, t.dport, t.sport
	return t
}

// rewrite gives one end of the packet the value it has in the tuple.
func (p *Packet) rewrite(e side, t tuple) {
	if e == source {
		p.Src, p.SrcPort = t.src, t.sport
	} else {
		p.Dst, p.DstPort = t.dst, t.dport
	}
	if p.ICMP == Echo || p.ICMP == EchoReply { // the identifier belongs to no end
		p.SrcPort, p.DstPort = t.sport, t.sport
	}
}
