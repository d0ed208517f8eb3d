package plan

import (
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/validation"
	metav1validation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	fieldpath "k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
)

// checkExposure refuses g, a server with this spec, if the API server would
// refuse its Service, or no peer could reach it by that.
func (p *planner) checkExposure(g *cluster.Gateway, s v1beta1.GatewayServerSpec) {
	e := s.Endpoint
	switch {
	case e.ServiceType == corev1.ServiceTypeExternalName:
		p.refuse(g.Meta, ReasonContradicts, "spec.endpoint.serviceType: ExternalName leads to no pod: write LoadBalancer, NodePort or ClusterIP")
	case g.NodePort != 0 && g.ServiceType == string(corev1.ServiceTypeClusterIP):
		p.refuse(g.Meta, ReasonContradicts, "%s is %d, but spec.endpoint.serviceType is ClusterIP: write NodePort or LoadBalancer there, or leave the port of the nodes out", nodePortField(e), g.NodePort)
	case g.NodePort != 0:
		if holder := p.nodePortHolder(g); holder != "" {
			p.refuse(g.Meta, ReasonContradicts, "%s %d is that of %s: write another one, or leave it out to have one chosen", nodePortField(e), g.NodePort, holder)
		}
	}
	if g.LoadBalancerIP != "" && g.ServiceType != string(corev1.ServiceTypeLoadBalancer) {
		p.remark(g.Meta, Warning, ReasonNotUsed, "spec.endpoint.loadBalancerIP %s is not used, for spec.endpoint.serviceType is %s: write LoadBalancer there, or leave the address out", g.LoadBalancerIP, g.ServiceType)
	}
	p.checkFirst(g, "spec.endpoint.ports", e.Ports)
	p.checkFirst(g, "spec.endpoint.nodePorts", e.NodePorts)
	at := fieldpath.NewPath("spec")
	p.checkMetadata(g.Meta, ReasonInvalidField, at.Child("serviceLabels"), s.ServiceLabels, at.Child("serviceAnnotations"), s.ServiceAnnotations)
}

// nodePortField is the field that the port of the nodes is written in.
func nodePortField(e v1beta1.Endpoint) string {
	if e.NodePort != nil {
		return "spec.endpoint.nodePort"
	}
	return "spec.endpoint.nodePorts[0]"
}

// nodePortHolder says who has the port of the nodes that g asks for; empty:
// nobody else. Who has it already has the better right, then who is older. The
// API server gives a number to one Service, whatever the protocol.
func (p *planner) nodePortHolder(g *cluster.Gateway) string {
	for _, s := range p.s.Services {
		if s.Namespace == g.Namespace && s.Name == GatewayName(g.Name) {
			continue
		}
		if slices.ContainsFunc(s.Ports, func(x cluster.ServicePort) bool { return x.NodePort == g.NodePort }) {
			return s.Ref.String()
		}
	}
	if other, taken := p.s.OtherNodePorts[g.NodePort]; taken {
		return other.String()
	}
	for _, other := range p.allGateways {
		if carried := p.carries[keyOf(other.Ref)]; carried != nil && other.Ref != g.Ref && other.NodePort == g.NodePort {
			return other.Ref.String()
		}
	}
	return ""
}

// checkFirst remarks that of several ports only the first is one of the tunnel.
func (p *planner) checkFirst(g *cluster.Gateway, name string, ports []int32) {
	if len(ports) > 1 {
		p.remark(g.Meta, Warning, ReasonNotUsed, "%s[1] and on are not used, for the tunnel has one port, %d: leave the others out", name, ports[0])
	}
}

// checkDialled refuses g, a client with this endpoint, if it dials itself, and
// remarks that it dials the server of another cluster.
func (p *planner) checkDialled(g *cluster.Gateway, e v1beta1.EndpointStatus) {
	p.checkFirst(g, "spec.endpoint.ports", e.Ports)
	for i, text := range e.Addresses {
		at := fmt.Sprintf("spec.endpoint.addresses[%d]", i)
		if a, err := netip.ParseAddr(text); err == nil {
			for _, c := range p.local.ofType(v1beta1.NetworkTypeInternal) {
				if c.Contains(a.Unmap()) {
					p.refuse(g.Meta, ReasonBadAddress, "%s %s is in the internal CIDR %v of this cluster, where no gateway of another one is: write what status.endpoint of the remote cluster's GatewayServer says", at, text, c)
				}
			}
		}
		for _, other := range p.allGateways {
			if other.Role == cluster.Client && p.carries[keyOf(other.Ref)] != nil && other.RemoteID != g.RemoteID && other.Port == g.Port && slices.Contains(other.Addresses, text) {
				p.remark(g.Meta, Warning, ReasonContradicts, "%s %s and port %d are those of %s, too, which is for cluster %s, and a server has one peer: write what status.endpoint of cluster %s's GatewayServer says", at, text, g.Port, other.Ref, other.RemoteID, g.RemoteID)
			}
		}
	}
}

// checkMetadata refuses m if the API server would refuse these labels and
// annotations, which are in these fields of it.
func (p *planner) checkMetadata(m cluster.Meta, reason string, atLabels *fieldpath.Path, labels map[string]string, atAnnotations *fieldpath.Path, annotations map[string]string) {
	for _, err := range append(metav1validation.ValidateLabels(labels, atLabels), validation.ValidateAnnotations(annotations, atAnnotations)...) {
		p.refuse(m, reason, "%s: correct it", err.Error())
	}
}
