package controlplane_test

import (
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/appliance/nettest"
	"github.com/isthmus-net/isthmus/lab/internal/controlplane"
	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
	"gotest.tools/v3/poll"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
)

// thing is the smallest CRD that there can be.
const thing = `
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: { name: things.test.example }
spec:
  group: test.example
  names: { plural: things, singular: thing, kind: Thing, listKind: ThingList }
  scope: Namespaced
  versions: [{ name: v1, served: true, storage: true, schema: { openAPIV3Schema: { type: object } } }]
`

// warmConfig is a control plane with a CRD in a namespace of its own.
func warmConfig(t *testing.T, name, cache, addr string, services string) controlplane.Config {
	cfg := config(t, name)
	a := netip.MustParsePrefix(addr)
	cfg.NetNS, cfg.Address, cfg.ServiceCIDR = netNS(t, addr), a.Addr(), netip.MustParsePrefix(services)
	cfg.CacheDir, cfg.CRDs = cache, [][]byte{[]byte(thing)}
	return cfg
}

// The second control plane starts on a copy of the first one, and nothing in
// it is the first one's.
func TestWarmStart(t *testing.T) {
	nettest.NeedRoot(t)
	cache := filepath.Join(t.TempDir(), "copies")
	milan := start(t, warmConfig(t, "milan", cache, "172.18.1.2/24", "10.96.0.0/16"))
	warm, why := milan.Warm()
	assert.Assert(t, !warm)
	assert.Equal(t, why, "there was no copy")
	assert.Equal(t, len(copies(t, cache)), 1)
	assert.Assert(t, milan.Took()["CRDs"] > 0, "%v", milan.Took())
	rome := start(t, warmConfig(t, "rome", cache, "172.18.2.2/24", "10.97.0.0/16"))
	warm, why = rome.Warm()
	assert.Assert(t, warm, "%s", why)
	for _, of := range []struct {
		cp                *controlplane.ControlPlane
		address, services string
	}{{milan, "172.18.1.2", "10.96.0.0/16"}, {rome, "172.18.2.2", "10.97.0.0/16"}} {
		onlyOwn(t, of.cp, of.address, of.services)
		_, err := of.cp.Client().Discovery().RESTClient().Get().AbsPath("/apis/test.example/v1/namespaces/default/things").DoRaw(t.Context())
		assert.NilError(t, err)
	}
	var uids [2]map[string]string
	for i, cp := range []*controlplane.ControlPlane{milan, rome} {
		uids[i] = map[string]string{}
		list, err := cp.Client().CoreV1().Namespaces().List(t.Context(), metav1.ListOptions{})
		assert.NilError(t, err)
		for _, n := range list.Items {
			uids[i][n.Name] = string(n.UID)
		}
	}
	assert.Equal(t, len(uids[0]), 4, "%v", uids)
	for name := range uids[0] {
		assert.Assert(t, uids[0][name] != uids[1][name] && len(uids[1][name]) == 36, "namespace %s: %s %s", name, uids[0][name], uids[1][name])
	}
	t.Run("a node gets a podCIDR", func(t *testing.T) { podCIDR(t, rome) })
	t.Run("a node may not read what it has no business with", func(t *testing.T) { nodeAuthorizer(t, rome, rome.RESTConfig().Dial) })
}

// onlyOwn checks that a control plane has its own address, service CIDR and
// certificate authority, and no other's.
func onlyOwn(t *testing.T, cp *controlplane.ControlPlane, address, services string) {
	t.Helper()
	c := cp.Client()
	poll.WaitOn(t, func(poll.LogT) poll.Result { // an API server writes these when it is ready, and a controller manager after it
		_, noService := c.CoreV1().Services("default").Get(t.Context(), "kubernetes", metav1.GetOptions{})
		ips, noIPs := c.NetworkingV1().IPAddresses().List(t.Context(), metav1.ListOptions{})
		slices, noSlices := c.DiscoveryV1().EndpointSlices("default").List(t.Context(), metav1.ListOptions{LabelSelector: discoveryv1.LabelServiceName + "=kubernetes"})
		leases, noLeases := c.CoordinationV1().Leases("kube-system").List(t.Context(), metav1.ListOptions{LabelSelector: "apiserver.kubernetes.io/identity=kube-apiserver"})
		trust, noTrust := c.CoreV1().ConfigMaps("kube-system").Get(t.Context(), "extension-apiserver-authentication", metav1.GetOptions{})
		_, noRoot := c.CoreV1().ConfigMaps("default").Get(t.Context(), "kube-root-ca.crt", metav1.GetOptions{})
		err := errors.Join(noService, noIPs, noSlices, noLeases, noTrust, noRoot)
		if err != nil || len(ips.Items) == 0 || len(slices.Items) == 0 || len(slices.Items[0].Endpoints) == 0 || len(leases.Items) == 0 || trust.Data["requestheader-client-ca-file"] == "" {
			return poll.Continue("%v", err)
		}
		return poll.Success()
	}, poll.WithTimeout(2*time.Minute))
	svc, err := c.CoreV1().Services("default").Get(t.Context(), "kubernetes", metav1.GetOptions{})
	assert.NilError(t, err)
	first := netip.MustParsePrefix(services).Addr().Next().String()
	assert.DeepEqual(t, svc.Spec.ClusterIPs, []string{first})
	cidrs, err := c.NetworkingV1().ServiceCIDRs().List(t.Context(), metav1.ListOptions{})
	assert.NilError(t, err)
	assert.Assert(t, is.Len(cidrs.Items, 1))
	assert.DeepEqual(t, cidrs.Items[0].Spec.CIDRs, []string{services})
	ips, err := c.NetworkingV1().IPAddresses().List(t.Context(), metav1.ListOptions{})
	assert.NilError(t, err)
	assert.Assert(t, is.Len(ips.Items, 1))
	assert.Equal(t, ips.Items[0].Name, first)
	slices, err := c.DiscoveryV1().EndpointSlices("default").List(t.Context(), metav1.ListOptions{LabelSelector: discoveryv1.LabelServiceName + "=kubernetes"})
	assert.NilError(t, err)
	assert.Assert(t, is.Len(slices.Items, 1))
	assert.Assert(t, is.Len(slices.Items[0].Endpoints, 1))
	assert.DeepEqual(t, slices.Items[0].Endpoints[0].Addresses, []string{address})
	leases, err := c.CoordinationV1().Leases("kube-system").List(t.Context(), metav1.ListOptions{LabelSelector: "apiserver.kubernetes.io/identity=kube-apiserver"})
	assert.NilError(t, err)
	assert.Assert(t, is.Len(leases.Items, 1))

	kubeconfig, err := cp.Kubeconfig("admin")
	assert.NilError(t, err)
	rest, err := clientcmd.RESTConfigFromKubeConfig(kubeconfig)
	assert.NilError(t, err)
	ca := string(rest.CAData)
	trust, err := c.CoreV1().ConfigMaps("kube-system").Get(t.Context(), "extension-apiserver-authentication", metav1.GetOptions{})
	assert.NilError(t, err)
	assert.Equal(t, trust.Data["client-ca-file"], ca)
	assert.Equal(t, strings.Count(trust.Data["requestheader-client-ca-file"], "BEGIN CERTIFICATE"), 1)
	root, err := c.CoreV1().ConfigMaps("default").Get(t.Context(), "kube-root-ca.crt", metav1.GetOptions{})
	assert.NilError(t, err)
	assert.Equal(t, root.Data["ca.crt"], ca)
}

// A copy on which nothing can start costs time, not the lab.
func TestWarmStartOnABrokenCopy(t *testing.T) {
	nettest.NeedRoot(t)
	cache := filepath.Join(t.TempDir(), "copies")
	ns := netNS(t, "172.18.1.2/24")
	cfg := func() controlplane.Config {
		c := config(t, "milan")
		c.NetNS, c.Address, c.CacheDir = ns, netip.MustParseAddr("172.18.1.2"), cache
		return c
	}
	assert.NilError(t, start(t, cfg()).Close())
	for _, tc := range []struct {
		name, why string
		damage    func(t *testing.T, dir, db string)
	}{
		{"truncated", "member/snap/db is not what was saved; the copy is removed", func(t *testing.T, _, db string) {
			assert.NilError(t, os.Truncate(db, 4096))
		}},
		{"not etcd's", "the copy is removed", func(t *testing.T, dir, db string) {
			// With a sum that is right, so that etcd gets it.
			var sums map[string]string
			b, err := os.ReadFile(filepath.Join(dir, "sums.json"))
			assert.NilError(t, err)
			assert.NilError(t, json.Unmarshal(b, &sums))
			sums["member/snap/db"] = fmt.Sprintf("%x", sha256.Sum256([]byte("nothing")))
			b, err = json.Marshal(sums)
			assert.NilError(t, err)
			assert.NilError(t, os.WriteFile(filepath.Join(dir, "sums.json"), b, 0o600))
			assert.NilError(t, os.WriteFile(db, []byte("nothing"), 0o600))
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			have := copies(t, cache)
			assert.Equal(t, len(have), 1)
			tc.damage(t, have[0], filepath.Join(have[0], "member", "snap", "db"))
			cp := start(t, cfg())
			warm, why := cp.Warm()
			assert.Assert(t, !warm)
			assert.Assert(t, is.Contains(why, tc.why))
			assert.NilError(t, cp.Close())
			// The cold start has made a good one.
			assert.Equal(t, len(copies(t, cache)), 1)
		})
	}
	cp := start(t, cfg())
	warm, why := cp.Warm()
	assert.Assert(t, warm, "%s", why)
}

// What SaveEtcd saved is there again, even though etcd was never told.
func TestSaveEtcd(t *testing.T) {
	nettest.NeedRoot(t)
	ns := netNS(t, "172.18.1.2/24")
	cfg := func() controlplane.Config {
		c := config(t, "milan")
		c.NetNS, c.Address = ns, netip.MustParseAddr("172.18.1.2")
		return c
	}
	cp := start(t, cfg())
	make := func(c kubernetes.Interface, name string) {
		_, err := c.CoreV1().ConfigMaps("default").Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
		assert.NilError(t, err)
	}
	for i := range 100 {
		make(cp.Client(), fmt.Sprintf("before-%d", i))
	}
	dir := filepath.Join(t.TempDir(), "saved")
	begin := time.Now()
	assert.NilError(t, cp.SaveEtcd(dir))
	t.Logf("saved in %v", time.Since(begin))
	make(cp.Client(), "after")
	system, err := cp.Client().CoreV1().Namespaces().Get(t.Context(), "kube-system", metav1.GetOptions{})
	assert.NilError(t, err)
	assert.ErrorContains(t, cp.SaveEtcd(dir), "file exists")
	assert.NilError(t, cp.Close())

	c := cfg()
	c.EtcdData = dir
	again := start(t, c)
	list, err := again.Client().CoreV1().ConfigMaps("default").List(t.Context(), metav1.ListOptions{})
	assert.NilError(t, err)
	var before []string
	for _, m := range list.Items {
		assert.Assert(t, m.Name != "after")
		if strings.HasPrefix(m.Name, "before-") {
			before = append(before, m.Name)
		}
	}
	assert.Equal(t, len(before), 100)
	same, err := again.Client().CoreV1().Namespaces().Get(t.Context(), "kube-system", metav1.GetOptions{})
	assert.NilError(t, err)
	assert.Equal(t, same.UID, system.UID)
}

// copies are the directories that a cache has, without half-done ones.
func copies(t *testing.T, cache string) []string {
	t.Helper()
	all, err := filepath.Glob(filepath.Join(cache, "*"))
	assert.NilError(t, err)
	hidden, err := filepath.Glob(filepath.Join(cache, ".*"))
	assert.NilError(t, err)
	assert.Equal(t, len(hidden), 0, "%v", hidden)
	return all
}
