// Package selftest shows that the lab can't lie: it is red, for the reason that
// is meant, where something is said wrongly, where a sabotage proves nothing, and
// where the product is broken. It holds tests only, which run bin/lab as people
// do.
package selftest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/appliance/nettest"
	"github.com/isthmus-net/isthmus/lab/internal/report"
	"github.com/isthmus-net/isthmus/lab/internal/scenario"
)

// ownScenarios are those that are made to fail.
const ownScenarios = "testdata/scenarios"

// repository is where go.mod is.
func repository(t testing.TB) string {
	t.Helper()
	dir, err := filepath.Abs("../../..")
	assert.NilError(t, err)
	return dir
}

// needLab skips the test where no lab can run; in CI it fails.
func needLab(t testing.TB) {
	t.Helper()
	nettest.NeedRoot(t)
	for _, file := range []string{"lab", "isthmus", "probe", "kubernetes", "kube-proxy", "cni/bridge", "cni/flannel", "flanneld"} {
		nettest.Built(t, file)
	}
	nettest.Slow(t, "runs labs")
}

// runTime is how long one run of the lab may take: several times what it takes on
// two idle processors.
const runTime = 20 * time.Minute

// stretch is how many times as long as they say rows wait on a busy machine: most of these
// wait for what never comes.
const stretch = "2"

// runLab runs rows in labs of their own, on this machine's kernel, in the overlay
// that every kernel has, and returns the result. root is where the lab finds its
// files.
func runLab(t *testing.T, root string, args ...string) report.Run {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), runTime)
	defer cancel()
	args = append([]string{"run", "--root", root, "--fresh", "--world", "native", "--overlay", "vxlan", "--pcap", "never", "--stretch", stretch, "--json"}, args...)
	cmd := exec.CommandContext(ctx, filepath.Join(root, "bin", "lab"), args...)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = time.Minute
	cmd.Dir = root
	cmd.Env = append(os.Environ(), "CI=") // a sabotage or a row that is skipped is looked at here
	var stdout, progress bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &progress
	err := cmd.Run()
	t.Logf("lab %s\n%s", strings.Join(args, " "), progress.String())
	var exit *exec.ExitError
	if !errors.As(err, &exit) {
		t.Fatalf("the lab is not red: %v", err)
	}
	assert.Equal(t, exit.ExitCode(), report.ExitFail, "the exit code of a run in which expectations failed")
	var run report.Run
	assert.NilError(t, json.Unmarshal(stdout.Bytes(), &run))
	return run
}

// rowsOf are the rows of a run by the name of their scenario, and those of
// sabotages.
func rowsOf(run report.Run) (rows, sabotages map[string]report.Row) {
	rows, sabotages = map[string]report.Row{}, map[string]report.Row{}
	for _, s := range run.Scenarios {
		for _, r := range s.Rows {
			if s.Sabotage {
				sabotages[s.Name+": "+r.Sabotage] = r
			} else {
				rows[r.Name] = r
			}
		}
	}
	return rows, sabotages
}

// A reason is what must have failed in a row, and why: regular expressions for
// the expectation, and for what was wanted, what was got, what explains it, and the
// hosts that saw request and reply, one to a line.
type reason struct{ expectation, why string }

// failsFor demands that a row failed once and for all, at a step, for a reason.
func failsFor(t *testing.T, row report.Row, step string, want reason) {
	t.Helper()
	if row.Verdict != report.Fail {
		t.Errorf("%s: the verdict is %q, not %q: %s", row.Name, row.Verdict, report.Fail, row.Reason)
		return
	}
	if len(row.Retried) > 0 {
		t.Errorf("%s was tried again: %s", row.Name, strings.Join(row.Retried, "; "))
	}
	var seen []string
	for _, s := range row.Steps {
		for _, f := range s.Failures {
			text := fmt.Sprintf("want %s\ngot %s\n%s\npath %s\nreply %s", f.Want, f.Got, f.Why, strings.Join(f.Path, " "), strings.Join(f.Reply, " "))
			if s.Name == step && matches(t, want.expectation, f.Expectation) && matches(t, want.why, text) {
				return
			}
			seen = append(seen, fmt.Sprintf("at %q, %q:\n%s", s.Name, f.Expectation, text))
		}
	}
	t.Errorf("%s must fail at %q, %q, with a text that matches %q; it failed\n%s", row.Name, step, want.expectation, want.why, strings.Join(seen, "\n"))
}

func matches(t *testing.T, pattern, text string) bool {
	t.Helper()
	re, err := regexp.Compile("(?s)" + pattern)
	assert.NilError(t, err)
	return re.MatchString(text)
}

// loadOwn reads the scenarios that are made to fail.
func loadOwn(t *testing.T) map[string]*scenario.Scenario {
	t.Helper()
	all, err := scenario.LoadAll(ownScenarios, filepath.Join(repository(t), "topologies"))
	assert.NilError(t, err)
	out := map[string]*scenario.Scenario{}
	for _, s := range all {
		out[s.Name] = s
	}
	return out
}
