package main

import (
	"fmt"
	"io"
	"slices"

	"github.com/isthmus-net/isthmus/lab/internal/kind"
	"github.com/isthmus-net/isthmus/lab/internal/scenario"
)

// forKind leaves the rows that clusters of kind have everything for. The others,
// and the sabotages that can't be made there, are listed as not selected, once
// for each thing that is missing.
func forKind(out io.Writer, selected []selection, sabotage, captures bool) []selection {
	var left []selection
	for _, sel := range selected {
		s := sel.scenario
		var rows, broken []kind.Lack
		kept := selection{scenario: s, overlay: sel.overlay}
		for _, r := range sel.rows {
			if lack, ok := kind.CannotRun(s, r, captures); ok {
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
				if lack, ok := kind.CannotSabotage(s.Topology, *i.sabotage); ok {
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
func printLacks(out io.Writer, scenario string, lacks []kind.Lack, one, more string) {
	for i, l := range lacks {
		same := func(o kind.Lack) bool { return o.What == l.What }
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
		fmt.Fprintf(out, "not selected: %s, %d %s: %s\n", scenario, n, what, l.What)
		if l.At != "" {
			fmt.Fprintf(out, "    %s\n", l.At)
		}
	}
}
