package plan

import (
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
)

// mayTransit reports whether two peers reach each other through this cluster.
func (p *planner) mayTransit(a, b *peering) bool {
	return a != b && (p.s.Options.Transit || slices.ContainsFunc(p.s.Options.TransitPairs, func(pair [2]string) bool {
		return pair == [2]string{a.id, b.id} || pair == [2]string{b.id, a.id}
	}))
}

// transit plans how what comes from one peer and is meant for another gets
// from gateway to gateway: by the node that the gateway's pod runs on, which
// knows the way to the other one.
func (p *planner) transit() {
	peerings := p.fabricPeerings()
	at := map[string]bool{}
	for _, peer := range peerings {
		at[p.gatewayNode(peer)] = true
	}
	for _, n := range p.s.Nodes {
		ip := p.node[n.Name]
		if !at[n.Name] || !ip.IsValid() {
			continue
		}
		var rules []v1beta1.Rule
		for _, peer := range peerings {
			if !slices.ContainsFunc(peerings, func(other *peering) bool { return p.mayTransit(other, peer) }) {
				continue
			}
			for _, cidr := range ofFamily(peer.remap.Pod, ip.Is6()) {
				rule := v1beta1.Rule{Iif: ptr(v1beta1.TunnelInterface), Dst: ptr(apiCIDR(cidr)), Routes: []v1beta1.Route{}}
				if p.overlay == cluster.OverlayGeneve {
					rule.Routes = append(rule.Routes, via(cidr, ip, p.nodeIface[n.Name]))
				}
				rules = append(rules, rule)
			}
		}
		if len(rules) == 0 {
			continue
		}
		o := routeConfiguration(metav1.ObjectMeta{Namespace: p.s.Namespace, Name: Name(p.s.ID, n.Name, "extcidr"), Labels: map[string]string{
			v1beta1.LabelRouteCategory: v1beta1.CategoryGateway, v1beta1.LabelRouteSubcategory: v1beta1.SubcategoryFabricNode,
			v1beta1.LabelRouteUnique: Label(n.Name), v1beta1.LabelNodeName: Label(n.Name),
		}})
		if p.overlay == cluster.OverlayVXLAN {
			o.Spec.Table.Name = tableMain
		}
		o.Spec.Table.Rules = rules
		p.add(o)
	}
}

// noTransit plans, for the gateway of each peer, that what comes from the peer and
// is meant for one that it may not reach is dropped. That no route leads there
// (transit) is not enough: an IP may stand for a pod of another peer, and an IP is
// for all peers. What a peer answers has the address of a node here, so it is never
// dropped.
func (p *planner) noTransit() {
	for _, peer := range p.peerings {
		if !peer.ready {
			continue
		}
		c := chain("between-peers", v1beta1.ChainTypeFilter, v1beta1.ChainHookForward, v1beta1.ChainPriorityFilter)
		for _, other := range p.peerings {
			if !other.ready || other == peer || p.mayTransit(peer, other) {
				continue
			}
			for _, cidr := range ofFamily(other.remapped(), peer.ipv6()) {
				c.Rules.FilterRules = append(c.Rules.FilterRules, v1beta1.FilterRule{
					Name: ruleName(other.id, cidr.String()), Action: v1beta1.ActionDrop, Match: []v1beta1.Match{by(v1beta1.TunnelInterface), to(cidr)},
				})
			}
		}
		if len(c.Rules.FilterRules) == 0 {
			continue
		}
		m := owned(Name(peer.config.Name, "no-transit"), peer.id, peer.config.Meta)
		o := firewallConfiguration(forPeerGateway(m, peer.id), "no-transit", peer.ipv6())
		o.Spec.Table.Chains = []v1beta1.Chain{c}
		p.add(o)
	}
}
