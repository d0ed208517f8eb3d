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
