package world

import (
	"os"
	"path/filepath"
	"testing"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/lab/internal/pods"
)

// TestImages: nodes have images of the public system where somebody has built its daemons,
// each of the one program, under the name by which that is called.
func TestImages(t *testing.T) {
	bin := t.TempDir()
	assert.Equal(t, len(images(bin)), 2)
	program := filepath.Join(bin, PublicProgram)
	assert.NilError(t, os.WriteFile(program, nil, 0o755))
	all := images(bin)
	assert.Equal(t, len(all), 2+len(publicImages))
	assert.DeepEqual(t, all["ghcr.io/liqotech/gateway/wireguard:dev"], pods.Image{Binary: program, Path: "/usr/bin/liqo-wireguard"})
}
