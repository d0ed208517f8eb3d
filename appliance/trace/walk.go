package trace

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/isthmus-net/isthmus/appliance/netstate"
)

const (
	// maxHops is how many hosts a packet may pass: more than any path has,
	// the tunnels' outer packets included.
	maxHops = 200
	// maxDepth is how many tunnels may be inside each other. Two are meant:
	// the overlay of a cluster never carries WireGuard.
	maxDepth = 4
)

// Walk sends a packet from a program of a host, and returns where it went. The
// memory is that of all hosts, and keeps what this packet leaves behind.
func (w *World) Walk(m *Memory, from string, p Packet) Trace {
	h := w.hosts[from]
	if h == nil {
		return Trace{World: w, From: from, Packet: p, End: End{Kind: Lost, Host: from, Why: "there is no host " + from}}
	}
	k := &walker{World: w, m: m, t: Trace{World: w, From: from, Packet: p}}
	k.walk(place{h: h, p: p})
	return k.t
}

// Arrive is Walk for a packet that comes in by a link of a host, from outside
// of the world.
func (w *World) Arrive(m *Memory, at, dev string, p Packet) Trace {
	h := w.hosts[at]
	if h == nil {
		return Trace{World: w, From: at, Packet: p, End: End{Kind: Lost, Host: at, Why: "there is no host " + at}}
	}
	if p.TTL == 0 {
		p.TTL = firstTTL
	}
	k := &walker{World: w, m: m, t: Trace{World: w, From: at, Packet: p}}
	k.walk(place{h: h, dev: dev, p: p})
	return k.t
}

// Connect lets every WireGuard device that knows where its peer is send to it,
// as their handshakes do, so that the others learn where theirs are. It returns
// these walks.
func (w *World) Connect(m *Memory) []Trace {
	var out []Trace
	for _, h := range w.order {
		for _, dev := range sortedKeys(h.wg) {
			for _, peer := range h.wg[dev].Peers {
				if !peer.Endpoint.IsValid() {
					continue
				}
				k := &walker{World: w, m: m, t: Trace{World: w, From: h.Name}}
				if at, end := k.seal(h, dev, peer, Packet{}, 0); end != nil {
					k.t.End = *end
				} else {
					k.t.Packet = at.p
					k.walk(at)
				}
				out = append(out, k.t)
			}
		}
	}
	return out
}

// A walker follows one packet.
type walker struct {
	*World
	m *Memory
	t Trace
}

// A place is where a packet is: it came in by a link of a host, or a program
// or a tunnel of the host sends it.
type place struct {
	h      *host
	dev    string // empty: the host sends it
	p      Packet
	depth  int
	mark   uint32
	tunnel string // the device whose outer packet it is
	// bridged is where the packet goes on to if the host does nothing but
	// bridge it.
	bridged *place
}

func (k *walker) walk(at place) {

	for range maxHops {
		next, end := k.step(at)
		if end != nil {
			if end.delivered != nil {
				at = *end.delivered
				continue
			}
			k.t.End = *end
			return
		}
		if next.depth > maxDepth {
			k.t.End = End{Kind: Looped, Host: next.h.Name, Why: "a tunnel inside itself: its outer packets are routed into it"}
			return
		}
		at = next
	}
	k.t.End = End{Kind: Looped, Host: at.h.Name, Why: fmt.Sprintf("still on its way after %d hosts", maxHops)}
}

// A transit is a packet on its way through one host.
type transit struct {
	w *walker
	h *host
	p Packet
	// in is the link that the packet came in by, empty for the host's own;
	// inName is what nftables takes for it.
	in, inName string
	out        string
	next       netip.Addr // next hop
	route      decision
	mark       uint32
	ct         direction
	state      ctState
	bridged    bool
	hop        Hop
}

// step takes a packet through one host: to the next one, or to its end.
func (k *walker) step(at place) (place, *End) {
	x := &transit{
		w: k, h: at.h, p: at.p, in: at.dev, inName: at.dev, mark: at.mark,
		hop: Hop{Depth: at.depth, Host: at.h.Name, In: at.dev, Arrived: at.p},
	}
	if about := x.p.about; about.connection != nil { // before any hook (nf_ct_attach)
		x.ct, x.state, x.p.about = about, related, direction{}
	}
	var end *End
	switch {
	case at.dev == "":
		end = x.send(at.tunnel)
	case at.bridged != nil:
		end = x.bridge()
	default:
		end = x.receive()
	}
	var next place
	if end == nil && x.bridged {
		x.note("bridged")
		next = *at.bridged
		next.p = x.p
	} else if end == nil {
		next, end = x.leave(at.depth)
	}
	x.hop.Packet, x.hop.Out, x.hop.Mark = x.p, x.out, x.mark
	if end != nil && end.delivered != nil {
		x.hop.Notes = append(x.hop.Notes, end.Why)
	}
	k.t.Hops = append(k.t.Hops, x.hop)
	return next, end
}

// bridge is what br_netfilter does with a packet between two ports of a bridge:
// it passes the hooks of IP, and is routed only if it has got another
// destination there.
func (x *transit) bridge() *End {
	before := x.p.Dst
	if end := x.run("prerouting"); end != nil {
		return end
	}
	if x.p.Dst != before {
		return x.routed()
	}
	x.out, x.next, x.bridged = x.in, x.p.Dst, true
	if end := x.run("forward"); end != nil {
		return end
	}
	return x.postrouting()
}

// receive is what happens to a packet that came in by a link, until it is
// about to leave again or to be delivered.
func (x *transit) receive() *End {
	if end := x.run("prerouting"); end != nil {
		return end
	}
	return x.routed()
}

// routed is receive without its first part.
func (x *transit) routed() *End {
	if _, own := x.h.local[x.p.Dst]; own {
		if why := x.h.spoofed(x.p, x.in, loopback); why != "" {
			return x.end(Dropped, why)
		}
		return x.deliver()
	}
	if !x.h.forwards(x.in, x.p.Is6()) {
		why := "forwarding is off for " + x.in
		if x.p.Is6() {
			why = "forwarding of IPv6 is off (net.ipv6.conf.all.forwarding)"
		}
		return x.refuse(NoRoute, 0, Dropped, why)
	}
	x.route = x.h.lookup(flow{x.p.Src, x.p.Dst, x.in, x.mark})
	if x.route.err != "" {
		return x.refuse(NoRoute, 0, Unreachable, x.route.err)
	}
	x.out, x.next = x.route.route.Dev, x.route.next(x.p.Dst)
	if why := x.h.spoofed(x.p, x.in, x.out); why != "" {
		return x.end(Dropped, why)
	}
	if x.p.TTL <= 1 {
		return x.refuse(TimeExceeded, 0, Looped, "its TTL is used up")
	}
	x.p.TTL--
	if end := x.fits(); end != nil {
		return end
	}
	if end := x.run("forward"); end != nil {
		return end
	}
	return x.postrouting()
}

// send is what happens to a packet that the host sends itself.
func (x *transit) send(tunnel string) *End {
	if x.p.TTL == 0 {
		x.p.TTL = firstTTL
	}
	if _, own := x.h.local[x.p.Dst]; own {
		return x.sendToSelf()
	}
	if end := x.output(); end != nil {
		return end
	}
	if !x.p.Src.IsValid() {
		x.p.Src = x.h.sourceFor(x.route, x.p.Dst)
		if !x.p.Src.IsValid() {
			return x.end(Lost, "this host has no address to send from")
		}
		if x.p.Proto == TCP { // connect looks again, with the source (ip_route_connect)
			if end := x.output(); end != nil {
				return end
			}
		}
	}
	if end := x.fits(); end != nil {
		return end
	}
	if end := x.run("output"); end != nil {
		return end
	}
	if _, own := x.h.local[x.p.Dst]; own {
		return x.loop()
	}
	// Of a tunnel's outer packet the kernel says in postrouting, and only
	// there, that it came in by the tunnel: ip_output takes skb->dev for it.
	x.inName = tunnel
	return x.postrouting()
}

// output looks up the way of a packet that the host sends.
func (x *transit) output() *End {
	x.route = x.h.lookup(flow{x.p.Src, x.p.Dst, loopback, x.mark})
	if x.route.err != "" {
		return x.end(Unreachable, x.route.err)
	}
	x.out, x.next = x.route.route.Dev, x.route.next(x.p.Dst)
	return nil
}

// reroute looks up the way of a packet that the host sends again, where what
// happened to it in a hook makes the host do so: a chain of type route gave it
// another mark, or its connection has another destination than the sender thinks
// (nf_nat_ipv4_local_fn). What else gives it a mark does not.
func (x *transit) reroute(s step, mark uint32) *End {
	c := x.ct.connection
	again := s.chain.Type == "route" && x.mark != mark ||
		s.isNAT && c != nil && x.state != untracked && c.tuple(x.ct.reply).dst != c.tuple(!x.ct.reply).src
	if _, own := x.h.local[x.p.Dst]; own || !again {
		return nil
	}
	return x.output()
}

// sendToSelf is what happens to a packet for one of the host's own addresses.
func (x *transit) sendToSelf() *End {
	x.out = loopback
	if !x.p.Src.IsValid() {
		x.p.Src = x.p.Dst
	}
	if end := x.run("output"); end != nil {
		return end
	}
	if _, own := x.h.local[x.p.Dst]; !own {
		if end := x.output(); end != nil {
			return end
		}
		return x.postrouting()
	}
	return x.loop()
}

// loop is what happens to a packet that the host sends to itself: it leaves by
// the loopback device, and comes in by it.
func (x *transit) loop() *End {
	x.out = loopback
	if end := x.postrouting(); end != nil {
		return end
	}
	x.in, x.inName = loopback, loopback
	if end := x.run("prerouting"); end != nil {
		return end
	}
	return x.deliver()
}

// fits ends packets that are too large for the way they are to take.
func (x *transit) fits() *End {
	mtu := x.h.mtu(x.route.route)
	x.hop.MTU = mtu
	switch {
	case x.p.Size <= mtu:
		return nil
	case !x.p.dontFragment():
		x.note(fmt.Sprintf("fragmented: %d bytes, mtu %d", x.p.Size, mtu))
		return nil
	case x.in == "":
		return x.end(Dropped, fmt.Sprintf("too big: %d bytes, mtu %d of %s", x.p.Size, mtu, x.out))
	}
	return x.refuse(TooBig, mtu, Dropped, fmt.Sprintf("too big: %d bytes, mtu %d of %s", x.p.Size, mtu, x.out))
}

func (x *transit) postrouting() *End {
	if end := x.run("postrouting"); end != nil {
		return end
	}
	x.confirm()
	return nil
}

// deliver gives a packet to a program of this host, or to a tunnel.
func (x *transit) deliver() *End {
	x.out = ""
	if end := x.run("input"); end != nil {
		return end
	}
	x.confirm()
	if x.p.inside != nil {
		return x.open()
	}
	return x.end(Delivered, "")
}

func (x *transit) confirm() {
	if x.state == fresh {
		x.w.m.confirm(x.h.Name, x.ct.connection)
		x.state = established
	}
}

// leave hands a packet to the host at the other end of the link, or puts it
// into a tunnel.
func (x *transit) leave(depth int) (place, *End) {
	x.hop.Route = x.route.String()
	l, ok := x.h.links[x.out]
	if !ok {
		return place{}, x.end(Lost, fmt.Sprintf("there is no link %s", x.out))
	}
	x.w.t.narrow(depth, x.hop.MTU)
	switch l.Kind {
	case netstate.KindGeneve, netstate.KindVXLAN, netstate.KindWireGuard:
		return x.encapsulate(l, depth)
	}
	if l.segment == "" {
		return place{}, x.end(Left, "leaves the world by "+x.out)
	}
	for _, other := range x.w.segments[l.segment] {
		if other == (port{x.h, x.out}) || !answers(other.host, other.dev, x.next) {
			continue
		}
		to := place{h: other.host, dev: other.dev, p: x.p, depth: depth}
		if bridge, ok := x.w.bridge(l.segment); ok && bridge.host != x.h && bridge.host != other.host {
			return place{h: bridge.host, dev: bridge.dev, p: x.p, depth: depth, bridged: &to}, nil
		}
		return to, nil
	}
	return place{}, x.refuse(NoRoute, 0, Lost, fmt.Sprintf("nobody on %s answers for %s", x.out, x.next))
}

// answers reports whether a host says on a link that it has an address: with
// IPv4 any of its own, with IPv6 one of that link.
func answers(h *host, dev string, a netip.Addr) bool {
	return slices.ContainsFunc(h.addrs, func(own netstate.Address) bool {
		return own.Prefix.Addr() == a && (a.Is4() || own.Dev == dev)
	})
}

// end ends the packet's way here.
func (x *transit) end(kind Kind, why string) *End {
	return &End{Kind: kind, Host: x.h.Name, Dev: x.in, Packet: x.p, Why: why}
}

// refuse ends the packet's way here, and has the host tell its sender.
func (x *transit) refuse(what ICMPKind, mtu int, kind Kind, why string) *End {
	end := x.end(kind, why)
	if x.p.Error() || x.in == "" {
		return end // no errors about errors
	}
	quoted := x.p
	quoted.inside = nil
	answer := Packet{Dst: x.p.Src, Proto: ICMP, ICMP: what, Quoted: &quoted, MTU: mtu, Size: 576}
	if x.ct.connection != nil {
		answer.about = direction{x.ct.connection, !x.ct.reply}
	}
	if x.p.Is6() {
		answer.Proto, answer.Size = ICMPv6, 1280
	}
	end.Answer = &answer
	return end
}

func (x *transit) note(text string) { x.hop.Notes = append(x.hop.Notes, text) }

// rewrote notes what a rule has changed.
func (x *transit) rewrote(before Packet, by string) {
	if what := changes(before, x.p); what != "" {
		x.note(what + ": " + by)
	}
}
