package rundir_test

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"

	"github.com/isthmus-net/isthmus/appliance/nettest"
	"github.com/isthmus-net/isthmus/lab/internal/rundir"
)

func gone(t *testing.T, path string) {
	t.Helper()
	_, err := os.Lstat(path)
	assert.Check(t, errors.Is(err, fs.ErrNotExist), "%s is still there", path)
}

// cgroups are the directories of a cgroup in this machine's hierarchies.
func cgroups(t *testing.T, path string) []string {
	t.Helper()
	var out []string
	for _, pattern := range []string{"/sys/fs/cgroup/" + path, "/sys/fs/cgroup/*/" + path} {
		found, err := filepath.Glob(pattern)
		assert.NilError(t, err)
		out = append(out, found...)
	}
	return out
}

func TestALabLivesAndDies(t *testing.T) {
	base := t.TempDir()
	dir := filepath.Join(base, "x")
	assert.Check(t, !rundir.Running(dir))
	lab, err := rundir.Claim(dir, false)
	assert.NilError(t, err)
	assert.Check(t, rundir.Running(dir))
	assert.Check(t, rundir.Mine(dir))
	dead, err := rundir.FindDead(base)
	assert.NilError(t, err)
	assert.Equal(t, len(dead), 0)

	_, err = rundir.Claim(dir, false)
	assert.ErrorIs(t, err, rundir.ErrInUse)
	short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	assert.ErrorIs(t, rundir.Remove(short, dir), rundir.ErrInUse)

	assert.NilError(t, os.WriteFile(filepath.Join(dir, "supervisor.log"), nil, 0o600))
	assert.NilError(t, lab.Lock.Close()) // what the kernel does for a process that is killed
	assert.Check(t, !rundir.Running(dir))
	dead, err = rundir.FindDead(base)
	assert.NilError(t, err)
	assert.DeepEqual(t, dead, []rundir.Dead{{Name: "x", Dir: dir}})
	assert.NilError(t, rundir.Remove(t.Context(), dir))
	gone(t, dir)
	assert.NilError(t, rundir.Remove(t.Context(), dir), "once more")
}

// Who waits for a lab that is ending removes it when its last process has ended.
func TestRemoveWaits(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "x")
	lab, err := rundir.Claim(dir, false)
	assert.NilError(t, err)
	removed := make(chan error)
	go func() { removed <- rundir.Remove(t.Context(), dir) }()
	select {
	case err := <-removed:
		t.Fatalf("it did not wait: %v", err)
	case <-time.After(60 * time.Millisecond):
	}
	assert.NilError(t, lab.Lock.Close())
	assert.NilError(t, <-removed)
	gone(t, dir)
}

// What is left of a lab goes when another one of its name comes.
func TestClaimOfADeadLabsDirectory(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "x")
	lab, err := rundir.Claim(dir, false)
	assert.NilError(t, err)
	assert.NilError(t, os.WriteFile(filepath.Join(dir, "supervisor.log"), nil, 0o600))
	assert.NilError(t, lab.Lock.Close())
	lab, err = rundir.Claim(dir, false)
	assert.NilError(t, err)
	defer lab.Lock.Close()
	gone(t, filepath.Join(dir, "supervisor.log"))
}

// A directory without a record is nobody's to remove: a lab of the world kind,
// or not a lab at all.
func TestNotARunDirectory(t *testing.T) {
	base := t.TempDir()
	dir := filepath.Join(base, "isthmus-lab-x")
	assert.NilError(t, os.MkdirAll(dir, 0o700))
	file := filepath.Join(dir, "kind.json")
	assert.NilError(t, os.WriteFile(file, nil, 0o600))
	dead, err := rundir.FindDead(base)
	assert.NilError(t, err)
	assert.Equal(t, len(dead), 0)
	assert.NilError(t, rundir.Remove(t.Context(), dir))
	_, err = os.Stat(file)
	assert.NilError(t, err)
	_, err = rundir.FindDead(filepath.Join(base, "nowhere"))
	assert.NilError(t, err)
}

// What a killed process leaves that makes or removes a run directory is no lab's: who looks, makes
// a lab or removes one removes it. Nothing else goes.
func TestUnfinished(t *testing.T) {
	claim := func(t *testing.T, base string) {
		lab, err := rundir.Claim(filepath.Join(base, "x"), false)
		assert.NilError(t, err)
		assert.NilError(t, lab.Lock.Close())
	}
	for name, act := range map[string]func(t *testing.T, base string){
		"look":  func(t *testing.T, base string) { assert.NilError(t, rundir.RemoveUnfinished(base)) },
		"claim": claim,
		"remove": func(t *testing.T, base string) {
			assert.NilError(t, rundir.Remove(t.Context(), filepath.Join(base, "x")))
			gone(t, filepath.Join(base, "x"))
		},
	} {
		t.Run(name, func(t *testing.T) {
			base := t.TempDir()
			if name == "remove" {
				claim(t, base)
			}
			for _, dir := range []string{".isthmus-lab-1", ".isthmus-lab-2/y", "somebodys"} {
				assert.NilError(t, os.MkdirAll(filepath.Join(base, dir), 0o700))
			}
			record := []byte(`{"cgroup": "isthmus-lab/y"}`)
			assert.NilError(t, os.WriteFile(filepath.Join(base, ".isthmus-lab-1/record.json"), record, 0o600))
			dead, err := rundir.FindDead(base)
			assert.NilError(t, err)
			for _, d := range dead {
				assert.Equal(t, d.Name, "x")
			}
			act(t, base)
			gone(t, filepath.Join(base, ".isthmus-lab-1"))
			gone(t, filepath.Join(base, ".isthmus-lab-2"))
			_, err = os.Stat(filepath.Join(base, "somebodys"))
			assert.NilError(t, err)
		})
	}
	assert.NilError(t, rundir.RemoveUnfinished(filepath.Join(t.TempDir(), "nowhere")))
}

// A directory that has something in it, but no record, is somebody's.
func TestClaimOfSomebodysDirectory(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "x")
	assert.NilError(t, os.MkdirAll(filepath.Join(dir, "theirs"), 0o700))
	_, err := rundir.Claim(dir, false)
	assert.ErrorContains(t, err, dir+" is there, without a record of a lab")
	_, err = os.Stat(filepath.Join(dir, "theirs"))
	assert.NilError(t, err)

	// One with nothing in it is free.
	empty := t.TempDir()
	lab, err := rundir.Claim(empty, false)
	assert.NilError(t, err)
	assert.Check(t, rundir.Running(empty))
	assert.NilError(t, lab.Lock.Close())

	// A lock alone is what an older lab has left.
	assert.NilError(t, os.RemoveAll(filepath.Join(dir, "theirs")))
	assert.NilError(t, os.WriteFile(filepath.Join(dir, "lock"), nil, 0o600))
	lab, err = rundir.Claim(dir, false)
	assert.NilError(t, err)
	assert.NilError(t, lab.Lock.Close())
}

// Two labs of one name, in two places, share no cgroup, and the death of one
// leaves the other's alone.
func TestCgroupsAreOfOneLab(t *testing.T) {
	nettest.NeedRoot(t)
	var labs []*rundir.Lab
	var dirs []string
	for range 2 {
		dir := filepath.Join(t.TempDir(), "rundir-test")
		lab, err := rundir.Claim(dir, true)
		assert.NilError(t, err)
		assert.Check(t, strings.HasPrefix(lab.Cgroup, "isthmus-lab/rundir-test-"), lab.Cgroup)
		assert.Check(t, len(cgroups(t, lab.Cgroup)) > 0, "%s has not been made", lab.Cgroup)
		labs, dirs = append(labs, lab), append(dirs, dir)
	}
	assert.Check(t, labs[0].Cgroup != labs[1].Cgroup)
	for _, h := range cgroups(t, labs[0].Cgroup) {
		assert.NilError(t, os.MkdirAll(filepath.Join(h, "milan-node-1", "kubepods"), 0o755))
	}
	for i, lab := range labs {
		assert.NilError(t, lab.Lock.Close())
		dead, err := rundir.FindDead(filepath.Dir(dirs[i]))
		assert.NilError(t, err)
		assert.DeepEqual(t, dead, []rundir.Dead{{Name: "rundir-test", Dir: dirs[i], Cgroup: lab.Cgroup}})
		assert.NilError(t, rundir.Remove(t.Context(), dirs[i]))
		assert.Check(t, is.Len(cgroups(t, lab.Cgroup), 0))
		gone(t, dirs[i])
		if i == 0 {
			assert.Check(t, len(cgroups(t, labs[1].Cgroup)) > 0, "the other lab's are gone too")
		}
	}
}

// The last lab that needs the controllers takes them back, whichever has given
// them.
func TestControllersAreHandedOver(t *testing.T) {
	nettest.NeedRoot(t)
	base := t.TempDir()
	put := func(name string, r rundir.Record) string {
		dir := filepath.Join(base, name)
		assert.NilError(t, os.MkdirAll(dir, 0o700))
		b, err := json.Marshal(r)
		assert.NilError(t, err)
		assert.NilError(t, os.WriteFile(filepath.Join(dir, "record.json"), b, 0o600))
		return dir
	}
	first := put("first", rundir.Record{Cgroup: "isthmus-lab/no-such-lab-1", Controllers: []string{"cpuset", "pids"}})
	put("simple", rundir.Record{}) // a lab without cgroups
	second := put("third", rundir.Record{Cgroup: "isthmus-lab/no-such-lab-2", Controllers: []string{"pids"}})
	assert.NilError(t, rundir.Remove(t.Context(), first))
	gone(t, first)
	var r rundir.Record
	b, err := os.ReadFile(filepath.Join(second, "record.json"))
	assert.NilError(t, err)
	assert.NilError(t, json.Unmarshal(b, &r))
	assert.DeepEqual(t, r, rundir.Record{Cgroup: "isthmus-lab/no-such-lab-2", Controllers: []string{"pids", "cpuset"}})
}

// The lab of somebody who has called sudo is that user's.
func TestOwner(t *testing.T) {
	nettest.NeedRoot(t)
	dir := filepath.Join(t.TempDir(), "x")
	t.Setenv("SUDO_UID", "4242")
	assert.Equal(t, rundir.Caller(), 4242)
	lab, err := rundir.Claim(dir, false)
	assert.NilError(t, err)
	assert.Check(t, rundir.Mine(dir))
	t.Setenv("SUDO_UID", "4343")
	assert.Check(t, !rundir.Mine(dir))
	uid, err := rundir.Owner(dir)
	assert.NilError(t, err)
	assert.Equal(t, uid, 4242)
	assert.Equal(t, rundir.UserName(uid), "user 4242")
	assert.Equal(t, rundir.UserName(0), "root (user 0)")

	// A dead lab is its owner's to remove.
	assert.NilError(t, lab.Lock.Close())
	for caller, want := range map[string]int{"4242": 1, "4343": 0} {
		t.Setenv("SUDO_UID", caller)
		dead, err := rundir.FindDead(filepath.Dir(dir))
		assert.NilError(t, err)
		assert.Check(t, is.Len(dead, want), "of %s", caller)
	}
}
