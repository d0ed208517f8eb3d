package desired

import (
	"net/netip"
	"slices"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// UnknownPodsTable is the nftables table of a gateway that refuses what the peer sends
// to pods that no route knows.
const UnknownPodsTable = "unknown-pods"

// unknownPods lets a gateway with links to nodes forward what pods send that no route
// knows yet, in clusters whose pods are outside of the podCIDRs of their nodes. The
// answers are led to the pod's node by the mark of their connection (plan,
// service-nodeport-routing). But the reverse-path filter of IPv4 asks without a mark
// whether there is any way back to the source of the pod's packets, and drops them if
// there is none. So this adds a last route for that filter alone, back into the tunnel.
// No packet takes it: a rule drops what would go from the tunnel into the tunnel.
//
//	ip rule add iif liqo-tunnel to 10.0.0.0/16 priority 389 lookup 90
//	ip route add 10.0.0.0/16 dev liqo-tunnel table 90
//	nft add rule … iifname liqo-tunnel oifname liqo-tunnel counter drop
func (h *host) unknownPods(in GatewayInput) {
	if in.HostInterface != "" || in.Overlay() != cluster.OverlayGeneve {
		return // the main table knows them
	}
	var pods []netip.Prefix
	for _, n := range living(in.Nodes, func(n cluster.InternalNode) cluster.Meta { return n.Meta }) {
		for _, p := range n.PodNetworks {
			if p.Addr().Is4() {
				pods = append(pods, p.Masked())
			}
		}
	}
	slices.SortFunc(pods, comparePrefix)
	pods = slices.Compact(pods)
	for _, p := range pods {
		h.state.Routes = append(h.state.Routes, netstate.Route{Dst: p, Dev: TunnelInterface, Scope: netstate.ScopeLink, Table: h.unknownPodsTable})
		h.state.Rules = append(h.state.Rules, netstate.Rule{Priority: h.base + unknownPods, Dst: p, IIF: TunnelInterface, Table: h.unknownPodsTable})
	}
	if len(pods) == 0 {
		return
	}
	h.state.Tables = append(h.state.Tables, netstate.Table{
		Family: netstate.FamilyINET, Name: UnknownPodsTable,
		Chains: []netstate.Chain{{
			Name: "forward", Type: "filter", Hook: "forward", Priority: beforeDestinationNAT, Policy: "accept",
			Rules: []netstate.FirewallRule{{
				Name:    "unknown-pod",
				Matches: []netstate.Match{{Dir: "in", Dev: TunnelInterface}, {Dir: "out", Dev: TunnelInterface}},
				Counter: true, Action: netstate.Action{Kind: netstate.Drop},
			}},
		}},
	})
}

// unknownPodsTable is the name that the number of the routing table is derived from. No
// table of the API can be called so.
const unknownPodsTable = "\x00pods that no route knows"
