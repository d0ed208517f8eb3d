package report_test

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
	"gotest.tools/v3/golden"

	"github.com/isthmus-net/isthmus/appliance/nettest"
	"github.com/isthmus-net/isthmus/lab/internal/report"
)

const deadLab = "the appliance did not come up: no matches for kind Network"

func sample() report.Run {
	ms := func(n int) report.Duration { return report.Duration(time.Duration(n) * time.Millisecond) }
	return report.Run{
		Seed: "8f3a", World: "vm", Version: "v0", Started: time.Unix(0, 0).UTC(), Took: ms(65100), Slowdown: 2.25,
		Labs: []report.Lab{{Name: "two-clusters-vm-geneve", Topology: "two-clusters", World: "vm", Overlay: "geneve", Retried: []string{"the machine did not boot"}, Phases: []report.Phase{{"converged", ms(21000)}}},
			{Name: "flat-native-vxlan", Topology: "flat", World: "native", Overlay: "vxlan", Error: deadLab, LeftOut: []string{"flat-ping/milan: withhold routeconfiguration/milan-gw-ext in rome"}, OutOfTime: []string{"flat-ping/rome"}}},
		Scenarios: []report.Scenario{
			{Name: "geneve-ping", File: "scenarios/geneve-ping.yaml", Rows: []report.Row{
				{Name: "geneve-ping/milan", Verdict: report.Pass, Took: ms(310), Retried: []string{"the agent does not answer"}, Steps: []report.Step{{Name: "the node reaches the gateway", Took: ms(300), Notes: []string{"rtt 1.2ms"}, Excused: []string{"flow there: it was silent for 1.4s; the bound is 1s, and 2.3s on a machine as slow as this one was"}}}},
			}},
			{Name: "pod-to-pod", World: "vm", File: "scenarios/pod-to-pod.yaml", Rows: []report.Row{
				{Name: "pod-to-pod/tcp/milan-web/rome-web", Verdict: report.Fail, Took: ms(10250), Bundle: "runs/x/pod-to-pod/tcp/milan-web/rome-web", Steps: []report.Step{
					{Name: "prepared", Took: ms(1)},
					{Name: "the pod answers", Took: ms(10200), Failures: []report.Fault{{
						Expectation: "rome/web sees milan/web", Place: "scenarios/pod-to-pod.yaml:12:7",
						Want: "rome/web sees 10.0.1.2 (milan/web)", Got: "it saw 10.0.2.9 (milan/gateway.rome)",
						Why:  "translated between milan/node-1 and milan/gateway (eth0)\nsecond line",
						Path: []string{"milan/web", "milan/gateway"},
					}}},
				}},
				{Name: "pod-to-pod/udp/milan-web/rome-web", Verdict: report.Pass, Took: ms(100)},
				{Name: "pod-to-pod/icmp/milan-web/rome-web", Verdict: report.XFail, Reason: "known: see issue 7", Took: ms(100)},
			}},
			{Name: "broken-lab", World: "vm", Rows: []report.Row{{Name: "broken-lab", Verdict: report.Infra, Reason: "the agent does not answer"}}},
			{Name: "needs-more", Rows: []report.Row{{Name: "needs-more", Verdict: report.Skip, Reason: "this kernel has no geneve; run it with --world vm"}}},
			{Name: "flat-ping", World: "native", Overlay: "vxlan", Rows: []report.Row{{Name: "flat-ping/rome", Verdict: report.Fail, Reason: deadLab}, {Name: "flat-ping/milan", Verdict: report.Fail, Reason: deadLab}}},
			{Name: "flat-ping", World: "native", Overlay: "vxlan", Sabotage: true, Rows: []report.Row{{Name: "flat-ping/rome", Sabotage: "withhold routeconfiguration/rome-node-gw in milan", Verdict: report.Fail, Reason: deadLab}}},
			{Name: "pod-to-pod", World: "vm", Sabotage: true, Rows: []report.Row{
				{Name: "pod-to-pod/tcp/milan-web/rome-web", Sabotage: "withhold routeconfiguration/rome-node-gw in milan", Verdict: report.Fail, Reason: "the row passed all the same", Took: ms(4000)},
			}},
		},
	}
}

func TestTerminal(t *testing.T) {
	var b strings.Builder
	run := sample()
	for _, s := range run.Scenarios {
		report.PrintScenario(&b, s, run)
	}
	report.PrintSummary(&b, run)
	golden.Assert(t, b.String(), "terminal.golden")
}

// TestLongReasons: the line of a lab that failed keeps the end of a long error,
// where the cause is.
func TestLongReasons(t *testing.T) {
	run := sample()
	why := "the appliance did not come up: " + strings.Repeat("waiting for a pod; ", 200) + "no matches for kind Network"
	run.Labs = []report.Lab{{Name: "flat", Error: why}}
	var b strings.Builder
	report.PrintSummary(&b, run)
	line, _, _ := strings.Cut(b.String(), "\n")
	assert.Check(t, strings.HasPrefix(line, "failed: lab flat: the appliance did not come up: waiting"), "%s", line)
	assert.Check(t, strings.HasSuffix(line, "; no matches for kind Network"), "%s", line)
	assert.Check(t, len(line) < 1600, "%d characters", len(line))
}

// TestSkipped: every reason is said, and the last line counts the rows, also
// where a skip is no failure.
func TestSkipped(t *testing.T) {
	skip := func(name, reason string) report.Row {
		return report.Row{Name: name, Verdict: report.Skip, Reason: reason}
	}
	for _, tt := range []struct {
		name string
		rows []report.Row
		want string
	}{
		{"one reason", []report.Row{skip("s/a", "no geneve"), skip("s/b", "no geneve")}, " – s                        skipped: no geneve\n2 rows: 0 passed, 2 skipped · 0.0s\n"},
		{"two reasons", []report.Row{skip("s/a", "no geneve"), skip("s/b", "no netem")},
			" – s                        skipped:\n     – s/a skip: no geneve\n     – s/b skip: no netem\n2 rows: 0 passed, 2 skipped · 0.0s\n"},
		{"beside one that passed", []report.Row{{Name: "s/a", Verdict: report.Pass}, skip("s/b", "no netem")},
			" ✓ s                        2 rows       0.0s\n     – s/b skip: no netem\n2 rows: 1 passed, 1 skipped · 0.0s\n"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			run := report.Run{Scenarios: []report.Scenario{{Name: "s", Rows: tt.rows}}}
			var b strings.Builder
			report.PrintScenario(&b, run.Scenarios[0], run)
			report.PrintSummary(&b, run)
			assert.Equal(t, b.String(), tt.want)
			var xml, json strings.Builder
			assert.NilError(t, report.WriteJUnit(&xml, run))
			assert.NilError(t, report.WriteJSON(&json, run))
			for _, r := range tt.rows {
				if r.Verdict == report.Skip {
					assert.Check(t, is.Contains(xml.String(), "skip: "+r.Reason))
					assert.Check(t, is.Contains(json.String(), r.Reason))
				}
			}
		})
	}
}

// TestNoPackets: where nothing captures, nobody is told to read captures.
func TestNoPackets(t *testing.T) {
	var b strings.Builder
	rows := []report.Row{{Verdict: report.Fail, Bundle: "runs/x", NoPackets: true, Steps: []report.Step{{Failures: []report.Fault{{}}}}}}
	report.PrintScenario(&b, report.Scenario{Rows: rows}, report.Run{})
	assert.Check(t, is.Contains(b.String(), "packets   none: this world captures nothing; logs, objects and the state of hosts are in runs/x\n"))
	assert.Check(t, !strings.Contains(b.String(), "capture.pcapng"), b.String())
}

// TestPacketsOf: every interface saw the packets, so the command picks those of
// the last host that did.
func TestPacketsOf(t *testing.T) {
	fault := func(path ...string) report.Step { return report.Step{Failures: []report.Fault{{Path: path}}} }
	unanswered := fault("milan/web", "rome/web")
	unanswered.Failures[0].Reply = []string{"rome/web", "rome/node-1"}
	for _, tt := range []struct {
		name  string
		steps []report.Step
		want  string
	}{
		{"nobody looked for a path", []report.Step{{}, fault()}, "tshark -nr runs/x/capture.pcapng | less\n"},
		{"it ended at a gateway", []report.Step{{}, fault(), fault("milan/web", "milan/gateway")}, `tshark -nr runs/x/capture.pcapng -Y 'frame.interface_name contains "milan/gateway:"' | less` + "\n"},
		{"the reply ended at a node", []report.Step{unanswered}, `tshark -nr runs/x/capture.pcapng -Y 'frame.interface_name contains "rome/node-1:"' | less` + "\n"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var b strings.Builder
			report.PrintScenario(&b, report.Scenario{Rows: []report.Row{{Verdict: report.Fail, Bundle: "runs/x", Steps: tt.steps}}}, report.Run{})
			assert.Check(t, is.Contains(b.String(), "packets   "+tt.want))
			assert.Check(t, is.Contains(b.String(), "wireshark runs/x/capture.pcapng\n"))
		})
	}
}

func TestJUnit(t *testing.T) {
	var b strings.Builder
	assert.NilError(t, report.WriteJUnit(&b, sample()))
	golden.Assert(t, b.String(), "junit.golden")
}

// leftBy is a run whose lab has left something.
func leftBy(run report.Run) report.Run {
	run.Labs = []report.Lab{{Name: "two-clusters-native-vxlan", Left: "a namespace is busy"}}
	return run
}

func TestExitCode(t *testing.T) {
	row := func(vs ...report.Verdict) report.Run {
		var s report.Scenario
		for _, v := range vs {
			s.Rows = append(s.Rows, report.Row{Verdict: v})
		}
		return report.Run{Scenarios: []report.Scenario{s}}
	}
	for _, tc := range []struct {
		name string
		run  report.Run
		ci   bool
		want int
	}{
		{"all pass", row(report.Pass, report.XFail), false, report.ExitPass},
		{"a failure", row(report.Pass, report.Fail), false, report.ExitFail},
		{"passed against the odds", row(report.XPass), false, report.ExitFail},
		{"a failure outweighs the lab's", row(report.Infra, report.Fail), false, report.ExitFail},
		{"the lab failed", row(report.Pass, report.Infra), false, report.ExitInfra},
		{"a lab left something", leftBy(row(report.Pass)), false, report.ExitInfra},
		{"a failure outweighs what a lab left", leftBy(row(report.Fail)), false, report.ExitFail},
		{"a skip on a laptop", row(report.Pass, report.Skip), false, report.ExitPass},
		{"a skip in CI", row(report.Pass, report.Skip), true, report.ExitFail},
		{"only skips", row(report.Skip), false, report.ExitNone},
		{"nothing", report.Run{}, true, report.ExitNone},
	} {
		assert.Equal(t, tc.run.ExitCode(tc.ci), tc.want, tc.name)
	}
}

func TestDir(t *testing.T) {
	runs := t.TempDir()
	run := sample()
	for _, seed := range []string{"aaaa", "bbbb"} {
		d, err := report.NewDir(runs, run.Started, seed)
		assert.NilError(t, err)
		assert.NilError(t, d.WriteResult(run))
	}
	latest, err := os.Readlink(filepath.Join(runs, "latest"))
	assert.NilError(t, err)
	assert.Equal(t, latest, "19700101T000000-bbbb")
	got, err := report.ReadResult(filepath.Join(runs, "latest", "result.json"))
	assert.NilError(t, err)
	assert.DeepEqual(t, got, run)
}

// TestNoSpace fills a file system at each step of writing results.
func TestNoSpace(t *testing.T) {
	nettest.NeedRoot(t)
	run := sample()
	run.Version = strings.Repeat("x", 4096) // more than a page
	write := func(runs string) error {
		d, err := report.NewDir(runs, run.Started, "aaaa")
		if err != nil {
			return err
		}
		if _, err := d.RowDir(report.Row{Name: "pod-to-pod"}); err != nil {
			return err
		}
		return d.WriteResult(run)
	}
	for _, tt := range []struct {
		name, options string // of the tmpfs
		want          string
	}{
		{"the directory of the run", "nr_inodes=1", "directory for the results: mkdir "},
		{"the link to it", "nr_inodes=2", "link to the results: symlink "},
		{"the directory of a row", "nr_inodes=3", "mkdir "},
		{"the result", "nr_inodes=4", "open "},
		{"what is in the result", "size=4096", "write "},
	} {
		t.Run(tt.name, func(t *testing.T) {
			runs := t.TempDir()
			assert.NilError(t, syscall.Mount("full", runs, "tmpfs", 0, tt.options))
			t.Cleanup(func() { assert.Check(t, syscall.Unmount(runs, syscall.MNT_DETACH)) })
			err := write(runs)
			assert.ErrorContains(t, err, tt.want)
			assert.ErrorContains(t, err, "there is no space left for results: remove old ones in "+runs)
			assert.ErrorIs(t, err, syscall.ENOSPC)
		})
	}
}
