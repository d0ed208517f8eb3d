package topology

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/goccy/go-yaml/ast"

	"github.com/isthmus-net/isthmus/lab/internal/yamlfile"
)

// An Impairment is what a link does to the packets that are sent into it, as
// tc-netem(8) does: in that direction only, so the same delay at both ends of a
// way makes a round trip of twice the delay. The zero value does nothing.
type Impairment struct {
	Delay   time.Duration `json:"delay,omitempty" lab:"delay" min:"0s" max:"10s" doc:"of every packet in this direction: 40ms at both ends make a round trip of 80ms"`
	Jitter  time.Duration `json:"jitter,omitempty" lab:"jitter" min:"0s" max:"10s" doc:"by how much the delay varies, up and down; packets then overtake each other"`
	Loss    Percent       `json:"loss,omitempty" lab:"loss" doc:"share of the packets that are lost in this direction, such as 1%"`
	Reorder Percent       `json:"reorder,omitempty" lab:"reorder" doc:"share of the packets that are not delayed and so overtake the others, such as 5%"`
	Rate    BitRate       `json:"rate,omitempty" lab:"rate" doc:"most that passes in this direction, such as 20mbit; a thousand packets wait, later ones are lost"`
}

// Lint reports to the file that i was read from what can't be meant.
func (i *Impairment) Lint(f *yamlfile.File) {
	if i.Jitter > i.Delay {
		f.Problem(f.At(&i.Jitter), "write a longer delay, or less jitter", "jitter: %v is more than the delay, which is %v", i.Jitter, i.Delay)
	}
	if i.Reorder > 0 && i.Delay == 0 {
		f.Problem(f.At(&i.Reorder), "write a delay, such as delay: 10ms", "reorder needs a delay: packets overtake those that wait")
	}
}

// String lists what the link does, as in a topology file: "delay 40ms, loss 1%".
func (i Impairment) String() string {
	var out []string
	add := func(name string, is bool, value any) {
		if is {
			out = append(out, fmt.Sprintf("%s %v", name, value))
		}
	}
	add("delay", i.Delay > 0, i.Delay)
	add("jitter", i.Jitter > 0, i.Jitter)
	add("loss", i.Loss > 0, i.Loss)
	add("reorder", i.Reorder > 0, i.Reorder)
	add("rate", i.Rate > 0, i.Rate)
	if len(out) == 0 {
		return "nothing"
	}
	return strings.Join(out, ", ")
}

// A Percent is a share of packets, between 0 and 100.
type Percent float64

// UnmarshalLab reads a number with a percent sign.
func (p *Percent) UnmarshalLab(f *yamlfile.File, n ast.Node, subst yamlfile.Subst) {
	text, ok := f.Scalar(n, subst, "a share")
	if !ok {
		return
	}
	number, percent := strings.CutSuffix(text, "%")
	v, err := strconv.ParseFloat(number, 64)
	if err != nil || !percent || !(v >= 0 && v <= 100) {
		f.Problem(yamlfile.PosOf(n), "write a number between 0 and 100 and a percent sign, such as 1% or 0.5%", "%q is not a share of the packets", text)
		return
	}
	*p = Percent(v)
}

// LabSchema describes a share to editors.
func (*Percent) LabSchema() map[string]any {
	return map[string]any{"type": "string", "pattern": `^[0-9]+(\.[0-9]+)?%$`}
}

// String is the share as in a file.
func (p Percent) String() string { return strconv.FormatFloat(float64(p), 'f', -1, 64) + "%" }

// A BitRate is in bits per second.
type BitRate int64

// bitUnits are tc's, the largest first.
var bitUnits = []struct {
	name string
	bits BitRate
}{{"gbit", 1e9}, {"mbit", 1e6}, {"kbit", 1e3}}

// The bounds of a rate: a packet of 1500 bytes takes 1.2 s at the least, and
// netem counts in bytes per second.
const (
	minRate = 10 * BitRate(1e3)
	maxRate = 100 * BitRate(1e9)
)

// UnmarshalLab reads a whole number with a unit.
func (r *BitRate) UnmarshalLab(f *yamlfile.File, n ast.Node, subst yamlfile.Subst) {
	text, ok := f.Scalar(n, subst, "a rate")
	if !ok {
		return
	}
	for _, u := range bitUnits {
		number, ok := strings.CutSuffix(text, u.name)
		if !ok {
			continue
		}
		v, err := strconv.ParseInt(number, 10, 32)
		if err != nil {
			break
		}
		*r = BitRate(v) * u.bits
		if *r < minRate || *r > maxRate {
			f.Problem(yamlfile.PosOf(n), "", "a rate of %s is not between %v and %v", text, minRate, maxRate)
		}
		return
	}
	f.Problem(yamlfile.PosOf(n), "write a whole number and kbit, mbit or gbit, such as 20mbit", "%q is not a rate", text)
}

// LabSchema describes a rate to editors.
func (*BitRate) LabSchema() map[string]any {
	return map[string]any{"type": "string", "pattern": `^[0-9]+[kmg]bit$`}
}

// String is the rate as in a file.
func (r BitRate) String() string {
	for _, u := range bitUnits {
		if r%u.bits == 0 && r > 0 {
			return fmt.Sprintf("%d%s", r/u.bits, u.name)
		}
	}
	return fmt.Sprintf("%d bit/s", int64(r))
}
