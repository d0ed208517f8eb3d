package main

import (
	"path"
	"slices"
	"strings"

	"github.com/isthmus-net/isthmus/lab/internal/kind"
	"github.com/isthmus-net/isthmus/lab/internal/scenario"
	"github.com/isthmus-net/isthmus/lab/internal/yamlfile"
)

// A selection is the rows of a scenario that shall run, in the file's order.
// What patterns name with different @ are several selections of one
// scenario: each has sabotages, see sabotagesOf.
type selection struct {
	scenario *scenario.Scenario
	at       at
	rows     []scenario.Row
}

// An at is what follows the @ of a pattern: an overlay, or the world kind, which is
// never taken by itself.
type at struct {
	overlay string // empty: that of --overlay
	world   string // empty: that of --world
}

// ats are what can follow the @ of a pattern.
func ats() []string { return append(scenario.Overlays(), kind.World) }

func parseAt(text string) at {
	if text == kind.World {
		return at{world: text}
	}
	return at{overlay: text}
}

// String is what followed the @; empty: nothing did.
func (a at) String() string { return a.overlay + a.world }

// A pattern is an argument of lab run: PATTERN, PATTERN@OVERLAY or PATTERN@kind.
type pattern struct {
	text string // as it was written
	name string // what stands for rows
	at   at

	named, chosen bool // whether it stands for a row, and for one that can run in its overlay
}

// parsePattern splits an argument of lab run and checks what follows the @.
func parsePattern(text string) (*pattern, error) {
	name, after, found := strings.Cut(text, "@")
	p := &pattern{text: text, name: strings.TrimSuffix(name, "/"), at: parseAt(after)}
	switch {
	case found && !slices.Contains(ats(), after):
		return nil, usageError("%q: %q is neither an overlay nor the world kind\n%s", text, after, yamlfile.DidYouMean(after, ats()))
	case found && p.name == "":
		return nil, usageError("%q names no rows: write '*@%s' for all of them", text, after)
	}
	return p, nil
}

// chooses tells whether the pattern stands for a row that can run in its
// overlay.
func (p *pattern) chooses(r scenario.Row) bool {
	if !p.matches(r.Name) {
		return false
	}
	p.named = true
	if !canRunIn(r, p.at.overlay) {
		return false
	}
	p.chosen = true
	return true
}

// matches tells whether the pattern stands for a row of that name, or for
// something that the row is below.
func (p *pattern) matches(name string) bool {
	if whole, err := path.Match(p.name, name); name == p.name || err == nil && whole {
		return true
	}
	n := strings.Count(p.name, "/") + 1
	parts := strings.SplitN(name, "/", n+1)
	if len(parts) <= n {
		return false
	}
	above, err := path.Match(p.name, strings.Join(parts[:n], "/"))
	return err == nil && above
}

// canRunIn tells whether a row can run in an overlay: auto is the one that the
// row needs.
func canRunIn(r scenario.Row, overlay string) bool {
	return overlay == overlayAuto || overlay == "" || r.Overlay == "" || r.Overlay == overlay
}

// pattern is the pattern of a row of the selection.
func (s selection) pattern(name string) string {
	if s.at == (at{}) {
		return name
	}
	return name + "@" + s.at.String()
}

// choose picks the rows that the patterns, the shard and the overlay name, without those
// of patterns that begin with !, and of each selection no more than --rows says. A row
// that is named with an @ and without it runs once, with it.
func choose(all []*scenario.Scenario, args []string, o runOptions) ([]selection, error) {
	part, parts, err := parseShard(o.shard)
	if err != nil {
		return nil, err
	}
	byAt := map[at][]*pattern{}
	var patterns, without []*pattern
	for _, text := range args {
		rest, left := strings.CutPrefix(text, "!")
		p, err := parsePattern(rest)
		if err != nil {
			return nil, err
		}
		patterns = append(patterns, p)
		switch {
		case !left:
			byAt[p.at] = append(byAt[p.at], p)
		case p.at != (at{}):
			return nil, usageError("%q: rows are left out wherever they would run: write '!%s'", text, p.name)
		default:
			without = append(without, p)
		}
	}
	if len(byAt) == 0 {
		byAt[at{}] = []*pattern{{name: "*"}}
	}
	leftOut := func(r scenario.Row) bool {
		out := false
		for _, p := range without {
			out = p.chooses(r) || out
		}
		return out
	}
	var out []selection
	for _, s := range all {
		named := map[string]bool{} // with an @
		for _, text := range append(ats(), "") {
			sel := selection{scenario: s, at: parseAt(text)}
			for _, r := range s.Rows {
				chosen := false
				for _, p := range byAt[sel.at] {
					chosen = p.chooses(r) || chosen
				}
				if sel.at.overlay == "" {
					chosen = chosen && canRunIn(r, o.overlay)
				}
				if sel.at == (at{}) {
					chosen = chosen && !named[r.Name]
				}
				if !leftOut(r) && chosen && inShard(r.Name, part, parts) {
					sel.rows = append(sel.rows, r)
					named[r.Name] = true
				}
			}
			if len(sel.rows) > 0 {
				sel.rows = spread(sel.rows, o.rows)
				out = append(out, sel)
			}
		}
	}
	if err := unmatched(all, patterns); err != nil {
		return nil, err
	}
	return out, nil
}

// spread picks n of all at equal distances, the first one among them. With n 0 or more
// than there are it picks all.
func spread[T any](all []T, n int) []T {
	if n == 0 || n >= len(all) {
		return all
	}
	out := make([]T, n)
	for i := range out {
		out[i] = all[i*len(all)/n]
	}
	return out
}

// unmatched is the error for the first pattern that stands for nothing.
func unmatched(all []*scenario.Scenario, patterns []*pattern) error {
	for _, p := range patterns {
		switch {
		case !p.named:
			var names []string
			for _, s := range all {
				names = append(names, s.Name)
			}
			return usageError("no row matches %q\n%s", p.text, yamlfile.DidYouMean(p.name, names))
		case !p.chosen:
			return usageError("%q: none of its rows runs in overlay %s\nlab run --plan '%s' shows which they are", p.text, p.at.overlay, p.name)
		}
	}
	return nil
}
