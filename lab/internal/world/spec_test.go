package world

import (
	"testing"

	"gotest.tools/v3/assert"
)

// TestNamesOfOthers: clusters and nodes that the lab has not named are found by what
// they are called in their API.
func TestNamesOfOthers(t *testing.T) {
	s := Spec{Clusters: []ClusterSpec{
		{Name: "milan", ID: "eu-1", Nodes: []NodeSpec{{Name: "node-1", Object: "worker-a"}, {Name: "node-2", Object: "worker-b"}}},
		{Name: "oslo", ID: "far"},
		{Name: "rome", Nodes: []NodeSpec{{Name: "node-1"}}},
	}}
	for id, want := range map[string]string{"eu-1": "milan", "rome": "rome", "somebody": "somebody", "milan": "cluster-id:milan", "far": "oslo"} {
		assert.Equal(t, s.ClusterOf(id), want)
	}
	milan, rome := s.Clusters[0], s.Clusters[2]
	assert.Equal(t, milan.ClusterID()+" "+rome.ClusterID(), "eu-1 rome")
	assert.Equal(t, milan.ObjectNode("worker-b")+" "+rome.ObjectNode("node-1")+" "+milan.ObjectNode("gone"), "node-2 node-1 gone")
	assert.Equal(t, milan.Nodes[1].ObjectName()+" "+rome.Nodes[0].ObjectName(), "worker-b node-1")
}
