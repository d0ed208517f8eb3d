package controlplane_test

import (
	"context"
	"net"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/appliance/nettest"
	"github.com/isthmus-net/isthmus/lab/internal/controlplane"
	"github.com/isthmus-net/isthmus/lab/internal/controlplane/controlplanetest"
	"github.com/isthmus-net/isthmus/lab/internal/netns"
	"github.com/vishvananda/netlink"
	vnetns "github.com/vishvananda/netns"
	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
	"gotest.tools/v3/poll"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
)

// outage is how long the scenarios stop the API server.
const outage = 10 * time.Second

func config(t *testing.T, name string) controlplane.Config {
	return controlplane.Config{
		Name: name, Dir: t.TempDir(), Binary: nettest.Built(t, "kubernetes"),
		Address:     netip.MustParseAddr("127.0.0.1"),
		ServiceCIDR: netip.MustParsePrefix("10.96.0.0/16"),
		PodCIDR:     netip.MustParsePrefix("10.0.0.0/16"),
		Nodes:       []controlplane.Node{{Name: "node-1", Addr: netip.MustParseAddr("172.18.1.11")}},
	}
}

// netNS makes a namespace with lo and, on a bridge, the address addr.
func netNS(t *testing.T, addr string) *os.File {
	t.Helper()
	nettest.NeedRoot(t)
	ns, err := netns.New()
	assert.NilError(t, err)
	t.Cleanup(func() { ns.Close() })
	h, err := netlink.NewHandleAt(vnetns.NsHandle(ns.Fd()))
	assert.NilError(t, err)
	defer h.Close()
	lo, err := h.LinkByName("lo")
	assert.NilError(t, err)
	assert.NilError(t, h.LinkSetUp(lo))
	br := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "lan"}}
	assert.NilError(t, h.LinkAdd(br))
	a, err := netlink.ParseAddr(addr)
	assert.NilError(t, err)
	assert.NilError(t, h.AddrAdd(br, a))
	assert.NilError(t, h.LinkSetUp(br))
	return ns
}

func start(t *testing.T, cfg controlplane.Config) *controlplane.ControlPlane {
	t.Helper()
	begin := time.Now()
	cp, err := controlplane.Start(t.Context(), cfg)
	assert.NilError(t, err)
	t.Cleanup(func() { assert.Check(t, cp.Close()) })
	t.Logf("%s ready after %v", cfg.Name, time.Since(begin).Round(time.Millisecond))
	return cp
}

// Two control planes with the same addresses, in namespaces of their own.
func TestTwoControlPlanesWithTheSameAddress(t *testing.T) {
	var cps []*controlplane.ControlPlane
	for _, name := range []string{"milan", "rome"} {
		cfg := config(t, name)
		cfg.NetNS = netNS(t, "172.18.1.2/24")
		cfg.Address = netip.MustParseAddr("172.18.1.2")
		cps = append(cps, start(t, cfg))
	}
	for _, cp := range cps {
		version, err := cp.Client().Discovery().ServerVersion()
		assert.NilError(t, err)
		assert.Assert(t, strings.HasPrefix(version.GitVersion, "v1."), version.GitVersion)
	}
	_, err := cps[0].Client().CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "only-here"}}, metav1.CreateOptions{})
	assert.NilError(t, err)
	_, err = cps[1].Client().CoreV1().Namespaces().Get(t.Context(), "only-here", metav1.GetOptions{})
	assert.Assert(t, apierrors.IsNotFound(err), "%v", err)

	t.Run("the service kubernetes has the advertised address", func(t *testing.T) {
		poll.WaitOn(t, func(poll.LogT) poll.Result {
			l, err := cps[0].Client().DiscoveryV1().EndpointSlices("default").List(t.Context(), metav1.ListOptions{LabelSelector: discoveryv1.LabelServiceName + "=kubernetes"})
			if err != nil || len(l.Items) != 1 || len(l.Items[0].Endpoints) != 1 {
				return poll.Continue("%v %v", err, l)
			}
			return poll.Compare(is.DeepEqual(l.Items[0].Endpoints[0].Addresses, []string{"172.18.1.2"}))
		}, poll.WithTimeout(2*time.Minute))
	})
	t.Run("a node gets a podCIDR", func(t *testing.T) { podCIDR(t, cps[0]) })
	t.Run("a node may not read what it has no business with", func(t *testing.T) { nodeAuthorizer(t, cps[0], cps[0].RESTConfig().Dial) })
	t.Run("stop and start the API server", func(t *testing.T) { restartAPIServer(t, cps[0]) })
}

func podCIDR(t *testing.T, cp *controlplane.ControlPlane) {
	_, err := cp.Client().CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1"}}, metav1.CreateOptions{})
	assert.NilError(t, err)
	poll.WaitOn(t, func(poll.LogT) poll.Result {
		n, err := cp.Client().CoreV1().Nodes().Get(t.Context(), "node-1", metav1.GetOptions{})
		if err != nil || n.Spec.PodCIDR == "" {
			return poll.Continue("no podCIDR: %v", err)
		}
		p, err := netip.ParsePrefix(n.Spec.PodCIDR)
		if err != nil || p.Bits() != 24 || !netip.MustParsePrefix("10.0.0.0/16").Contains(p.Addr()) {
			return poll.Error(err)
		}
		return poll.Success()
	}, poll.WithTimeout(2*time.Minute))
}

func nodeAuthorizer(t *testing.T, cp *controlplane.ControlPlane, dial dialer) {
	creds, err := cp.NodeCredentials("node-1")
	assert.NilError(t, err)
	rc, err := clientcmd.RESTConfigFromKubeConfig(creds.Kubeconfig)
	assert.NilError(t, err)
	rc.Dial = dial
	c, err := kubernetes.NewForConfig(rc)
	assert.NilError(t, err)
	_, err = c.CoreV1().Nodes().Get(t.Context(), "node-1", metav1.GetOptions{})
	assert.NilError(t, err)
	_, err = c.CoreV1().Secrets("kube-system").List(t.Context(), metav1.ListOptions{})
	assert.Assert(t, apierrors.IsForbidden(err), "%v", err)
	_, err = cp.NodeCredentials("node-9")
	assert.ErrorContains(t, err, `node "node-9" was not in Config.Nodes`)
}

func restartAPIServer(t *testing.T, cp *controlplane.ControlPlane) {
	before := cp.Running()
	assert.NilError(t, cp.StopComponent(controlplane.APIServer))
	assert.ErrorIs(t, syscall.Kill(before[controlplane.APIServer], 0), syscall.ESRCH)
	// As long as the scenario api-server-gone stops it: the others must not
	// give up meanwhile.
	gone := time.NewTimer(outage)
	defer gone.Stop()
	_, err := cp.Client().CoreV1().Nodes().List(t.Context(), metav1.ListOptions{})
	assert.ErrorContains(t, err, "connection refused")
	<-gone.C
	assert.NilError(t, cp.StartComponent(t.Context(), controlplane.APIServer))
	nodes, err := cp.Client().CoreV1().Nodes().List(t.Context(), metav1.ListOptions{})
	assert.NilError(t, err)
	assert.Equal(t, len(nodes.Items), 1, "the data survived")
	after := cp.Running()
	for _, component := range []string{controlplane.Etcd, controlplane.ControllerManager, controlplane.Scheduler} {
		assert.Equal(t, after[component], before[component], "only the API server was stopped")
	}
	assert.ErrorContains(t, cp.StopComponent("apiserver"), "no component \"apiserver\"; there are etcd, kube-apiserver")
}

func TestBadConfigurationsSayWhatToDo(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*testing.T, *controlplane.Config)
		want   []string
	}{
		"no binary": {func(_ *testing.T, c *controlplane.Config) { c.Binary = "/nowhere/kubernetes" }, []string{"make kubernetes"}},
		"bad CIDR":  {func(_ *testing.T, c *controlplane.Config) { c.PodCIDR = netip.MustParsePrefix("10.3.0.1/16") }, []string{`PodCIDR "10.3.0.1/16" is not the address of a network, such as 10.3.0.0/16`}},
		"empty":     {func(_ *testing.T, c *controlplane.Config) { *c = controlplane.Config{} }, []string{"Binary is empty", "Address is not set", `ServiceCIDR "invalid Prefix" is not the address of a network, such as 10.0.0.0/16`}},
		"port in use": {func(t *testing.T, c *controlplane.Config) {
			l, err := netns.Listen(t.Context(), nil, "tcp", "127.0.0.1:0")
			assert.NilError(t, err)
			t.Cleanup(func() { l.Close() })
			c.Ports = controlplanetest.FreePorts(t)
			c.Ports.APIServer = netip.MustParseAddrPort(l.Addr().String()).Port()
		}, []string{"cluster bad: kube-apiserver cannot listen on 127.0.0.1:", "address already in use: end what uses the port (ss -ltnp names it), or choose another one in Config.Ports"}},
		"an address of somebody else": {func(_ *testing.T, c *controlplane.Config) {
			c.Address = netip.MustParseAddr("192.0.2.1")
		}, []string{"kube-apiserver cannot listen on 192.0.2.1:6443", "cannot assign requested address: Config.Address must be on a link of Config.NetNS that is up"}},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := config(t, "bad")
			tc.change(t, &cfg)
			_, err := controlplane.Start(t.Context(), cfg)
			for _, want := range tc.want {
				assert.ErrorContains(t, err, want)
			}
		})
	}
}

// A component that cannot start says why, at once and not after the timeout.
func TestAComponentThatEndsIsExplained(t *testing.T) {
	cfg := config(t, "broken")
	cfg.Ports = controlplanetest.FreePorts(t)
	cfg.ServiceCIDR = netip.MustParsePrefix("10.96.0.0/31") // too small
	begin := time.Now()
	_, err := controlplane.Start(t.Context(), cfg)
	assert.ErrorContains(t, err, "kube-apiserver of cluster broken ended")
	assert.Assert(t, time.Since(begin) < 3*time.Minute) // which is less than the timeout
}

type dialer = func(ctx context.Context, network, address string) (net.Conn, error)
