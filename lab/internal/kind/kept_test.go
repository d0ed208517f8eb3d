package kind

import (
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
	"sigs.k8s.io/kind/pkg/log"

	"github.com/isthmus-net/isthmus/appliance/nettest"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// keptLab is a lab with one cluster in the engine, and a copy of its record.
func keptLab(t *testing.T, e engine, base, kept, name string, ephemeral bool) *Lab {
	t.Helper()
	p, err := provider("docker", log.NoopLogger{})
	assert.NilError(t, err)
	now, err := thisStart()
	assert.NilError(t, err)
	l := newLab(filepath.Join(base, name), record{Name: name, Engine: "docker", Kept: kept, Start: now, Started: time.Now(), Ephemeral: ephemeral, Host: host{Sysctls: map[string]string{inotify: "1"}}}, p)
	assert.NilError(t, l.claim())
	l.say = func(message string) { t.Error(message) }
	assert.NilError(t, l.begin("milan", ClusterName(name, "milan")))
	e.foreign(t, ClusterName(name, "milan"))
	l.record.Ready = true
	assert.NilError(t, l.save())
	if !ephemeral {
		l.release()
	}
	return l
}

// restart makes all as it is for labs after the machine was started again.
func restart(t *testing.T, base string, labs ...*Lab) {
	t.Helper()
	for _, l := range labs {
		l.release()
		l.record.Start.Boot = "the one before"
		assert.NilError(t, l.save())
	}
	assert.NilError(t, os.RemoveAll(base))
}

// TestRecover: a machine that is started again has no run directories, and the engine has the
// containers still. The lab is taken down by the copy of its record.
func TestRecover(t *testing.T) {
	top := parse(t, "clusters: { milan: { nodes: 1, podCIDR: 10.0.0.0/16, serviceCIDR: 10.96.0.0/16 } }")
	for name, ephemeral := range map[string]bool{"stays": false, "ends": true} {
		t.Run(name, func(t *testing.T) {
			e := newEngine(t)
			e.foreign(t, "somebodys")
			base, kept := filepath.Join(t.TempDir(), "run"), filepath.Join(t.TempDir(), "kept")
			restart(t, base, keptLab(t, e, base, kept, name, ephemeral))
			// A copy that nobody can read does not keep the others from being found.
			bad := filepath.Join(kept, "bad"+keptSuffix)
			assert.NilError(t, os.WriteFile(bad, []byte("{"), 0o600))
			// Docker starts nodes, and makes what they share.
			assert.NilError(t, os.MkdirAll(filepath.Join(base, name, sharedDir), 0o755))
			names, err := Lost(base, kept)
			assert.ErrorContains(t, err, "see that no container of the lab is left, and remove "+bad)
			assert.DeepEqual(t, names, []string{name})
			names, err = Recover(base, kept)
			assert.ErrorContains(t, err, "see that no container of the lab is left, and remove "+bad)
			assert.DeepEqual(t, names, []string{name})
			assert.NilError(t, os.Remove(bad))
			names, err = Recover(base, kept)
			assert.NilError(t, err)
			assert.Check(t, is.Len(names, 0), "it was found already")
			names, err = Lost(base, kept)
			assert.NilError(t, err)
			assert.DeepEqual(t, names, []string{name})

			dir := filepath.Join(base, name)
			_, err = Create(t.Context(), Spec{Name: name, Topology: top, Dir: dir, BinDir: binaries(t), Engine: Engine{Name: "docker"}, Kept: kept})
			assert.Error(t, err, "lab "+name+" is from before the machine was started again: lab down "+name+" removes it")
			found, err := Open(dir)
			assert.NilError(t, err)
			// What the labs had found of the machine was of the start before.
			assert.DeepEqual(t, found.record.Host.Sysctls, map[string]string{})
			status, err := found.Status(t.Context())
			assert.ErrorIs(t, err, ErrLost)
			assert.Equal(t, status.Phase, world.PhaseFailed)
			dead, err := Dead(base)
			assert.NilError(t, err)
			if ephemeral {
				assert.DeepEqual(t, dead, []string{name})
				assert.NilError(t, RemoveDead(t.Context(), base, name))
			} else {
				assert.Check(t, is.Len(dead, 0), "somebody wants it")
				assert.NilError(t, found.Down(t.Context()))
			}
			assert.DeepEqual(t, e.containers(t), []string{"somebodys-control-plane"})
			_, err = os.Stat(kept)
			assert.ErrorIs(t, err, fs.ErrNotExist)
			left, err := os.ReadDir(base)
			assert.NilError(t, err)
			assert.Check(t, is.Len(left, 0))
		})
	}
}

// TestNotLost: a lab of this start of the machine is left alone wherever its run directory is, since
// its processes may live. So is one of another machine that has the same home directories.
func TestNotLost(t *testing.T) {
	for name, change := range map[string]func(*start){
		"this start":      func(*start) {},
		"another machine": func(s *start) { *s = start{"another", "another"} },
	} {
		t.Run(name, func(t *testing.T) {
			e := newEngine(t)
			base, kept := filepath.Join(t.TempDir(), "run"), t.TempDir()
			l := keptLab(t, e, base, kept, "lives", true)
			defer l.release()
			change(&l.record.Start)
			assert.NilError(t, l.save())
			elsewhere := filepath.Join(t.TempDir(), "run")
			names, err := Recover(elsewhere, kept)
			assert.NilError(t, err)
			assert.Check(t, is.Len(names, 0))
			_, err = os.Stat(elsewhere)
			assert.ErrorIs(t, err, fs.ErrNotExist)
			assert.Check(t, is.Len(e.containers(t), 1))
		})
	}
}

// TestNamesOfLost: somebody has removed what a lost lab had left, and has made a lab that has the same
// names. It stays.
func TestNamesOfLost(t *testing.T) {
	e := newEngine(t)
	base, kept := filepath.Join(t.TempDir(), "run"), t.TempDir()
	l := keptLab(t, e, base, kept, "lost", false)
	assert.NilError(t, l.begin("rome", ClusterName("lost", "rome")))
	e.foreign(t, ClusterName("lost", "rome"))
	l.record.Outside = []outsideRecord{{Container: "lab-user"}}
	e.foreign(t, "lost") // the script has one label of each container
	restart(t, base, l)
	newer := []byte(time.Now().Add(time.Hour).Format(time.RFC3339Nano))
	assert.NilError(t, os.WriteFile(filepath.Join(e.dir, "lost-control-plane", "created"), newer, 0o600))
	created := filepath.Join(e.dir, ClusterName("lost", "milan")+"-control-plane", "created")
	assert.NilError(t, os.WriteFile(created, newer, 0o600))
	_, err := Recover(base, kept)
	assert.NilError(t, err)
	found, err := Open(l.dir)
	assert.NilError(t, err)
	milan := ClusterName("lost", "milan")
	assert.Error(t, found.Down(t.Context()), milan+" and the hosts outside of docker stay, since they were made after lab lost; if nobody needs them, run: docker ps -aq --filter label=io.x-k8s.kind.cluster="+
		milan+" | xargs -r docker rm -f -v; docker ps -aq --filter label=isthmus-lab=lost | xargs -r docker rm -f -v")
	assert.DeepEqual(t, e.containers(t), []string{"lost-control-plane", milan + "-control-plane"})
	_, err = os.Stat(l.dir)
	assert.ErrorIs(t, err, fs.ErrNotExist)
}

// TestOwnerOfLost: a lab that root finds belongs to whose it was.
func TestOwnerOfLost(t *testing.T) {
	nettest.NeedRoot(t)
	e := newEngine(t)
	base, kept := filepath.Join(t.TempDir(), "run"), t.TempDir()
	t.Setenv("SUDO_UID", "65534")
	l := keptLab(t, e, base, kept, "nobodys", false)
	restart(t, base, l)
	t.Setenv("SUDO_UID", "")
	names, err := Lost(base, kept)
	assert.NilError(t, err)
	assert.Check(t, is.Len(names, 0), "it is somebody else's")
	_, err = Recover(base, kept)
	assert.NilError(t, err)
	info, err := os.Stat(l.dir)
	assert.NilError(t, err)
	assert.Equal(t, info.Sys().(*syscall.Stat_t).Uid, uint32(65534))
}

// TestCopies: a lab without a place for a copy goes on without one, and a claim that is withdrawn
// leaves the copy of another lab.
func TestCopies(t *testing.T) {
	base := t.TempDir()
	blocked := filepath.Join(t.TempDir(), "file")
	assert.NilError(t, os.WriteFile(blocked, nil, 0o600))
	var said []string
	l := newLab(filepath.Join(base, "nowhere"), record{Name: "nowhere", Engine: "docker", Kept: filepath.Join(blocked, "kept")}, nil)
	assert.NilError(t, l.claim())
	l.say = func(message string) { said = append(said, message) }
	assert.NilError(t, l.save())
	assert.Check(t, is.Len(said, 1))
	assert.Check(t, is.Contains(said[0], blocked))
	assert.NilError(t, l.save())
	assert.NilError(t, l.withdraw())

	kept := t.TempDir()
	old := filepath.Join(kept, "again"+keptSuffix)
	assert.NilError(t, os.WriteFile(old, []byte("{}"), 0o600))
	l = newLab(filepath.Join(base, "again"), record{Name: "again", Engine: "docker", Kept: kept, Started: time.Now()}, nil)
	assert.NilError(t, l.claim())
	assert.NilError(t, l.withdraw())
	_, err := os.Stat(old)
	assert.NilError(t, err)
}
