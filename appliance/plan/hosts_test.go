package plan_test

import (
	"fmt"
	"testing"

	"gotest.tools/v3/assert"
	"gotest.tools/v3/assert/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/plan"
)

// What hosts report about the current generation is shown on the object, one
// condition per host.
func TestHostReports(t *testing.T) {
	w := peered(t)
	route := get[*v1beta1.RouteConfiguration](w, "liqo-tenant-rome", "rome-node-gw")
	applied := v1beta1.AppliedStatus{Kind: "RouteConfiguration", Namespace: route.Namespace, Name: route.Name, ObservedGeneration: route.Generation, OK: true, LastTransitionTime: metav1.NewTime(w.clock)}
	failed, old := applied, applied
	failed.OK, failed.Message = false, "no such device"
	old.ObservedGeneration--
	get[*v1beta1.InternalNode](w, "", "node-2").Status.Applied = []v1beta1.AppliedStatus{applied}
	get[*v1beta1.InternalNode](w, "", "node-1").Status.Applied = []v1beta1.AppliedStatus{failed}
	get[*v1beta1.GatewayReport](w, "liqo-tenant-rome", "gw-rome").Status.Applied = []v1beta1.AppliedStatus{old}
	w.settle()
	got := get[*v1beta1.RouteConfiguration](w, "liqo-tenant-rome", "rome-node-gw").Status.Conditions
	assert.Assert(t, cmp.Len(got, 2))
	assert.Equal(t, fmt.Sprint(got[0].Host, got[0].Type, got[0].Status), "node-1ErrorTrue")
	assert.Equal(t, fmt.Sprint(got[1].Host, got[1].Type, got[1].Status), "node-2AppliedTrue")
	assert.Assert(t, got[1].LastTransitionTime.Time.Equal(w.clock))
	assert.Assert(t, cmp.Len(get[*v1beta1.InternalNode](w, "", "node-2").Status.Applied, 1))
}

// What hosts can't do is told about the object, once however many hosts say so,
// and what is wrong with a host about the host. What somebody else has been told
// already, what is out of date and what is about to go is not.
func TestHostEvents(t *testing.T) {
	const routeKind = "RouteConfiguration"
	applied := func(o plan.Object, message string) v1beta1.AppliedStatus {
		return v1beta1.AppliedStatus{
			Kind: o.GetObjectKind().GroupVersionKind().Kind, Namespace: o.GetNamespace(), Name: o.GetName(),
			ObservedGeneration: o.GetGeneration(), Message: message,
		}
	}
	route := func(w *world) *v1beta1.RouteConfiguration {
		return get[*v1beta1.RouteConfiguration](w, "liqo-tenant-rome", "rome-node-gw")
	}
	users := func(w *world, name, cidr string) *v1beta1.RouteConfiguration {
		o := &v1beta1.RouteConfiguration{TypeMeta: templatesMeta("networking.liqo.io/v1beta1", routeKind), ObjectMeta: named("liqo", name)}
		dst := v1beta1.CIDR(cidr)
		o.Spec.Table = v1beta1.RouteTable{Name: name, Rules: []v1beta1.Rule{{Dst: &dst}}}
		w.create(o)
		return o
	}
	node := func(w *world, name string, list ...v1beta1.AppliedStatus) {
		get[*v1beta1.InternalNode](w, "", name).Status.Applied = list
	}
	gateway := func(w *world, list ...v1beta1.AppliedStatus) {
		get[*v1beta1.GatewayReport](w, "liqo-tenant-rome", "gw-rome").Status.Applied = list
	}
	failing := func(kind, reason, message string) metav1.Condition {
		return metav1.Condition{Type: kind, Status: metav1.ConditionFalse, Reason: reason, Message: message}
	}
	for _, test := range []struct {
		name   string
		report func(w *world)
		want   []string // other events than those of hosts included
	}{
		{"one node", func(w *world) { node(w, "node-1", applied(route(w), "no such device")) },
			[]string{"RouteConfiguration liqo-tenant-rome/rome-node-gw NotApplied: not in force on node node-1: no such device"}},
		{"all nodes", func(w *world) {
			node(w, "node-1", applied(route(w), "no such device"))
			node(w, "node-2", applied(route(w), "no such device"))
		}, []string{"RouteConfiguration liqo-tenant-rome/rome-node-gw NotApplied: not in force on several nodes: no such device"}},
		{"each for a reason of its own", func(w *world) {
			node(w, "node-1", applied(route(w), "no such device"))
			node(w, "node-2", applied(route(w), "too hot"))
		}, []string{
			"RouteConfiguration liqo-tenant-rome/rome-node-gw NotApplied: not in force on node node-1: no such device",
			"RouteConfiguration liqo-tenant-rome/rome-node-gw NotApplied: not in force on node node-2: too hot",
		}},
		{"a gateway", func(w *world) { gateway(w, applied(users(w, "mine", "192.0.2.0/24"), "it is no use")) },
			[]string{"RouteConfiguration liqo/mine NotApplied: not in force on gateway rome: it is no use"}},
		{"a gateway and a node", func(w *world) {
			o := users(w, "mine", "192.0.2.0/24")
			gateway(w, applied(o, "it is no use"))
			node(w, "node-2", applied(o, "it is no use"))
		}, []string{"RouteConfiguration liqo/mine NotApplied: not in force on several hosts: it is no use"}},
		{"a tunnel", func(w *world) {
			node(w, "node-1", applied(get[*v1beta1.GeneveTunnel](w, "liqo-tenant-rome", "rome-node-1"), "no Geneve here"))
		}, []string{"GeneveTunnel liqo-tenant-rome/rome-node-1 NotApplied: not in force on node node-1: no Geneve here"}},
		{"in force, with a remark", func(w *world) {
			a := applied(route(w), "but slow")
			a.OK = true
			node(w, "node-1", a)
		}, nil},
		{"of an older generation", func(w *world) {
			a := applied(route(w), "no such device")
			a.ObservedGeneration--
			node(w, "node-1", a)
		}, nil},
		{"of an object that is gone", func(w *world) {
			o := users(w, "mine", "192.0.2.0/24")
			node(w, "node-1", applied(o, "no such device"))
			delete(w.objects, keyOf(o))
		}, nil},
		{"of one that is about to go", func(w *world) {
			o := users(w, "mine", "192.0.2.0/24")
			o.Labels = map[string]string{v1beta1.LabelManagedBy: v1beta1.ManagedBy}
			node(w, "node-1", applied(o, "no such device"))
		}, nil},
		{"of one that does not parse", func(w *world) {
			node(w, "node-1", applied(users(w, "mine", "192.0.2.0/33"), "192.0.2.0/33 is no CIDR"))
		},
			[]string{`RouteConfiguration liqo/mine InvalidField: spec.table.rules[0].dst: "192.0.2.0/33" is not a CIDR; write one such as 10.0.0.0/16 or fd00::/64`}},
		{"of a key that was refused", func(w *world) {
			publicKey(w, "rome", "zeros", 32)
			k := get[*v1beta1.PublicKey](w, "liqo-tenant-rome", "zeros")
			clear(k.Spec.PublicKey)
			gateway(w, applied(k, "is no key"))
		}, []string{"PublicKey liqo-tenant-rome/zeros InvalidKey: spec.publicKey: \"\" is all zeros, which no private key has for its public one: write the base64 of field publicKey of the remote gateway's Secret"}},
		{"conditions of a node", func(w *world) {
			n := get[*v1beta1.InternalNode](w, "", "node-2")
			n.Status.Conditions = append(n.Status.Conditions, failing("GeneveSupported", "Unsupported", "load the module"),
				metav1.Condition{Type: "Ready", Status: metav1.ConditionTrue, Reason: "Applied"},
				metav1.Condition{Type: "Other", Status: metav1.ConditionUnknown, Reason: "Unknown"})
		}, []string{"InternalNode node-2 Unsupported: GeneveSupported is False: load the module"}},
		{"conditions of a gateway", func(w *world) {
			get[*v1beta1.GatewayReport](w, "liqo-tenant-rome", "gw-rome").Status.Conditions = []metav1.Condition{failing("MTUFits", "TooLarge", "write 1440 or less")}
		}, []string{"GatewayReport liqo-tenant-rome/gw-rome TooLarge: MTUFits is False: write 1440 or less"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			w := peered(t)
			test.report(w)
			var got []string
			for _, e := range plan.Cluster(w.snapshot()).Events {
				assert.Equal(t, e.Type, plan.Warning)
				assert.Equal(t, e.Reported, e.Reason != plan.ReasonInvalidField && e.Reason != plan.ReasonBadKey)
				assert.Assert(t, e.Object.UID != "")
				got = append(got, fmt.Sprintf("%s %s: %s", e.Object, e.Reason, e.Message))
			}
			assert.DeepEqual(t, got, test.want)
		})
	}
}

// What a gateway says of the MTU of its tunnel gets to the nodes. The MTU of the
// links is another one.
func TestTunnelMTU(t *testing.T) {
	w := peered(t)
	fabric := func() v1beta1.InternalFabricSpec {
		return get[*v1beta1.InternalFabric](w, "liqo-tenant-rome", "rome").Spec
	}
	assert.Equal(t, fabric().TunnelMTU, 0)
	get[*v1beta1.GatewayReport](w, "liqo-tenant-rome", "gw-rome").Status.MTU = 1440
	w.settle()
	assert.Equal(t, fabric().TunnelMTU, 1440)
	assert.Equal(t, fabric().MTU, 1340) // as the GatewayServer says
	get[*v1beta1.GatewayReport](w, "liqo-tenant-rome", "gw-rome").Status.MTU = 1380
	w.settle()
	assert.Equal(t, fabric().TunnelMTU, 1380)
}
