package plan

import "github.com/isthmus-net/isthmus/appliance/cluster"

// Cluster returns what must be so in the cluster of s.
func Cluster(s cluster.Snapshot) Result {
	return Result{}
}
