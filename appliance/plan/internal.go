package plan

import (
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/ipam"
)

// VNIs are 24 bits (RFC 8926); 0 is left alone.
const (
	firstVNI = 1
	lastVNI  = 1<<24 - 1
)

// fabricPeerings returns the peerings that get an InternalFabric: those whose
// networks are known and whose gateway has, or had, an address. A gateway
// that is being replaced keeps its fabric.
func (p *planner) fabricPeerings() []*peering {
	var out []*peering
	if p.overlay == "" {
		return nil // to be decided
	}
	for _, peer := range p.peerings {
		if peer.ready && peer.gateway != nil && p.gatewayIP(peer).IsValid() {
			out = append(out, peer)
		}
	}
	return out
}

// gatewayIP returns the address of the pod that carries the traffic of a
// peering, or that did as long as there is no other.
func (p *planner) gatewayIP(peer *peering) netip.Addr {
	if peer.pod != nil {
		return peer.pod.IPs[0]
	}
	if f := p.existingFabric(peer.gateway); f != nil && !f.Deleting {
		return f.GatewayIP
	}
	return netip.Addr{}
}

// internalCIDR gives nodes and gateways their addresses of the internal CIDR,
// links their names, and tunnels their VNIs. Who has one keeps it, the oldest
// if two have the same. What an object that is going away has is not free yet.
func (p *planner) internalCIDR() {
	p.internalAddresses()
	p.interfaces()
	p.vnis()
}

// A holder is an object that has, or wants, an address.
type holder struct {
	meta cluster.Meta // of the existing object; zero: it does not exist
	has  netip.Addr
	give func(netip.Addr)
	full func() // there is none left
}

func (p *planner) internalAddresses() {
	p.node, p.fabric = map[string]netip.Addr{}, map[string]netip.Addr{}
	cidrs := p.local.ofType(v1beta1.NetworkTypeInternal)
	if len(cidrs) == 0 {
		return
	}
	cidr := cidrs[0]

	wanted := map[objectKey]*holder{}
	var order []*holder
	for _, n := range p.s.Nodes {
		name := n.Name
		h := &holder{
			give: func(a netip.Addr) { p.node[name] = a },
			full: func() {
				p.refuse(n.Meta, ReasonNetworkFull, "the internal CIDR %v has no address left for this node: make the internal-cidr Network larger", cidr)
			},
		}
		wanted[objectKey{"InternalNode", "", name}] = h
		order = append(order, h)
	}
	for _, peer := range p.fabricPeerings() {
		h := &holder{
			give: func(a netip.Addr) { p.fabric[peer.id] = a },
			full: func() {
				p.refuse(peer.gateway.Meta, ReasonNetworkFull, "the internal CIDR %v has no address left for this gateway: make the internal-cidr Network larger", cidr)
			},
		}
		wanted[objectKey{"InternalFabric", peer.gateway.Namespace, peer.id}] = h
		order = append(order, h)
	}

	taken := map[netip.Addr]bool{}
	claim := func(m cluster.Meta, a netip.Addr) {
		if h := wanted[keyOf(m.Ref)]; h != nil && !m.Deleting {
			h.meta, h.has = m, a
		} else if a.IsValid() {
			taken[a] = true
		}
	}
	for _, n := range p.s.InternalNodes {
		n.Kind = "InternalNode"
		claim(n.Meta, n.InternalIP)
	}
	for _, f := range p.s.Fabrics {
		f.Kind = "InternalFabric"
		claim(f.Meta, f.InternalIP)
	}
	byAge := slices.Clone(order)
	slices.SortStableFunc(byAge, func(a, b *holder) int { return compareAge(a.meta, b.meta) })
	for _, h := range byAge {
		if ipam.Usable(cidr, h.has) && !taken[h.has] {
			taken[h.has] = true
			h.give(h.has)
		} else {
			h.has = netip.Addr{}
		}
	}
	missing := slices.DeleteFunc(order, func(h *holder) bool { return h.has.IsValid() })
	free := ipam.Addresses(len(missing), cidr, 0, taken)
	for i, h := range missing {
		if i < len(free) {
			h.give(free[i])
		} else {
			h.full()
		}
	}
}

// interfaces names the links: on gateways after the node, on nodes after the
// remote cluster.
func (p *planner) interfaces() {
	byAge := func(list []cluster.Meta) { slices.SortStableFunc(list, compareAge) }

	has, taken := map[string]string{}, map[string]bool{}
	var metas []cluster.Meta
	for _, n := range p.s.InternalNodes {
		if _, wanted := p.node[n.Name]; wanted && !n.Deleting {
			has[n.Name] = n.GatewayInterface
			metas = append(metas, n.Meta)
		} else {
			taken[n.GatewayInterface] = true
		}
	}
	byAge(metas)
	var users []ifaceUser
	for _, m := range metas {
		users = append(users, ifaceUser{m.Name, has[m.Name]})
	}
	for _, n := range p.s.Nodes {
		if _, exists := has[n.Name]; !exists {
			users = append(users, ifaceUser{id: n.Name})
		}
	}
	p.nodeIface = interfaceNames("node", users, taken)

	has, taken, metas, users = map[string]string{}, map[string]bool{}, nil, nil
	owner := map[objectKey]string{}
	for _, peer := range p.fabricPeerings() {
		owner[objectKey{"", peer.gateway.Namespace, peer.id}] = peer.id
	}
	for _, f := range p.s.Fabrics {
		if id := owner[objectKey{"", f.Namespace, f.Name}]; id != "" && !f.Deleting {
			has[id] = f.NodeInterface
			metas = append(metas, f.Meta)
		} else {
			taken[f.NodeInterface] = true
		}
	}
	byAge(metas)
	for _, m := range metas {
		users = append(users, ifaceUser{m.Name, has[m.Name]})
	}
	for _, peer := range p.fabricPeerings() {
		if _, exists := has[peer.id]; !exists {
			users = append(users, ifaceUser{id: peer.id})
		}
	}
	p.fabricIface = interfaceNames("fabric", users, taken)
}

// vnis numbers the tunnels.
func (p *planner) vnis() {
	p.vni = map[tunnelKey]uint32{}
	var order []tunnelKey
	wanted := map[objectKey]tunnelKey{}
	for _, peer := range p.fabricPeerings() {
		if !p.fabric[peer.id].IsValid() || p.overlay != cluster.OverlayGeneve {
			continue
		}
		for _, n := range p.s.Nodes {
			if !p.node[n.Name].IsValid() {
				continue
			}
			key := tunnelKey{peer.gateway.Namespace, peer.id, n.Name}
			order = append(order, key)
			wanted[objectKey{"", key.namespace, Name(key.fabric, key.node)}] = key
		}
	}
	tunnels := slices.Clone(p.s.Tunnels)
	slices.SortStableFunc(tunnels, func(a, b cluster.GeneveTunnel) int { return compareAge(a.Meta, b.Meta) })
	taken := map[uint32]bool{}
	for _, t := range tunnels {
		if _, ours := wanted[objectKey{"", t.Namespace, t.Name}]; !ours || t.Deleting {
			taken[t.VNI] = true
		}
	}
	for _, t := range tunnels {
		key, ours := wanted[objectKey{"", t.Namespace, t.Name}]
		if ours && !t.Deleting && t.VNI >= firstVNI && t.VNI <= lastVNI && !taken[t.VNI] {
			p.vni[key], taken[t.VNI] = t.VNI, true
		}
	}
	missing := slices.DeleteFunc(order, func(k tunnelKey) bool { return p.vni[k] != 0 })
	for i, vni := range ipam.Numbers(len(missing), firstVNI, lastVNI, taken) {
		p.vni[missing[i]] = vni
	}
}

// nodes plans the InternalNodes and the routes to the pods of each.
func (p *planner) nodes() {
	anywhere, mapped := p.podsAnywhere(), p.mappedAddresses()
	for _, n := range p.s.Nodes {
		ip, ok := p.node[n.Name]
		if !ok {
			continue
		}
		o := &v1beta1.InternalNode{TypeMeta: typeMeta("InternalNode"), ObjectMeta: metav1.ObjectMeta{Name: n.Name}}
		o.Spec.Interface.Gateway.Name, o.Spec.Interface.Node.IP = p.nodeIface[n.Name], apiIP(ip)
		o.Spec.Overlay, o.Spec.PodCIDRs = v1beta1.Overlay(p.overlay), apiCIDRs(p.podsOf(n))
		o.Spec.PodNetworks, o.Spec.OpenToPeers = apiCIDRs(anywhere), apiCIDRs(p.openToPeers(n, mapped))
		p.add(o)
		if p.overlay == cluster.OverlayGeneve {
			p.add(p.gatewayToNode(n, ip))
		}
	}
	if p.overlay == cluster.OverlayVXLAN {
		if o := p.gatewayToPods(); o != nil {
			p.add(o)
		}
	}
	for _, n := range p.s.InternalNodes {
		if !n.Deleting && p.node[n.Name].IsValid() {
			o := &v1beta1.InternalNode{TypeMeta: typeMeta("InternalNode"), ObjectMeta: existing(n.Meta)}
			o.Status.Conditions = append(p.accepted(n.Meta), p.overlayCondition(n)...)
			p.out.Statuses = append(p.out.Statuses, o)
		}
	}
}

// podsOf returns the networks of the pods that run on a node: its podCIDRs, and
// single addresses for pods that are outside of them.
func (p *planner) podsOf(n cluster.Node) []netip.Prefix {
	var out []netip.Prefix
	for _, cidr := range n.PodCIDRs {
		out = append(out, cidr.Masked())
	}
	for _, a := range p.outside[n.Name] {
		out = append(out, host(a))
	}
	return out
}

// podsAnywhere returns the networks of all pods of the cluster, of the families in
// which a pod is outside of its node's podCIDRs: the CNI has an IPAM of its own, so
// the next pod may be outside, too, and is known only once there is a Pod with an
// address.
func (p *planner) podsAnywhere() []netip.Prefix {
	var out []netip.Prefix
	for _, v6 := range []bool{false, true} {
		outside := func(list []netip.Addr) bool {
			return slices.ContainsFunc(list, func(a netip.Addr) bool { return a.Is6() == v6 })
		}
		for _, n := range p.s.Nodes {
			if outside(p.outside[n.Name]) {
				out = append(out, p.localPods(v6)...)
				break
			}
		}
	}
	return out
}

// gatewayToNode returns how gateways reach a node and its pods.
func (p *planner) gatewayToNode(n cluster.Node, ip netip.Addr) *v1beta1.RouteConfiguration {
	name, dev := Name(p.s.ID, n.Name, "gw-node"), p.nodeIface[n.Name]
	o := routeConfiguration(metav1.ObjectMeta{Namespace: p.s.Namespace, Name: name, Labels: map[string]string{
		v1beta1.LabelRouteCategory: v1beta1.CategoryGateway, v1beta1.LabelRouteSubcategory: v1beta1.SubcategoryFabric,
		v1beta1.LabelNodeName: Label(n.Name),
	}})
	o.Spec.Table.Rules = append(o.Spec.Table.Rules, direct(ip, dev))

	var routes []v1beta1.Route
	add := func(dst netip.Prefix) {
		same := func(r v1beta1.Route) bool { return *r.Dst == apiCIDR(dst) }
		if dst.Addr().Is4() == ip.Is4() && !slices.ContainsFunc(routes, same) {
			routes = append(routes, via(dst, ip, dev))
		}
	}
	for _, cidr := range p.podsOf(n) {
		add(cidr)
	}
	if len(routes) > 0 {
		o.Spec.Table.Rules = append(o.Spec.Table.Rules, v1beta1.Rule{Iif: ptr(v1beta1.TunnelInterface), Routes: routes})
	}
	return o
}

// routeConfiguration returns a RouteConfiguration whose table is called like
// itself.
func routeConfiguration(m metav1.ObjectMeta) *v1beta1.RouteConfiguration {
	o := &v1beta1.RouteConfiguration{TypeMeta: typeMeta("RouteConfiguration"), ObjectMeta: m}
	o.Spec.Table.Name = m.Name
	return o
}

// direct returns the rule and route to an address at the other end of dev.
func direct(a netip.Addr, dev string) v1beta1.Rule {
	dst := apiCIDR(host(a))
	return v1beta1.Rule{Dst: &dst, Routes: []v1beta1.Route{{Dst: &dst, Dev: &dev, Scope: ptr(v1beta1.LinkScope)}}}
}

// via returns a route through the address at the other end of dev.
func via(dst netip.Prefix, gw netip.Addr, dev string) v1beta1.Route {
	return v1beta1.Route{Dst: ptr(apiCIDR(dst)), Gw: ptr(apiIP(gw)), Dev: &dev, Onlink: ptr(true)}
}

// fabrics plans the links between all nodes and the gateway of each peering,
// and the routes to the peer.
func (p *planner) fabrics() {
	for _, peer := range p.peerings {
		if peer.ready && peer.gateway != nil {
			p.add(p.gatewayToPeer(peer))
		}
	}
	all := apiCIDRs(p.peerCIDRs())
	for _, peer := range p.fabricPeerings() {
		ip, ok := p.fabric[peer.id]
		if !ok {
			continue
		}
		g := peer.gateway
		o := &v1beta1.InternalFabric{TypeMeta: typeMeta("InternalFabric"), ObjectMeta: owned(peer.id, peer.id, g.Meta)}
		o.Spec = v1beta1.InternalFabricSpec{MTU: g.MTU, RemoteCIDRs: apiCIDRs(peer.remapped()), GatewayIP: apiIP(p.gatewayIP(peer))}
		o.Spec.Interface.Node.Name, o.Spec.Interface.Gateway.IP = p.fabricIface[peer.id], apiIP(ip)
		o.Spec.Overlay, o.Spec.GatewayNode = v1beta1.Overlay(p.overlay), p.gatewayNode(peer)
		o.Spec.GatewayGone = peer.pod == nil && o.Spec.GatewayIP != ""
		o.Spec.HostInterface, o.Spec.TunnelMTU = p.hostInterface(peer), p.tunnelMTU(g)
		o.Spec.PeerCIDRs, o.Spec.EndpointPorts = all, p.endpointPorts(peer)
		p.add(o)
		p.add(p.nodeToGateway(peer, ip))
		if p.overlay == cluster.OverlayVXLAN {
			if o := p.symmetric(peer); o != nil {
				p.add(o)
			}
		}
		for _, n := range p.s.Nodes {
			vni, ok := p.vni[tunnelKey{g.Namespace, peer.id, n.Name}]
			if !ok {
				continue
			}
			t := &v1beta1.GeneveTunnel{TypeMeta: typeMeta("GeneveTunnel"), ObjectMeta: owned(Name(peer.id, n.Name), peer.id, g.Meta)}
			t.Labels[v1beta1.LabelFabricName], t.Labels[v1beta1.LabelNodeName] = Label(peer.id), Label(n.Name)
			t.Spec = v1beta1.GeneveTunnelSpec{
				ID:                vni,
				InternalFabricRef: &corev1.ObjectReference{APIVersion: networkingVersion, Kind: "InternalFabric", Namespace: g.Namespace, Name: peer.id},
				InternalNodeRef:   &corev1.ObjectReference{APIVersion: networkingVersion, Kind: "InternalNode", Name: n.Name},
			}
			p.add(t)
		}
	}
}

// tunnelMTU returns the MTU of a gateway's tunnel, as the gateway reported it; 0:
// it has not yet.
func (p *planner) tunnelMTU(g *cluster.Gateway) int {
	for _, r := range p.s.Reports {
		if r.Namespace == g.Namespace && r.Name == GatewayName(g.Name) {
			return r.MTU
		}
	}
	return 0
}

// nodeToGateway returns how nodes reach a gateway and the networks of its
// peer. In the VXLAN overlay, where a gateway's address leads depends on the
// node: the object does not say by which link, and stays as it is when the
// gateway moves.
func (p *planner) nodeToGateway(peer *peering, ip netip.Addr) *v1beta1.RouteConfiguration {
	m := owned(Name(peer.id, "node-gw"), peer.id, peer.gateway.Meta)
	m.Labels[v1beta1.LabelRouteCategory] = v1beta1.CategoryFabric
	o := routeConfiguration(m)
	dev := p.fabricIface[peer.id]
	if p.overlay == cluster.OverlayVXLAN {
		o.Spec.Table.Name = v1beta1.VXLANTable
	} else {
		o.Spec.Table.Rules = append(o.Spec.Table.Rules, direct(ip, dev))
	}
	for _, cidr := range peer.remapped() {
		route := via(cidr, ip, dev)
		if p.overlay == cluster.OverlayVXLAN {
			route.Dev, route.Onlink = nil, nil
		}
		o.Spec.Table.Rules = append(o.Spec.Table.Rules, v1beta1.Rule{Dst: ptr(apiCIDR(cidr)), Routes: []v1beta1.Route{route}})
	}
	p.atPriority(o)
	return o
}

// Addresses of the two ends of the tunnel between gateways.
const (
	serverTunnelIP = "169.254.18.1"
	clientTunnelIP = "169.254.18.2"
)

// gatewayToPeer returns how a gateway reaches its peer and, for what comes
// from a node, the peer's networks as this cluster calls them.
func (p *planner) gatewayToPeer(peer *peering) *v1beta1.RouteConfiguration {
	m := owned(Name(peer.id, "gw-ext"), peer.id, peer.config.Meta)
	m.Labels[v1beta1.LabelRouteCategory], m.Labels[v1beta1.LabelRouteUnique] = v1beta1.CategoryGateway, peer.id
	o := routeConfiguration(m)
	next := netip.MustParseAddr(clientTunnelIP) // the other end
	if peer.gateway.Role == cluster.Client {
		next = netip.MustParseAddr(serverTunnelIP)
	}
	o.Spec.Table.Rules = append(o.Spec.Table.Rules, direct(next, v1beta1.TunnelInterface))
	// The routes are the same for all nodes, and shared by their rules.
	var routes []v1beta1.Route
	for _, cidr := range peer.inGateway() {
		route := via(cidr.Masked(), next, v1beta1.TunnelInterface)
		if !cidr.Addr().Is4() { // the tunnel has no neighbours: the link is enough
			route.Gw, route.Onlink, route.Scope = nil, nil, ptr(v1beta1.LinkScope)
		}
		routes = append(routes, route)
	}
	if p.overlay == cluster.OverlayVXLAN {
		iif := v1beta1.PodInterface
		if p.hostInterface(peer) != "" {
			iif = v1beta1.GatewayInterface
		}
		o.Spec.Table.Rules = append(o.Spec.Table.Rules, v1beta1.Rule{Iif: &iif, Routes: routes})
		return o
	}
	for _, n := range p.s.Nodes {
		if p.node[n.Name].IsValid() {
			o.Spec.Table.Rules = append(o.Spec.Table.Rules, v1beta1.Rule{Iif: ptr(p.nodeIface[n.Name]), Routes: slices.Clip(routes)})
		}
	}
	return o
}
