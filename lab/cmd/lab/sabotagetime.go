package main

import (
	"errors"
	"strings"
	"time"

	"github.com/isthmus-net/isthmus/lab/internal/scenario"
)

// sabotageTimes are the values of --sabotage-time: how long sabotages begin in a lab. They
// are a pflag.Value, which the flag sets once for each time that it is given.
type sabotageTimes struct {
	every time.Duration // 0: always
	of    []sabotageTime
}

// A sabotageTime is that of the rows that a pattern stands for, whatever that of all rows is.
type sabotageTime struct {
	rows *pattern
	time time.Duration // 0: always
}

// in is how long sabotages of a row begin in a lab of a world and an overlay; 0: always. What
// was said last counts.
func (t sabotageTimes) in(world, overlay, row string) time.Duration {
	out := t.every
	for _, s := range t.of {
		at := s.rows.at
		here := (at.world == "" || at.world == world) && (at.overlay == "" || at.overlay == overlay)
		if here && s.rows.matches(row) {
			out = s.time
		}
	}
	return out
}

// limited tells whether there may be sabotages that do not always begin.
func (t sabotageTimes) limited() bool {
	for _, s := range t.of {
		if s.time > 0 {
			return true
		}
	}
	return t.every > 0
}

// check is the error for the first pattern that stands for no row.
func (t sabotageTimes) check(all []*scenario.Scenario) error {
	var patterns []*pattern
	for _, t := range t.of {
		patterns = append(patterns, t.rows)
		for _, s := range all {
			for _, r := range s.Rows {
				t.rows.chooses(r)
			}
		}
	}
	if err := unmatched(all, patterns); err != nil {
		return usageError("--sabotage-time: %s", withoutProgram(err))
	}
	return nil
}

// withoutProgram is what an error says after the name of the program.
func withoutProgram(err error) string { return strings.TrimPrefix(err.Error(), "lab: ") }

// Set reads TIME or PATTERN=TIME.
func (t *sabotageTimes) Set(value string) error {
	rows, text, named := strings.Cut(value, "=")
	if !named {
		text = value
	}
	d, err := time.ParseDuration(text)
	if err != nil || d < 0 {
		return errors.New("say a time such as 20s, or 0 to make all sabotages; drift@geneve=10m is for those of that scenario with Geneve")
	}
	if !named {
		t.every = d
		return nil
	}
	p, err := parsePattern(rows)
	if err != nil {
		return errors.New(withoutProgram(err)) // no usageError, so that pflag's words stay, which name the flag
	}
	t.of = append(t.of, sabotageTime{p, d})
	return nil
}

// String is what the flag was given; empty: nothing.
func (t *sabotageTimes) String() string {
	var out []string
	if t.every > 0 {
		out = append(out, t.every.String())
	}
	for _, s := range t.of {
		out = append(out, s.rows.text+"="+s.time.String())
	}
	return strings.Join(out, " ")
}

// Type is what the help text calls a value.
func (*sabotageTimes) Type() string { return "[PATTERN=]TIME" }
