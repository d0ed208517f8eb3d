package world

import (
	"context"
	"fmt"
	"path"
	"path/filepath"
	"slices"
	"sync"

	"github.com/isthmus-net/isthmus/lab/internal/controlplane"
	"github.com/isthmus-net/isthmus/lab/internal/kubelet"
	"github.com/isthmus-net/isthmus/lab/internal/pods"
	"github.com/isthmus-net/isthmus/lab/internal/topology"
)

// A NodeRequest names a node that joins or leaves.
type NodeRequest struct {
	Cluster string `json:"cluster"`
	Node    string `json:"node"` // in its cluster, "node-3"
	// Credentials are for one that joins; without them it is a host that runs
	// nothing. They are never logged.
	Credentials *controlplane.NodeCredentials `json:"credentials,omitempty"`
}

// nodes are the kubelets that run, and what runs beside them as long as the
// agent does.
type nodes struct {
	wg      sync.WaitGroup
	change  sync.Mutex // one node joins or leaves at a time
	mu      sync.Mutex
	running map[string]runningNode // by "milan/node-1"
}

// A runningNode is a kubelet.
type runningNode struct {
	stop context.CancelFunc
	done chan struct{} // closed when nothing of it is left
}

func (n *nodes) background(f func()) { n.wg.Go(f) }

func (n *nodes) wait() { n.wg.Wait() }

// start runs f until the node is stopped or ctx ends.
func (n *nodes) start(ctx context.Context, name string, f func(context.Context)) {
	ctx, stop := context.WithCancel(ctx)
	node := runningNode{stop, make(chan struct{})}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.running == nil {
		n.running = map[string]runningNode{}
	}
	n.running[name] = node
	n.wg.Go(func() {
		defer close(node.done)
		defer stop()
		f(ctx)
	})
}

// stop ends a kubelet and all that it runs. One that does not run is no error.
func (n *nodes) stop(name string) {
	n.mu.Lock()
	node, ok := n.running[name]
	delete(n.running, name)
	n.mu.Unlock()
	if ok {
		node.stop()
		<-node.done
	}
}

// startNode runs the kubelet of a node whose host is there.
func (a *agent) startNode(ctx context.Context, n *network, c ClusterSpec, cred controlplane.NodeCredentials) error {
	node, _, ok := c.Node(cred.Node)
	name := c.Name + "/" + cred.Node
	h, there := n.host(name)
	if !ok || !there {
		return fmt.Errorf("node %s has no namespace", name)
	}
	cfg := pods.NodeConfig{
		Cluster: c.Name, Name: node.Name, Addr: node.Addr, NetNS: h.ns.File,
		Kubeconfig: cred.Kubeconfig, ServingCert: cred.ServingCert, ServingKey: cred.ServingKey, ClientCA: cred.ClientCA,
		Images: images(a.cfg.BinDir), BinDir: a.cfg.BinDir, Dir: filepath.Join(a.cfg.Dir, c.Name, node.Name),
		Blocks: c.blocks(), PodLink: PodInterface, Router: c.Router,
		CNI: c.CNI, Masquerade: c.Masquerade, MTU: c.MTU, FlannelKubeconfig: cred.FlannelKubeconfig, ServiceCIDR: c.ServiceCIDR, ClusterCIDR: c.PodCIDR,
		KubeProxy: c.KubeProxy, KubeProxyKubeconfig: cred.KubeProxyKubeconfig,
		Registry: a.registry, Logger: a.cfg.Logger.With("node", name),
		Nice: a.niceOfDaemons(), ReadyPeriod: a.readyPeriod(), LivenessFactor: a.livenessFactor(),
	}
	run := func(ctx context.Context) error { return pods.RunNode(ctx, cfg) }
	if c.Runtime == topology.RuntimeContainerd {
		archives, err := filepath.Glob(filepath.Join(a.cfg.BinDir, ImagesDir, "*.tar"))
		if err != nil {
			return err
		}
		real := kubelet.Config{
			NodeConfig: cfg, Archives: archives, Cgroup: path.Join(a.labCgroup(), c.Name+"-"+node.Name),
			ClusterDNS: topology.DNSAddress(c.ServiceCIDR),
		}
		run = func(ctx context.Context) error { return kubelet.RunNode(ctx, real) }
	}
	a.nodes.start(ctx, name, func(ctx context.Context) {
		if err := run(ctx); err != nil && ctx.Err() == nil {
			a.end(fmt.Errorf("node %s: %w", name, err))
		}
	})
	return nil
}

// labCgroup has the cgroups of the nodes.
func (a *agent) labCgroup() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.cgroup
}

// credentialsOf finds a node's among those of its cluster.
func credentialsOf(all []controlplane.NodeCredentials, node string) (controlplane.NodeCredentials, error) {
	i := slices.IndexFunc(all, func(c controlplane.NodeCredentials) bool { return c.Node == node })
	if i < 0 {
		return controlplane.NodeCredentials{}, fmt.Errorf("node %s has no credentials", node)
	}
	return all[i], nil
}

// nodeOf finds the node of a request in the world.
func (a *agent) nodeOf(req NodeRequest) (*network, ClusterSpec, error) {
	a.mu.Lock()
	n := a.network
	a.mu.Unlock()
	if n == nil {
		return nil, ClusterSpec{}, errNotBuilt
	}
	c, ok := n.spec.Cluster(req.Cluster)
	if ok {
		_, _, ok = c.Node(req.Node)
	}
	if !ok {
		return nil, c, fmt.Errorf("%w: there is no node %s/%s in this world", ErrNoTarget, req.Cluster, req.Node)
	}
	return n, c, nil
}

// joinNode makes the host of a node, plugs it in and starts its kubelet; ctx
// is the agent's. A node that is there stays as it is.
func (a *agent) joinNode(ctx context.Context, req NodeRequest) error {
	n, c, err := a.nodeOf(req)
	if err != nil {
		return err
	}
	a.nodes.change.Lock()
	defer a.nodes.change.Unlock()
	if _, ok := n.host(c.Name + "/" + req.Node); ok {
		return nil
	}
	h, err := n.newNode(c, req.Node)
	if err != nil {
		return err
	}
	if err := a.captureHost(n.spec, h); err != nil {
		h.ns.Close()
		return err
	}
	n.add(h)
	if req.Credentials == nil {
		return nil
	}
	return a.startNode(ctx, n, c, *req.Credentials)
}

// leaveNode takes a node out of the world as one goes whose machine is
// switched off: the cable first, so that nobody hears what its daemons do
// while they end, then its kubelet with all that runs there, then its
// namespace. A node that is not there is no error.
func (a *agent) leaveNode(req NodeRequest) error {
	n, c, err := a.nodeOf(req)
	if err != nil {
		return err
	}
	a.nodes.change.Lock()
	defer a.nodes.change.Unlock()
	h, ok := n.host(c.Name + "/" + req.Node)
	if !ok {
		return nil
	}
	_, number, _ := c.Node(req.Node)
	for _, port := range []string{nodePort(c, number), podPort(c, number)} {
		if err := n.root.unplug(port); err != nil {
			return err
		}
	}
	a.nodes.stop(h.name)
	n.remove(h)
	a.captures.End(h.name)
	return h.ns.Close()
}
