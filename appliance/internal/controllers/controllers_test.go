package controllers

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"
	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
	"gotest.tools/v3/poll"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	corev1beta1 "github.com/isthmus-net/isthmus/appliance/api/core/v1beta1"
	ipamv1alpha1 "github.com/isthmus-net/isthmus/appliance/api/ipam/v1alpha1"
	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/internal/kube"
	"github.com/isthmus-net/isthmus/appliance/nettest"
	"github.com/isthmus-net/isthmus/appliance/plan"
)

const tenant = "liqo-tenant-rome"

// TestController runs the controller on a real API server. The steps build on
// each other.
func TestController(t *testing.T) {
	nettest.Slow(t, "starts an API server")
	admin, c := startAPIServer(t)
	w := &world{t: t, c: c, log: &logBuffer{}, plans: &plans{}}
	w.create(system()...)
	cfg := w.asController(admin)
	own, err := client.New(cfg, client.Options{Scheme: kube.Scheme()})
	assert.NilError(t, err)
	w.testPullsOnly(own)
	w.testKeysOnly(own)
	w.testGatewaysOnly(own)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	metrics := fmt.Sprintf("127.0.0.1:%d", nettest.FreePorts(t, 1)[0])
	go func() {
		done <- Run(ctx, Config{
			REST: cfg, Namespace: "liqo", LeaderElection: true, Identity: "test", Debounce: 20 * time.Millisecond, EventDelay: 300 * time.Millisecond,
			MetricsAddress: metrics, Logger: slog.New(slog.NewTextHandler(w.log, nil)), planner: w.plans.plan,
		})
	}()
	t.Cleanup(func() {
		cancel()
		assert.Check(t, <-done)
		if t.Failed() {
			t.Log(w.log.String())
		}
	})

	w.create(peering()...)
	w.run("a peering gets what it needs", (*world).testPeering)
	w.run("metrics are for those who may see them", func(w *world) { w.testMetrics(admin, metrics) })
	w.run("a second pass writes nothing", (*world).testQuiet)
	w.run("a peer does not get the API server's address", (*world).testAPIServerAddress)
	w.run("what is changed by hand is changed back", (*world).testDrift)
	w.run("a key is never overwritten", (*world).testKeys)
	w.run("what is wrong is said once", (*world).testEvents)
	w.run("a running gateway survives a slip of the pen", (*world).testKept)
	w.run("an upgrade pulls the image before it costs the pod", (*world).testRollout)
	w.run("a port of the nodes that somebody else has", (*world).testTakenPort)
	w.run("what is not ours stays", (*world).testForeign)
	w.run("an IP gets an address, its mapping and its Service", (*world).testIP)
	w.run("pods come and go without a pass", (*world).testPods)
	w.run("an object that no plan can be made with is left out", (*world).testLeftOut)
	w.run("a TunnelEndpoint stands for a peering", (*world).testTunnelEndpoint)
	w.run("an invitation is used once, and leads to a peering", (*world).testInvitation)
	w.run("what a host reports is told when it lasts", (*world).testHostEvents)
	w.run("what is not planned any more goes", (*world).testPrune)
	w.run("in a namespace that ends nothing is made, and nobody else is kept waiting", (*world).testTerminating)
}

// system are the objects of the chart that the controller depends on.
func system() []client.Object {
	network := func(name, kind, cidr string, exact bool) client.Object {
		n := &ipamv1alpha1.Network{ObjectMeta: metav1.ObjectMeta{Namespace: "liqo", Name: name, Labels: map[string]string{v1beta1.LabelNetworkType: kind}}}
		if exact {
			n.Labels[v1beta1.LabelNotRemapped] = "true"
		}
		n.Spec.CIDR = v1beta1.CIDR(cidr)
		return n
	}
	template := runtime.RawExtension{Raw: []byte(`{"spec": {
		"service": {"spec": {"type": "{{ .Spec.Endpoint.ServiceType }}", "ports": [{"port": "{{ index .Spec.Endpoint.Ports 0 }}", "?nodePort": "{{ with .Spec.Endpoint.NodePorts }}{{ index . 0 }}{{ end }}", "protocol": "UDP", "targetPort": 51840}]}},
		"deployment": {"spec": {"template": {"spec": {"containers": [{"name": "gateway", "image": "isthmus:dev", "args": ["gateway", "--mode=server"]}]}}}}}}`)}
	return []client.Object{
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "liqo"}},
		&corev1.ConfigMap{
			ObjectMeta: metav1.ObjectMeta{Namespace: "liqo", Name: "clusterid-configmap", Labels: map[string]string{v1beta1.LabelAppName: v1beta1.ClusterIDConfigMap}},
			Data:       map[string]string{v1beta1.ClusterIDKey: "milan"},
		},
		network("pod-cidr", v1beta1.NetworkTypePod, "10.0.0.0/16", true),
		network("service-cidr", v1beta1.NetworkTypeService, "10.96.0.0/16", true),
		network("external-cidr", v1beta1.NetworkTypeExternal, "10.70.0.0/16", false),
		network("internal-cidr", v1beta1.NetworkTypeInternal, "10.80.0.0/16", false),
		&v1beta1.WgGatewayServerTemplate{
			ObjectMeta: metav1.ObjectMeta{Namespace: "liqo", Name: "wireguard-server"},
			Spec: v1beta1.GatewayTemplateSpec{
				ObjectKind: v1beta1.TemplateObjectKind{APIVersion: v1beta1.GroupVersion.String(), Kind: "WgGatewayServer"},
				Template:   template,
			},
		},
		&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1"}, Spec: corev1.NodeSpec{PodCIDR: "10.0.1.0/24", PodCIDRs: []string{"10.0.1.0/24"}}},
		&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-2"}, Spec: corev1.NodeSpec{PodCIDR: "10.0.2.0/24", PodCIDRs: []string{"10.0.2.0/24"}}},
	}
}

func peerMeta(name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: tenant, Name: name, Labels: map[string]string{v1beta1.LabelRemoteClusterID: "rome"}}
}

func peering() []client.Object {
	return []client.Object{
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: tenant, Labels: map[string]string{v1beta1.LabelTenantNamespace: "true", v1beta1.LabelRemoteClusterID: "rome"}}},
		&v1beta1.Configuration{ObjectMeta: peerMeta("rome"), Spec: v1beta1.ConfigurationSpec{Remote: v1beta1.ClusterConfig{
			CIDR: v1beta1.ClusterConfigCIDR{Pod: []v1beta1.CIDR{"10.0.0.0/16"}, External: []v1beta1.CIDR{"10.70.0.0/16"}},
		}}},
		&v1beta1.GatewayServer{ObjectMeta: peerMeta("rome"), Spec: v1beta1.GatewayServerSpec{
			ServerTemplateRef: corev1.ObjectReference{Kind: "WgGatewayServerTemplate", Name: "wireguard-server", Namespace: "liqo"},
			Endpoint:          v1beta1.Endpoint{ServiceType: corev1.ServiceTypeNodePort, Ports: []int32{51840}},
		}},
	}
}

func (w *world) testPeering() {
	w.until("the Configuration is in use", func() bool {
		conf := &v1beta1.Configuration{ObjectMeta: peerMeta("rome")}
		return w.get(conf) && conf.Status.Remote != nil && len(conf.Status.Remote.CIDR.Pod) == 1 && conf.Status.Remote.CIDR.Pod[0] != "10.0.0.0/16" &&
			conf.Status.Conditions[0].Status == metav1.ConditionTrue && conf.Spec.Local != nil
	})
	for _, o := range []client.Object{
		&appsv1.Deployment{ObjectMeta: peerMeta("gw-rome")}, &corev1.Service{ObjectMeta: peerMeta("gw-rome")}, &corev1.ServiceAccount{ObjectMeta: peerMeta("gw-rome")},
		&rbacv1.Role{ObjectMeta: peerMeta("gw-rome")}, &rbacv1.RoleBinding{ObjectMeta: peerMeta("gw-rome")}, &v1beta1.Connection{ObjectMeta: peerMeta("gw-rome")},
		&v1beta1.GatewayReport{ObjectMeta: peerMeta("gw-rome")}, &v1beta1.WgGatewayServer{ObjectMeta: peerMeta("rome")},
	} {
		w.exists(o)
	}
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: tenant}}
	w.until("the namespace lets gateways have NET_ADMIN", func() bool {
		return w.get(ns) && ns.Labels["pod-security.kubernetes.io/enforce"] == "privileged"
	})
	fc := &corev1beta1.ForeignCluster{ObjectMeta: metav1.ObjectMeta{Name: "rome"}}
	w.until("the ForeignCluster has our module", func() bool {
		return w.get(fc) && fc.Status.Modules.Networking != nil && fc.Status.Modules.Networking.Enabled
	})

	pod := &corev1.Pod{ObjectMeta: peerMeta("gw-rome-0"), Spec: corev1.PodSpec{NodeName: "node-1", Containers: []corev1.Container{{Name: "gateway", Image: "isthmus:dev"}}}}
	for k, v := range map[string]string{
		v1beta1.LabelAppName: "gw-rome", v1beta1.LabelComponent: v1beta1.ComponentGateway, v1beta1.LabelActive: "true",
		v1beta1.LabelGatewayName: "rome", v1beta1.LabelGatewayNamespace: tenant,
	} {
		pod.Labels[k] = v
	}
	w.create(pod)
	pod.Status = corev1.PodStatus{Phase: corev1.PodRunning, PodIP: "10.0.1.7", PodIPs: []corev1.PodIP{{IP: "10.0.1.7"}}}
	assert.NilError(w.t, w.c.Status().Update(w.t.Context(), pod))
	w.exists(&v1beta1.InternalFabric{ObjectMeta: peerMeta("rome")})
	w.exists(&v1beta1.GeneveTunnel{ObjectMeta: peerMeta("rome-node-1")})
	w.exists(&v1beta1.GeneveTunnel{ObjectMeta: peerMeta("rome-node-2")})
	w.exists(&v1beta1.RouteConfiguration{ObjectMeta: peerMeta("rome-node-gw")})
	w.exists(&v1beta1.RouteConfiguration{ObjectMeta: peerMeta("rome-gw-ext")})
	gws := &v1beta1.GatewayServer{ObjectMeta: peerMeta("rome")}
	w.until("the GatewayServer knows its pod and its Secret", func() bool {
		return w.get(gws) && gws.Status.InternalEndpoint != nil && *gws.Status.InternalEndpoint.IP == "10.0.1.7" && gws.Status.SecretRef != nil
	})
}

// testQuiet makes passes happen and sees that they change no object.
func (w *world) testQuiet() {
	w.settle()
	before := w.log.writes()
	for i := range 3 {
		w.patch(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1"}}, `{"metadata":{"labels":{"touched":"`+string(rune('a'+i))+`"}}}`)
		w.settle()
	}
	assert.Check(w.t, is.Equal(w.log.writes()-before, 0))
}

func (w *world) testDrift() {
	route := &v1beta1.RouteConfiguration{ObjectMeta: peerMeta("rome-node-gw")}
	deployment := &appsv1.Deployment{ObjectMeta: peerMeta("gw-rome")}
	service := &corev1.Service{ObjectMeta: peerMeta("gw-rome")}
	tunnel := &v1beta1.GeneveTunnel{ObjectMeta: peerMeta("rome-node-1")}
	role := &rbacv1.Role{ObjectMeta: peerMeta("gw-rome")}
	connection := &v1beta1.Connection{ObjectMeta: peerMeta("gw-rome")}
	for _, o := range []client.Object{route, deployment, service, tunnel, role, connection} {
		w.exists(o)
	}
	for _, tt := range []struct {
		name  string
		spoil func()
		right func() bool
	}{
		{"a tunnel deleted", func() { w.delete(tunnel) }, func() bool {
			again := &v1beta1.GeneveTunnel{ObjectMeta: peerMeta("rome-node-1")}
			return w.get(again) && again.Spec.ID == tunnel.Spec.ID
		}},
		{"a route added", func() {
			w.patchJSON(route, `[{"op":"add","path":"/spec/table/rules/-","value":{"dst":"8.8.8.8/32","routes":[{"dst":"8.8.8.8/32"}]}}]`)
		}, func() bool {
			again := &v1beta1.RouteConfiguration{ObjectMeta: peerMeta("rome-node-gw")}
			return w.get(again) && equality.Semantic.DeepEqual(again.Spec, route.Spec)
		}},
		{"addressed to another host", func() { w.patch(route, `{"metadata":{"labels":{"networking.liqo.io/route-unique":"paris"}}}`) }, func() bool {
			return w.get(route) && route.Labels[v1beta1.LabelRouteUnique] == ""
		}},
		{"an argument added", func() {
			w.patchJSON(deployment, `[{"op":"add","path":"/spec/template/spec/containers/0/args/-","value":"--mtu=9000"}]`)
		}, func() bool {
			return w.get(deployment) && len(deployment.Spec.Template.Spec.Containers[0].Args) == 2
		}},
		{"type of the Service", func() { w.patch(service, `{"spec":{"type":"ClusterIP"}}`) }, func() bool {
			return w.get(service) && service.Spec.Type == corev1.ServiceTypeNodePort
		}},
		{"rights taken away", func() { w.patch(role, `{"rules":[]}`) }, func() bool {
			return w.get(role) && len(role.Rules) > 1
		}},
	} {
		tt.spoil()
		w.until(tt.name+" is put right", tt.right)
	}
}

func (w *world) testKeys() {
	secret := &corev1.Secret{ObjectMeta: peerMeta("gw-rome")}
	w.exists(secret)
	private, err := wgtypes.NewKey(secret.Data[v1beta1.PrivateKeyField])
	assert.NilError(w.t, err)
	public := private.PublicKey()
	assert.Check(w.t, bytes.Equal(public[:], secret.Data[v1beta1.PublicKeyField]))
	assert.Check(w.t, is.Equal(secret.Labels[v1beta1.LabelGatewayResource], "true"))
	assert.Check(w.t, !strings.Contains(w.log.String(), private.String()))

	w.patch(secret, `{"metadata":{"labels":{"app.kubernetes.io/managed-by":null}}}`)
	w.until("the label is back", func() bool { return w.get(secret) && secret.Labels[v1beta1.LabelManagedBy] == v1beta1.ManagedBy })
	assert.Check(w.t, bytes.Equal(private[:], secret.Data[v1beta1.PrivateKeyField]))

	w.delete(secret)
	w.until("a lost key is made anew", func() bool {
		again := &corev1.Secret{ObjectMeta: peerMeta("gw-rome")}
		return w.get(again) && len(again.Data[v1beta1.PrivateKeyField]) == 32 && !bytes.Equal(private[:], again.Data[v1beta1.PrivateKeyField])
	})
}

func (w *world) testEvents() {
	bad := &v1beta1.Configuration{ObjectMeta: metav1.ObjectMeta{Namespace: tenant, Name: "bad", Labels: map[string]string{v1beta1.LabelRemoteClusterID: "milan"}}}
	bad.Spec.Remote.CIDR.Pod = []v1beta1.CIDR{"10.5.0.0/16"}
	w.create(bad)
	events := func() (n int32) {
		var list eventsv1.EventList
		assert.NilError(w.t, w.c.List(w.t.Context(), &list, client.InNamespace(tenant)))
		for _, e := range list.Items {
			if e.Regarding.Name == "bad" {
				n += e.DeprecatedCount
			}
		}
		return n
	}
	told := func() int {
		return strings.Count(w.log.String(), `msg=event object="Configuration `+tenant+`/bad"`)
	}
	w.until("an event says so", func() bool { return events() > 0 })
	w.until("a condition says so", func() bool {
		return w.get(bad) && len(bad.Status.Conditions) == 1 && bad.Status.Conditions[0].Status == metav1.ConditionFalse
	})
	for i := range 3 {
		w.patch(bad, `{"metadata":{"labels":{"touched":"`+string(rune('a'+i))+`"}}}`)
		w.settle()
	}
	assert.Check(w.t, is.Equal(told(), 1)) // the recorder writes later
	assert.Check(w.t, is.Equal(events(), int32(1)))
	w.delete(bad)
}

// testKept asks for a template that does not exist. What the old one made goes
// on, and is changed again once the name is right.
func (w *world) testKept() {
	gws := &v1beta1.GatewayServer{ObjectMeta: peerMeta("rome")}
	list := []client.Object{
		&appsv1.Deployment{ObjectMeta: peerMeta("gw-rome")}, &corev1.Service{ObjectMeta: peerMeta("gw-rome")}, &v1beta1.WgGatewayServer{ObjectMeta: peerMeta("rome")},
		&corev1.ServiceAccount{ObjectMeta: peerMeta("gw-rome")}, &rbacv1.RoleBinding{ObjectMeta: peerMeta("gw-rome")}, &corev1.Secret{ObjectMeta: peerMeta("gw-rome")},
		&v1beta1.Connection{ObjectMeta: peerMeta("gw-rome")}, &v1beta1.InternalFabric{ObjectMeta: peerMeta("rome")},
		&v1beta1.RouteConfiguration{ObjectMeta: peerMeta("rome-node-gw")}, &v1beta1.RouteConfiguration{ObjectMeta: peerMeta("rome-gw-ext")},
	}
	before := map[int]string{}
	for i, o := range list {
		w.exists(o)
		before[i] = string(o.GetUID())
	}
	accepted := func(want metav1.ConditionStatus) func() bool {
		return func() bool {
			if !w.get(gws) {
				return false
			}
			c := meta.FindStatusCondition(gws.Status.Conditions, plan.ConditionAccepted)
			return c != nil && c.Status == want
		}
	}
	w.until("the GatewayServer is in use", accepted(metav1.ConditionTrue))
	w.patch(gws, `{"spec":{"serverTemplateRef":{"name":"nope"}}}`)
	w.until("a condition says that it is not", accepted(metav1.ConditionFalse))
	w.until("an event says why", func() bool {
		var events eventsv1.EventList
		assert.NilError(w.t, w.c.List(w.t.Context(), &events, client.InNamespace(tenant)))
		return slices.ContainsFunc(events.Items, func(e eventsv1.Event) bool {
			return e.Regarding.Name == "rome" && e.Regarding.Kind == "GatewayServer" && e.Reason == plan.ReasonNoTemplate
		})
	})
	w.settle()
	for i, o := range list {
		assert.Assert(w.t, w.get(o), "%T %s is gone", o, o.GetName())
		assert.Check(w.t, o.GetDeletionTimestamp() == nil)
		assert.Check(w.t, is.Equal(string(o.GetUID()), before[i]), "%T %s", o, o.GetName())
	}
	w.patch(gws, `{"spec":{"serverTemplateRef":{"name":"wireguard-server"},"endpoint":{"ports":[4500]}}}`)
	w.until("it is in use again", accepted(metav1.ConditionTrue))
	service := &corev1.Service{ObjectMeta: peerMeta("gw-rome")}
	w.until("and follows", func() bool { return w.get(service) && service.Spec.Ports[0].Port == 4500 })
}

func (w *world) testForeign() {
	own := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: tenant, Name: "gw-rome"}}
	w.patch(&corev1.Service{ObjectMeta: peerMeta("gw-rome")}, `{"metadata":{"labels":{"app.kubernetes.io/managed-by":"somebody"},"ownerReferences":null}}`)
	w.until("the log says what to do", func() bool {
		return strings.Contains(w.log.String(), "Service "+tenant+"/gw-rome: there is one that Isthmus did not make")
	})
	assert.Assert(w.t, w.get(own))
	assert.Check(w.t, is.Equal(own.Labels[v1beta1.LabelManagedBy], "somebody"))
	// The rest goes on.
	tunnel := &v1beta1.GeneveTunnel{ObjectMeta: peerMeta("rome-node-2")}
	w.exists(tunnel)
	w.delete(tunnel)
	w.exists(&v1beta1.GeneveTunnel{ObjectMeta: peerMeta("rome-node-2")})
	w.delete(own)
	w.until("the Service is ours again", func() bool { return w.get(own) && own.Labels[v1beta1.LabelManagedBy] == v1beta1.ManagedBy })

	user := &v1beta1.RouteConfiguration{ObjectMeta: peerMeta("users-own")}
	cidr := v1beta1.CIDR("192.0.2.0/24")
	user.Spec.Table = v1beta1.RouteTable{Name: "users-own", Rules: []v1beta1.Rule{{Dst: &cidr, Routes: []v1beta1.Route{{Dst: &cidr}}}}}
	w.create(user)
	w.settle()
	assert.Assert(w.t, w.get(user))
}

// testHostEvents writes what a node does into its InternalNode.
func (w *world) testHostEvents() {
	route := &v1beta1.RouteConfiguration{ObjectMeta: peerMeta("users-own")}
	assert.Assert(w.t, w.get(route))
	node := &v1beta1.InternalNode{ObjectMeta: metav1.ObjectMeta{Name: "node-1"}}
	assert.Assert(w.t, w.get(node))
	node.Status.Applied = []v1beta1.AppliedStatus{{
		Kind: "RouteConfiguration", Namespace: route.Namespace, Name: route.Name, ObservedGeneration: route.Generation,
		Message: "no such device", LastTransitionTime: metav1.Now(),
	}}
	assert.NilError(w.t, w.c.Status().Update(w.t.Context(), node))
	reports := func(message string) {
		w.t.Helper()
		assert.Assert(w.t, w.get(node))
		node.Status.Applied[0].Message, node.Status.Applied[0].LastTransitionTime = message, metav1.Now()
		assert.NilError(w.t, w.c.Status().Update(w.t.Context(), node))
	}
	notes := func() (out []string) {
		var events eventsv1.EventList
		assert.NilError(w.t, w.c.List(w.t.Context(), &events, client.InNamespace(tenant)))
		for _, e := range events.Items {
			if e.Regarding.UID == route.UID && e.Reason == plan.ReasonNotApplied && e.Type == "Warning" {
				out = append(out, fmt.Sprintf("%d times: %s", e.DeprecatedCount, e.Note))
			}
		}
		slices.Sort(out)
		return out
	}
	w.until("the condition says so", func() bool {
		return w.get(route) && slices.ContainsFunc(route.Status.Conditions, func(c v1beta1.HostCondition) bool {
			return c.Host == "node-1" && c.Type == v1beta1.HostError
		})
	})
	w.until("an event says why", func() bool { return len(notes()) > 0 })
	w.settle()
	assert.Check(w.t, is.DeepEqual(notes(), []string{"1 times: not in force on node node-1: no such device"}))
	// Who corrects it wrongly reads what is wrong now, and who does so again reads that, too.
	reports("file exists")
	w.until("an event says what it is now", func() bool { return len(notes()) > 1 })
	assert.Check(w.t, is.DeepEqual(notes(), []string{"1 times: not in force on node node-1: file exists", "1 times: not in force on node node-1: no such device"}))
	reports("no such device")
	w.until("an event says that it is back", func() bool {
		return slices.Equal(notes(), []string{"1 times: not in force on node node-1: file exists", "2 times: not in force on node node-1: no such device"})
	})
}

func (w *world) testPrune() {
	w.delete(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-2"}})
	w.until("what was for the node is gone", func() bool {
		return !w.get(&v1beta1.InternalNode{ObjectMeta: metav1.ObjectMeta{Name: "node-2"}}) &&
			!w.get(&v1beta1.GeneveTunnel{ObjectMeta: peerMeta("rome-node-2")}) &&
			!w.get(&v1beta1.RouteConfiguration{ObjectMeta: metav1.ObjectMeta{Namespace: "liqo", Name: "milan-node-2-gw-node"}})
	})
	w.delete(&v1beta1.GatewayServer{ObjectMeta: peerMeta("rome")})
	w.until("what was for the gateway is gone, and what users made is not", func() bool {
		var bindings rbacv1.ClusterRoleBindingList
		assert.NilError(w.t, w.c.List(w.t.Context(), &bindings, client.MatchingLabels{v1beta1.LabelManagedBy: v1beta1.ManagedBy}))
		return len(bindings.Items) == 0 && !w.get(&appsv1.Deployment{ObjectMeta: peerMeta("gw-rome")}) &&
			!w.get(&v1beta1.InternalFabric{ObjectMeta: peerMeta("rome")}) &&
			w.get(&v1beta1.Configuration{ObjectMeta: peerMeta("rome")}) && w.get(&v1beta1.RouteConfiguration{ObjectMeta: peerMeta("users-own")})
	})
}

// testTerminating deletes the namespace of a peering, which nobody empties here,
// and one of the objects in it, as the namespace controller does one by one.
func (w *world) testTerminating() {
	w.create(peering()[2])
	gateway := &appsv1.Deployment{ObjectMeta: peerMeta("gw-rome")}
	w.exists(gateway)
	w.settle()
	before := len(w.log.String())
	w.delete(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: tenant}})
	w.until("the controller knows", func() bool {
		return w.plans.sees(func(s cluster.Snapshot) bool {
			return slices.ContainsFunc(s.Namespaces, func(n cluster.Namespace) bool { return n.Name == tenant && n.Deleting })
		})
	})
	// The controller takes it away, too, and may be first.
	assert.NilError(w.t, client.IgnoreNotFound(w.c.Delete(w.t.Context(), gateway)))
	w.delete(&v1beta1.InternalNode{ObjectMeta: metav1.ObjectMeta{Name: "node-1"}})
	w.until("what is elsewhere is made again", func() bool { return w.get(&v1beta1.InternalNode{ObjectMeta: metav1.ObjectMeta{Name: "node-1"}}) })
	w.settle()
	assert.Check(w.t, !w.get(gateway))
	assert.Check(w.t, !strings.Contains(w.log.String()[before:], "level=ERROR"), w.log.String()[before:])
}

// A world is the API as the tests see it.
type world struct {
	t     *testing.T
	c     client.Client
	log   *logBuffer
	plans *plans // that the controller has made
}

func (w *world) run(name string, step func(*world)) {
	ok := w.t.Run(name, func(t *testing.T) { step(&world{t, w.c, w.log, w.plans}) })
	if !ok {
		w.t.FailNow()
	}
}

func (w *world) create(list ...client.Object) {
	w.t.Helper()
	for _, o := range list {
		assert.NilError(w.t, w.c.Create(w.t.Context(), o))
	}
}

// get reads an object; false if it is not there.
func (w *world) get(o client.Object) bool {
	w.t.Helper()
	err := w.c.Get(w.t.Context(), client.ObjectKeyFromObject(o), o)
	if w.t.Context().Err() != nil {
		return false // the test is over; poll does not wait for its last call
	}
	assert.Assert(w.t, err == nil || apierrors.IsNotFound(err), "%v", err)
	return err == nil
}

func (w *world) exists(o client.Object) {
	w.t.Helper()
	name := o.GetName()
	w.until(name+" exists", func() bool { return w.get(o) })
}

func (w *world) delete(o client.Object) {
	w.t.Helper()
	assert.NilError(w.t, w.c.Delete(w.t.Context(), o))
}

func (w *world) patch(o client.Object, text string) {
	w.t.Helper()
	o = o.DeepCopyObject().(client.Object)
	assert.NilError(w.t, w.c.Patch(w.t.Context(), o, client.RawPatch("application/merge-patch+json", []byte(text))))
}

func (w *world) patchJSON(o client.Object, text string) {
	w.t.Helper()
	o = o.DeepCopyObject().(client.Object)
	assert.NilError(w.t, w.c.Patch(w.t.Context(), o, client.RawPatch("application/json-patch+json", []byte(text))))
}

// waitTime is how long something may take that takes a moment: other packages' tests have the
// processors, too.
const waitTime = 2 * time.Minute

func (w *world) until(what string, ok func() bool) {
	w.t.Helper()
	poll.WaitOn(w.t, func(poll.LogT) poll.Result {
		if ok() {
			return poll.Success()
		}
		return poll.Continue("until %s", what)
	}, poll.WithTimeout(waitTime), poll.WithDelay(20*time.Millisecond))
}

// settle returns after a pass that began after the call, and wrote nothing.
func (w *world) settle() {
	w.t.Helper()
	for wrote := -1; wrote != w.log.writes(); {
		wrote = w.log.writes()
		mark := w.plans.mark()
		w.patch(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1"}}, `{"metadata":{"labels":{"`+marks+`":"`+mark+`"}}}`)
		w.until("a pass is over that knows of label "+mark, func() bool {
			at, seen := w.plans.seen(mark)
			return seen && w.passes() > at
		})
	}
}

// silent returns when the controller has been silent for a second, which is many debounces,
// and has made no pass in it.
func (w *world) silent() {
	w.t.Helper()
	did := func() string { return fmt.Sprint(w.passes(), " passes\n", w.log.String()) }
	last, since := did(), time.Now()
	poll.WaitOn(w.t, func(poll.LogT) poll.Result {
		if now := did(); now != last {
			last, since = now, time.Now()
		}
		if time.Since(since) > time.Second {
			return poll.Success()
		}
		return poll.Continue("the controller is at work")
	}, poll.WithTimeout(waitTime), poll.WithDelay(20*time.Millisecond))
}

// logBuffer is a log that can be read while it is written.
type logBuffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (b *logBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *logBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

// writes counts the writes that the log tells of.
func (b *logBuffer) writes() int {
	n := 0
	for line := range strings.Lines(b.String()) {
		for _, verb := range []string{"msg=created", "msg=updated", "msg=deleted", "msg=status", "msg=set "} {
			if strings.Contains(line, verb) {
				n++
			}
		}
	}
	return n
}
