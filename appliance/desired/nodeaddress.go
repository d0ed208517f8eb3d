package desired

import (
	"net/netip"
	"slices"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// NodeAddressTable is the nftables table that every node has of itself.
const NodeAddressTable = "node-address"

// beforeBypass orders a nat chain before that of the masquerade bypass (-150,
// plan), and that before those of CNIs.
const beforeBypass = -160

// nodeAddress gives whatever this node sends to a peer and is from no pod of
// its own the address of the node: clients of NodePorts, pods of other nodes
// that come by this one, processes of the host with an address that nobody else
// can answer to. Then the answer comes back to this node, which knows whom it is
// for, and two nodes never send the same tuple: they would share one entry in
// the connection table of the gateway, and one of them would get both answers.
//
// What other nodes send by the VXLAN overlay has got its address there.
//
//	nft add rule … ip saddr != 10.0.1.0/24 ip saddr != 10.80.0.4 ip daddr 10.1.0.0/16 snat ip to 10.80.0.4
func (h *host) nodeAddress(in NodeInput) {
	own := in.own()
	if !own.InternalIP.IsValid() || own.PodCIDRs == nil {
		return
	}
	v6 := own.InternalIP.Is6()
	var remote []netip.Prefix
	for _, f := range in.Fabrics {
		for _, p := range f.RemoteCIDRs {
			if !f.Deleting && p.Addr().Is6() == v6 {
				remote = append(remote, p.Masked())
			}
		}
	}
	slices.SortFunc(remote, comparePrefix)
	ours := []netip.Prefix{hostPrefix(own.InternalIP)}
	for _, p := range own.PodCIDRs {
		if p.Addr().Is6() == v6 {
			ours = append(ours, p.Masked())
		}
	}
	slices.SortFunc(ours, comparePrefix)

	var rules []netstate.FirewallRule
	for _, p := range slices.Compact(remote) {
		rule := netstate.FirewallRule{
			Name:   "unknown-source",
			Action: netstate.Action{Kind: netstate.SNAT, To: hostPrefix(own.InternalIP)},
		}
		if in.Overlay() == cluster.OverlayVXLAN {
			rule.Matches = append(rule.Matches, netstate.Match{Negate: true, Dir: "in", Dev: VXLANInterface})
		}
		for _, o := range slices.Compact(ours) {
			rule.Matches = append(rule.Matches, netstate.Match{Negate: true, Dir: "src", Addr: netstate.RangeOf(o)})
		}
		rule.Matches = append(rule.Matches, netstate.Match{Dir: "dst", Addr: netstate.RangeOf(p)})
		rules = append(rules, rule)
	}
	if len(rules) == 0 {
		return
	}
	h.state.Tables = append(h.state.Tables, netstate.Table{
		Family: netstate.FamilyINET, Name: NodeAddressTable,
		Chains: []netstate.Chain{{
			Name: "postrouting", Type: "nat", Hook: "postrouting",
			Priority: beforeBypass, Policy: "accept", Rules: rules,
		}},
	})
}
