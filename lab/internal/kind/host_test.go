package kind

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sync/errgroup"
	"gotest.tools/v3/assert"
)

// TestLeave has labs end at once: one of them is the last, and puts back what labs have changed.
func TestLeave(t *testing.T) {
	bin, base := t.TempDir(), t.TempDir()
	engine, said := filepath.Join(bin, "engine"), filepath.Join(bin, "said")
	assert.NilError(t, os.WriteFile(engine, []byte("#!/bin/sh\necho \"$@\" >>"+said+"\n"), 0o755))
	const labs = 8
	all := make([]*Lab, labs)
	for i := range all {
		all[i] = &Lab{dir: filepath.Join(base, fmt.Sprint("lab-", i)), record: record{
			Engine: engine, Host: host{Sysctls: map[string]string{"no/such": "1"}, Engine: engine, Network: "kind"},
		}}
		assert.NilError(t, os.Mkdir(all[i].dir, 0o700))
		assert.NilError(t, all[i].save())
	}
	// Another lab has only been claimed: it has not looked at the machine yet.
	claimed := filepath.Join(base, "claimed")
	assert.NilError(t, os.Mkdir(claimed, 0o700))
	assert.NilError(t, (&Lab{dir: claimed, record: record{Engine: engine}}).save())
	g := errgroup.Group{}
	for _, l := range all {
		g.Go(l.leave)
	}
	assert.NilError(t, g.Wait())
	text, err := os.ReadFile(said)
	assert.NilError(t, err)
	assert.Equal(t, strings.Count(string(text), "network rm kind\n"), 1, "%s", text)
	left, err := os.ReadDir(base)
	assert.NilError(t, err)
	assert.Equal(t, len(left), 1, "%v", left)
}

// TestToRestore puts back what a lab has changed, also where somebody's containers run.
func TestToRestore(t *testing.T) {
	h := host{Sysctls: map[string]string{inotify: "128", bridgeFilters[0]: "1", forwarding[0]: "0"}}
	assert.DeepEqual(t, h.toRestore(false), h.Sysctls)
	assert.DeepEqual(t, h.toRestore(true), map[string]string{inotify: "128", bridgeFilters[0]: "1"})
	assert.Equal(t, len(h.Sysctls), 3)
}

// What Podman is told is what the machine makes necessary, and no more.
func TestPodmanSettings(t *testing.T) {
	const limits = "[containers]\ndefault_ulimits = [\"nofile=20000:20000\", \"nproc=32768:32768\"]\n"
	const runc = "[engine]\nruntime = \"runc\"\n"
	for _, tt := range []struct {
		name                    string
		hasSysResource, cgroup1 bool
		want                    string
	}{
		{"a machine of one's own", true, false, ""},
		{"limits can't be raised", false, false, limits},
		{"control groups of version 1", true, true, runc},
		{"both", false, true, limits + runc},
	} {
		assert.Equal(t, podmanSettings(tt.hasSysResource, tt.cgroup1, 20000, 32768), tt.want, tt.name)
	}
}

// TestNetworkOf follows what kind's library does: the user's network, for the engines that have a
// variable for it.
func TestNetworkOf(t *testing.T) {
	t.Setenv("KIND_EXPERIMENTAL_PODMAN_NETWORK", "")
	t.Setenv("KIND_EXPERIMENTAL_DOCKER_NETWORK", "mine")
	for engine, want := range map[string]string{"docker": "mine", "podman": "kind", "nerdctl": "kind"} {
		assert.Equal(t, networkOf(engine), want, engine)
	}
	t.Setenv("KIND_EXPERIMENTAL_PODMAN_NETWORK", "other")
	assert.Equal(t, networkOf("podman"), "other")
}

// TestRaise: a sysctl that can't be written is named, with what to do; one that is high enough
// is left alone.
func TestRaise(t *testing.T) {
	const readOnly = "kernel/ngroups_max" // nobody writes it, root neither
	is, err := readNumber("/proc/sys/" + readOnly)
	assert.NilError(t, err)
	assert.NilError(t, raise(readOnly, int(is), "it is enough"))
	assert.ErrorContains(t, raise(readOnly, 1<<30, "nodes need so many"), fmt.Sprintf("sysctl kernel.ngroups_max is %d, and can't be set to 1073741824: nodes need so many: ", is))
	assert.ErrorContains(t, raise(readOnly, 1<<30, "nodes need so many"), "set it on the machine, or run the lab where /proc/sys can be written")
}
