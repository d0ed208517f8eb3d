package pods_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/appliance/nettest"
	"github.com/isthmus-net/isthmus/lab/internal/containerinit"
	"github.com/isthmus-net/isthmus/lab/internal/controlplane"
	"github.com/isthmus-net/isthmus/lab/internal/netns"
	"github.com/isthmus-net/isthmus/lab/internal/pods"
	"github.com/vishvananda/netlink"
	vnetns "github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"
	"gotest.tools/v3/poll"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/yaml"
)

// insideEnv marks the test process that has namespaces of its own.
const insideEnv = "ISTHMUS_TEST_INSIDE"

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == containerinit.Argument {
		os.Exit(containerinit.Init())
	}
	if os.Getuid() != 0 || os.Getenv(insideEnv) != "" {
		if os.Getenv(insideEnv) != "" {
			if err := inside(); err != nil {
				fmt.Fprintln(os.Stderr, "test namespaces:", err)
				os.Exit(1)
			}
		}
		os.Exit(m.Run())
	}
	// The tests run in PID, mount, network and IPC namespaces of their own:
	// whatever happens, nothing is left of them.
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), insideEnv+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWNS | unix.CLONE_NEWNET | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS,
	}
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(cmd.ProcessState.ExitCode())
}

func inside() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	return unix.Mount("proc", "/proc", "proc", 0, "")
}

const (
	cluster = "milan"
	image   = "box:test"
)

// world is a cluster of two nodes on one LAN, and a host outside.
//
//	        lan 172.18.1.0/24
//	──┬───────────┬───────────┬───────────┬───────────┬──
//	 .1          .2          .11         .12         .50
//	router      control     node-1      node-2      outside
//	            plane
type world struct {
	cp       *controlplane.ControlPlane
	client   kubernetes.Interface
	registry *pods.Registry
	outside  *os.File
	cpNS     *os.File
	dir      string
	bin      string
	box      string
	nodes    map[string]*os.File
	stop     context.CancelFunc
	ended    *sync.WaitGroup
}

func newWorld(t *testing.T) *world {
	t.Helper()
	nettest.NeedRoot(t)
	nettest.Built(t, "cni/bridge")
	nettest.Built(t, "kube-proxy")
	bin := filepath.Dir(nettest.Built(t, "kubernetes"))
	w := &world{registry: pods.NewRegistry(), dir: t.TempDir(), bin: bin, nodes: map[string]*os.File{}, ended: &sync.WaitGroup{}}
	w.box = filepath.Join(w.dir, "box")
	build := exec.Command("go", "build", "-o", w.box, "./testdata/box")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	out, err := build.CombinedOutput()
	assert.NilError(t, err, "%s", out)

	lan := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "lan"}}
	assert.NilError(t, netlink.LinkAdd(lan))
	assert.NilError(t, netlink.LinkSetUp(lan))
	router, err := netlink.ParseAddr("172.18.1.1/24")
	assert.NilError(t, err)
	assert.NilError(t, netlink.AddrAdd(lan, router))
	assert.NilError(t, os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0))
	host := func(name, addr string) *os.File {
		ns, err := netns.New()
		assert.NilError(t, err)
		assert.NilError(t, netlink.LinkAdd(&netlink.Veth{
			LinkAttrs: netlink.LinkAttrs{Name: name, MasterIndex: lan.Index},
			PeerName:  "eth0", PeerNamespace: netlink.NsFd(ns.Fd()),
		}))
		link, err := netlink.LinkByName(name)
		assert.NilError(t, err)
		assert.NilError(t, netlink.LinkSetUp(link))
		h, err := netlink.NewHandleAt(vnetns.NsHandle(ns.Fd()))
		assert.NilError(t, err)
		defer h.Close()
		for _, l := range []string{"lo", "eth0"} {
			link, err := h.LinkByName(l)
			assert.NilError(t, err)
			assert.NilError(t, h.LinkSetUp(link))
			if l == "eth0" {
				a, err := netlink.ParseAddr(addr + "/24")
				assert.NilError(t, err)
				assert.NilError(t, h.AddrAdd(link, a))
				_, all, err := parseCIDR("0.0.0.0/0")
				assert.NilError(t, err)
				assert.NilError(t, h.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Dst: all, Gw: netip.MustParseAddr("172.18.1.1").AsSlice()}))
			}
		}
		return ns
	}
	w.cpNS, w.outside = host("cp", "172.18.1.2"), host("outside", "172.18.1.50")
	w.nodes["node-1"], w.nodes["node-2"] = host("node-1", "172.18.1.11"), host("node-2", "172.18.1.12")

	podCIDR, serviceCIDR := netip.MustParsePrefix("10.0.0.0/16"), netip.MustParsePrefix("10.96.0.0/16")
	addrs := map[string]netip.Addr{"node-1": netip.MustParseAddr("172.18.1.11"), "node-2": netip.MustParseAddr("172.18.1.12")}
	begin := time.Now()
	w.cp, err = controlplane.Start(t.Context(), controlplane.Config{
		Name: cluster, Dir: filepath.Join(w.dir, "cp"), Binary: filepath.Join(bin, "kubernetes"),
		Address: netip.MustParseAddr("172.18.1.2"), ServiceCIDR: serviceCIDR, PodCIDR: podCIDR, NetNS: w.cpNS,
		Nodes: []controlplane.Node{{Name: "node-1", Addr: addrs["node-1"]}, {Name: "node-2", Addr: addrs["node-2"]}},
	})
	assert.NilError(t, err)
	t.Cleanup(func() { assert.Check(t, w.cp.Close()) })
	w.client = w.cp.Client()
	t.Logf("control plane ready after %v", time.Since(begin).Round(time.Millisecond))

	ctx, cancel := context.WithCancel(context.Background())
	w.stop = cancel
	logs, err := os.Create(filepath.Join(w.dir, "kubelet.log"))
	assert.NilError(t, err)
	for name, ns := range w.nodes {
		creds, err := w.cp.NodeCredentials(name)
		assert.NilError(t, err)
		mode := "nftables"
		if name == "node-2" {
			mode = "iptables"
		}
		w.ended.Go(func() {
			err := pods.RunNode(ctx, pods.NodeConfig{
				Cluster: cluster, Name: name, Addr: addrs[name], NetNS: ns,
				Kubeconfig: creds.Kubeconfig, ServingCert: creds.ServingCert, ServingKey: creds.ServingKey, ClientCA: creds.ClientCA,
				Images: map[string]pods.Image{image: {Binary: w.box, Env: []string{"FROM_IMAGE=yes"}}},
				// This test's own binary, so that what is tested is what was compiled.
				Init:   []string{"/proc/self/exe", containerinit.Argument},
				BinDir: bin, Dir: filepath.Join(w.dir, name), ServiceCIDR: serviceCIDR, ClusterCIDR: podCIDR,
				KubeProxy: mode, KubeProxyKubeconfig: creds.KubeProxyKubeconfig,
				Registry: w.registry, Logger: slog.New(slog.NewTextHandler(logs, &slog.HandlerOptions{Level: slog.LevelDebug})),
			})
			assert.Check(t, err)
		})
	}
	t.Cleanup(func() {
		cancel()
		w.ended.Wait()
		logs.Close()
		if t.Failed() {
			b, _ := os.ReadFile(logs.Name())
			t.Logf("kubelets:\n%s", b[max(0, len(b)-8000):])
		}
	})
	routed := map[string]bool{}
	for name := range w.nodes {
		poll.WaitOn(t, func(poll.LogT) poll.Result {
			n, err := w.client.CoreV1().Nodes().Get(t.Context(), name, metav1.GetOptions{})
			if err != nil {
				return poll.Continue("%v", err)
			}
			if n.Spec.PodCIDR != "" && !routed[name] {
				// The router's way to the pods, as in any world of the lab.
				_, pods, err := parseCIDR(n.Spec.PodCIDR)
				assert.NilError(t, err)
				assert.NilError(t, netlink.RouteAdd(&netlink.Route{Dst: pods, Gw: addrs[name].AsSlice()}))
				routed[name] = true
			}
			for _, c := range n.Status.Conditions {
				if c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue {
					return poll.Success()
				}
			}
			return poll.Continue("node %s is not ready", name)
		}, poll.WithTimeout(30*time.Second), poll.WithDelay(50*time.Millisecond))
	}
	t.Logf("nodes ready after %v", time.Since(begin).Round(time.Millisecond))
	return w
}

// pod creates a pod from a manifest's spec and cleans up after the test.
func (w *world) pod(t *testing.T, name, spec string) *corev1.Pod {
	t.Helper()
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default", Labels: map[string]string{"app": name}}}
	assert.NilError(t, yaml.UnmarshalStrict([]byte(spec), &p.Spec))
	zero := int64(0)
	if p.Spec.TerminationGracePeriodSeconds == nil {
		p.Spec.TerminationGracePeriodSeconds = &zero
	}
	p, err := w.client.CoreV1().Pods("default").Create(t.Context(), p, metav1.CreateOptions{})
	assert.NilError(t, err)
	t.Cleanup(func() {
		_ = w.client.CoreV1().Pods("default").Delete(context.Background(), name, metav1.DeleteOptions{GracePeriodSeconds: &zero})
	})
	return p
}

// until polls a pod until ok says so.
func (w *world) until(t *testing.T, name, what string, ok func(*corev1.Pod) bool) *corev1.Pod {
	t.Helper()
	var last *corev1.Pod
	poll.WaitOn(t, func(poll.LogT) poll.Result {
		p, err := w.client.CoreV1().Pods("default").Get(t.Context(), name, metav1.GetOptions{})
		if err != nil {
			return poll.Continue("%v", err)
		}
		last = p
		if ok(p) {
			return poll.Success()
		}
		return poll.Continue("%s: not %s: %+v", name, what, p.Status.ContainerStatuses)
	}, poll.WithTimeout(30*time.Second), poll.WithDelay(20*time.Millisecond))
	return last
}

func ready(p *corev1.Pod) bool {
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}

// exec runs the image's tool in a pod, without the API server.
func (w *world) exec(t *testing.T, pod string, argv ...string) (string, int) {
	t.Helper()
	var out bytes.Buffer
	code, err := w.registry.Exec(t.Context(), pods.ExecRequest{
		Cluster: cluster, Namespace: "default", Pod: pod, Argv: append([]string{"box"}, argv...), Stdout: &out, Stderr: &out,
	})
	assert.NilError(t, err)
	return strings.TrimSpace(out.String()), code
}

// kubectl runs the real one in the control plane's namespace.
func (w *world) kubectl(t *testing.T, stdin io.Reader, args ...string) (string, error) {
	t.Helper()
	kubeconfig := filepath.Join(w.dir, "admin.kubeconfig")
	b, err := w.cp.Kubeconfig("admin")
	assert.NilError(t, err)
	assert.NilError(t, os.WriteFile(kubeconfig, b, 0o600))
	cmd := exec.CommandContext(t.Context(), filepath.Join(w.bin, "kubernetes"), append([]string{"kubectl", "--kubeconfig=" + kubeconfig}, args...)...)
	var out bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, &out, &out
	assert.NilError(t, netns.Do(w.cpNS, cmd.Start))
	err = cmd.Wait()
	return out.String(), err
}
