package controllers

import (
	"fmt"
	"slices"
	"strings"

	"gotest.tools/v3/assert"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/plan"
)

// testTakenPort asks for a port of the nodes that a Service of somebody else
// has: the object says which, the other peering goes on, and once the port is
// free the gateway gets it. Then for one that the API server gives to nobody: the object says
// that, too.
func (w *world) testTakenPort() {
	const port = 30050 // the API server draws those of other Services from 30086 on, as long as there are any
	other := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "somebodys-web"}}
	other.Spec.Type, other.Spec.Ports = corev1.ServiceTypeNodePort, []corev1.ServicePort{{Port: 80, NodePort: port, Protocol: corev1.ProtocolTCP}}
	w.create(other)

	rename := func(o client.Object) client.Object {
		labels := map[string]string{v1beta1.LabelRemoteClusterID: "oslo"}
		if o.GetNamespace() == "" {
			o.SetName("liqo-tenant-oslo")
			labels[v1beta1.LabelTenantNamespace] = "true"
		} else {
			o.SetNamespace("liqo-tenant-oslo")
			o.SetName("oslo")
		}
		o.SetLabels(labels)
		return o
	}
	var oslo []client.Object
	for _, o := range peering() {
		oslo = append(oslo, rename(o))
	}
	gws := oslo[2].(*v1beta1.GatewayServer)
	gws.Spec.Endpoint.NodePorts = []int32{port}
	w.create(oslo...)

	rome := &v1beta1.GatewayServer{ObjectMeta: peerMeta("rome")}
	says := func(o *v1beta1.GatewayServer, want metav1.ConditionStatus, text string) func() bool {
		return func() bool {
			if !w.get(o) {
				return false
			}
			c := meta.FindStatusCondition(o.Status.Conditions, plan.ConditionAccepted)
			return c != nil && c.Status == want && strings.Contains(c.Message, text)
		}
	}
	const why = "spec.endpoint.nodePorts[0] 30050 is that of Service default/somebodys-web: write another one"
	w.until("a condition says who has the port", says(gws, metav1.ConditionFalse, why))
	w.until("an event says so, too", func() bool {
		var events eventsv1.EventList
		assert.NilError(w.t, w.c.List(w.t.Context(), &events, client.InNamespace("liqo-tenant-oslo")))
		return slices.ContainsFunc(events.Items, func(e eventsv1.Event) bool {
			return e.Regarding.Kind == "GatewayServer" && e.Reason == plan.ReasonContradicts && strings.Contains(e.Note, why)
		})
	})
	w.settle()
	assert.Assert(w.t, says(rome, metav1.ConditionTrue, "")(), "the other peering: %v", rome.Status.Conditions)

	w.delete(other)
	w.until("the port is free", says(gws, metav1.ConditionTrue, ""))
	service := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "liqo-tenant-oslo", Name: "gw-oslo"}}
	w.until("the gateway has it", func() bool { return w.get(service) && service.Spec.Ports[0].NodePort == port })

	// What no plan can know: which ports the API server gives to Services.
	w.patch(gws, `{"spec":{"endpoint":{"nodePorts":[8443]}}}`)
	const denied = "Service gw-oslo can't be written"
	w.until("a condition says that the API server refuses it", says(gws, metav1.ConditionFalse, "provided port is not in the valid range"))
	assert.Assert(w.t, says(gws, metav1.ConditionFalse, denied)(), "%v", gws.Status.Conditions)
	w.until("an event says so, too", func() bool {
		var events eventsv1.EventList
		assert.NilError(w.t, w.c.List(w.t.Context(), &events, client.InNamespace("liqo-tenant-oslo")))
		return slices.ContainsFunc(events.Items, func(e eventsv1.Event) bool {
			return e.Regarding.Kind == "GatewayServer" && e.Reason == plan.ReasonNotWritten && strings.Contains(e.Note, denied)
		})
	})
	w.patch(gws, fmt.Sprintf(`{"spec":{"endpoint":{"nodePorts":[%d]}}}`, port))
	w.until("the port is one of theirs", says(gws, metav1.ConditionTrue, ""))
	w.delete(gws)
	w.delete(oslo[1])
	w.until("it is gone again", func() bool { return !w.get(service) })
}
