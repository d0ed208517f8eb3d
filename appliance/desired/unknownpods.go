package desired

import (
	"net/netip"
	"slices"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// unknownPods leads what comes out of the tunnel for a pod that no route knows yet
// to the gateway's own node, by its link: the CNI there knows every pod. It is for
// clusters whose pods are outside of the podCIDRs of their nodes. What belongs to a
// connection of such a pod does not get here, since its mark leads to the pod's node
// (plan, service-nodeport-routing). But the reverse-path filter asks without a mark
// whether there is any way back to the source of the pod's packets, and drops them if
// there is none.
//
//	ip rule add iif liqo-tunnel to 10.0.0.0/16 priority 389 lookup 90
//	ip route add 10.0.0.0/16 via 10.80.0.4 dev liqo.node-1 onlink table 90
func (h *host) unknownPods(in GatewayInput) {
	if in.HostInterface != "" || in.Overlay() != cluster.OverlayGeneve {
		return // by the main table
	}
	var pods []netip.Prefix
	for _, n := range living(in.Nodes, func(n cluster.InternalNode) cluster.Meta { return n.Meta }) {
		for _, p := range n.PodNetworks {
			pods = append(pods, p.Masked())
		}
	}
	slices.SortFunc(pods, comparePrefix)
	for _, p := range slices.Compact(pods) {
		route, problem := h.toOwnNode(in, p)
		if problem != "" {
			continue // its GeneveTunnel says so
		}
		route.Table = h.unknownPodsTable
		h.state.Routes = append(h.state.Routes, route)
		h.state.Rules = append(h.state.Rules, netstate.Rule{
			Priority: h.base + unknownPods, IPv6: p.Addr().Is6(), Dst: p, IIF: TunnelInterface, Table: h.unknownPodsTable,
		})
	}
}

// unknownPodsTable is the name that the number of the table is derived from. No
// table of the API can be called so.
const unknownPodsTable = "\x00pods that no route knows"
