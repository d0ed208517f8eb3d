package expect

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery"
)

// Same expects that clusters are what they were when the action remember looked
// at them: the kernels of all their hosts, and all objects of their APIs.
type Same struct {
	As string `lab:"as,required" doc:"as the action remember called it"`
	// Of narrows what is compared.
	Of string `lab:"of" enum:"kernels|objects" doc:"compare only these; default both"`
}

// What Same can be narrowed to.
const (
	ofKernels = "kernels"
	ofObjects = "objects"
)

// Lint checks the name.
func (e *Same) Lint(l *Linter) {
	if e.As != "" && !l.Remembered[e.As] {
		l.Problem(&e.As, "do: { remember: { name: … } } in an earlier step", "nothing is remembered as %q up to here", e.As)
	}
}

// String is the expectation on one line.
func (e *Same) String() string {
	what := "kernels and objects are"
	if e.Of != "" {
		what = e.Of + " are"
	}
	return what + " as in " + e.As
}

// Check compares and lists every difference.
func (e *Same) Check(ctx context.Context, row *Row) (Result, error) {
	before, ok := row.Remembered[e.As]
	res := Result{Want: "everything in " + strings.Join(before.Clusters, " and ") + " as it was when it was remembered as " + e.As}
	if !ok {
		res.Got, res.Final = "nothing was remembered", true
		return res, nil
	}
	if e.Of != ofObjects && len(before.Kernels) == 0 || e.Of != ofKernels && len(before.Objects) == 0 {
		res.Got, res.Final = fmt.Sprintf("%d lines of kernels and %d objects were remembered: nothing to compare with", len(before.Kernels), len(before.Objects)), true
		return res, nil
	}
	now, err := Remember(ctx, row, before.Clusters)
	var groups *discovery.ErrGroupDiscoveryFailed
	if errors.As(err, &groups) { // kinds that are just going
		res.Got = err.Error()
		return res, nil
	}
	if err != nil {
		return Result{}, err
	}
	var lines []string
	switch e.Of {
	case ofObjects:
		lines = objectsDiffer(before.Objects, now.Objects)
	case ofKernels:
		lines = linesDiffer(before.Kernels, now.Kernels)
	default:
		lines = before.Compare(now)
	}
	res.OK = len(lines) == 0
	if !res.OK {
		res.Got, res.Why = fmt.Sprintf("%d differences", len(lines)), strings.Join(lines, "\n")
		return res, nil
	}
	res.Notes = []string{fmt.Sprintf("as in %s: %d lines of the kernels of %s, %d objects", e.As, len(before.Kernels), strings.Join(before.Clusters, " and "), len(before.Objects))}
	return res, nil
}

// Remembered is what clusters are like at one moment.
type Remembered struct {
	Clusters []string
	Kernels  []string                             // lines with their host in front
	Objects  map[string]unstructured.Unstructured // by cluster, kind, namespace and name; what somebody wanted of each
}

// Compare returns what differs later, a line each.
func (r Remembered) Compare(now Remembered) []string {
	return append(linesDiffer(r.Kernels, now.Kernels), objectsDiffer(r.Objects, now.Objects)...)
}

// Remember looks at clusters.
func Remember(ctx context.Context, row *Row, clusters []string) (Remembered, error) {
	out := Remembered{Clusters: clusters, Objects: map[string]unstructured.Unstructured{}}
	kernels, err := observeKernels(ctx, row.World, row.API, row.Topology)
	if err != nil {
		return out, err
	}
	for _, line := range kernels {
		if cluster, _, _ := strings.Cut(line, "/"); slices.Contains(clusters, cluster) {
			out.Kernels = append(out.Kernels, line)
		}
	}
	for _, c := range clusters {
		objects, err := row.API.Everything(ctx, c, comesAndGoes)
		if err != nil {
			return out, err
		}
		for _, o := range objects {
			if !madeWithOthers(o) {
				out.Objects[c+": "+objectNameInGroup(o)] = wanted(o)
			}
		}
	}
	return out, nil
}

// comesAndGoes tells which kinds have objects that nobody keeps: news, and the
// old and the derived form of what other kinds say.
func comesAndGoes(gvk schema.GroupVersionKind) bool {
	switch gvk.Kind {
	case "Event", "ComponentStatus", "Endpoints":
		return true
	}
	return false
}

// madeWithOthers tells which objects Kubernetes makes by itself, in each
// namespace or for the API server, when it comes round to it.
func madeWithOthers(o unstructured.Unstructured) bool {
	switch o.GetKind() {
	case "ConfigMap":
		return o.GetName() == "kube-root-ca.crt"
	case "ServiceAccount":
		return o.GetName() == "default"
	case "Lease":
		// A kubelet makes its own some time after its Node.
		return o.GetNamespace() == "kube-node-lease"
	case "EndpointSlice":
		return o.GetNamespace() == "default" && strings.HasPrefix(o.GetName(), "kubernetes")
	}
	return false
}

// wanted is what somebody wants of an object: not its status, nor what the API
// server keeps for itself, nor the taints that a Node has because of its status. Of leases, which are renewed, and of what follows
// the pods behind a Service only the name is kept.
func wanted(o unstructured.Unstructured) unstructured.Unstructured {
	if kind := o.GetKind(); kind == "Lease" || kind == "EndpointSlice" {
		return unstructured.Unstructured{Object: map[string]any{"kind": kind}}
	}
	out := o.DeepCopy()
	delete(out.Object, "status")
	for _, field := range []string{"uid", "resourceVersion", "generation", "creationTimestamp", "managedFields", "selfLink"} {
		unstructured.RemoveNestedField(out.Object, "metadata", field)
	}
	if taints, has, _ := unstructured.NestedSlice(out.Object, "spec", "taints"); has && o.GetKind() == "Node" {
		taints = slices.DeleteFunc(taints, func(x any) bool {
			key, _, _ := unstructured.NestedString(x.(map[string]any), "key")
			return key == corev1.TaintNodeNotReady || key == corev1.TaintNodeUnreachable
		})
		if unstructured.RemoveNestedField(out.Object, "spec", "taints"); len(taints) > 0 {
			_ = unstructured.SetNestedSlice(out.Object, taints, "spec", "taints") // a copy of what was there
		}
	}
	return *out
}

// objectNameInGroup tells objects of two groups with kinds of the same name
// apart.
func objectNameInGroup(o unstructured.Unstructured) string {
	if g := o.GroupVersionKind().Group; g != "" {
		return strings.Replace(objectName(o), " ", "."+g+" ", 1)
	}
	return objectName(o)
}

// linesDiffer lists the lines that are more and those that are fewer.
func linesDiffer(before, now []string) []string {
	var out []string
	more, less := counted(before).Compare(counted(now))
	for _, line := range more {
		out = append(out, "+ "+line)
	}
	for _, line := range less {
		out = append(out, "- "+line)
	}
	return out
}

func counted(lines []string) Leftovers {
	out := Leftovers{}
	for _, l := range lines {
		out[l]++
	}
	return out
}

// objectsDiffer lists the objects that are more, those that are fewer, and every
// field of the others that is another.
func objectsDiffer(before, now map[string]unstructured.Unstructured) []string {
	var more, less, other []string
	for _, name := range slices.Sorted(maps.Keys(now)) {
		was, ok := before[name]
		if !ok {
			more = append(more, "+ "+name)
			continue
		}
		is := now[name]
		fieldsDiffer("", was.Object, is.Object, func(path string, a, b any) {
			if was.GetKind() == "Secret" { // nobody wants keys in a report
				a, b = "…", "… (another one)"
			}
			other = append(other, fmt.Sprintf("~ %s: %s was %v, is %v", name, strings.TrimPrefix(path, "."), orNothing(a), orNothing(b)))
		})
	}
	for _, name := range slices.Sorted(maps.Keys(before)) {
		if _, ok := now[name]; !ok {
			less = append(less, "- "+name)
		}
	}
	return slices.Concat(more, less, other)
}

// fieldsDiffer calls found for each field that two objects do not share.
func fieldsDiffer(path string, a, b any, found func(path string, a, b any)) {
	am, aIsMap := a.(map[string]any)
	bm, bIsMap := b.(map[string]any)
	if !aIsMap && !bIsMap {
		if fmt.Sprint(a) != fmt.Sprint(b) {
			found(path, a, b)
		}
		return
	}
	if aIsMap && b != nil && !bIsMap || bIsMap && a != nil && !aIsMap {
		found(path, a, b)
		return
	}
	keys := maps.Clone(am)
	if keys == nil {
		keys = map[string]any{}
	}
	maps.Copy(keys, bm)
	for _, key := range slices.Sorted(maps.Keys(keys)) {
		fieldsDiffer(path+"."+key, am[key], bm[key], found)
	}
}

func orNothing(v any) any {
	if v == nil {
		return "nothing"
	}
	return v
}
