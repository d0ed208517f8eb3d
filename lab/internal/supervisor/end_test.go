package supervisor_test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"gotest.tools/v3/assert"
	"gotest.tools/v3/poll"

	"github.com/isthmus-net/isthmus/appliance/nettest"
	"github.com/isthmus-net/isthmus/lab/internal/rundir"
	"github.com/isthmus-net/isthmus/lab/internal/supervisor"
	"github.com/isthmus-net/isthmus/lab/internal/topology"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// runLab is the runner that TestKillingTheRunner kills.
func runLab(ctx context.Context, dir string) error {
	top, err := topology.Load(filepath.Join("testdata", "two.yaml"))
	if err != nil {
		return err
	}
	_, err = supervisor.Start(ctx, supervisor.Config{Name: "killed", World: supervisor.Native, Spec: world.Plan(top), RunDir: dir, BinDir: "../../../bin", Ephemeral: true, KubernetesLess: true})
	if err != nil {
		return err
	}
	fmt.Println("ready")
	select {}
}

// traces is everything that a lab could leave behind, as the host sees it.
type traces struct {
	mounts, links string
	namespaces    []string
	processes     []string // those that have to do with labs
}

func look(t *testing.T, dir string) traces {
	t.Helper()
	mounts, err := os.ReadFile("/proc/self/mounts")
	assert.NilError(t, err)
	links, err := exec.Command("ip", "-br", "link").Output()
	assert.NilError(t, err)
	tr := traces{mounts: string(mounts), links: string(links)}
	procs, err := filepath.Glob("/proc/[0-9]*")
	assert.NilError(t, err)
	for _, p := range procs {
		env, err := os.ReadFile(p + "/environ")
		if err != nil { // it has ended
			continue
		}
		cmdline, _ := os.ReadFile(p + "/cmdline")
		if !bytes.Contains(env, []byte(dir)) && !bytes.Contains(cmdline, []byte(dir)) {
			continue
		}
		tr.processes = append(tr.processes, strings.ReplaceAll(string(cmdline), "\x00", " "))
		for _, kind := range []string{"net", "mnt", "pid", "ipc"} {
			if ns, err := os.Readlink(p + "/ns/" + kind); err == nil && !slices.Contains(tr.namespaces, ns) {
				tr.namespaces = append(tr.namespaces, ns)
			}
		}
	}
	slices.Sort(tr.namespaces)
	return tr
}

// references are where processes of the host, but this one, are in namespaces or
// hold them open, by namespace.
func references(t *testing.T) map[string][]string {
	t.Helper()
	out := map[string][]string{}
	links, err := filepath.Glob("/proc/[0-9]*/ns/*")
	assert.NilError(t, err)
	open, err := filepath.Glob("/proc/[0-9]*/fd/*")
	assert.NilError(t, err)
	own := fmt.Sprintf("/proc/%d/", os.Getpid())
	for _, l := range append(links, open...) {
		if to, err := os.Readlink(l); err == nil && !strings.HasPrefix(l, own) && strings.Contains(to, ":[") && !strings.HasPrefix(to, "pipe") && !strings.HasPrefix(to, "socket") {
			out[to] = append(out[to], l)
		}
	}
	return out
}

// pin keeps the numbers of namespaces until the test ends: the kernel gives that
// of one that has ended to the next that anybody makes.
func pin(t *testing.T, namespaces []string) {
	t.Helper()
	at := references(t)
	for _, ns := range namespaces {
		assert.Assert(t, len(at[ns]) > 0, "%s has ended already", ns)
		f, err := os.Open(at[ns][0])
		assert.NilError(t, err)
		t.Cleanup(func() { f.Close() })
		same, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", f.Fd()))
		assert.NilError(t, err)
		assert.Equal(t, same, ns)
	}
}

// ended succeeds when nobody else has any of the namespaces, which are pinned.
func ended(t *testing.T, namespaces ...string) poll.Result {
	t.Helper()
	at := references(t)
	for _, ns := range namespaces {
		if len(at[ns]) > 0 {
			return poll.Continue("%s is still there: %s", ns, at[ns][0])
		}
	}
	return poll.Success()
}

func TestKillingTheRunnerLeavesNothing(t *testing.T) {
	nettest.NeedRoot(t)
	dir := runDir(t)
	before := look(t, dir)

	cmd := exec.Command("/proc/self/exe", runner, dir)
	cmd.Env = append(os.Environ(), "LAB_TEST_MARK="+dir)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	assert.NilError(t, err)
	assert.NilError(t, cmd.Start())
	line := make([]byte, 6)
	_, err = out.Read(line)
	assert.NilError(t, err)
	assert.Equal(t, string(line), "ready\n")

	during := look(t, dir)
	assert.Check(t, len(during.processes) >= 4, "runner, PID 1, supervisor and agent: %q", during.processes)
	assert.Equal(t, during.mounts, before.mounts, "the lab's mounts are seen by the host")
	assert.Equal(t, during.links, before.links, "the lab's links are in the host's namespace")
	// The namespaces that only the lab has, nodes' and routers' among them:
	// those that its processes have open.
	agent := pidOf(t, dir, "agent")
	held, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", agent))
	assert.NilError(t, err)
	mine := slices.DeleteFunc(slices.Clone(during.namespaces), func(ns string) bool { return slices.Contains(hostNamespaces(t), ns) })
	for _, h := range held {
		if to, err := os.Readlink(h); err == nil && strings.HasPrefix(to, "net:[") && !slices.Contains(mine, to) {
			mine = append(mine, to)
		}
	}
	assert.Check(t, len(mine) >= 4+6, "pid, mnt, ipc, net and six hosts: %q", mine)
	pin(t, mine)
	assert.NilError(t, cmd.Process.Signal(syscall.SIGKILL))
	cmd.Wait()
	poll.WaitOn(t, func(poll.LogT) poll.Result {
		now := look(t, dir)
		if len(now.processes) > 0 {
			return poll.Continue("processes: %q", now.processes)
		}
		return ended(t, mine...)
	}, poll.WithTimeout(20*time.Second), poll.WithDelay(50*time.Millisecond))
	after := look(t, dir)
	assert.Equal(t, after.mounts, before.mounts)
	assert.Equal(t, after.links, before.links)
	poll.WaitOn(t, func(poll.LogT) poll.Result {
		if _, err := os.Stat(dir); !os.IsNotExist(err) {
			return poll.Continue("%s is still there: %v", dir, err)
		}
		return poll.Success()
	}, poll.WithTimeout(30*time.Second), poll.WithDelay(50*time.Millisecond))
}

// hostNamespaces are those that this test is in.
func hostNamespaces(t *testing.T) []string {
	t.Helper()
	var out []string
	links, err := filepath.Glob("/proc/self/ns/*")
	assert.NilError(t, err)
	for _, l := range links {
		to, err := os.Readlink(l)
		assert.NilError(t, err)
		out = append(out, to)
	}
	return out
}

// pidOf finds a process of the lab by its first argument.
func pidOf(t *testing.T, dir, argument string) int {
	t.Helper()
	procs, err := filepath.Glob("/proc/[0-9]*/cmdline")
	assert.NilError(t, err)
	for _, p := range procs {
		b, err := os.ReadFile(p)
		argv := strings.Split(string(b), "\x00")
		if err == nil && len(argv) > 1 && argv[1] == argument && strings.Contains(string(b), dir) {
			pid, err := strconv.Atoi(filepath.Base(filepath.Dir(p)))
			assert.NilError(t, err)
			return pid
		}
	}
	t.Fatalf("there is no %s of the lab in %s", argument, dir)
	return 0
}

// TestInterrupted: whoever interrupts a start hears that in a line, soon and
// however early it was, and nothing of the lab is left; a lab that starts knows
// nothing of the one before.
func TestInterrupted(t *testing.T) {
	nettest.NeedRoot(t)
	dir := runDir(t)
	before, err := rundir.Claim(dir, false)
	assert.NilError(t, err)
	assert.NilError(t, os.WriteFile(filepath.Join(dir, supervisor.OriginFile), []byte("{}"), 0o600))
	assert.NilError(t, before.Lock.Close()) // it was killed
	ctx, interrupt := context.WithCancel(t.Context())
	interrupt()
	start := time.Now()
	_, err = supervisor.Start(ctx, supervisor.Config{
		Name: "test", World: supervisor.Native, Spec: two(t), BinDir: binDir(t), RunDir: dir, KubernetesLess: true,
	})
	assert.Error(t, err, "lab test: context canceled")
	assert.Check(t, time.Since(start) < 10*time.Second, "it was killed after %v rather than ended", time.Since(start))
	for _, f := range []string{"control.sock", supervisor.OriginFile} {
		_, err := os.Stat(filepath.Join(dir, f))
		assert.ErrorIs(t, err, os.ErrNotExist)
	}
	again, err := supervisor.Start(t.Context(), supervisor.Config{ // nobody holds the directory
		Name: "test", World: supervisor.Native, Spec: two(t), BinDir: binDir(t), RunDir: dir, Ephemeral: true, KubernetesLess: true,
	})
	assert.NilError(t, err)
	assert.NilError(t, again.Close())
}
