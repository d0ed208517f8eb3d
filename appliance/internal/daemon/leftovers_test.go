package daemon

import (
	"testing"
	"time"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
)

// A link without a gateway of this node goes after a while, and not before.
func TestLeftovers(t *testing.T) {
	start := time.Unix(1_700_000_000, 0)
	gateway := func(node, link string) cluster.Pod {
		return cluster.Pod{Meta: cluster.Meta{Labels: map[string]string{v1beta1.LabelHostInterface: link}}, Node: node}
	}
	here, elsewhere := gateway("node-1", "liqo.host"), gateway("node-2", "liqo.host")
	l := leftovers{node: "node-1"}
	for _, tt := range []struct {
		after time.Duration
		pods  []cluster.Pod
		want  bool
	}{
		{0, nil, false}, // it starts
		{10 * time.Second, []cluster.Pod{here}, false},
		{time.Hour, []cluster.Pod{here}, false},
		{time.Hour + time.Second, []cluster.Pod{elsewhere}, false}, // it has moved
		{time.Hour + 30*time.Second, nil, false},
		{time.Hour + 31*time.Second, []cluster.Pod{elsewhere}, true},
		{25 * time.Hour, nil, false}, // a new one starts
	} {
		assert.Equal(t, l.of(tt.pods, start.Add(tt.after))("liqo.host"), tt.want, "after %v", tt.after)
	}
}
