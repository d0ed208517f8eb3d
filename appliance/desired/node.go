package desired

import (
	"cmp"
	"fmt"
	"net/netip"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// Node returns the state of a node: a Geneve link to every gateway, or the
// link of the VXLAN overlay to all nodes, and the routes, rules and tables of the configurations addressed to nodes. Results
// are sorted by kind, namespace and name, one for every object concerned.
// Objects that would cut the node off from its API server are left out.
func Node(in NodeInput) (netstate.State, []Result) {
	label := cmp.Or(in.Label, in.Name)
	return reachable(in.vicinity(), in.LeftOut, in.Routes, in.Firewalls,
		func(labels map[string]string) bool { return NodeSelects(labels, label) },
		func(routes []cluster.RouteConfiguration, firewalls []cluster.FirewallConfiguration) (netstate.State, []Result) {
			in.Routes, in.Firewalls = routes, firewalls
			return compileNode(in).finish()
		})
}

func compileNode(in NodeInput) *host {
	h := newHost(in.RulePriority, in.Problems)
	label := cmp.Or(in.Label, in.Name)

	h.nodeLinks(in)
	h.vxlan(in)
	h.gatewaysPastOurs(in.Fabrics)
	h.routes(in.Routes, func(labels map[string]string) bool { return nodeSelectsRoute(labels, label) })
	h.pathMTU(in.Fabrics)
	h.tables(in.Firewalls, func(labels map[string]string) bool { return nodeSelectsFirewall(labels, label) },
		[]string{OverlayOnlyTable, NoRedirectsTable, NodeAddressTable, PeersRefusedTable})
	h.nodeAddress(in)
	h.refusePeersAtNode(in)
	return h
}

// nodeLinks adds the Geneve links to the gateways.
//
//	ip link add liqo.milan type geneve id 7 remote 10.127.65.9 dstport 6091
//	ip address add 10.80.0.4/32 dev liqo.milan
func (h *host) nodeLinks(in NodeInput) {
	own := in.own()
	if own.Name != "" {
		h.accept(own.Meta)
	}
	fabrics := map[[2]string]cluster.InternalFabric{}
	for _, f := range living(in.Fabrics, func(f cluster.InternalFabric) cluster.Meta { return f.Meta }) {
		h.accept(f.Meta)
		fabrics[[2]string{f.Namespace, f.Name}] = f
		if f.NodeInterface != "" {
			h.missing[f.NodeInterface] = fmt.Sprintf("no GeneveTunnel joins this node and %s yet", f.Ref)
		}
	}
	for _, t := range living(in.Tunnels, func(t cluster.GeneveTunnel) cluster.Meta { return t.Meta }) {
		if t.Node != in.Name {
			continue
		}
		ok := h.accept(t.Meta)
		f, found := fabrics[[2]string{cmp.Or(t.Fabric.Namespace, t.Namespace), t.Fabric.Name}]
		var problem string
		switch {
		case !ok:
			problem = h.results[key(t.Ref)].Message
		case !found:
			problem = fmt.Sprintf("spec.internalFabricRef: there is no InternalFabric %s", t.Fabric.Name)
		case !h.results[key(f.Ref)].OK:
			problem = fmt.Sprintf("%s: %s", f.Ref, h.results[key(f.Ref)].Message)
		case !f.GatewayIP.IsValid():
			problem = fmt.Sprintf("%s has no gatewayIP yet", f.Ref)
		case own.Name == "":
			problem = fmt.Sprintf("there is no InternalNode %s yet", in.Name)
		case !own.InternalIP.IsValid():
			problem = fmt.Sprintf("%s has no address in the internal CIDR (spec.interface.node.ip)", own.Ref)
		}
		if problem != "" {
			if ok {
				h.refuse(t.Meta, "%s", problem)
			}
			if f.NodeInterface != "" && !h.hasLink(f.NodeInterface) {
				h.missing[f.NodeInterface] = problem
			}
			continue
		}
		h.addLink(link{
			tunnel:      t,
			name:        f.NodeInterface,
			description: "gateway to " + cmp.Or(f.RemoteID, f.Name),
			mtu:         f.MTU,
			remote:      f.GatewayIP,
			own:         own.InternalIP,
			peer:        f.InternalIP,
		}, cmp.Or(in.GenevePort, GenevePort), in.Underlay)
	}
}

// gatewaysPastOurs sends what comes from a gateway's pod the way that it would
// take without us, by the rules that a CNI may have for its pods: where the peer's
// endpoint is inside a network that is routed to the peer, our rules would send
// WireGuard's own packets into themselves.
//
//	ip rule add from 10.127.65.9 goto 391 priority 300
//	ip rule add nop priority 391
func (h *host) gatewaysPastOurs(fabrics []cluster.InternalFabric) {
	seen := map[netip.Addr]bool{}
	ends := map[bool]bool{} // by family
	for _, f := range fabrics {
		// The address of a gateway in a namespace of its node is the node's.
		if f.Deleting || !f.GatewayIP.IsValid() || f.HostInterface != "" || seen[f.GatewayIP] {
			continue
		}
		seen[f.GatewayIP] = true
		v6 := f.GatewayIP.Is6()
		if !ends[v6] {
			h.state.Rules = append(h.state.Rules, netstate.Rule{Priority: h.base + behind, IPv6: v6, Nop: true})
			ends[v6] = true
		}
		h.state.Rules = append(h.state.Rules, netstate.Rule{
			Priority: h.base + pastOurs,
			IPv6:     v6,
			Src:      hostPrefix(f.GatewayIP),
			Goto:     h.base + behind,
		})
	}
}
