package desired

import (
	"fmt"
	"net/netip"
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
