package plan

import (
	"bytes"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/desired"
)

// fromTunnelEndpoints plans what TunnelEndpoints stand for, and says where they
// contradict what the user wrote.
func (p *planner) fromTunnelEndpoints() {
	for _, e := range p.current() {
		p.configurationFrom(e)
		p.gatewayFrom(e)
		p.publicKeyFrom(e)
		p.checkLocal(e, "spec.localPodCIDR", e.Pod.Local, v1beta1.NetworkTypePod)
		p.checkLocal(e, "spec.localExternalCIDR", e.External.Local, v1beta1.NetworkTypeExternal)
		p.checkLocalNAT(e, "Pod", e.Pod)
		p.checkLocalNAT(e, "External", e.External)
	}
	p.keepMade()
}

// configurationFrom plans the Configuration that e stands for.
func (p *planner) configurationFrom(e *cluster.TunnelEndpoint) {
	if peer := p.lookup(e.RemoteID); peer != nil && peer.config != nil && !made(peer.config.Meta) {
		p.contradictsNetworks(e, peer)
		return
	}
	for _, c := range p.s.Configurations {
		if !p.free(e, c.Meta) {
			return
		}
	}
	o := &v1beta1.Configuration{TypeMeta: typeMeta("Configuration"), ObjectMeta: owned(e.Name, e.RemoteID, e.Meta)}
	if local := p.local.cidrs(); len(local.Pod) > 0 {
		o.Spec.Local = &v1beta1.ClusterConfig{CIDR: v1beta1.ClusterConfigCIDR{Pod: apiCIDRs(local.Pod), External: apiCIDRs(local.External)}}
	}
	o.Spec.Remote.CIDR.Pod = apiCIDRs(e.Remote().Pod)
	o.Spec.Remote.CIDR.External = apiCIDRs(e.Remote().External)
	p.add(o)
}

// contradictsNetworks refuses e where it says of the peer's networks something
// else than the Configuration that the user wrote.
func (p *planner) contradictsNetworks(e *cluster.TunnelEndpoint, peer *peering) {
	config := peer.config
	for _, x := range []struct {
		kind, field string
		mapping     cluster.Mapping
		has, remap  []netip.Prefix
	}{
		{"Pod", "spec.remote.cidr.pod", e.Pod, config.Remote.Pod, peer.remap.Pod},
		{"External", "spec.remote.cidr.external", e.External, config.Remote.External, peer.remap.External},
	} {
		if !x.mapping.Remote.IsValid() {
			continue
		}
		i := slices.Index(x.has, x.mapping.Remote)
		switch {
		case i < 0:
			p.contradicts(e, config.Meta, "spec.remote%sCIDR is %v, but %s is %v", x.kind, x.mapping.Remote, x.field, x.has)
		case peer.ready && x.mapping.RemoteNAT.IsValid() && x.mapping.RemoteNAT != x.remap[i]:
			p.contradicts(e, config.Meta, "spec.remoteNAT%sCIDR is %v, but that network is known as %v", x.kind, x.mapping.RemoteNAT, x.remap[i])
		}
	}
}

// gatewayFrom plans the GatewayServer or GatewayClient that e stands for. It
// names no template, which means the chart's.
func (p *planner) gatewayFrom(e *cluster.TunnelEndpoint) {
	if peer := p.lookup(e.RemoteID); peer != nil && peer.gateway != nil && !made(peer.gateway.Meta) {
		p.contradictsGateway(e, peer.gateway)
		return
	}
	for _, g := range slices.Concat(p.s.GatewayServers, p.s.GatewayClients) {
		if !p.free(e, g.Meta) {
			return
		}
	}
	port := int32(e.Port)
	if !serves(e) {
		o := &v1beta1.GatewayClient{TypeMeta: typeMeta("GatewayClient"), ObjectMeta: owned(e.Name, e.RemoteID, e.Meta)}
		o.Spec.Endpoint = v1beta1.EndpointStatus{Addresses: []string{e.Address}, Port: &port, Protocol: ptr(corev1.ProtocolUDP)}
		p.add(o)
		return
	}
	o := &v1beta1.GatewayServer{TypeMeta: typeMeta("GatewayServer"), ObjectMeta: owned(e.Name, e.RemoteID, e.Meta)}
	o.Spec.Endpoint = v1beta1.Endpoint{ServiceType: corev1.ServiceType(e.ServiceType), Ports: []int32{desired.WireGuardPort}}
	switch {
	case port == 0:
	case o.Spec.Endpoint.ServiceType == corev1.ServiceTypeNodePort:
		o.Spec.Endpoint.NodePorts = []int32{port} // this is what the peer dials
	default:
		o.Spec.Endpoint.Ports = []int32{port}
	}
	p.add(o)
}

// contradictsGateway refuses e where it says something else of the endpoint
// than the gateway that the user wrote. A TunnelEndpoint without an endpointIP
// says nothing.
func (p *planner) contradictsGateway(e *cluster.TunnelEndpoint, g *cluster.Gateway) {
	switch {
	case serves(e):
	case g.Role == cluster.Server:
		p.contradicts(e, g.Meta, "spec.endpointIP is %s, but that waits for cluster %s to dial", e.Address, e.RemoteID)
	case !slices.Contains(g.Addresses, e.Address):
		p.contradicts(e, g.Meta, "spec.endpointIP is %s, but spec.endpoint.addresses is %v", e.Address, g.Addresses)
	case e.Port != g.Port:
		p.contradicts(e, g.Meta, "spec.backend_config.port is %d, but spec.endpoint.port is %d", e.Port, g.Port)
	}
}

// publicKeyFrom plans the PublicKey that e stands for.
func (p *planner) publicKeyFrom(e *cluster.TunnelEndpoint) {
	if e.Key == nil {
		return
	}
	if k := p.keys[e.RemoteID]; k != nil && !made(k.Meta) {
		if !bytes.Equal(k.Key, e.Key) {
			p.contradicts(e, k.Meta, "spec.backend_config.publicKey is not its spec.publicKey")
		}
		return
	}
	for _, k := range p.s.PublicKeys {
		if !p.free(e, k.Meta) {
			return
		}
	}
	o := &v1beta1.PublicKey{TypeMeta: typeMeta("PublicKey"), ObjectMeta: owned(e.Name, e.RemoteID, e.Meta)}
	o.Labels[v1beta1.LabelGatewayResource] = "true"
	o.Spec.PublicKey = e.Key
	p.add(o)
}

// contradicts refuses e because of what m, which the user wrote, says.
func (p *planner) contradicts(e *cluster.TunnelEndpoint, m cluster.Meta, format string, args ...any) {
	p.refuse(e.Meta, ReasonContradicts, "%s counts more than this TunnelEndpoint: "+format+": correct one of the two, or delete the one that is not needed",
		append([]any{m.Ref}, args...)...)
}

// free reports whether the name that an object made from e would have is free
// of m, and refuses e if it is not.
func (p *planner) free(e *cluster.TunnelEndpoint, m cluster.Meta) bool {
	if made(m) || m.Namespace != e.Namespace || m.Name != e.Name {
		return true
	}
	p.refuse(e.Meta, ReasonNameTaken, "%s has the name that the one made from this TunnelEndpoint would have, and is of no use for cluster %s: see its condition, or give the TunnelEndpoint another name", m.Ref, e.RemoteID)
	return false
}

// checkLocal remarks that e says something else of this cluster's networks than
// is so. Nothing depends on it here, but the peer may have been told the same.
func (p *planner) checkLocal(e *cluster.TunnelEndpoint, field string, says netip.Prefix, kind string) {
	is := p.local.ofType(kind)
	if says.IsValid() && len(is) > 0 && !slices.Contains(is, says) {
		p.remark(e.Meta, Warning, ReasonContradicts, "%s is %v, but that network of this cluster is %v: correct it, and see what the TunnelEndpoint of cluster %s says", field, says, is, e.RemoteID)
	}
}

// keepMade keeps what was made from TunnelEndpoints that are not sound any
// more as it is.
func (p *planner) keepMade() {
	keep := func(m cluster.Meta, id string) {
		if !made(m) || p.superseded[keyOf(m.Ref)] || p.endpoints[id] != nil {
			return
		}
		p.out.Keep = append(p.out.Keep, cluster.Ref{APIVersion: m.APIVersion, Kind: m.Kind, Namespace: m.Namespace, Name: m.Name})
		v := p.verdict(cluster.Meta{Ref: cluster.Ref{Kind: "TunnelEndpoint", Namespace: m.Namespace, Name: m.Name}})
		if remains := "until then what was made from it stays as it is"; !slices.Contains(v.messages, remains) {
			v.messages = append(v.messages, remains)
		}
	}
	for _, c := range p.s.Configurations {
		keep(c.Meta, c.RemoteID)
	}
	for _, g := range slices.Concat(p.s.GatewayServers, p.s.GatewayClients) {
		keep(g.Meta, g.RemoteID)
	}
	for _, k := range p.s.PublicKeys {
		keep(k.Meta, k.RemoteID)
	}
}

// checkLocalNAT remarks that the remote cluster can't know a network of this
// one by what e says.
func (p *planner) checkLocalNAT(e *cluster.TunnelEndpoint, kind string, m cluster.Mapping) {
	if m.LocalNAT.IsValid() && m.Local.IsValid() && !sameSize(m.LocalNAT, m.Local) {
		p.remark(e.Meta, Warning, ReasonContradicts, "spec.localNAT%sCIDR %v is not of the size of spec.local%sCIDR %v: write what the TunnelEndpoint of cluster %s says, or None", kind, m.LocalNAT, kind, m.Local, e.RemoteID)
	}
}
