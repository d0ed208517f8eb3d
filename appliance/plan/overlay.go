package plan

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
)

// ConditionOverlayChosen says on an InternalNode which overlay the
// installation has settled on where it may choose.
const ConditionOverlayChosen = "OverlayChosen"

// tableMain is the number of the kernel's main routing table (RT_TABLE_MAIN).
const tableMain = "254"

// chooseOverlay decides how packets get from nodes to gateways: as the
// installation says, or by what the kernels of the nodes have. What has been
// chosen once stays: a new node that lacks it is told so, and the others keep
// their links.
func (p *planner) chooseOverlay() {
	switch o := p.s.Options.Overlay; o {
	case "":
		p.overlay = cluster.OverlayGeneve
	case cluster.OverlayAuto:
		if p.overlay = p.chosenBefore(); p.overlay == "" {
			p.overlay = p.commonOverlay()
		}
	default:
		p.overlay = o
	}
	p.checkOverlays()
	if p.overlay == cluster.OverlayVXLAN {
		p.checkVTEPs()
	}
}

// chosenBefore returns the overlay that the oldest InternalNode has; empty:
// none was chosen yet.
func (p *planner) chosenBefore() cluster.Overlay {
	var oldest *cluster.InternalNode
	for i := range p.s.InternalNodes {
		n := &p.s.InternalNodes[i]
		if n.Overlay != "" && !n.Deleting && (oldest == nil || compareAge(n.Meta, oldest.Meta) < 0) {
			oldest = n
		}
	}
	if oldest == nil {
		return ""
	}
	return oldest.Overlay
}

// commonOverlay returns what all nodes have, Geneve first; where there is no
// such thing, what more of them have. It is empty as long as a node that is
// ready has not said what it has.
func (p *planner) commonOverlay() cluster.Overlay {
	total, geneve, vxlan := 0, 0, 0
	for _, n := range p.s.Nodes {
		has := p.kernelOverlays(n.Name)
		if len(has) == 0 {
			if n.Ready {
				return ""
			}
			continue // it may be away for long
		}
		total++
		if slices.Contains(has, cluster.OverlayGeneve) {
			geneve++
		}
		if slices.Contains(has, cluster.OverlayVXLAN) {
			vxlan++
		}
	}
	switch {
	case total == 0:
		return ""
	case geneve == total || geneve > vxlan:
		return cluster.OverlayGeneve
	default:
		return cluster.OverlayVXLAN
	}
}

// kernelOverlays returns what a node says that its kernel has.
func (p *planner) kernelOverlays(node string) []cluster.Overlay {
	if n := p.internalNode(node); n != nil {
		return n.Overlays
	}
	return nil
}

// internalNode returns the InternalNode of a node, as it is; nil: there is
// none.
func (p *planner) internalNode(name string) *cluster.InternalNode {
	i := slices.IndexFunc(p.s.InternalNodes, func(n cluster.InternalNode) bool { return n.Name == name && !n.Deleting })
	if i < 0 {
		return nil
	}
	return &p.s.InternalNodes[i]
}

// checkOverlays refuses nodes whose kernel lacks the overlay.
func (p *planner) checkOverlays() {
	for _, n := range p.s.InternalNodes {
		if p.overlay == "" || n.Deleting || len(n.Overlays) == 0 || slices.Contains(n.Overlays, p.overlay) {
			continue
		}
		how := "set the chart's value networking.overlay to what all nodes have"
		if p.overlay == cluster.OverlayGeneve {
			how += " (vxlan, where they have it)"
		}
		p.refuse(n.Meta, ReasonOverlayUnsupported, "its kernel has no %s, by which nodes and gateways are joined, so its pods do not reach the peers: load the module on the node (modprobe %s), or %s",
			p.overlay, p.overlay, how)
	}
}

// checkVTEPs decides which nodes can be reached by VXLAN. Of two that say that
// they are at the same address, the older one is believed.
func (p *planner) checkVTEPs() {
	p.reachable = map[string]bool{}
	byAge := slices.Clone(p.s.InternalNodes)
	slices.SortStableFunc(byAge, func(a, b cluster.InternalNode) int { return compareAge(a.Meta, b.Meta) })
	ips, macs := map[netip.Addr]string{}, map[[6]byte]string{}
	for _, n := range byAge {
		if n.Deleting {
			continue
		}
		for _, e := range p.invalid[keyOf(n.Ref)] {
			if strings.HasPrefix(e.Field, "status.vtep") {
				p.refuse(n.Meta, ReasonInvalidVTEP, "%s: the node's daemon writes it; restart the daemon, or find out who else writes it", e.Message())
			}
		}
		if !n.VTEP.IP.IsValid() && !p.sound(n.Meta) {
			continue
		}
		if !n.VTEP.IP.IsValid() {
			p.wait(n.Meta, ReasonNoVTEP, "its daemon has not said yet where the VXLAN overlay reaches it (status.vtep), so its pods do not reach the peers: see whether the pod of %s runs on this node and what it logs", v1beta1.NodeDaemonName)
			continue
		}
		ipOwner, macOwner := ips[n.VTEP.IP], macs[n.VTEP.MAC]
		switch {
		case ipOwner != "":
			p.refuse(n.Meta, ReasonDuplicateVTEP, "status.vtep.ip: %s is the address of node %s too: give one of the two nodes another address (the InternalIP of its Node)", n.VTEP.IP, ipOwner)
		case macOwner != "":
			p.refuse(n.Meta, ReasonDuplicateVTEP, "status.vtep.mac: the link %s of node %s has the same address: delete the link on one of the two nodes, its daemon makes it anew", v1beta1.VXLANInterface, macOwner)
		default:
			ips[n.VTEP.IP], macs[n.VTEP.MAC] = n.Name, n.Name
			p.reachable[n.Name] = p.sound(n.Meta)
		}
	}
}

// overlayCondition says what was chosen, where there was a choice.
func (p *planner) overlayCondition(n cluster.InternalNode) []metav1.Condition {
	if p.s.Options.Overlay != cluster.OverlayAuto {
		return nil
	}
	c := metav1.Condition{Type: ConditionOverlayChosen, ObservedGeneration: n.Generation, Status: metav1.ConditionTrue, Reason: "Chosen"}
	if p.overlay == "" {
		c.Status, c.Reason = metav1.ConditionFalse, "WaitingForNodes"
		c.Message = "not all nodes that are ready have said yet what their kernels have"
		return []metav1.Condition{c}
	}
	c.Message = fmt.Sprintf("networking.overlay is auto: %s is used; it stays until networking.overlay names another one", p.overlay)
	for _, o := range []cluster.Overlay{cluster.OverlayGeneve, cluster.OverlayVXLAN} {
		if without := p.without(o); len(without) > 0 {
			c.Message += fmt.Sprintf("; without %s: %s", o, strings.Join(without, ", "))
		}
	}
	c.Message = clip(c.Message)
	return []metav1.Condition{c}
}

// without returns the nodes that say that their kernel lacks an overlay.
func (p *planner) without(o cluster.Overlay) []string {
	var out []string
	for _, n := range p.s.InternalNodes {
		if !n.Deleting && len(n.Overlays) > 0 && !slices.Contains(n.Overlays, o) {
			out = append(out, n.Name)
		}
	}
	return out
}

// annotateDaemons tells on the pod of every node's daemon the address of the
// node's VXLAN link, as the overlay operator of the seed does. The daemon
// itself may not write to pods.
func (p *planner) annotateDaemons() {
	if p.overlay != cluster.OverlayVXLAN {
		return
	}
	for _, pod := range p.s.NodeDaemons {
		n := p.internalNode(pod.Node)
		if n == nil || !n.VTEP.IP.IsValid() {
			continue
		}
		p.out.Applies = append(p.out.Applies, &corev1.Pod{
			TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
			ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name, Annotations: map[string]string{
				v1beta1.AnnotationVTEPMAC: net.HardwareAddr(n.VTEP.MAC[:]).String(),
			}},
		})
	}
}

// gatewayToPods returns how gateways reach the pods of this cluster where
// there is no link to each node: by the route that every pod has, to its own
// node, which knows the way (see [planner.symmetric]).
//
//	ip rule add iif liqo-tunnel to 10.0.0.0/16 lookup main
func (p *planner) gatewayToPods() *v1beta1.RouteConfiguration {
	o := routeConfiguration(metav1.ObjectMeta{Namespace: p.s.Namespace, Name: Name(p.s.ID, "gw-pods"), Labels: map[string]string{
		v1beta1.LabelRouteCategory: v1beta1.CategoryGateway, v1beta1.LabelRouteSubcategory: v1beta1.SubcategoryFabric,
	}})
	o.Spec.Table.Name = tableMain
	var to []netip.Prefix
	add := func(list ...netip.Prefix) {
		for _, dst := range list {
			if dst = dst.Masked(); !slices.ContainsFunc(to, func(c netip.Prefix) bool { return c.Contains(dst.Addr()) && c.Bits() <= dst.Bits() }) {
				to = append(to, dst)
			}
		}
	}
	add(p.local.ofType(v1beta1.NetworkTypePod)...)
	for _, n := range p.s.Nodes {
		add(n.PodCIDRs...)
	}
	for _, n := range p.s.Nodes {
		for _, a := range p.outside[n.Name] {
			add(host(a))
		}
	}
	for _, dst := range to {
		o.Spec.Table.Rules = append(o.Spec.Table.Rules, v1beta1.Rule{
			Dst: ptr(apiCIDR(dst)), Iif: ptr(v1beta1.TunnelInterface), Routes: []v1beta1.Route{},
		})
	}
	if len(to) == 0 {
		return nil
	}
	return o
}

// symmetric returns how the node of a peering's gateway sends what comes from
// the peer to the pods of other nodes: through the overlay, as their answers
// come. The CNI's way there would be another one than back, which neither a
// strict reverse-path filter nor a network that knows its hosts' addresses
// lets through. Who can't be reached by the overlay is left to the CNI.
func (p *planner) symmetric(peer *peering) *v1beta1.RouteConfiguration {
	at := p.gatewayNode(peer)
	if at == "" {
		return nil
	}
	routes := []v1beta1.Route{}
	seen := map[netip.Prefix]bool{}
	var ipv6 bool // the internal CIDR has one family, and next hops are of it
	for _, n := range p.s.Nodes {
		ip := p.node[n.Name]
		if n.Name == at || !ip.IsValid() || !p.reachable[n.Name] {
			continue
		}
		ipv6 = ip.Is6()
		add := func(dst netip.Prefix) {
			if dst.Addr().Is6() == ipv6 && !seen[dst] {
				seen[dst] = true
				routes = append(routes, via(dst, ip, v1beta1.VXLANInterface))
			}
		}
		add(host(ip))
		for _, cidr := range p.podsOf(n) {
			add(cidr)
		}
	}
	if len(routes) == 0 {
		return nil // there is no other node
	}
	m := owned(Name(peer.id, "symmetric"), peer.id, peer.gateway.Meta)
	m.Labels[v1beta1.LabelRouteCategory] = v1beta1.CategoryFabric
	m.Labels[v1beta1.LabelRouteSubcategory], m.Labels[v1beta1.LabelRouteUnique] = v1beta1.SubcategorySingleNode, Label(at)
	o := routeConfiguration(m)
	o.Spec.Table.Name = v1beta1.VXLANTable
	from := peer.remapped()
	if p.hostInterface(peer) != "" { // the gateway's own errors come by the same way
		from = append(from, host(p.fabric[peer.id]))
	}
	for _, cidr := range from {
		if cidr.Addr().Is6() != ipv6 {
			continue
		}
		// The routes stand at the first rule: they are those of the table,
		// and there are as many as nodes.
		o.Spec.Table.Rules = append(o.Spec.Table.Rules, v1beta1.Rule{Src: ptr(apiCIDR(cidr)), Routes: routes})
		routes = []v1beta1.Route{}
	}
	if len(o.Spec.Table.Rules) == 0 {
		return nil
	}
	p.atPriority(o)
	return o
}

// gatewayNode returns the node of the pod that carries the traffic of a
// peering, or of the one that did as long as there is no other.
func (p *planner) gatewayNode(peer *peering) string {
	if peer.pod != nil {
		return peer.pod.Node
	}
	if f := p.existingFabric(peer.gateway); f != nil && !f.Deleting {
		return f.GatewayNode
	}
	return ""
}

// podsOutside finds the addresses of pods that the podCIDRs of their node do
// not lead to.
func (p *planner) podsOutside() {
	cidrs := map[string][]netip.Prefix{}
	for _, n := range p.s.Nodes {
		cidrs[n.Name] = n.PodCIDRs
	}
	p.outside = map[string][]netip.Addr{}
	for _, pod := range p.s.Pods {
		for _, a := range pod.IPs {
			if pod.Running && !pod.HostNetwork && !slices.ContainsFunc(cidrs[pod.Node], func(c netip.Prefix) bool { return c.Contains(a) }) {
				p.outside[pod.Node] = append(p.outside[pod.Node], a)
			}
		}
	}
	for node, list := range p.outside {
		slices.SortFunc(list, netip.Addr.Compare)
		p.outside[node] = slices.Compact(list)
	}
}

// atPriority gives the rules of a RouteConfiguration of nodes the priority that
// the installation asks for.
func (p *planner) atPriority(o *v1beta1.RouteConfiguration) {
	if first := int(p.s.Options.RulePriority); first > 0 {
		for i := range o.Spec.Table.Rules {
			o.Spec.Table.Rules[i].Priority = &first
		}
	}
}
