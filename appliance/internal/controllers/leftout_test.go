package controllers

import (
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"gotest.tools/v3/assert"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	ipamv1alpha1 "github.com/isthmus-net/isthmus/appliance/api/ipam/v1alpha1"
	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/internal/kube"
	"github.com/isthmus-net/isthmus/appliance/plan"
)

// breaks marks objects that planWithBug can't do with.
const breaks = "test/breaks-the-plan"

// planWithBug is plan.Cluster with a bug: an IP or a GatewayServer that is marked ends
// in a panic, and one that is marked "with" does if its Network or its template is
// there.
func planWithBug(s cluster.Snapshot) plan.Result {
	for _, ip := range s.IPs {
		if how := ip.Annotations[breaks]; how == "alone" || how == "with" && len(s.Networks) > 0 {
			panic("no such address: " + ip.Name)
		}
	}
	for _, g := range s.GatewayServers {
		if how := g.Annotations[breaks]; how == "alone" || how == "with" && len(s.ServerTemplates) > 0 {
			panic("no such gateway: " + g.Name)
		}
	}
	return plan.Cluster(s)
}

// objectsOf returns the objects as the controller reads them.
func objectsOf(list []client.Object) kube.Objects {
	o := kube.Objects{ClusterID: "milan", Namespace: "liqo", Now: time.Date(2026, 3, 14, 12, 0, 0, 0, time.UTC)}
	for i, x := range list {
		x.SetUID(types.UID(fmt.Sprintf("uid-%d", i)))
		switch x := x.(type) {
		case *corev1.Namespace:
			o.Namespaces = append(o.Namespaces, *x)
		case *corev1.Node:
			o.Nodes = append(o.Nodes, *x)
		case *ipamv1alpha1.Network:
			o.Networks = append(o.Networks, *x)
		case *ipamv1alpha1.IP:
			o.IPs = append(o.IPs, *x)
		case *v1beta1.Configuration:
			o.Configurations = append(o.Configurations, *x)
		case *v1beta1.GatewayServer:
			o.GatewayServers = append(o.GatewayServers, *x)
		case *v1beta1.WgGatewayServerTemplate:
			o.ServerTemplates = append(o.ServerTemplates, *x)
		}
	}
	return o
}

func ip(name, addr, how string) *ipamv1alpha1.IP {
	o := &ipamv1alpha1.IP{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, Generation: 3, Annotations: map[string]string{breaks: how}}}
	o.Spec.IP = v1beta1.IP(addr)
	return o
}

// What makes a plan panic is left out of it, and nothing else is. It is tried again
// when it changes, when it is there anew, and after a while.
func TestLeftOut(t *testing.T) {
	gateway := func(how string) []client.Object {
		list := peering()
		list[2].SetAnnotations(map[string]string{breaks: how})
		return list
	}
	many := func(how ...string) (list []client.Object) {
		for i := range 300 {
			list = append(list, ip(fmt.Sprintf("ip-%03d", i), fmt.Sprintf("192.168.%d.%d", i/200, i%200+1), ""))
		}
		for i, h := range how {
			list[(37+i*101)%300] = ip(fmt.Sprintf("bad-%d", i), "192.168.9.9", h)
		}
		return list
	}
	for _, test := range []struct {
		name string
		list []client.Object
		out  []string
	}{
		{"nothing is wrong", slices.Concat(peering(), many()), nil},
		{"one IP of many", slices.Concat(peering(), many("alone")), []string{"IP default/bad-0"}},
		{"three IPs of many", slices.Concat(peering(), many("alone", "with", "alone")), []string{"IP default/bad-0", "IP default/bad-1", "IP default/bad-2"}},
		{"a gateway, not its template", slices.Concat(gateway("with"), many()), []string{"GatewayServer liqo-tenant-rome/rome"}},
		{"a gateway and an IP", slices.Concat(gateway("alone"), many("with")), []string{"IP default/bad-0", "GatewayServer liqo-tenant-rome/rome"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			log := &logBuffer{}
			r := &reconciler{
				cfg: Config{Resync: time.Hour, planner: planWithBug}, scheme: kube.Scheme(), leftOut: map[types.UID]leftOut{},
				log: slog.New(slog.NewTextHandler(log, nil)),
			}
			o := objectsOf(slices.Concat(system(), test.list))
			for range 2 { // the second plan knows what the first has found
				result, err := r.plan(o)
				assert.NilError(t, err)
				assert.Equal(t, result.Incomplete, len(test.out) > 0)
				var out []string
				for _, e := range result.Events {
					if e.Reason == plan.ReasonPlanFailed {
						out = append(out, e.Object.String())
						assert.Assert(t, strings.Contains(e.Message, "panic: no such"), e.Message)
					}
				}
				slices.Sort(out)
				want := slices.Sorted(slices.Values(test.out))
				assert.DeepEqual(t, out, want)
				good := 0
				for _, x := range result.Statuses {
					if x, is := x.(*ipamv1alpha1.IP); is && x.Status.IP != "" {
						good++
					}
				}
				assert.Assert(t, good >= 297, "%d IPs have an address", good)
				assert.Equal(t, strings.Count(log.String(), "looking for the objects"), min(1, len(test.out)))
			}
			if len(test.out) == 0 {
				return
			}

			searches := func() int { return strings.Count(log.String(), "looking for the objects") }
			o.Now = o.Now.Add(time.Hour)
			_, err := r.plan(o)
			assert.NilError(t, err)
			assert.Equal(t, searches(), 2, "after a while it is tried again")

			for i := range o.IPs {
				delete(o.IPs[i].Annotations, breaks)
			}
			for i := range o.GatewayServers {
				o.GatewayServers[i].Annotations = nil
			}
			result, err := r.plan(o)
			assert.NilError(t, err)
			assert.Assert(t, !result.Incomplete)
			assert.Equal(t, searches(), 2)
			assert.Equal(t, len(r.leftOut), 0)
		})
	}
}

// A panic that no object is the cause of is a failure of the pass, and no more.
func TestPlanFails(t *testing.T) {
	log := &logBuffer{}
	r := &reconciler{
		cfg: Config{Resync: time.Hour, planner: func(cluster.Snapshot) plan.Result { panic("bad options") }}, scheme: kube.Scheme(), leftOut: map[types.UID]leftOut{},
		log: slog.New(slog.NewTextHandler(log, nil)),
	}
	o := objectsOf(slices.Concat(system(), peering()))
	for _, test := range []struct {
		after    time.Duration
		searches int
	}{{0, 1}, {time.Second, 1}, {searchPause, 2}} {
		o.Now = o.Now.Add(test.after)
		_, err := r.plan(o)
		assert.ErrorContains(t, err, "bad options")
		assert.Equal(t, len(r.leftOut), 0)
		assert.Equal(t, strings.Count(log.String(), "looking for the objects"), test.searches)
	}
}

// What a status says of an object changes nothing about it; its spec does.
func TestDigestForPlan(t *testing.T) {
	o := ip("a", "192.168.0.1", "")
	before := digestForPlan(o)
	o.ResourceVersion = "7"
	meta.SetStatusCondition(&o.Status.Conditions, metav1.Condition{Type: "Accepted", Status: "False"})
	assert.Equal(t, digestForPlan(o), before)
	o.Status.IP = "10.70.0.1"
	assert.Assert(t, digestForPlan(o) != before)
	o.Status.IP = ""
	o.Spec.IP = "192.168.0.2"
	assert.Assert(t, digestForPlan(o) != before)
}

// No element of a smallest part can be missing, and those at the front stay.
func TestSmallest(t *testing.T) {
	all := make([]int, 1000)
	for i := range all {
		all[i] = i
	}
	for _, want := range [][]int{{0}, {999}, {500}, {3, 4}, {0, 999}, {1, 250, 500, 750}, {10, 11, 12, 13, 14, 990}} {
		calls := 0
		got := smallest(all, func(list []int) bool {
			calls++
			return !slices.ContainsFunc(want, func(x int) bool { return !slices.Contains(list, x) })
		})
		assert.DeepEqual(t, got, want)
		assert.Assert(t, calls < 100*len(want), "%v took %d calls", want, calls)
	}
	// Either of two is enough: the first is taken.
	assert.DeepEqual(t, smallest(all, func(list []int) bool { return slices.Contains(list, 7) || slices.Contains(list, 900) }), []int{7})
}

// testLeftOut has an IP that no plan can be made with. It says so; others get what
// they ask for, what is there stays, and all is well when the IP changes.
func (w *world) testLeftOut() {
	before := strings.Count(w.log.String(), "looking for the objects")
	bad, good := ip("breaks", "192.168.77.1", "alone"), ip("works", "192.168.77.2", "")
	w.create(bad)
	accepted := func(o *ipamv1alpha1.IP) *metav1.Condition {
		if !w.get(o) {
			return nil
		}
		return meta.FindStatusCondition(o.Status.Conditions, plan.ConditionAccepted)
	}
	w.until("a condition says that it is left out", func() bool {
		c := accepted(bad)
		return c != nil && c.Status == metav1.ConditionFalse && c.Reason == plan.ReasonPlanFailed && strings.Contains(c.Message, "no such address: breaks")
	})
	w.until("an event says so", func() bool {
		var events eventsv1.EventList
		assert.NilError(w.t, w.c.List(w.t.Context(), &events, client.InNamespace("default")))
		return slices.ContainsFunc(events.Items, func(e eventsv1.Event) bool {
			return e.Regarding.Name == "breaks" && e.Reason == plan.ReasonPlanFailed
		})
	})
	w.create(good)
	w.until("another one gets an address", func() bool { return accepted(good) != nil && good.Status.IP != "" })
	w.delete(good)
	mapping := &v1beta1.FirewallConfiguration{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "works-remap-ipmapping-gw"}}
	w.settle()
	assert.Assert(w.t, w.get(mapping) && mapping.DeletionTimestamp == nil, "what is not in an incomplete plan stays")
	assert.Equal(w.t, strings.Count(w.log.String(), "looking for the objects"), before+1, "it is looked for once")

	w.patch(bad, `{"metadata":{"annotations":{"`+breaks+`":null}}}`)
	w.until("it is in use", func() bool {
		c := accepted(bad)
		return c != nil && c.Status == metav1.ConditionTrue && bad.Status.IP != ""
	})
	w.until("what is superfluous goes", func() bool { return !w.get(mapping) })
	w.delete(bad)
	w.settle()
}
