package plan

import (
	"math"
	"strconv"
	"strings"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/ipam"
)

// A gateway in a network namespace of its node shares the node's names and
// ports with others of its kind. Each has a number of its own in the cluster,
// so any two of them may be on the same node, and their links, namespaces and
// ports are called after it. The gateway that is number 0 has the names that
// the seed gives: liqo.host and liqo-netns. The number is written into the
// label of the Deployment and stays as long as that does.
const (
	listenPort      = 51840 // of WireGuard, as desired.WireGuardPort
	hostHealthPort  = 51740
	hostMetricsPort = 51640
	lastHostNumber  = 99
)

// hostInterfaceOf returns the name of the node's end of the pair to a gateway.
func hostInterfaceOf(number uint32) string { return numbered(v1beta1.HostInterface, ".", number) }

// netnsOf returns the name of the gateway's network namespace.
func netnsOf(number uint32) string { return numbered(v1beta1.GatewayNetNS, "-", number) }

func numbered(name, separator string, number uint32) string {
	if number == 0 {
		return name
	}
	return name + separator + strconv.Itoa(int(number))
}

// hostNumber returns the number behind a name that hostInterfaceOf gave.
func hostNumber(name string) (uint32, bool) {
	rest, ok := strings.CutPrefix(name, v1beta1.HostInterface)
	if !ok || rest == "" {
		return 0, ok
	}
	n, err := strconv.ParseUint(strings.TrimPrefix(rest, "."), 10, 32)
	return uint32(n), err == nil && n <= lastHostNumber && name == hostInterfaceOf(uint32(n))
}

// numberHosts finds the numbers that gateways have.
func (p *planner) numberHosts() {
	owners := map[string]bool{}
	for _, g := range p.s.GatewayServers {
		owners[g.UID] = true
	}
	for _, g := range p.s.GatewayClients {
		owners[g.UID] = true
	}
	p.hostNumbers, p.hostTaken = map[string]uint32{}, map[uint32]bool{}
	for _, d := range p.s.Deployments {
		n, ok := hostNumber(d.Labels[v1beta1.LabelHostInterface])
		if _, has := p.hostNumbers[d.Owner]; ok && !has && d.Owner != "" && owners[d.Owner] && !p.hostTaken[n] {
			p.hostNumbers[d.Owner], p.hostTaken[n] = n, true
		}
	}
}

// hostNumberOf returns the number of a gateway: the one it has, or the first
// that is free. It is taken when the gateway's template turns out to need it.
func (p *planner) hostNumberOf(g *cluster.Gateway) (uint32, bool) {
	if n, ok := p.hostNumbers[g.UID]; ok && g.UID != "" {
		return n, true
	}
	free := ipam.Numbers(1, 0, lastHostNumber, p.hostTaken)
	if len(free) == 0 {
		return math.MaxUint32, false
	}
	return free[0], true
}

// checkHostNetwork refuses g if its template runs it in the network of the
// node and that can't be.
func (p *planner) checkHostNetwork(g *cluster.Gateway, w *workload, template string) {
	if !w.deployment.Spec.Template.Spec.HostNetwork {
		return
	}
	n, free := p.hostNumberOf(g)
	name := hostInterfaceOf(n)
	switch {
	case !free:
		p.refuse(g.Meta, ReasonNetworkFull, "%s: there are %d gateways in network namespaces of nodes already: name a template that runs them as pods", template, lastHostNumber+1)
		return
	case w.deployment.Metadata.Labels[v1beta1.LabelHostInterface] != name || w.deployment.Spec.Template.Labels[v1beta1.LabelHostInterface] != name:
		p.refuse(g.Meta, ReasonBadTemplate, "%s: has hostNetwork but no label %s={{ .HostInterface }} on the Deployment and its pods: nodes would not know the way to the gateway", template, v1beta1.LabelHostInterface)
		return
	case p.overlay == cluster.OverlayGeneve:
		p.refuse(g.Meta, ReasonNeedsVXLAN, "%s: a gateway in a network namespace of its node (%s) needs the VXLAN overlay, and nodes and gateways are joined by Geneve: set the chart's value networking.overlay to vxlan, or name the template wireguard-%s, which runs the gateway as a pod", template, v1beta1.GatewayNetNS, g.Role)
		return
	}
	p.hostTaken[n] = true
	if g.UID != "" {
		p.hostNumbers[g.UID] = n
	}
}

// hostInterface returns the link that leads from its node to the pod that
// carries the traffic of a peering, or that did as long as there is no other;
// empty for a pod with a network of its own.
func (p *planner) hostInterface(peer *peering) string {
	if pod := peer.pod; pod != nil {
		if !pod.HostNetwork {
			return ""
		}
		return pod.Labels[v1beta1.LabelHostInterface]
	}
	if f := p.existingFabric(peer.gateway); f != nil && !f.Deleting {
		return f.HostInterface
	}
	return ""
}
