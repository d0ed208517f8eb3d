package supervisor_test

import (
	"crypto/rand"
	"encoding/json"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"
	"gotest.tools/v3/poll"

	"github.com/isthmus-net/isthmus/appliance/nettest"
	"github.com/isthmus-net/isthmus/lab/internal/kubelet"
	"github.com/isthmus-net/isthmus/lab/internal/rundir"
	"github.com/isthmus-net/isthmus/lab/internal/supervisor"
	"github.com/isthmus-net/isthmus/lab/internal/topology"
	"github.com/isthmus-net/isthmus/lab/internal/vm"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// sandboxed is set in the environment of this test in its own mount and network
// namespace. That is the host of the labs it starts: nobody else changes it, and
// what is written to it is found, wherever it is.
const sandboxed = "LAB_TEST_SANDBOX"

// Places in the sandbox.
const (
	aside   = "/mnt" // what the test itself has there is not looked at
	written = aside + "/written"
	self    = aside + "/self" // this program
)

// TestNothingOfALabStays lists everything of the host that a lab could change,
// before it comes up and after it has gone: by down, and by kill -9 and the
// next command.
func TestNothingOfALabStays(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.Need(t, "ip", "nft")
	if os.Getenv(sandboxed) == "" {
		cmd := exec.Command("/proc/self/exe", "-test.run=^TestNothingOfALabStays$", "-test.v", fmt.Sprintf("-test.short=%v", testing.Short()))
		cmd.Env = append(os.Environ(), sandboxed+"=1")
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
		runtime.LockOSThread() // the child dies with the thread that started it
		defer runtime.UnlockOSThread()
		out, err := cmd.CombinedOutput()
		t.Logf("%s", out)
		assert.NilError(t, err)
		return
	}
	makeSandbox(t)
	t.Run("network only", func(t *testing.T) {
		nothingStays(t, supervisor.Config{Spec: two(t), KubernetesLess: true})
	})
	t.Run("nodes with containerd", func(t *testing.T) {
		nettest.Slow(t, "starts two control planes, each with a node that has containerd")
		for _, b := range append([]string{"kubernetes", "kube-proxy", "isthmus", "lab", "probe", "cni/bridge"}, kubelet.Programs()...) {
			nettest.Built(t, b)
		}
		for _, image := range kubelet.Images() {
			nettest.Built(t, filepath.Join(world.ImagesDir, image))
		}
		top, err := topology.Load(filepath.Join("testdata", "real.yaml"))
		assert.NilError(t, err)
		nothingStays(t, supervisor.Config{Spec: world.Plan(top)})
	})
}

// makeSandbox hides /run and /tmp, but for a checkout in them, and keeps aside what is written to the rest.
func makeSandbox(t *testing.T) {
	t.Helper()
	assert.NilError(t, unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""))
	exe, err := os.Executable()
	assert.NilError(t, err)
	assert.NilError(t, unix.Mount("aside", aside, "tmpfs", 0, ""))
	assert.NilError(t, os.WriteFile(self, nil, 0o755))
	assert.NilError(t, unix.Mount(exe, self, "", unix.MS_BIND, ""))
	for _, dir := range []string{"/etc", "/home", "/opt", "/root", "/srv", "/usr", "/var"} {
		if info, err := os.Lstat(dir); err != nil || !info.IsDir() {
			continue
		}
		upper, work := written+dir, aside+"/work"+dir
		assert.NilError(t, os.MkdirAll(upper, 0o755))
		assert.NilError(t, os.MkdirAll(work, 0o755))
		assert.NilError(t, unix.Mount("overlay", dir, "overlay", 0, "lowerdir="+dir+",upperdir="+upper+",workdir="+work))
	}
	wd, err := os.Getwd()
	assert.NilError(t, err)
	checkout := filepath.Dir(binDir(t))
	assert.NilError(t, os.Mkdir(aside+"/checkout", 0o755))
	assert.NilError(t, unix.Mount(checkout, aside+"/checkout", "", unix.MS_BIND, ""))
	for _, dir := range []string{"/run", "/tmp"} {
		assert.NilError(t, unix.Mount("empty", dir, "tmpfs", 0, "mode=1777"))
		if strings.HasPrefix(checkout, dir+"/") {
			assert.NilError(t, os.MkdirAll(checkout, 0o755))
			assert.NilError(t, unix.Mount(aside+"/checkout", checkout, "", unix.MS_BIND, ""))
			assert.NilError(t, os.Chdir(wd)) // it was that of the directory that is hidden now
		}
	}
}

func nothingStays(t *testing.T, cfg supervisor.Config) {
	t.Helper()
	cfg.Name = "leftovers-" + strings.ToLower(rand.Text()[:8]) // which no other lab's cgroups have in their names
	cfg.World, cfg.BinDir, cfg.Executable = supervisor.Native, binDir(t), self
	cfg.Progress = func(p world.Progress) { t.Log(p.Message, p.Took) }
	t.Setenv("LAB_TEST_MARK", cfg.Name)
	ctx := t.Context()
	before := hostState(t, cfg.Name)

	c, err := supervisor.Start(ctx, cfg)
	assert.NilError(t, err)
	during := hostState(t, cfg.Name)
	for _, want := range []string{"file /run/isthmus-lab/" + cfg.Name + "/control.sock", "process " + self + " supervise", "process " + self + " agent"} {
		assert.Check(t, slices.ContainsFunc(slices.Collect(maps.Keys(during)), func(s string) bool { return strings.HasPrefix(s, want) }), "there is no %s", want)
	}
	assert.NilError(t, c.Down(ctx))
	assert.DeepEqual(t, hostState(t, cfg.Name), before)

	c, err = supervisor.Start(ctx, cfg)
	assert.NilError(t, err)
	s, err := c.Status(ctx)
	assert.NilError(t, err)
	record := readRecord(t, s.RunDir)
	assert.NilError(t, syscall.Kill(s.PID, syscall.SIGKILL))
	poll.WaitOn(t, func(poll.LogT) poll.Result {
		if all := processes(t, cfg.Name); len(all) > 0 {
			return poll.Continue("processes: %q", all)
		}
		if rundir.Running(s.RunDir) {
			return poll.Continue("the lock of %s is held", s.RunDir)
		}
		return poll.Success()
	}, poll.WithTimeout(20*time.Second), poll.WithDelay(50*time.Millisecond))
	dead, err := rundir.FindDead(rundir.Base())
	assert.NilError(t, err)
	assert.DeepEqual(t, dead, []rundir.Dead{{Name: cfg.Name, Dir: s.RunDir, Cgroup: record.Cgroup}})
	killed := hostState(t, cfg.Name)
	_, there := killed["cgroup "+record.Cgroup]
	assert.Equal(t, there, !cfg.KubernetesLess, "a lab that was killed leaves its cgroups: %q", killed)
	assert.NilError(t, rundir.Remove(ctx, dead[0].Dir))
	after := hostState(t, cfg.Name)
	assert.DeepEqual(t, after, before)
}

func readRecord(t *testing.T, dir string) (r rundir.Record) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(dir, "record.json"))
	assert.NilError(t, err)
	assert.NilError(t, json.Unmarshal(b, &r))
	return r
}

// hostState is what a lab could change of its host.
func hostState(t *testing.T, lab string) map[string]string {
	t.Helper()
	out := map[string]string{}
	for _, dir := range []string{"/run", "/tmp", written} {
		files(t, out, dir)
	}
	for _, argv := range [][]string{{"ip", "-o", "link"}, {"ip", "rule"}, {"ip", "route", "show", "table", "all"}, {"nft", "list", "ruleset"}} {
		text, err := exec.Command(argv[0], argv[1:]...).CombinedOutput()
		assert.NilError(t, err, "%q: %s", argv, text)
		out[strings.Join(argv, " ")] = string(text)
	}
	mounts, err := os.ReadFile("/proc/self/mounts")
	assert.NilError(t, err)
	var ours strings.Builder
	for line := range strings.Lines(string(mounts)) {
		// Podman's, which other tests of this machine use at the same time.
		if !strings.Contains(line, " /var/lib/containers/") && !strings.Contains(line, " /run/netns/netns-") {
			ours.WriteString(line)
		}
	}
	out["mounts"] = ours.String()
	settings(t, out)
	cgroups(t, out, lab)
	for _, p := range processes(t, lab) {
		out["process "+p] = ""
	}
	loops, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	assert.NilError(t, err)
	for _, f := range loops {
		if b, err := os.ReadFile(f); err == nil && strings.Contains(string(b), "isthmus") {
			out[f] = string(b)
		}
	}
	return out
}

// files enters all that is in a directory, but what the lab keeps in its cache
// for the next one.
func files(t *testing.T, out map[string]string, dir string) {
	t.Helper()
	cache, err := vm.DefaultCacheDir()
	assert.NilError(t, err)
	err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		switch name := strings.TrimPrefix(path, written); {
		case err != nil:
			return err
		case name == cache:
			return fs.SkipDir
		case strings.HasPrefix(cache, name+"/"): // the way to it
		case path != dir:
			out["file "+name] = d.Type().String()
		}
		return nil
	})
	assert.NilError(t, err)
}

// settings enters the sysctls of the network namespace, and those that a kubelet
// wants of a whole machine.
func settings(t *testing.T, out map[string]string) {
	t.Helper()
	err := filepath.WalkDir("/proc/sys/net", func(path string, d fs.DirEntry, err error) error {
		// How many connections there are is no setting.
		if err != nil || d.IsDir() || d.Name() == "nf_conntrack_count" {
			return err
		}
		if b, err := os.ReadFile(path); err == nil {
			out[path] = string(b)
		}
		return nil
	})
	assert.NilError(t, err)
	for _, name := range []string{"vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops", "kernel/keys/root_maxkeys", "kernel/keys/root_maxbytes"} {
		b, err := os.ReadFile("/proc/sys/" + name)
		if !os.IsNotExist(err) {
			assert.NilError(t, err)
			out[name] = string(b)
		}
	}
}

// cgroups enters those of the lab, that of all labs when it has none, and what
// the children of the first cgroup have.
func cgroups(t *testing.T, out map[string]string, lab string) {
	t.Helper()
	const root = "/sys/fs/cgroup"
	hierarchies, err := filepath.Glob(root + "/*")
	assert.NilError(t, err)
	for _, h := range append(hierarchies, root) {
		if info, err := os.Lstat(h); err != nil || !info.IsDir() {
			continue
		}
		labs, _ := filepath.Glob(h + "/isthmus-lab/*/")
		if _, err := os.Stat(h + "/isthmus-lab"); err == nil && len(labs) == 0 {
			out["cgroup "+h+"/isthmus-lab"] = "of no lab"
		}
		_ = filepath.WalkDir(h, func(path string, d fs.DirEntry, err error) error { // others go meanwhile
			if err == nil && d.IsDir() && strings.Contains(path, lab) {
				out["cgroup "+strings.TrimPrefix(path, h+"/")] = ""
			}
			return nil
		})
	}
	if b, err := os.ReadFile(root + "/cgroup.subtree_control"); err == nil {
		out["controllers"] = string(b)
	}
}

// processes are those that a lab has started.
func processes(t *testing.T, lab string) []string {
	t.Helper()
	all, err := filepath.Glob("/proc/[0-9]*")
	assert.NilError(t, err)
	var out []string
	for _, p := range all {
		if p == fmt.Sprintf("/proc/%d", os.Getpid()) {
			continue
		}
		env, _ := os.ReadFile(p + "/environ") // it may have ended
		cmdline, _ := os.ReadFile(p + "/cmdline")
		if strings.Contains(string(env)+string(cmdline), lab) {
			out = append(out, strings.TrimSpace(strings.ReplaceAll(string(cmdline), "\x00", " ")))
		}
	}
	return out
}
