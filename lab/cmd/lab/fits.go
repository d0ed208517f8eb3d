package main

import (
	"cmp"
	"fmt"
	"io"
	"slices"

	"github.com/isthmus-net/isthmus/lab/internal/kind"
	"github.com/isthmus-net/isthmus/lab/internal/kubeconfig"
	"github.com/isthmus-net/isthmus/lab/internal/scenario"
)

// limits say what a world has not that a row or a sabotage needs.
type limits struct {
	row      func(selection, scenario.Row) (scenario.Lack, bool)
	sabotage func(*scenario.Scenario, scenario.Sabotage) (scenario.Lack, bool)
}

// ofKind are the limits of clusters of kind. captures tells whether packets can be
// captured.
func ofKind(captures bool) limits {
	return limits{
		row: func(sel selection, r scenario.Row) (scenario.Lack, bool) {
			return kind.CannotRun(sel.scenario, r, captures)
		},
		sabotage: func(s *scenario.Scenario, sab scenario.Sabotage) (scenario.Lack, bool) {
			return kind.CannotSabotage(s.Topology, sab)
		},
	}
}

// ofClusters are the limits of clusters that are there. overlay is that of
// --overlay.
func ofClusters(have []kubeconfig.Cluster, overlay string) limits {
	if overlay == overlayAuto {
		overlay = ""
	}
	return limits{
		row: func(sel selection, r scenario.Row) (scenario.Lack, bool) {
			return kubeconfig.CannotRun(sel.scenario, r, cmp.Or(r.Overlay, sel.at.overlay, overlay), have)
		},
		sabotage: func(_ *scenario.Scenario, sab scenario.Sabotage) (scenario.Lack, bool) {
			return kubeconfig.CannotSabotage(sab, have)
		},
	}
}

// lacks tells whether a sabotage can't be made.
func (l limits) lacks(s *scenario.Scenario, sab scenario.Sabotage) bool {
	if l.sabotage == nil {
		return false
	}
	_, lacks := l.sabotage(s, sab)
	return lacks
}

// leave leaves the rows that a world has everything for. The others, and the
// sabotages that can't be made there, are listed as not selected, once for each thing
// that is missing.
func (l limits) leave(out io.Writer, selected []selection, sabotage bool) []selection {
	var left []selection
	for _, sel := range selected {
		s := sel.scenario
		var rows, broken []scenario.Lack
		kept := selection{scenario: s, at: sel.at}
		for _, r := range sel.rows {
			if lack, ok := l.row(sel, r); ok {
				rows = append(rows, lack)
			} else {
				kept.rows = append(kept.rows, r)
			}
		}
		if len(kept.rows) > 0 {
			left = append(left, kept)
		}
		if sabotage {
			for _, i := range sabotages(kept, func(scenario.Row) int { return 0 }) {
				if lack, ok := l.sabotage(s, *i.sabotage); ok {
					broken = append(broken, lack)
				}
			}
		}
		printLacks(out, s.Name, rows, "row", "rows")
		printLacks(out, s.Name, broken, "sabotage", "sabotages")
	}
	return left
}

// printLacks prints what is missing for how many, in the order of its first
// mention, with the first who asks for it.
func printLacks(out io.Writer, name string, lacks []scenario.Lack, one, more string) {
	for i, l := range lacks {
		same := func(o scenario.Lack) bool { return o.What == l.What }
		if slices.IndexFunc(lacks, same) < i {
			continue
		}
		n, what := 0, more
		for _, o := range lacks {
			if same(o) {
				n++
			}
		}
		if n == 1 {
			what = one
		}
		fmt.Fprintf(out, "not selected: %s, %d %s: %s\n", name, n, what, l.What)
		if l.At != "" {
			fmt.Fprintf(out, "    %s\n", l.At)
		}
	}
}
