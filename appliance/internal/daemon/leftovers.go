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
	node string
	// By name, when a link was first seen without a gateway: as the look before found
	// it, and as far as this one has come.
	since, seen map[string]time.Time
}

// of returns what tells by a link's name that nobody wants it. It begins a new look: a
// link that was not there at the last one is new. A gateway that has ended is the one
// that its InternalFabric names until there is another one.
func (l *leftovers) of(gateways []cluster.InternalFabric, now time.Time) func(name string) bool {
	l.since, l.seen = l.seen, map[string]time.Time{}
	return func(name string) bool {
		if slices.ContainsFunc(gateways, func(g cluster.InternalFabric) bool { return g.GatewayNode == l.node && g.HostInterface == name }) {
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
