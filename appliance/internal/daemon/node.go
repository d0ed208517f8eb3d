package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

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
	VTEP          cluster.VTEP     // zero: the node has no end of the VXLAN overlay
	Needs         []cluster.Needed // addresses of other hosts that it can't do without
	Applied       []cluster.Applied
	Conditions    []Condition
}

func (a NodeStatus) equal(b NodeStatus) bool {
	return a.Local == b.Local && a.Remote == b.Remote && a.Kernel == b.Kernel &&
		slices.Equal(a.Overlays, b.Overlays) && a.VTEP == b.VTEP && slices.Equal(a.Needs, b.Needs) &&
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
	n := &node{host: h, cfg: cfg, release: kernelRelease()}
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

	mu      sync.Mutex
	sources sources
	applied []cluster.Applied
	ready   Condition
	overlay cluster.Overlay
	vtep    cluster.VTEP
	needs   []cluster.Needed
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
			}
		}
		// Before anything is reported: a daemon that starts would withdraw the
		// addresses that the one before it has reported, and gateways would
		// take their links to this node down.
		n.update(detect(n.ns, n.cfg.NodeName, view.GatewayPods))
	}
	needs := newNeedsReader(n.ns, n.cfg.APIServer, needed)
	n.setNeeds(needs.read(ctx)) // before anything is reported, for the same reason
	fan := newFanout(ctx, g, n.cfg.API.Changed())
	g.run("status", func() error { return n.status.run(ctx) })
	g.run("underlay", func() error { return n.below.run(ctx) })
	g.run("features", func() error { return n.watchFeatures(ctx, n.publish) })
	detectNow := fan.subscribe()
	g.run("needs", func() error { return n.watchNeeds(ctx, needs) })
	g.run("source detection", func() error { return n.detectSources(ctx, detectNow) })
	return agent.Run(ctx, agent.Config[desired.NodeInput]{
		Source:  source[desired.NodeInput]{merge(ctx, g, fan.subscribe(), n.below.changed), n.read},
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
	in := view.Input
	in.GenevePort, in.RulePriority = n.cfg.GenevePort, n.cfg.RulePriority
	in.NodeIP = n.nodeIP()
	var own *netip.Addr
	if in.NeedsUplinks() {
		own = &in.NodeIP
	}
	in.Underlay = n.below.readWith(own, in.Remotes(), in.HostInterfaces()...)
	return in, nil
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
	o := outcomeOf(r)
	n.metrics.pass(o)
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
	left := leftovers{node: n.cfg.NodeName, since: map[string]time.Time{}}
	once := newOnce(n.log)
	for {
		// That the objects can't be read is the loop's to complain about.
		if view, err := n.cfg.API.Read(ctx); err == nil {
			n.update(detect(n.ns, n.cfg.NodeName, view.GatewayPods))
			gone, err := n.ns.RemovePeers(left.of(view.GatewayPods, time.Now()))
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
		Overlays: n.overlays(), VTEP: n.vtep, Needs: n.needs,
		Applied: slices.Clone(n.applied),
	}
	s, ready, overlay := n.sources, n.ready, n.overlay
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
	st.Conditions = []Condition{ready, n.overlayCondition(overlay), detected}
	n.status.set(st)
}
