package runner

import (
	"testing"

	"gotest.tools/v3/assert"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// TestSettledOn: a gateway has moved when one pod is left, ready on its node.
func TestSettledOn(t *testing.T) {
	pod := func(name, node, ready string, ends bool) unstructured.Unstructured {
		p := unstructured.Unstructured{Object: map[string]any{
			"spec":   map[string]any{"nodeName": node},
			"status": map[string]any{"conditions": []any{map[string]any{"type": "Ready", "status": ready}}},
		}}
		p.SetName(name)
		if ends {
			now := metav1.Now()
			p.SetDeletionTimestamp(&now)
		}
		return p
	}
	for _, tt := range []struct {
		pods []unstructured.Unstructured
		want string
		is   bool
		lost int // pods that the scheduler put elsewhere
	}{
		{nil, "no pod", false, 0},
		{[]unstructured.Unstructured{pod("old", "node-1", "True", false)}, "old is ready on node-1", false, 1},
		{[]unstructured.Unstructured{pod("old", "node-1", "True", true), pod("new", "", "False", false)}, "old ends on node-1, new waits for a node", false, 0},
		{[]unstructured.Unstructured{pod("old", "node-1", "True", true), pod("new", "node-2", "True", false)}, "old ends on node-1, new is ready on node-2", false, 0},
		{[]unstructured.Unstructured{pod("new", "node-2", "False", false)}, "new is not ready on node-2", false, 0},
		{[]unstructured.Unstructured{pod("new", "node-2", "True", false)}, "new is ready on node-2", true, 0},
		{[]unstructured.Unstructured{pod("new", "node-1", "False", false)}, "new is not ready on node-1", false, 1},
	} {
		got, is := settledOn(tt.pods, "node-2")
		assert.Equal(t, got, tt.want)
		assert.Equal(t, is, tt.is)
		assert.Equal(t, len(misplaced(tt.pods, "node-2")), tt.lost, tt.want)
	}
}
