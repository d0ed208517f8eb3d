package kube

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v1beta1 "github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
)

// read returns what all objects of the group share, and a reader for the rest.
func read(o metav1.Object, kind string) (cluster.Meta, *reader) {
	m := metaOf(o, v1beta1.GroupVersion, kind)
	return m, &reader{object: m.Ref}
}

// Configuration reads a Configuration. Networks that do not parse are not in
// the value; where one is missing on either side of the remapping, Remapped is
// empty, for then nobody knows what belongs to what.
func Configuration(o *v1beta1.Configuration) (cluster.Configuration, []cluster.InvalidError) {
	m, r := read(o, "Configuration")
	c := cluster.Configuration{Meta: m, RemoteID: o.Labels[v1beta1.LabelRemoteClusterID]}
	cidrs := func(field string, c v1beta1.ClusterConfigCIDR) cluster.CIDRs {
		return cluster.CIDRs{
			Pod:      prefixes(r, field+".cidr.pod", c.Pod),
			External: prefixes(r, field+".cidr.external", c.External),
		}
	}
	c.Block, c.Blocked = o.Annotations[v1beta1.AnnotationBlocked]
	if o.Spec.Local != nil {
		c.Local = cidrs("spec.local", o.Spec.Local.CIDR)
	}
	c.Remote = cidrs("spec.remote", o.Spec.Remote.CIDR)
	if o.Status.Local != nil {
		c.Own = cidrs("status.local", o.Status.Local.CIDR)
	}
	if o.Status.Remote != nil {
		remapped := cidrs("status.remote", o.Status.Remote.CIDR)
		complete := !slices.ContainsFunc(r.invalid, func(e cluster.InvalidError) bool {
			return !e.Note && strings.Contains(e.Field, ".remote.")
		})
		if complete && len(remapped.Pod) == len(c.Remote.Pod) && len(remapped.External) == len(c.Remote.External) {
			c.Remapped = remapped
		}
	}
	c.Follow = follow(o.Annotations)
	if f := o.Status.Follow; f != nil {
		c.Followed, c.Refused = followed(r, f)
	}
	configured := apimeta.FindStatusCondition(o.Status.Conditions, v1beta1.ConditionNetworkCIDRsConfigured)
	c.Configured = configured != nil && configured.Status == metav1.ConditionTrue && configured.ObservedGeneration == o.Generation
	return c, r.invalid
}

// Connection reads a Connection.
func Connection(o *v1beta1.Connection) (cluster.Connection, []cluster.InvalidError) {
	m, r := read(o, "Connection")
	c := cluster.Connection{
		Meta:     m,
		RemoteID: o.Labels[v1beta1.LabelRemoteClusterID],
		Type:     string(o.Spec.Type),
		Value:    string(o.Status.Value),
		Reported: o.Status.Latency.Timestamp.Time,
	}
	if peer := o.Status.Peer; peer != nil {
		c.Peer = &cluster.Told{
			Version: peer.Version, Features: peer.Features, MTU: peer.MTU, Generation: peer.ObservedGeneration, Since: peer.Since.Time,
		}
		if e := peer.Endpoint; e != nil {
			c.Peer.Endpoint = &cluster.Endpoint{Addresses: e.Addresses, Port: r.port("status.peer.endpoint", "port", &e.Port, nil)}
		}
		if n := peer.Networks; n != nil {
			c.Peer.Networks = &cluster.CIDRs{Pod: prefixes(r, "status.peer.networks.pod", n.Pod), External: prefixes(r, "status.peer.networks.external", n.External)}
		}
	}
	if why := apimeta.FindStatusCondition(o.Status.Conditions, v1beta1.ConditionConnected); why != nil {
		c.Why, c.Blocked = why.Message, why.Reason == v1beta1.ReasonBlocked
	}
	return c, r.invalid
}

// GatewayServer reads a GatewayServer.
func GatewayServer(o *v1beta1.GatewayServer) (cluster.Gateway, []cluster.InvalidError) {
	m, r := read(o, "GatewayServer")
	e := o.Spec.Endpoint
	g := cluster.Gateway{
		Meta:        m,
		Role:        cluster.Server,
		RemoteID:    o.Labels[v1beta1.LabelRemoteClusterID],
		TemplateRef: refOf(o.Spec.ServerTemplateRef),
		MTU:         r.mtu("spec.mtu", o.Spec.MTU),
		SecretName:  o.Spec.SecretRef.Name,
		ServiceType: string(e.ServiceType),
		Port:        r.port("spec.endpoint", "port", e.Port, e.Ports),
		NodePort:    r.port("spec.endpoint", "nodePort", e.NodePort, e.NodePorts),
	}
	if g.ServiceType == "" {
		g.ServiceType = string(corev1.ServiceTypeClusterIP)
	}
	if e.LoadBalancerIP != nil {
		g.LoadBalancerIP = *e.LoadBalancerIP
		r.addr("spec.endpoint.loadBalancerIP", g.LoadBalancerIP)
	}
	g.Reached = r.endpoint("status.endpoint", o.Status.Endpoint)
	raw := o.DeepCopy()
	raw.TypeMeta = metav1.TypeMeta{APIVersion: m.APIVersion, Kind: m.Kind}
	g.Raw = r.json(raw)
	return g, r.invalid
}

// GatewayClient reads a GatewayClient.
func GatewayClient(o *v1beta1.GatewayClient) (cluster.Gateway, []cluster.InvalidError) {
	m, r := read(o, "GatewayClient")
	g := cluster.Gateway{
		Meta:        m,
		Role:        cluster.Client,
		RemoteID:    o.Labels[v1beta1.LabelRemoteClusterID],
		TemplateRef: refOf(o.Spec.ClientTemplateRef),
		MTU:         r.mtu("spec.mtu", o.Spec.MTU),
		SecretName:  o.Spec.SecretRef.Name,
		Port:        r.port("spec.endpoint", "port", o.Spec.Endpoint.Port, o.Spec.Endpoint.Ports),
		Addresses:   o.Spec.Endpoint.Addresses,
	}
	for i, a := range o.Spec.Endpoint.Addresses {
		r.dialled(fmt.Sprintf("spec.endpoint.addresses[%d]", i), a)
	}
	if proto := value(o.Spec.Endpoint.Protocol); proto != "" && proto != corev1.ProtocolUDP {
		r.complain("spec.endpoint.protocol", string(proto), "does not carry WireGuard; write UDP")
	}
	raw := o.DeepCopy()
	raw.TypeMeta = metav1.TypeMeta{APIVersion: m.APIVersion, Kind: m.Kind}
	g.Raw = r.json(raw)
	return g, r.invalid
}

// endpoint reads where a gateway can be dialled; nil: nowhere.
func (r *reader) endpoint(field string, e *v1beta1.EndpointStatus) *cluster.Endpoint {
	if e == nil || len(e.Addresses) == 0 {
		return nil
	}
	return &cluster.Endpoint{Addresses: e.Addresses, Port: r.port(field, "port", e.Port, e.Ports)}
}

func refOf(o corev1.ObjectReference) cluster.Ref {
	return cluster.Ref{APIVersion: o.APIVersion, Kind: o.Kind, Namespace: o.Namespace, Name: o.Name, UID: string(o.UID)}
}

// mtu reads an MTU; 0 is one that is not given.
func (r *reader) mtu(field string, n int) int {
	switch {
	case n == 0:
		return 0
	case n < 576 || n > 65535:
		r.complain(field, strconv.Itoa(n), "is not an MTU; write 576 to 65535, or 0 to have it derived")
		return 0
	}
	return n
}

// port reads a field that is a port, or, in the plural, a list of which the
// first counts.
func (r *reader) port(field, name string, one *int32, many []int32) uint16 {
	switch {
	case one != nil:
		return uint16(r.number(field+"."+name, int(*one), 0, math.MaxUint16))
	case len(many) > 0:
		return uint16(r.number(field+"."+name+"s[0]", int(many[0]), 0, math.MaxUint16))
	}
	return 0
}

func (r *reader) json(o any) []byte {
	raw, err := json.Marshal(o)
	if err != nil {
		r.complain("spec", "", "can't be written as JSON: %v", err)
	}
	return raw
}

// ServerTemplate reads a WgGatewayServerTemplate.
func ServerTemplate(o *v1beta1.WgGatewayServerTemplate) (cluster.Template, []cluster.InvalidError) {
	return template(o, "WgGatewayServerTemplate", o.Spec)
}

// ClientTemplate reads a WgGatewayClientTemplate.
func ClientTemplate(o *v1beta1.WgGatewayClientTemplate) (cluster.Template, []cluster.InvalidError) {
	return template(o, "WgGatewayClientTemplate", o.Spec)
}

func template(o metav1.Object, kind string, spec v1beta1.GatewayTemplateSpec) (cluster.Template, []cluster.InvalidError) {
	m, r := read(o, kind)
	t := cluster.Template{
		Meta:             m,
		ObjectAPIVersion: spec.ObjectKind.APIVersion,
		ObjectKind:       spec.ObjectKind.Kind,
		JSON:             spec.Template.Raw,
	}
	if len(t.JSON) == 0 && spec.Template.Object != nil {
		t.JSON = r.json(spec.Template.Object)
	}
	var fields map[string]any
	if err := json.Unmarshal(t.JSON, &fields); err != nil {
		r.complain("spec.template", "", "is not an object; write metadata and spec of a %s", t.ObjectKind)
		t.JSON = nil
	}
	return t, r.invalid
}

// PublicKey reads a PublicKey.
func PublicKey(o *v1beta1.PublicKey) (cluster.PublicKey, []cluster.InvalidError) {
	m, r := read(o, "PublicKey")
	k := cluster.PublicKey{Meta: m, RemoteID: o.Labels[v1beta1.LabelRemoteClusterID]}
	k.Key, k.PresharedKey, k.Learned = o.Current()
	if n := len(k.Key); n != keySize {
		r.complain("spec.publicKey", "", "has %d bytes; a WireGuard public key has %d, in base64", n, keySize)
		k.Key = nil
	} else if bytes.Count(k.Key, []byte{0}) == keySize {
		r.complain("spec.publicKey", "", "is all zeros, which no private key has for its public one")
		k.Key = nil
	}
	return k, r.invalid
}

// vtep reads a VTEP; the zero value is one that is of no use.
func (r *reader) vtep(field string, v v1beta1.VTEP) cluster.VTEP {
	before := len(r.invalid)
	ip := r.addr(field+".ip", string(v.IP))
	if ip.IsValid() && (ip.IsUnspecified() || ip.IsMulticast() || ip.IsLoopback()) {
		r.complain(field+".ip", string(v.IP), "is not the address of a node; write its InternalIP")
	}
	mac, err := net.ParseMAC(v.MAC)
	if err != nil || len(mac) != len(cluster.VTEP{}.MAC) || mac[0]&1 != 0 {
		r.complain(field+".mac", v.MAC, "is not the address of a station; write one such as 02:00:0a:50:00:01")
	}
	if len(r.invalid) > before {
		return cluster.VTEP{}
	}
	return cluster.VTEP{IP: ip, MAC: [6]byte(mac)}
}

// InternalFabric reads an InternalFabric.
func InternalFabric(o *v1beta1.InternalFabric) (cluster.InternalFabric, []cluster.InvalidError) {
	m, r := read(o, "InternalFabric")
	return cluster.InternalFabric{
		Meta:          m,
		RemoteID:      o.Labels[v1beta1.LabelRemoteClusterID],
		MTU:           r.mtu("spec.mtu", o.Spec.MTU),
		TunnelMTU:     r.mtu("spec.tunnelMTU", o.Spec.TunnelMTU),
		RemoteCIDRs:   prefixes(r, "spec.remoteCIDRs", o.Spec.RemoteCIDRs),
		NodeInterface: o.Spec.Interface.Node.Name,
		GatewayIP:     r.addr("spec.gatewayIP", string(o.Spec.GatewayIP)),
		InternalIP:    r.addr("spec.interface.gateway.ip", string(o.Spec.Interface.Gateway.IP)),
		GatewayNode:   o.Spec.GatewayNode,
		GatewayGone:   o.Spec.GatewayGone,
		Overlay:       cluster.Overlay(o.Spec.Overlay),
		HostInterface: o.Spec.HostInterface,
		PeerCIDRs:     prefixes(r, "spec.peerCIDRs", o.Spec.PeerCIDRs),
		EndpointPorts: ports(r, "spec.endpointPorts", o.Spec.EndpointPorts),
	}, r.invalid
}

// InternalNode reads an InternalNode.
func InternalNode(o *v1beta1.InternalNode) (cluster.InternalNode, []cluster.InvalidError) {
	m, r := read(o, "InternalNode")
	n := cluster.InternalNode{
		Meta:             m,
		GatewayInterface: o.Spec.Interface.Gateway.Name,
		InternalIP:       r.addr("spec.interface.node.ip", string(o.Spec.Interface.Node.IP)),
		Applied:          applied(o.Status.Applied),
		Conditions:       hostConditions(o.Status.Conditions),
	}
	optional := func(field string, ip *v1beta1.IP) netip.Addr {
		if ip == nil {
			return netip.Addr{}
		}
		return r.addr(field, string(*ip))
	}
	n.Local = optional("status.nodeIP.local", o.Status.NodeIP.Local)
	n.Remote = optional("status.nodeIP.remote", o.Status.NodeIP.Remote)
	n.Overlay = cluster.Overlay(o.Spec.Overlay)
	if o.Spec.PodCIDRs != nil { // an empty list says that there are none
		n.PodCIDRs = append([]netip.Prefix{}, prefixes(r, "spec.podCIDRs", o.Spec.PodCIDRs)...)
	}
	n.PodNetworks = prefixes(r, "spec.podNetworks", o.Spec.PodNetworks)
	n.OpenToPeers = prefixes(r, "spec.openToPeers", o.Spec.OpenToPeers)
	for i, ip := range o.Status.Addresses {
		if a := r.addr(fmt.Sprintf("status.addresses[%d]", i), string(ip)); a.IsValid() {
			n.Addresses = append(n.Addresses, a)
		}
	}
	for _, kind := range o.Status.Overlays {
		n.Overlays = append(n.Overlays, cluster.Overlay(kind))
	}
	n.WireGuard = o.Status.WireGuard
	if v := o.Status.VTEP; v != nil {
		n.VTEP = r.vtep("status.vtep", *v)
	}
	for i, x := range o.Status.Needs {
		if a := r.addr(fmt.Sprintf("status.needs[%d].ip", i), string(x.IP)); a.IsValid() {
			n.Needs = append(n.Needs, cluster.Needed{IP: a, For: string(x.For)})
		}
	}
	return n, r.invalid
}

// GeneveTunnel reads a GeneveTunnel.
func GeneveTunnel(o *v1beta1.GeneveTunnel) (cluster.GeneveTunnel, []cluster.InvalidError) {
	m, r := read(o, "GeneveTunnel")
	t := cluster.GeneveTunnel{Meta: m, VNI: o.Spec.ID}
	if o.Spec.ID >= 1<<24 {
		r.complain("spec.id", strconv.FormatUint(uint64(o.Spec.ID), 10), "is not a VNI; write a number below 16777216")
	}
	if ref := o.Spec.InternalNodeRef; ref != nil && ref.Name != "" {
		t.Node = ref.Name
	} else {
		r.complain("spec.internalNodeRef.name", "", "is empty; write the name of an InternalNode")
	}
	if ref := o.Spec.InternalFabricRef; ref != nil && ref.Name != "" {
		t.Fabric = refOf(*ref)
		if t.Fabric.Namespace == "" {
			t.Fabric.Namespace = m.Namespace
		}
	} else {
		r.complain("spec.internalFabricRef.name", "", "is empty; write the name of an InternalFabric")
	}
	return t, r.invalid
}

// GatewayReport reads a GatewayReport.
func GatewayReport(o *v1beta1.GatewayReport) (cluster.GatewayReport, []cluster.InvalidError) {
	m, r := read(o, "GatewayReport")
	return cluster.GatewayReport{Meta: m, MTU: r.mtu("status.mtu", o.Status.MTU), Applied: applied(o.Status.Applied), Conditions: hostConditions(o.Status.Conditions)}, r.invalid
}

func hostConditions(list []metav1.Condition) []cluster.Condition {
	var out []cluster.Condition
	for _, c := range list {
		out = append(out, cluster.Condition{Type: c.Type, Reason: c.Reason, Message: c.Message, OK: c.Status != metav1.ConditionFalse})
	}
	return out
}

func applied(list []v1beta1.AppliedStatus) []cluster.Applied {
	var out []cluster.Applied
	for _, a := range list {
		out = append(out, cluster.Applied{
			Object:             cluster.Ref{Kind: a.Kind, Namespace: a.Namespace, Name: a.Name},
			ObservedGeneration: a.ObservedGeneration,
			OK:                 a.OK,
			Message:            a.Message,
			Since:              a.LastTransitionTime.Time,
		})
	}
	return out
}

// RouteConfiguration reads a RouteConfiguration.
func RouteConfiguration(o *v1beta1.RouteConfiguration) (cluster.RouteConfiguration, []cluster.InvalidError) {
	m, r := read(o, "RouteConfiguration")
	rc := cluster.RouteConfiguration{Meta: m, Table: o.Spec.Table.Name}
	for i, rule := range o.Spec.Table.Rules {
		field := fmt.Sprintf("spec.table.rules[%d]", i)
		out := cluster.RouteRule{
			Dst: optionalPrefix(r, field+".dst", rule.Dst),
			Src: optionalPrefix(r, field+".src", rule.Src),
			IIF: value(rule.Iif),
			OIF: value(rule.Oif),
		}
		if rule.FwMark != nil {
			// 0 is what packets without a mark have. The rule would take all of them.
			out.Mark = uint32(r.number(field+".fwmark", *rule.FwMark, 1, math.MaxUint32))
		}
		if rule.Priority != nil {
			// 0 is that of the kernel's rule for the local table.
			out.Priority = uint32(r.number(field+".priority", *rule.Priority, 1, math.MaxUint32))
		}
		for j, route := range rule.Routes {
			field := fmt.Sprintf("%s.routes[%d]", field, j)
			if route.Dst == nil || *route.Dst == "" {
				r.complain(field+".dst", "", "is empty; write a CIDR, 0.0.0.0/0 for all of IPv4")
			}
			out.Routes = append(out.Routes, cluster.TableRoute{
				Dst:    optionalPrefix(r, field+".dst", route.Dst),
				Src:    r.addr(field+".src", string(value(route.Src))),
				Via:    r.addr(field+".gw", string(value(route.Gw))),
				Dev:    value(route.Dev),
				OnLink: value(route.Onlink),
				Scope:  string(value(route.Scope)),
			})
		}
		rc.Rules = append(rc.Rules, out)
	}
	return rc, r.invalid
}

func optionalPrefix(r *reader, field string, text *v1beta1.CIDR) netip.Prefix {
	return r.prefix(field, string(value(text)))
}

func value[T any](p *T) T {
	if p == nil {
		var zero T
		return zero
	}
	return *p
}

// FirewallConfiguration reads a FirewallConfiguration.
func FirewallConfiguration(o *v1beta1.FirewallConfiguration) (cluster.FirewallConfiguration, []cluster.InvalidError) {
	m, r := read(o, "FirewallConfiguration")
	t := o.Spec.Table
	fc := cluster.FirewallConfiguration{Meta: m, Table: t.Name, Family: string(t.Family)}
	for i, chain := range t.Chains {
		field := fmt.Sprintf("spec.table.chains[%d]", i)
		out := cluster.Chain{
			Name: chain.Name, Type: string(chain.Type), Hook: string(chain.Hook),
			Policy: string(chain.Policy), Priority: int32(chain.Priority),
		}
		for j, rule := range chain.Rules.FilterRules {
			field := fmt.Sprintf("%s.rules.filterRules[%d]", field, j)
			out.Filter = append(out.Filter, cluster.FilterRule{
				Name: rule.Name, Match: r.matches(field, rule.Match),
				Action: string(rule.Action), Value: value(rule.Value), Counter: rule.Counter,
			})
		}
		for j, rule := range chain.Rules.NatRules {
			field := fmt.Sprintf("%s.rules.natRules[%d]", field, j)
			nat := cluster.NATRule{Name: rule.Name, Match: r.matches(field, rule.Match), Type: string(rule.NatType)}
			if to := value(rule.To); strings.Contains(to, "/") {
				nat.To, nat.ToIsPrefix = r.prefix(field+".to", to), true
			} else if a := r.addr(field+".to", to); a.IsValid() {
				nat.To = netip.PrefixFrom(a, a.BitLen())
			}
			out.NAT = append(out.NAT, nat)
		}
		if n := len(chain.Rules.RouteRules); n > 0 {
			r.complain(field+".rules.routeRules", strconv.Itoa(n)+" rules", "do nothing; leave them out")
		}
		fc.Chains = append(fc.Chains, out)
	}
	return fc, r.invalid
}

// matches reads the matches of a rule. One that names several things at once
// becomes one for each: they are ANDed anyway.
func (r *reader) matches(field string, matches []v1beta1.Match) []cluster.Match {
	var out []cluster.Match
	for i, m := range matches {
		field := fmt.Sprintf("%s.match[%d]", field, i)
		negate := m.Op == v1beta1.MatchOperationNeq
		if m.Op != v1beta1.MatchOperationEq && m.Op != v1beta1.MatchOperationNeq {
			r.complain(field+".op", string(m.Op), "is not an operator; write eq or neq")
		}
		if m.IP == nil && m.Port == nil && m.Proto == nil && m.Dev == nil {
			r.complain(field, "", "says nothing; write ip, port, proto or dev")
		}
		if m.IP != nil {
			if addrs, ok := r.addrRange(field+".ip.value", m.IP.Value); ok {
				out = append(out, cluster.Match{Negate: negate, IP: addrs, Position: string(m.IP.Position)})
			}
		}
		if m.Port != nil {
			if ports, ok := r.portRange(field+".port.value", m.Port.Value); ok {
				out = append(out, cluster.Match{Negate: negate, Ports: ports, Position: string(m.Port.Position)})
			}
		}
		if m.Proto != nil {
			out = append(out, cluster.Match{Negate: negate, Proto: string(m.Proto.Value)})
		}
		if m.Dev != nil {
			if m.Dev.Value == "" {
				r.complain(field+".dev.value", "", "is empty; write the name of a link")
			}
			out = append(out, cluster.Match{Negate: negate, Dev: m.Dev.Value, Position: string(m.Dev.Position)})
		}
	}
	return out
}
