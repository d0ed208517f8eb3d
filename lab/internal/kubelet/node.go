// Package kubelet runs nodes of a Kubernetes cluster with what machines have:
// the real kubelet, containerd and runc, flanneld and kube-proxy.
//
// A node is a network namespace that somebody else has made, and a first
// process with mount, PID, IPC and UTS namespaces of its own (Boot). Its root
// directory is an overlay on this machine's, so that programs and
// configuration are where they are on any node and nothing is written outside.
// What is on its disk outlives a reboot, which is the end of that process and
// a RunNode with the same directory.
//
// Three things are this machine's and not the node's: the kernel, its
// processors and its memory. Cgroups are below one that RunNode makes, in
// version 1 and 2 alike; settings that a kubelet makes for a whole machine are
// kept from it (see tunables).
package kubelet

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/isthmus-net/isthmus/lab/internal/cgroup"
	"github.com/isthmus-net/isthmus/lab/internal/netns"
	"github.com/isthmus-net/isthmus/lab/internal/pods"
)

// Config is everything that RunNode needs.
type Config struct {
	// NodeConfig is as for a node of package pods, whose CNI profile must be
	// flannel. Images are not looked at: they come from Archives.
	pods.NodeConfig
	// Executable is the program whose command Argument calls Boot; default:
	// this one.
	Executable string
	// Archives are images as "docker save" writes them. There is no registry.
	Archives []string
	// ClusterDNS is the address that pods ask for names.
	ClusterDNS netip.Addr
	// Cgroup is the path, without a slash at its ends, of the node's cgroup:
	// nobody else's. The one above has the controllers that it needs.
	Cgroup string
}

// Programs are what a node needs in NodeConfig.BinDir, beside the CNI plug-ins
// loopback, flannel, bridge, host-local and portmap in cni/.
func Programs() []string {
	return []string{"kubernetes", "kube-proxy", "flanneld", "containerd", "containerd-shim-runc-v2", "ctr", "cni/loopback", "cni/flannel", "cni/bridge", "cni/host-local", "cni/portmap"}
}

// Images are the archives of what the lab runs in pods of a node: the appliance,
// the lab's own pods, what holds the namespaces of a pod, and the cluster's DNS.
func Images() []string {
	var out []string
	for _, program := range []string{"isthmus", "probe", "pause", "coredns"} {
		out = append(out, program+"-"+runtime.GOARCH+".tar")
	}
	return out
}

// A node is one that runs.
type node struct {
	cfg    Config
	log    *slog.Logger
	first  *exec.Cmd // the node's first process
	gone   chan struct{}
	client kubernetes.Interface // as the node
	idle   func()               // closes the client's connections
	wg     sync.WaitGroup
}

// RunNode boots a node and runs it until ctx ends; then its power is cut. The
// Node object stays. An error means that it could not be started, or that its
// first process has ended; daemons that end are started again.
func RunNode(ctx context.Context, cfg Config) error {
	if err := cfg.Complete(); err != nil {
		return err
	}
	name := cfg.Cluster + "/" + cfg.Name
	switch {
	case cfg.CNI != pods.CNIFlannel:
		return fmt.Errorf("node %s: CNI profile %q: a node with containerd has %s", name, cfg.CNI, pods.CNIFlannel)
	case cfg.Cgroup == "":
		return fmt.Errorf("node %s: Cgroup is missing", name)
	case !cfg.ClusterDNS.IsValid():
		return fmt.Errorf("node %s: ClusterDNS is missing", name)
	case cfg.Executable == "":
		var err error
		if cfg.Executable, err = os.Executable(); err != nil {
			return err
		}
	}
	n := &node{cfg: cfg, log: cfg.Logger.With("cluster", cfg.Cluster, "node", cfg.Name), gone: make(chan struct{})}
	if err := n.run(ctx); err != nil && ctx.Err() == nil {
		return fmt.Errorf("node %s: %w", name, err)
	}
	return nil
}

func (n *node) run(ctx context.Context) error {
	var err error
	if n.client, n.idle, err = n.clientset(); err != nil {
		return fmt.Errorf("kubeconfig: %w", err)
	}
	defer n.idle()
	cgroups, err := cgroup.Open()
	if err != nil {
		return err
	}
	defer func() {
		if err := cgroups.Remove(n.cfg.Cgroup); err != nil {
			n.log.Warn("remove the node's cgroup", "err", err)
		}
	}()
	if err := cgroups.Make(n.cfg.Cgroup); err != nil {
		return err
	}
	if err := pods.SetNodeSysctls(n.cfg.NetNS); err != nil {
		return err
	}
	if err := n.boot(); err != nil {
		return fmt.Errorf("boot: %w", err)
	}
	// The programs end with the node, those that follow them with ctx.
	ctx, stop := context.WithCancel(ctx)
	defer n.wg.Wait()
	defer n.powerOff()
	defer stop()
	return n.start(ctx)
}

// boot starts the node's first process and waits for its root directory.
func (n *node) boot() error {
	spec := bootSpec{
		Hostname: n.cfg.Name, Disk: filepath.Join(n.cfg.Dir, "disk"), Logs: filepath.Join(n.cfg.Dir, "log"),
		Programs: n.cfg.BinDir, Plugins: filepath.Join(n.cfg.BinDir, "cni"), BootID: bootID(),
	}
	for _, dir := range []string{spec.Disk, spec.Logs, n.logDir()} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	specR, specW, err := os.Pipe()
	if err != nil {
		return err
	}
	defer specR.Close()
	defer specW.Close()
	statusR, statusW, err := os.Pipe()
	if err != nil {
		return err
	}
	defer statusR.Close()
	defer statusW.Close()
	n.first = exec.Command(n.cfg.Executable, Argument)
	n.first.ExtraFiles = []*os.File{bootFD - 3: specR, statusFD - 3: statusW}
	n.first.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWNS | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS,
		Setsid:     true,
	}
	if err := netns.Do(n.cfg.NetNS, n.first.Start); err != nil {
		return err
	}
	go func() {
		_ = n.first.Wait()
		close(n.gone)
	}()
	err = json.NewEncoder(specW).Encode(spec)
	specW.Close()
	statusW.Close()
	message, readErr := io.ReadAll(statusR)
	if len(message) > 0 {
		err = errors.New(string(message))
	}
	if err = errors.Join(err, readErr); err != nil {
		n.powerOff()
	}
	return err
}

func bootID() string {
	b := make([]byte, 16)
	_, _ = rand.Read(b) // never fails
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

// powerOff ends everything in the node at once.
func (n *node) powerOff() {
	_ = n.first.Process.Kill()
	<-n.gone
}

// path is a place in the node's root directory, as this process reaches it. It
// must have no symbolic link to an absolute path in it.
func (n *node) path(elem ...string) string {
	return filepath.Join(append([]string{fmt.Sprintf("/proc/%d/root", n.first.Process.Pid)}, elem...)...)
}

// logDir has the logs of the node's daemons. A kubelet removes from the directory
// of its pods' logs what is none.
func (n *node) logDir() string { return filepath.Join(n.cfg.Dir, "daemons") }

// command is one that runs in the node.
func (n *node) command(ctx context.Context, name string, args ...string) *exec.Cmd {
	if !strings.HasPrefix(name, "/") {
		name = filepath.Join(programs, name)
	}
	enter := []string{"--target", fmt.Sprint(n.first.Process.Pid), "--mount", "--uts", "--ipc", "--pid", "--", name}
	cmd := exec.CommandContext(ctx, "nsenter", append(enter, args...)...)
	cmd.Env = []string{"PATH=" + programs + ":/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root"}
	return cmd
}

// output runs a command in the node.
func (n *node) output(ctx context.Context, name string, args ...string) (string, error) {
	cmd := n.command(ctx, name, args...)
	var out strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &out
	cmd.WaitDelay = time.Second // what nsenter has started may live on with the pipe
	err := netns.Do(n.cfg.NetNS, cmd.Start)
	if err == nil {
		err = cmd.Wait()
	}
	if err != nil {
		return "", fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, strings.TrimSpace(out.String()))
	}
	return out.String(), nil
}

// keep runs a daemon in the node, and starts it again when it ends, until the
// node is gone.
func (n *node) keep(ctx context.Context, name string, env []string, program string, args ...string) {
	n.wg.Go(func() {
		for {
			err := n.daemon(name, env, program, args)
			select {
			case <-ctx.Done():
				return
			case <-n.gone:
				return
			case <-time.After(time.Second):
			}
			n.log.Warn(name+" ended and starts again", "err", err)
		}
	})
}

func (n *node) daemon(name string, env []string, program string, args []string) error {
	log, err := os.OpenFile(filepath.Join(n.logDir(), name+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	// Not with a context: it ends with the node, before which it must not.
	cmd := n.command(context.Background(), program, args...)
	cmd.Env = append(cmd.Env, env...)
	cmd.Stdout, cmd.Stderr = log, log
	if err := netns.Do(n.cfg.NetNS, cmd.Start); err != nil {
		return err
	}
	return cmd.Wait()
}

// clientset connects from the node's namespace.
func (n *node) clientset() (kubernetes.Interface, func(), error) {
	rc, err := clientcmd.RESTConfigFromKubeConfig(n.cfg.Kubeconfig)
	if err != nil {
		return nil, nil, err
	}
	rc.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
		return netns.DialContext(ctx, n.cfg.NetNS, network, address)
	}
	rest.AddUserAgent(rc, "isthmus-lab/"+n.cfg.Name)
	client, err := rest.HTTPClientFor(rc)
	if err != nil {
		return nil, nil, err
	}
	set, err := kubernetes.NewForConfigAndClient(rc, client)
	return set, client.CloseIdleConnections, err
}

// waitPodCIDR waits until the node is registered and has been given its range.
func (n *node) waitPodCIDR(ctx context.Context) error {
	return n.wait(ctx, "the Node object to have a podCIDR", func(ctx context.Context) error {
		nd, err := n.client.CoreV1().Nodes().Get(ctx, n.cfg.Name, metav1.GetOptions{})
		if err == nil && nd.Spec.PodCIDR == "" {
			err = errors.New("it has none")
		}
		return err
	})
}

// wait calls done until it succeeds or ctx ends.
func (n *node) wait(ctx context.Context, what string, done func(context.Context) error) error {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		call, cancel := context.WithTimeout(ctx, 5*time.Second)
		err := done(call)
		cancel()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("waiting for %s: %w (%w)", what, ctx.Err(), err)
		case <-n.gone:
			return fmt.Errorf("waiting for %s: the node's first process has ended", what)
		case <-tick.C:
		}
	}
}
