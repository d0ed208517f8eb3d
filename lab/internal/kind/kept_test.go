package kind

import (
	"os"
	"path/filepath"
	"testing"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
	"sigs.k8s.io/kind/pkg/log"

	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// TestRecover: a machine that is started again has no run directories, and the engine has the
// containers still. The lab is taken down by the copy of its record.
func TestRecover(t *testing.T) {
	top := parse(t, "clusters: { milan: { nodes: 2, podCIDR: 10.0.0.0/16, serviceCIDR: 10.96.0.0/16 } }")
	for _, tc := range []struct {
		name      string
		ephemeral bool
	}{{"stays", false}, {"ends", true}} {
		t.Run(tc.name, func(t *testing.T) {
			e := newEngine(t)
			e.foreign(t, "somebodys")
			base, kept := filepath.Join(t.TempDir(), "run"), filepath.Join(t.TempDir(), "kept")
			spec := Spec{Name: tc.name, Topology: top, Dir: filepath.Join(base, tc.name), BinDir: binaries(t), Engine: Engine{Name: "docker"}, Ephemeral: tc.ephemeral, Kept: kept}
			p, err := provider("docker", log.NoopLogger{})
			assert.NilError(t, err)
			l := newLab(spec.Dir, record{Name: tc.name, Engine: "docker", Kept: kept, Ephemeral: tc.ephemeral}, p)
			assert.NilError(t, l.claim())
			defer l.release()
			assert.NilError(t, l.begin("milan", ClusterName(tc.name, "milan")))
			e.foreign(t, ClusterName(tc.name, "milan"))
			l.record.Ready = true
			names, err := Recover(base, kept)
			assert.NilError(t, err)
			assert.Check(t, is.Len(names, 0), "it has its run directory")

			// Values of another start of the machine are not what labs have found.
			l.record.Boot, l.record.Host.Sysctls = "another", map[string]string{inotify: "1"}
			assert.NilError(t, l.save())
			assert.NilError(t, os.RemoveAll(base))
			// A copy that nobody can read does not keep the others from being found.
			bad := filepath.Join(kept, "bad"+keptSuffix)
			assert.NilError(t, os.WriteFile(bad, []byte("{"), 0o600))
			names, err = Recover(base, kept)
			assert.ErrorContains(t, err, "see that no container of the lab is left, and remove "+bad)
			assert.DeepEqual(t, names, []string{tc.name})
			assert.NilError(t, os.Remove(bad))
			names, err = Recover(base, kept)
			assert.NilError(t, err)
			assert.Check(t, is.Len(names, 0), "it was found already")

			_, err = Create(t.Context(), spec)
			assert.ErrorContains(t, err, "lab "+tc.name+" has lost its run directory, as when the machine is started again: lab down "+tc.name+" removes it")
			found, err := Open(spec.Dir)
			assert.NilError(t, err)
			now, err := os.ReadFile("/proc/sys/" + inotify)
			assert.NilError(t, err)
			assert.Equal(t, found.record.Host.Sysctls[inotify]+"\n", string(now))
			status, err := found.Status(t.Context())
			assert.ErrorContains(t, err, "lab down "+tc.name+" removes it")
			assert.Equal(t, status.Phase, world.PhaseFailed)
			dead, err := Dead(base)
			assert.NilError(t, err)
			if tc.ephemeral {
				assert.DeepEqual(t, dead, []string{tc.name})
				assert.NilError(t, RemoveDead(t.Context(), base, tc.name))
			} else {
				assert.Check(t, is.Len(dead, 0), "somebody wants it")
				assert.NilError(t, found.Down(t.Context()))
			}
			assert.DeepEqual(t, e.containers(t), []string{"somebodys-control-plane"})
			_, err = os.Stat(kept)
			assert.ErrorIs(t, err, os.ErrNotExist)
			left, err := os.ReadDir(base)
			assert.NilError(t, err)
			assert.Check(t, is.Len(left, 0))
		})
	}
}
