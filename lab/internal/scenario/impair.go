package scenario

import (
	"fmt"
	"slices"

	"github.com/isthmus-net/isthmus/lab/internal/expect"
	"github.com/isthmus-net/isthmus/lab/internal/operand"
	"github.com/isthmus-net/isthmus/lab/internal/topology"
)

// Impair makes the link of a router, or of a host outside, to the wide area
// network delay, lose or reorder what is sent into it, in place of all that it
// did before. At the end of the row it does again what the topology says.
type Impair struct {
	Of   expect.Ref          `lab:"of,required" doc:"router or host outside, such as milan/router"`
	With topology.Impairment `lab:"with,required" doc:"in place of all that the link did before: { delay: 200ms, loss: 5% }; {} is nothing"`
}

// Lint resolves the host, which must have such a link.
func (a *Impair) Lint(l *expect.Linter) {
	l.Resolve(&a.Of)
	a.With.Lint(l.File)
	behind := slices.ContainsFunc(l.Topology.Outside, func(o topology.Outside) bool { return o.Name == a.Of.Name && o.Via != "" })
	switch {
	case a.Of.Kind == "", a.Of.Kind == operand.Router, a.Of.Kind == operand.Outside && !behind:
	default:
		l.Problem(&a.Of, "name a router, such as "+l.Topology.Clusters[0].Name+"/router, or a host outside", "%s has no link to the wide area network", a.Of)
	}
}

// String is the action on one line, for plans and reports.
func (a *Impair) String() string { return fmt.Sprintf("impair %s: %v", a.Of, a.With) }

// needNetem adds to a row's requirements what its actions need.
func (r *Row) needNetem(do Actions) {
	impairs := slices.ContainsFunc(do, func(a Action) bool { _, is := a.(*Impair); return is })
	if impairs && !slices.Contains(r.Requires, topology.FeatureNetem) {
		r.Requires = append(r.Requires, topology.FeatureNetem)
	}
}
