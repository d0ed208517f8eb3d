package daemon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/utils/ptr"

	"github.com/isthmus-net/isthmus/appliance/agent"
	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/desired"
	"github.com/isthmus-net/isthmus/appliance/internal/kube"
	"github.com/isthmus-net/isthmus/appliance/kernel"
	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// API is the API server as a daemon sees it, through informers: it goes on
// answering from what was last known when the server is gone. The sources of
// internal/kube are it.
type API[View any] interface {
	// Start runs the informers until ctx is done.
	Start(ctx context.Context) error
	// Synced returns when everything has been read once.
	Synced(ctx context.Context) error
	// Changed yields a value whenever Read may return something new.
	Changed() <-chan struct{}
	// Read returns what is known, without what the host itself knows.
	Read(ctx context.Context) (View, error)
}

// NodeStatus is InternalNode.status as the node daemon knows it.
type NodeStatus struct {
	Local, Remote netip.Addr // invalid: not known
	Kernel        string     // release
	Overlays      []cluster.Overlay
	WireGuard     *bool            // whether the kernel has it; nil: not known
	VTEP          cluster.VTEP     // zero: the node has no end of the VXLAN overlay
	Needs         []cluster.Needed // addresses of other hosts that it can't do without
	Addresses     []netip.Addr     // that the node has
	Applied       []cluster.Applied
	Conditions    []Condition
}

func (a NodeStatus) equal(b NodeStatus) bool {
	return a.Local == b.Local && a.Remote == b.Remote && a.Kernel == b.Kernel &&
		slices.Equal(a.Overlays, b.Overlays) && ptr.Equal(a.WireGuard, b.WireGuard) && a.VTEP == b.VTEP && slices.Equal(a.Needs, b.Needs) && slices.Equal(a.Addresses, b.Addresses) &&
		equalApplied(a.Applied, b.Applied) && slices.Equal(a.Conditions, b.Conditions)
}

// NodeConfig is what the node daemon needs. NodeName, API and WriteStatus are
// required.
type NodeConfig struct {
	NodeName     string
	NodeIP       netip.Addr // below the tunnels; invalid: the source of the default route
	GenevePort   uint16     // 0: default
	RulePriority uint32     // first rule priority of ours; 0: default
	API          API[kube.NodeView]
	APIServer    string // URL of the API server, as the daemon reaches it; empty: not known
	// Knock asks the API server whether it is there. With it, a change that users ask for is
	// taken back when the API server falls silent after it; nil: it is not.
	Knock kube.Knock
	// StateDir is where what is being tried is kept for the next process; empty: nowhere.
	StateDir string
	// WriteStatus writes the status of the node's InternalNode.
	WriteStatus func(context.Context, NodeStatus) error
	Serving     Serving
	Logger      *slog.Logger // optional
}

// RunNode keeps the node's links, routes, rules and tables in order until ctx
// is done, and leaves them in place then.
func RunNode(ctx context.Context, cfg NodeConfig) error {
	if cfg.NodeName == "" || cfg.API == nil || cfg.WriteStatus == nil {
		return errors.New("daemon: NodeConfig.NodeName, API and WriteStatus are required")
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	h, err := openHost(ctx, kernel.Config{}, cfg.Logger)
	if err != nil {
		return err
	}
	defer h.ns.Close()
	n := &node{host: h, cfg: cfg, release: kernelRelease(), confirm: newConfirmer(cfg.Knock, cfg.StateDir, cfg.Logger)}
	h.metrics.registry.MustRegister(newRefusedCounter(h.ns.CountedBy))
	n.status = newReporter("InternalNode.status", cfg.Logger, NodeStatus.equal, cfg.WriteStatus)

	g, ctx := newGroup(ctx)
	if err := h.serve(ctx, g, cfg.Serving); err != nil {
		return err
	}
	g.run("node", func() error { return n.run(ctx, g) })
	return g.wait(ctx)
}

// A node is the running node daemon.
type node struct {
	*host
	cfg     NodeConfig
	status  *reporter[NodeStatus]
	release string
	confirm *confirmer

	mu      sync.Mutex
	sources sources
	applied []cluster.Applied
	ready   Condition
	overlay cluster.Overlay
	vtep    cluster.VTEP
	needs   []cluster.Needed
	// addresses of the node, and the peers whose packets to it were dropped.
	addresses []netip.Addr
	refused   []string
}

func (n *node) run(ctx context.Context, g *group) error {
	g.run("informers", func() error { return n.cfg.API.Start(ctx) })
	if err := n.waitSynced(ctx, n.cfg.API.Synced); err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return err
	}
	var needed []cluster.Needed
	if view, err := n.cfg.API.Read(ctx); err == nil {
		for _, in := range view.Input.Nodes {
			if in.Name == n.cfg.NodeName { // what the previous process reported
				n.applied, needed = in.Applied, in.Needs
				n.confirm.inForce(n.users(view.Input), in.Applied)
			}
		}
		// Before anything is reported: a daemon that starts would withdraw the
		// addresses that the one before it has reported, and gateways would
		// take their links to this node down.
		n.update(detect(n.ns, n.cfg.NodeName, view.Input.Fabrics))
		n.lookAtItself(&refusedWatch{})
	}
	needs := newNeedsReader(n.ns, n.cfg.APIServer, needed)
	n.setNeeds(needs.read(ctx)) // before anything is reported, for the same reason
	fan := newFanout(ctx, g, n.cfg.API.Changed())
	g.run("status", func() error { return n.status.run(ctx) })
	g.run("underlay", func() error { return n.below.run(ctx) })
	g.run("features", func() error { return n.watchFeatures(ctx, n.publish) })
	detectNow := fan.subscribe()
	g.run("confirm", func() error { return n.confirm.run(ctx) })
	g.run("needs", func() error { return n.watchNeeds(ctx, needs) })
	g.run("source detection", func() error { return n.detectSources(ctx, detectNow) })
	return agent.Run(ctx, agent.Config[desired.NodeInput]{
		Source:  source[desired.NodeInput]{merge(ctx, g, fan.subscribe(), n.below.changed, n.confirm.changed), n.read},
		Target:  watched{n.ns, n.health},
		Desired: desired.Node,
		Report:  n.report,
		Logger:  n.log,
	})
}

// read joins what the API says and what the host knows.
func (n *node) read(ctx context.Context) (desired.NodeInput, error) {
	view, err := n.cfg.API.Read(ctx)
	if err != nil {
		return desired.NodeInput{}, fmt.Errorf("read the objects: %w", err)
	}
	n.health.At("reading what the host knows")
	defer n.health.At("computing the desired state")
	in := view.Input
	in.GenevePort, in.RulePriority = n.cfg.GenevePort, n.cfg.RulePriority
	in.NodeIP = n.nodeIP()
	left, instead := n.confirm.choose(ctx, n.users(in))
	in.LeftOut, in.APIServers = left, n.confirm.apiServers()
	in.Routes, in.Firewalls = slices.Concat(in.Routes, instead.routes), slices.Concat(in.Firewalls, instead.firewalls)
	var own *netip.Addr
	if in.NeedsUplinks() {
		own = &in.NodeIP
	}
	in.Underlay = n.below.readWith(own, in.Remotes(), in.HostInterfaces()...)
	return in, nil
}

// users are the objects of users that are addressed to the node.
func (n *node) users(in desired.NodeInput) users {
	label := cmp.Or(in.Label, in.Name)
	return usersOf(in.Routes, in.Firewalls, func(labels map[string]string) bool { return desired.NodeSelects(labels, label) })
}

// nodeIP is the address that other nodes reach this one at.
func (n *node) nodeIP() netip.Addr {
	if n.cfg.NodeIP.IsValid() {
		return n.cfg.NodeIP.Unmap()
	}
	return defaultSource(n.ns)
}

// report takes the result of a pass: it counts it, and has the status written.
func (n *node) report(r agent.Result[desired.NodeInput]) {
	n.health.At("telling what came of it")
	defer n.health.At("") // the pass is over
	o := outcomeOf(r)
	n.metrics.pass(o)
	n.confirm.pass(o)
	if o.computed() && !remainingLinks(o.remaining, func(netstate.Link) bool { return true }) {
		n.health.setReady()
	} else if o.err != nil {
		n.health.waiting("the first pass failed: " + o.err.Error())
	}
	n.mu.Lock()
	n.ready = readyCondition(o)
	if o.computed() {
		failed := blame(objects{r.Input.Routes, r.Input.Firewalls, r.Input.Tunnels}, o.remaining, o.err)
		n.applied = applied(o.results, failed, n.applied, time.Now())
		n.vtep = cluster.VTEP{}
		if isVXLAN := func(l netstate.Link) bool { return l.Kind == netstate.KindVXLAN }; slices.ContainsFunc(o.want.Links, isVXLAN) && !remainingLinks(o.remaining, isVXLAN) {
			n.vtep = desired.OwnVTEP(r.Input)
		}
		n.overlay = r.Input.Overlay()
	}
	n.mu.Unlock()
	n.publish()
}

// detectSources keeps the node's addresses towards the gateways up to date.
func (n *node) detectSources(ctx context.Context, changed <-chan struct{}) error {
	tick := time.NewTicker(detectInterval)
	defer tick.Stop()
	left := leftovers{node: n.cfg.NodeName}
	once := newOnce(n.log)
	var refused refusedWatch
	for {
		once.report("look at this node's own addresses", n.lookAtItself(&refused))
		// That the objects can't be read is the loop's to complain about.
		if view, err := n.cfg.API.Read(ctx); err == nil {
			n.update(detect(n.ns, n.cfg.NodeName, view.Input.Fabrics))
			gone, err := n.ns.RemovePeers(left.of(view.Input.Fabrics, time.Now()))
			once.report("remove the links of gateways that are gone", err)
			if len(gone) > 0 {
				n.log.Info("removed the links of gateways that are gone", "links", gone)
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		case <-changed:
		}
	}
}

// lookAtItself finds the addresses of the node, and the peers that have sent something
// there.
func (n *node) lookAtItself(refused *refusedWatch) error {
	addresses, err := n.ns.HostAddresses()
	if err != nil {
		return err
	}
	addresses = addresses[:min(len(addresses), maxAddresses)]
	counts, err := n.ns.CountedBy(peersRefused)
	if err != nil && !errors.Is(err, fs.ErrNotExist) { // there is no peer yet
		return err
	}
	peers := refused.peers(time.Now(), counts)
	n.mu.Lock()
	same := slices.Equal(n.addresses, addresses) && slices.Equal(n.refused, peers)
	n.addresses, n.refused = addresses, peers
	n.mu.Unlock()
	if !same {
		n.publish()
	}
	return nil
}

// maxAddresses is what InternalNode.status.addresses can hold.
const maxAddresses = 256

// update takes the result of a detection.
func (n *node) update(s sources) {
	n.mu.Lock()
	same := s.equal(n.sources)
	n.sources = s
	n.mu.Unlock()
	if same {
		return
	}
	level := slog.LevelInfo
	if len(s.problems) > 0 {
		level = slog.LevelWarn
	}
	n.log.Log(context.Background(), level, "addresses towards gateways",
		"local", s.local, "remote", s.remote, "problems", strings.Join(s.problems, "; "))
	n.publish()
}

// publish has the status written as it is now.
func (n *node) publish() {
	n.mu.Lock()
	st := NodeStatus{
		Local: n.sources.local, Remote: n.sources.remote, Kernel: n.release,
		Overlays: n.overlays(), WireGuard: n.wireGuard(), VTEP: n.vtep, Needs: n.needs, Addresses: n.addresses,
		Applied: slices.Clone(n.applied),
	}
	s, ready, overlay, refused := n.sources, n.ready, n.overlay, n.refused
	n.mu.Unlock()
	if ready.Type == "" {
		return // there was no pass yet
	}
	detected := Condition{"SourceDetected", "Detected", "the addresses towards all gateways are known", true}
	if len(s.problems) > 0 {
		detected = Condition{"SourceDetected", "NoSource", shorten(strings.Join(s.problems, "; ")), false}
	} else if !s.local.IsValid() && !s.remote.IsValid() {
		detected = Condition{"SourceDetected", "NoGateway", "there is no gateway to ask for", true}
	}
	st.Conditions = []Condition{ready, n.overlayCondition(overlay), detected, peersRefusedCondition(refused)}
	n.status.set(st)
}
