package runner

import (
	"testing"

	"gotest.tools/v3/assert"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// TestAppliedBy: an object is applied when all hosts that report on it have its
// generation in their kernels.
func TestAppliedBy(t *testing.T) {
	object := &unstructured.Unstructured{Object: map[string]any{"kind": "FirewallConfiguration"}}
	object.SetNamespace("liqo-tenant-rome")
	object.SetName("dnat")
	object.SetGeneration(7)
	host := func(name string, applied ...any) unstructured.Unstructured {
		h := unstructured.Unstructured{Object: map[string]any{"status": map[string]any{"applied": applied}}}
		h.SetName(name)
		return h
	}
	on := func(name string, generation int64, ok bool, message string) map[string]any {
		return map[string]any{
			"kind": "FirewallConfiguration", "namespace": "liqo-tenant-rome", "name": name,
			"observedGeneration": generation, "ok": ok, "message": message,
		}
	}
	other := host("node-9", on("other", 7, false, "no"))
	for _, tt := range []struct {
		name  string
		hosts []unstructured.Unstructured
		want  string
		done  bool
	}{
		{"nobody", nil, "no host reports on it", false},
		{"of another object", []unstructured.Unstructured{other}, "no host reports on it", false},
		{"the generation before", []unstructured.Unstructured{host("node-1", on("dnat", 6, true, ""))}, "node-1 has generation 6, ok: true", false},
		{"refused", []unstructured.Unstructured{host("node-1", on("dnat", 7, false, "no such chain"))}, "node-1 has generation 7, ok: false no such chain", false},
		{"one of two", []unstructured.Unstructured{host("node-1", on("dnat", 7, true, "")), other, host("node-2", on("dnat", 6, true, ""))}, "node-2 has generation 6, ok: true", false},
		{"both", []unstructured.Unstructured{host("node-1", on("dnat", 7, true, "")), other, host("node-2", on("dnat", 8, true, ""))}, "node-2 has generation 8, ok: true", true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, done := appliedBy(tt.hosts, object)
			assert.Equal(t, got, tt.want)
			assert.Equal(t, done, tt.done)
		})
	}
}
