package desired

import (
	"net/netip"
	"slices"
	"strings"

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
//
// Where a CNI does not care for the podCIDRs of nodes, these say nothing of a pod that
// has just started. But a packet that has an address of the cluster's pods, and came in by
// a link that leads to nobody but pods of this node, is from one of these; what a pod
// of another node sends comes in by an uplink or the CNI's own overlay. So the first
// packet tells, and the rules stay the same when pods come and go:
//
//	nft add rule … iif != 0 iifname != "liqo.*" iifname != eth0 iifname != vxlan.calico ip saddr 10.0.0.0/16 accept
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
	known := in.knownByLink()
	for _, p := range own.PodCIDRs {
		if p.Addr().Is6() == v6 && !known[p] {
			ours = append(ours, p.Masked())
		}
	}
	slices.SortFunc(ours, comparePrefix)

	rules := in.ownPods(v6)
	fromLinks := len(rules)
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
	if len(rules) == fromLinks {
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

// ownPods returns the rules for packets from pods of the node, whatever their address.
// Such a packet came in by a link that is neither an uplink nor a link of Isthmus.
func (in NodeInput) ownPods(v6 bool) []netstate.FirewallRule {
	if in.Underlay.Uplinks == nil {
		return nil
	}
	by := []netstate.Match{{Dir: "in", Dev: netstate.AnyDev}, {Negate: true, Dir: "in", Dev: linkPrefix + "*"}}
	for _, dev := range in.Underlay.Uplinks {
		if !strings.HasPrefix(dev, linkPrefix) {
			by = append(by, netstate.Match{Negate: true, Dir: "in", Dev: dev})
		}
	}
	networks := slices.Clone(in.own().PodNetworks)
	slices.SortFunc(networks, comparePrefix)
	var rules []netstate.FirewallRule
	for _, p := range networks {
		if p.Addr().Is6() == v6 {
			rules = append(rules, netstate.FirewallRule{
				Name:    "own-pods",
				Matches: append(slices.Clone(by), netstate.Match{Dir: "src", Addr: netstate.RangeOf(p)}),
				Action:  netstate.Action{Kind: netstate.Accept},
			})
		}
	}
	return rules
}

// knownByLink returns those pods of the node that the rules of ownPods are sure to
// see as such, because the way to them is by a link of pods: the rules need not
// name them. A rule that names pods is another one with each that starts, and what
// is in the connection table is compared with it.
func (in NodeInput) knownByLink() map[netip.Prefix]bool {
	known := map[netip.Prefix]bool{}
	if in.Underlay.Uplinks == nil {
		return known
	}
	for _, a := range in.podsOutside() {
		dev := in.Underlay.Devs[a]
		if dev != "" && dev != loopback && !strings.HasPrefix(dev, linkPrefix) && !slices.Contains(in.Underlay.Uplinks, dev) {
			known[hostPrefix(a)] = true
		}
	}
	return known
}
