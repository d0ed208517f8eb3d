package plan_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	jsonpatch "github.com/evanphx/json-patch/v5"
	"gotest.tools/v3/assert"
	"gotest.tools/v3/assert/cmp"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/desired"
	"github.com/isthmus-net/isthmus/appliance/fieldpath"
	"github.com/isthmus-net/isthmus/appliance/netstate"
	"github.com/isthmus-net/isthmus/appliance/plan"
)

// A badKind is a file of testdata/bad: a sound object of a kind that users
// write, and what may be wrong with each of its fields. lab/internal/apitest
// reads the same files, and tries them on a real API server.
type badKind struct {
	With   []map[string]any `json:"with"` // objects that are there before
	Object map[string]any   `json:"object"`
	// Inert are fields that nobody reads, Free those of which no valid value
	// contradicts anything, both with the reason.
	Inert map[string]string `json:"inert"`
	Free  map[string]string `json:"free"`
	Cases []badCase         `json:"cases"`
}

// A badCase is one bad value.
type badCase struct {
	Field string           `json:"field"` // as in the outline of the CRDs: [] is any item, {} any key
	Bad   string           `json:"bad"`   // malformed, or contradictory: with the object itself or with another one
	Value any              `json:"value"` // put there, into the first items of lists
	Patch map[string]any   `json:"patch"` // or a merge patch of the object
	With  []map[string]any `json:"with"`
	// API is a part of the API server's refusal. Without it the object is
	// stored, and the rest says how it is reported.
	API string `json:"api"`
	// Reason is that of the event and the condition. Of Route- and
	// FirewallConfigurations the condition is that of the hosts.
	Reason string `json:"reason"`
	// At is how the message calls the field, where that is not its path.
	At   string `json:"at"`
	Says string `json:"says"` // a part of the message
	// Used says that the object is in force all the same, Partly that what is
	// not wrong in it is.
	Used   bool `json:"used"`
	Partly bool `json:"partly"`
	// Reporter is the object that reports, as "Kind namespace/name", when it is
	// another one.
	Reporter string `json:"reporter"`
}

func badKinds(t testing.TB) map[string]badKind {
	files, err := filepath.Glob("testdata/bad/*.yaml")
	assert.NilError(t, err)
	out := map[string]badKind{}
	for _, f := range files {
		text, err := os.ReadFile(f)
		assert.NilError(t, err)
		var k badKind
		assert.NilError(t, yaml.UnmarshalStrict(text, &k), f)
		out[k.Object["kind"].(string)] = k
	}
	return out
}

// spoiled returns the object of k as c spoils it.
func (k badKind) spoiled(t testing.TB, c badCase) map[string]any {
	t.Helper()
	raw, err := json.Marshal(k.Object)
	assert.NilError(t, err)
	patch, err := json.Marshal(c.Patch)
	assert.NilError(t, err)
	if c.Patch != nil {
		raw, err = jsonpatch.MergePatch(raw, patch)
		assert.NilError(t, err)
	}
	var out map[string]any
	assert.NilError(t, json.Unmarshal(raw, &out))
	if c.Patch == nil {
		fieldpath.Put(out, strings.TrimSuffix(c.Field, "{}"), c.Value)
	}
	return out
}

// at is what the message must call the field.
func (c badCase) at() string {
	if c.At != "" {
		return c.At
	}
	return strings.TrimSuffix(strings.ReplaceAll(c.Field, "[]", "[0]"), "{}")
}

// controllers are the kinds whose specs the controller writes: what a user
// writes there is overwritten (TestCorruptedNumbers).
var controllers = []string{"Connection", "GatewayReport", "GeneveTunnel", "InternalFabric", "InternalNode", "WgGatewayClient", "WgGatewayServer"}

// A leaf is a field of a CRD that has no fields of its own here.
type leaf struct {
	path, kind  string // of JSON
	constrained bool   // it has a form that the API server checks
	enum        bool
}

// leaves returns the fields of a schema. The specs of Deployments and Services
// are Kubernetes' own: each is one field here.
func leaves(path string, s map[string]any) []leaf {
	kind, _ := s["type"].(string)
	_, enum := s["enum"]
	constrained := enum
	for _, form := range []string{"format", "pattern", "anyOf"} {
		_, has := s[form]
		constrained = constrained || has
	}
	props, _ := s["properties"].(map[string]any)
	_, service := props["clusterIPs"]
	_, deployment := props["progressDeadlineSeconds"]
	if items, ok := s["items"].(map[string]any); ok {
		return leaves(path+"[]", items)
	}
	if _, ok := s["additionalProperties"].(map[string]any); ok {
		return []leaf{{path: path + "{}", kind: kind}}
	}
	if len(props) == 0 || service || deployment {
		return []leaf{{path, kind, constrained, enum}}
	}
	var out []leaf
	for _, name := range slices.Sorted(maps.Keys(props)) {
		out = append(out, leaves(path+"."+name, props[name].(map[string]any))...)
	}
	return out
}

// specs returns the schema of the spec of every CRD, by kind.
func specs(t testing.TB) map[string]map[string]any {
	files, err := filepath.Glob("../../k8s/chart/crds/*.yaml")
	assert.NilError(t, err)
	assert.Assert(t, len(files) > 0)
	out := map[string]map[string]any{}
	for _, f := range files {
		text, err := os.ReadFile(f)
		assert.NilError(t, err)
		var crd struct {
			Spec struct {
				Names    struct{ Kind string }
				Versions []struct {
					Schema struct {
						OpenAPIV3Schema struct{ Properties map[string]map[string]any }
					}
				}
			}
		}
		assert.NilError(t, yaml.Unmarshal(text, &crd), f)
		assert.Assert(t, cmp.Len(crd.Spec.Versions, 1))
		out[crd.Spec.Names.Kind] = crd.Spec.Versions[0].Schema.OpenAPIV3Schema.Properties["spec"]
	}
	return out
}

// Every field of every kind that users write has a case with a malformed value
// and one with a value that contradicts something, or a reason why there is
// none. A wrong type and a broken form are tried by lab/internal/apitest, on
// the schema itself.
func TestEveryFieldHasABadValue(t *testing.T) {
	kinds := badKinds(t)
	count := map[string]int{}
	for kind, spec := range specs(t) {
		if slices.Contains(controllers, kind) {
			assert.Check(t, kinds[kind].Object == nil, "%s is written by the controller and has a file in testdata/bad", kind)
			continue
		}
		k, ok := kinds[kind]
		if !assert.Check(t, ok, "testdata/bad has no file for %s", kind) {
			continue
		}
		fields := map[string]bool{}
		for _, l := range leaves("spec", spec) {
			fields[l.path] = true
			count["fields"]++
			if k.Inert[l.path] != "" {
				count["inert"]++
				continue
			}
			has := func(bad string) bool {
				return slices.ContainsFunc(k.Cases, func(c badCase) bool { return c.Field == l.path && c.Bad == bad })
			}
			if l.kind == "string" && !l.constrained || l.kind == "object" {
				assert.Check(t, has("malformed"), "%s: %s may be any text, and has no malformed value in testdata/bad", kind, l.path)
			}
			if l.kind == "boolean" {
				continue // both values have a meaning of their own
			}
			if k.Free[l.path] != "" {
				assert.Check(t, !has("contradictory"), "%s: %s is said to contradict nothing, and has a case that does", kind, l.path)
				continue
			}
			assert.Check(t, has("contradictory"), "%s: %s has no contradictory value in testdata/bad", kind, l.path)
		}
		for _, c := range k.Cases {
			assert.Check(t, fields[c.Field], "%s: %s of testdata/bad is no field", kind, c.Field)
			assert.Check(t, c.Bad == "malformed" || c.Bad == "contradictory", "%s: %s: bad is %q", kind, c.Field, c.Bad)
			assert.Check(t, (c.API == "") != (c.Reason == ""), "%s: %s: either the API server refuses or somebody reports", kind, c.Field)
			count[c.Bad]++
			if c.API != "" {
				count["by the API server"]++
			} else if c.Reason == plan.ReasonNotApplied {
				count["by hosts"]++
			} else {
				count["by the plan"]++
			}
		}
		for _, list := range []map[string]string{k.Inert, k.Free} {
			for path := range list {
				assert.Check(t, fields[path], "%s: %s of testdata/bad is no field", kind, path)
			}
		}
	}
	t.Logf("%v", count)
}

// A hostState is what a host makes of the objects.
type hostState struct {
	state   netstate.State
	results []desired.Result
}

// hosts compiles what all nodes and gateways of w have.
func (w *world) hosts() map[string]hostState {
	s := w.snapshot()
	out := map[string]hostState{}
	problems := slices.Concat(s.Invalid, s.Notes)
	for _, n := range s.Nodes {
		state, results := desired.Node(desired.NodeInput{
			Name: n.Name, Underlay: desired.Underlay{MTU: 1500}, Fabrics: s.Fabrics, Tunnels: s.Tunnels, Nodes: s.InternalNodes,
			Routes: s.Routes, Firewalls: s.Firewalls, Problems: problems,
		})
		out[n.Name] = hostState{state, results}
	}
	for _, g := range slices.Concat(s.GatewayServers, s.GatewayClients) {
		o := w.objects[key("Pod", g.Namespace, "gw-"+g.Name+"-0")]
		if o == nil {
			continue
		}
		pod := o.(*corev1.Pod)
		state, results := desired.Gateway(desired.GatewayInput{
			Name: g.Name, Namespace: g.Namespace, RemoteID: g.RemoteID, Mode: g.Role, NodeName: pod.Spec.NodeName,
			PodIP: netip.MustParseAddr(pod.Status.PodIP), PublicKey: netstate.Key{1}, PeerEndpoint: netip.MustParseAddrPort("203.0.113.1:51840"),
			MTU: g.MTU, Underlay: desired.Underlay{MTU: 1500}, Configurations: s.Configurations, PublicKeys: s.PublicKeys, Fabrics: s.Fabrics,
			Tunnels: s.Tunnels, Nodes: s.InternalNodes, Routes: s.Routes, Firewalls: s.Firewalls, Problems: problems,
		})
		out["gw-"+g.Name] = hostState{state, results}
	}
	return out
}

// report writes what hosts say into the objects in which they say it.
func (w *world) report() {
	for host, h := range w.hosts() {
		var list []v1beta1.AppliedStatus
		for _, r := range h.results {
			list = append(list, v1beta1.AppliedStatus{
				Kind: r.Object.Kind, Namespace: r.Object.Namespace, Name: r.Object.Name,
				ObservedGeneration: r.ObservedGeneration, OK: r.OK, Message: r.Message,
			})
		}
		if n, ok := w.objects[key("InternalNode", "", host)].(*v1beta1.InternalNode); ok {
			n.Status.Applied = list
			continue
		}
		get[*v1beta1.GatewayReport](w, "liqo-tenant-"+strings.TrimPrefix(host, "gw-"), host).Status.Applied = list
	}
}

// sites returns a cluster with peerings towards rome and paris that work.
func sites(t testing.TB, with ...map[string]any) *world {
	w := running(t)
	publicKey(w, "rome", "key", 32)
	publicKey(w, "paris", "other", 32)
	get[*v1beta1.PublicKey](w, "liqo-tenant-paris", "other").Spec.PublicKey = slices.Repeat([]byte{8}, 32)
	for i, name := range []string{"node-1", "node-2"} {
		ip := v1beta1.IP([]string{"172.18.1.11", "172.18.1.12"}[i])
		get[*v1beta1.InternalNode](w, "", name).Status.NodeIP = v1beta1.InternalNodeStatusNodeIP{Local: &ip, Remote: &ip}
	}
	for _, o := range with {
		w.add(o)
	}
	w.settle()
	w.report()
	w.settle()
	return w
}

// clone returns a copy of w that t may change.
func (w *world) clone(t testing.TB) *world {
	out := *w
	out.t, out.objects = t, map[string]plan.Object{}
	for k, o := range w.objects {
		out.objects[k] = o.DeepCopyObject().(plan.Object)
	}
	return &out
}

// add creates an object from its fields and returns its key.
func (w *world) add(fields map[string]any) string {
	w.t.Helper()
	raw, err := yaml.Marshal(fields)
	assert.NilError(w.t, err)
	w.yaml(string(raw))
	meta := fields["metadata"].(map[string]any)
	namespace, _ := meta["namespace"].(string)
	return key(fields["kind"].(string), namespace, meta["name"].(string))
}

// newPeer is the cluster that the objects of testdata/bad are about, as far as
// they are about one.
const newPeer = "naples"

// others returns all objects but some and those of the new peering.
func (w *world) others(but ...string) map[string]string {
	out := map[string]string{}
	for k, o := range w.objects {
		_, daemon := o.(*v1beta1.GatewayReport)
		if slices.Contains(but, k) || daemon || o.GetLabels()[v1beta1.LabelRemoteClusterID] == newPeer {
			continue
		}
		if f, ok := o.(*v1beta1.FirewallConfiguration); ok && f.Spec.Table.Name == "no-transit" {
			continue // a gateway's, about all other peers, the new one among them
		}
		fields := tree(w.t, o)
		if withoutPeers(o, fields) {
			delete(fields["metadata"].(map[string]any), "generation")
		}
		if status, ok := fields["status"].(map[string]any); ok {
			delete(status, "applied") // by this object, too
		}
		out[k] = fmt.Sprint(fields)
	}
	return out
}

// withoutPeers takes from the fields of an object what it says of all peers, and reports
// whether it says anything of them: it changes whenever one comes or goes.
func withoutPeers(o plan.Object, fields map[string]any) bool {
	switch o.(type) {
	case *v1beta1.InternalFabric:
		delete(fields["spec"].(map[string]any), "peerCIDRs")
		return true
	case *v1beta1.FirewallConfiguration:
		if strings.HasSuffix(o.GetName(), "-no-transit") {
			delete(fields, "spec")
			return true
		}
	}
	return false
}

// about returns the events of r about an object.
func about(r plan.Result, on string) []plan.Event {
	return slices.DeleteFunc(slices.Clone(r.Events), func(e plan.Event) bool {
		return key(e.Object.Kind, e.Object.Namespace, e.Object.Name) != on
	})
}

// What the API server stores and is wrong is reported on the object, by the
// field's name; all other objects, and what hosts make of them, are as without
// it. Without the bad value the object is in force, and nobody complains.
func TestBadInput(t *testing.T) {
	for kind, k := range badKinds(t) {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			base := sites(t, k.With...)
			t.Run("sound", func(t *testing.T) {
				w := base.clone(t)
				on := w.add(k.Object)
				w.settle()
				w.report()
				r := w.settle()
				assert.Assert(t, cmp.Len(about(r, on), 0))
				conditions(t, w, on, func(status, reason, message string) {
					assert.Equal(t, status, "True", "%s: %s", reason, message)
				})
			})
			for _, c := range k.Cases {
				if c.API == "" {
					name := c.Field + " " + fmt.Sprint(c.Value, c.Patch)
					t.Run(name, func(t *testing.T) { badInput(t, base.clone(t), k, c) })
					t.Run(name+", later", func(t *testing.T) { spoiledLater(t, base.clone(t), k, c) })
				}
			}
		})
	}
}

// badInput adds the object of k to w, as c spoils it.
func badInput(t *testing.T, w *world, k badKind, c badCase) {
	for _, o := range c.With {
		w.add(o)
		w.settle()
	}
	w.report()
	w.settle()
	hosts := w.hosts()
	bad := k.spoiled(t, c)
	on := w.add(bad)
	before := w.others(on, c.Reporter)
	w.settle()
	w.report()
	r := w.settle()
	after := w.others(on, c.Reporter)
	for other, text := range before {
		assert.Equal(t, after[other], text, other)
	}
	if !c.Used && !c.Partly {
		for host, h := range w.hosts() {
			assert.Equal(t, h.state.String(), hosts[host].state.String(), "%s is disturbed", host)
		}
	}
	if c.Reporter != "" {
		on = c.Reporter
	}
	var said []string
	for _, e := range about(r, on) {
		said = append(said, e.Type+" "+e.Reason+": "+e.Message)
	}
	i := slices.IndexFunc(said, func(s string) bool {
		return strings.HasPrefix(s, plan.Warning+" "+c.Reason+": ") && strings.Contains(s, c.at()) && strings.Contains(s, c.Says)
	})
	assert.Assert(t, i >= 0, "no event of reason %s names %s and says %q: %q", c.Reason, c.at(), c.Says, said)
	if kind, _, _ := strings.Cut(on, " "); !c.Used && slices.Contains([]string{"RouteConfiguration", "FirewallConfiguration"}, kind) {
		failed := slices.ContainsFunc(slices.Collect(maps.Values(w.hosts())), func(h hostState) bool {
			return slices.ContainsFunc(h.results, func(r cluster.Applied) bool {
				return !r.OK && key(r.Object.Kind, r.Object.Namespace, r.Object.Name) == on
			})
		})
		assert.Assert(t, failed, "no host says that it does without the object")
		status := fmt.Sprint(tree(t, w.objects[on])["status"])
		assert.Assert(t, cmp.Contains(status, "type:"+string(v1beta1.HostError)))
		return
	}
	conditions(t, w, on, func(status, reason, message string) {
		assert.Equal(t, status, map[bool]string{true: "True", false: "False"}[c.Used], "%s: %s", reason, message)
		assert.Assert(t, c.Used || reason == c.Reason, "%s: %s", reason, message)
		assert.Assert(t, cmp.Contains(message, c.at()))
		assert.Assert(t, cmp.Contains(message, c.Says))
	})
}

// spoiledLater adds the object of k to w as it should be, and then spoils it:
// that disturbs nobody else either.
func spoiledLater(t *testing.T, w *world, k badKind, c badCase) {
	for _, o := range c.With {
		w.add(o)
		w.settle()
	}
	w.report()
	w.settle()
	before := w.others(c.Reporter)
	on, bad := w.add(k.Object), k.spoiled(t, c)
	w.settle()
	w.report()
	w.settle()
	old := w.objects[on]
	meta := bad["metadata"].(map[string]any)
	if meta["name"] != old.GetName() {
		return // the case is about another object
	}
	status := tree(t, old)["status"]
	for _, field := range []string{"uid", "creationTimestamp"} {
		meta[field] = tree(t, old)["metadata"].(map[string]any)[field]
	}
	meta["generation"] = old.GetGeneration() + 1
	if status != nil {
		bad["status"] = status
	}
	w.replace(old, bad)
	w.settle()
	w.report()
	w.settle()
	after := w.others(on, c.Reporter)
	for other, text := range before {
		assert.Equal(t, after[other], text, other)
	}
}

// conditions calls check for the condition that the plan gives an object, if
// its kind has one.
func conditions(t *testing.T, w *world, on string, check func(status, reason, message string)) {
	t.Helper()
	status, _ := tree(t, w.objects[on])["status"].(map[string]any)
	list, _ := status["conditions"].([]any)
	for _, x := range list {
		c := x.(map[string]any)
		if kind := c["type"]; kind == plan.ConditionAccepted || kind == v1beta1.ConditionNetworkCIDRsConfigured {
			check(c["status"].(string), c["reason"].(string), fmt.Sprint(c["message"]))
			return
		}
	}
	kind, _, _ := strings.Cut(on, " ")
	without := []string{"RouteConfiguration", "FirewallConfiguration", "ForeignCluster", "WgGatewayServerTemplate", "WgGatewayClientTemplate"}
	assert.Assert(t, slices.Contains(without, kind), "%s has no condition: %v", on, list)
}
