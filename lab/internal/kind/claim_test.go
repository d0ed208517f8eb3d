package kind

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
	"gotest.tools/v3/poll"

	"github.com/isthmus-net/isthmus/lab/internal/rundir"
)

// makerVariable has this test make a lab in a process of its own, which is killed.
const makerVariable = "ISTHMUS_TEST_MAKE_LAB"

// TestKilled kills the process that makes a lab, wherever it is: the next one finds the lab dead,
// and what it takes down has all that was made, and nothing of somebody else's.
func TestKilled(t *testing.T) {
	top := parse(t, "clusters: { milan: { nodes: 2, podCIDR: 10.0.0.0/16, serviceCIDR: 10.96.0.0/16 } }")
	const lab = "killed-kind-vxlan"
	if dir := os.Getenv(makerVariable); dir != "" {
		_, err := Create(t.Context(), Spec{Name: lab, Topology: top, Dir: dir, BinDir: os.Getenv("ENGINE_BIN"), Engine: Engine{Name: "docker"}, Ephemeral: true})
		t.Fatal("nobody has killed this process: ", err)
	}
	self, err := os.Executable()
	assert.NilError(t, err)
	// The engine's client stops at such a call: its process goes on, as those of a real one do.
	for _, at := range []string{"info", "images", "load", "ps", "run", "inspect", "exec", "logs"} {
		t.Run(at, func(t *testing.T) {
			e := newEngine(t)
			dir := filepath.Join(t.TempDir(), lab)
			e.foreign(t, "somebodys")
			maker := exec.CommandContext(t.Context(), self, "-test.run", "^TestKilled$")
			maker.Env = append(os.Environ(), makerVariable+"="+dir, "ENGINE_BIN="+binaries(t), "ENGINE_STOPS="+at)
			assert.NilError(t, maker.Start())
			stopped := filepath.Join(e.dir, "stopped")
			poll.WaitOn(t, func(poll.LogT) poll.Result {
				if _, err := os.Stat(stopped); err == nil {
					return poll.Success()
				}
				return poll.Continue("the engine is not asked for %s", at)
			}, poll.WithTimeout(time.Minute))

			base := filepath.Dir(dir)
			dead, err := Dead(base)
			assert.NilError(t, err)
			assert.Check(t, is.Len(dead, 0), "it lives")
			assert.NilError(t, maker.Process.Kill())
			_ = maker.Wait()                       // it was killed
			assert.NilError(t, os.Remove(stopped)) // the client goes on

			// A client that was just being started has the lock until it runs.
			poll.WaitOn(t, func(poll.LogT) poll.Result {
				if dead, err = Dead(base); err != nil {
					return poll.Error(err)
				}
				if len(dead) == 0 {
					return poll.Continue("no lab is dead")
				}
				return poll.Success()
			}, poll.WithTimeout(time.Minute))
			assert.DeepEqual(t, dead, []string{lab})
			// One that was finished since somebody found it dead is a lab like others.
			l, err := Open(dir)
			assert.NilError(t, err)
			l.record.Ready, l.record.Ephemeral = true, false
			assert.NilError(t, l.save())
			assert.ErrorIs(t, RemoveDead(t.Context(), base, lab), rundir.ErrInUse)
			l.record.Ready, l.record.Ephemeral = false, true
			assert.NilError(t, l.save())
			_, err = Create(t.Context(), Spec{Name: lab, Topology: top, Dir: dir, BinDir: binaries(t), Engine: Engine{Name: "docker"}})
			assert.ErrorContains(t, err, "was killed: lab down "+lab+" removes it")
			assert.NilError(t, RemoveDead(t.Context(), base, lab))
			poll.WaitOn(t, func(poll.LogT) poll.Result {
				if hasClient("docker", ClusterName(lab, "milan")) {
					return poll.Continue("a client is at work still")
				}
				return poll.Success()
			}, poll.WithTimeout(time.Minute))
			assert.DeepEqual(t, e.containers(t), []string{"somebodys-control-plane"})
			left, err := os.ReadDir(base)
			assert.NilError(t, err)
			assert.Check(t, is.Len(left, 0))
			assert.ErrorIs(t, RemoveDead(t.Context(), base, lab), rundir.ErrInUse)
			assert.Check(t, !slices.ContainsFunc(e.calls(t, "rm "), func(call string) bool { return call == "rm -f -v somebodys-control-plane" }))
		})
	}
}

// loopVariable has this test make and remove a run directory again and again, in a process of its
// own, which is killed.
const loopVariable = "ISTHMUS_TEST_LOOP"

// TestUnfinished kills a process that makes and removes a run directory, wherever it is: the
// directory has a record, or is not there. The next lab takes away what is left.
func TestUnfinished(t *testing.T) {
	const name = "killed-kind-vxlan"
	if dir := os.Getenv(loopVariable); dir != "" {
		for {
			l := newLab(dir, record{Name: name}, nil)
			assert.NilError(t, l.claim())
			l.release()
			assert.NilError(t, l.withdraw())
		}
	}
	self, err := os.Executable()
	assert.NilError(t, err)
	base := t.TempDir()
	dir := filepath.Join(base, name)
	for n := range 15 {
		maker := exec.CommandContext(t.Context(), self, "-test.run", "^TestUnfinished$")
		maker.Env = append(os.Environ(), loopVariable+"="+dir)
		maker.Stdout, maker.Stderr = os.Stderr, os.Stderr
		assert.NilError(t, maker.Start())
		poll.WaitOn(t, func(poll.LogT) poll.Result {
			if _, err := os.Stat(dir); err == nil {
				return poll.Success()
			}
			return poll.Continue("no run directory comes")
		}, poll.WithDelay(time.Duration(n+1)*100*time.Microsecond), poll.WithTimeout(time.Minute))
		assert.NilError(t, maker.Process.Kill())
		_ = maker.Wait() // it was killed
		_, err := readRecord(dir)
		if _, there := os.Stat(dir); there == nil {
			assert.NilError(t, err)
			assert.NilError(t, os.RemoveAll(dir))
		}
	}
	// What is left is no lab.
	left := filepath.Join(base, ".isthmus-lab-1")
	assert.NilError(t, os.MkdirAll(left, 0o700))
	assert.NilError(t, record{Name: name}.write(left))
	names, err := List(base)
	assert.NilError(t, err)
	assert.Check(t, is.Len(names, 0))

	l := newLab(dir, record{Name: name}, nil)
	assert.NilError(t, l.claim())
	entries, err := os.ReadDir(base)
	assert.NilError(t, err)
	assert.Check(t, is.Len(entries, 1))
	again := newLab(dir, record{Name: name}, nil)
	assert.ErrorContains(t, again.claim(), "lab "+name+" was begun")
	assert.NilError(t, l.withdraw())
	l.release()
	assert.NilError(t, again.claim())
	again.release()
}
