package daemon

import (
	"slices"
	"time"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
)

// leftoverAfter is how long a link to a gateway in a namespace of the node is
// there without a gateway before it is taken for what one that was ended by
// force has left behind. A gateway that starts makes its link some time before
// the API server tells that its pod has an address.
const leftoverAfter = 30 * time.Second

// leftovers finds the links of gateways that are gone.
type leftovers struct {
	node  string
	since map[string]time.Time // by name: when a link was first seen without a gateway
}

// of returns what tells by a link's name that nobody wants it.
func (l leftovers) of(gateways []cluster.Pod, now time.Time) func(name string) bool {
	return func(name string) bool {
		if slices.ContainsFunc(gateways, func(p cluster.Pod) bool {
			return p.Node == l.node && p.Labels[v1beta1.LabelHostInterface] == name
		}) {
			delete(l.since, name)
			return false
		}
		if _, seen := l.since[name]; !seen {
			l.since[name] = now
		}
		return now.Sub(l.since[name]) >= leftoverAfter
	}
}
