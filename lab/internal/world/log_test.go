package world

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
)

// TestLogsSince: what was written since a mark is all there, however much it is,
// and what is not there any more is a gap.
func TestLogsSince(t *testing.T) {
	const name = "milan/node-1/log/liqo_isthmus-node-abcde_1-2-3/node/0"
	long := strings.Repeat("level=INFO msg=again\n", logTail/10) // twice the tail
	for _, tc := range []struct {
		name   string
		before string // in the log when it is marked; "": there is none
		then   func(t *testing.T, path string)
		text   string // since the mark
		gap    bool
	}{
		{"nothing", "old\n", func(*testing.T, string) {}, "", false},
		{"a line", "old\n", appended("new\n"), "new\n", false},
		{"a log longer than its end", long, appended("new\n"), "new\n", false},
		{"much in between", "old\n", appended("level=ERROR\n" + long), "level=ERROR\n" + long, false},
		{"a new log", "", appended("new\n"), "new\n", false},
		{"a new log of that name", "old\n", func(t *testing.T, path string) {
			assert.NilError(t, os.Rename(path, path+".20261123"))
			appended("a longer one than the old\n")(t, path)
		}, "a longer one than the old\n", true},
		{"cut off", "old, and more\n", func(t *testing.T, path string) {
			assert.NilError(t, os.Truncate(path, 0))
			appended("new\n")(t, path)
		}, "new\n", true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			a := &agent{cfg: AgentConfig{Dir: t.TempDir()}}
			path := filepath.Join(a.cfg.Dir, name+".log")
			assert.NilError(t, os.MkdirAll(filepath.Dir(path), 0o755))
			other := filepath.Join(a.cfg.Dir, "milan/node-1/log/kube-proxy.log")
			appended("of another\n")(t, other)
			if tc.before != "" {
				appended(tc.before)(t, path)
			}
			marks := map[string]LogMark{}
			logs, err := a.logs(LogQuery{})
			assert.NilError(t, err)
			for _, l := range logs {
				marks[l.Name] = l.End()
				assert.Assert(t, len(l.Text) <= logTail)
			}
			tc.then(t, path)
			for _, pod := range []string{"", "milan/liqo/isthmus-node-abcde"} {
				logs, err = a.logs(LogQuery{Pod: pod, Since: marks})
				assert.NilError(t, err)
				for _, l := range logs {
					switch {
					case l.Name == name:
						assert.Assert(t, l.Text == tc.text, "%d bytes instead of %d", len(l.Text), len(tc.text))
						assert.Equal(t, l.Gap, tc.gap)
					case pod == "":
						assert.Equal(t, l.Name+l.Text, "milan/node-1/log/kube-proxy")
					default:
						t.Errorf("%s is no log of that pod", l.Name)
					}
				}
			}
			if tc.before != "" { // another world has whole logs only
				whole := Log{Name: name, Text: tc.before + "new\n"}
				assert.DeepEqual(t, whole.Since(LogMark{Offset: int64(len(tc.before))}), Log{Name: name, Text: "new\n", Offset: int64(len(tc.before))})
				assert.Assert(t, whole.Since(LogMark{Offset: int64(len(whole.Text)) + 1}).Gap)
			}
		})
	}
}

func appended(text string) func(*testing.T, string) {
	return func(t *testing.T, path string) {
		t.Helper()
		f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
		assert.NilError(t, err)
		_, err = f.WriteString(text)
		assert.NilError(t, err)
		assert.NilError(t, f.Close())
	}
}
