package pods

import (
	"bytes"
	"context"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/appliance/nettest"
	"github.com/isthmus-net/isthmus/lab/internal/netns"
	"gotest.tools/v3/assert"
	"gotest.tools/v3/poll"
)

// A daemon that is ended while it waits for a program, as kube-proxy does for
// nft some of the time, leaves nothing behind.
func TestNothingOfAProgramIsLeft(t *testing.T) {
	nettest.NeedRoot(t)
	ns, err := netns.New()
	assert.NilError(t, err)
	defer ns.Close()
	n := &node{cfg: NodeConfig{Dir: t.TempDir(), NetNS: ns}, log: slog.New(slog.DiscardHandler)}
	assert.NilError(t, os.Mkdir(filepath.Dir(n.logFile("daemon")), 0o755))
	child := filepath.Join(n.cfg.Dir, "child") // its name in the table of processes
	assert.NilError(t, os.Symlink("/bin/sleep", child))

	ctx, end := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		n.keepProgram(ctx, "daemon", func() (*exec.Cmd, error) {
			return exec.Command("sh", "-c", `"$0" 1000 & wait`, child), nil
		})
	}()
	poll.WaitOn(t, func(poll.LogT) poll.Result {
		if len(running(t, child)) == 0 {
			return poll.Continue("the daemon has not started its child")
		}
		return poll.Success()
	}, poll.WithTimeout(10*time.Second), poll.WithDelay(time.Millisecond))
	end()
	<-ended
	assert.DeepEqual(t, running(t, child), []string(nil))
}

// running returns the directories in /proc of the processes whose first
// argument is program.
func running(t *testing.T, program string) []string {
	t.Helper()
	lines, err := filepath.Glob("/proc/[0-9]*/cmdline")
	assert.NilError(t, err)
	var dirs []string
	for _, name := range lines {
		b, err := os.ReadFile(name)
		if err == nil && bytes.HasPrefix(b, append([]byte(program), 0)) {
			dirs = append(dirs, filepath.Dir(name))
		}
	}
	return dirs
}
