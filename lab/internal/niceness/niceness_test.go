package niceness_test

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/lab/internal/niceness"
)

// TestSetGroup: another process has it.
func TestSetGroup(t *testing.T) {
	cmd := exec.Command("sleep", "60")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	assert.NilError(t, cmd.Start())
	defer cmd.Wait()
	defer cmd.Process.Kill()
	assert.NilError(t, niceness.SetGroup(cmd.Process.Pid, 0))
	assert.NilError(t, niceness.SetGroup(cmd.Process.Pid, 19))
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", cmd.Process.Pid))
	assert.NilError(t, err)
	assert.Equal(t, strings.Fields(string(stat))[18], "19")
	assert.ErrorContains(t, niceness.SetGroup(1<<22, 19), "process group 4194304")
}

// TestSetProcess: another process has it.
func TestSetProcess(t *testing.T) {
	cmd := exec.Command("sleep", "60")
	assert.NilError(t, cmd.Start())
	defer cmd.Wait()
	defer cmd.Process.Kill()
	assert.NilError(t, niceness.SetProcess(cmd.Process.Pid, 18))
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", cmd.Process.Pid))
	assert.NilError(t, err)
	assert.Equal(t, strings.Fields(string(stat))[18], "18") // proc_pid_stat(5)
	assert.ErrorContains(t, niceness.SetProcess(1<<22, 18), "4194304")
}

// TestSet: every thread has it, and what is started afterwards. More patience
// needs no privilege.
func TestSet(t *testing.T) {
	assert.NilError(t, niceness.Set(19))
	for range 8 { // whichever thread it is that forks
		out, err := exec.Command("cat", "/proc/self/stat").Output()
		assert.NilError(t, err)
		assert.Equal(t, strings.Fields(string(out))[18], "19") // proc_pid_stat(5)
	}
}
