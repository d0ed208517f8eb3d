package plan_test

import (
	"encoding/base64"
	"fmt"
	"net/netip"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	ipamv1alpha1 "github.com/isthmus-net/isthmus/appliance/api/ipam/v1alpha1"
	netv1alpha1 "github.com/isthmus-net/isthmus/appliance/api/net/v1alpha1"
	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
)

// address returns the n-th address of a network.
func address(cidr string, n int) string {
	a := netip.MustParsePrefix(cidr).Masked().Addr()
	for range n {
		a = a.Next()
	}
	return a.String()
}

// node adds a node.
func (w *world) node(name, addr, podCIDR string) {
	w.t.Helper()
	n := &corev1.Node{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Node"}, ObjectMeta: metav1.ObjectMeta{Name: name}}
	n.Spec.PodCIDR, n.Spec.PodCIDRs = podCIDR, []string{podCIDR}
	n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: addr}}
	w.create(n)
}

// network adds a Network of this cluster.
func (w *world) network(kind, cidr string) {
	w.t.Helper()
	n := &ipamv1alpha1.Network{TypeMeta: metav1.TypeMeta{APIVersion: "ipam.liqo.io/v1alpha1", Kind: "Network"}}
	n.Namespace, n.Name = "liqo", kind
	n.Labels = map[string]string{v1beta1.LabelNetworkType: kind}
	if kind != v1beta1.NetworkTypeExternal && kind != v1beta1.NetworkTypeInternal {
		n.Labels[v1beta1.LabelNotRemapped] = "true"
	}
	if kind == v1beta1.NetworkTypeExternal {
		n.Spec.PreAllocated = 1
	}
	n.Spec.CIDR = v1beta1.CIDR(cidr)
	w.create(n)
}

// namespace adds the tenant namespace of a remote cluster.
func (w *world) namespace(remote string) string {
	w.t.Helper()
	ns := &corev1.Namespace{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Namespace"}, ObjectMeta: metav1.ObjectMeta{
		Name: "liqo-tenant-" + remote, Labels: map[string]string{v1beta1.LabelTenantNamespace: "true", v1beta1.LabelRemoteClusterID: remote},
	}}
	w.create(ns)
	return ns.Name
}

// configure adds the Configuration of a remote cluster.
func (w *world) configure(remote, pod, external string) *v1beta1.Configuration {
	w.t.Helper()
	c := &v1beta1.Configuration{TypeMeta: metav1.TypeMeta{APIVersion: "networking.liqo.io/v1beta1", Kind: "Configuration"}}
	c.Namespace, c.Name = "liqo-tenant-"+remote, remote
	c.Labels = map[string]string{v1beta1.LabelRemoteClusterID: remote}
	c.Spec.Remote.CIDR.Pod = []v1beta1.CIDR{v1beta1.CIDR(pod)}
	if external != "" {
		c.Spec.Remote.CIDR.External = []v1beta1.CIDR{v1beta1.CIDR(external)}
	}
	w.create(c)
	return c
}

// server adds a GatewayServer, client a GatewayClient.
func (w *world) server(remote string, kind corev1.ServiceType) *v1beta1.GatewayServer {
	w.t.Helper()
	g := &v1beta1.GatewayServer{TypeMeta: metav1.TypeMeta{APIVersion: "networking.liqo.io/v1beta1", Kind: "GatewayServer"}}
	g.Namespace, g.Name = "liqo-tenant-"+remote, remote
	g.Labels = map[string]string{v1beta1.LabelRemoteClusterID: remote}
	g.Spec.ServerTemplateRef = corev1.ObjectReference{APIVersion: "networking.liqo.io/v1beta1", Kind: "WgGatewayServerTemplate", Namespace: "liqo", Name: "wireguard-server"}
	g.Spec.MTU = 1340
	port := int32(51840)
	g.Spec.Endpoint = v1beta1.Endpoint{ServiceType: kind, Port: &port}
	w.create(g)
	return g
}

func (w *world) client(remote string) *v1beta1.GatewayClient {
	w.t.Helper()
	g := &v1beta1.GatewayClient{TypeMeta: metav1.TypeMeta{APIVersion: "networking.liqo.io/v1beta1", Kind: "GatewayClient"}}
	g.Namespace, g.Name = "liqo-tenant-"+remote, remote
	g.Labels = map[string]string{v1beta1.LabelRemoteClusterID: remote}
	g.Spec.ClientTemplateRef = corev1.ObjectReference{APIVersion: "networking.liqo.io/v1beta1", Kind: "WgGatewayClientTemplate", Namespace: "liqo", Name: "wireguard-client"}
	port, udp := int32(30840), corev1.ProtocolUDP
	g.Spec.Endpoint = v1beta1.EndpointStatus{Addresses: []string{"203.0.113.1"}, Port: &port, Protocol: &udp}
	w.create(g)
	return g
}

// templates are those of a small chart.
const templates = `
apiVersion: networking.liqo.io/v1beta1
kind: WgGatewayServerTemplate
metadata: {name: wireguard-server, namespace: liqo}
spec:
  objectKind: {apiVersion: networking.liqo.io/v1beta1, kind: WgGatewayServer}
  template:
    metadata: {name: "{{ .Name }}", namespace: "{{ .Namespace }}", labels: {team: "7"}}
    spec:
      service:
        metadata: {name: "{{ .Name }}", annotations: {mtu: "{{ .Spec.MTU }}"}}
        spec:
          type: "{{ .Spec.Endpoint.ServiceType }}"
          "?loadBalancerIP": "{{ .Spec.Endpoint.LoadBalancerIP }}"
          ports:
          - protocol: UDP
            port: "{{ with .Spec.Endpoint.Port }}{{ . }}{{ else }}{{ index .Spec.Endpoint.Ports 0 }}{{ end }}"
            targetPort: "{{ with .Spec.Endpoint.Port }}{{ . }}{{ else }}{{ index .Spec.Endpoint.Ports 0 }}{{ end }}"
            "?nodePort": "{{ .Spec.Endpoint.NodePort }}"
      deployment:
        metadata: {name: "{{ .Name }}"}
        spec:
          replicas: 1
          strategy: {type: Recreate}
          template:
            spec:
              containers:
              - name: gateway
                image: isthmus:dev
                args: [gateway, --mode=server, "--remote-cluster-id={{ .ClusterID }}", --mtu, "{{ .Spec.MTU }}"]
                env: [{name: UID, value: "{{ .GatewayUID }}"}, {name: DIGITS, value: "42"}]
                ports: [{containerPort: "{{ with .Spec.Endpoint.Port }}{{ . }}{{ else }}{{ index .Spec.Endpoint.Ports 0 }}{{ end }}", protocol: UDP}]
                resources: {limits: {cpu: "2", memory: 64Mi}}
              volumes:
              - {name: keys, secret: {secretName: "{{ .SecretName }}"}}
---
apiVersion: networking.liqo.io/v1beta1
kind: WgGatewayClientTemplate
metadata: {name: wireguard-client, namespace: liqo}
spec:
  objectKind: {apiVersion: networking.liqo.io/v1beta1, kind: WgGatewayClient}
  template:
    spec:
      deployment:
        spec:
          replicas: 1
          template:
            spec:
              containers:
              - name: gateway
                image: isthmus:dev
                args: [gateway, --mode=client, "--endpoint-address={{ index .Spec.Endpoint.Addresses 0 }}", "--endpoint-port={{ .Spec.Endpoint.Port }}"]
              volumes:
              - {name: keys, secret: {secretName: "{{ .SecretName }}"}}
`

// twoNodes returns a cluster of two nodes without peers.
func twoNodes(t testing.TB, id, podCIDR string) *world {
	w := newWorld(t, id)
	w.create(&corev1.Namespace{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Namespace"}, ObjectMeta: metav1.ObjectMeta{Name: "liqo"}})
	w.yaml(templates)
	base := netip.MustParsePrefix(podCIDR).Addr().As4()
	for i := range 2 {
		base[2] = byte(i)
		w.node(fmt.Sprintf("node-%d", i+1), fmt.Sprintf("172.18.1.1%d", i+1), netip.PrefixFrom(netip.AddrFrom4(base), 24).String())
	}
	w.network(v1beta1.NetworkTypePod, podCIDR)
	w.network(v1beta1.NetworkTypeService, "10.96.0.0/16")
	w.network(v1beta1.NetworkTypeExternal, "10.70.0.0/16")
	w.network(v1beta1.NetworkTypeInternal, "10.80.0.0/16")
	return w
}

// peered returns a cluster with a server towards rome, whose gateway runs.
func peered(t testing.TB) *world {
	w := twoNodes(t, "milan", "10.10.0.0/16")
	w.namespace("rome")
	w.configure("rome", "10.20.0.0/16", "10.71.0.0/16")
	w.server("rome", corev1.ServiceTypeNodePort)
	w.settle()
	w.kubelet("node-1", "node-2")
	w.settle()
	return w
}

func publicKey(w *world, remote, name string, size int) {
	k := &v1beta1.PublicKey{TypeMeta: metav1.TypeMeta{APIVersion: "networking.liqo.io/v1beta1", Kind: "PublicKey"}}
	k.Namespace, k.Name, k.Labels = "liqo-tenant-"+remote, name, map[string]string{v1beta1.LabelRemoteClusterID: remote}
	k.Spec.PublicKey = slices.Repeat([]byte{7}, size)
	w.create(k)
}

// endpoint adds the TunnelEndpoint of a remote cluster that dials us.
func (w *world) endpoint(remote, pod, external string) *netv1alpha1.TunnelEndpoint {
	w.t.Helper()
	e := &netv1alpha1.TunnelEndpoint{TypeMeta: metav1.TypeMeta{APIVersion: "net.liqo.io/v1alpha1", Kind: "TunnelEndpoint"}}
	e.Namespace, e.Name = "liqo-tenant-"+remote, remote
	e.Spec = netv1alpha1.TunnelEndpointSpec{
		ClusterIdentity: &netv1alpha1.ClusterIdentity{ClusterID: remote, ClusterName: remote},
		RemotePodCIDR:   pod, RemoteNATPodCIDR: netv1alpha1.None,
		RemoteExternalCIDR: external, RemoteNATExternalCIDR: netv1alpha1.None,
		BackendType: netv1alpha1.BackendWireGuard,
		BackendConfig: map[string]string{
			netv1alpha1.BackendPort: "30840", netv1alpha1.BackendServiceType: "NodePort",
			netv1alpha1.BackendPublicKey: base64.StdEncoding.EncodeToString(slices.Repeat([]byte{7}, 32)),
		},
	}
	w.create(e)
	return e
}
