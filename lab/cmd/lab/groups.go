package main

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/isthmus-net/isthmus/lab/internal/kind"
	"github.com/isthmus-net/isthmus/lab/internal/scenario"
	"github.com/isthmus-net/isthmus/lab/internal/supervisor"
	"github.com/isthmus-net/isthmus/lab/internal/topology"
)

// A group is what shares a lab: a topology in one world with one overlay.
type group struct {
	topology       *topology.Topology
	world, overlay string
	lacks          []string // features for which rows are not in the native world
	rows           []choice
	sabotages      []choice
}

// A choice is what of one scenario runs in a group.
type choice struct {
	scenario *scenario.Scenario
	items    []item
}

// An item is a row, or one sabotage of it.
type item struct {
	row      scenario.Row
	sabotage *scenario.Sabotage // nil: the row itself
	skip     string             // why it can't run; empty: it can
}

// String is the row, and what is broken for it.
func (i item) String() string {
	if i.sabotage == nil {
		return i.row.Name
	}
	return i.row.Name + ": " + i.sabotage.String()
}

// name is the name of the group's lab.
func (g *group) name() string { return labName(g.topology, g.world, g.overlay) }

// runs tells whether anything of the group can run.
func (g *group) runs() bool {
	for _, c := range slices.Concat(g.rows, g.sabotages) {
		if slices.ContainsFunc(c.items, func(i item) bool { return i.skip == "" }) {
			return true
		}
	}
	return false
}

// groups puts rows, sabotages or both into groups, in the order in which they
// start.
func groups(selected []selection, c chooser, o runOptions) []*group {
	var out []*group
	add := func(s *scenario.Scenario, i item, at site) {
		g := groupFor(&out, s.Topology, at)
		for _, f := range at.lacks {
			if at.world != supervisor.Native && !slices.Contains(g.lacks, f) {
				g.lacks = append(g.lacks, f)
			}
		}
		i.skip = at.skip
		to := &g.rows
		if i.sabotage != nil {
			to = &g.sabotages
		}
		if n := len(*to); n == 0 || (*to)[n-1].scenario != s {
			*to = append(*to, choice{scenario: s})
		}
		last := &(*to)[len(*to)-1]
		last.items = append(last.items, i)
	}
	siteOf := func(sel selection, r scenario.Row) site { return c.choose(needOf(sel, r)) }
	broken := sabotagesOf(selected, func(sel selection, r scenario.Row) int { return siteOf(sel, r).rank() }, c.lacks, o)
	for n, sel := range selected {
		if o.sabotage != sabotageOnly {
			for _, r := range shuffled(sel.rows, o.seed) {
				add(sel.scenario, item{row: r}, siteOf(sel, r))
			}
		}
		if o.sabotage != "" {
			for _, i := range broken[n] {
				add(sel.scenario, i, siteOf(sel, i.row))
			}
		}
	}
	if o.sabotageTime.limited() { // another run has time for others
		for _, g := range out {
			g.sabotages = shuffled(g.sabotages, o.seed)
		}
	}
	slices.SortFunc(out, inTurn(o.jobs))
	return out
}

// inTurn is the order in which groups start: those of this kernel come first,
// since they are up sooner. Where several labs run at a time, virtual machines
// do, since few of them run beside each other, then labs with containerd, which
// wait for each other and for those of kind, and of each sort those that take
// longest, so that none is left alone at the end.
func inTurn(jobs int) func(a, b *group) int {
	waits := func(g *group) int {
		switch {
		case g.world == supervisor.VM:
			return 2
		case g.world != kind.World && g.topology.Containerd():
			return 1
		}
		return 0
	}
	return func(a, b *group) int {
		byName := cmp.Or(strings.Compare(a.world, b.world), strings.Compare(a.name(), b.name()))
		if jobs <= 1 {
			return byName
		}
		return cmp.Or(waits(b)-waits(a), b.weight()-a.weight(), byName)
	}
}

// kindWeight is what it takes longer to make clusters of kind than others, in rows.
const kindWeight = 50

// weight says how long a group takes beside others of its world: a sabotage four
// times as long as a row, as all 320 natively took on average.
func (g *group) weight() int {
	n := 0
	if g.world == kind.World {
		n = kindWeight
	}
	for _, c := range g.rows {
		n += len(c.items)
	}
	for _, c := range g.sabotages {
		n += 4 * len(c.items)
	}
	return n
}

func groupFor(all *[]*group, t *topology.Topology, at site) *group {
	for _, g := range *all {
		if g.topology.Name == t.Name && g.world == at.world && g.overlay == at.overlay {
			return g
		}
	}
	g := &group{topology: t, world: at.world, overlay: at.overlay}
	*all = append(*all, g)
	return g
}

// rank orders sites by how soon what is done there is done: this kernel, the
// virtual machine, and where it can't be done.
func (s site) rank() int {
	switch {
	case s.skip != "":
		return 2
	case s.world == supervisor.VM:
		return 1
	}
	return 0
}

// sabotagesOf are the sabotages of each selection. One that several selections of
// a scenario have, for they are of several overlays, is made in that of the lowest
// rank only; but none of them is without one.
// What lacks says can't be made; nil: all of them can. Of each selection at most so many
// are made as --sabotages says, and the seed draws which.
func sabotagesOf(selected []selection, rank func(selection, scenario.Row) int, lacks func(selection, scenario.Sabotage) bool, o runOptions) [][]item {
	order, lowest := make([]int, len(selected)), make([]int, len(selected))
	for n, sel := range selected {
		order[n], lowest[n] = n, rank(sel, sel.rows[0])
		for _, r := range sel.rows {
			lowest[n] = min(lowest[n], rank(sel, r))
		}
	}
	slices.SortStableFunc(order, func(a, b int) int { return lowest[a] - lowest[b] })
	out := make([][]item, len(selected))
	made := map[*scenario.Scenario]map[int]bool{}
	for _, n := range order {
		sel := selected[n]
		all := sabotages(sel, func(r scenario.Row) int { return rank(sel, r) })
		if lacks != nil {
			all = slices.DeleteFunc(all, func(i item) bool { return lacks(sel, *i.sabotage) })
		}
		had := made[sel.scenario]
		left := slices.DeleteFunc(slices.Clone(all), func(i item) bool { return had[i.sabotage.Index] })
		if len(left) == 0 {
			left = all[:min(1, len(all))]
		}
		left = drawn(left, o.sabotages, o.seed+sel.scenario.Name)
		out[n] = left
		if had == nil {
			had = map[int]bool{}
			made[sel.scenario] = had
		}
		for _, i := range left {
			had[i.sabotage.Index] = true
		}
	}
	return out
}

// sabotages are the sabotages of a scenario, each on one of the rows of the lowest
// rank that it is for; one that is only for some rows is made in each overlay.
// They are spread over the rows, so that none of the sides that rows begin from
// is without.
func sabotages(sel selection, rank func(scenario.Row) int) []item {
	var all []item
	count := 0
	for _, r := range sel.rows {
		for _, sab := range sel.scenario.BuildSabotage(r) {
			all = append(all, item{row: r, sabotage: &sab})
			count = max(count, sab.Index+1)
		}
	}
	var out []item
	for index := range count {
		candidates := map[string][]item{}
		var overlays []string
		for _, i := range all {
			if i.sabotage.Index != index {
				continue
			}
			overlay := ""
			if i.sabotage.Depends {
				overlay = i.row.Overlay
			}
			switch c := candidates[overlay]; {
			case len(c) == 0:
				overlays = append(overlays, overlay)
			case rank(i.row) > rank(c[0].row):
				continue
			case rank(i.row) < rank(c[0].row):
				candidates[overlay] = nil
			}
			candidates[overlay] = append(candidates[overlay], i)
		}
		for _, o := range overlays {
			out = append(out, candidates[o][index*len(candidates[o])/count])
		}
	}
	return out
}

// describe is the line that says what runs where, and why there.
func (g *group) describe(why string) string {
	var what []string
	for _, part := range []struct {
		choices   []choice
		one, more string
	}{{g.rows, "row", "rows"}, {g.sabotages, "sabotage", "sabotages"}} {
		n := 0
		for _, c := range part.choices {
			n += len(c.items)
		}
		switch {
		case n == 1:
			what = append(what, "1 "+part.one)
		case n > 1:
			what = append(what, fmt.Sprintf("%d %s", n, part.more))
		}
	}
	return fmt.Sprintf("%s: %s in the %s world (%s)", g.name(), strings.Join(what, " and "), g.world, why)
}
