package main

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/lab/internal/report"
)

// TestSabotageTimes: rows have the time that was said last for them, where it was said for an
// overlay or the world kind in such labs only, and every other row that of all. What is neither
// a time nor rows is an error that says what to write.
func TestSabotageTimes(t *testing.T) {
	for _, tt := range []struct {
		flags                string
		geneve, vxlan, other time.Duration
		limited              bool
		text                 string
	}{
		{"", 0, 0, 0, false, ""},
		{"0", 0, 0, 0, false, ""},
		{"20s", 20 * time.Second, 20 * time.Second, 20 * time.Second, true, "20s"},
		{"20s both@geneve=0", 0, 20 * time.Second, 20 * time.Second, true, "20s both@geneve=0s"},
		{"*@geneve=10m 20s", 10 * time.Minute, 20 * time.Second, 20 * time.Second, true, "20s *@geneve=10m0s"},
		{"both=1s", time.Second, time.Second, 0, true, "both=1s"},
		{"*/*/tcp=1s", time.Second, time.Second, 0, true, "*/*/tcp=1s"},
		{"*@kind=1s", 0, 0, 0, true, "*@kind=1s"},
		{"*=0", 0, 0, 0, false, "*=0s"},
		{"5s both=1m both/*/tcp=2m", 2 * time.Minute, 2 * time.Minute, 5 * time.Second, true, "5s both=1m0s both/*/tcp=2m0s"},
	} {
		var got sabotageTimes
		for value := range strings.FieldsSeq(tt.flags) {
			assert.NilError(t, got.Set(value), tt.flags)
		}
		assert.Equal(t, got.in("vm", "geneve", "both/geneve/tcp"), tt.geneve, tt.flags)
		assert.Equal(t, got.in("native", "vxlan", "both/vxlan/tcp"), tt.vxlan, tt.flags)
		assert.Equal(t, got.in("native", "vxlan", "other"), tt.other, tt.flags)
		assert.Equal(t, got.limited(), tt.limited, tt.flags)
		assert.Equal(t, got.String(), tt.text, tt.flags)
	}
	for value, want := range map[string]string{
		"":            "say a time such as 20s, or 0 to make all sabotages; drift@geneve=10m is for those of that scenario with Geneve",
		"-1s":         "say a time such as 20s, ",
		"20":          "say a time such as 20s, ",
		"both=":       "say a time such as 20s, ",
		"both=-1s":    "say a time such as 20s, ",
		"both@gre=1s": `"both@gre": "gre" is neither an overlay nor the world kind`,
		"@geneve=20s": `"@geneve" names no rows: write '*@geneve' for all of them`,
	} {
		var got sabotageTimes
		assert.ErrorContains(t, got.Set(value), want, value)
		assert.Equal(t, got.String(), "")
	}
	all := three(t)
	for value, want := range map[string]string{
		"both=1s":              "",
		"*@geneve=1s":          "",
		"boht=1s":              `no row matches "boht"`,
		"both/vxlan@geneve=1s": `"both/vxlan@geneve": none of its rows runs in overlay geneve`,
	} {
		var got sabotageTimes
		assert.NilError(t, got.Set(value))
		if err := got.check(all); want != "" {
			assert.ErrorContains(t, err, want)
		} else {
			assert.NilError(t, err, value)
		}
	}
}

// TestLeaveOut: of a scenario's sabotages those are left out whose time is over, and named.
func TestLeaveOut(t *testing.T) {
	o, g := twoSabotages(t, "1m", "both/vxlan/udp@vxlan=0")
	const tcp, udp = "both/vxlan/tcp: withhold routeconfiguration/rome-node-gw in milan", "both/vxlan/udp: withhold routeconfiguration/milan-gw-pods in milan"
	for took, want := range map[time.Duration]struct{ made, leftOut []string }{
		time.Minute:     {made: []string{tcp, udp}},
		time.Minute + 1: {made: []string{udp}, leftOut: []string{tcp}},
	} {
		var out bytes.Buffer
		r := &groupRun{session: &session{options: o, run: &report.Run{}}, group: g, out: &out}
		var made []string
		for _, i := range r.leaveOut(t.Context(), g.sabotages[0], took).items {
			made = append(made, i.String())
		}
		assert.DeepEqual(t, made, want.made)
		assert.DeepEqual(t, r.result.LeftOut, want.leftOut)
		assert.Equal(t, strings.Contains(out.String(), "sabotages left out: 1. Those of this lab have had their 1m0s"), want.leftOut != nil, out.String())
	}
}

// twoSabotages are a lab's sabotages of two rows of one scenario, and the options of a run
// with these values of --sabotage-time.
func twoSabotages(t *testing.T, times ...string) (runOptions, *group) {
	t.Helper()
	o := runOptions{world: "native", overlay: "vxlan", sabotage: "only"}
	for _, value := range times {
		assert.NilError(t, o.sabotageTime.Set(value))
	}
	selected, err := choose(three(t)[:1], nil, o)
	assert.NilError(t, err)
	c, err := newChooser("native", "vxlan", machine(t), nil)
	assert.NilError(t, err)
	return o, groups(selected, c, o)[0]
}

// TestSabotageTime: when the sabotages of a lab have had the time of a row, the others are
// named and left out. Of a lab that is dead, or where somebody ends the run, each is judged: it
// was not made.
func TestSabotageTime(t *testing.T) {
	o, g := twoSabotages(t, "1h", "both=1ns")
	ended, end := context.WithCancel(t.Context())
	end()
	for _, tt := range []struct {
		name    string
		ctx     context.Context
		dead    error
		leftOut []string
		reasons []string
	}{
		{"their time is over", t.Context(), nil, []string{
			"both/vxlan/tcp: withhold routeconfiguration/rome-node-gw in milan", "both/vxlan/udp: withhold routeconfiguration/milan-gw-pods in milan",
		}, nil},
		{"there is no lab", t.Context(), errors.New("no lab came up"), nil, []string{"no lab came up", "no lab came up"}},
		{"the run is ended", ended, nil, nil, []string{"interrupted", "interrupted"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var out bytes.Buffer
			r := &groupRun{
				session: &session{options: o, run: &report.Run{}}, group: g, out: &out, dead: tt.dead,
			}
			r.sabotages(tt.ctx)
			assert.DeepEqual(t, r.result.LeftOut, tt.leftOut)
			assert.Equal(t, strings.Contains(out.String(), "sabotages left out: 2. Those of this lab have had their 1ns"), tt.leftOut != nil, out.String())
			var reasons []string
			for _, sc := range r.scenarios {
				for _, row := range sc.Rows {
					assert.Equal(t, row.Verdict, report.Infra)
					reasons = append(reasons, row.Reason)
				}
			}
			assert.DeepEqual(t, reasons, tt.reasons)
		})
	}
}
