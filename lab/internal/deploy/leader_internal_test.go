package deploy

import (
	"testing"
	"time"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// TestStaleLease: the controller leads where its lease is about as new as those of the nodes.
func TestStaleLease(t *testing.T) {
	start := time.Date(2026, 3, 14, 12, 0, 0, 0, time.UTC)
	lease := func(name, holder string, renewed time.Duration) *unstructured.Unstructured {
		l := newUnstructured(leaseAPI, "Lease")
		l.SetName(name)
		l.Object["spec"] = map[string]any{"holderIdentity": holder, "renewTime": start.Add(renewed).Format("2006-01-02T15:04:05.000000Z07:00")}
		return l
	}
	nodes := []unstructured.Unstructured{*lease("node-1", "node-1", 20*time.Second), *lease("node-2", "node-2", 29*time.Second)}
	for _, c := range []struct {
		holder  string
		renewed time.Duration
		want    string // empty: it leads
	}{
		{"a", 30 * time.Second, ""},
		{"a", 20 * time.Second, ""},
		{"a", 18 * time.Second, "the lease isthmus-controller was renewed 11s before that of node node-2"},
		{"", 30 * time.Second, "no controller has the lease isthmus-controller"},
	} {
		assert.Check(t, is.Equal(staleLease(lease("isthmus-controller", c.holder, c.renewed), nodes), c.want))
	}
	assert.Check(t, is.Equal(staleLease(lease("isthmus-controller", "a", 0), nil), ""))
}
