package controlplane

import (
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"gotest.tools/v3/assert"
)

func TestKeysAreTakenOver(t *testing.T) {
	dir := t.TempDir()
	server := netip.MustParseAddrPort("172.18.1.2:6443")
	node := Node{Name: "node-1", Addr: netip.MustParseAddr("172.18.1.11")}
	was, err := newPKI(filepath.Join(dir, "was"), "milan", server, netip.MustParsePrefix("10.96.0.0/16"), []Node{node})
	assert.NilError(t, err)
	cp := &ControlPlane{cfg: Config{Name: "milan"}, pki: was}
	assert.NilError(t, cp.SaveKeys(filepath.Join(dir, "saved")))
	assert.NilError(t, os.RemoveAll(was.dir)) // the lab has gone

	is, err := copyPKI(filepath.Join(dir, "saved"), filepath.Join(dir, "is"))
	assert.NilError(t, err)
	assert.DeepEqual(t, is.admin(server), was.admin(server))
	assert.DeepEqual(t, is.kubeconfigs, was.kubeconfigs)
	assert.DeepEqual(t, is.nodes, was.nodes)
	for _, name := range []string{"ca.crt", "sa.key", "apiserver.crt", Scheduler + ".kubeconfig"} {
		_, err := os.Stat(is.path(name))
		assert.NilError(t, err)
	}

	assert.NilError(t, os.Remove(filepath.Join(dir, "saved", savedPKIFile)))
	_, err = copyPKI(filepath.Join(dir, "saved"), filepath.Join(dir, "again"))
	assert.ErrorIs(t, err, os.ErrNotExist)
}
