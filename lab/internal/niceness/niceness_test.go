package niceness_test

import (
	"os/exec"
	"strings"
	"testing"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/lab/internal/niceness"
)

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
