package yamlfile

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

// bounds are the least and the greatest value of a number or a duration, as the
// tags say them; both are empty where there are none.
type bounds struct{ min, max string }

// number is how a number is out of bounds: "less than 1"; empty: it is not.
func (b bounds) number(n int) string {
	switch {
	case b.min != "" && n < mustInt(b.min):
		return "less than " + b.min
	case b.max != "" && n > mustInt(b.max):
		return "more than " + b.max
	}
	return ""
}

// duration is how a duration is out of bounds; empty: it is not.
func (b bounds) duration(d time.Duration) string {
	switch {
	case b.min != "" && d < mustDuration(b.min):
		return "less than " + b.min
	case b.max != "" && d > mustDuration(b.max):
		return "more than " + b.max
	}
	return ""
}

// text is the bounds for people, after a space; empty: there are none.
func (b bounds) text() string {
	if b == (bounds{}) {
		return ""
	}
	return fmt.Sprintf(" from %s to %s", b.min, b.max)
}

// hint says what to write into a field: "write a whole number from 1 to 65535
// (default 8080)".
func (fl field) hint(what string) string {
	out := "write " + what + fl.bounds.text()
	if fl.doc != "" {
		out += " (" + strings.TrimSpace(fl.doc) + ")"
	}
	return out
}

// durationPattern is what [time.ParseDuration] reads and is not negative. A
// value of a matrix may stand for it.
const durationPattern = `^(\{.*\}|([0-9]+(\.[0-9]*)?(ns|us|µs|ms|s|m|h))+)$`

// numberSchema describes a number to editors.
func (b bounds) numberSchema() map[string]any {
	s := map[string]any{"type": []any{"integer", "string"}}
	if b != (bounds{}) {
		s["minimum"], s["maximum"] = mustInt(b.min), mustInt(b.max)
	}
	return s
}

func mustInt(tag string) int {
	n, err := strconv.Atoi(tag)
	if err != nil {
		panic(fmt.Sprintf("yamlfile: the bound %q of a field is not a whole number", tag))
	}
	return n
}

func mustDuration(tag string) time.Duration {
	d, err := time.ParseDuration(tag)
	if err != nil {
		panic(fmt.Sprintf("yamlfile: the bound %q of a field is not a duration", tag))
	}
	return d
}
