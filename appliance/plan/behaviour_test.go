package plan_test

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	"gotest.tools/v3/assert/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	corev1beta1 "github.com/isthmus-net/isthmus/appliance/api/core/v1beta1"
	ipamv1alpha1 "github.com/isthmus-net/isthmus/appliance/api/ipam/v1alpha1"
	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/internal/kube"
	"github.com/isthmus-net/isthmus/appliance/ipam"
	"github.com/isthmus-net/isthmus/appliance/plan"
)

// A node that joins inside a remapped network moves that network.
func TestNodeInsideRemappedNetwork(t *testing.T) {
	w := peered(t)
	w.node("node-3", "10.20.0.9", "10.10.2.0/24")
	r := plan.Cluster(w.snapshot())
	assert.Assert(t, cmp.Len(r.Events, 1))
	assert.Equal(t, r.Events[0].Reason, plan.ReasonMoved)
	w.settle()
	c := get[*v1beta1.Configuration](w, "liqo-tenant-rome", "rome")
	assert.DeepEqual(t, c.Status.Remote.CIDR.Pod, []v1beta1.CIDR{"10.0.0.0/16"})
}

func TestEndpoint(t *testing.T) {
	for _, test := range []struct {
		kind   corev1.ServiceType
		set    func(s *corev1.Service)
		before string // without a running gateway
		want   string
	}{
		{corev1.ServiceTypeClusterIP, func(s *corev1.Service) {}, "[10.96.0.7]:51840", "[10.96.0.7]:51840"},
		{corev1.ServiceTypeNodePort, func(s *corev1.Service) { s.Spec.Ports[0].NodePort = 30123 }, "", "[172.18.1.12]:30123"},
		{corev1.ServiceTypeLoadBalancer, func(s *corev1.Service) {}, "", ""},
		{corev1.ServiceTypeLoadBalancer, func(s *corev1.Service) {
			s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{Hostname: "lb.example.org"}, {IP: "203.0.113.9"}}
		}, "[203.0.113.9 lb.example.org]:51840", "[203.0.113.9 lb.example.org]:51840"},
	} {
		t.Run(string(test.kind), func(t *testing.T) {
			w := twoNodes(t, "milan", "10.10.0.0/16")
			w.namespace("rome")
			w.server("rome", test.kind)
			w.settle()
			// What the API server fills in is kept by the real controller.
			s := get[*corev1.Service](w, "liqo-tenant-rome", "gw-rome")
			s.Spec.ClusterIP, s.Spec.ClusterIPs = "10.96.0.7", []string{"10.96.0.7"}
			test.set(s)
			endpoint := func() string {
				w.t.Helper()
				r := plan.Cluster(w.snapshot())
				for _, o := range r.Statuses {
					if g, ok := o.(*v1beta1.GatewayServer); ok && g.Status.Endpoint != nil {
						assert.Equal(t, *g.Status.Endpoint.Protocol, corev1.ProtocolUDP)
						return fmt.Sprintf("%v:%d", g.Status.Endpoint.Addresses, *g.Status.Endpoint.Port)
					}
				}
				return ""
			}
			assert.Equal(t, endpoint(), test.before)
			w.kubelet("node-1", "node-2")
			assert.Equal(t, endpoint(), test.want)
		})
	}
}

// A NodePort answers on every node: the peer is told of the gateway's and of some
// others that are ready.
func TestEndpointNodes(t *testing.T) {
	w := twoNodes(t, "milan", "10.10.0.0/16")
	for i := 3; i <= 5; i++ {
		w.node(fmt.Sprintf("node-%d", i), fmt.Sprintf("172.18.1.1%d", i), fmt.Sprintf("10.10.%d.0/24", i))
	}
	w.namespace("rome")
	w.server("rome", corev1.ServiceTypeNodePort)
	w.settle()
	get[*corev1.Service](w, "liqo-tenant-rome", "gw-rome").Spec.Ports[0].NodePort = 30123
	w.kubelet("node-1", "node-2", "node-3", "node-4", "node-5")
	for _, test := range []struct {
		gateway string
		ready   []string
		want    string
	}{
		{"node-2", nil, "[172.18.1.12]"},
		{"node-2", []string{"node-2", "node-4"}, "[172.18.1.12 172.18.1.14]"},
		{"node-4", []string{"node-2", "node-4"}, "[172.18.1.14 172.18.1.12]"},
		{"node-4", []string{"node-5", "node-1", "node-2", "node-3"}, "[172.18.1.14 172.18.1.11 172.18.1.12]"},
	} {
		s := w.snapshot()
		for i := range s.Nodes {
			s.Nodes[i].Ready = slices.Contains(test.ready, s.Nodes[i].Name)
		}
		for i := range s.Pods {
			s.Pods[i].Node = test.gateway
		}
		got := ""
		for _, o := range plan.Cluster(s).Statuses {
			if g, ok := o.(*v1beta1.GatewayServer); ok && g.Status.Endpoint != nil {
				got = fmt.Sprint(g.Status.Endpoint.Addresses)
			}
		}
		assert.Equal(t, got, test.want, "gateway on %s, ready: %v", test.gateway, test.ready)
	}
}

// A gateway has one pod, whatever its template says, and whoever wrote that is told.
func TestOnePod(t *testing.T) {
	w := twoNodes(t, "milan", "10.10.0.0/16")
	w.yaml(strings.NewReplacer("name: wireguard-client", "name: two", "replicas: 1", "replicas: 2").Replace(strings.SplitAfter(templates, "---\n")[1]))
	w.namespace("rome")
	w.client("rome").Spec.ClientTemplateRef.Name = "two"
	r := plan.Cluster(w.snapshot())
	var said []string
	for _, e := range r.Events {
		said = append(said, e.Reason+": "+e.Message)
	}
	assert.DeepEqual(t, said, []string{plan.ReasonNotUsed + ": WgGatewayClientTemplate liqo/two: spec.template.spec.deployment.spec.replicas: 2 is taken as 1, for two pods would have one key, and the remote cluster would send to whichever it has heard last: write 1"})
	w.settle()
	assert.Equal(t, *get[*appsv1.Deployment](w, "liqo-tenant-rome", "gw-rome").Spec.Replicas, int32(1))
}

// Of a node's names and addresses the peer is told the one that reaches farthest,
// and the next one when that is gone.
func TestEndpointAddress(t *testing.T) {
	w := twoNodes(t, "milan", "10.10.0.0/16")
	w.namespace("rome")
	w.server("rome", corev1.ServiceTypeNodePort)
	w.settle()
	get[*corev1.Service](w, "liqo-tenant-rome", "gw-rome").Spec.Ports[0].NodePort = 30123
	w.kubelet("node-1", "node-2")
	node := get[*corev1.Node](w, "", "node-2")
	all := []corev1.NodeAddress{
		{Type: corev1.NodeHostName, Address: "node-2"}, {Type: corev1.NodeInternalIP, Address: "172.18.1.12"},
		{Type: corev1.NodeInternalDNS, Address: "node-2.internal"}, {Type: corev1.NodeExternalIP, Address: "203.0.113.12"},
		{Type: corev1.NodeExternalIP, Address: "not an address"}, {Type: corev1.NodeExternalDNS, Address: "node-2.example.org"},
	}
	for _, test := range []struct {
		has  []corev1.NodeAddress
		want string
	}{
		{all, "[node-2.example.org]"},
		{all[:5], "[203.0.113.12]"},
		{all[:3], "[node-2.internal]"},
		{all[:2], "[172.18.1.12]"},
		{all[4:5], ""},
	} {
		node.Status.Addresses = test.has
		got := ""
		for _, o := range plan.Cluster(w.snapshot()).Statuses {
			if g, ok := o.(*v1beta1.GatewayServer); ok && g.Status.Endpoint != nil {
				got = fmt.Sprint(g.Status.Endpoint.Addresses[:1])
			}
		}
		assert.Equal(t, got, test.want)
	}
}

// The keys are announced only when they exist, and a gateway that is being
// replaced keeps its fabric, which says so.
func TestGatewayPodGone(t *testing.T) {
	w := peered(t)
	g := get[*v1beta1.GatewayServer](w, "liqo-tenant-rome", "rome")
	assert.Equal(t, g.Status.SecretRef.Name, "gw-rome")
	assert.Equal(t, *g.Status.InternalEndpoint.IP, v1beta1.IP("10.10.1.11"))

	before := get[*v1beta1.InternalFabric](w, "liqo-tenant-rome", "rome").DeepCopy()
	delete(w.objects, "Pod liqo-tenant-rome/gw-rome-0")
	w.settle()
	meanwhile := before.DeepCopy()
	meanwhile.Generation++
	meanwhile.Spec.GatewayGone = true
	assert.DeepEqual(t, get[*v1beta1.InternalFabric](w, "liqo-tenant-rome", "rome"), meanwhile)
	assert.Assert(t, get[*v1beta1.GatewayServer](w, "liqo-tenant-rome", "rome").Status.InternalEndpoint == nil)
	get[*appsv1.Deployment](w, "liqo-tenant-rome", "gw-rome")

	w.kubelet("node-2", "node-1")
	w.settle()
	after := get[*v1beta1.InternalFabric](w, "liqo-tenant-rome", "rome")
	assert.Equal(t, after.Spec.GatewayIP, v1beta1.IP("10.10.0.11"))
	assert.Assert(t, !after.Spec.GatewayGone)
	assert.DeepEqual(t, after.Spec.Interface, before.Spec.Interface)
}

// The Deployment of a gateway says which version of which template it was made
// from, and who made it. Its pods do not: they stay when the same comes of
// another version.
func TestMadeFrom(t *testing.T) {
	w := peered(t)
	deployment := func() *appsv1.Deployment { return get[*appsv1.Deployment](w, "liqo-tenant-rome", "gw-rome") }
	template := get[*v1beta1.WgGatewayServerTemplate](w, "liqo", "wireguard-server")
	g, err := kube.GatewayServer(get[*v1beta1.GatewayServer](w, "liqo-tenant-rome", "rome"))
	assert.Equal(t, len(err), 0)
	ref := plan.TemplateRef(&g, "liqo")
	assert.Equal(t, ref.Kind+" "+ref.Namespace+"/"+ref.Name, "WgGatewayServerTemplate liqo/wireguard-server")
	version := func() string {
		made, _ := kube.ServerTemplate(template)
		return plan.TemplateVersion(made.Meta)
	}
	assert.Equal(t, deployment().Annotations[v1beta1.AnnotationTemplate], version())
	_, said := deployment().Annotations[v1beta1.AnnotationController]
	assert.Check(t, !said)

	before := deployment().Spec.DeepCopy()
	template.Generation++
	w.options.Revision = "56fd58488"
	w.settle()
	assert.Equal(t, deployment().Annotations[v1beta1.AnnotationTemplate], version())
	assert.Equal(t, deployment().Annotations[v1beta1.AnnotationController], "56fd58488")
	assert.DeepEqual(t, &deployment().Spec, before)

	// One that can't be filled in leaves what was made before.
	was := version()
	template.Generation++
	template.Spec.ObjectKind.Kind = "Nothing"
	w.settle()
	assert.Equal(t, deployment().Annotations[v1beta1.AnnotationTemplate], was)
}

// A ForeignCluster that another module made is not ours to delete.
func TestForeignCluster(t *testing.T) {
	w := peered(t)
	fc := get[*corev1beta1.ForeignCluster](w, "", "rome")
	delete(fc.Labels, v1beta1.LabelManagedBy)
	w.settle()
	w.remove("GatewayServer", "liqo-tenant-rome", "rome")
	w.remove("Configuration", "liqo-tenant-rome", "rome")
	w.settle()
	fc = get[*corev1beta1.ForeignCluster](w, "", "rome")
	assert.Assert(t, !fc.Status.Modules.Networking.Enabled)
	assert.Assert(t, cmp.Len(fc.Status.Modules.Networking.Conditions, 0))
}

// Unpeering leaves nothing of ours behind but the nodes.
func TestUnpeer(t *testing.T) {
	w := peered(t)
	w.remove("GatewayServer", "liqo-tenant-rome", "rome")
	w.remove("Configuration", "liqo-tenant-rome", "rome")
	w.settle()
	for k, o := range w.objects {
		if o.GetLabels()[v1beta1.LabelManagedBy] == v1beta1.ManagedBy {
			assert.Assert(t, strings.HasPrefix(k, "InternalNode ") || strings.HasSuffix(k, "-gw-node"), k)
		}
	}
}

// Objects in a namespace that is being deleted, and deleted objects, are not
// there any more; nothing is planned next to them.
func TestDeleting(t *testing.T) {
	w := peered(t)
	now := metav1.NewTime(w.clock)
	w.objects["Namespace /liqo-tenant-rome"].SetDeletionTimestamp(&now)
	for _, o := range plan.Cluster(w.snapshot()).Objects {
		assert.Assert(t, o.GetNamespace() != "liqo-tenant-rome", keyOf(o))
	}
}

// IPs get an address of the external network, never its first one, and keep it.
// The first to get one is that of what is no pod of rome.
func TestIPs(t *testing.T) {
	w := peered(t)
	add := func(name string) {
		o := &ipamv1alpha1.IP{TypeMeta: metav1.TypeMeta{APIVersion: "ipam.liqo.io/v1alpha1", Kind: "IP"}, ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}}
		o.Spec.IP = "192.168.40.10"
		w.create(o)
	}
	add("b")
	add("a")
	w.settle()
	add("0")
	w.settle()
	for name, want := range map[string]v1beta1.IP{"b": "10.70.0.2", "a": "10.70.0.3", "0": "10.70.0.4"} {
		o := get[*ipamv1alpha1.IP](w, "default", name)
		assert.Equal(t, o.Status.IP, want, name)
		assert.Equal(t, o.Status.CIDR, v1beta1.CIDR("10.70.0.0/16"), name)
	}
	delete(w.objects, "IP default/a")
	add("c")
	w.settle()
	assert.Equal(t, get[*ipamv1alpha1.IP](w, "default", "c").Status.IP, v1beta1.IP("10.70.0.3"))
	// preAllocated addresses are never given.
	w.objects["Network liqo/external-cidr"].(*ipamv1alpha1.Network).Spec.PreAllocated = 9
	add("d")
	w.settle()
	assert.Equal(t, get[*ipamv1alpha1.IP](w, "default", "d").Status.IP, v1beta1.IP("10.70.0.9"))
}

// Pods outside the podCIDRs of their node get a route of their own.
func TestPodsOutsidePodCIDRs(t *testing.T) {
	w := peered(t)
	for i, ip := range []string{"10.10.9.9", "10.10.0.77", "10.10.1.5"} {
		pod := &corev1.Pod{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"}, ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprintf("p%d", i)}}
		pod.Spec.NodeName = "node-1"
		pod.Status = corev1.PodStatus{Phase: corev1.PodRunning, PodIP: ip, PodIPs: []corev1.PodIP{{IP: ip}}}
		w.create(pod)
	}
	w.settle()
	var dst []string
	for _, r := range get[*v1beta1.RouteConfiguration](w, "liqo", "milan-node-1-gw-node").Spec.Table.Rules[1].Routes {
		dst = append(dst, string(*r.Dst))
	}
	assert.DeepEqual(t, dst, []string{"10.10.0.0/24", "10.10.1.5/32", "10.10.9.9/32"})
}

// Where a pod is outside of the podCIDRs of its node, nodes are told the networks of all
// pods, and the mark of a connection leads to the node of a pod that has just started.
func TestPodsAnywhere(t *testing.T) {
	w := peered(t)
	networks := func() []v1beta1.CIDR { return get[*v1beta1.InternalNode](w, "", "node-2").Spec.PodNetworks }
	rules := func() (out []string) {
		for _, r := range get[*v1beta1.RouteConfiguration](w, "liqo", "milan-node-2-service-nodeport-routing").Spec.Table.Rules {
			dst := "anywhere"
			if r.Dst != nil {
				dst = string(*r.Dst)
			}
			out = append(out, fmt.Sprintf("mark %d to %s: %s via %s dev %s", *r.FwMark, dst, *r.Routes[0].Dst, *r.Routes[0].Gw, *r.Routes[0].Dev))
		}
		return out
	}
	marks := func() (out []string) {
		for _, r := range firewallOf(w, "liqo", "service-nodeport-routing").Spec.Table.Chains[0].Rules.FilterRules {
			out = append(out, r.Name+" "+*r.Value)
		}
		return out
	}
	assert.Equal(t, len(networks()), 0)
	assert.DeepEqual(t, rules(), []string{"mark 2 to anywhere: 0.0.0.0/0 via 10.80.0.2 dev liqo.node-2"})
	assert.DeepEqual(t, marks(), []string{"node-1 1", "node-2 2"})

	pod := &corev1.Pod{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"}, ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "p"}}
	pod.Spec.NodeName = "node-1"
	pod.Status = corev1.PodStatus{Phase: corev1.PodRunning, PodIP: "10.10.9.9", PodIPs: []corev1.PodIP{{IP: "10.10.9.9"}}}
	w.create(pod)
	w.settle()
	assert.DeepEqual(t, networks(), []v1beta1.CIDR{"10.10.0.0/16"})
	assert.DeepEqual(t, rules(), []string{"mark 2 to 10.10.0.0/16: 10.10.0.0/16 via 10.80.0.2 dev liqo.node-2"})
	assert.DeepEqual(t, marks(), []string{"node-1-pods-10.10.0.0/16 1", "node-1 1", "node-2-pods-10.10.0.0/16 2", "node-2 2"})

	// An address of the other family says nothing of this one.
	pod.Status.PodIP, pod.Status.PodIPs = "10.10.0.7", []corev1.PodIP{{IP: "10.10.0.7"}, {IP: "fd00::7"}}
	w.settle()
	assert.Equal(t, len(networks()), 0)
	assert.DeepEqual(t, marks(), []string{"node-1 1", "node-2 2"})
}

// Names longer than the API allows are hashed, and no two become one.
func TestLongNames(t *testing.T) {
	w := twoNodes(t, "milan", "10.10.0.0/16")
	long := strings.Repeat("n", 62)
	w.node(long+"a."+strings.Repeat("x", 180), "172.18.1.21", "10.10.3.0/24")
	w.node(long+"b."+strings.Repeat("x", 180), "172.18.1.22", "10.10.4.0/24")
	id := strings.Repeat("r", 63)
	w.create(&corev1.Namespace{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Namespace"}, ObjectMeta: metav1.ObjectMeta{Name: "liqo-tenant-" + id[:50]}})
	c := w.configure(id[:50], "10.20.0.0/16", "")
	c.Labels[v1beta1.LabelRemoteClusterID] = id
	g := w.server(id[:50], corev1.ServiceTypeClusterIP)
	g.Labels[v1beta1.LabelRemoteClusterID] = id
	delete(w.objects, keyOf(g))
	g.Name = id
	w.create(g)
	w.settle()
	w.kubelet("node-1")
	r := w.settle()
	for _, o := range r.Objects {
		assert.Assert(t, len(o.GetName()) <= 253, keyOf(o))
		for k, v := range o.GetLabels() {
			assert.Assert(t, len(v) <= 63, "%s %s=%s", keyOf(o), k, v)
		}
		if _, ok := o.(*corev1.Service); ok {
			assert.Assert(t, len(o.GetName()) <= 63)
		}
	}
	assert.Assert(t, slices.ContainsFunc(r.Events, func(e plan.Event) bool { return e.Reason == plan.ReasonNameShortened }))
	checkInvariants(t, w)
}

// The order of the slices of a snapshot does not matter.
func TestShuffle(t *testing.T) {
	w := peered(t)
	for i, remote := range []string{"paris", "london", "berlin"} {
		w.namespace(remote)
		w.configure(remote, "10.10.0.0/16", "10.70.0.0/16")
		if i%2 == 0 {
			w.client(remote)
		} else {
			w.server(remote, corev1.ServiceTypeClusterIP)
		}
	}
	publicKey(w, "rome", "bad", 3)
	get[*v1beta1.GatewayServer](w, "liqo-tenant-rome", "rome").Spec.ServerTemplateRef.Name = "nope" // runs on
	// Half of them have their numbers, half not.
	s := w.snapshot()
	want := dump(t, plan.Cluster(s))
	for seed := range uint64(20) {
		r := rand.New(rand.NewPCG(seed, 0))
		shuffle(r, s.Nodes)
		shuffle(r, s.Pods)
		shuffle(r, s.Namespaces)
		shuffle(r, s.Configurations)
		shuffle(r, s.GatewayServers)
		shuffle(r, s.GatewayClients)
		shuffle(r, s.ServerTemplates)
		shuffle(r, s.PublicKeys)
		shuffle(r, s.Fabrics)
		shuffle(r, s.InternalNodes)
		shuffle(r, s.Tunnels)
		shuffle(r, s.Routes)
		shuffle(r, s.Networks)
		shuffle(r, s.Secrets)
		shuffle(r, s.Services)
		shuffle(r, s.Deployments)
		shuffle(r, s.Reports)
		shuffle(r, s.ForeignClusters)
		shuffle(r, s.Invalid)
		assert.Equal(t, dump(t, plan.Cluster(s)), want, "seed %d", seed)
	}
}

func shuffle[T any](r *rand.Rand, list []T) {
	r.Shuffle(len(list), func(i, j int) { list[i], list[j] = list[j], list[i] })
}

// A snapshot is not changed by planning.
func TestPure(t *testing.T) {
	w := peered(t)
	s := w.snapshot()
	before := fmt.Sprintf("%+v", s)
	plan.Cluster(s)
	assert.Equal(t, fmt.Sprintf("%+v", s), before)
	var _ cluster.Snapshot = s
}

// A peering of IPv6 clusters: the same, with IPv6 next hops; what overlaps
// goes into the cluster's own unique local range.
func TestIPv6(t *testing.T) {
	w := newWorld(t, "milan")
	w.options.IPv6 = true
	w.create(&corev1.Namespace{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Namespace"}, ObjectMeta: metav1.ObjectMeta{Name: "liqo"}})
	w.yaml(templates)
	w.node("node-1", "2001:db8::11", "fd10:0:0:1::/64")
	w.network(v1beta1.NetworkTypePod, "fd10::/56")
	w.network(v1beta1.NetworkTypeExternal, "fd70::/64")
	w.network(v1beta1.NetworkTypeInternal, "fd80::/64")
	w.namespace("rome")
	w.configure("rome", "fd10::/56", "fd71::/64")
	w.client("rome")
	w.settle()
	w.kubelet("node-1")
	r := w.settle()
	assert.Assert(t, cmp.Len(r.Events, 0))
	ours := ipam.ULA("milan")
	remapped := get[*v1beta1.Configuration](w, "liqo-tenant-rome", "rome").Status.Remote.CIDR
	assert.Assert(t, ours.Overlaps(netip.MustParsePrefix(string(remapped.Pod[0]))), remapped.Pod[0])
	assert.DeepEqual(t, remapped.External, []v1beta1.CIDR{"fd71::/64"})

	rules := get[*v1beta1.RouteConfiguration](w, "liqo-tenant-rome", "rome-node-gw").Spec.Table.Rules
	assert.Equal(t, *rules[0].Dst, v1beta1.CIDR("fd80::2/128"))
	assert.Equal(t, *rules[1].Routes[0].Gw, v1beta1.IP("fd80::2"))
	rules = get[*v1beta1.RouteConfiguration](w, "liqo-tenant-rome", "rome-gw-ext").Spec.Table.Rules
	assert.Equal(t, *rules[1].Routes[0].Dst, v1beta1.CIDR("fd10::/56"))
	assert.Assert(t, rules[1].Routes[0].Gw == nil)
	rules = get[*v1beta1.RouteConfiguration](w, "liqo", "milan-node-1-gw-node").Spec.Table.Rules
	assert.Equal(t, *rules[1].Routes[0].Dst, v1beta1.CIDR("fd10:0:0:1::/64"))
}
