package supervisor

import (
	"testing"

	"gotest.tools/v3/assert"
)

// What the caller's environment says of other clusters, ways and languages does
// not reach a lab.
func TestEnvironment(t *testing.T) {
	caller := map[string]string{
		"PATH": "/usr/bin:/bin", "HOME": "/home/alice", "LANG": "de_DE.UTF-8", "LC_ALL": "de_DE.UTF-8", "TZ": "Asia/Tokyo",
		"HTTPS_PROXY": "http://proxy.example:3128", "https_proxy": "http://proxy.example:3128", "NO_PROXY": "localhost",
		"KUBECONFIG": "/home/alice/.kube/config", "KUBERNETES_SERVICE_HOST": "10.96.0.1", "NODE_NAME": "worker-7",
		"CI": "true", "GOFLAGS": "-mod=vendor", "GOGC": "50", "XDG_CACHE_HOME": "/cache", "LAB_KERNEL_DEB": "/k.deb",
	}
	env := environment(func(name string) string { return caller[name] }, Config{BinDir: "/lab/bin", RunDir: "/run/isthmus-lab/x"})
	assert.DeepEqual(t, env, []string{
		"PATH=/lab/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C", "TZ=UTC", "ISTHMUS_LAB_RUN_DIR=/run/isthmus-lab/x",
		"HOME=/home/alice", "XDG_CACHE_HOME=/cache", "GOGC=50", "LAB_KERNEL_DEB=/k.deb",
	})
}
