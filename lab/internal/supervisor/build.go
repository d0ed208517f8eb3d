package supervisor

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/isthmus-net/isthmus/lab/internal/controlplane"
	"github.com/isthmus-net/isthmus/lab/internal/topology"
	"github.com/isthmus-net/isthmus/lab/internal/vm"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// build brings the lab up: the control planes and the agent side by side, then
// the world, then it waits for the nodes.
func (l *lab) build(ctx context.Context) error {
	if err := l.makeClusters(func(_ string, n world.NodeSpec) bool { return !n.Absent }); err != nil {
		return err
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
				return l.startControlPlane(gctx, c, "", nil)
			})
		}
	}
	if err := g.Wait(); err != nil {
		return err
	}
	l.failWithAgent(ctx)

	for _, c := range l.clusters {
		if c.cp != nil {
			go l.balanceLoads(ctx, c)
		}
	}
	req := world.BuildRequest{Spec: l.cfg.Spec, Cgroup: l.cfg.Cgroup, Nodes: map[string][]controlplane.NodeCredentials{}}
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
	return l.step("nodes are ready", func() error { return l.waitNodes(ctx, slices.Collect(maps.Values(l.clusters))...) })
}

// failWithAgent ends the lab when its agent does.
func (l *lab) failWithAgent(ctx context.Context) {
	go func() {
		select {
		case <-l.agent.done:
			err := l.agent.why()
			l.failed(err)
			l.end(err)
		case <-ctx.Done():
		}
	}()
}

// makeClusters makes the namespace of each control plane.
func (l *lab) makeClusters(present func(cluster string, n world.NodeSpec) bool) error {
	for _, spec := range l.cfg.Spec.Clusters {
		ns, err := world.NewNamespace()
		if err != nil {
			return err
		}
		l.mu.Lock()
		c := &cluster{spec: spec, ns: ns, present: map[string]bool{}}
		for _, n := range spec.Nodes {
			c.present[n.Name] = present(spec.Name, n)
		}
		l.clusters[spec.Name] = c
		l.mu.Unlock()
	}
	return nil
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

// startControlPlane starts a cluster's control plane, on a copy of one that has
// come up before where there is one. With saved it is the control plane of a
// snapshot, from that directory. It calls serving when the API server answers.
func (l *lab) startControlPlane(ctx context.Context, c *cluster, saved string, serving func()) error {
	start := time.Now()
	crds, err := l.readCRDs()
	if err != nil {
		return err
	}
	cache, err := vm.DefaultCacheDir()
	if err != nil {
		return err
	}
	var nodes []controlplane.Node
	for _, n := range c.spec.Nodes {
		nodes = append(nodes, controlplane.Node{Name: n.Name, Addr: n.Addr})
	}
	config := controlplane.Config{
		Name: c.spec.Name, Dir: l.state("control-plane", c.spec.Name), Binary: filepath.Join(l.cfg.BinDir, "kubernetes"),
		Address: c.spec.ControlPlane, ServiceCIDR: c.spec.ServiceCIDR, PodCIDR: c.spec.PodCIDR, Nodes: nodes,
		NodeGracePeriod: c.spec.NodeGracePeriod,
		CRDs:            crds, CacheDir: filepath.Join(cache, "control-plane"),
		NetNS: c.ns.File, Logger: l.logger.With("cluster", c.spec.Name), Timeout: 5 * time.Minute,
	}
	config.Serving = serving
	if saved != "" {
		config.EtcdData, config.Keys = filepath.Join(saved, savedEtcd), filepath.Join(saved, savedKeys)
	}
	cp, err := controlplane.Start(ctx, config)
	if err != nil {
		return err
	}
	l.mu.Lock()
	c.cp = cp
	l.mu.Unlock()
	if c.spec.CNI == topology.CNIFlannel {
		if err := allowFlannel(ctx, cp.Client()); err != nil {
			return fmt.Errorf("cluster %s: permissions of flanneld: %w", c.spec.Name, err)
		}
	}
	kubeconfig, err := cp.Kubeconfig("admin")
	if err != nil {
		return err
	}
	if err := os.WriteFile(l.kubeconfigFile(c.spec.Name), kubeconfig, 0o600); err != nil {
		return err
	}
	message := "control plane of " + c.spec.Name
	if warm, why := cp.Warm(); !warm && saved == "" {
		message += ", cold: " + why
	}
	l.say(world.Progress{Message: message, Took: time.Since(start)})
	return nil
}

func (l *lab) readCRDs() ([][]byte, error) {
	if l.cfg.CRDs == "" {
		return nil, nil
	}
	files, err := filepath.Glob(filepath.Join(l.cfg.CRDs, "*.yaml"))
	if err == nil && len(files) == 0 {
		err = fmt.Errorf("there are no CRDs in %s: run `make generate`", l.cfg.CRDs)
	}
	if err != nil {
		return nil, err
	}
	crds := make([][]byte, len(files))
	for i, f := range files {
		if crds[i], err = os.ReadFile(f); err != nil {
			return nil, err
		}
	}
	return crds, nil
}

// state is a path in the directory that goes with the lab.
func (l *lab) state(elem ...string) string {
	return filepath.Join(append([]string{l.cfg.RunDir, stateDir}, elem...)...)
}

func (l *lab) kubeconfigFile(cluster string) string {
	return l.state("control-plane", cluster, "admin.kubeconfig")
}
