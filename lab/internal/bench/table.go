package bench

import (
	"fmt"
	"io"
	"math"
	"strings"
	"unicode/utf8"

	"github.com/isthmus-net/isthmus/lab/internal/load"
)

// Write writes the result of one combination as a table.
func (r Result) Write(w io.Writer) {
	fmt.Fprintf(w, "\n%s\n", r.Combination)
	if r.Error != "" {
		fmt.Fprintf(w, "  failed: %s\n", r.Error)
		return
	}
	fmt.Fprintf(w, "  %d interleaved pairs of %s each: medians; for ratios median (smallest–largest)\n", r.Pairs, r.Duration)
	for _, p := range Paths() {
		fmt.Fprintf(w, "  %s %s\n", pad(string(p), -12), r.Ends[p])
	}
	lines := [][]string{{"", string(PodToPod), string(Tunnel), string(Underlay), "to bare tunnel", "to underlay"}}
	for _, row := range r.Rows {
		name := string(row.Metric)
		if row.LowerIsBetter {
			name += " ↓"
		}
		line := []string{name}
		for _, p := range Paths() {
			line = append(line, quantity(row.Paths[p].Median, row.Unit))
		}
		lines = append(lines, append(line, row.ToTunnel.ratio(), row.ToUnderlay.ratio()))
	}
	writeColumns(w, lines)
}

// Write writes what lab bench prints at the end: what was not run, and how to
// read the tables above.
func (r Report) Write(w io.Writer) {
	fmt.Fprintf(w, "\n↓: lower is better. Small packets: 64-byte frames, at most %d on the way, counted where they arrive. Connections: four at a time.\n", load.Window)
	fmt.Fprintf(w, "Compare ratios, of one world; the numbers are this machine's. The lab's captures were paused.\n")
	for _, res := range r.Results {
		if res.NotRun != "" {
			fmt.Fprintf(w, "not run: %s: %s\n", res.Combination, res.NotRun)
		}
	}
}

// ratio is a spread of ratios, which have no unit.
func (s Spread) ratio() string {
	return fmt.Sprintf("%s (%s–%s)", digits(s.Median), digits(s.Min), digits(s.Max))
}

// digits is a ratio with two or three digits that mean something.
func digits(v float64) string {
	switch {
	case v < 0.0995:
		return fmt.Sprintf("%.3f", v)
	case v < 9.95:
		return fmt.Sprintf("%.2f", v)
	case v < 99.5:
		return fmt.Sprintf("%.1f", v)
	}
	return fmt.Sprintf("%.0f", v)
}

// quantity is a value with three digits and a prefix of its unit.
func quantity(v float64, unit string) string {
	prefixes := []struct {
		factor float64
		name   string
	}{{1e9, "G"}, {1e6, "M"}, {1e3, "k"}, {1, ""}, {1e-3, "m"}, {1e-6, "µ"}, {1e-9, "n"}}
	for _, p := range prefixes {
		// 999.5 with three digits is 1000: the next prefix's.
		if x := v / p.factor; x >= 0.9995 || p.factor == 1e-9 {
			behind := max(0, 2-int(math.Floor(math.Log10(max(x, 1)*1.0005))))
			return strings.TrimSpace(fmt.Sprintf("%.*f %s%s", behind, x, p.name, unit))
		}
	}
	return "0"
}

// writeColumns writes lines in columns: the first one to the left, the others
// to the right.
func writeColumns(w io.Writer, lines [][]string) {
	widths := make([]int, len(lines[0]))
	for _, line := range lines {
		for i, cell := range line {
			widths[i] = max(widths[i], utf8.RuneCountInString(cell))
		}
	}
	for _, line := range lines {
		cells := make([]string, len(line))
		for i, cell := range line {
			width := widths[i]
			if i == 0 {
				width = -width
			}
			cells[i] = pad(cell, width)
		}
		fmt.Fprintf(w, "  %s\n", strings.Join(cells, "   "))
	}
}

// pad brings a text to a width, to the right; to the left when it is negative.
// Unlike fmt it counts characters.
func pad(s string, width int) string {
	if width < 0 {
		return s + strings.Repeat(" ", max(0, -width-utf8.RuneCountInString(s)))
	}
	return strings.Repeat(" ", max(0, width-utf8.RuneCountInString(s))) + s
}
