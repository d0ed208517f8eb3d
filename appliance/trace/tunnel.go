package trace

import (
	"fmt"
	"hash/fnv"
	"net/netip"

	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// What tunnels add to a packet besides the outer IP header: UDP (8), then for
// Geneve and VXLAN their header (8) and the inner Ethernet header (14), for
// WireGuard its header and tag (32).
const (
	overlayOverhead   = 8 + 8 + 14
	wireGuardOverhead = 8 + 32
)

// encapsulate puts a packet into the tunnel that its route leads to.
func (x *transit) encapsulate(l link, depth int) (place, *End) {
	switch l.Kind {
	case netstate.KindWireGuard:
		peer, ok := peerFor(x.h.wg[l.Name], x.p.Dst)
		if !ok {
			return place{}, x.refuse(NoRoute, 0, Dropped, fmt.Sprintf("no peer of %s has %s in its AllowedIPs", l.Name, x.p.Dst))
		}
		at, end := x.w.seal(x.h, l.Name, peer, x.p, depth)
		if end != nil {
			// WireGuard in the kernel tells the sender (wg_xmit). That in user space
			// does not, and the model does not know which one it is.
			return place{}, x.refuse(NoRoute, 0, end.Kind, end.Why)
		}
		x.note(fmt.Sprintf("wireguard %s to %s", l.Name, netip.AddrPortFrom(at.p.Dst, at.p.DstPort)))
		x.w.t.outer(depth+1, at.p.Size-x.p.Size)
		return at, nil
	case netstate.KindVXLAN:
		mac, ok := x.neighbor(l.Name, x.next)
		if !ok {
			return place{}, x.refuse(NoRoute, 0, Lost, fmt.Sprintf("%s has no neighbour %s", l.Name, x.next))
		}
		for _, e := range x.h.State.FDB {
			if e.Dev == l.Name && e.MAC == mac {
				return x.overlay(depth, capsule{kind: "vxlan", vni: l.VXLAN.VNI, mac: mac}, l.VXLAN.Local, e.Remote, l.VXLAN.Port)
			}
		}
		return place{}, x.end(Lost, fmt.Sprintf("%s has no fdb entry for %s, the neighbour %s", l.Name, mac, x.next))
	}
	mac, _ := x.neighbor(l.Name, x.next) // else it asks who has the address
	return x.overlay(depth, capsule{kind: "geneve", vni: l.Geneve.VNI, mac: mac, next: x.next}, netip.Addr{}, l.Geneve.Remote, l.Geneve.Port)
}

func (x *transit) neighbor(dev string, a netip.Addr) (netstate.MAC, bool) {
	for _, n := range x.h.State.Neighbors {
		if n.Dev == dev && n.Addr == a {
			return n.MAC, true
		}
	}
	return netstate.MAC{}, false
}

// overlay makes the outer packet of a Geneve or VXLAN link. It keeps the mark
// of the inner one.
func (x *transit) overlay(depth int, c capsule, local, remote netip.Addr, port uint16) (place, *End) {
	c.p, c.mark = x.p, x.mark
	outer := Packet{
		Src: local, Dst: remote, Proto: UDP, SrcPort: flowPort(x.p), DstPort: port,
		Size: x.p.Size + overlayOverhead + ipHeader(remote), inside: &c,
	}
	x.note(fmt.Sprintf("%s vni %d to %s", c.kind, c.vni, remote))
	x.w.t.outer(depth+1, outer.Size-x.p.Size)
	return place{h: x.h, p: outer, depth: depth + 1, mark: x.mark, tunnel: x.out}, nil
}

// seal makes the outer packet of a WireGuard device to one of its peers.
func (k *walker) seal(h *host, dev string, peer netstate.WireGuardPeer, p Packet, depth int) (place, *End) {
	to := peer.Endpoint
	if learned, ok := k.m.endpoints[peerOf{h.Name, dev, peer.PublicKey}]; ok {
		to = learned
	}
	if !to.IsValid() {
		return place{}, &End{Kind: Dropped, Host: h.Name, Why: fmt.Sprintf("%s does not know yet where its peer is", dev)}
	}
	own := h.wg[dev]
	outer := Packet{
		Dst: to.Addr(), Proto: UDP, SrcPort: own.ListenPort, DstPort: to.Port(),
		Size:   p.Size + wireGuardOverhead + ipHeader(to.Addr()),
		inside: &capsule{p: p, kind: "wireguard", from: own.PublicKey, to: peer.PublicKey},
	}
	return place{h: k.socketHost(h, h.links[dev]), p: outer, depth: depth + 1, tunnel: dev}, nil
}

// peerFor returns the peer whose AllowedIPs have the longest prefix for an
// address.
func peerFor(w netstate.WireGuard, a netip.Addr) (best netstate.WireGuardPeer, ok bool) {
	bits := -1
	for _, p := range w.Peers {
		for _, allowed := range p.AllowedIPs {
			if allowed.Contains(a) && allowed.Bits() > bits {
				best, bits, ok = p, allowed.Bits(), true
			}
		}
	}
	return best, ok
}

func ipHeader(a netip.Addr) int {
	if a.Is6() {
		return 40
	}
	return 20
}

// flowPort is the source port of an outer packet: one for each flow
// (udp_flow_src_port).
func flowPort(p Packet) uint16 {
	sum := fnv.New32a()
	fmt.Fprint(sum, tupleOf(p))
	return firstPort + uint16(sum.Sum32()%28232)
}

// open takes a packet out of a tunnel. The packet goes on from there, unless
// no tunnel of this host is for it.
func (x *transit) open() *End {
	c := *x.p.inside
	p := c.p
	at := place{h: x.h, p: p, depth: x.hop.Depth - 1}
	switch c.kind {
	case "wireguard":
		e, ok := x.h.listen[x.p.DstPort]
		if !ok {
			return x.end(Dropped, fmt.Sprintf("no WireGuard device listens at port %d", x.p.DstPort))
		}
		return x.unseal(e, c, at)
	case "vxlan":
		for _, l := range x.h.State.Links {
			if l.Kind == netstate.KindVXLAN && l.VXLAN.VNI == c.vni && l.VXLAN.Port == x.p.DstPort {
				if l.MAC != c.mac {
					return x.end(Dropped, fmt.Sprintf("%s has another address than %s", l.Name, netstate.MAC(c.mac)))
				}
				at.dev, at.mark = l.Name, x.mark
				return x.opened(at)
			}
		}
		return x.end(Dropped, fmt.Sprintf("no VXLAN link for vni %d at port %d", c.vni, x.p.DstPort))
	}
	for _, l := range x.h.State.Links {
		if l.Kind != netstate.KindGeneve || l.Geneve.VNI != c.vni || l.Geneve.Remote != x.p.Src || l.Geneve.Port != x.p.DstPort {
			continue
		}
		switch {
		case c.mac == [6]byte{} && !answers(x.h, l.Name, c.next):
			return x.end(Lost, fmt.Sprintf("nobody on %s answers for %s", l.Name, c.next))
		case c.mac != [6]byte{} && l.MAC != c.mac:
			return x.end(Dropped, fmt.Sprintf("%s has another address than %s", l.Name, netstate.MAC(c.mac)))
		}
		at.dev, at.mark = l.Name, x.mark
		return x.opened(at)
	}
	return x.end(Dropped, fmt.Sprintf("no Geneve link for vni %d from %s at port %d", c.vni, x.p.Src, x.p.DstPort))
}

// unseal is WireGuard's look at a packet that it got.
func (x *transit) unseal(e endpoint, c capsule, at place) *End {
	d := e.host.wg[e.dev]
	if d.PublicKey != c.to {
		return x.end(Dropped, fmt.Sprintf("%s of %s has another key than the sender thinks", e.dev, e.host.Name))
	}
	var from *netstate.WireGuardPeer
	for i := range d.Peers {
		if d.Peers[i].PublicKey == c.from {
			from = &d.Peers[i]
		}
	}
	if from == nil {
		return x.end(Dropped, fmt.Sprintf("%s of %s does not know the sender's key", e.dev, e.host.Name))
	}
	if x.w.m.endpoints == nil {
		x.w.m.endpoints = map[peerOf]netip.AddrPort{}
	}
	x.w.m.endpoints[peerOf{e.host.Name, e.dev, c.from}] = netip.AddrPortFrom(x.p.Src, x.p.SrcPort)
	if !c.p.Dst.IsValid() { // a keepalive
		return x.end(Delivered, "to "+e.dev+" of "+e.host.Name)
	}
	if allowed, ok := peerFor(d, c.p.Src); !ok || allowed.PublicKey != c.from {
		end := x.end(Dropped, fmt.Sprintf("the peer of %s may not send from %s (AllowedIPs)", e.dev, c.p.Src))
		end.Packet = c.p
		return end
	}
	at.h, at.dev = e.host, e.dev
	return x.opened(at)
}

// opened lets the walk go on with what was in a tunnel.
func (x *transit) opened(at place) *End {
	return &End{Why: "for " + at.dev + " of " + at.h.Name, delivered: &at}
}
