package plan_test

import (
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	"gotest.tools/v3/assert/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	ipamv1alpha1 "github.com/isthmus-net/isthmus/appliance/api/ipam/v1alpha1"
	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/plan"
)

// ip adds an IP of the namespace default.
func (w *world) ip(name, addr string, masquerade bool) *ipamv1alpha1.IP {
	w.t.Helper()
	o := &ipamv1alpha1.IP{TypeMeta: metav1.TypeMeta{APIVersion: "ipam.liqo.io/v1alpha1", Kind: "IP"}, ObjectMeta: named("default", name)}
	o.Spec.IP = v1beta1.IP(addr)
	if masquerade {
		o.Spec.Masquerade = new(true)
	}
	w.create(o)
	return o
}

func acceptedIP(w *world, namespace, name string) metav1.Condition {
	w.t.Helper()
	return condition(w.t, get[*ipamv1alpha1.IP](w, namespace, name).Status.Conditions, plan.ConditionAccepted)
}

// mappingRules returns the rules of the FirewallConfigurations of an IP.
func mappingRules(w *world, namespace, name string) (gateway, nodes []string) {
	if o := firewallOf(w, namespace, name+"-remap-ipmapping-gw"); o != nil {
		gateway = natRules(o)
	}
	if o := firewallOf(w, namespace, name+"-remap-ipmapping-fabric"); o != nil {
		nodes = natRules(o)
	}
	return gateway, nodes
}

// Peers reach a host by an address of the external network; 10.70.0.1 is that of
// whatever is no pod of rome.
func TestIPMapping(t *testing.T) {
	gateway := func(addr string) []string {
		return []string{"prerouting dst=10.70.0.2 dnat " + addr, "postrouting out=liqo-tunnel src=" + addr + " snat 10.70.0.2"}
	}
	nodes := func(addr string) []string {
		return []string{"postrouting src=10.0.0.0/16 dst=" + addr + " masquerade", "postrouting src=10.1.0.0/16 dst=" + addr + " masquerade"}
	}
	for _, test := range []struct {
		name, addr     string
		masquerade     bool
		label          string // host-unreachable
		gateway, nodes []string
	}{
		{"host outside", "192.168.40.10", false, "", gateway("192.168.40.10"), nil},
		{"with masquerade", "192.168.40.10", true, "", gateway("192.168.40.10"), nodes("192.168.40.10")},
		{"pod", "10.10.1.17", true, "", gateway("10.10.1.17"), nodes("10.10.1.17")},
		{"service", "10.96.0.1", false, "", gateway("10.96.0.1"), nil},
		{"node", "172.18.1.11", false, "", gateway("172.18.1.11"), nil},
		{"pod of the peer", "10.0.3.4", false, "", gateway("10.0.3.4"), nil},
		{"unreachable", "192.168.40.10", true, "true", nil, nodes("192.168.40.10")},
		{"reachable", "192.168.40.10", false, "false", gateway("192.168.40.10"), nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			w := overlapping(t, cluster.OverlayGeneve, "rome")
			o := w.ip("db", test.addr, test.masquerade)
			if test.label != "" {
				o.Labels = map[string]string{v1beta1.LabelHostUnreachable: test.label}
			}
			r := w.settle()
			assert.Assert(t, cmp.Len(r.Events, 0))
			gateway, nodes := mappingRules(w, "default", "db")
			assert.DeepEqual(t, gateway, test.gateway)
			assert.DeepEqual(t, nodes, test.nodes)
			o = get[*ipamv1alpha1.IP](w, "default", "db")
			assert.Equal(t, o.Status.IP, v1beta1.IP("10.70.0.2"))
			assert.Equal(t, o.Status.CIDR, v1beta1.CIDR("10.70.0.0/16"))
			assert.Equal(t, acceptedIP(w, "default", "db").Status, metav1.ConditionTrue)

			for _, f := range []*v1beta1.FirewallConfiguration{firewallOf(w, "default", "db-remap-ipmapping-gw"), firewallOf(w, "default", "db-remap-ipmapping-fabric")} {
				if f == nil {
					continue
				}
				assert.Equal(t, f.Labels[v1beta1.LabelFirewallSubcategory], v1beta1.SubcategoryIPMapping)
				assert.Equal(t, f.OwnerReferences[0].UID, o.UID)
				assert.Equal(t, f.Spec.Table.Name, f.Name+"-default")
			}
			if f := firewallOf(w, "default", "db-remap-ipmapping-fabric"); f != nil {
				bypass := firewallOf(w, "liqo-tenant-rome", "rome-masquerade-bypass")
				assert.Assert(t, f.Spec.Table.Chains[0].Priority < bypass.Spec.Table.Chains[0].Priority)
			}
			w.remove("IP", "default", "db")
			w.settle()
			gateway, nodes = mappingRules(w, "default", "db")
			assert.Assert(t, cmp.Len(append(gateway, nodes...), 0))
		})
	}
}

// Two IPs of one host are two ways to it; peers see one of them in what it sends,
// which becomes the other when that goes.
func TestIPsOfOneHost(t *testing.T) {
	w := overlapping(t, cluster.OverlayGeneve, "rome")
	w.ip("first", "192.168.40.10", false)
	w.ip("second", "192.168.40.10", false)
	assert.Assert(t, cmp.Len(w.settle().Events, 0))
	first, _ := mappingRules(w, "default", "first")
	second, _ := mappingRules(w, "default", "second")
	assert.DeepEqual(t, first, []string{"prerouting dst=10.70.0.2 dnat 192.168.40.10", "postrouting out=liqo-tunnel src=192.168.40.10 snat 10.70.0.2"})
	assert.DeepEqual(t, second, []string{"prerouting dst=10.70.0.3 dnat 192.168.40.10"})
	w.remove("IP", "default", "first")
	w.settle()
	second, _ = mappingRules(w, "default", "second")
	assert.DeepEqual(t, second, []string{"prerouting dst=10.70.0.3 dnat 192.168.40.10", "postrouting out=liqo-tunnel src=192.168.40.10 snat 10.70.0.3"})
}

// IPs have an address without a peer, of their own family where there are two,
// and names that hosts accept however long theirs is.
func TestIPWithoutPeer(t *testing.T) {
	w := twoNodes(t, "milan", "10.10.0.0/16")
	six := &ipamv1alpha1.Network{TypeMeta: metav1.TypeMeta{APIVersion: "ipam.liqo.io/v1alpha1", Kind: "Network"}, ObjectMeta: named("liqo", "external-6")}
	six.Labels, six.Spec.CIDR = map[string]string{v1beta1.LabelNetworkType: v1beta1.NetworkTypeExternal}, "fd70::/64"
	w.create(six)
	long := strings.Repeat("long.", 45) + "name"
	w.ip(long, "192.168.40.10", true)
	w.ip("six", "2001:db8::10", true)
	assert.Assert(t, cmp.Len(w.settle().Events, 0))
	gateway, nodes := mappingRules(w, "default", "six")
	assert.DeepEqual(t, gateway, []string{"prerouting dst=fd70::1 dnat 2001:db8::10", "postrouting out=liqo-tunnel src=2001:db8::10 snat fd70::1"})
	assert.Assert(t, cmp.Len(nodes, 0))
	assert.Equal(t, firewallOf(w, "default", "six-remap-ipmapping-gw").Spec.Table.Family, v1beta1.TableFamilyIPv6)
	f := firewallOf(w, "default", plan.Name(long, "remap-ipmapping-gw"))
	assert.Assert(t, f != nil)
	assert.Assert(t, len(f.Spec.Table.Name) <= 200 && len(f.Spec.Table.Chains[0].Rules.NatRules[0].Name) <= 127)
}

// What is no pod of a peer has an IP, which follows the network by which the
// peer is known here.
func TestUnknownSourceIP(t *testing.T) {
	w := overlapping(t, cluster.OverlayGeneve, "rome")
	o := get[*ipamv1alpha1.IP](w, "liqo-tenant-rome", "rome-unknown-source")
	assert.Equal(t, o.Spec.IP, v1beta1.IP("10.1.0.0"))
	assert.Equal(t, o.Labels[v1beta1.LabelRemoteClusterID], "rome")
	gateway, nodes := mappingRules(w, "liqo-tenant-rome", "rome-unknown-source")
	assert.DeepEqual(t, gateway, []string{"prerouting dst=10.70.0.1 dnat 10.1.0.0", "postrouting out=liqo-tunnel src=10.1.0.0 snat 10.70.0.1"})
	assert.Assert(t, cmp.Len(nodes, 0))

	// A node comes up in that network.
	w.node("node-3", "10.1.7.7", "10.10.2.0/24")
	w.settle()
	o = get[*ipamv1alpha1.IP](w, "liqo-tenant-rome", "rome-unknown-source")
	external := get[*v1beta1.Configuration](w, "liqo-tenant-rome", "rome").Status.Remote.CIDR.External[0]
	assert.Equal(t, string(o.Spec.IP)+"/16", string(external))
	assert.Assert(t, external != "10.1.0.0/16")
	gateway, _ = mappingRules(w, "liqo-tenant-rome", "rome-unknown-source")
	assert.Assert(t, cmp.Contains(gateway[0], string(o.Spec.IP)))

	w.remove("Configuration", "liqo-tenant-rome", "rome")
	w.settle()
	assert.Assert(t, w.objects[key("IP", "liqo-tenant-rome", "rome-unknown-source")] == nil)

	// One that the API still has with another address has no status and no
	// mapping: it is about to be replaced.
	w = overlapping(t, cluster.OverlayGeneve, "rome")
	get[*ipamv1alpha1.IP](w, "liqo-tenant-rome", "rome-unknown-source").Spec.IP = "10.9.0.0"
	r := plan.Cluster(w.snapshot())
	for _, x := range slices.Concat(r.Objects, r.Statuses) {
		_, status := x.(*ipamv1alpha1.IP)
		assert.Assert(t, !status || x.(*ipamv1alpha1.IP).Status.IP == "", keyOf(x))
		assert.Assert(t, !strings.HasPrefix(x.GetName(), "rome-unknown-source-remap"), keyOf(x))
	}
}

// However many addresses a Network keeps back, it costs a plan nothing, and the
// address after them is the first that is given.
func TestManyPreAllocated(t *testing.T) {
	for _, test := range []struct {
		cidr, target string
		preAllocated int64
		want         v1beta1.IP
	}{
		{"11.0.0.0/8", "192.168.40.1", 1<<24 - 2, "11.255.255.254"},
		{"fd70::/64", "fd40::1", 1<<31 - 1, "fd70::7fff:ffff"},
		{"11.0.0.0/8", "192.168.40.1", 1 << 24, ""},
		{"11.0.0.0/8", "192.168.40.1", 1<<31 - 1, ""},
	} {
		w := twoNodes(t, "milan", "10.10.0.0/16")
		w.remove("Network", "liqo", v1beta1.NetworkTypeExternal)
		w.network(v1beta1.NetworkTypeExternal, test.cidr)
		get[*ipamv1alpha1.Network](w, "liqo", v1beta1.NetworkTypeExternal).Spec.PreAllocated = test.preAllocated
		w.ip("printer", test.target, false)
		s := w.snapshot()
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		plan.Cluster(s)
		runtime.ReadMemStats(&after)
		assert.Assert(t, after.TotalAlloc-before.TotalAlloc < 10<<20, "%s without %d: a plan takes %d bytes", test.cidr, test.preAllocated, after.TotalAlloc-before.TotalAlloc)
		w.settle()
		assert.Equal(t, get[*ipamv1alpha1.IP](w, "default", "printer").Status.IP, test.want, "%s without %d", test.cidr, test.preAllocated)
	}
}

// The first address of the external network is what peers see of all that is no
// pod here. No IP gets it, whatever the Network says.
func TestFirstAddressIsNotGiven(t *testing.T) {
	for _, preAllocated := range []int{0, 1, 3} {
		w := twoNodes(t, "milan", "10.10.0.0/16")
		w.remove("Network", "liqo", v1beta1.NetworkTypeExternal)
		w.network(v1beta1.NetworkTypeExternal, "10.70.0.0/29")
		get[*ipamv1alpha1.Network](w, "liqo", v1beta1.NetworkTypeExternal).Spec.PreAllocated = int64(preAllocated)
		for i := range 8 {
			w.ip(fmt.Sprintf("ip-%d", i), fmt.Sprintf("192.168.40.%d", i+1), false)
		}
		w.settle()
		given := map[v1beta1.IP]bool{}
		for i := range 8 {
			o := get[*ipamv1alpha1.IP](w, "default", fmt.Sprintf("ip-%d", i))
			assert.Assert(t, !given[o.Status.IP] || o.Status.IP == "", o.Status.IP)
			given[o.Status.IP] = true
			if o.Status.IP == "" {
				assert.Equal(t, acceptedIP(w, "default", o.Name).Reason, plan.ReasonNetworkFull)
			}
		}
		assert.Assert(t, !given["10.70.0.0"])
		assert.Equal(t, len(given), 1+6-max(preAllocated-1, 0)) // with the empty one
	}

	w := twoNodes(t, "milan", "10.10.0.0/16")
	w.ip("old", "192.168.40.1", false).Status.IP = "10.70.0.0"
	w.settle()
	assert.Equal(t, acceptedIP(w, "default", "old").Reason, plan.ReasonDuplicate)
	gateway, _ := mappingRules(w, "default", "old")
	assert.Assert(t, cmp.Len(gateway, 0))
}

// An address that nobody can be reached by is refused with a reason, and the IP
// has no mapping.
func TestBadIPs(t *testing.T) {
	for _, test := range []struct{ addr, reason, says string }{
		{"0.0.0.0", plan.ReasonBadAddress, "0.0.0.0/8"},
		{"127.0.0.1", plan.ReasonBadAddress, "127.0.0.0/8"},
		{"169.254.169.254", plan.ReasonBadAddress, "169.254.0.0/16"},
		{"224.0.0.1", plan.ReasonBadAddress, "create the IP anew with the address of a host"},
		{"255.255.255.255", plan.ReasonBadAddress, "224.0.0.0/3"},
		{"10.70.0.9", plan.ReasonBadAddress, "external CIDR 10.70.0.0/16"},
		{"10.80.0.1", plan.ReasonBadAddress, "internal CIDR 10.80.0.0/16"},
		{"2001:db8::1", plan.ReasonFamily, "Network liqo/external-cidr (10.70.0.0/16)"},
		{"::1", plan.ReasonBadAddress, "::/127"},
		{"10.0.0.0/24", plan.ReasonInvalidField, "write 10.0.0.0"},
		{"", plan.ReasonInvalidField, "spec.ip"},
		{"db.example.org", plan.ReasonInvalidField, "spec.ip"},
	} {
		t.Run(test.addr, func(t *testing.T) {
			w := overlapping(t, cluster.OverlayGeneve, "rome")
			before := dumpOf(t, plan.Cluster(w.snapshot()).Objects)
			o := w.ip("db", test.addr, true)
			o.Spec.ServiceTemplate = &ipamv1alpha1.ServiceTemplate{Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}}}
			r := w.settle()
			c := acceptedIP(w, "default", "db")
			assert.Equal(t, c.Status, metav1.ConditionFalse)
			assert.Equal(t, c.Reason, test.reason, c.Message)
			assert.Assert(t, cmp.Contains(c.Message, test.says))
			assert.Assert(t, cmp.Len(warnings(r, "IP", "default", "db"), 1))
			assert.DeepEqual(t, dumpOf(t, r.Objects), before)
		})
	}
}

// withTemplate returns a cluster with an IP that asks for a Service.
func withTemplate(t *testing.T, name, addr string, spec corev1.ServiceSpec) *world {
	w := overlapping(t, cluster.OverlayGeneve, "rome")
	w.ip(name, addr, false).Spec.ServiceTemplate = &ipamv1alpha1.ServiceTemplate{
		Metadata: v1beta1.ObjectMeta{Labels: map[string]string{"team": "7"}, Annotations: map[string]string{"note": "x"}}, Spec: spec,
	}
	return w
}

// A template makes a Service whose only endpoint is where the IP stands for.
func TestIPService(t *testing.T) {
	w := withTemplate(t, "db", "192.168.40.10", corev1.ServiceSpec{Ports: []corev1.ServicePort{
		{Name: "sql", Port: 5432, TargetPort: intstr.FromInt32(15432)}, {Name: "dns", Port: 53, Protocol: corev1.ProtocolUDP},
	}})
	assert.Assert(t, cmp.Len(w.settle().Events, 0))
	owner := get[*ipamv1alpha1.IP](w, "default", "db").UID
	s := get[*corev1.Service](w, "default", "db")
	assert.Equal(t, s.Labels["team"]+s.Annotations["note"], "7x")
	assert.Equal(t, s.OwnerReferences[0].UID, owner)
	assert.Assert(t, cmp.Len(s.Spec.Selector, 0))
	assert.Assert(t, cmp.Len(s.Spec.Ports, 2))
	e := get[*discoveryv1.EndpointSlice](w, "default", "db")
	assert.Equal(t, e.OwnerReferences[0].UID, owner)
	assert.Equal(t, e.Labels[discoveryv1.LabelServiceName], "db")
	assert.Equal(t, e.AddressType, discoveryv1.AddressTypeIPv4)
	assert.DeepEqual(t, e.Endpoints[0].Addresses, []string{"192.168.40.10"})
	var ports []string
	for _, p := range e.Ports {
		ports = append(ports, fmt.Sprint(*p.Name, " ", *p.Port, " ", *p.Protocol))
	}
	assert.DeepEqual(t, ports, []string{"sql 15432 TCP", "dns 53 UDP"})

	get[*ipamv1alpha1.IP](w, "default", "db").Spec.ServiceTemplate = nil
	w.settle()
	assert.Assert(t, w.objects[key("Service", "default", "db")] == nil && w.objects[key("EndpointSlice", "default", "db")] == nil)
	gateway, _ := mappingRules(w, "default", "db")
	assert.Assert(t, cmp.Len(gateway, 2))
}

// A template that no Service can be made of, or whose name somebody has, shows in
// the condition; the address works all the same.
func TestBadIPServices(t *testing.T) {
	port := func(change func(p *corev1.ServicePort)) corev1.ServiceSpec {
		p := corev1.ServicePort{Port: 80}
		change(&p)
		return corev1.ServiceSpec{Ports: []corev1.ServicePort{p}}
	}
	web := port(func(*corev1.ServicePort) {})
	for _, test := range []struct {
		name, ip     string
		spec         corev1.ServiceSpec
		make         func(w *world)
		reason, says string
	}{
		{name: "selector", spec: corev1.ServiceSpec{Selector: map[string]string{"app": "db"}, Ports: web.Ports}, reason: plan.ReasonBadTemplate, says: "spec.selector: pods would take the place of spec.ip: remove it"},
		{name: "external name", spec: corev1.ServiceSpec{Type: corev1.ServiceTypeExternalName, ExternalName: "x.org"}, reason: plan.ReasonBadTemplate, says: "spec.type: ExternalName"},
		{name: "no ports", spec: corev1.ServiceSpec{}, reason: plan.ReasonBadTemplate, says: "spec.ports is empty"},
		{name: "port 0", spec: port(func(p *corev1.ServicePort) { p.Port = 0 }), reason: plan.ReasonBadTemplate, says: "spec.ports[0].port: 0"},
		{name: "named target", spec: port(func(p *corev1.ServicePort) { p.TargetPort = intstr.FromString("http") }), reason: plan.ReasonBadTemplate, says: `spec.ports[0].targetPort: "http"`},
		{name: "target too high", spec: port(func(p *corev1.ServicePort) { p.TargetPort = intstr.FromInt32(70000) }), reason: plan.ReasonBadTemplate, says: "targetPort: 70000"},
		{name: "protocol", spec: port(func(p *corev1.ServicePort) { p.Protocol = "ICMP" }), reason: plan.ReasonBadTemplate, says: "write TCP, UDP or SCTP"},
		{name: "name of a port", spec: port(func(p *corev1.ServicePort) { p.Name = "A_b" }), reason: plan.ReasonBadTemplate, says: `spec.ports[0].name: "A_b"`},
		{name: "no name", spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}, {Port: 81}}}, reason: plan.ReasonBadTemplate, says: "spec.ports[0].name is empty"},
		{name: "twice", spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Name: "a", Port: 80}, {Name: "b", Port: 80}}}, reason: plan.ReasonBadTemplate, says: "80/TCP is there twice"},
		{name: "digit first", ip: "10-0-0-1", spec: web, reason: plan.ReasonBadTemplate, says: "begins with a letter"},
		{name: "dots", ip: "db.example", spec: web, reason: plan.ReasonBadTemplate, says: `"db.example" can't be the name of a Service`},
		{name: "taken", spec: web, reason: plan.ReasonNameTaken, says: "Service default/db is there, and not of this IP: delete that", make: func(w *world) {
			w.create(&corev1.Service{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Service"}, ObjectMeta: named("default", "db")})
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			name := test.ip
			if name == "" {
				name = "db"
			}
			w := withTemplate(t, name, "192.168.40.10", test.spec)
			if test.make != nil {
				test.make(w)
			}
			r := w.settle()
			c := acceptedIP(w, "default", name)
			assert.Equal(t, c.Status, metav1.ConditionFalse)
			assert.Equal(t, c.Reason, test.reason, c.Message)
			assert.Assert(t, cmp.Contains(c.Message, test.says))
			assert.Assert(t, cmp.Len(warnings(r, "IP", "default", name), 1))
			gateway, _ := mappingRules(w, "default", name)
			assert.Assert(t, cmp.Len(gateway, 2))
			for k := range w.objects {
				assert.Assert(t, !strings.HasPrefix(k, "EndpointSlice "), k)
			}
			if s, ok := w.objects[key("Service", "default", name)]; ok {
				assert.Equal(t, s.GetLabels()[v1beta1.LabelManagedBy], "")
				w.remove("Service", "default", name)
				w.settle()
				assert.Equal(t, acceptedIP(w, "default", name).Status, metav1.ConditionTrue)
				get[*corev1.Service](w, "default", name)
			}
		})
	}
	t.Run("of a gateway", func(t *testing.T) {
		w := overlapping(t, cluster.OverlayGeneve, "rome")
		before := fmt.Sprint(tree(t, get[*corev1.Service](w, "liqo-tenant-rome", "gw-rome")))
		o := w.ip("gw-rome", "192.168.40.10", false)
		delete(w.objects, keyOf(o))
		o.Namespace = "liqo-tenant-rome"
		o.Spec.ServiceTemplate = &ipamv1alpha1.ServiceTemplate{Spec: web}
		w.objects[keyOf(o)] = o
		w.settle()
		assert.Equal(t, acceptedIP(w, "liqo-tenant-rome", "gw-rome").Reason, plan.ReasonNameTaken)
		assert.Equal(t, fmt.Sprint(tree(t, get[*corev1.Service](w, "liqo-tenant-rome", "gw-rome"))), before)
	})
	t.Run("long name", func(t *testing.T) {
		name := strings.Repeat("a", 70)
		w := withTemplate(t, name, "192.168.40.10", web)
		r := w.settle()
		assert.Equal(t, acceptedIP(w, "default", name).Status, metav1.ConditionTrue)
		assert.Equal(t, r.Events[0].Reason, plan.ReasonNameShortened)
	})
}

func BenchmarkIPs(b *testing.B) {
	for _, n := range []int{10, 10000} {
		b.Run(fmt.Sprintf("ips=%d", n), func(b *testing.B) {
			s := manyIPs(b, n)
			b.ReportAllocs()
			for b.Loop() {
				plan.Cluster(s)
			}
		})
	}
}

// manyIPs returns the snapshot of a cluster with a peer and n IPs, all with
// masquerade and one in ten with a template, at rest.
func manyIPs(t testing.TB, n int) cluster.Snapshot {
	w := peered(t)
	for i := range n {
		o := w.ip(fmt.Sprintf("ip-%05d", i), fmt.Sprintf("192.168.%d.%d", i/250, i%250+1), true)
		if i%10 == 0 {
			o.Spec.ServiceTemplate = &ipamv1alpha1.ServiceTemplate{Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}}}
		}
	}
	w.apply(plan.Cluster(w.snapshot()))
	return w.snapshot()
}
