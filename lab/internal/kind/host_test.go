package kind

import (
	"testing"

	"gotest.tools/v3/assert"
)

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
