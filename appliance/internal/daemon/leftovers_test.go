package daemon

import (
	"testing"
	"time"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/appliance/cluster"
)

// A link without a gateway of this node goes after a while, and not before.
func TestLeftovers(t *testing.T) {
	start := time.Unix(1_700_000_000, 0)
	gateway := func(node, link string) cluster.InternalFabric {
		return cluster.InternalFabric{GatewayNode: node, HostInterface: link}
	}
	here, elsewhere := gateway("node-1", "liqo.host"), gateway("node-2", "liqo.host")
	l := leftovers{node: "node-1"}
	for _, tt := range []struct {
		after    time.Duration
		gateways []cluster.InternalFabric
		want     bool
	}{
		{0, nil, false}, // it starts
		{10 * time.Second, []cluster.InternalFabric{here}, false},
		{time.Hour, []cluster.InternalFabric{here}, false},
		{time.Hour + time.Second, []cluster.InternalFabric{elsewhere}, false}, // it has moved
		{time.Hour + 2*time.Minute, nil, false},
		{time.Hour + 2*time.Minute + time.Second, []cluster.InternalFabric{elsewhere}, true},
		{25 * time.Hour, nil, false}, // a new one starts
	} {
		assert.Equal(t, l.of(tt.gateways, start.Add(tt.after))("liqo.host"), tt.want, "after %v", tt.after)
	}
}
