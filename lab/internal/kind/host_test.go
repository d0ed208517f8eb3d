package kind

import (
	"testing"

	"gotest.tools/v3/assert"
)

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
