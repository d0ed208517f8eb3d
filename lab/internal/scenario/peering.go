package scenario

import (
	"slices"

	"github.com/isthmus-net/isthmus/lab/internal/expect"
	"github.com/isthmus-net/isthmus/lab/internal/topology"
	"github.com/isthmus-net/isthmus/lab/internal/yamlfile"
)

// Connect applies the objects of a peering that the topology says is absent, on
// both sides, as a user would who keeps them in files, and waits until it is
// connected. At the end of the row they are deleted.
type Connect struct {
	Server string `lab:"server,required" doc:"cluster whose gateway listens"`
	Client string `lab:"client,required" doc:"cluster whose gateway dials"`

	// Peering is the one of the topology, once linted.
	Peering topology.Peering
}

// Disconnect deletes the objects of a peering on one side, as a user does: what
// he wrote, and the tenant's namespace. It waits until they are gone.
type Disconnect struct {
	In   string `lab:"in,required" doc:"cluster"`
	Peer string `lab:"peer,required" doc:"cluster at the other end"`
}

// Lint looks for the peering; one that is there from the start would not come
// back for the next row.
func (a *Connect) Lint(l *expect.Linter) {
	l.Cluster(&a.Server)
	l.Cluster(&a.Client)
	all := l.Topology.Peerings
	i := slices.IndexFunc(all, func(p topology.Peering) bool { return p.Server == a.Server && p.Client == a.Client })
	switch {
	case a.Server == "" || a.Client == "":
	case i < 0:
		l.Problem(a, "", "the topology has no peering with server %s and client %s", a.Server, a.Client)
	case !all[i].Absent:
		l.Problem(a, "write absent: true into the topology", "%s and %s peer from the start", a.Server, a.Client)
	default:
		a.Peering = all[i]
	}
}

// Lint looks for the peering, which must be one that the row makes.
func (a *Disconnect) Lint(l *expect.Linter) {
	l.Cluster(&a.In)
	if a.In == "" || a.Peer == "" {
		return
	}
	peers := l.Topology.Peers(a.In)
	i := slices.IndexFunc(l.Topology.Peerings, func(p topology.Peering) bool {
		return p.Server == a.In && p.Client == a.Peer || p.Client == a.In && p.Server == a.Peer
	})
	switch {
	case i < 0:
		l.Problem(&a.Peer, yamlfile.DidYouMean(a.Peer, peers), "%s does not peer with %q", a.In, a.Peer)
	case !l.Topology.Peerings[i].Absent:
		l.Problem(a, "write absent: true into the topology, and connect it first", "%s and %s peer from the start, and the next row needs that", a.In, a.Peer)
	}
}

// String is the action on one line, for plans and reports.
func (a *Connect) String() string { return "connect " + a.Client + " to " + a.Server }

// String is the action on one line, for plans and reports.
func (a *Disconnect) String() string { return "disconnect " + a.In + " from " + a.Peer }
