package supervisor

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"gotest.tools/v3/assert"
)

func TestProcessorTime(t *testing.T) {
	proc := t.TempDir()
	for pid, p := range map[string]struct {
		stat string
		argv []string
	}{
		"1":  {"1 (lab) S 0 1 1 0 -1 4194560 1 2 3 4 10 20 300 400 20 0", []string{"/x/bin/lab", "supervise"}},
		"2":  {"2 (exe) S 0 1 1 0 -1 4194560 1 2 3 4 1 1 0 0 20 0", []string{"/proc/self/exe", "supervise"}},
		"40": {"40 (a) b (c) S 0 1 1 0 -1 4194560 1 2 3 4 100 50 0 0 20 0", []string{"/x/bin/kubernetes", "kube-apiserver", "--flag"}},
		"41": {"41 (kubernetes) S 0 1 1 0 -1 4194560 1 2 3 4 100 50 0 0 20 0", []string{"/x/bin/kubernetes", "kube-apiserver", "--flag"}},
		"50": {"50 (kube-proxy) S 0 1 1 0 -1 4194560 1 2 3 4 7 0 0 0 20 0", []string{"/x/bin/kube-proxy", "--flag"}},
		"60": {"60 (sh) S 0 1 1 0 -1 4194560 1 2 3 4 5 0 0 0 20 0", []string{"sh", "sleep"}},
		"61": {"61 (sh) Z 0 1 1 0 -1 4194560 1 2 3 4 5 0 0 0 20 0", nil}, // has ended
	} {
		dir := filepath.Join(proc, pid)
		assert.NilError(t, os.Mkdir(dir, 0o755))
		assert.NilError(t, os.WriteFile(filepath.Join(dir, "stat"), []byte(p.stat+"\n"), 0o644))
		var cmdline strings.Builder
		for _, a := range p.argv {
			fmt.Fprintf(&cmdline, "%s\x00", a)
		}
		assert.NilError(t, os.WriteFile(filepath.Join(dir, "cmdline"), []byte(cmdline.String()), 0o644))
	}
	assert.NilError(t, os.Mkdir(filepath.Join(proc, "99"), 0o755)) // ended in between
	got, err := processorTime(proc)
	assert.NilError(t, err)
	assert.DeepEqual(t, got, map[string]time.Duration{
		"lab supervise": 7320 * time.Millisecond, "kube-apiserver": 3 * time.Second,
		"kube-proxy": 70 * time.Millisecond, "sh": 50 * time.Millisecond,
	})

	assert.NilError(t, os.WriteFile(filepath.Join(proc, "60", "stat"), []byte("60 (sh) S 0 1"), 0o644))
	_, err = processorTime(proc)
	assert.ErrorContains(t, err, "60/stat has 3 fields after the name")
}
