package main

import (
	"path"
	"slices"
	"strings"

	"github.com/isthmus-net/isthmus/lab/internal/scenario"
	"github.com/isthmus-net/isthmus/lab/internal/yamlfile"
)

// A selection is the rows of a scenario that shall run, in the file's order.
// What patterns name with different overlays are several selections of one
// scenario: each has sabotages, see sabotagesOf.
type selection struct {
	scenario *scenario.Scenario
	overlay  string // the one that the pattern names; empty: that of --overlay
	rows     []scenario.Row
}

// A pattern is an argument of lab run: PATTERN or PATTERN@OVERLAY.
type pattern struct {
	text    string // as it was written
	name    string // what stands for rows
	overlay string // empty: that of --overlay

	named, chosen bool // whether it stands for a row, and for one that can run in its overlay
}

// parsePattern splits an argument of lab run and checks the overlay.
func parsePattern(text string) (*pattern, error) {
	name, overlay, found := strings.Cut(text, "@")
	p := &pattern{text: text, name: strings.TrimSuffix(name, "/"), overlay: overlay}
	switch {
	case found && !slices.Contains(scenario.Overlays(), overlay):
		return nil, usageError("%q: there is no overlay %q\n%s", text, overlay, yamlfile.DidYouMean(overlay, scenario.Overlays()))
	case found && p.name == "":
		return nil, usageError("%q names no rows: write '*@%s' for all of them", text, overlay)
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
	if !canRunIn(r, p.overlay) {
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

// withOverlay is the pattern of a row that was selected with an overlay.
func withOverlay(name, overlay string) string {
	if overlay == "" {
		return name
	}
	return name + "@" + overlay
}

// choose picks the rows that the patterns, the shard and the overlay name. A row
// that is named with its overlay and without it runs once, with it.
func choose(all []*scenario.Scenario, args []string, o runOptions) ([]selection, error) {
	part, parts, err := parseShard(o.shard)
	if err != nil {
		return nil, err
	}
	byOverlay := map[string][]*pattern{}
	var patterns []*pattern
	for _, text := range args {
		p, err := parsePattern(text)
		if err != nil {
			return nil, err
		}
		byOverlay[p.overlay] = append(byOverlay[p.overlay], p)
		patterns = append(patterns, p)
	}
	if len(args) == 0 {
		byOverlay[""] = []*pattern{{name: "*"}}
	}
	var out []selection
	for _, s := range all {
		named := map[string]bool{} // with an overlay
		for _, overlay := range append(scenario.Overlays(), "") {
			sel := selection{scenario: s, overlay: overlay}
			for _, r := range s.Rows {
				chosen := false
				for _, p := range byOverlay[overlay] {
					chosen = p.chooses(r) || chosen
				}
				if overlay == "" {
					chosen = chosen && canRunIn(r, o.overlay) && !named[r.Name]
				}
				if chosen && inShard(r.Name, part, parts) {
					sel.rows = append(sel.rows, r)
					named[r.Name] = true
				}
			}
			if len(sel.rows) > 0 {
				out = append(out, sel)
			}
		}
	}
	if err := unmatched(all, patterns); err != nil {
		return nil, err
	}
	return out, nil
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
			return usageError("%q: none of its rows runs in overlay %s\nlab run --plan '%s' shows which they are", p.text, p.overlay, p.name)
		}
	}
	return nil
}
