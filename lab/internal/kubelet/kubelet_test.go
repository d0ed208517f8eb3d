package kubelet

import (
	"net/netip"
	"path/filepath"
	"testing"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
	"gotest.tools/v3/golden"

	"github.com/isthmus-net/isthmus/lab/internal/pods"
)

// What a node is configured with, byte by byte.
func TestConfig(t *testing.T) {
	n := &node{cfg: Config{
		NodeConfig: pods.NodeConfig{Cluster: "milan", Name: "node-1", Addr: netip.MustParseAddr("172.18.1.11"), ServiceCIDR: netip.MustParsePrefix("10.96.0.0/16")},
		Cgroup:     "isthmus-lab/two/milan-node-1",
		ClusterDNS: netip.MustParseAddr("10.96.0.10"),
	}}
	for _, name := range []string{"/etc/containerd/config.toml", "/etc/kubernetes/kubelet.yaml", "10-flannel.conflist"} {
		content, err := n.config(name)
		assert.NilError(t, err)
		golden.Assert(t, string(content), filepath.Base(name)+".golden")
	}
}

func TestPIDOf(t *testing.T) {
	for _, tt := range []struct {
		info map[string]string
		want int
		err  string
	}{
		{map[string]string{"info": `{"pid": 42, "snapshotter": "overlayfs"}`}, 42, ""},
		{map[string]string{"info": `{"pid": 0}`}, 0, "it has no process"},
		{map[string]string{}, 0, "containerd's information"},
	} {
		got, err := pidOf(tt.info)
		if tt.err != "" {
			assert.ErrorContains(t, err, tt.err)
			continue
		}
		assert.NilError(t, err)
		assert.Equal(t, got, tt.want)
	}
}

// What is missing is named, all of it.
func TestCheck(t *testing.T) {
	err := Check(t.TempDir(), t.TempDir())
	assert.Assert(t, err != nil)
	for _, want := range append(Programs(), Images()...) {
		assert.Check(t, is.Contains(err.Error(), want))
	}
}
