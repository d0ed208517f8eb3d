package plan

import (
	"net/netip"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
)

// maxTableName is the longest name of a table that hosts accept (package
// desired).
const maxTableName = 200

// beforeBypass orders a nat chain before that of the masquerade bypass, which
// would keep the source of what a peer sends to a pod here.
const beforeBypass = beforeCNI - 5

// ipMappings plans the translation between the addresses that peers use and
// those that they stand for, one object for each IP and kind of host.
func (p *planner) ipMappings() {
	var peers []netip.Prefix
	for _, peer := range p.peerings {
		if peer.ready {
			peers = append(peers, ofFamily(peer.remapped(), peer.ipv6())...)
		}
	}
	seen := map[netip.Addr]bool{} // addresses that peers see as another one
	for _, x := range p.ips {     // oldest first
		if !x.given.IsValid() || !p.sound(x.Meta) {
			continue
		}
		if x.Labels[v1beta1.LabelHostUnreachable] != "true" {
			p.gatewayMapping(x, !seen[x.IP.IP])
			seen[x.IP.IP] = true
		}
		if from := ofFamily(peers, x.IP.IP.Is6()); x.Masquerade && len(from) > 0 {
			p.nodeMapping(x, from)
		}
	}
}

// gatewayMapping plans, for all gateways, that what is sent to the address of
// an IP arrives where it stands for, and, for one IP of each host, that peers
// see that address in what the host sends.
func (p *planner) gatewayMapping(x *address, source bool) {
	o := p.mapping(x, "remap-ipmapping-gw", v1beta1.CategoryGateway)
	destination := chain("prerouting", v1beta1.ChainTypeNAT, v1beta1.ChainHookPrerouting, v1beta1.ChainPriorityNATDest)
	destination.Rules.NatRules = []v1beta1.NatRule{
		translate(v1beta1.NatTypeDestination, ruleName(x.Name), x.IP.IP, to(host(x.given))),
	}
	o.Spec.Table.Chains = []v1beta1.Chain{destination}
	if source {
		c := chain("postrouting", v1beta1.ChainTypeNAT, v1beta1.ChainHookPostrouting, v1beta1.ChainPriorityNATSource)
		c.Rules.NatRules = []v1beta1.NatRule{
			translate(v1beta1.NatTypeSource, ruleName(x.Name), x.given, out(v1beta1.TunnelInterface), from(host(x.IP.IP))),
		}
		o.Spec.Table.Chains = append(o.Spec.Table.Chains, c)
	}
	p.add(o)
}

// nodeMapping plans, for all nodes, that the host sees the node's address in
// what peers send to it. The gateway has put the host's own address into it
// before; it leaves the cluster on the node of the gateway, or arrives at a pod
// on that pod's node.
func (p *planner) nodeMapping(x *address, peers []netip.Prefix) {
	o := p.mapping(x, "remap-ipmapping-fabric", v1beta1.CategoryFabric)
	c := chain("postrouting", v1beta1.ChainTypeNAT, v1beta1.ChainHookPostrouting, beforeBypass)
	for _, peer := range peers {
		c.Rules.NatRules = append(c.Rules.NatRules, v1beta1.NatRule{
			Name: ruleName(x.Name, peer.String()), NatType: v1beta1.NatTypeMasquerade,
			Match: []v1beta1.Match{from(peer), to(host(x.IP.IP))},
		})
	}
	o.Spec.Table.Chains = []v1beta1.Chain{c}
	p.add(o)
}

// mapping returns a FirewallConfiguration of an IP for hosts of a category.
// The table's name has the namespace in it: tables are those of a host.
func (p *planner) mapping(x *address, what, category string) *v1beta1.FirewallConfiguration {
	m := ownedBy(x.Meta, Name(x.Name, what))
	m.Labels = map[string]string{v1beta1.LabelFirewallCategory: category, v1beta1.LabelFirewallSubcategory: v1beta1.SubcategoryIPMapping}
	return firewallConfiguration(m, shorten(Name(m.Name, x.Namespace), maxTableName), x.IP.IP.Is6())
}
