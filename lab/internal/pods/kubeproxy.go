package pods

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"github.com/isthmus-net/isthmus/lab/internal/netns"
	"github.com/isthmus-net/isthmus/lab/internal/niceness"
	"golang.org/x/sys/unix"
)

// Modes of kube-proxy.
const (
	ModeNFTables = "nftables"
	ModeIPTables = "iptables"
	ModeIPVS     = "ipvs"
)

// keepKubeProxy runs the real kube-proxy in the node's namespace and starts it
// again when it ends. It is called when the Node exists: kube-proxy waits half
// a minute for it otherwise.
func (n *node) keepKubeProxy(ctx context.Context) {
	kubeconfig := filepath.Join(n.cfg.Dir, "kube-proxy.kubeconfig")
	if err := os.WriteFile(kubeconfig, n.cfg.KubeProxyKubeconfig, 0o600); err != nil {
		n.log.Error("kube-proxy", "err", err)
		return
	}
	n.keepProgram(ctx, "kube-proxy", func() (*exec.Cmd, error) { return n.kubeProxy(kubeconfig) })
}

// toolsWithoutIPTables returns a directory with what kube-proxy calls in its
// nftables mode. Where it finds iptables it starts by removing the rules that
// an iptables mode may have left, with some fifty processes: nothing to do in
// a new namespace, and half a minute in an emulated machine.
func (n *node) toolsWithoutIPTables() (string, error) {
	dir := filepath.Join(n.cfg.Dir, "kube-proxy-bin")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	for _, tool := range []string{"nft", "conntrack"} {
		path, err := exec.LookPath(tool)
		if err != nil {
			return "", fmt.Errorf("kube-proxy needs %s: %w; make deps installs it", tool, err)
		}
		if err := os.Symlink(path, filepath.Join(dir, tool)); err != nil && !errors.Is(err, os.ErrExist) {
			return "", err
		}
	}
	return dir, nil
}

// kubeProxy is the command of kube-proxy.
func (n *node) kubeProxy(kubeconfig string) (*exec.Cmd, error) {
	cmd := exec.Command(filepath.Join(n.cfg.BinDir, "kube-proxy"), n.cfg.KubeProxyFlags(kubeconfig)...)
	if n.cfg.KubeProxy == ModeNFTables {
		path, err := n.toolsWithoutIPTables()
		if err != nil {
			return nil, err
		}
		cmd.Env = append(os.Environ(), "PATH="+path)
	}
	return cmd, nil
}

// KubeProxyFlags is the command line of a node's kube-proxy.
func (c *NodeConfig) KubeProxyFlags(kubeconfig string) []string {
	return []string{
		"--kubeconfig=" + kubeconfig,
		"--hostname-override=" + c.Name,
		"--proxy-mode=" + c.KubeProxy,
		"--cluster-cidr=" + c.ClusterCIDR.String(),
		"--nodeport-addresses=primary",
		// Not all rules again every half minute for nothing: what changes is
		// applied at once, and nobody else touches them.
		"--iptables-sync-period=10m",
		// The limits of conntrack belong to the machine, not to a namespace:
		// kube-proxy would fail to set them.
		"--conntrack-max-per-core=0", "--conntrack-min=0",
		"--conntrack-tcp-timeout-established=0s", "--conntrack-tcp-timeout-close-wait=0s",
		"--healthz-bind-address=" + c.Addr.String() + ":10256",
		"--metrics-bind-address=127.0.0.1:10249",
	}
}

func (n *node) logFile(program string) string { return filepath.Join(n.cfg.Dir, "log", program+".log") }

// keepProgram runs a daemon of the node in its namespace and starts it again
// when it ends, until ctx does. Nothing that the daemon had started is left
// when it returns.
func (n *node) keepProgram(ctx context.Context, name string, command func() (*exec.Cmd, error)) {
	for {
		err := n.runProgram(ctx, name, command)
		if ctx.Err() != nil {
			return
		}
		n.log.Warn(name+" ended and starts again", "err", err, "log", n.logFile(name))
		if !pause(ctx, time.Second) {
			return
		}
	}
}

func (n *node) runProgram(ctx context.Context, name string, command func() (*exec.Cmd, error)) error {
	log, err := os.OpenFile(n.logFile(name), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd, err := command()
	if err != nil {
		return err
	}
	cmd.Stdout, cmd.Stderr = log, log
	// The first process of a PID namespace takes with it what it has started:
	// kube-proxy is often killed while it waits for nft, which would live on and
	// write to a node that is being taken down. Wait returns when all are gone
	// (pid_namespaces(7)).
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Cloneflags: unix.CLONE_NEWPID}
	if err := netns.Do(n.cfg.NetNS, cmd.Start); err != nil {
		return fmt.Errorf("start %s: %w", name, err)
	}
	if err := niceness.SetGroup(cmd.Process.Pid, n.cfg.Nice); err != nil {
		n.log.Warn(name, "err", err)
	}
	n.log.Info(name+" started", "pid", cmd.Process.Pid)
	stop := context.AfterFunc(ctx, func() { _ = cmd.Process.Kill() })
	defer stop()
	return cmd.Wait()
}
