package kubelet

import (
	"errors"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
	"gotest.tools/v3/golden"

	"github.com/isthmus-net/isthmus/appliance/nettest"
	"github.com/isthmus-net/isthmus/lab/internal/pods"
)

// What a node is configured with, byte by byte.
func TestConfig(t *testing.T) {
	n := &node{cfg: Config{
		NodeConfig: pods.NodeConfig{Cluster: "milan", Name: "node-1", Addr: netip.MustParseAddr("172.18.1.11"), ServiceCIDR: netip.MustParsePrefix("10.96.0.0/16")},
		Cgroup:     "isthmus-lab/two/milan-node-1",
		ClusterDNS: netip.MustParseAddr("10.96.0.10"),
	}}
	for _, name := range []string{"/etc/containerd/config.toml", "/etc/kubernetes/kubelet.yaml", "/etc/cni/net.d/10-flannel.conflist"} {
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

// A cgroup is there in all hierarchies with what a kubelet needs, and gone with
// all that was made below it and above it.
func TestCgroup(t *testing.T) {
	nettest.NeedRoot(t)
	c := cgroup("isthmus-lab-test/" + filepath.Base(t.TempDir()) + "/node")
	assert.NilError(t, c.make())
	assert.NilError(t, c.make(), "once more")
	all, err := hierarchies()
	assert.NilError(t, err)
	for _, h := range all {
		below := filepath.Join(h, string(c), "kubepods", "besteffort")
		assert.NilError(t, os.MkdirAll(below, 0o755))
		if cpus, err := os.ReadFile(filepath.Join(h, string(c), "cpuset.cpus")); err == nil && !strings.HasSuffix(h, "unified") {
			mine, err := os.ReadFile(filepath.Join(h, "cpuset.cpus"))
			assert.Check(t, errors.Is(err, fs.ErrNotExist) || is.Equal(string(cpus), string(mine))().Success(), "%s: %q of %q", h, cpus, mine)
		}
	}
	raised := 0
	for _, h := range all {
		for name, want := range map[string]string{"cpu.shares": cpuShares, "cpu.weight": cpuWeight} {
			if got, err := os.ReadFile(filepath.Join(h, "isthmus-lab-test", name)); err == nil {
				assert.Equal(t, strings.TrimSpace(string(got)), want)
				raised++
			}
		}
	}
	assert.Equal(t, raised, 1, "processor time")
	assert.NilError(t, c.remove())
	assert.NilError(t, c.remove(), "once more")
	for _, h := range all {
		_, err := os.Stat(filepath.Join(h, "isthmus-lab-test"))
		assert.Check(t, errors.Is(err, fs.ErrNotExist), "%s: %v", h, err)
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
