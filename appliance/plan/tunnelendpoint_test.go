package plan_test

import (
	"encoding/base64"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	"gotest.tools/v3/assert/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	ipamv1alpha1 "github.com/isthmus-net/isthmus/appliance/api/ipam/v1alpha1"
	netv1alpha1 "github.com/isthmus-net/isthmus/appliance/api/net/v1alpha1"
	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/plan"
)

// peeringKinds are what users write of a peering, one way or the other.
var peeringKinds = []string{"Configuration", "GatewayServer", "GatewayClient", "PublicKey", "TunnelEndpoint"}

// legacy returns a cluster that is peered with rome by a TunnelEndpoint, whose
// gateway runs.
func legacy(t testing.TB) *world {
	w := twoNodes(t, "milan", "10.10.0.0/16")
	w.portsTemplate()
	w.namespace("rome")
	w.endpoint("rome", "10.20.0.0/16", "10.71.0.0/16")
	w.run()
	return w
}

// portsTemplate makes the servers' template read ports instead of port, and
// leave out the UID of the gateway.
func (w *world) portsTemplate() {
	w.remove("WgGatewayServerTemplate", "liqo", "wireguard-server")
	w.yaml(strings.NewReplacer(
		"{{ .Spec.Endpoint.Port }}", "{{ index .Spec.Endpoint.Ports 0 }}",
		"{{ .Spec.Endpoint.NodePort }}", "{{ with .Spec.Endpoint.NodePorts }}{{ index . 0 }}{{ end }}",
		"{{ .GatewayUID }}", "",
	).Replace(strings.SplitAfter(templates, "\n---\n")[0]))
}

// run lets the controller and the kubelets do their work until there is none.
func (w *world) run() plan.Result {
	w.t.Helper()
	w.settle()
	w.kubelet("node-1", "node-2")
	return w.settle()
}

func tunnelEndpoint(w *world, remote string) *netv1alpha1.TunnelEndpoint {
	w.t.Helper()
	return get[*netv1alpha1.TunnelEndpoint](w, "liqo-tenant-"+remote, remote)
}

// acceptance returns the condition of a TunnelEndpoint.
func acceptance(w *world, remote string) metav1.Condition {
	w.t.Helper()
	return condition(w.t, tunnelEndpoint(w, remote).Status.Conditions, plan.ConditionAccepted)
}

// outcome is everything in a cluster but what users write of peerings: no UIDs,
// for they differ, and owners by kind and name.
func outcome(w *world) map[string]string {
	out := map[string]string{}
	for k, o := range w.objects {
		if slices.Contains(peeringKinds, o.GetObjectKind().GroupVersionKind().Kind) {
			continue
		}
		fields := tree(w.t, o)
		meta := fields["metadata"].(map[string]any)
		for _, f := range []string{"uid", "creationTimestamp", "generation"} {
			delete(meta, f)
		}
		owners, _ := meta["ownerReferences"].([]any)
		for _, owner := range owners {
			delete(owner.(map[string]any), "uid")
		}
		out[k] = fmt.Sprint(fields)
	}
	return out
}

// The same peering, written one way or the other, is the same: after every
// step of a walk two clusters have the same objects, but for what the user
// wrote.
func TestTunnelEndpointsAreEqual(t *testing.T) {
	for seed := range uint64(3) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			r := rand.New(rand.NewPCG(seed, 11))
			plain, old := twoNodes(t, "milan", "10.10.0.0/16"), twoNodes(t, "milan", "10.10.0.0/16")
			for _, w := range []*world{plain, old} {
				w.portsTemplate()
			}
			remotes := []string{"rome", "paris", "london", "berlin"}
			cidrs := []string{"10.10.0.0/16", "10.20.0.0/16", "10.0.0.0/15", "10.70.0.0/16", "172.16.0.0/12", "192.168.4.0/22"}
			nodes := 2
			for step := range 16 {
				remote, pod := remotes[r.IntN(len(remotes))], cidrs[r.IntN(len(cidrs))]
				namespace := "liqo-tenant-" + remote
				peered := plain.objects["Namespace /"+namespace] != nil
				switch what := r.IntN(5); {
				case what <= 1 && !peered:
					dials := r.IntN(2) == 0
					for _, w := range []*world{plain, old} {
						w.namespace(remote)
					}
					plain.configure(remote, pod, "10.99.0.0/16")
					e := old.endpoint(remote, pod, "10.99.0.0/16")
					if dials {
						g := plain.client(remote)
						g.Spec.ClientTemplateRef = corev1.ObjectReference{}
						e.Spec.EndpointIP = g.Spec.Endpoint.Addresses[0]
					} else {
						g := plain.server(remote, corev1.ServiceTypeNodePort)
						g.Spec.ServerTemplateRef, g.Spec.MTU = corev1.ObjectReference{}, 0
						g.Spec.Endpoint = v1beta1.Endpoint{ServiceType: corev1.ServiceTypeNodePort, Ports: []int32{51840}, NodePorts: []int32{30840}}
					}
					publicKey(plain, remote, remote, 32)
				case what == 2 && peered:
					for _, w := range []*world{plain, old} {
						for _, kind := range peeringKinds {
							if o := w.objects[key(kind, namespace, remote)]; o != nil && (w == plain || kind == "TunnelEndpoint") {
								w.remove(kind, namespace, remote)
							}
						}
						delete(w.objects, "Namespace /"+namespace)
					}
				case what == 3:
					nodes++
					for _, w := range []*world{plain, old} {
						w.node(fmt.Sprintf("node-%d", nodes), fmt.Sprintf("172.31.255.%d", nodes), fmt.Sprintf("10.10.%d.0/24", nodes))
					}
				case what == 4 && peered:
					for _, w := range []*world{plain, old} {
						delete(w.objects, key("Pod", namespace, "gw-"+remote+"-0"))
					}
				}
				plain.run()
				old.run()
				checkInvariants(t, old)
				want, got := outcome(plain), outcome(old)
				assert.DeepEqual(t, slices.Sorted(maps.Keys(got)), slices.Sorted(maps.Keys(want)))
				for k := range want {
					assert.Equal(t, got[k], want[k], "step %d: %s", step, k)
				}
				for _, kind := range peeringKinds[:4] {
					for k, o := range plain.objects {
						if o.GetObjectKind().GroupVersionKind().Kind == kind {
							assert.DeepEqual(t, tree(t, old.objects[k])["spec"], tree(t, o)["spec"])
						}
					}
				}
			}
		})
	}
}

// What a TunnelEndpoint stands for has its name, is its own, says whose it is,
// and goes with it.
func TestTunnelEndpointObjects(t *testing.T) {
	w := legacy(t)
	e := tunnelEndpoint(w, "rome")
	for _, kind := range []string{"Configuration", "GatewayServer", "PublicKey"} {
		o := w.objects[key(kind, "liqo-tenant-rome", "rome")]
		assert.Assert(t, o != nil, kind)
		assert.Equal(t, o.GetLabels()[v1beta1.LabelManagedBy], v1beta1.ManagedBy)
		assert.Equal(t, o.GetLabels()[v1beta1.LabelRemoteClusterID], "rome")
		assert.Equal(t, o.GetOwnerReferences()[0].UID, e.UID)
	}
	c := get[*v1beta1.Configuration](w, "liqo-tenant-rome", "rome")
	assert.DeepEqual(t, c.Spec.Local.CIDR, v1beta1.ClusterConfigCIDR{Pod: []v1beta1.CIDR{"10.10.0.0/16"}, External: []v1beta1.CIDR{"10.70.0.0/16"}})

	// The user's hand in it does not last.
	c.Spec.Remote.CIDR.Pod[0] = "10.99.0.0/16"
	w.settle()
	assert.Equal(t, get[*v1beta1.Configuration](w, "liqo-tenant-rome", "rome").Spec.Remote.CIDR.Pod[0], v1beta1.CIDR("10.20.0.0/16"))

	// From server to client, and with another key.
	e = tunnelEndpoint(w, "rome")
	e.Spec.EndpointIP = "gw.example.org"
	e.Spec.BackendConfig[netv1alpha1.BackendPublicKey] = base64.StdEncoding.EncodeToString(slices.Repeat([]byte{8}, 32))
	w.run()
	assert.Assert(t, w.objects["GatewayServer liqo-tenant-rome/rome"] == nil)
	assert.DeepEqual(t, get[*v1beta1.GatewayClient](w, "liqo-tenant-rome", "rome").Spec.Endpoint.Addresses, []string{"gw.example.org"})
	assert.Equal(t, get[*v1beta1.PublicKey](w, "liqo-tenant-rome", "rome").Spec.PublicKey[0], byte(8))

	// To another cluster.
	delete(w.objects["Namespace /liqo-tenant-rome"].GetLabels(), v1beta1.LabelRemoteClusterID)
	tunnelEndpoint(w, "rome").Spec.ClusterIdentity.ClusterID = "paris"
	w.run()
	assert.Equal(t, get[*v1beta1.Configuration](w, "liqo-tenant-rome", "rome").Labels[v1beta1.LabelRemoteClusterID], "paris")
	get[*v1beta1.InternalFabric](w, "liqo-tenant-rome", "paris")

	e = tunnelEndpoint(w, "rome")
	delete(w.objects, keyOf(e)) // the garbage collector is not fast
	w.settle()
	for k, o := range w.objects {
		assert.Assert(t, o.GetNamespace() != "liqo-tenant-rome" || strings.HasPrefix(k, "Pod ") || strings.HasPrefix(k, "Secret "), k)
	}
}

func TestTunnelEndpointStatus(t *testing.T) {
	w := twoNodes(t, "milan", "10.10.0.0/16")
	w.portsTemplate()
	w.namespace("rome")
	e := w.endpoint("rome", "10.20.0.0/16", "10.71.0.0/16")
	e.Spec.EndpointIP = "203.0.113.1"
	delete(e.Spec.BackendConfig, netv1alpha1.BackendPublicKey)
	w.settle()
	s := tunnelEndpoint(w, "rome").Status
	assert.Equal(t, s.Phase, netv1alpha1.PhaseNew)
	assert.Equal(t, s.Connection.Status, netv1alpha1.Connecting)
	assert.Assert(t, cmp.Contains(s.Connection.StatusMessage, "no pod of Deployment liqo-tenant-rome/gw-rome"))

	w.kubelet("node-1", "node-2")
	w.settle()
	s = tunnelEndpoint(w, "rome").Status
	assert.Equal(t, s.Phase, netv1alpha1.PhaseProcessed)
	assert.Equal(t, s.GatewayIP, get[*corev1.Pod](w, "liqo-tenant-rome", "gw-rome-0").Status.PodIP)
	assert.Assert(t, cmp.Contains(s.Connection.StatusMessage, "spec.backend_config.publicKey is missing"))

	public := base64.StdEncoding.EncodeToString(slices.Repeat([]byte{7}, 32))
	tunnelEndpoint(w, "rome").Spec.BackendConfig[netv1alpha1.BackendPublicKey] = public
	w.settle()
	s = tunnelEndpoint(w, "rome").Status
	assert.Assert(t, cmp.Contains(s.Connection.StatusMessage, "dials 203.0.113.1 port 30840"))

	for _, value := range []v1beta1.ConnectionStatusValue{v1beta1.Connected, v1beta1.ConnectionError, v1beta1.Connecting, v1beta1.Connected} {
		get[*v1beta1.Connection](w, "liqo-tenant-rome", "gw-rome").Status.Value = value
		w.settle()
		assert.Equal(t, string(tunnelEndpoint(w, "rome").Status.Connection.Status), string(value))
	}
	s = tunnelEndpoint(w, "rome").Status
	assert.DeepEqual(t, s.Connection.PeerConfiguration, map[string]string{
		"endpointIP": "203.0.113.1", "port": "30840", "publicKey": public, "allowedIPs": "10.20.0.0/16, 10.71.0.0/16",
	})
	assert.Equal(t, s.RemoteTunnelPublicIP, "203.0.113.1")
	assert.Equal(t, s.LocalTunnelPrivateIP+" "+s.RemoteTunnelPrivateIP, "169.254.18.2 169.254.18.1")
	assert.Equal(t, acceptance(w, "rome").Status, metav1.ConditionTrue)
}

// The names of the remote networks are those that the TunnelEndpoint says.
func TestTunnelEndpointNAT(t *testing.T) {
	w := twoNodes(t, "milan", "10.10.0.0/16")
	w.portsTemplate()
	w.namespace("rome")
	e := w.endpoint("rome", "10.10.0.0/16", "10.71.0.0/16")
	e.Spec.RemoteNATPodCIDR = "10.40.0.0/16"
	w.run()
	pods := func() v1beta1.CIDR {
		return get[*v1beta1.Configuration](w, "liqo-tenant-rome", "rome").Status.Remote.CIDR.Pod[0]
	}
	assert.Equal(t, pods(), v1beta1.CIDR("10.40.0.0/16"))
	assert.Equal(t, get[*v1beta1.Configuration](w, "liqo-tenant-rome", "rome").Status.Remote.CIDR.External[0], v1beta1.CIDR("10.71.0.0/16"))

	// Another one, and then one that is taken: it stays as it was.
	tunnelEndpoint(w, "rome").Spec.RemoteNATPodCIDR = "10.41.0.0/16"
	w.settle()
	assert.Equal(t, pods(), v1beta1.CIDR("10.41.0.0/16"))
	for _, test := range []struct{ cidr, says string }{
		{"10.96.0.0/16", "spec.remoteNATPodCIDR 10.96.0.0/16 overlaps Network liqo/service-cidr (10.96.0.0/16): write a network of this size that is free, or None"},
		{"172.18.0.0/16", "an address of Node node-1 (172.18.1.11)"},
		{"10.71.0.0/16", "the network of cluster rome (10.71.0.0/16)"},
		{"127.0.0.0/16", "a range that can't be used"},
	} {
		tunnelEndpoint(w, "rome").Spec.RemoteNATPodCIDR = test.cidr
		r := w.settle()
		assert.Equal(t, pods(), v1beta1.CIDR("10.41.0.0/16"))
		assert.Equal(t, acceptance(w, "rome").Reason, plan.ReasonOverlaps)
		assert.Assert(t, cmp.Contains(acceptance(w, "rome").Message, test.says))
		assert.Assert(t, cmp.Len(warnings(r, "TunnelEndpoint", "liqo-tenant-rome", "rome"), 1))
		assert.Equal(t, len(r.Events), 1, "%v", r.Events)
	}

	// None lets the controller choose; what was there is good enough.
	tunnelEndpoint(w, "rome").Spec.RemoteNATPodCIDR = netv1alpha1.None
	w.settle()
	assert.Equal(t, pods(), v1beta1.CIDR("10.41.0.0/16"))
	assert.Equal(t, acceptance(w, "rome").Status, metav1.ConditionTrue)

	// Somebody who never had a name gets none.
	w.namespace("paris")
	w.endpoint("paris", "10.50.0.0/16", "10.72.0.0/16").Spec.RemoteNATPodCIDR = "10.41.0.0/16"
	w.run()
	assert.Assert(t, cmp.Contains(acceptance(w, "paris").Message, "the network of cluster rome (10.41.0.0/16)"))
	c := get[*v1beta1.Configuration](w, "liqo-tenant-paris", "paris")
	assert.Assert(t, c.Status.Remote == nil)
	assert.Assert(t, w.objects["Network liqo-tenant-paris/paris-pod-10-50-0-0-16"].(*ipamv1alpha1.Network).Status.CIDR == "")
	assert.Assert(t, w.objects["InternalFabric liqo-tenant-paris/paris"] == nil)
}

// What the user wrote counts more than a TunnelEndpoint, which says so, and
// nothing else changes.
func TestTunnelEndpointContradicts(t *testing.T) {
	// both returns a cluster in which the same is written both ways.
	both := func(t *testing.T) *world {
		w := twoNodes(t, "milan", "10.10.0.0/16")
		w.namespace("rome")
		w.configure("rome", "10.20.0.0/16", "10.71.0.0/16")
		w.client("rome")
		publicKey(w, "rome", "rome", 32)
		w.run()
		e := w.endpoint("rome", "10.20.0.0/16", "10.71.0.0/16")
		e.Spec.EndpointIP = "203.0.113.1"
		w.run()
		assert.Equal(t, acceptance(w, "rome").Status, metav1.ConditionTrue, acceptance(w, "rome").Message)
		return w
	}
	for _, test := range []struct {
		name   string
		spoil  func(s *netv1alpha1.TunnelEndpointSpec)
		reason string
		says   []string
	}{
		{"pod network", func(s *netv1alpha1.TunnelEndpointSpec) { s.RemotePodCIDR = "10.21.0.0/16" }, plan.ReasonContradicts,
			[]string{"Configuration liqo-tenant-rome/rome counts more", "spec.remotePodCIDR is 10.21.0.0/16, but spec.remote.cidr.pod is [10.20.0.0/16]"}},
		{"external network", func(s *netv1alpha1.TunnelEndpointSpec) { s.RemoteExternalCIDR = "10.72.0.0/16" }, plan.ReasonContradicts,
			[]string{"spec.remoteExternalCIDR is 10.72.0.0/16, but spec.remote.cidr.external is [10.71.0.0/16]"}},
		{"name of the pod network", func(s *netv1alpha1.TunnelEndpointSpec) { s.RemoteNATPodCIDR = "10.22.0.0/16" }, plan.ReasonContradicts,
			[]string{"spec.remoteNATPodCIDR is 10.22.0.0/16, but that network is known as 10.20.0.0/16"}},
		{"endpoint", func(s *netv1alpha1.TunnelEndpointSpec) { s.EndpointIP = "203.0.113.2" }, plan.ReasonContradicts,
			[]string{"GatewayClient liqo-tenant-rome/rome counts more", "spec.endpointIP is 203.0.113.2, but spec.endpoint.addresses is [203.0.113.1]"}},
		{"port", func(s *netv1alpha1.TunnelEndpointSpec) { s.BackendConfig["port"] = "5871" }, plan.ReasonContradicts,
			[]string{"spec.backend_config.port is 5871, but spec.endpoint.port is 30840"}},
		{"key", func(s *netv1alpha1.TunnelEndpointSpec) { s.BackendConfig["publicKey"] = strings.Repeat("A", 42) + "E=" }, plan.ReasonContradicts,
			[]string{"PublicKey liqo-tenant-rome/rome counts more", "spec.backend_config.publicKey"}},
		{"all of it", func(s *netv1alpha1.TunnelEndpointSpec) {
			s.RemotePodCIDR, s.EndpointIP, s.BackendConfig["publicKey"] = "10.21.0.0/16", "203.0.113.2", strings.Repeat("A", 42)+"E="
		}, plan.ReasonContradicts, []string{"Configuration liqo", "GatewayClient liqo", "PublicKey liqo"}},
		{"no network", func(s *netv1alpha1.TunnelEndpointSpec) { s.RemotePodCIDR = "" }, plan.ReasonNoCIDRs, []string{"spec.remotePodCIDR is empty"}},
		{"bad network", func(s *netv1alpha1.TunnelEndpointSpec) { s.RemotePodCIDR = "10.20.0.0/33" }, plan.ReasonInvalidField, []string{"spec.remotePodCIDR"}},
		{"bad key", func(s *netv1alpha1.TunnelEndpointSpec) { s.BackendConfig["publicKey"] = "AAAA" }, plan.ReasonInvalidField, []string{"spec.backend_config.publicKey"}},
		{"no port", func(s *netv1alpha1.TunnelEndpointSpec) { delete(s.BackendConfig, "port") }, plan.ReasonNoEndpoint, []string{"spec.backend_config.port is missing"}},
		{"overlapping itself", func(s *netv1alpha1.TunnelEndpointSpec) { s.RemoteExternalCIDR = "10.20.8.0/24" }, plan.ReasonSelfOverlap, []string{"spec.remoteExternalCIDR 10.20.8.0/24 overlaps"}},
		{"IPv6", func(s *netv1alpha1.TunnelEndpointSpec) { s.RemoteExternalCIDR = "fd00::/64" }, plan.ReasonFamily, []string{"spec.remoteExternalCIDR fd00::/64 is of IPv6, which peerings do not carry yet"}},
		{"another size", func(s *netv1alpha1.TunnelEndpointSpec) { s.RemoteNATPodCIDR = "10.22.0.0/17" }, plan.ReasonInvalidField, []string{"spec.remoteNATPodCIDR 10.22.0.0/17 is not of the size"}},
		{"another cluster's namespace", func(s *netv1alpha1.TunnelEndpointSpec) { s.ClusterIdentity.ClusterID = "paris" }, plan.ReasonIDMismatch, []string{"spec.clusterIdentity.clusterID", `belongs to the peering with "rome"`}},
		{"this cluster", func(s *netv1alpha1.TunnelEndpointSpec) { s.ClusterIdentity.ClusterID = "milan" }, plan.ReasonRemoteIsLocal, []string{"ID of this cluster"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			// Beside what the user wrote.
			w := both(t)
			before := outcome(w)
			test.spoil(&tunnelEndpoint(w, "rome").Spec)
			r := w.settle()
			assert.DeepEqual(t, outcome(w), before)
			refused := func(w *world, r plan.Result, reason string) {
				c := acceptance(w, "rome")
				assert.Equal(t, c.Status, metav1.ConditionFalse)
				assert.Equal(t, c.Reason, reason, c.Message)
				assert.Equal(t, tunnelEndpoint(w, "rome").Status.Phase, netv1alpha1.PhaseError)
				assert.Equal(t, len(r.Events), 1, "%v", r.Events)
				assert.Assert(t, cmp.Len(warnings(r, "TunnelEndpoint", "liqo-tenant-rome", "rome"), 1))
			}
			refused(w, r, test.reason)
			for _, says := range test.says {
				assert.Assert(t, cmp.Contains(acceptance(w, "rome").Message, says))
			}

			// On its own: what was made from it stays as it was.
			w = legacy(t)
			tunnelEndpoint(w, "rome").Spec.EndpointIP = "203.0.113.1"
			w.run()
			before = outcome(w)
			test.spoil(&tunnelEndpoint(w, "rome").Spec)
			if r = w.run(); test.reason == plan.ReasonContradicts {
				return // there is nothing to contradict: it is what is now wanted
			}
			assert.DeepEqual(t, outcome(w), before)
			refused(w, r, test.reason)
			assert.Assert(t, cmp.Contains(acceptance(w, "rome").Message, "until then what was made from it stays as it is"))
		})
	}
}

// A user who writes an object takes it over from the TunnelEndpoint, and gives
// it back by deleting it. Numbers do not change.
func TestTunnelEndpointTakenOver(t *testing.T) {
	rename := func(w *world, o plan.Object) {
		delete(w.objects, keyOf(o))
		o.SetName("mine")
		w.objects[keyOf(o)] = o
	}
	park := func(w *world, kind string, write func() plan.Object) {
		made := w.objects[key(kind, "liqo-tenant-rome", "rome")]
		delete(w.objects, key(kind, "liqo-tenant-rome", "rome"))
		rename(w, write())
		if made != nil {
			w.objects[keyOf(made)] = made
		}
	}
	w := legacy(t)
	before := outcome(w)
	park(w, "Configuration", func() plan.Object { return w.configure("rome", "10.20.0.0/16", "10.71.0.0/16") })
	r := w.run()
	assert.Equal(t, len(r.Events), 0, "%v", r.Events)
	assert.Assert(t, w.objects["Configuration liqo-tenant-rome/rome"] == nil)
	assert.DeepEqual(t, get[*v1beta1.Configuration](w, "liqo-tenant-rome", "mine").Status.Remote.CIDR.Pod, []v1beta1.CIDR{"10.20.0.0/16"})

	// One that is no use is no reason to stop.
	get[*v1beta1.Configuration](w, "liqo-tenant-rome", "mine").Spec.Remote.CIDR.Pod[0] = "x"
	r = w.run()
	assert.Assert(t, cmp.Len(warnings(r, "Configuration", "liqo-tenant-rome", "mine"), 1))
	get[*v1beta1.Configuration](w, "liqo-tenant-rome", "rome")
	w.remove("Configuration", "liqo-tenant-rome", "mine")
	w.run()
	assert.DeepEqual(t, outcome(w), before)

	park(w, "PublicKey", func() plan.Object {
		publicKey(w, "rome", "rome", 32)
		return w.objects["PublicKey liqo-tenant-rome/rome"]
	})
	w.run()
	assert.Assert(t, w.objects["PublicKey liqo-tenant-rome/rome"] == nil)
	w.remove("PublicKey", "liqo-tenant-rome", "mine")
	w.run()
	get[*v1beta1.PublicKey](w, "liqo-tenant-rome", "rome")

	park(w, "GatewayServer", func() plan.Object {
		g := w.server("rome", corev1.ServiceTypeClusterIP)
		g.Spec.Endpoint = v1beta1.Endpoint{ServiceType: corev1.ServiceTypeClusterIP, Ports: []int32{51840}}
		return g
	})
	r = w.run()
	assert.Equal(t, len(r.Events), 0, "%v", r.Events)
	assert.Assert(t, w.objects["GatewayServer liqo-tenant-rome/rome"] == nil)
	assert.Assert(t, w.objects["Deployment liqo-tenant-rome/gw-mine"] != nil)
	assert.Assert(t, w.objects["Deployment liqo-tenant-rome/gw-rome"] == nil)
	// It runs on, with a mistake in it.
	get[*v1beta1.GatewayServer](w, "liqo-tenant-rome", "mine").Spec.ServerTemplateRef.Name = "nope"
	w.run()
	assert.Assert(t, w.objects["Deployment liqo-tenant-rome/gw-mine"] != nil)
	assert.Assert(t, w.objects["GatewayServer liqo-tenant-rome/rome"] == nil)
	w.remove("GatewayServer", "liqo-tenant-rome", "mine")
	w.run()
	assert.Assert(t, w.objects["Deployment liqo-tenant-rome/gw-rome"] != nil)
}

// Two TunnelEndpoints for one cluster: the older one counts.
func TestTunnelEndpointTwice(t *testing.T) {
	w := legacy(t)
	before := outcome(w)
	first := tunnelEndpoint(w, "rome")
	delete(w.objects, keyOf(first))
	second := w.endpoint("rome", "10.60.0.0/16", "10.61.0.0/16")
	delete(w.objects, keyOf(second))
	second.Name = "another"
	w.objects[keyOf(first)], w.objects[keyOf(second)] = first, second
	r := w.run()
	assert.DeepEqual(t, outcome(w), before)
	events := warnings(r, "TunnelEndpoint", "liqo-tenant-rome", "another")
	assert.Assert(t, cmp.Len(events, 1))
	assert.Assert(t, cmp.Contains(events[0], "TunnelEndpoint liqo-tenant-rome/rome already describes cluster rome"))
	another := func() *netv1alpha1.TunnelEndpoint {
		return get[*netv1alpha1.TunnelEndpoint](w, "liqo-tenant-rome", "another")
	}
	assert.Equal(t, another().Status.Phase, netv1alpha1.PhaseError)
	assert.Equal(t, another().Status.Connection.Status, netv1alpha1.ConnectionError)

	w.remove("TunnelEndpoint", "liqo-tenant-rome", "rome")
	w.run()
	assert.Equal(t, condition(t, another().Status.Conditions, plan.ConditionAccepted).Status, metav1.ConditionTrue)
	assert.Equal(t, get[*v1beta1.Configuration](w, "liqo-tenant-rome", "another").Spec.Remote.CIDR.Pod[0], v1beta1.CIDR("10.60.0.0/16"))
	assert.Assert(t, w.objects["Configuration liqo-tenant-rome/rome"] == nil)
}

// The name that something would have may be somebody else's, and the networks
// of this cluster may be others than it says.
func TestTunnelEndpointRemarks(t *testing.T) {
	w := twoNodes(t, "milan", "10.10.0.0/16")
	w.portsTemplate()
	w.namespace("rome")
	delete(w.objects["Namespace /liqo-tenant-rome"].GetLabels(), v1beta1.LabelRemoteClusterID)
	w.configure("rome", "10.30.0.0/16", "").Labels[v1beta1.LabelRemoteClusterID] = "paris"
	e := w.endpoint("rome", "10.20.0.0/16", "10.71.0.0/16")
	w.run()
	assert.Equal(t, acceptance(w, "rome").Reason, plan.ReasonNameTaken)
	assert.Assert(t, cmp.Contains(acceptance(w, "rome").Message, "Configuration liqo-tenant-rome/rome has the name"))
	get[*v1beta1.GatewayServer](w, "liqo-tenant-rome", "rome")

	w.remove("Configuration", "liqo-tenant-rome", "rome")
	e = tunnelEndpoint(w, "rome")
	e.Spec.LocalPodCIDR = "10.11.0.0/16"
	r := w.run()
	assert.Equal(t, acceptance(w, "rome").Status, metav1.ConditionTrue)
	assert.Assert(t, cmp.Contains(acceptance(w, "rome").Message, "spec.localPodCIDR is 10.11.0.0/16, but that network of this cluster is [10.10.0.0/16]"))
	assert.Assert(t, cmp.Len(warnings(r, "TunnelEndpoint", "liqo-tenant-rome", "rome"), 1))
}
