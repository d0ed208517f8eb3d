package desired

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// FallbackMTU is the MTU of a link of ours when nothing is known of the
// network below it. It fits into an underlay of 1420 bytes.
const FallbackMTU = 1340

// minUnderlay is the least MTU of a network below that is believed: every
// IPv4 host takes packets of that size (RFC 791).
const minUnderlay = 576

// What a tunnel adds to a packet: an outer IP header (20 or 40 bytes), UDP
// (8), then for Geneve its header without options (8), as long as that of
// VXLAN, and the inner Ethernet header (14), for WireGuard its header and tag
// (32).
const (
	geneveOverIPv4    = 50
	geneveOverIPv6    = 70
	wireGuardOverIPv4 = 60
	wireGuardOverIPv6 = 80
)

// GeneveMTU returns the MTU of a Geneve link over an underlay of that MTU (0:
// not known) to a remote address.
func GeneveMTU(underlay int, remote netip.Addr) int {
	return deriveMTU(underlay, remote, geneveOverIPv4, geneveOverIPv6)
}

// VXLANMTU returns the MTU of a VXLAN link over an underlay of that MTU (0:
// not known) to a remote address.
func VXLANMTU(underlay int, remote netip.Addr) int { return GeneveMTU(underlay, remote) }

// WireGuardMTU returns the MTU of a WireGuard link over an underlay of that
// MTU (0: not known). An invalid remote, of a peer that has yet to dial us,
// may be of either family.
func WireGuardMTU(underlay int, remote netip.Addr) int {
	return deriveMTU(underlay, remote, wireGuardOverIPv4, wireGuardOverIPv6)
}

func deriveMTU(underlay int, remote netip.Addr, v4, v6 int) int {
	overhead := v6
	if remote.Unmap().Is4() {
		overhead = v4
	}
	if underlay < minUnderlay {
		return FallbackMTU
	}
	return underlay - overhead
}

// ChooseMTU returns the explicit MTU if there is one, else the derived one.
// The problem says that the explicit one does not fit.
func ChooseMTU(explicit, derived int) (mtu int, problem string) {
	if explicit <= 0 {
		return derived, ""
	}
	if explicit > derived {
		problem = fmt.Sprintf("mtu %d is more than the %d bytes that fit into the network below: larger packets are fragmented or lost; write %d or less, or 0 to have it derived",
			explicit, derived, derived)
	}
	return explicit, problem
}

// peerAddr is where the peer is, as far as that is known.
func (in GatewayInput) peerAddr() netip.Addr {
	if in.PeerHeard.IsValid() {
		return in.PeerHeard
	}
	return in.PeerEndpoint.Addr()
}

// Room returns the longest packet that the network below the gateway has room
// for in the tunnel: what the peer is told.
func (in GatewayInput) Room() int {
	peer := in.peerAddr()
	outer := peer
	if !outer.IsValid() {
		outer = in.PodIP
	}
	return WireGuardMTU(in.Underlay.To(peer), outer)
}

// OwnMTU returns the MTU that the tunnel would have if the peer said nothing, and no more
// than the network below has room for: what the peer is told. What the peer says is no part
// of it, or a path that became smaller for a while would stay so for good: each would have
// it from the other.
func (in GatewayInput) OwnMTU() int {
	mtu, _ := ChooseMTU(in.MTU, in.Room())
	return min(mtu, in.Room())
}

// TunnelMTU returns the MTU of the gateway's tunnel. It is no more than the
// peer has room for: WireGuard pads packets to a multiple of
// 16 bytes, but to no more than the MTU of its own link, so what is as long as
// the peer's MTU and goes through a longer one may not fit (whitepaper, 5.4.6;
// calculate_skb_padding, drivers/net/wireguard/send.c). Without a word from the
// peer, its room is what ours is. The problem is that of an MTU that somebody
// wrote.
func (in GatewayInput) TunnelMTU() (mtu int, problem string) {
	room := in.Room()
	switch {
	case in.PeerMTU < minUnderlay-wireGuardOverIPv6, in.PeerMTU >= room: // it says nothing, or nothing to be believed
		return ChooseMTU(in.MTU, room)
	case in.MTU > in.PeerMTU:
		problem = fmt.Sprintf("mtu %d is more than the %d bytes that the peer has room for, so the tunnel has %[2]d; write %[2]d or less, or 0 to have it derived", in.MTU, in.PeerMTU)
		return in.PeerMTU, problem
	case in.MTU > 0:
		return in.MTU, ""
	}
	return in.PeerMTU, ""
}

// pathMTU gives the routes to peers the MTU of the tunnel that they lead to,
// where the link takes more: processes of the node know it from the start, and
// pods learn it from the node, one hop away, and not from a gateway. The routes
// do not keep that for granted ("lock"), so a router further on may say less.
//
//	ip route add 10.1.0.0/16 via 10.80.0.5 dev liqo.rome mtu 1440 onlink
func (h *host) pathMTU(fabrics []cluster.InternalFabric) {
	links := map[string]int{}
	for _, l := range h.state.Links {
		links[l.Name] = l.MTU
	}
	for _, f := range fabrics {
		if f.Deleting || f.TunnelMTU == 0 {
			continue
		}
		via := f.InternalIP
		if hop := h.hops[via]; hop.via.IsValid() {
			via = hop.via
		}
		for i := range h.state.Routes {
			r := &h.state.Routes[i]
			toPeer := slices.ContainsFunc(f.RemoteCIDRs, func(p netip.Prefix) bool {
				return p.Bits() <= r.Dst.Bits() && p.Contains(r.Dst.Addr())
			})
			if link := links[r.Dev]; toPeer && r.Type == netstate.Unicast && r.Via == via && (link == 0 || f.TunnelMTU < link) {
				r.MTU = f.TunnelMTU
			}
		}
	}
}
