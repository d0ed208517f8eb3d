package kube

import (
	"cmp"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	corev1beta1 "github.com/isthmus-net/isthmus/appliance/api/core/v1beta1"
	ipamv1alpha1 "github.com/isthmus-net/isthmus/appliance/api/ipam/v1alpha1"
	v1beta1 "github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/internal/invitation"
	"github.com/isthmus-net/isthmus/appliance/plan"
)

// Snapshot parses everything that the controller knows.
func Snapshot(o Objects) cluster.Snapshot {
	s := cluster.Snapshot{ID: o.ClusterID, Namespace: o.Namespace, Options: o.Options, Now: o.Now}
	var p problems
	for _, n := range parse(&p, o.Nodes, Node, func(n cluster.Node) cluster.Meta { return n.Meta }) {
		if real(n) {
			s.Nodes = append(s.Nodes, n)
		}
	}
	s.Pods = pods(&p, o.Pods, s.Nodes)
	s.NodeDaemons = nodeDaemons(&p, o.Pods, o.Namespace)
	s.Pulls = pulls(o.Pods)
	var services []corev1.Service
	for i := range o.Services {
		if svc := &o.Services[i]; Made(svc) {
			services = append(services, *svc)
		} else {
			ref := metaOf(svc, corev1.SchemeGroupVersion, "Service").Ref
			s.OtherServices = append(s.OtherServices, ref)
			for _, p := range svc.Spec.Ports {
				if p.NodePort > 0 {
					if s.OtherNodePorts == nil {
						s.OtherNodePorts = map[uint16]cluster.Ref{}
					}
					s.OtherNodePorts[uint16(p.NodePort)] = ref
				}
			}
		}
	}
	s.Services = parse(&p, services, Service, func(v cluster.Service) cluster.Meta { return v.Meta })
	s.Deployments = parse(&p, o.Deployments, Deployment, func(v cluster.Deployment) cluster.Meta { return v.Meta })
	for i := range o.Secrets {
		if k, ok := KeySecret(&o.Secrets[i]); ok {
			s.Secrets = append(s.Secrets, k)
		}
		if i, ok := openInvitation(&o.Secrets[i]); ok {
			s.Invitations = append(s.Invitations, i)
		}
	}
	slices.SortFunc(s.Secrets, func(a, b cluster.KeySecret) int { return compareNames(a.Meta, b.Meta) })
	slices.SortFunc(s.Invitations, func(a, b cluster.Invitation) int { return compareNames(a.Meta, b.Meta) })
	withGateway := map[string]bool{}
	for i := range o.GatewayServers {
		withGateway[o.GatewayServers[i].Namespace] = true
	}
	for i := range o.GatewayClients {
		withGateway[o.GatewayClients[i].Namespace] = true
	}
	for i := range o.Namespaces {
		if ns := &o.Namespaces[i]; ns.Name == o.Namespace || ns.Labels[v1beta1.LabelTenantNamespace] == "true" ||
			strings.HasPrefix(ns.Name, v1beta1.TenantNamespacePfx) || withGateway[ns.Name] {
			s.Namespaces = append(s.Namespaces, cluster.Namespace{Meta: metaOf(ns, corev1.SchemeGroupVersion, "Namespace")})
		}
	}
	slices.SortFunc(s.Namespaces, func(a, b cluster.Namespace) int { return compareNames(a.Meta, b.Meta) })

	s.APIServers = endpoints(&p, o.APIServers)

	s.Configurations = parse(&p, o.Configurations, Configuration, func(v cluster.Configuration) cluster.Meta { return v.Meta })
	s.Connections = parse(&p, o.Connections, Connection, func(v cluster.Connection) cluster.Meta { return v.Meta })
	s.GatewayServers = parse(&p, o.GatewayServers, GatewayServer, func(v cluster.Gateway) cluster.Meta { return v.Meta })
	s.GatewayClients = parse(&p, o.GatewayClients, GatewayClient, func(v cluster.Gateway) cluster.Meta { return v.Meta })
	s.ServerTemplates = parse(&p, o.ServerTemplates, ServerTemplate, func(v cluster.Template) cluster.Meta { return v.Meta })
	s.ClientTemplates = parse(&p, o.ClientTemplates, ClientTemplate, func(v cluster.Template) cluster.Meta { return v.Meta })
	s.PublicKeys = parse(&p, o.PublicKeys, PublicKey, func(v cluster.PublicKey) cluster.Meta { return v.Meta })
	for i := range o.BlockedKeys {
		keys, invalid := BlockedKeys(&o.BlockedKeys[i])
		s.BlockedKeys, p.invalid = append(s.BlockedKeys, keys...), append(p.invalid, invalid...)
	}
	s.Fabrics = parse(&p, o.Fabrics, InternalFabric, func(v cluster.InternalFabric) cluster.Meta { return v.Meta })
	s.InternalNodes = parse(&p, o.InternalNodes, InternalNode, func(v cluster.InternalNode) cluster.Meta { return v.Meta })
	s.Tunnels = parse(&p, o.Tunnels, GeneveTunnel, func(v cluster.GeneveTunnel) cluster.Meta { return v.Meta })
	s.Routes = parse(&p, o.Routes, RouteConfiguration, func(v cluster.RouteConfiguration) cluster.Meta { return v.Meta })
	s.Firewalls = parse(&p, o.Firewalls, FirewallConfiguration, func(v cluster.FirewallConfiguration) cluster.Meta { return v.Meta })
	s.Reports = parse(&p, o.Reports, GatewayReport, func(v cluster.GatewayReport) cluster.Meta { return v.Meta })
	s.Networks = parse(&p, o.Networks, Network, func(v cluster.Network) cluster.Meta { return v.Meta })
	s.IPs = parse(&p, o.IPs, IP, func(v cluster.IP) cluster.Meta { return v.Meta })
	s.ForeignClusters = parse(&p, o.ForeignClusters, ForeignCluster, func(v cluster.ForeignCluster) cluster.Meta { return v.Meta })
	s.TunnelEndpoints = parse(&p, o.TunnelEndpoints, TunnelEndpoint, func(v cluster.TunnelEndpoint) cluster.Meta { return v.Meta })

	slices.SortStableFunc(p.invalid, func(a, b cluster.InvalidError) int {
		return cmp.Or(
			strings.Compare(a.Object.Kind, b.Object.Kind),
			strings.Compare(a.Object.Namespace, b.Object.Namespace),
			strings.Compare(a.Object.Name, b.Object.Name))
	})
	for _, e := range p.invalid {
		if e.Note {
			s.Notes = append(s.Notes, e)
		} else {
			s.Invalid = append(s.Invalid, e)
		}
	}
	return s
}

// endpoints returns the addresses of EndpointSlices, each once and sorted.
func endpoints(p *problems, slicesOf []discoveryv1.EndpointSlice) []netip.Addr {
	var out []netip.Addr
	for i := range slicesOf {
		o := &slicesOf[i]
		if o.AddressType == discoveryv1.AddressTypeFQDN {
			continue
		}
		r := &reader{object: metaOf(o, discoveryv1.SchemeGroupVersion, "EndpointSlice").Ref}
		for e, endpoint := range o.Endpoints {
			for j, text := range endpoint.Addresses {
				if a := r.addr(fmt.Sprintf("endpoints[%d].addresses[%d]", e, j), text); a.IsValid() {
					out = append(out, a)
				}
			}
		}
		p.invalid = append(p.invalid, r.invalid...)
	}
	slices.SortFunc(out, netip.Addr.Compare)
	return slices.Compact(out)
}

// parse returns the values of objects, by namespace and name.
func parse[T, V any](p *problems, objects []T, one func(*T) (V, []cluster.InvalidError), meta func(V) cluster.Meta) []V {
	var out []V
	for i := range objects {
		v, invalid := one(&objects[i])
		out = append(out, v)
		p.invalid = append(p.invalid, invalid...)
	}
	slices.SortFunc(out, func(a, b V) int { return compareNames(meta(a), meta(b)) })
	return out
}

func compareNames(a, b cluster.Meta) int {
	return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name))
}

// virtualNode is the value of LabelNodeType on nodes that stand for a remote
// cluster.
const virtualNode = "virtual-node"

// real reports whether a node can have the node daemon, which runs on Linux only
// (nodeSelector of its DaemonSet).
func real(n cluster.Node) bool {
	os := n.Labels[corev1.LabelOSStable]
	return n.Labels[v1beta1.LabelNodeType] != virtualNode && (os == "" || os == "linux")
}

// reachedBy are the kinds of addresses at which others can reach a node, in the
// order in which the public system prefers them.
var reachedBy = []corev1.NodeAddressType{corev1.NodeExternalDNS, corev1.NodeExternalIP, corev1.NodeInternalDNS, corev1.NodeInternalIP}

// Node reads a Node.
func Node(o *corev1.Node) (cluster.Node, []cluster.InvalidError) {
	m := metaOf(o, corev1.SchemeGroupVersion, "Node")
	r := &reader{object: m.Ref}
	n := cluster.Node{Meta: m}
	for i, a := range o.Status.Addresses {
		if a.Type != corev1.NodeInternalIP {
			continue
		}
		if addr := r.addr(fmt.Sprintf("status.addresses[%d].address", i), a.Address); addr.IsValid() {
			n.Addresses = append(n.Addresses, addr)
		}
	}
	for _, kind := range reachedBy {
		for _, a := range o.Status.Addresses {
			_, err := netip.ParseAddr(a.Address)
			if isIP := kind == corev1.NodeExternalIP || kind == corev1.NodeInternalIP; a.Type == kind && a.Address != "" && (err == nil) == isIP {
				n.Reached = append(n.Reached, a.Address)
			}
		}
	}
	cidrs := o.Spec.PodCIDRs
	if len(cidrs) == 0 && o.Spec.PodCIDR != "" {
		cidrs = []string{o.Spec.PodCIDR}
	}
	n.PodCIDRs = prefixes(r, "spec.podCIDRs", cidrs)
	for _, c := range o.Status.Conditions {
		if c.Type == corev1.NodeReady {
			n.Ready = c.Status == corev1.ConditionTrue
			n.Lost = !n.Ready
		}
	}
	n.Unschedulable = o.Spec.Unschedulable
	return n, r.invalid
}

// Pod reads a Pod.
func Pod(o *corev1.Pod) (cluster.Pod, []cluster.InvalidError) {
	m := metaOf(o, corev1.SchemeGroupVersion, "Pod")
	r := &reader{object: m.Ref}
	p := cluster.Pod{
		Meta:    m,
		Node:    o.Spec.NodeName,
		Running: o.Status.Phase == corev1.PodRunning && !m.Deleting,

		HostNetwork: o.Spec.HostNetwork,
	}
	if o.Status.StartTime != nil {
		p.Started = o.Status.StartTime.Time
	}
	for i, ip := range o.Status.PodIPs {
		if a := r.addr(fmt.Sprintf("status.podIPs[%d].ip", i), ip.IP); a.IsValid() {
			p.IPs = append(p.IPs, a)
		}
	}
	if len(o.Status.PodIPs) == 0 {
		if a := r.addr("status.podIP", o.Status.PodIP); a.IsValid() {
			p.IPs = append(p.IPs, a)
		}
	}
	for _, c := range o.Status.Conditions {
		p.Ready = p.Ready || c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue && !m.Deleting
	}
	return p, r.invalid
}

// pods returns the pods that matter to routing: gateways, and those that the
// podCIDRs of their node do not lead to. Pods in the host's network, on nodes
// that are not real, and those that are over are not among them.
func pods(p *problems, all []corev1.Pod, nodes []cluster.Node) []cluster.Pod {
	cidrs := make(map[string][]netip.Prefix, len(nodes))
	for _, n := range nodes {
		cidrs[n.Name] = n.PodCIDRs
	}
	var out []cluster.Pod
	for i := range all {
		of, real := cidrs[all[i].Spec.NodeName]
		if pod, invalid, routed := routedPod(&all[i], of, real); routed {
			out = append(out, pod)
			p.invalid = append(p.invalid, invalid...)
		}
	}
	slices.SortFunc(out, func(a, b cluster.Pod) int { return compareNames(a.Meta, b.Meta) })
	return out
}

// routedPod reads a pod, and reports whether it is one of those that pods returns. Its
// node has these podCIDRs, if it is real.
func routedPod(o *corev1.Pod, of []netip.Prefix, real bool) (pod cluster.Pod, invalid []cluster.InvalidError, routed bool) {
	if o.Status.Phase == corev1.PodSucceeded || o.Status.Phase == corev1.PodFailed || IsPull(o) {
		return pod, nil, false
	}
	gateway := o.Labels[v1beta1.LabelComponent] == v1beta1.ComponentGateway
	if !gateway && (o.Spec.HostNetwork || !real || o.Status.PodIP == "") {
		return pod, nil, false
	}
	pod, invalid = Pod(o)
	outside := slices.ContainsFunc(pod.IPs, func(a netip.Addr) bool {
		return !slices.ContainsFunc(of, func(p netip.Prefix) bool { return p.Contains(a) })
	})
	return pod, invalid, gateway || outside
}

// PodMatters reports whether a [Snapshot] has anything of a pod, which is on this node;
// nil: on none that is known.
func PodMatters(o *corev1.Pod, on *corev1.Node, namespace string) bool {
	if IsPull(o) || isNodeDaemon(o, namespace) {
		return true
	}
	var n cluster.Node
	if on != nil {
		n, _ = Node(on)
	}
	_, _, routed := routedPod(o, n.PodCIDRs, on != nil && real(n))
	return routed
}

// isNodeDaemon reports whether a pod is one of the node daemon of this installation.
func isNodeDaemon(o *corev1.Pod, namespace string) bool {
	return o.Namespace == namespace && o.Labels[v1beta1.LabelAppName] == v1beta1.NodeDaemonName
}

// nodeDaemons returns the pods of the nodes' daemons that run.
func nodeDaemons(p *problems, all []corev1.Pod, namespace string) []cluster.Pod {
	var out []cluster.Pod
	for i := range all {
		if !isNodeDaemon(&all[i], namespace) {
			continue
		}
		if pod, invalid := Pod(&all[i]); pod.Running {
			out = append(out, pod)
			p.invalid = append(p.invalid, invalid...)
		}
	}
	slices.SortFunc(out, func(a, b cluster.Pod) int { return compareNames(a.Meta, b.Meta) })
	return out
}

// Made reports whether an object of one of Kubernetes' own kinds was made by the
// controller: its label says so or, if somebody took that off, its owner.
func Made(o metav1.Object) bool {
	if o.GetLabels()[v1beta1.LabelManagedBy] == v1beta1.ManagedBy {
		return true
	}
	owner := metav1.GetControllerOf(o)
	return owner != nil && strings.Contains(owner.APIVersion, ".liqo.io/")
}

// Service reads a Service.
func Service(o *corev1.Service) (cluster.Service, []cluster.InvalidError) {
	m := metaOf(o, corev1.SchemeGroupVersion, "Service")
	r := &reader{object: m.Ref}
	s := cluster.Service{Meta: m, Type: string(o.Spec.Type)}
	ips := o.Spec.ClusterIPs
	if len(ips) == 0 && o.Spec.ClusterIP != "" {
		ips = []string{o.Spec.ClusterIP}
	}
	for i, ip := range ips {
		if ip == corev1.ClusterIPNone {
			continue
		}
		if a := r.addr(fmt.Sprintf("spec.clusterIPs[%d]", i), ip); a.IsValid() {
			s.ClusterIPs = append(s.ClusterIPs, a)
		}
	}
	for i, p := range o.Spec.Ports {
		field := fmt.Sprintf("spec.ports[%d]", i)
		s.Ports = append(s.Ports, cluster.ServicePort{
			Protocol: string(p.Protocol),
			Port:     uint16(r.number(field+".port", int(p.Port), 0, math.MaxUint16)),
			NodePort: uint16(r.number(field+".nodePort", int(p.NodePort), 0, math.MaxUint16)),
		})
	}
	for _, in := range o.Status.LoadBalancer.Ingress {
		if in.IP != "" {
			s.Ingress = append(s.Ingress, in.IP)
		}
	}
	for _, in := range o.Status.LoadBalancer.Ingress {
		if in.IP == "" && in.Hostname != "" {
			s.Ingress = append(s.Ingress, in.Hostname)
		}
	}
	return s, r.invalid
}

// Deployment reads a Deployment.
func Deployment(o *appsv1.Deployment) (cluster.Deployment, []cluster.InvalidError) {
	d := cluster.Deployment{
		Meta:          metaOf(o, appsv1.SchemeGroupVersion, "Deployment"),
		Replicas:      1,
		ReadyReplicas: o.Status.ReadyReplicas,
		Strategy:      string(o.Spec.Strategy.Type),
		Images:        plan.PodImages(&o.Spec.Template.Spec),
		Observed:      o.Status.ObservedGeneration >= o.Generation,
	}
	if o.Spec.Replicas != nil {
		d.Replicas = *o.Spec.Replicas
	}
	d.Updated = o.Status.UpdatedReplicas >= d.Replicas && o.Status.Replicas <= o.Status.UpdatedReplicas
	if owner := metav1.GetControllerOf(o); owner != nil {
		d.Owner = string(owner.UID)
	}
	for _, v := range o.Spec.Template.Spec.Volumes {
		if v.Secret != nil {
			d.Secrets = append(d.Secrets, v.Secret.SecretName)
		}
	}
	return d, nil
}

// KeySecret reads a Secret with WireGuard keys, of which it takes the public
// one only. It returns false for other Secrets.
func KeySecret(o *corev1.Secret) (cluster.KeySecret, bool) {
	if o.Labels[v1beta1.LabelGatewayResource] != "true" || slices.Contains([]corev1.SecretType{v1beta1.SecretTypeInvitation, v1beta1.SecretTypeHandover, v1beta1.SecretTypeRotation}, o.Type) {
		return cluster.KeySecret{}, false
	}
	return cluster.KeySecret{
		Meta:       metaOf(o, corev1.SchemeGroupVersion, "Secret"),
		PublicKey:  o.Data[v1beta1.PublicKeyField],
		HasPrivate: len(o.Data[v1beta1.PrivateKeyField]) > 0,
	}, true
}

// openInvitation reads the Secret of an invitation, without its keys. It returns false for other
// Secrets, for an invitation that is done, and for one that can't be read, of which the
// controller says so.
func openInvitation(o *corev1.Secret) (cluster.Invitation, bool) {
	if o.Type != v1beta1.SecretTypeInvitation || o.DeletionTimestamp != nil {
		return cluster.Invitation{}, false
	}
	r, err := invitation.ReadRecord(o.Data)
	if err != nil || r.Done {
		return cluster.Invitation{}, false
	}
	out := cluster.Invitation{
		Meta: metaOf(o, corev1.SchemeGroupVersion, "Secret"), RemoteID: r.To, Accepting: r.Accepting,
		Asks: r.Undecided(), Used: r.Used != nil, Expires: r.Expires,
	}
	if r.Accepting {
		out.RemoteID = r.From
	}
	return out, true
}

// Network reads a Network.
func Network(o *ipamv1alpha1.Network) (cluster.Network, []cluster.InvalidError) {
	m := metaOf(o, ipamv1alpha1.GroupVersion, "Network")
	r := &reader{object: m.Ref}
	r.need("spec.cidr", string(o.Spec.CIDR), "10.0.0.0/16")
	return cluster.Network{
		Meta:         m,
		CIDR:         r.prefix("spec.cidr", string(o.Spec.CIDR)),
		Status:       r.prefix("status.cidr", string(o.Status.CIDR)),
		PreAllocated: r.number("spec.preAllocated", int(o.Spec.PreAllocated), 0, math.MaxInt32),
	}, r.invalid
}

// IP reads an IP.
func IP(o *ipamv1alpha1.IP) (cluster.IP, []cluster.InvalidError) {
	m := metaOf(o, ipamv1alpha1.GroupVersion, "IP")
	r := &reader{object: m.Ref}
	r.need("spec.ip", string(o.Spec.IP), "10.0.0.1")
	ip := cluster.IP{
		Meta:       m,
		IP:         r.addr("spec.ip", string(o.Spec.IP)),
		Masquerade: value(o.Spec.Masquerade),
		Status:     r.addr("status.ip", string(o.Status.IP)),
		CIDR:       r.prefix("status.cidr", string(o.Status.CIDR)),
	}
	if o.Spec.ServiceTemplate != nil {
		ip.ServiceTemplate = r.json(o.Spec.ServiceTemplate)
	}
	if o.Spec.NetworkRef != nil {
		ip.NetworkRef = refOf(*o.Spec.NetworkRef)
	}
	return ip, r.invalid
}

// ForeignCluster reads a ForeignCluster.
func ForeignCluster(o *corev1beta1.ForeignCluster) (cluster.ForeignCluster, []cluster.InvalidError) {
	return cluster.ForeignCluster{
		Meta:      metaOf(o, corev1beta1.GroupVersion, "ForeignCluster"),
		ClusterID: string(o.Spec.ClusterID),
	}, nil
}
