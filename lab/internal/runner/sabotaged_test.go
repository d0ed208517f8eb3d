package runner_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"

	"github.com/isthmus-net/isthmus/lab/internal/report"
	"github.com/isthmus-net/isthmus/lab/internal/runner"
	"github.com/isthmus-net/isthmus/lab/internal/scenario"
	"github.com/isthmus-net/isthmus/lab/internal/topology"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// A brokenLab is a lab in memory that shell commands break: "lose HOST" loses
// packets at a host until "mend", "lose once" one packet only, and "fail" fails.
type brokenLab struct {
	*memoryLab
	probes  int // sent so far
	loseOne int // the probe that is lost
}

func (l *brokenLab) Exec(ctx context.Context, req world.ExecRequest) (world.ExecResult, error) {
	if req.Argv[0] == "sh" {
		switch text := req.Argv[len(req.Argv)-1]; {
		case strings.HasPrefix(text, "lose once"):
			l.loseOne = l.probes + 1
		case strings.HasPrefix(text, "lose "):
			l.lostAt = strings.TrimSpace(strings.TrimPrefix(text, "lose "))
			return world.ExecResult{Stdout: []byte("lost")}, nil
		case strings.HasPrefix(text, "mend"):
			l.lostAt = ""
		case strings.HasPrefix(text, "forget"): // to mend it
		default:
			return world.ExecResult{Code: 1, Stderr: []byte("no such command")}, nil
		}
		return world.ExecResult{}, nil
	}
	l.probes++
	if l.probes == l.loseOne {
		defer func(was string) { l.lostAt = was }(l.lostAt)
		l.lostAt = "milan/gateway"
	}
	return l.memoryLab.Exec(ctx, req)
}

// Inventory is empty: nothing else than what is lost changes here.
func (l *brokenLab) Inventory(context.Context) ([]world.Inventory, error) { return nil, nil }

// TestRunSabotage: only the expectation that a sabotage names is proof, and only
// when it fails for as long as it is looked at.
func TestRunSabotage(t *testing.T) {
	for _, tt := range []struct {
		name, steps, sabotage string
		want                  report.Verdict
		why                   string
	}{
		{"breaks it", "", "run: lose milan/gateway, undo: mend }, fails: the pod answers, expectation: reach", report.Pass, ""},
		{"breaks nothing", "", "run: mend, undo: mend }, fails: the pod answers, expectation: reach", report.Fail, "the row passed all the same: none of its expectations depends on plant on milan/node-1: mend"},
		{"one probe fails by chance", "", "run: lose once, undo: mend }, fails: the pod answers, expectation: reach", report.Fail, "the row passed all the same"},
		{"can't be made", "", "run: fail, undo: mend }, fails: the pod answers, expectation: reach", report.Fail, "it could not be made, so it proves nothing: exit code 1: no such command"},
		{"breaks something else", "", "run: lose milan/gateway, undo: mend }, fails: the pod answers, expectation: path", report.Fail,
			`"milan/web reaches rome/web by udp" failed at "the pod answers" (no answer within 150ms: the request was last seen at milan/gateway, coming in by eth0), instead of "path`},
		{"is not undone", "", "run: lose milan/gateway, undo: fail }, fails: the pod answers, expectation: reach", report.Fail, "it was noticed, but could not be undone: undo on milan/node-1"},
		{"stays when it is undone", "", "run: lose milan/gateway, undo: forget }, fails: the pod answers, expectation: reach", report.Fail,
			`"milan/web reaches rome/web by udp" fails at "the pod answers" after the sabotage was undone, too`},
		{"the row fails without it", "  - name: never\n    within: 100ms\n    expect: { source: { seenBy: rome/web, is: milan/probe } }\n",
			"run: lose milan/gateway, undo: mend }, fails: never", report.Fail, "without the sabotage the row is not green either (fail: never: want "},
	} {
		t.Run(tt.name, func(t *testing.T) {
			src := "description: " + tt.name + "\ntopology: two-clusters\nsteps:\n  - name: the pod answers\n    within: 300ms\n    expect:\n" +
				"      reach: { from: milan/web, to: rome/web, proto: udp }\n" +
				"      path: { via: [milan/web, milan/node-1, milan/gateway, rome/gateway, rome/node-1, rome/web] }\n" + tt.steps +
				"sabotage:\n  - { plant: { on: milan/node-1, " + tt.sabotage + " }\n"
			sc, err := scenario.Parse("scenarios/x.yaml", []byte(src), topologies)
			assert.NilError(t, err)
			l := newMemoryLab(t)
			synctest.Test(t, func(t *testing.T) { // it is looked at for 20 s
				var lost []string // when evidence was written
				r := &runner.Runner{World: &brokenLab{memoryLab: l}, Seed: "8f3a", Bundle: func(_ context.Context, row *report.Row) (string, error) {
					if row.Sabotage != "" {
						lost = append(lost, l.lostAt)
					}
					return "runs/x", nil
				}}
				row := r.RunSabotage(t.Context(), sc, sc.Rows[0], sc.Sabotage[0])
				assert.Equal(t, row.Verdict, tt.want, "%s", row.Reason)
				assert.Equal(t, len(lost) == 1, row.Verdict == report.Fail, "evidence was written %d times", len(lost))
				if tt.name == "breaks something else" {
					assert.DeepEqual(t, lost, []string{"milan/gateway"})
				}
				assert.Check(t, is.Contains(row.Reason, tt.why))
				assert.Equal(t, r.Spoiled() != nil, tt.name == "is not undone" || tt.name == "stays when it is undone")
			})
		})
	}
}

// TestEvidence: what explains a failure is written before anything is undone, with what the
// commands of the step printed.
func TestEvidence(t *testing.T) {
	src := "description: x\ntopology: two-clusters\nsteps:\n  - name: it\n    within: 300ms\n" +
		"    do: { exec: { on: milan/node-1, run: lose milan/gateway, undo: mend } }\n" +
		"    expect: { reach: { from: milan/web, to: rome/web, proto: udp } }\n" +
		"sabotage:\n  - { withhold: routeconfiguration/rome-node-gw, in: milan, fails: it, expectation: reach }\n"
	sc, err := scenario.Parse("scenarios/x.yaml", []byte(src), topologies)
	assert.NilError(t, err)
	sc.Topology = &topology.Topology{} // a lab in memory has no API servers, whose objects are looked at before
	l := &brokenLab{memoryLab: newMemoryLab(t)}
	var lost []string
	var commands []report.Command
	r := &runner.Runner{World: l, Seed: "8f3a", Bundle: func(_ context.Context, row *report.Row) (string, error) {
		lost = append(lost, l.lostAt)
		commands = row.Steps[len(row.Steps)-1].Commands
		return "runs/x", nil
	}}
	synctest.Test(t, func(t *testing.T) {
		row := r.Run(t.Context(), sc, sc.Rows[0])
		assert.Equal(t, row.Verdict, report.Fail, "%s", row.Reason)
		assert.Equal(t, row.Bundle, "runs/x")
	})
	assert.DeepEqual(t, lost, []string{"milan/gateway"})
	assert.Equal(t, l.lostAt, "", "the row has not undone what it did")
	assert.DeepEqual(t, commands, []report.Command{{Command: "lose milan/gateway", Stdout: "lost"}})
}

// A goneLab is a lab in memory whose agent goes away at the second probe.
type goneLab struct {
	*memoryLab
	probes int
}

func (l *goneLab) Exec(ctx context.Context, req world.ExecRequest) (world.ExecResult, error) {
	if l.probes++; l.probes > 1 {
		return world.ExecResult{}, errors.New("the agent is gone")
	}
	return l.memoryLab.Exec(ctx, req)
}

// TestFailedBeforeTheLab: an expectation that failed has failed, even when the
// lab fails at the next one, and an error of the lab alone is no verdict.
func TestFailedBeforeTheLab(t *testing.T) {
	for want, is := range map[report.Verdict]string{report.Fail: "milan/probe", report.Infra: "milan/web"} {
		src := "description: x\ntopology: two-clusters\nsteps:\n  - name: it\n    within: 100ms\n    expect:\n" +
			"      - reach: { from: milan/web, to: rome/web, proto: udp }\n" +
			"      - source: { seenBy: rome/web, is: " + is + " }\n" +
			"      - mtu: { from: milan/web, to: rome/web }\n" +
			"sabotage:\n  - { withhold: routeconfiguration/rome-node-gw, in: milan, fails: it, expectation: mtu }\n"
		sc, err := scenario.Parse("scenarios/x.yaml", []byte(src), topologies)
		assert.NilError(t, err)
		r := &runner.Runner{World: &goneLab{memoryLab: newMemoryLab(t)}, Seed: "8f3a"}
		row := r.Run(t.Context(), sc, sc.Rows[0])
		assert.Equal(t, row.Verdict, want, "%s", row.Reason)
	}
}

// TestRunAll: rows that only look run at once, and each has a verdict of its own.
func TestRunAll(t *testing.T) {
	src := "description: x\ntopology: two-clusters\nmatrix: { is: [milan/web, milan/probe], proto: [udp, tcp] }\nsteps:\n  - name: it\n    within: 100ms\n    expect:\n" +
		"      - reach: { from: milan/web, to: rome/web, proto: udp }\n" +
		"      - source: { seenBy: rome/web, is: \"{is}\" }\n" +
		"  - name: also {proto}\n    expect: { reach: { from: milan/web, to: rome/web, proto: \"{proto}\" } }\n" +
		"sabotage:\n  - { withhold: routeconfiguration/rome-node-gw, in: milan, fails: it, expectation: reach }\n"
	sc, err := scenario.Parse("scenarios/x.yaml", []byte(src), topologies)
	assert.NilError(t, err)
	assert.Assert(t, runner.OnlyLooks(sc, sc.Rows[0]))
	r := &runner.Runner{World: &lockedLab{memoryLab: newMemoryLab(t)}, Seed: "8f3a"}
	rows := r.RunAll(t.Context(), sc, sc.Rows, 4)
	for i, want := range []report.Verdict{report.Pass, report.Pass, report.Fail, report.Fail} {
		assert.Equal(t, rows[i].Name, sc.Rows[i].Name)
		assert.Equal(t, rows[i].Verdict, want, "%s: %s", rows[i].Name, rows[i].Reason)
	}
}

func TestOnlyLooks(t *testing.T) {
	for _, tt := range []struct {
		step string
		want bool
	}{
		{"expect: { reach: { from: milan/web, to: rome/web } }", true},
		{"do: { exec: { on: milan/web, run: \":\" } }\n    expect: { reach: { from: milan/web, to: rome/web } }", false},
		{"expect: { rate: { from: milan/web, to: rome/web, atLeast: 1000 } }", false}, // it fills the path
	} {
		src := "description: x\ntopology: two-clusters\nsteps:\n  - name: it\n    " + tt.step + "\nsabotage:\n  - { withhold: routeconfiguration/rome-node-gw, in: milan, fails: it }\n"
		sc, err := scenario.Parse("scenarios/x.yaml", []byte(src), topologies)
		assert.NilError(t, err, tt.step)
		assert.Equal(t, runner.OnlyLooks(sc, sc.Rows[0]), tt.want, tt.step)
	}
}

// A lockedLab is a lab in memory that several rows use at once.
type lockedLab struct {
	mu sync.Mutex
	*memoryLab
}

func (l *lockedLab) Exec(ctx context.Context, req world.ExecRequest) (world.ExecResult, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.memoryLab.Exec(ctx, req)
}

func (l *lockedLab) Sightings(ctx context.Context, q world.SightingQuery) ([]world.Sighting, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.memoryLab.Sightings(ctx, q)
}
