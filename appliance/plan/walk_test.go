package plan_test

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	corev1 "k8s.io/api/core/v1"

	ipamv1alpha1 "github.com/isthmus-net/isthmus/appliance/api/ipam/v1alpha1"
	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/ipam"
	"github.com/isthmus-net/isthmus/appliance/plan"
)

// checkInvariants fails if two objects share what must be theirs alone.
func checkInvariants(t testing.TB, w *world) {
	t.Helper()
	internal := map[v1beta1.IP]string{}
	ifaces := map[string]string{}
	vnis := map[uint32]string{}
	peers := map[string]netip.Prefix{}
	var local []netip.Prefix
	mapped := map[v1beta1.IP]string{}
	claim := func(what string, owner string, by *string) {
		assert.Assert(t, *by == "" || *by == owner, "%s is of %s and of %s", what, *by, owner)
		*by = owner
	}
	for k, o := range w.objects {
		switch o := o.(type) {
		case *v1beta1.InternalNode:
			ip, name := internal[o.Spec.Interface.Node.IP], ifaces["gateway "+o.Spec.Interface.Gateway.Name]
			claim(string(o.Spec.Interface.Node.IP), k, &ip)
			claim(o.Spec.Interface.Gateway.Name, k, &name)
			internal[o.Spec.Interface.Node.IP], ifaces["gateway "+o.Spec.Interface.Gateway.Name] = ip, name
			assert.Assert(t, len(o.Spec.Interface.Gateway.Name) <= 15)
		case *v1beta1.InternalFabric:
			ip, name := internal[o.Spec.Interface.Gateway.IP], ifaces["node "+o.Spec.Interface.Node.Name]
			claim(string(o.Spec.Interface.Gateway.IP), k, &ip)
			claim(o.Spec.Interface.Node.Name, k, &name)
			internal[o.Spec.Interface.Gateway.IP], ifaces["node "+o.Spec.Interface.Node.Name] = ip, name
			assert.Assert(t, len(o.Spec.Interface.Node.Name) <= 15)
		case *v1beta1.GeneveTunnel:
			assert.Equal(t, vnis[o.Spec.ID], "", "VNI %d of %s", o.Spec.ID, k)
			assert.Assert(t, o.Spec.ID > 0 && o.Spec.ID < 1<<24)
			vnis[o.Spec.ID] = k
		case *ipamv1alpha1.Network:
			if o.Status.CIDR == "" {
				continue
			}
			if o.Labels[v1beta1.LabelCIDRType] != "" {
				peers[k] = netip.MustParsePrefix(string(o.Status.CIDR))
				assert.Equal(t, peers[k].Bits(), netip.MustParsePrefix(string(o.Spec.CIDR)).Bits())
			} else {
				local = append(local, netip.MustParsePrefix(string(o.Status.CIDR)))
			}
		case *ipamv1alpha1.IP:
			assert.Assert(t, o.Status.IP == "" || mapped[o.Status.IP] == "", "%s is of %s and of %s", o.Status.IP, mapped[o.Status.IP], k)
			mapped[o.Status.IP] = k
			assert.Assert(t, o.Status.IP != "10.70.0.0", k)
			accepted := o.Status.IP != "" && condition(t, o.Status.Conditions, plan.ConditionAccepted).Status == "True"
			assert.Equal(t, firewallOf(w, o.Namespace, o.Name+"-remap-ipmapping-gw") != nil, accepted, k)
			service := w.objects[key("Service", o.Namespace, o.Name)]
			assert.Equal(t, service != nil && w.objects[key("EndpointSlice", o.Namespace, o.Name)] != nil, accepted && o.Spec.ServiceTemplate != nil, k)
		case *corev1.Node:
			a := netip.MustParseAddr(o.Status.Addresses[0].Address)
			local = append(local, netip.PrefixFrom(a, a.BitLen()))
		}
	}
	for a, p := range peers {
		for _, l := range local {
			assert.Assert(t, !p.Overlaps(l), "%s is %v, which overlaps %v", a, p, l)
		}
		for b, q := range peers {
			assert.Assert(t, a == b || !p.Overlaps(q), "%s is %v and %s is %v", a, p, b, q)
		}
	}
	for addr := range internal {
		assert.Assert(t, ipam.Usable(netip.MustParsePrefix("10.80.0.0/16"), netip.MustParseAddr(string(addr))), addr)
	}
	for k, o := range w.objects {
		if f, ok := o.(*v1beta1.InternalFabric); ok && f.Spec.Overlay == v1beta1.OverlayVXLAN {
			checkOverlay(t, w, f)
		} else if ok {
			for _, n := range w.objects {
				if n, ok := n.(*corev1.Node); ok {
					tunnel := w.objects[key("GeneveTunnel", f.Namespace, plan.Name(f.Name, n.Name))]
					assert.Assert(t, tunnel != nil, "%s has no tunnel to %s", k, n.Name)
				}
			}
		}
	}
}

// numbers lists everything that was given to somebody.
func numbers(w *world) map[string]string {
	out := map[string]string{}
	for k, o := range w.objects {
		switch o := o.(type) {
		case *v1beta1.InternalNode:
			out[k] = fmt.Sprint(o.Spec)
		case *v1beta1.InternalFabric:
			out[k] = fmt.Sprint(o.Spec.Interface, o.Spec.RemoteCIDRs)
		case *v1beta1.GeneveTunnel:
			out[k] = fmt.Sprint(o.Spec.ID)
		case *ipamv1alpha1.Network:
			out[k] = string(o.Status.CIDR)
		case *ipamv1alpha1.IP:
			out[k] = string(o.Status.IP)
		}
	}
	return out
}

// Nodes and peers come and go in any order. What somebody has stays theirs,
// nobody has what is somebody else's, and after every step the controller
// comes to rest.
func TestRandomWalk(t *testing.T) {
	for seed := range uint64(4) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			r := rand.New(rand.NewPCG(seed, 7))
			w := twoNodes(t, "milan", "10.10.0.0/16")
			if seed%2 == 1 {
				w.options.Overlay = cluster.OverlayVXLAN
			}
			remotes := []string{"rome", "paris", "london", "berlin", "tunnel", "a-cluster-with-a-long-name", "vxlan"}
			cidrs := []string{"10.10.0.0/16", "10.20.0.0/16", "10.0.0.0/15", "10.70.0.0/16", "172.16.0.0/12", "192.168.4.0/22"}
			nodes := 2
			for step := range 25 {
				before := numbers(w)
				what := ""
				switch remote := remotes[r.IntN(len(remotes))]; r.IntN(9) {
				case 0, 1:
					if w.objects["Namespace /liqo-tenant-"+remote] != nil {
						continue
					}
					what = "peer with " + remote
					w.namespace(remote)
					w.configure(remote, cidrs[r.IntN(len(cidrs))], "")
					if r.IntN(2) == 0 {
						w.client(remote)
					} else {
						w.server(remote, corev1.ServiceTypeNodePort)
					}
				case 2:
					if w.objects["Namespace /liqo-tenant-"+remote] == nil {
						continue
					}
					what = "unpeer from " + remote
					for _, kind := range []string{"GatewayServer", "GatewayClient", "Configuration"} {
						if w.objects[key(kind, "liqo-tenant-"+remote, remote)] != nil {
							w.remove(kind, "liqo-tenant-"+remote, remote)
						}
					}
					delete(w.objects, "Namespace /liqo-tenant-"+remote)
				case 3, 4:
					nodes++
					what = fmt.Sprintf("node %d joins", nodes)
					w.node(fmt.Sprintf("node-%d", nodes), fmt.Sprintf("172.31.255.%d", nodes), fmt.Sprintf("10.10.%d.0/24", nodes))
				case 5:
					name := fmt.Sprintf("node-%d", 3+r.IntN(nodes))
					if w.objects["Node /"+name] == nil {
						continue
					}
					what = name + " leaves"
					w.remove("Node", "", name)
				case 7:
					name := fmt.Sprintf("ip-%d", step)
					what = name + " is made"
					// Some are in networks of peers, in those of pods, or in none.
					o := w.ip(name, fmt.Sprintf("%s.%d.7", []string{"192.168", "10.10", "10.0", "10.1", "10.70", "127.0"}[r.IntN(6)], r.IntN(4)), r.IntN(2) == 0)
					if r.IntN(2) == 0 {
						o.Spec.ServiceTemplate = &ipamv1alpha1.ServiceTemplate{Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}}}
					}
				case 8:
					name := fmt.Sprintf("ip-%d", r.IntN(step+1))
					if w.objects[key("IP", "default", name)] == nil {
						continue
					}
					what = name + " goes, or its template"
					if o := get[*ipamv1alpha1.IP](w, "default", name); o.Spec.ServiceTemplate != nil {
						o.Spec.ServiceTemplate = nil
					} else {
						w.remove("IP", "default", name)
					}
				case 6:
					what = "gateway of " + remote + " restarts"
					delete(w.objects, key("Pod", "liqo-tenant-"+remote, "gw-"+remote+"-0"))
				}
				w.settle()
				w.kubelet("node-1", "node-2")
				w.settle()
				w.vteps()
				w.settle()
				checkInvariants(t, w)
				after := numbers(w)
				for k, v := range before {
					if now, still := after[k]; still && v != "" {
						assert.Equal(t, now, v, "step %d (%s): %s", step, what, k)
					}
				}
			}
		})
	}
}

// A node that joins or leaves changes no number of the others.
func TestNodesComeAndGo(t *testing.T) {
	w := peered(t)
	before := numbers(w)
	w.node("node-3", "172.18.1.13", "10.10.2.0/24")
	w.settle()
	for k, v := range before {
		assert.Equal(t, numbers(w)[k], v, k)
	}
	w.remove("Node", "", "node-1")
	w.settle()
	after := numbers(w)
	for k, v := range before {
		if !strings.HasSuffix(k, "node-1") {
			assert.Equal(t, after[k], v, k)
		}
	}
	assert.Equal(t, after["InternalNode /node-1"], "")
	checkInvariants(t, w)
}

// Whatever is in the objects that the plan reads its numbers from, no two end
// up with the same, and the second plan changes nothing.
func FuzzCorruptedNumbers(f *testing.F) {
	f.Add("10.80.0.1", "10.80.0.1", "10.80.0.1", "liqo.x", "liqo.x", uint32(1), uint32(1), "10.20.0.0/16")
	f.Add("10.80.0.0", "10.80.255.255", "::1", "", "eth0", uint32(0), uint32(1<<24), "10.10.0.0/16")
	f.Add("", "x", "10.81.0.1", "liqo.rome", "liqo.rome", uint32(2), uint32(1), "0.0.0.0/0")
	f.Fuzz(func(t *testing.T, a, b, c, ifaceA, ifaceB string, vniA, vniB uint32, cidr string) {
		corrupt(t, a, b, c, ifaceA, ifaceB, vniA, vniB, cidr)
	})
}

// The same, from values that are likely to hurt.
func TestCorruptedNumbers(t *testing.T) {
	for seed := range uint64(25) {
		r := rand.New(rand.NewPCG(seed, 9))
		one := func(list ...string) string { return list[r.IntN(len(list))] }
		ip := func() string {
			return one("", "x", "10.80.0.0", "10.80.0.1", "10.80.0.2", "10.80.0.3", "10.80.255.255", "10.81.0.1", "fd00::1", "::ffff:10.80.0.1", "fe80::1%eth0")
		}
		iface := func() string {
			return one("", "liqo.", "liqo.rome", "liqo.node-1", "liqo.node-2", "eth0", "liqo.a/b", "liqo-tunnel", "liqo.0123456789x")
		}
		vni := func() uint32 { return []uint32{0, 1, 2, 3, 1<<24 - 1, 1 << 24, 1<<32 - 1}[r.IntN(7)] }
		cidr := one("", "x", "10.20.0.0/16", "10.20.0.0/17", "10.10.0.0/16", "0.0.0.0/0", "172.18.0.0/16", "169.254.0.0/16", "fd00::/16")
		corrupt(t, ip(), ip(), ip(), iface(), iface(), vni(), vni(), cidr)
	}
}

// corrupt writes nonsense where the plan remembers what it gave, and lets the
// controller put it right.
func corrupt(t *testing.T, a, b, c, ifaceA, ifaceB string, vniA, vniB uint32, cidr string) {
	w := peered(t)
	node := get[*v1beta1.InternalNode](w, "", "node-1")
	node.Spec.Interface.Node.IP, node.Spec.Interface.Gateway.Name = v1beta1.IP(a), ifaceA
	node = get[*v1beta1.InternalNode](w, "", "node-2")
	node.Spec.Interface.Node.IP, node.Spec.Interface.Gateway.Name = v1beta1.IP(b), ifaceB
	fabric := get[*v1beta1.InternalFabric](w, "liqo-tenant-rome", "rome")
	fabric.Spec.Interface.Gateway.IP, fabric.Spec.Interface.Node.Name = v1beta1.IP(c), ifaceA
	get[*v1beta1.GeneveTunnel](w, "liqo-tenant-rome", "rome-node-1").Spec.ID = vniA
	get[*v1beta1.GeneveTunnel](w, "liqo-tenant-rome", "rome-node-2").Spec.ID = vniB
	get[*ipamv1alpha1.Network](w, "liqo-tenant-rome", "rome-pod-10-20-0-0-16").Status.CIDR = v1beta1.CIDR(cidr)
	w.settle()
	checkInvariants(t, w)
}

// large returns the snapshot of a cluster with many nodes and peerings, at
// rest.
func large(t testing.TB, nodes, peerings int) cluster.Snapshot {
	w := newWorld(t, "milan")
	w.create(&corev1.Namespace{TypeMeta: templatesMeta("v1", "Namespace"), ObjectMeta: named("", "liqo")})
	w.yaml(templates)
	for i := range nodes {
		w.node(fmt.Sprintf("node-%04d", i), fmt.Sprintf("172.18.%d.%d", i/250, i%250+1), fmt.Sprintf("10.%d.%d.0/24", 16+i/256, i%256))
	}
	w.network(v1beta1.NetworkTypePod, "10.16.0.0/12")
	w.network(v1beta1.NetworkTypeExternal, "10.70.0.0/16")
	w.network(v1beta1.NetworkTypeInternal, "10.80.0.0/16")
	for i := range peerings {
		remote := fmt.Sprintf("peer-%02d", i)
		w.namespace(remote)
		w.configure(remote, "10.0.0.0/16", "10.70.0.0/16")
		w.server(remote, corev1.ServiceTypeClusterIP)
	}
	for range 2 {
		w.apply(plan.Cluster(w.snapshot()))
		w.kubelet("node-0000", "node-0001")
	}
	w.apply(plan.Cluster(w.snapshot()))
	return w.snapshot()
}

func BenchmarkCluster(b *testing.B) {
	for _, size := range []struct{ nodes, peerings int }{{10, 2}, {1000, 20}} {
		b.Run(fmt.Sprintf("nodes=%d/peerings=%d", size.nodes, size.peerings), func(b *testing.B) {
			s := large(b, size.nodes, size.peerings)
			b.ReportAllocs()
			for b.Loop() {
				plan.Cluster(s)
			}
		})
	}
}
