package expect

import (
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"
)

// TestLinesDiffer: a line that is there twice is another thing than once.
func TestLinesDiffer(t *testing.T) {
	for _, tc := range []struct{ name, before, now, want string }{
		{"the same in another order", "a b", "b a", ""},
		{"one more, one fewer", "a b", "b c", "+ c|- a"},
		{"once more", "a", "a a", "+ a"},
		{"all gone", "a a", "", "- a|- a"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got := linesDiffer(strings.Fields(tc.before), strings.Fields(tc.now))
			assert.Equal(t, strings.Join(got, "|"), tc.want)
		})
	}
}

// TestObjectsDiffer: all that somebody may have left on an object is found, and
// what the API server keeps for itself is not.
func TestObjectsDiffer(t *testing.T) {
	const node = `
kind: Node
apiVersion: v1
metadata: {name: node-1, uid: a, resourceVersion: "7", labels: {zone: one}, managedFields: [{manager: kubelet}]}
spec: {podCIDRs: [10.0.1.0/24], taints: [{key: a}]}
status: {phase: Running}
`
	const secret = `{kind: Secret, apiVersion: v1, metadata: {name: key, namespace: liqo}, data: {private: c2VjcmV0}}`
	for _, tc := range []struct {
		name, before, now string
		want              []string
	}{
		{"a new version and status", node, strings.NewReplacer(`"7"`, `"8"`, "Running", "Failed", "uid: a", "uid: b", "kubelet", "other").Replace(node), nil},
		{"a label", node, strings.Replace(node, "zone: one", "zone: one, left: over", 1), []string{"~ milan: Node node-1: metadata.labels.left was nothing, is over"}},
		{"the first annotation", node, strings.Replace(node, "uid: a", "uid: a, annotations: {a: b}", 1), []string{"~ milan: Node node-1: metadata.annotations.a was nothing, is b"}},
		{"a finalizer", node, strings.Replace(node, "uid: a", "uid: a, finalizers: [stay]", 1), []string{"~ milan: Node node-1: metadata.finalizers was nothing, is [stay]"}},
		{"a taint", node, strings.Replace(node, "key: a", "key: b", 1), []string{"~ milan: Node node-1: spec.taints was [map[key:a]], is [map[key:b]]"}},
		{"not ready for a moment", strings.Replace(node, "{key: a}", "{key: a}, {key: node.kubernetes.io/not-ready, effect: NoExecute}", 1), node, nil},
		{"not ready, and no other taint", strings.Replace(node, "{key: a}", "{key: node.kubernetes.io/unreachable}", 1), strings.Replace(node, ", taints: [{key: a}]", "", 1), nil},
		{"one more and one fewer", node, secret, []string{"+ milan: Secret liqo/key", "- milan: Node node-1"}},
		{"a secret", secret, strings.Replace(secret, "c2VjcmV0", "b3RoZXI=", 1), []string{"~ milan: Secret liqo/key: data.private was …, is … (another one)"}},
		{"a lease that is renewed", `{kind: Lease, apiVersion: coordination.k8s.io/v1, metadata: {name: l, namespace: other}, spec: {renewTime: a}}`,
			`{kind: Lease, apiVersion: coordination.k8s.io/v1, metadata: {name: l, namespace: other}, spec: {renewTime: b}}`, nil},
		{"a lease that is left", `{}`, `{kind: Lease, apiVersion: coordination.k8s.io/v1, metadata: {name: l, namespace: other}}`,
			[]string{"+ milan: Lease.coordination.k8s.io other/l"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			all := func(text string) map[string]unstructured.Unstructured {
				var o unstructured.Unstructured
				assert.NilError(t, yaml.Unmarshal([]byte(text), &o.Object))
				if len(o.Object) == 0 {
					return nil
				}
				return map[string]unstructured.Unstructured{"milan: " + objectNameInGroup(o): wanted(o)}
			}
			assert.DeepEqual(t, objectsDiffer(all(tc.before), all(tc.now)), tc.want)
		})
	}
}

// TestComparedObjects: what Kubernetes makes of its own accord is left out.
func TestComparedObjects(t *testing.T) {
	for text, out := range map[string]bool{
		`{kind: ConfigMap, metadata: {name: kube-root-ca.crt, namespace: a}}`:       true,
		`{kind: ConfigMap, metadata: {name: other, namespace: a}}`:                  false,
		`{kind: ServiceAccount, metadata: {name: default, namespace: a}}`:           true,
		`{kind: EndpointSlice, metadata: {name: kubernetes, namespace: default}}`:   true,
		`{kind: EndpointSlice, metadata: {name: gw-rome-x7f9q, namespace: tenant}}`: false,
	} {
		var o unstructured.Unstructured
		assert.NilError(t, yaml.Unmarshal([]byte(text), &o.Object))
		assert.Equal(t, madeWithOthers(o), out, text)
	}
}

// TestSameAsNothing: what is compared with nothing is not the same.
func TestSameAsNothing(t *testing.T) {
	objects := map[string]unstructured.Unstructured{"milan: Node node-1": {}}
	for _, tc := range []struct {
		of     string
		before Remembered
	}{
		{"", Remembered{Kernels: []string{"a"}}},
		{"", Remembered{Objects: objects}},
		{ofKernels, Remembered{Objects: objects}},
		{ofObjects, Remembered{Kernels: []string{"a"}}},
	} {
		row := &Row{Remembered: map[string]Remembered{"before": tc.before}}
		res, err := (&Same{As: "before", Of: tc.of}).Check(t.Context(), row)
		assert.NilError(t, err)
		assert.Assert(t, !res.OK && res.Final && strings.HasSuffix(res.Got, "nothing to compare with"), "%+v", res)
	}
}
