package supervisor

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/lab/internal/controlplane"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// nodesTimeout is how long the nodes may take to be ready once the world has
// been built: a second natively, a few in an emulated machine.
const nodesTimeout = 120 * time.Second

// build brings the lab up: the control planes and the agent side by side, then
// the world, then it waits for the nodes.
func (l *lab) build(ctx context.Context) error {
	for _, spec := range l.cfg.Spec.Clusters {
		ns, err := world.NewNamespace()
		if err != nil {
			return err
		}
		l.mu.Lock()
		l.clusters[spec.Name] = &cluster{spec: spec, ns: ns}
		l.mu.Unlock()
	}

	g, gctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		start := l.startNative
		if l.cfg.World == VM {
			start = l.startMachine
		}
		a, err := start(gctx)
		if err != nil {
			return err
		}
		l.mu.Lock()
		l.agent = a
		l.mu.Unlock()
		return nil
	})
	// The uplinks have their addresses before the API servers want them.
	wired := make(chan struct{})
	g.Go(func() error {
		defer close(wired)
		return l.wire()
	})
	if !l.cfg.KubernetesLess {
		for _, c := range l.clusters {
			g.Go(func() error {
				select {
				case <-wired:
				case <-gctx.Done():
					return gctx.Err()
				}
				return l.startControlPlane(gctx, c)
			})
		}
	}
	if err := g.Wait(); err != nil {
		return err
	}
	go func() {
		select {
		case <-l.agent.done:
			err := l.agent.why()
			l.failed(err)
			l.end(err)
		case <-ctx.Done():
		}
	}()

	req := world.BuildRequest{Spec: l.cfg.Spec, Nodes: map[string][]controlplane.NodeCredentials{}}
	for name, c := range l.clusters {
		if c.cp == nil {
			continue
		}
		for _, n := range c.spec.Nodes {
			cred, err := c.cp.NodeCredentials(n.Name)
			if err != nil {
				return err
			}
			req.Nodes[name] = append(req.Nodes[name], cred)
		}
	}
	if err := l.agent.client.Build(ctx, req, l.say); err != nil {
		return fmt.Errorf("build the world: %w", err)
	}
	if l.cfg.KubernetesLess {
		return nil
	}
	return l.step("nodes are ready", func() error { return l.waitNodes(ctx) })
}

// uplink is the name of a control plane's only link, in its own namespace.
const uplink = "eth0"

// wire gives each control plane its link to the world: a veth pair to the
// agent's namespace, or a tap device of which the machine has the other end.
func (l *lab) wire() error {
	if l.cfg.World == VM {
		return l.wireMachine()
	}
	return l.wireNative()
}

// addressUplink configures a control plane's end.
func addressUplink(c *cluster) error {
	if err := c.ns.AddAddress(uplink, netip.PrefixFrom(c.spec.ControlPlane, c.spec.LAN.Bits())); err != nil {
		return fmt.Errorf("cluster %s: %w", c.spec.Name, err)
	}
	all := netip.PrefixFrom(netip.IPv4Unspecified(), 0)
	if c.spec.Router.Is6() {
		all = netip.PrefixFrom(netip.IPv6Unspecified(), 0)
	}
	if err := c.ns.AddRoute(all, c.spec.Router); err != nil {
		return fmt.Errorf("cluster %s: %w", c.spec.Name, err)
	}
	return nil
}

func (l *lab) startControlPlane(ctx context.Context, c *cluster) error {
	return l.step("control plane of "+c.spec.Name, func() error {
		var nodes []controlplane.Node
		for _, n := range c.spec.Nodes {
			nodes = append(nodes, controlplane.Node{Name: n.Name, Addr: n.Addr})
		}
		cp, err := controlplane.Start(ctx, controlplane.Config{
			Name: c.spec.Name, Dir: l.state("control-plane", c.spec.Name), Binary: filepath.Join(l.cfg.BinDir, "kubernetes"),
			Address: c.spec.ControlPlane, ServiceCIDR: c.spec.ServiceCIDR, PodCIDR: c.spec.PodCIDR, Nodes: nodes,
			NetNS: c.ns.File, Logger: l.logger.With("cluster", c.spec.Name), Timeout: 2 * time.Minute,
			// Emulated processors need the real ones more than API servers do.
			Nice: map[string]int{VM: 5}[l.cfg.World],
		})
		if err != nil {
			return err
		}
		l.mu.Lock()
		c.cp = cp
		l.mu.Unlock()
		kubeconfig, err := cp.Kubeconfig("admin")
		if err != nil {
			return err
		}
		return os.WriteFile(l.kubeconfigFile(c.spec.Name), kubeconfig, 0o600)
	})
}

// state is a path in the directory that goes with the lab.
func (l *lab) state(elem ...string) string {
	return filepath.Join(append([]string{l.cfg.RunDir, stateDir}, elem...)...)
}

func (l *lab) kubeconfigFile(cluster string) string {
	return l.state("control-plane", cluster, "admin.kubeconfig")
}

// waitNodes waits until every node of every cluster is ready.
func (l *lab) waitNodes(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, nodesTimeout)
	defer cancel()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		missing := ""
		for _, c := range l.clusters {
			list, err := c.cp.Client().CoreV1().Nodes().List(ctx, metav1.ListOptions{})
			if err != nil {
				missing = fmt.Sprintf("nodes of %s: %v", c.spec.Name, err)
				break
			}
			ready := map[string]bool{}
			for _, n := range list.Items {
				for _, cond := range n.Status.Conditions {
					if cond.Type == corev1.NodeReady && cond.Status == corev1.ConditionTrue && len(n.Spec.PodCIDRs) > 0 {
						ready[n.Name] = true
					}
				}
			}
			for _, n := range c.spec.Nodes {
				if !ready[n.Name] {
					missing = fmt.Sprintf("node %s/%s is not ready", c.spec.Name, n.Name)
				}
			}
		}
		if missing == "" {
			return nil
		}
		select {
		case <-ctx.Done():
			if errors.Is(ctx.Err(), context.DeadlineExceeded) {
				return fmt.Errorf("%s after %s", missing, nodesTimeout)
			}
			return ctx.Err()
		case <-tick.C:
		}
	}
}
