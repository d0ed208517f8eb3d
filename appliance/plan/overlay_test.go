package plan_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	"gotest.tools/v3/assert/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/plan"
)

// vteps does what the daemons of nodes do in the VXLAN overlay: those that have
// not told their end of it do so.
func (w *world) vteps() {
	for _, o := range w.objects {
		n, ok := o.(*v1beta1.InternalNode)
		if !ok || n.Spec.Overlay != v1beta1.OverlayVXLAN || n.Status.VTEP != nil {
			continue
		}
		node := get[*corev1.Node](w, "", n.Name)
		var id int
		fmt.Sscanf(n.Name, "node-%d", &id)
		n.Status.VTEP = &v1beta1.VTEP{IP: v1beta1.IP(node.Status.Addresses[0].Address), MAC: fmt.Sprintf("02:00:00:00:00:%02x", id)}
		n.Status.Overlays = []v1beta1.Overlay{v1beta1.OverlayGeneve, v1beta1.OverlayVXLAN}
	}
}

// checkOverlay fails if a fabric of the VXLAN overlay has anything of Geneve,
// or does not lead back to all pods of other nodes.
func checkOverlay(t testing.TB, w *world, f *v1beta1.InternalFabric) {
	t.Helper()
	for k := range w.objects {
		assert.Assert(t, !strings.HasPrefix(k, "GeneveTunnel "), "%s in the VXLAN overlay", k)
	}
	symmetric, ok := w.objects[key("RouteConfiguration", f.Namespace, f.Name+"-symmetric")].(*v1beta1.RouteConfiguration)
	others := 0
	for _, o := range w.objects {
		n, isNode := o.(*corev1.Node)
		if !isNode || n.Name == f.Spec.GatewayNode {
			continue
		}
		others++
		assert.Assert(t, ok, "%s has no way back to %s", f.Name, n.Name)
		assert.Assert(t, slices.ContainsFunc(symmetric.Spec.Table.Rules[0].Routes, func(r v1beta1.Route) bool {
			return string(*r.Dst) == n.Spec.PodCIDR && *r.Gw == get[*v1beta1.InternalNode](w, "", n.Name).Spec.Interface.Node.IP && *r.Dev == "liqo.vxlan"
		}), "%s has no way back to %s", f.Name, n.Name)
	}
	assert.Equal(t, ok, others > 0)
	if ok {
		assert.Equal(t, symmetric.Labels[v1beta1.LabelRouteUnique], plan.Label(f.Spec.GatewayNode))
	}
}

// overlays says what the kernels of nodes have.
func (w *world) overlays(by map[string][]v1beta1.Overlay) {
	for name, list := range by {
		get[*v1beta1.InternalNode](w, "", name).Status.Overlays = list
	}
}

// Where the installation leaves it open, what all nodes have is taken, Geneve
// first; nothing is decided before all that are ready have said what they have,
// and what was decided stays.
func TestOverlayAuto(t *testing.T) {
	type kernels = map[string][]v1beta1.Overlay
	geneve, vxlan := v1beta1.OverlayGeneve, v1beta1.OverlayVXLAN
	both := []v1beta1.Overlay{geneve, vxlan}
	for _, tt := range []struct {
		name        string
		has         kernels
		want        v1beta1.Overlay
		unsupported []string
	}{
		{"all have both", kernels{"node-1": both, "node-2": both}, geneve, nil},
		{"one lacks Geneve", kernels{"node-1": both, "node-2": {vxlan}}, vxlan, nil},
		{"one lacks VXLAN", kernels{"node-1": both, "node-2": {geneve}}, geneve, nil},
		{"none has Geneve", kernels{"node-1": {vxlan}, "node-2": {vxlan}}, vxlan, nil},
		{"nothing in common", kernels{"node-1": {geneve}, "node-2": {vxlan}}, vxlan, []string{"node-1"}},
		{"one has not said", kernels{"node-1": both}, "", nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := twoNodes(t, "milan", "10.10.0.0/16")
			w.options.Overlay = cluster.OverlayAuto
			for _, name := range []string{"node-1", "node-2"} {
				get[*corev1.Node](w, "", name).Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
			}
			w.settle()
			chosen := condition(t, get[*v1beta1.InternalNode](w, "", "node-1").Status.Conditions, plan.ConditionOverlayChosen)
			assert.Equal(t, chosen.Reason, "WaitingForNodes")
			w.overlays(tt.has)
			w.settle()
			for _, name := range []string{"node-1", "node-2"} {
				n := get[*v1beta1.InternalNode](w, "", name)
				assert.Equal(t, n.Spec.Overlay, tt.want)
				accepted := condition(t, n.Status.Conditions, plan.ConditionAccepted)
				assert.Equal(t, accepted.Reason == plan.ReasonOverlayUnsupported, slices.Contains(tt.unsupported, name), accepted.Message)
			}
			if tt.want == "" {
				return
			}
			// One that has nothing of it does not turn the others over.
			w.node("node-3", "172.18.1.13", "10.10.2.0/24")
			w.settle()
			other := map[v1beta1.Overlay]v1beta1.Overlay{geneve: vxlan, vxlan: geneve}[tt.want]
			w.overlays(kernels{"node-1": {other}, "node-2": {other}, "node-3": {other}})
			r := w.settle()
			n := get[*v1beta1.InternalNode](w, "", "node-3")
			assert.Equal(t, n.Spec.Overlay, tt.want)
			assert.Equal(t, condition(t, n.Status.Conditions, plan.ConditionAccepted).Reason, plan.ReasonOverlayUnsupported)
			assert.Assert(t, cmp.Len(warnings(r, "InternalNode", "", "node-3"), 1))
		})
	}
}

// A change of the overlay takes the objects of the one before with it, both
// ways, and the numbers stay.
func TestOverlayChanges(t *testing.T) {
	w := peered(t)
	before := numbers(w)
	w.options.Overlay = cluster.OverlayVXLAN
	w.settle()
	w.vteps()
	w.settle()
	checkInvariants(t, w)
	assert.Equal(t, get[*v1beta1.RouteConfiguration](w, "liqo-tenant-rome", "rome-node-gw").Spec.Table.Name, "18952")
	assert.Assert(t, w.objects[key("RouteConfiguration", "liqo", "milan-node-1-gw-node")] == nil)
	w.options.Overlay = cluster.OverlayGeneve
	w.settle()
	checkInvariants(t, w)
	assert.Assert(t, w.objects[key("RouteConfiguration", "liqo-tenant-rome", "rome-symmetric")] == nil)
	assert.Assert(t, w.objects[key("RouteConfiguration", "liqo", "milan-gw-pods")] == nil)
	for k, v := range before {
		if !strings.HasPrefix(k, "GeneveTunnel") {
			assert.Equal(t, numbers(w)[k], v, k)
		}
	}
}

// overlaid returns peered in the VXLAN overlay, with a third node.
func overlaid(t testing.TB) *world {
	w := twoNodes(t, "milan", "10.10.0.0/16")
	w.options.Overlay = cluster.OverlayVXLAN
	w.namespace("rome")
	w.configure("rome", "10.20.0.0/16", "10.71.0.0/16")
	w.server("rome", corev1.ServiceTypeNodePort)
	w.settle()
	w.kubelet("node-1")
	w.settle()
	w.node("node-3", "172.18.1.13", "10.10.2.0/24")
	w.settle()
	w.vteps()
	w.settle()
	return w
}

// routesOf returns where a RouteConfiguration leads to.
func routesOf(rc *v1beta1.RouteConfiguration) []string {
	var out []string
	for _, rule := range rc.Spec.Table.Rules {
		for _, r := range rule.Routes {
			out = append(out, string(*r.Dst))
		}
	}
	return out
}

// Nodes that say that they are at the same address, or that are nowhere, are
// told so; the way to the others stays.
func TestBadVTEPs(t *testing.T) {
	for _, tt := range []struct {
		name   string
		spoil  func(n2, n3 *v1beta1.InternalNodeStatus)
		reason string
		has    string
	}{
		{"the same address", func(n2, n3 *v1beta1.InternalNodeStatus) { n3.VTEP.IP = n2.VTEP.IP }, plan.ReasonDuplicateVTEP, "172.18.1.12 is the address of node node-2 too"},
		{"the same link address", func(n2, n3 *v1beta1.InternalNodeStatus) { n3.VTEP.MAC = n2.VTEP.MAC }, plan.ReasonDuplicateVTEP, "liqo.vxlan of node node-2"},
		{"no address", func(_, n3 *v1beta1.InternalNodeStatus) { n3.VTEP.IP = "127.0.0.1" }, plan.ReasonInvalidVTEP, "status.vtep.ip"},
		{"of a group", func(_, n3 *v1beta1.InternalNodeStatus) { n3.VTEP.MAC = "ff:ff:ff:ff:ff:ff" }, plan.ReasonInvalidVTEP, "status.vtep.mac"},
		{"no VXLAN", func(_, n3 *v1beta1.InternalNodeStatus) { n3.Overlays = []v1beta1.Overlay{v1beta1.OverlayGeneve} }, plan.ReasonOverlayUnsupported, "modprobe vxlan"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := overlaid(t)
			all := []string{"10.80.0.2/32", "10.10.1.0/24", "10.80.0.4/32", "10.10.2.0/24"}
			assert.DeepEqual(t, routesOf(get[*v1beta1.RouteConfiguration](w, "liqo-tenant-rome", "rome-symmetric")), all)
			tt.spoil(&get[*v1beta1.InternalNode](w, "", "node-2").Status, &get[*v1beta1.InternalNode](w, "", "node-3").Status)
			r := w.settle()
			accepted := condition(t, get[*v1beta1.InternalNode](w, "", "node-3").Status.Conditions, plan.ConditionAccepted)
			assert.Equal(t, accepted.Reason, tt.reason)
			assert.Assert(t, cmp.Contains(accepted.Message, tt.has))
			assert.Assert(t, cmp.Len(warnings(r, "InternalNode", "", "node-3"), 1))
			assert.Equal(t, condition(t, get[*v1beta1.InternalNode](w, "", "node-2").Status.Conditions, plan.ConditionAccepted).Status, metav1.ConditionTrue)
			assert.DeepEqual(t, routesOf(get[*v1beta1.RouteConfiguration](w, "liqo-tenant-rome", "rome-symmetric")), all[:2])
		})
	}
}

// A node whose daemon is silent is told so, without an event: while things come
// up all are.
func TestSilentNode(t *testing.T) {
	w := overlaid(t)
	w.node("node-4", "172.18.1.14", "10.10.3.0/24")
	w.settle()
	r := w.settle()
	accepted := func() metav1.Condition {
		return condition(t, get[*v1beta1.InternalNode](w, "", "node-4").Status.Conditions, plan.ConditionAccepted)
	}
	assert.Equal(t, accepted().Reason, plan.ReasonNoVTEP)
	assert.Assert(t, cmp.Len(warnings(r, "InternalNode", "", "node-4"), 0))
	w.vteps()
	w.settle()
	assert.Equal(t, accepted().Status, metav1.ConditionTrue)
}

// When the gateway moves, the way to it stays the same object, and the way back
// is another node's business.
func TestGatewayMovesInOverlay(t *testing.T) {
	w := overlaid(t)
	before := get[*v1beta1.RouteConfiguration](w, "liqo-tenant-rome", "rome-node-gw").Spec
	delete(w.objects, key("Pod", "liqo-tenant-rome", "gw-rome-0"))
	w.settle()
	f := get[*v1beta1.InternalFabric](w, "liqo-tenant-rome", "rome")
	assert.Equal(t, f.Spec.GatewayNode, "node-1", "it stays until there is another one")
	assert.Assert(t, f.Spec.GatewayGone)
	w.kubelet("node-3")
	w.settle()
	f = get[*v1beta1.InternalFabric](w, "liqo-tenant-rome", "rome")
	assert.Equal(t, f.Spec.GatewayNode, "node-3")
	assert.Assert(t, !f.Spec.GatewayGone)
	assert.DeepEqual(t, get[*v1beta1.RouteConfiguration](w, "liqo-tenant-rome", "rome-node-gw").Spec, before)
	symmetric := get[*v1beta1.RouteConfiguration](w, "liqo-tenant-rome", "rome-symmetric")
	assert.Equal(t, symmetric.Labels[v1beta1.LabelRouteUnique], "node-3")
	assert.DeepEqual(t, routesOf(symmetric), []string{"10.80.0.1/32", "10.10.0.0/24", "10.80.0.2/32", "10.10.1.0/24"})
	checkInvariants(t, w)
}

// Pods outside the podCIDRs of their node get a route of their own in the
// overlay, too, and gateways let them out if the networks do not have them.
func TestPodsOutsidePodCIDRsInOverlay(t *testing.T) {
	w := overlaid(t)
	for i, ip := range []string{"10.10.0.77", "192.168.7.7", "10.10.1.5"} {
		pod := &corev1.Pod{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"}, ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprintf("p%d", i)}}
		pod.Spec.NodeName = "node-2"
		pod.Status = corev1.PodStatus{Phase: corev1.PodRunning, PodIP: ip, PodIPs: []corev1.PodIP{{IP: ip}}}
		w.create(pod)
	}
	w.settle()
	assert.DeepEqual(t, routesOf(get[*v1beta1.RouteConfiguration](w, "liqo-tenant-rome", "rome-symmetric")),
		[]string{"10.80.0.2/32", "10.10.1.0/24", "10.10.0.77/32", "192.168.7.7/32", "10.80.0.4/32", "10.10.2.0/24"})
	var to []string
	out := get[*v1beta1.RouteConfiguration](w, "liqo", "milan-gw-pods")
	assert.Equal(t, out.Spec.Table.Name, "254")
	for _, r := range out.Spec.Table.Rules {
		assert.Equal(t, *r.Iif, "liqo-tunnel")
		to = append(to, string(*r.Dst))
	}
	assert.DeepEqual(t, to, []string{"10.10.0.0/16", "192.168.7.7/32"})
}

// The pod of a node's daemon says what the address of the node's link is.
func TestDaemonsAreAnnotated(t *testing.T) {
	w := overlaid(t)
	for _, ns := range []string{"liqo", "default"} {
		pod := &corev1.Pod{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"}, ObjectMeta: metav1.ObjectMeta{
			Namespace: ns, Name: "isthmus-node-x", Labels: map[string]string{v1beta1.LabelAppName: v1beta1.NodeDaemonName},
		}}
		pod.Spec.NodeName, pod.Spec.HostNetwork, pod.Status.Phase = "node-2", true, corev1.PodRunning
		w.create(pod)
	}
	w.settle()
	assert.Equal(t, get[*corev1.Pod](w, "liqo", "isthmus-node-x").Annotations[v1beta1.AnnotationVTEPMAC], "02:00:00:00:00:02")
	assert.Equal(t, len(get[*corev1.Pod](w, "default", "isthmus-node-x").Annotations), 0, "somebody else's")
}
