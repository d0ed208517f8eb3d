package main

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"

	"github.com/isthmus-net/isthmus/lab/internal/report"
)

// TestFinish: lab run ends with the code that its rows deserve, and everything
// that reads results has them by then.
func TestFinish(t *testing.T) {
	fault := report.Step{Name: "the pod answers", Failures: []report.Fault{{Want: "rome/web answers milan/web by tcp", Got: "no answer within 1s"}}}
	for _, tt := range []struct {
		name string
		row  report.Row
		ci   bool
		want int
	}{
		{"all held", report.Row{Verdict: report.Pass}, true, report.ExitPass},
		{"an expectation was wrong", report.Row{Verdict: report.Fail, Steps: []report.Step{fault}}, false, report.ExitFail},
		{"the lab failed", report.Row{Verdict: report.Infra, Reason: "the agent is gone"}, false, report.ExitInfra},
		{"nothing ran", report.Row{Verdict: report.Skip, Reason: "this kernel has no geneve"}, false, report.ExitNone},
		{"nothing ran, in CI", report.Row{Verdict: report.Skip, Reason: "this kernel has no geneve"}, true, report.ExitFail},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var out, stdout bytes.Buffer
			runs := t.TempDir()
			dir, err := report.NewDir(runs, time.Now(), "0000")
			assert.NilError(t, err)
			tt.row.Name = "pod-to-pod/tcp"
			s := &session{
				app: &app{stdout: &stdout}, out: &out, dir: dir,
				options: runOptions{ci: tt.ci, asJSON: true, junit: filepath.Join(runs, "junit.xml")},
				run:     &report.Run{Labs: []report.Lab{}, Scenarios: []report.Scenario{{Name: "pod-to-pod", Rows: []report.Row{tt.row}}}},
			}
			err = s.finish()
			code := report.ExitPass
			var exit exitError
			if errors.As(err, &exit) {
				code = exit.code
			}
			assert.Equal(t, code, tt.want, "%v", err)
			assert.Check(t, is.Contains(out.String(), "1 row: "))
			result, err := os.ReadFile(filepath.Join(runs, "latest", "result.json"))
			assert.NilError(t, err)
			junit, err := os.ReadFile(s.options.junit)
			assert.NilError(t, err)
			for _, f := range tt.row.Steps {
				for name, text := range map[string]string{"result.json": string(result), "--json": stdout.String(), "--junit": string(junit)} {
					assert.Check(t, is.Contains(text, f.Failures[0].Want), name)
					assert.Check(t, is.Contains(text, f.Failures[0].Got), name)
				}
			}
		})
	}
}
