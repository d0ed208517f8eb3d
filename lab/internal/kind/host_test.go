package kind

import (
	"os"
	"path/filepath"
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

// A lab's clients of Podman go by its file; one without a file changes nothing.
func TestUsePodmanSettings(t *testing.T) {
	t.Setenv(podmanVariable, "the user's")
	dir := t.TempDir()
	assert.NilError(t, usePodmanSettings(dir))
	assert.Equal(t, os.Getenv(podmanVariable), "the user's")
	assert.NilError(t, writePodmanSettings(dir)) // the user knows better
	_, err := os.Stat(filepath.Join(dir, podmanFile))
	assert.ErrorIs(t, err, os.ErrNotExist)
	assert.NilError(t, os.WriteFile(filepath.Join(dir, podmanFile), nil, 0o600))
	assert.NilError(t, usePodmanSettings(dir))
	assert.Equal(t, os.Getenv(podmanVariable), filepath.Join(dir, podmanFile))
}
