package world

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/isthmus-net/isthmus/lab/internal/controlplane"
	"github.com/isthmus-net/isthmus/lab/internal/pods"
)

// Image names that stand for the lab's own binaries.
const (
	IsthmusImage = "isthmus:dev"
	ProbeImage   = "isthmus-lab/probe:dev"
)

// ImagesDir is where, in the directory of binaries, the images for containerd
// are: archives as "docker save" writes them.
const ImagesDir = "images"

// AgentConfig is what the agent needs before it knows its world.
type AgentConfig struct {
	Listen  string // a socket's path; with Machine an address and port
	BinDir  string // has isthmus, lab, probe, kube-proxy and cni/
	Dir     string // for the nodes' state; empty at the start
	Machine bool   // a virtual machine of our own: its links and its clock are ours
	Logger  *slog.Logger
}

// BuildRequest is what the supervisor sends once: the world to build, and the
// keys of its nodes. It is never logged.
type BuildRequest struct {
	Spec Spec `json:"spec"`
	// Cgroup is the lab's, where nodes with containerd have theirs.
	Cgroup string                                    `json:"cgroup,omitempty"`
	Nodes  map[string][]controlplane.NodeCredentials `json:"nodes"` // by cluster
}

// An agent is the inside of a world.
type agent struct {
	cfg      AgentConfig
	registry *pods.Registry
	end      func(error) // ends the agent

	mu      sync.Mutex
	cgroup  string // of the BuildRequest
	network *network

	captures Captures
	nodes    nodes
}

// ServeAgent serves requests until ctx ends. Then everything that the agent
// built ends with it: processes first, namespaces with the agent's own.
func ServeAgent(ctx context.Context, cfg AgentConfig) error {
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	listener, err := listen(cfg)
	if err != nil {
		return err
	}
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	a := &agent{cfg: cfg, registry: pods.NewRegistry(), end: func(err error) { end(err) }}
	defer a.close()
	stopWatch := a.registry.Watch(a.podEvent)
	defer stopWatch()
	go a.captures.Follow(ctx, a.captureEvery())

	defer a.nodes.wait()
	server := newServer(a.routes(ctx), cfg.Logger)
	go func() {
		<-ctx.Done()
		server.Close()
	}()
	err = server.Serve(listener)
	if ctx.Err() != nil {
		if cause := context.Cause(ctx); !errors.Is(cause, context.Canceled) {
			return cause
		}
		return nil
	}
	end(nil)
	return err
}

// listen listens for the supervisor.
func listen(cfg AgentConfig) (net.Listener, error) {
	if !cfg.Machine {
		return net.Listen("unix", cfg.Listen)
	}
	at, err := netip.ParseAddrPort(cfg.Listen)
	if err != nil {
		return nil, fmt.Errorf("agent: listen: %w", err)
	}
	if err := prepareMachine(at.Addr()); err != nil {
		return nil, err
	}
	return net.Listen("tcp", cfg.Listen)
}

// build makes the world and starts its nodes. It returns when every node's
// kubelet has been started; whether they are ready the API server knows.
func (a *agent) build(ctx context.Context, req BuildRequest, progress func(Progress)) error {
	a.mu.Lock()
	built := a.network != nil
	a.cgroup = req.Cgroup
	a.mu.Unlock()
	if built {
		return errors.New("the world has been built already")
	}
	start := time.Now()
	root, err := CurrentNamespace()
	if err != nil {
		return err
	}
	if a.cfg.Machine {
		if err := nameUplinks(root, req.Spec); err != nil {
			return err
		}
	}
	n, err := buildNetwork(ctx, req.Spec, root, func(h *host) error { return a.captureHost(req.Spec, h) })
	a.mu.Lock()
	a.network = n
	a.mu.Unlock()
	if err != nil {
		return err
	}
	progress(Progress{Message: fmt.Sprintf("network: %d namespaces, %d bridges", len(n.all()), 1+len(req.Spec.Clusters)), Took: time.Since(start)})

	if len(req.Nodes) == 0 { // a network without Kubernetes
		return nil
	}
	if err := a.serveOutside(ctx, n); err != nil {
		return err
	}
	start = time.Now()
	count := 0
	for _, c := range req.Spec.Clusters {
		for _, node := range c.Nodes {
			if node.Absent {
				continue
			}
			cred, err := credentialsOf(req.Nodes[c.Name], node.Name)
			if err != nil {
				return err
			}
			if err := a.startNode(ctx, n, c, cred); err != nil {
				return err
			}
			count++
		}
		if creds := req.Nodes[c.Name]; len(creds) > 0 {
			a.nodes.background(func() { a.followNodes(ctx, n, c, creds[0].KubeProxyKubeconfig) })
		}
	}
	progress(Progress{Message: fmt.Sprintf("%d kubelets started", count), Took: time.Since(start)})
	return nil
}

func (a *agent) captureHost(spec Spec, h *host) error {
	return a.captures.Start(h.ns.File, h.name, func() string { return h.name }, APIServices(spec))
}

// MachineNice is added to the niceness of daemons in a virtual machine.
const MachineNice = 5

// niceOfDaemons: in a machine of their own daemons that start leave the one
// processor to the kernel's own threads, WireGuard's among them, to this agent
// and to probes, which raise themselves.
func (a *agent) niceOfDaemons() int {
	if a.cfg.Machine {
		return MachineNice
	}
	return 0
}

// readyPeriod is how far apart kubelets ask containers at least that are ready. In
// an emulated machine with two clusters questions every second took a tenth of a
// processor, by this agent and by the daemons that answer.
func (a *agent) readyPeriod() time.Duration {
	if a.cfg.Machine {
		return 3 * time.Second
	}
	return 0
}

// livenessFactor is how many times as often as its spec says a container may not answer its
// liveness probe before it is restarted. A virtual machine that got a sixth of its two processors
// restarted gateways, controllers and node daemons of both clusters within a minute: they
// waited for a processor, as the probe did.
func (a *agent) livenessFactor() int32 {
	if a.cfg.Machine {
		return 3
	}
	return 1
}

// images are the names under which the lab's binaries are known in pods.
func images(binDir string) map[string]pods.Image {
	all := map[string]pods.Image{
		IsthmusImage: {Binary: filepath.Join(binDir, "isthmus")},
		ProbeImage:   {Binary: filepath.Join(binDir, "probe")},
	}
	if public := filepath.Join(binDir, PublicProgram); exists(public) {
		for image, program := range publicImages {
			all["ghcr.io/liqotech/"+image+":dev"] = pods.Image{Binary: public, Path: "/usr/bin/" + program}
		}
	}
	return all
}

// PublicProgram is the daemons of the public system, in one program of bin/ that runs the one
// by whose name it is called. It is there only where somebody has built it.
const PublicProgram = "liqo"

// publicImages are the names that its chart has for images, and the program of each.
var publicImages = map[string]string{
	"fabric": "liqo-fabric", "ipam": "ipam", "liqo-controller-manager": "liqo-controller-manager", "webhook": "webhook",
	"gateway": "liqo-gateway", "gateway/geneve": "liqo-geneve", "gateway/wireguard": "liqo-wireguard",
}

func exists(file string) bool {
	_, err := os.Stat(file)
	return err == nil
}

// nameUplinks gives the virtual machine's network cards the names that
// buildNetwork expects.
func nameUplinks(root *Namespace, spec Spec) error {
	for _, c := range spec.Clusters {
		link, err := root.linkByMAC(UplinkMAC(c.Index))
		if err != nil {
			return fmt.Errorf("network card of cluster %s: %w", c.Name, err)
		}
		if err := root.rename(link, UplinkName(c.Index)); err != nil {
			return err
		}
	}
	return nil
}

// APIServices are the service addresses of the API servers: the first of each
// service CIDR.
func APIServices(s Spec) []netip.AddrPort {
	var out []netip.AddrPort
	for _, c := range s.Clusters {
		out = append(out, netip.AddrPortFrom(nth(c.ServiceCIDR, 1), 443))
	}
	return out
}

// captureEvery is how long packets may wait in the captures' sockets: longer in a
// virtual machine, where each time that a process wakes is dear, and there are
// fewer packets.
func (a *agent) captureEvery() time.Duration {
	if a.cfg.Machine {
		return 200 * time.Millisecond
	}
	return 25 * time.Millisecond
}

// podEvent starts and ends the captures of pods. The kubelet waits for it, so
// no packet of a pod comes before its capture. A gateway's pod that works in
// another namespace from now on gets another capture.
func (a *agent) podEvent(e pods.Event) {
	pod := e.Pod
	if pod.Own() == nil {
		return
	}
	if !e.Gone {
		a.mu.Lock()
		var api []netip.AddrPort
		if a.network != nil {
			api = APIServices(a.network.spec)
		}
		a.mu.Unlock()
		name := func() string { return podHost(pod, gatewaysByCluster(a.registry.Pods())) }
		a.captures.End(pod.UID)
		if err := a.captures.Start(pod.Own(), pod.UID, name, api); err != nil {
			a.cfg.Logger.Error("no capture in pod", "pod", pod.Cluster+"/"+pod.Namespace+"/"+pod.Name, "err", err)
		}
		return
	}
	a.captures.End(pod.UID)
}

func (a *agent) close() {
	a.captures.Close()
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.network != nil {
		a.network.close()
		a.network.root.Close()
	}
}

// setClock sets the machine's clock.
func (a *agent) setClock(now time.Time) error {
	if !a.cfg.Machine {
		return errors.New("this clock belongs to the host")
	}
	return setTime(now)
}
