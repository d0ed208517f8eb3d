package plan_test

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"gotest.tools/v3/assert"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/yaml"

	corev1beta1 "github.com/isthmus-net/isthmus/appliance/api/core/v1beta1"
	ipamv1alpha1 "github.com/isthmus-net/isthmus/appliance/api/ipam/v1alpha1"
	netv1alpha1 "github.com/isthmus-net/isthmus/appliance/api/net/v1alpha1"
	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/internal/kube"
	"github.com/isthmus-net/isthmus/appliance/plan"
)

// A world is the API of one cluster: it keeps objects, and does with a plan
// what the controller does.
type world struct {
	t       testing.TB
	id      string
	options cluster.Options
	objects map[string]plan.Object // by kind namespace/name
	clock   time.Time
	uids    int
}

func newWorld(t testing.TB, id string) *world {
	return &world{t: t, id: id, objects: map[string]plan.Object{}, clock: time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)}
}

func key(kind, namespace, name string) string { return kind + " " + namespace + "/" + name }

func keyOf(o plan.Object) string {
	return key(o.GetObjectKind().GroupVersionKind().Kind, o.GetNamespace(), o.GetName())
}

// create adds an object, as kubectl does.
func (w *world) create(o plan.Object) {
	w.t.Helper()
	_, exists := w.objects[keyOf(o)]
	assert.Assert(w.t, !exists, "%s exists", keyOf(o))
	w.uids++
	w.clock = w.clock.Add(time.Second)
	o.SetUID(types.UID(fmt.Sprintf("uid-%d", w.uids)))
	o.SetGeneration(1)
	o.SetCreationTimestamp(metav1.NewTime(w.clock))
	w.objects[keyOf(o)] = o
}

// yaml adds objects from YAML.
func (w *world) yaml(docs string) {
	w.t.Helper()
	for _, doc := range strings.Split(docs, "\n---\n") {
		if strings.TrimSpace(doc) == "" {
			continue
		}
		var meta metav1.TypeMeta
		assert.NilError(w.t, yaml.Unmarshal([]byte(doc), &meta), doc)
		o, err := kube.Scheme().New(meta.GroupVersionKind())
		assert.NilError(w.t, err, doc)
		assert.NilError(w.t, yaml.UnmarshalStrict([]byte(doc), o), doc)
		w.create(o.(plan.Object))
	}
}

// remove deletes an object and what it owns.
func (w *world) remove(kind, namespace, name string) {
	w.t.Helper()
	o, exists := w.objects[key(kind, namespace, name)]
	assert.Assert(w.t, exists, "%s %s/%s", kind, namespace, name)
	delete(w.objects, keyOf(o))
	for _, k := range slices.Sorted(maps.Keys(w.objects)) {
		if x := w.objects[k]; x != nil && slices.ContainsFunc(x.GetOwnerReferences(), func(r metav1.OwnerReference) bool { return r.UID == o.GetUID() }) {
			w.remove(x.GetObjectKind().GroupVersionKind().Kind, x.GetNamespace(), x.GetName())
		}
	}
}

func get[T plan.Object](w *world, namespace, name string) T {
	w.t.Helper()
	var zero T
	kind := reflect.TypeOf(zero).Elem().Name()
	o, exists := w.objects[key(kind, namespace, name)]
	assert.Assert(w.t, exists, "there is no %s %s/%s", kind, namespace, name)
	return o.(T)
}

// snapshot is what the controller sees.
func (w *world) snapshot() cluster.Snapshot {
	o := kube.Objects{ClusterID: w.id, Namespace: "liqo", Options: w.options, Now: w.clock}
	for _, k := range slices.Sorted(maps.Keys(w.objects)) {
		switch x := w.objects[k].(type) {
		case *corev1.Node:
			o.Nodes = append(o.Nodes, *x)
		case *corev1.Pod:
			o.Pods = append(o.Pods, *x)
		case *corev1.Service:
			o.Services = append(o.Services, *x)
		case *appsv1.Deployment:
			o.Deployments = append(o.Deployments, *x)
		case *corev1.Secret:
			o.Secrets = append(o.Secrets, *x)
		case *corev1.Namespace:
			o.Namespaces = append(o.Namespaces, *x)
		case *discoveryv1.EndpointSlice:
			if x.Namespace == metav1.NamespaceDefault {
				o.APIServers = append(o.APIServers, *x)
			}
		case *v1beta1.Configuration:
			o.Configurations = append(o.Configurations, *x)
		case *v1beta1.Connection:
			o.Connections = append(o.Connections, *x)
		case *v1beta1.GatewayServer:
			o.GatewayServers = append(o.GatewayServers, *x)
		case *v1beta1.GatewayClient:
			o.GatewayClients = append(o.GatewayClients, *x)
		case *v1beta1.WgGatewayServerTemplate:
			o.ServerTemplates = append(o.ServerTemplates, *x)
		case *v1beta1.WgGatewayClientTemplate:
			o.ClientTemplates = append(o.ClientTemplates, *x)
		case *corev1.ConfigMap:
			o.BlockedKeys = append(o.BlockedKeys, *x)
		case *v1beta1.PublicKey:
			o.PublicKeys = append(o.PublicKeys, *x)
		case *v1beta1.InternalFabric:
			o.Fabrics = append(o.Fabrics, *x)
		case *v1beta1.InternalNode:
			o.InternalNodes = append(o.InternalNodes, *x)
		case *v1beta1.GeneveTunnel:
			o.Tunnels = append(o.Tunnels, *x)
		case *v1beta1.RouteConfiguration:
			o.Routes = append(o.Routes, *x)
		case *v1beta1.FirewallConfiguration:
			o.Firewalls = append(o.Firewalls, *x)
		case *v1beta1.GatewayReport:
			o.Reports = append(o.Reports, *x)
		case *ipamv1alpha1.Network:
			o.Networks = append(o.Networks, *x)
		case *ipamv1alpha1.IP:
			o.IPs = append(o.IPs, *x)
		case *corev1beta1.ForeignCluster:
			o.ForeignClusters = append(o.ForeignClusters, *x)
		case *netv1alpha1.TunnelEndpoint:
			o.TunnelEndpoints = append(o.TunnelEndpoints, *x)
		}
	}
	return kube.Snapshot(o)
}

// apply does what r says and returns what had to be done.
func (w *world) apply(r plan.Result) []string {
	w.t.Helper()
	var done []string
	planned := map[string]bool{}
	kinds := map[string]bool{}
	for _, k := range plan.Kinds() {
		kinds[k.Kind] = true
	}
	for _, o := range r.Objects {
		k := keyOf(o)
		assert.Assert(w.t, !planned[k], "%s is planned twice", k)
		assert.Assert(w.t, kinds[o.GetObjectKind().GroupVersionKind().Kind], "%s is not of plan.Kinds", k)
		assert.Equal(w.t, o.GetLabels()[v1beta1.LabelManagedBy], v1beta1.ManagedBy, k)
		planned[k] = true
		old, exists := w.objects[k]
		if !exists {
			w.create(o.DeepCopyObject().(plan.Object))
			done = append(done, "create "+k)
			continue
		}
		if unchanged(w.t, old, o) {
			continue
		}
		merged := tree(w.t, o)
		before := tree(w.t, old)
		if before["status"] != nil {
			merged["status"] = before["status"]
		} else {
			delete(merged, "status")
		}
		meta := merged["metadata"].(map[string]any)
		for _, field := range []string{"uid", "generation", "creationTimestamp"} {
			meta[field] = before["metadata"].(map[string]any)[field]
		}
		if !reflect.DeepEqual(before, merged) {
			w.replace(old, merged)
			if !reflect.DeepEqual(before["spec"], merged["spec"]) {
				w.objects[k].SetGeneration(old.GetGeneration() + 1)
			}
			done = append(done, "update "+k)
		}
	}
	for _, r := range r.Keep {
		assert.Assert(w.t, !planned[key(r.Kind, r.Namespace, r.Name)], "%s is planned and kept", r)
		planned[key(r.Kind, r.Namespace, r.Name)] = true
	}
	for _, k := range slices.Sorted(maps.Keys(w.objects)) {
		o := w.objects[k]
		if o != nil && kinds[o.GetObjectKind().GroupVersionKind().Kind] && o.GetLabels()[v1beta1.LabelManagedBy] == v1beta1.ManagedBy && !planned[k] {
			w.remove(o.GetObjectKind().GroupVersionKind().Kind, o.GetNamespace(), o.GetName())
			done = append(done, "delete "+k)
		}
	}
	pulls := map[string]bool{}
	for _, o := range r.Pulls {
		pulls[keyOf(o)] = true
		if w.objects[keyOf(o)] == nil {
			w.create(o.DeepCopy())
			done = append(done, "create "+keyOf(o))
		}
	}
	for _, k := range slices.Sorted(maps.Keys(w.objects)) {
		if o, is := w.objects[k].(*corev1.Pod); is && kube.IsPull(o) && !pulls[k] {
			w.remove("Pod", o.Namespace, o.Name)
			done = append(done, "delete "+k)
		}
	}
	for _, s := range r.Keys {
		if w.objects[key("Secret", s.Namespace, s.Name)] == nil {
			w.create(&corev1.Secret{
				TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Secret"},
				ObjectMeta: metav1.ObjectMeta{Namespace: s.Namespace, Name: s.Name, Labels: s.Labels, OwnerReferences: []metav1.OwnerReference{s.Owner}},
				Data:       map[string][]byte{"privateKey": make([]byte, 32), "publicKey": []byte(strings.Repeat("k", 32))},
			})
			done = append(done, "create "+key("Secret", s.Namespace, s.Name))
		}
	}
	for _, o := range r.Statuses {
		k := keyOf(o)
		old, exists := w.objects[k]
		assert.Assert(w.t, exists, "status of %s, which does not exist", k)
		before := tree(w.t, old)
		merged := maps.Clone(before)
		wanted := tree(w.t, o)["status"]
		if _, shared := o.(*v1beta1.InternalNode); shared {
			status, _ := before["status"].(map[string]any)
			status = maps.Clone(status)
			if status == nil {
				status = map[string]any{}
			}
			status["conditions"] = wanted.(map[string]any)["conditions"]
			wanted = status
		}
		// Who waits for the one takes the other for granted: see gatewayStatus.
		for _, ref := range []string{"serverRef", "clientRef"} {
			if status, ok := wanted.(map[string]any); ok && status[ref] != nil {
				assert.Assert(w.t, status["secretRef"] != nil, "%s has a %s before it has a secretRef", k, ref)
			}
		}
		merged["status"] = wanted
		if !reflect.DeepEqual(before, merged) {
			w.replace(old, merged)
			done = append(done, "status "+k)
		}
	}
	for _, o := range r.Applies {
		old, exists := w.objects[keyOf(o)]
		assert.Assert(w.t, exists, "%s is applied to, but does not exist", keyOf(o))
		switch o := o.(type) {
		case *corev1.Namespace:
			for k, v := range o.Labels {
				if old.GetLabels()[k] != v {
					labels := map[string]string{k: v}
					maps.Copy(labels, old.GetLabels())
					old.SetLabels(labels)
					done = append(done, "label "+keyOf(o))
				}
			}
		case *v1beta1.Configuration:
			old.(*v1beta1.Configuration).Spec.Local = o.Spec.Local
			old.SetGeneration(old.GetGeneration() + 1)
			done = append(done, "local "+keyOf(o))
		case *corev1.Pod:
			if !reflect.DeepEqual(old.GetAnnotations(), o.Annotations) {
				old.SetAnnotations(o.Annotations)
				done = append(done, "annotate "+keyOf(o))
			}
		default:
			w.t.Fatalf("apply %T", o)
		}
	}
	return done
}

func tree(t testing.TB, o runtime.Object) map[string]any {
	raw, err := json.Marshal(o)
	assert.NilError(t, err)
	var out map[string]any
	assert.NilError(t, json.Unmarshal(raw, &out))
	return out
}

// unchanged tells whether a planned object is the one that is there, but for its status and
// what the API server gives it. It is asked of nearly all objects in each pass, and
// takes half the time of comparing them field by field.
func unchanged(t testing.TB, old, planned plan.Object) bool {
	o := planned.DeepCopyObject().(plan.Object)
	o.SetUID(old.GetUID())
	o.SetGeneration(old.GetGeneration())
	o.SetCreationTimestamp(old.GetCreationTimestamp())
	if status := reflect.ValueOf(o).Elem().FieldByName("Status"); status.IsValid() {
		status.Set(reflect.ValueOf(old).Elem().FieldByName("Status"))
	}
	before, err := json.Marshal(old)
	assert.NilError(t, err)
	after, err := json.Marshal(o)
	assert.NilError(t, err)
	return bytes.Equal(before, after)
}

func (w *world) replace(old plan.Object, fields map[string]any) {
	raw, err := json.Marshal(fields)
	assert.NilError(w.t, err)
	fresh := reflect.New(reflect.TypeOf(old).Elem()).Interface().(plan.Object)
	assert.NilError(w.t, json.Unmarshal(raw, fresh))
	w.objects[keyOf(old)] = fresh
}

// kubelet does what Kubernetes does with a gateway's Deployment and Service.
func (w *world) kubelet(nodes ...string) {
	n := 0
	for _, k := range slices.Sorted(maps.Keys(w.objects)) {
		switch o := w.objects[k].(type) {
		case *appsv1.Deployment:
			n++
			pod := &corev1.Pod{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"}}
			pod.Namespace, pod.Name, pod.Labels = o.Namespace, o.Name+"-0", o.Spec.Template.Labels
			if w.objects[keyOf(pod)] == nil {
				node := nodes[n%len(nodes)]
				cidr := get[*corev1.Node](w, "", node).Spec.PodCIDR
				pod.Spec.NodeName = node
				pod.OwnerReferences = []metav1.OwnerReference{{UID: o.UID}}
				ip := address(cidr, 10+n)
				if pod.Spec.HostNetwork = o.Spec.Template.Spec.HostNetwork; pod.Spec.HostNetwork {
					ip = get[*corev1.Node](w, "", node).Status.Addresses[0].Address
				}
				pod.Status = corev1.PodStatus{Phase: corev1.PodRunning, PodIP: ip, PodIPs: []corev1.PodIP{{IP: ip}}}
				w.create(pod)
			}
			if o.Spec.Replicas != nil {
				o.Status.ReadyReplicas = *o.Spec.Replicas
			}
		case *corev1.Service:
			if o.Spec.ClusterIP == "" {
				w.uids++
				o.Spec.ClusterIP = fmt.Sprintf("10.96.0.%d", w.uids%250)
				o.Spec.ClusterIPs = []string{o.Spec.ClusterIP}
			}
		}
	}
}

// settle runs the controller until it has nothing to do.
func (w *world) settle() plan.Result {
	w.t.Helper()
	var done []string
	for range 6 {
		r := plan.Cluster(w.snapshot())
		if done = w.apply(r); len(done) == 0 {
			return r
		}
	}
	w.t.Fatalf("still to do: %v", done)
	return plan.Result{}
}

// dump writes a Result as YAML.
func dump(t testing.TB, r plan.Result) string {
	var b strings.Builder
	section := func(title string, list []plan.Object, drop ...string) {
		fmt.Fprintf(&b, "# %s\n", title)
		for _, o := range list {
			fields := tree(t, o)
			for _, f := range drop {
				delete(fields, f)
			}
			meta := fields["metadata"].(map[string]any)
			delete(meta, "creationTimestamp")
			raw, err := yaml.Marshal(fields)
			assert.NilError(t, err)
			fmt.Fprintf(&b, "---\n%s", raw)
		}
	}
	section("Objects", r.Objects, "status")
	section("Statuses", r.Statuses, "spec")
	section("Applies", r.Applies, "status")
	for _, part := range []struct {
		title string
		value any
	}{{"Keys", r.Keys}, {"Events", r.Events}, {"Keep", r.Keep}} {
		if part.title == "Keep" && len(r.Keep) == 0 {
			continue
		}
		raw, err := yaml.Marshal(part.value)
		assert.NilError(t, err)
		fmt.Fprintf(&b, "# %s\n%s", part.title, raw)
	}
	return b.String()
}

// condition returns a condition of an object.
func condition(t testing.TB, list []metav1.Condition, kind string) metav1.Condition {
	t.Helper()
	i := slices.IndexFunc(list, func(c metav1.Condition) bool { return c.Type == kind })
	assert.Assert(t, i >= 0, "no condition %s in %v", kind, list)
	return list[i]
}

// events returns the events about an object, without Normal ones.
func warnings(r plan.Result, kind, namespace, name string) []string {
	var out []string
	for _, e := range r.Events {
		if e.Object.Kind == kind && e.Object.Namespace == namespace && e.Object.Name == name && e.Type == plan.Warning {
			out = append(out, cmp.Or(e.Reason, "?")+": "+e.Message)
		}
	}
	return out
}

func templatesMeta(version, kind string) metav1.TypeMeta {
	return metav1.TypeMeta{APIVersion: version, Kind: kind}
}

func named(namespace, name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: namespace, Name: name}
}
