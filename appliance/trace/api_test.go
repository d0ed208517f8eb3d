package trace_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"gotest.tools/v3/assert"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/yaml"

	ipamv1alpha1 "github.com/isthmus-net/isthmus/appliance/api/ipam/v1alpha1"
	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/internal/kube"
	"github.com/isthmus-net/isthmus/appliance/plan"
)

// An api keeps the objects of one cluster and carries out its plan, as far as
// hosts depend on it.
type api struct {
	t       testing.TB
	id      string
	options cluster.Options
	objects map[string]plan.Object // by kind namespace/name
	age     int
}

func keyOf(o plan.Object) string {
	return o.GetObjectKind().GroupVersionKind().Kind + " " + o.GetNamespace() + "/" + o.GetName()
}

func (a *api) add(o plan.Object) {
	a.t.Helper()
	assert.Assert(a.t, a.objects[keyOf(o)] == nil, "%s exists", keyOf(o))
	a.age++
	o.SetUID(types.UID(fmt.Sprintf("uid-%d", a.age)))
	o.SetGeneration(1)
	o.SetCreationTimestamp(metav1.NewTime(time.Date(2026, 1, 1, 0, 0, a.age, 0, time.UTC)))
	a.objects[keyOf(o)] = o
}

// yaml adds an object from YAML.
func (a *api) yaml(doc string) {
	a.t.Helper()
	var meta metav1.TypeMeta
	assert.NilError(a.t, yaml.Unmarshal([]byte(doc), &meta), doc)
	o, err := kube.Scheme().New(meta.GroupVersionKind())
	assert.NilError(a.t, err, doc)
	assert.NilError(a.t, yaml.UnmarshalStrict([]byte(doc), o), doc)
	a.add(o.(plan.Object))
}

func get[T plan.Object](a *api, namespace, name string) T {
	a.t.Helper()
	o, ok := a.objects[fmt.Sprintf("%s %s/%s", reflect.TypeFor[T]().Elem().Name(), namespace, name)].(T)
	assert.Assert(a.t, ok, "there is no %s %s/%s", reflect.TypeFor[T](), namespace, name)
	return o
}

func (a *api) snapshot() cluster.Snapshot {
	o := kube.Objects{ClusterID: a.id, Namespace: "liqo", Options: a.options}
	for _, k := range slices.Sorted(maps.Keys(a.objects)) {
		switch x := a.objects[k].(type) {
		case *corev1.Node:
			o.Nodes = append(o.Nodes, *x)
		case *corev1.Pod:
			o.Pods = append(o.Pods, *x)
		case *corev1.Service:
			o.Services = append(o.Services, *x)
		case *corev1.Namespace:
			o.Namespaces = append(o.Namespaces, *x)
		case *corev1.Secret:
			o.Secrets = append(o.Secrets, *x)
		case *appsv1.Deployment:
			o.Deployments = append(o.Deployments, *x)
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
		case *ipamv1alpha1.Network:
			o.Networks = append(o.Networks, *x)
		case *ipamv1alpha1.IP:
			o.IPs = append(o.IPs, *x)
		}
	}
	return kube.Snapshot(o)
}

// settle carries out the plan until nothing changes.
func (a *api) settle() {
	a.t.Helper()
	for range 8 {
		before := a.text()
		r := plan.Cluster(a.snapshot())
		for _, o := range r.Objects {
			if old := a.objects[keyOf(o)]; old != nil {
				a.merge(old, o, "status")
			} else {
				a.add(o.DeepCopyObject().(plan.Object))
			}
		}
		for _, k := range r.Keys {
			s := &corev1.Secret{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Secret"}}
			s.Namespace, s.Name, s.Labels, s.OwnerReferences = k.Namespace, k.Name, k.Labels, []metav1.OwnerReference{k.Owner}
			s.Data = map[string][]byte{"privateKey": make([]byte, 32), "publicKey": []byte(strings.Repeat("k", 32))}
			if a.objects[keyOf(s)] == nil {
				a.add(s)
			}
		}
		for _, o := range r.Statuses {
			if old := a.objects[keyOf(o)]; old != nil {
				a.merge(old, o, "spec")
			}
		}
		for _, o := range r.Applies {
			if c, ok := o.(*v1beta1.Configuration); ok {
				get[*v1beta1.Configuration](a, c.Namespace, c.Name).Spec.Local = c.Spec.Local
			}
		}
		if a.text() == before {
			return
		}
	}
	a.t.Fatal("the plan does not come to rest")
}

// merge takes over all of an object but its identity and one part: the
// status, or the spec.
func (a *api) merge(old, fresh plan.Object, but string) {
	a.t.Helper()
	had, has := a.tree(old), a.tree(fresh)
	for k, v := range has {
		status, _ := had[k].(map[string]any)
		switch {
		case k == "metadata" || k == but:
		case k == "status" && status != nil && fresh.GetObjectKind().GroupVersionKind().Kind == "InternalNode":
			status["conditions"] = v.(map[string]any)["conditions"] // the rest is of its daemon
		default:
			had[k] = v
		}
	}
	raw, err := json.Marshal(had)
	assert.NilError(a.t, err)
	next := reflect.New(reflect.TypeOf(old).Elem()).Interface().(plan.Object)
	assert.NilError(a.t, json.Unmarshal(raw, next))
	a.objects[keyOf(old)] = next
}

func (a *api) tree(o plan.Object) map[string]any {
	raw, err := json.Marshal(o)
	assert.NilError(a.t, err)
	var out map[string]any
	assert.NilError(a.t, json.Unmarshal(raw, &out))
	return out
}

func (a *api) text() string {
	raw, err := json.Marshal(a.objects)
	assert.NilError(a.t, err)
	return string(raw)
}

// newAPI returns the API of a cluster with the templates of its gateways.
func newAPI(t testing.TB, id string, overlay cluster.Overlay) *api {
	a := &api{t: t, id: id, options: cluster.Options{Overlay: overlay, IPv6: true}, objects: map[string]plan.Object{}}
	a.yaml("{apiVersion: v1, kind: Namespace, metadata: {name: liqo}}")
	for _, role := range []string{"Server", "Client"} {
		service := ""
		if role == "Server" {
			service = `
    service:
      spec: {type: "{{ .Spec.Endpoint.ServiceType }}", ports: [{protocol: UDP, port: 51840, targetPort: 51840, nodePort: "{{ .Spec.Endpoint.NodePort }}"}]}`
		}
		a.yaml(fmt.Sprintf(`
apiVersion: networking.liqo.io/v1beta1
kind: WgGateway%[1]sTemplate
metadata: {name: wireguard, namespace: liqo}
spec:
  objectKind: {apiVersion: networking.liqo.io/v1beta1, kind: WgGateway%[1]s}
  template:
    spec:%s
      deployment:
        spec:
          replicas: 1
          template:
            spec:
              containers: [{name: gateway, image: isthmus:dev}]
              volumes: [{name: keys, secret: {secretName: "{{ .SecretName }}"}}]
`, role, strings.ReplaceAll(service, "\n", "\n  ")))
	}
	// What the chart brings along for hosts.
	chart, err := os.ReadFile(filepath.Join("..", "..", "k8s", "testdata", "minimal.yaml"))
	assert.NilError(t, err)
	found := false
	for doc := range strings.SplitSeq(string(chart), "\n---\n") {
		if strings.Contains(doc, "\nkind: FirewallConfiguration\n") {
			found = true
			a.yaml(doc)
		}
	}
	assert.Assert(t, found, "the chart has no FirewallConfiguration")
	return a
}
