// Package apiserver starts a real Kubernetes API server for tests.
package apiserver

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"gotest.tools/v3/assert"
	"gotest.tools/v3/poll"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/isthmus-net/isthmus/appliance/nettest"
)

// StartTimeout is how long etcd, an API server and its CRDs may each take to be there. They take some
// 10 s together on an idle machine; on a slow one with other tests beside them they were
// not there after four minutes (see PLANES in the Makefile).
const StartTimeout = 5 * time.Minute

// Start starts etcd and kube-apiserver of bin/kubernetes with the CRDs in a directory, and returns them
// with the configuration of an administrator. They end with the test. The API server keeps its
// certificates when it is stopped and started again.
//
// It does not use [envtest.Environment.Start]: that waits 5 s for the namespace "default", and
// nobody can tell it to wait longer.
func Start(t testing.TB, crds string) (*envtest.ControlPlane, *rest.Config) {
	t.Helper()
	bin, dir := nettest.Built(t, "kubernetes"), t.TempDir()
	for _, name := range []string{"etcd", "kube-apiserver", "kubectl"} {
		assert.NilError(t, os.Symlink(bin, filepath.Join(dir, name)))
	}
	certs := filepath.Join(dir, "certs")
	assert.NilError(t, os.Mkdir(certs, 0o700))
	plane := &envtest.ControlPlane{
		KubectlPath: filepath.Join(dir, "kubectl"),
		Etcd:        &envtest.Etcd{Path: filepath.Join(dir, "etcd"), StartTimeout: StartTimeout, StopTimeout: time.Minute},
	}
	plane.Etcd.Configure().Disable("advertise-client-urls").Disable("unsafe-no-fsync")
	api := plane.GetAPIServer()
	api.Path, api.CertDir = filepath.Join(dir, "kube-apiserver"), certs
	// It is killed then: it would wait a minute for its watches to end.
	api.StartTimeout, api.StopTimeout = StartTimeout, 2*time.Second
	err := plane.Start()
	for tries := 1; err != nil && tries < 5; tries++ { // somebody may have taken a port that was free when it was chosen
		err = plane.Start()
	}
	assert.NilError(t, err)
	t.Cleanup(func() { _ = plane.Stop() })

	admin, err := plane.AddUser(envtest.User{Name: "admin", Groups: []string{"system:masters"}}, &rest.Config{QPS: 1000, Burst: 2000})
	assert.NilError(t, err)
	cl, err := client.New(admin.Config(), client.Options{})
	assert.NilError(t, err)
	poll.WaitOn(t, func(poll.LogT) poll.Result {
		if err := cl.Get(t.Context(), client.ObjectKey{Name: corev1.NamespaceDefault}, &corev1.Namespace{}); err != nil {
			return poll.Continue("namespace %s: %v", corev1.NamespaceDefault, err)
		}
		return poll.Success()
	}, poll.WithTimeout(StartTimeout), poll.WithDelay(50*time.Millisecond))
	InstallCRDs(t, admin.Config(), crds)
	return plane, admin.Config()
}

// InstallCRDs makes the CRDs in a directory, and waits until the API server serves all of their kinds.
func InstallCRDs(t testing.TB, config *rest.Config, dir string) {
	t.Helper()
	_, err := envtest.InstallCRDs(config, envtest.CRDInstallOptions{Paths: []string{dir}, ErrorIfPathMissing: true, MaxTime: StartTimeout})
	assert.NilError(t, err)
}
