package plan_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	"gotest.tools/v3/assert/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	corev1beta1 "github.com/isthmus-net/isthmus/appliance/api/core/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/plan"
)

// running returns a cluster with two gateways that run: a server towards rome
// and a client towards paris.
func running(t testing.TB) *world {
	w := peered(t)
	w.namespace("paris")
	w.configure("paris", "10.30.0.0/16", "10.72.0.0/16")
	w.client("paris")
	w.settle()
	w.kubelet("node-1", "node-2")
	w.settle()
	return w
}

// kept lists the objects that a gateway needs to go on, as they are: all that
// is labelled with its remote cluster, and what routes to and from it. The
// status of the WgGateway objects and what a user writes are left out.
func kept(w *world, remote string) map[string]string {
	out := map[string]string{}
	for k, o := range w.objects {
		if o.GetLabels()[v1beta1.LabelRemoteClusterID] != remote || o.GetLabels()[v1beta1.LabelManagedBy] != v1beta1.ManagedBy {
			continue
		}
		fields := tree(w.t, o)
		delete(fields["metadata"].(map[string]any), "generation") // a node that comes and goes leaves its mark
		if _, ok := o.(*corev1beta1.ForeignCluster); ok {
			delete(fields, "status")
		}
		out[k] = fmt.Sprint(fields)
	}
	return out
}

// A running gateway survives whatever its user writes into its object or its
// template: nothing that it needs goes or changes, the object says what is
// wrong, and nodes that join meanwhile are joined to it.
func TestRunningGatewayIsKept(t *testing.T) {
	server := func(w *world) *v1beta1.GatewayServer {
		return get[*v1beta1.GatewayServer](w, "liqo-tenant-rome", "rome")
	}
	client := func(w *world) *v1beta1.GatewayClient {
		return get[*v1beta1.GatewayClient](w, "liqo-tenant-paris", "paris")
	}
	relabel := func(o plan.Object, id string) {
		o.SetLabels(map[string]string{v1beta1.LabelRemoteClusterID: id})
	}
	anyNamespace := func(w *world, remote string) {
		delete(w.objects["Namespace /liqo-tenant-"+remote].(*corev1.Namespace).Labels, v1beta1.LabelRemoteClusterID)
	}
	for _, test := range []struct {
		name   string
		remote string
		spoil  func(w *world)
		reason string
	}{
		{"template that does not exist", "rome", func(w *world) { server(w).Spec.ServerTemplateRef.Name = "nope" }, plan.ReasonNoTemplate},
		{"template of another kind", "paris", func(w *world) { client(w).Spec.ClientTemplateRef.Kind = "Other" }, plan.ReasonNoTemplate},
		{"template deleted", "rome", func(w *world) { w.remove("WgGatewayServerTemplate", "liqo", "wireguard-server") }, plan.ReasonNoTemplate},
		{"template with a mistake", "paris", func(w *world) {
			w.remove("WgGatewayClientTemplate", "liqo", "wireguard-client")
			w.yaml(strings.ReplaceAll(strings.SplitAfter(templates, "---\n")[1], "{{ .SecretName }}", "{{ .Secret }}"))
		}, plan.ReasonBadTemplate},
		{"template without a port", "rome", func(w *world) {
			w.remove("WgGatewayServerTemplate", "liqo", "wireguard-server")
			before, after, _ := strings.Cut(strings.SplitAfter(templates, "\n---\n")[0], "          ports:\n")
			_, after, _ = strings.Cut(after, "      deployment:\n")
			w.yaml(before + "      deployment:\n" + after)
		}, plan.ReasonBadTemplate},
		{"another MTU beside the mistake", "rome", func(w *world) {
			server(w).Spec.ServerTemplateRef.Name, server(w).Spec.MTU = "nope", 1200
		}, plan.ReasonNoTemplate},
		{"no endpoint", "paris", func(w *world) { client(w).Spec.Endpoint.Addresses = nil }, plan.ReasonNoEndpoint},
		{"secret that does not exist", "rome", func(w *world) { server(w).Spec.SecretRef.Name = "mine" }, plan.ReasonNoSecret},
		{"no remote cluster", "rome", func(w *world) { server(w).Labels = nil }, plan.ReasonNoRemoteID},
		{"impossible remote cluster", "paris", func(w *world) { relabel(client(w), "Paris!") }, plan.ReasonBadRemoteID},
		{"this very cluster", "paris", func(w *world) { anyNamespace(w, "paris"); relabel(client(w), "milan") }, plan.ReasonRemoteIsLocal},
		{"the tenant namespace of another", "rome", func(w *world) { relabel(server(w), "paris") }, plan.ReasonIDMismatch},
		{"the peering of another", "paris", func(w *world) { anyNamespace(w, "paris"); relabel(client(w), "rome") }, plan.ReasonNamespace},
	} {
		t.Run(test.name, func(t *testing.T) {
			w := running(t)
			before, all := kept(w, test.remote), slices.Sorted(maps.Keys(w.objects))
			original := map[string]plan.Object{}
			for k, o := range w.objects {
				original[k] = o.DeepCopyObject().(plan.Object)
			}
			test.spoil(w)
			r := w.settle()
			now := kept(w, test.remote)
			for _, k := range slices.Sorted(maps.Keys(before)) {
				assert.Equal(t, now[k], before[k], k)
			}

			namespace := "liqo-tenant-" + test.remote
			kind, conditions := "GatewayServer", []metav1.Condition(nil)
			if test.remote == "paris" {
				kind, conditions = "GatewayClient", client(w).Status.Conditions
			} else {
				conditions = server(w).Status.Conditions
			}
			c := condition(t, conditions, plan.ConditionAccepted)
			assert.Equal(t, c.Status, metav1.ConditionFalse)
			assert.Equal(t, c.Reason, test.reason, c.Message)
			assert.Assert(t, cmp.Contains(c.Message, "runs on as it was made before"))
			events := warnings(r, kind, namespace, test.remote)
			assert.Assert(t, cmp.Len(events, 1))
			assert.Assert(t, strings.HasPrefix(events[0], test.reason+": "), events[0])

			w.node("node-3", "172.18.1.13", "10.10.2.0/24")
			w.settle()
			get[*v1beta1.GeneveTunnel](w, namespace, test.remote+"-node-3")
			w.remove("Node", "", "node-3")
			w.settle()

			// Put right, everything is as if nothing had been.
			for k, o := range original {
				if w.objects[k] == nil || o.GetLabels()[v1beta1.LabelManagedBy] != v1beta1.ManagedBy {
					w.objects[k] = o
				}
			}
			r = w.settle()
			assert.Assert(t, cmp.Len(r.Keep, 0))
			assert.Assert(t, cmp.Len(r.Events, 0))
			assert.DeepEqual(t, slices.Sorted(maps.Keys(w.objects)), all)
			assert.DeepEqual(t, kept(w, test.remote), before)
		})
	}
}

// What is kept goes with the object that it was made for, and when somebody
// else is to do its work.
func TestNotKept(t *testing.T) {
	spoil := func(w *world) {
		get[*v1beta1.GatewayServer](w, "liqo-tenant-rome", "rome").Spec.ServerTemplateRef.Name = "nope"
	}
	for _, test := range []struct {
		name   string
		change func(w *world)
	}{
		{"the GatewayServer is being deleted", func(w *world) {
			now := metav1.NewTime(w.clock)
			get[*v1beta1.GatewayServer](w, "liqo-tenant-rome", "rome").SetDeletionTimestamp(&now)
		}},
		{"another GatewayServer of the same name", func(w *world) {
			get[*v1beta1.GatewayServer](w, "liqo-tenant-rome", "rome").UID = "another"
		}},
		{"the peering has an older gateway", func(w *world) {
			g := w.server("rome-too", corev1.ServiceTypeNodePort)
			delete(w.objects, keyOf(g))
			g.Namespace, g.Labels, g.CreationTimestamp = "liqo-tenant-rome", map[string]string{v1beta1.LabelRemoteClusterID: "rome"}, metav1.Time{}
			w.objects[keyOf(g)] = g
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			w := peered(t)
			spoil(w)
			w.settle()
			get[*appsv1.Deployment](w, "liqo-tenant-rome", "gw-rome")
			test.change(w)
			r := w.settle()
			assert.Assert(t, cmp.Len(r.Keep, 0))
			for _, kind := range []string{"Deployment", "Service", "ServiceAccount", "Role", "RoleBinding", "Connection", "GatewayReport"} {
				assert.Assert(t, w.objects[key(kind, "liqo-tenant-rome", "gw-rome")] == nil, kind)
			}
			assert.Assert(t, w.objects[key("WgGatewayServer", "liqo-tenant-rome", "rome")] == nil)
		})
	}
}

// A gateway with keys of the user's goes on announcing those, and gets no
// others.
func TestKeptKeys(t *testing.T) {
	w := running(t)
	g := get[*v1beta1.GatewayClient](w, "liqo-tenant-paris", "paris")
	mine := get[*corev1.Secret](w, "liqo-tenant-paris", "gw-paris").DeepCopy()
	mine.ObjectMeta = metav1.ObjectMeta{Namespace: mine.Namespace, Name: "mine", Labels: map[string]string{v1beta1.LabelGatewayResource: "true"}}
	w.create(mine)
	g.Spec.SecretRef.Name = "mine"
	w.remove("Secret", "liqo-tenant-paris", "gw-paris")
	w.settle()
	g = get[*v1beta1.GatewayClient](w, "liqo-tenant-paris", "paris")
	assert.Equal(t, g.Status.SecretRef.Name, "mine")

	g.Spec.SecretRef.Name = "yours"
	r := w.settle()
	assert.Assert(t, len(r.Keep) > 0)
	assert.Equal(t, get[*v1beta1.GatewayClient](w, "liqo-tenant-paris", "paris").Status.SecretRef.Name, "mine")
	assert.Assert(t, w.objects["Secret liqo-tenant-paris/gw-paris"] == nil)
}

// A gateway that never ran has nothing to keep, and does not stand in the way
// of one that can.
func TestNothingToKeep(t *testing.T) {
	w := twoNodes(t, "milan", "10.10.0.0/16")
	w.namespace("rome")
	w.configure("rome", "10.20.0.0/16", "")
	w.server("rome", corev1.ServiceTypeNodePort).Spec.ServerTemplateRef.Name = "nope"
	r := w.settle()
	assert.Assert(t, cmp.Len(r.Keep, 0))
	assert.Assert(t, !strings.Contains(warnings(r, "GatewayServer", "liqo-tenant-rome", "rome")[0], "runs on"))
	c := w.client("rome")
	delete(w.objects, keyOf(c))
	c.Name = "rome-too"
	w.objects[keyOf(c)] = c
	w.settle()
	get[*appsv1.Deployment](w, "liqo-tenant-rome", "gw-rome-too")
}
