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
	node string
	// By name, when a link was first seen without a gateway: as the look before found
	// it, and as far as this one has come.
	since, seen map[string]time.Time
}

// of returns what tells by a link's name that nobody wants it. It begins a new look: a
// link that was not there at the last one is new.
func (l *leftovers) of(gateways []cluster.Pod, now time.Time) func(name string) bool {
	l.since, l.seen = l.seen, map[string]time.Time{}
	return func(name string) bool {
		if slices.ContainsFunc(gateways, func(p cluster.Pod) bool {
			return p.Node == l.node && p.Labels[v1beta1.LabelHostInterface] == name
		}) {
			return false
		}
		since, before := l.since[name]
		if !before {
			since = now
		}
		if now.Sub(since) >= leftoverAfter {
			return true // and with it what is known of it
		}
		l.seen[name] = since
		return false
	}
}
