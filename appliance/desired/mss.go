package desired

import (
	"net/netip"
	"slices"

	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// What a segment of TCP has around it without options: the header of IP (20 or
// 40 bytes) and that of TCP (20). The MSS says nothing of options (RFC 6691).
const (
	tcpOverIPv4 = 40
	tcpOverIPv6 = 60
)

// clampToTunnel lets a rule that sets the MSS of what goes through the tunnel to
// what the route allows look at the tunnel too, whichever way the packet goes.
//
// "rt mtu" is the MTU of the way the packet takes, or of the way back to its
// source if that is less, but the way back is looked up as for a packet of the
// gateway itself: not by the rules that lead into the tunnel. So what comes out
// of the tunnel would get the MTU of the link to the node, and its answer would
// not fit. The tunnel's MTU is a number that we know. For the same reason what
// goes into the tunnel looks at the least MTU of the links to nodes: its answer
// may take any of them.
//
//	nft add rule … iifname liqo-tunnel tcp flags & (syn | rst) == syn tcp option maxseg size set 1380
//	nft add rule … iifname liqo-tunnel tcp flags & (syn | rst) == syn tcp option maxseg size set rt mtu
func (h *host) clampToTunnel() {
	var mtu, nodes int
	for _, l := range h.state.Links {
		switch {
		case l.Name == TunnelInterface:
			mtu = l.MTU
		case nodes == 0 || l.MTU < nodes:
			nodes = l.MTU
		}
	}
	for t := range h.state.Tables {
		table := &h.state.Tables[t]
		for c := range table.Chains {
			chain := &table.Chains[c]
			var rules []netstate.FirewallRule
			for _, r := range chain.Rules {
				if r.Action.Kind == netstate.ClampMSS && r.Action.MSS == 0 && slices.ContainsFunc(r.Matches, isTunnel) {
					fits := mtu
					if nodes > 0 && !slices.Contains(r.Matches, netstate.Match{Dir: "in", Dev: TunnelInterface}) {
						fits = min(fits, nodes)
					}
					rules = append(rules, tunnelMSS(table.Family, r, fits)...)
				}
				rules = append(rules, r)
			}
			chain.Rules = rules
		}
	}
}

// isTunnel reports whether a match demands that the packet goes through the
// tunnel.
func isTunnel(m netstate.Match) bool { return m.Dev == TunnelInterface && !m.Negate }

// tunnelMSS returns a rule for each IP family that packets which the rule
// matches may have.
func tunnelMSS(f netstate.Family, r netstate.FirewallRule, mtu int) []netstate.FirewallRule {
	is6, known := r.Is6(f)
	var rules []netstate.FirewallRule
	for _, v6 := range []bool{false, true} {
		if known && is6 != v6 {
			continue
		}
		fixed := r
		fixed.Counter = false // the rule itself counts
		fixed.Action.MSS = uint16(mtu - tcpOverIPv4)
		all := netip.PrefixFrom(netip.IPv4Unspecified(), 0)
		if v6 {
			fixed.Action.MSS, all = uint16(mtu-tcpOverIPv6), netip.PrefixFrom(netip.IPv6Unspecified(), 0)
		}
		if !known { // keeps the rules of the families apart
			fixed.Matches = append([]netstate.Match{{Dir: "src", Addr: netstate.RangeOf(all)}}, r.Matches...)
		}
		rules = append(rules, fixed)
	}
	return rules
}
