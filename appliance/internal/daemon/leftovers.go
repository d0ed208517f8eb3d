package daemon

import (
	"slices"
	"time"

	"github.com/isthmus-net/isthmus/appliance/cluster"
)

// leftoverAfter is how long a link to a gateway in a namespace of the node is
// there without a gateway before it is taken for what one that was ended by
// force has left behind. A gateway that starts makes its link some time before
// the controller says in its InternalFabric that it is there; two controllers may have to
// take over from each other meanwhile.
const leftoverAfter = 2 * time.Minute

// leftovers finds the links of gateways that are gone.
type leftovers struct {
	node  string
	since map[string]time.Time // by name: when a link was first seen without a gateway
}

// of returns what tells by a link's name that nobody wants it.
func (l leftovers) of(gateways []cluster.InternalFabric, now time.Time) func(name string) bool {
	return func(name string) bool {
		if slices.ContainsFunc(gateways, func(g cluster.InternalFabric) bool { return g.GatewayNode == l.node && g.HostInterface == name }) {
			delete(l.since, name)
			return false
		}
		if _, seen := l.since[name]; !seen {
			l.since[name] = now
		}
		return now.Sub(l.since[name]) >= leftoverAfter
	}
}
