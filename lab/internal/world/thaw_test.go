package world

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"
	"gotest.tools/v3/poll"
)

// A procCopy is a /proc with those processes only that a test has started: what
// is stopped beside them is none of its business.
type procCopy string

func (p procCopy) add(t *testing.T, pid int) {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	assert.NilError(t, err)
	dir := filepath.Join(string(p), fmt.Sprint(pid))
	assert.NilError(t, os.MkdirAll(dir, 0o755))
	assert.NilError(t, os.WriteFile(filepath.Join(dir, "stat"), b, 0o644))
}

func (p procCopy) load(t *testing.T, loadavg string) {
	t.Helper()
	assert.NilError(t, os.WriteFile(filepath.Join(string(p), "loadavg"), []byte(loadavg), 0o644))
}

func state(t *testing.T, pid int) string {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	assert.NilError(t, err)
	return strings.Fields(string(b)[strings.LastIndexByte(string(b), ')')+1:])[0]
}

func waitState(t *testing.T, pid int, want string) {
	t.Helper()
	poll.WaitOn(t, func(poll.LogT) poll.Result {
		if got := state(t, pid); got != want {
			return poll.Continue("process %d is in state %s, want %s", pid, got, want)
		}
		return poll.Success()
	})
}

func TestProcessesGoOnInTurn(t *testing.T) {
	proc := procCopy(t.TempDir())
	proc.load(t, "0.50 0.40 0.30 1/215 1494\n")
	var groups []int
	for range 3 {
		cmd := exec.Command("sleep", "1000")
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		assert.NilError(t, cmd.Start())
		t.Cleanup(func() {
			cmd.Process.Kill()
			cmd.Wait()
		})
		groups = append(groups, cmd.Process.Pid)
	}
	for _, g := range groups[:2] {
		assert.NilError(t, unix.Kill(-g, unix.SIGSTOP))
		waitState(t, g, "T")
	}
	for _, g := range groups {
		proc.add(t, g)
	}
	got, err := stoppedGroups(string(proc))
	assert.NilError(t, err)
	assert.DeepEqual(t, got, groups[:2])
	assert.NilError(t, thawInTurn(t.Context(), string(proc)))
	for _, g := range groups {
		waitState(t, g, "S")
	}
}

func TestRunnable(t *testing.T) {
	proc := procCopy(t.TempDir())
	for _, c := range []struct {
		loadavg, err string
		want         int
	}{
		{loadavg: "20.11 22.19 19.91 13/260 15763\n", want: 13},
		{loadavg: "20.11 22.19\n", err: "has 2 fields"},
		{loadavg: "20.11 22.19 19.91 many/260 15763\n", err: `"many"`},
	} {
		proc.load(t, c.loadavg)
		got, err := runnable(string(proc))
		if c.err != "" {
			assert.ErrorContains(t, err, c.err)
			continue
		}
		assert.NilError(t, err)
		assert.Equal(t, got, c.want)
	}
}
