package controllers

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"gotest.tools/v3/assert"
	"gotest.tools/v3/poll"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/appliance/internal/kube"
	"github.com/isthmus-net/isthmus/appliance/nettest"
	"github.com/isthmus-net/isthmus/appliance/nettest/apiserver"
)

const token = "of-this-test-only"

// startAPIServer runs etcd and kube-apiserver until the test ends, with our
// CRDs.
func startAPIServer(t *testing.T) (*rest.Config, client.Client) {
	t.Helper()
	root, err := filepath.Abs("../../..")
	assert.NilError(t, err)
	binary := nettest.Built(t, "kubernetes")
	dir := t.TempDir()
	ports := nettest.FreePorts(t, 3)
	etcd, peer, api := ports[0], ports[1], ports[2]

	key, err := rsa.GenerateKey(rand.Reader, 2048)
	assert.NilError(t, err)
	accountKey := filepath.Join(dir, "sa.key")
	writeFile(t, accountKey, pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)}))
	tokens := filepath.Join(dir, "tokens.csv")
	writeFile(t, tokens, []byte(token+",admin,admin,system:masters\n"))

	start(t, dir, binary, "etcd", "--data-dir="+filepath.Join(dir, "etcd"),
		fmt.Sprintf("--listen-client-urls=http://127.0.0.1:%d", etcd), fmt.Sprintf("--listen-peer-urls=http://127.0.0.1:%d", peer))
	start(t, dir, binary, "kube-apiserver", fmt.Sprintf("--etcd-servers=http://127.0.0.1:%d", etcd),
		"--bind-address=127.0.0.1", "--advertise-address=127.0.0.1", "--endpoint-reconciler-type=none",
		fmt.Sprintf("--secure-port=%d", api), "--cert-dir="+filepath.Join(dir, "certs"),
		"--service-cluster-ip-range=10.96.0.0/16", "--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-key-file="+accountKey, "--service-account-signing-key-file="+accountKey,
		"--token-auth-file="+tokens, "--authorization-mode=RBAC", "--disable-admission-plugins=ServiceAccount")

	cfg := &rest.Config{
		Host: fmt.Sprintf("https://127.0.0.1:%d", api), BearerToken: token, QPS: -1,
		TLSClientConfig: rest.TLSClientConfig{Insecure: true}, // its certificate is its own
	}
	scheme := kube.Scheme()
	assert.NilError(t, apiextensionsv1.AddToScheme(scheme))
	transport, err := rest.HTTPClientFor(cfg)
	assert.NilError(t, err)
	poll.WaitOn(t, func(poll.LogT) poll.Result {
		res, err := transport.Get(cfg.Host + "/readyz")
		if err != nil {
			return poll.Continue("%v", err)
		}
		defer res.Body.Close()
		if res.StatusCode != 200 {
			return poll.Continue("/readyz: %s", res.Status)
		}
		return poll.Success()
	}, poll.WithTimeout(apiserver.StartTimeout), poll.WithDelay(100*time.Millisecond))
	apiserver.InstallCRDs(t, cfg, filepath.Join(root, "k8s", "crds"))
	c, err := client.New(cfg, client.Options{Scheme: scheme})
	assert.NilError(t, err)
	return cfg, c
}

// start runs a component until the test ends. When the test fails, so does
// its silence.
func start(t *testing.T, dir, binary, component string, args ...string) {
	t.Helper()
	log, err := os.Create(filepath.Join(dir, component+".log"))
	assert.NilError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	cmd := exec.CommandContext(ctx, binary, append([]string{component}, args...)...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	assert.NilError(t, cmd.Start())
	t.Cleanup(func() {
		cancel()
		_ = cmd.Wait() // killed
		log.Close()
		if t.Failed() {
			text, _ := os.ReadFile(log.Name())
			t.Logf("%s:\n%s", component, text[max(0, len(text)-2000):])
		}
	})
}

func writeFile(t *testing.T, path string, text []byte) {
	t.Helper()
	assert.NilError(t, os.WriteFile(path, text, 0o600))
}

// asController returns the configuration of the chart's ServiceAccount, with the
// roles that the chart gives it and nothing else, and the policies for what it writes.
func (w *world) asController(cfg *rest.Config) *rest.Config {
	w.t.Helper()
	chart, err := os.ReadFile("../../../k8s/testdata/minimal.yaml")
	assert.NilError(w.t, err)
	d := utilyaml.NewYAMLOrJSONDecoder(bytes.NewReader(chart), 4096)
	for roles := 0; ; {
		o := &unstructured.Unstructured{}
		if err := d.Decode(&o.Object); errors.Is(err, io.EOF) {
			assert.Assert(w.t, roles >= 6, "the chart has %d roles and bindings", roles)
			break
		} else {
			assert.NilError(w.t, err)
		}
		if o.GroupVersionKind().Group == rbacv1.GroupName {
			roles++
			assert.NilError(w.t, w.c.Create(w.t.Context(), o))
		} else if strings.HasPrefix(o.GetName(), "isthmus-controller-") && o.GroupVersionKind().Group == admissionregistrationv1.GroupName {
			assert.NilError(w.t, w.c.Create(w.t.Context(), o))
		}
	}
	const account = "system:serviceaccount:liqo:isthmus-controller"
	own := rest.CopyConfig(cfg)
	own.Impersonate = rest.ImpersonationConfig{UserName: account, Groups: []string{"system:serviceaccounts", "system:authenticated"}}
	c, err := client.New(own, client.Options{Scheme: kube.Scheme()})
	assert.NilError(w.t, err)
	poll.WaitOn(w.t, func(poll.LogT) poll.Result { // an authorizer learns of roles a moment later
		if err := c.List(w.t.Context(), &corev1.NodeList{}); err != nil {
			return poll.Continue("%v", err)
		}
		return poll.Success()
	}, poll.WithTimeout(waitTime), poll.WithDelay(20*time.Millisecond))
	return own
}
