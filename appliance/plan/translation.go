package plan

import (
	"cmp"
	"encoding/binary"
	"net/netip"
	"slices"
	"strconv"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
)

const (
	// beforeCNI orders a nat chain before those of CNIs, which are at 100
	// (iptables) or a little before (kindnet: 90). All nat chains of a hook
	// run where NF_IP_PRI_NAT_SRC says, in the order of their priorities, and
	// the first that translates ends it.
	beforeCNI v1beta1.ChainPriority = -150
	// afterMappings orders a nat chain after those of single addresses.
	afterMappings v1beta1.ChainPriority = v1beta1.ChainPriorityNATSource + 10

	genevePort = 6091 // as desired.GenevePort
)

// translations plans what becomes of addresses on their way between this
// cluster and its peers.
func (p *planner) translations() {
	for _, peer := range p.peerings {
		if !peer.ready {
			continue
		}
		p.masqueradeBypass(peer)
		p.remaps(peer, "remap-podcidr", peer.remote.Pod, peer.remap.Pod)
		p.remaps(peer, "remap-externalcidr", peer.remote.External, peer.remap.External)
		p.unknownSource(peer)
	}
	p.returnToNodes()
	p.transit()
	p.noTransit()
}

// ipv6 reports the address family of a peering whose Configuration is sound.
func (peer *peering) ipv6() bool { return peer.config.Remote.All()[0].Addr().Is6() }

// ofFamily returns the networks of one address family, as they are read.
func ofFamily(list []netip.Prefix, ipv6 bool) []netip.Prefix {
	var out []netip.Prefix
	for _, c := range list {
		if c.Addr().Is6() == ipv6 {
			out = append(out, c.Masked())
		}
	}
	return out
}

// localPods returns the networks of this cluster's pods, of one family.
func (p *planner) localPods(ipv6 bool) []netip.Prefix {
	return ofFamily(p.local.ofType(v1beta1.NetworkTypePod), ipv6)
}

// unknownSourceAddr returns the address by which peers see whatever is no pod of this
// cluster: the first of its first external network, which is never given to an
// IP. It is invalid where there is none of that family.
func (p *planner) unknownSourceAddr(ipv6 bool) netip.Addr {
	if list := ofFamily(p.local.ofType(v1beta1.NetworkTypeExternal), ipv6); len(list) > 0 {
		return list[0].Addr()
	}
	return netip.Addr{}
}

// masqueradeBypass keeps the addresses of what goes to a peer and what comes
// from it past the masquerade of the CNI, on all nodes: whatever is translated
// to what it is already is not translated any more. What is not from a pod of
// the node itself got the node's address before (desired, table node-address).
func (p *planner) masqueradeBypass(peer *peering) {
	v6, cfg := peer.ipv6(), peer.config.Name
	name := Name(cfg, "masquerade-bypass")
	c := chain("pre-postrouting", v1beta1.ChainTypeNAT, v1beta1.ChainHookPostrouting, beforeCNI)
	rule := func(prefix string, source, destination netip.Prefix, more ...v1beta1.Match) {
		c.Rules.NatRules = append(c.Rules.NatRules, translate(v1beta1.NatTypeSource,
			ruleName(prefix, cfg, source.String(), destination.String()), source, append([]v1beta1.Match{from(source), to(destination)}, more...)...))
	}
	local := slices.Concat(p.localPods(v6), ofFamily(p.local.ofType(v1beta1.NetworkTypeInternal), v6))
	for _, remote := range ofFamily(peer.remapped(), v6) {
		for _, l := range local {
			// What the gateway itself sends there is for the peer's gateway.
			if dials(peer.gateway, remote) && l.Contains(p.gatewayIP(peer)) {
				rule("podcidr", l, remote, not(from(host(p.gatewayIP(peer)))))
			} else {
				rule("podcidr", l, remote)
			}
		}
	}
	for _, remote := range ofFamily(peer.remapped(), v6) {
		for _, l := range local {
			rule("remote", remote, l)
		}
	}
	if ip, ok := p.geneveGateway(peer); ok {
		port := cmp.Or(p.s.Options.GenevePort, genevePort)
		c.Rules.NatRules = append(c.Rules.NatRules, translate(v1beta1.NatTypeSource, "gateway-geneve", ip,
			append(toPort(v1beta1.L4ProtoUDP, port), from(host(ip)))...))
	}
	if len(c.Rules.NatRules) == 0 {
		return
	}
	// Nodes have the tables of all peerings, whose Configurations may have one name.
	table := Name(peer.id, "masquerade-bypass")
	o := firewallConfiguration(forAllNodes(owned(name, peer.id, peer.config.Meta)), table, v6)
	o.Spec.Table.Chains = []v1beta1.Chain{c}
	p.add(o)
}

// dials reports whether a client's gateway may dial an address in a network. What
// stands behind a name is not known here.
func dials(g *cluster.Gateway, network netip.Prefix) bool {
	return g != nil && g.Role == cluster.Client && slices.ContainsFunc(g.Addresses, func(s string) bool {
		a, err := netip.ParseAddr(s)
		return err == nil && network.Contains(a)
	})
}

// geneveGateway returns the address of the pod whose Geneve packets the CNI of
// its node would masquerade on their way to other nodes.
func (p *planner) geneveGateway(peer *peering) (netip.Addr, bool) {
	if p.overlay != cluster.OverlayGeneve || peer.gateway == nil {
		return netip.Addr{}, false
	}
	ip := p.gatewayIP(peer)
	return ip, ip.IsValid() && ip.Is6() == peer.ipv6()
}

// remaps plans, for the gateway, the way between the networks of the peer as it
// calls them itself and as this cluster does: the destination of what goes
// there, the source of what comes from there, host bits kept. The object has the hooks
// that the API knows for NAT, as its users expect. The gateway reads the label, and
// translates where the tunnel ends (desired, table prefix-translation): all its other
// rules see the addresses that this cluster uses.
func (p *planner) remaps(peer *peering, what string, original, remapped []netip.Prefix) {
	outgoing := chain("outgoing", v1beta1.ChainTypeNAT, v1beta1.ChainHookPrerouting, v1beta1.ChainPriorityNATDest)
	incoming := chain("incoming", v1beta1.ChainTypeNAT, v1beta1.ChainHookPostrouting, v1beta1.ChainPriorityNATSource)
	tunnel := by(v1beta1.TunnelInterface)
	for i, there := range original {
		here := remapped[i]
		if there = there.Masked(); here == there {
			continue
		}
		name := ruleName(here.String(), there.String())
		outgoing.Rules.NatRules = append(outgoing.Rules.NatRules, translate(v1beta1.NatTypeDestination, name, there, not(tunnel), to(here)))
		incoming.Rules.NatRules = append(incoming.Rules.NatRules, translate(v1beta1.NatTypeSource, name, here, tunnel, from(there)))
	}
	if len(outgoing.Rules.NatRules) == 0 {
		return
	}
	m := owned(Name(peer.config.Name, what), peer.id, peer.config.Meta)
	if !peer.ipv6() {
		m.Labels[v1beta1.LabelPrefixTranslation] = "true"
	}
	o := firewallConfiguration(forPeerGateway(m, peer.id), what, peer.ipv6())
	o.Spec.Table.Chains = []v1beta1.Chain{outgoing, incoming}
	p.add(o)
}

// inGateway returns the networks of the peer as its gateway sees them between the
// tunnel's edges. Those of IPv6 are translated by connection tracking still, so there
// they are the peer's own.
func (peer *peering) inGateway() []netip.Prefix {
	if peer.ipv6() {
		return peer.remote.All()
	}
	return peer.remapped()
}

// unknownSource plans, for the gateway, that the peer sees one address, which it
// knows to be ours, for all that is no pod of this cluster: hosts, clients of
// NodePorts, and peers whose way leads through this cluster.
func (p *planner) unknownSource(peer *peering) {
	v6 := peer.ipv6()
	u := p.unknownSourceAddr(v6)
	if !u.IsValid() {
		p.remark(peer.config.Meta, Warning, ReasonNoNetwork, "there is no usable Network with label %s=%s of its address family: hosts and clients of NodePorts do not reach cluster %s; create it",
			v1beta1.LabelNetworkType, v1beta1.NetworkTypeExternal, peer.id)
		return
	}
	c := chain("pre-postrouting", v1beta1.ChainTypeNAT, v1beta1.ChainHookPostrouting, afterMappings)
	tunnel := out(v1beta1.TunnelInterface)
	for _, l := range p.localPods(v6) {
		c.Rules.NatRules = append(c.Rules.NatRules, translate(v1beta1.NatTypeSource, ruleName("podcidr", peer.config.Name, l.String()), l, tunnel, from(l)))
	}
	for _, remote := range ofFamily(peer.inGateway(), v6) {
		c.Rules.NatRules = append(c.Rules.NatRules, translate(v1beta1.NatTypeSource,
			ruleName("service-nodeport", peer.config.Name, remote.String()), u, tunnel, to(remote)))
	}
	m := owned(Name(peer.config.Name, "unknown-source"), peer.id, peer.config.Meta)
	o := firewallConfiguration(forPeerGateway(m, peer.id), "unknown-source", v6)
	o.Spec.Table.Chains = []v1beta1.Chain{c}
	p.add(o)
}

// returnToNodes plans, for all gateways, that the answer to what came from a
// node goes back to that node: a mark of the connection says which it was.
//
// Where pods have addresses outside of the podCIDRs of their nodes, a gateway with
// a link to each node does so for them, too: a pod that has just started is known
// to the gateway by the link that its first packet came in by, and by nothing else.
func (p *planner) returnToNodes() {
	if p.overlay == "" || len(p.peerings) == 0 {
		return
	}
	mark := chain("mark-to-conntrack", v1beta1.ChainTypeFilter, v1beta1.ChainHookForward, v1beta1.ChainPriorityFilter)
	restore := chain("conntrack-mark-to-meta-mark", v1beta1.ChainTypeFilter, v1beta1.ChainHookPrerouting, v1beta1.ChainPriorityFilter)
	restore.Rules.FilterRules = []v1beta1.FilterRule{{
		Name: "restore", Match: []v1beta1.Match{by(v1beta1.TunnelInterface)}, Action: v1beta1.ActionMetaMarkFromCtMark,
	}}
	var ipv6 bool // the internal CIDR has one family
	anyPods := p.podsAnywhere()
	for _, n := range p.s.Nodes {
		ip, number := p.node[n.Name], p.nodeMark(n.Name)
		if number == 0 {
			continue
		}
		ipv6 = ip.Is6()
		match := []v1beta1.Match{from(host(ip))}
		rule := v1beta1.Rule{FwMark: ptr(int(number)), Iif: ptr(v1beta1.TunnelInterface), Routes: []v1beta1.Route{}}
		name := Name(p.s.ID, n.Name, "service-nodeport-routing")
		r := routeConfiguration(metav1.ObjectMeta{Namespace: p.s.Namespace, Name: name, Labels: map[string]string{
			v1beta1.LabelRouteCategory: v1beta1.CategoryGateway, v1beta1.LabelRouteSubcategory: v1beta1.SubcategoryFabric,
			v1beta1.LabelNodeName: Label(n.Name),
		}})
		pods := ofFamily(anyPods, ipv6)
		marks := func(name string, match ...v1beta1.Match) {
			mark.Rules.FilterRules = append(mark.Rules.FilterRules, v1beta1.FilterRule{
				Name: name, Match: match, Action: v1beta1.ActionCtMark, Value: ptr(strconv.FormatUint(uint64(number), 10)),
			})
		}
		switch dev := p.nodeIface[n.Name]; {
		case p.overlay == cluster.OverlayGeneve && len(pods) > 0:
			match = append([]v1beta1.Match{by(dev)}, match...)
			for _, cidr := range pods {
				rule := rule
				rule.Dst, rule.Routes = ptr(apiCIDR(cidr)), []v1beta1.Route{via(cidr, ip, dev)}
				r.Spec.Table.Rules = append(r.Spec.Table.Rules, rule)
				marks(ruleName(n.Name, "pods", cidr.String()), by(dev), from(cidr))
			}
		case p.overlay == cluster.OverlayGeneve:
			match = append([]v1beta1.Match{by(dev)}, match...)
			rule.Routes = append(rule.Routes, via(anywhere(ipv6), ip, dev))
			r.Spec.Table.Rules = []v1beta1.Rule{rule}
		default:
			rule.Dst = ptr(apiCIDR(host(ip)))
			r.Spec.Table.Name = tableMain
			r.Spec.Table.Rules = []v1beta1.Rule{rule}
		}
		p.add(r)
		marks(ruleName(n.Name), match...)
	}
	if len(mark.Rules.FilterRules) == 0 {
		return
	}
	o := firewallConfiguration(p.forAllGateways("service-nodeport-routing"), "service-nodeport-routing", ipv6)
	o.Spec.Table.Chains = []v1beta1.Chain{mark, restore}
	p.add(o)
}

// nodeMark returns the mark of connections that came from a node: the position
// of its address in the internal CIDR, so no two have the same one and nobody
// has to remember it. It is 0 for a node without an address.
func (p *planner) nodeMark(node string) uint32 {
	ip, ok := p.node[node]
	cidrs := p.local.ofType(v1beta1.NetworkTypeInternal)
	if !ok || len(cidrs) == 0 {
		return 0
	}
	a, first := ip.As16(), cidrs[0].Masked().Addr().As16()
	return binary.BigEndian.Uint32(a[12:]) - binary.BigEndian.Uint32(first[12:])
}

// anywhere is the destination of a default route.
func anywhere(ipv6 bool) netip.Prefix {
	if ipv6 {
		return netip.PrefixFrom(netip.IPv6Unspecified(), 0)
	}
	return netip.PrefixFrom(netip.IPv4Unspecified(), 0)
}
