package daemon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/isthmus-net/isthmus/appliance/agent"
	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/desired"
	"github.com/isthmus-net/isthmus/appliance/internal/kube"
	"github.com/isthmus-net/isthmus/appliance/internal/probe"
	"github.com/isthmus-net/isthmus/appliance/kernel"
	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// ReportStatus is GatewayReport.status.
type ReportStatus struct {
	Implementation string // kernel or userspace
	MTU            int    // of the tunnel
	Endpoint       netip.AddrPort
	LastHandshake  time.Time // zero: never
	Applied        []cluster.Applied
	Conditions     []Condition
}

// equal leaves out the handshake, which is new every two minutes and no news.
func (a ReportStatus) equal(b ReportStatus) bool {
	return a.Implementation == b.Implementation && a.MTU == b.MTU && a.Endpoint == b.Endpoint &&
		b.LastHandshake.Sub(a.LastHandshake).Abs() < handshakeNews &&
		equalApplied(a.Applied, b.Applied) && slices.Equal(a.Conditions, b.Conditions)
}

// handshakeNews is how much later a handshake must be to be written to the
// API server on its own account. WireGuard makes one every two minutes.
const handshakeNews = 3 * time.Minute

// GatewayConfig is what the gateway daemon needs. Name, Namespace, RemoteID,
// Mode, KeysDir, API, WriteConnection and WriteReport are required.
type GatewayConfig struct {
	Version         string // of the program, which the peer is told (default unknown)
	Name, Namespace string // of the GatewayServer or GatewayClient
	RemoteID        string // cluster ID of the peer
	Mode            string // cluster.Server or cluster.Client
	NodeName        string
	PodIP           netip.Addr // invalid: the source of the default route

	ListenPort uint16 // of a server; 0: default
	MTU        int    // 0: derive
	// EndpointHosts are the addresses or names of a client's server. The first
	// is dialled, the others when nobody answers there.
	EndpointHosts  []string
	EndpointPort   uint16
	KeysDir        string // holds the files privateKey and publicKey
	StateDir       string // see kernel.Config
	Implementation kernel.Implementation
	// NetNS is the file of the network namespace of the node that the gateway
	// is in, and HostInterface the node's end of the pair that leads there;
	// both are empty for a gateway in the namespace of its pod. StateDir is
	// that of HoldNetNS then.
	NetNS, HostInterface string
	GenevePort           uint16
	RulePriority         uint32

	// The probe of the tunnel; zero values are the defaults.
	PingPort      uint16
	PingInterval  time.Duration
	PingThreshold int
	// StatusInterval is the longest time between writes of the latency
	// (default 10 s).
	StatusInterval time.Duration

	API API[kube.GatewayView]
	// Handover is its part in an invitation; nil: it takes none.
	Handover Handover
	// Rotation is its part in changes of keys; nil: it takes none.
	Rotation Rotation
	Knock    kube.Knock // see NodeConfig; not asked for a gateway in a network namespace of its node
	// WriteConnection and WriteReport write the status of the gateway's
	// Connection and of its GatewayReport.
	WriteConnection func(context.Context, ConnectionStatus) error
	WriteReport     func(context.Context, ReportStatus) error

	Serving Serving
	Logger  *slog.Logger
}

func (c *GatewayConfig) setDefaults() error {
	var errs []error
	for _, f := range []struct{ name, value string }{
		{"name", c.Name}, {"namespace", c.Namespace}, {"remote-cluster-id", c.RemoteID}, {"keys-dir", c.KeysDir},
	} {
		if f.value == "" {
			errs = append(errs, fmt.Errorf("%s is required", f.name))
		}
	}
	switch c.Mode {
	case cluster.Server:
	case cluster.Client:
		if len(c.EndpointHosts) == 0 || slices.Contains(c.EndpointHosts, "") || c.EndpointPort == 0 {
			errs = append(errs, errors.New("a client needs endpoint-address and endpoint-port: where the peer's server can be reached"))
		}
	default:
		errs = append(errs, fmt.Errorf("mode %q is neither %s nor %s", c.Mode, cluster.Server, cluster.Client))
	}
	switch c.Implementation {
	case "":
		c.Implementation = kernel.Auto
	case kernel.Auto, kernel.Kernel, kernel.Userspace:
	default:
		errs = append(errs, fmt.Errorf("implementation %q is not known; write auto, kernel or userspace", c.Implementation))
	}
	if c.API == nil || c.WriteConnection == nil || c.WriteReport == nil {
		errs = append(errs, errors.New("GatewayConfig.API, WriteConnection and WriteReport are required"))
	}
	if (c.NetNS == "") != (c.HostInterface == "") || c.NetNS != "" && c.StateDir == "" {
		errs = append(errs, errors.New("a gateway in a network namespace of its node needs netns, host-interface and state-dir"))
	}
	c.Version = cmp.Or(c.Version, "unknown")
	if c.PingPort == 0 {
		c.PingPort = probe.Port
	}
	if c.StatusInterval <= 0 {
		c.StatusInterval = 10 * time.Second
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return errors.Join(errs...)
}

// RunGateway keeps the tunnel to the peer and the way to every node in order
// until ctx is done, and leaves them in place then.
func RunGateway(ctx context.Context, cfg GatewayConfig) error {
	if err := cfg.setDefaults(); err != nil {
		return fmt.Errorf("daemon: %w", err)
	}
	gw := &gateway{cfg: cfg, keys: newKeyring(cfg.KeysDir, cfg.Logger), passed: make(chan struct{}, 1), repair: make(chan struct{}, 1)}
	below, err := gw.enterHost(ctx)
	if err != nil {
		return err
	}
	h, err := openHost(ctx, kernel.Config{
		PrivateKey:     gw.keys.forKernel,
		PresharedKey:   gw.keys.sharedForKernel,
		StateDir:       cfg.StateDir,
		Implementation: cfg.Implementation,
		NetNS:          cfg.NetNS,
	}, cfg.Logger)
	if err != nil {
		return err
	}
	defer h.ns.Close()
	gw.host = h
	gw.exchange = newExchanger()
	if cfg.Handover != nil {
		gw.handover = newHandover(cfg.Handover)
	}
	if cfg.Rotation != nil {
		gw.rotating = newRotating(cfg.Rotation, cfg.Mode == cluster.Client)
	}
	if cfg.NetNS != "" {
		cfg.Knock = nil // what is done in that namespace is on no way to the API server
	}
	gw.confirm = newConfirmer(cfg.Knock, cfg.StateDir, cfg.Logger)
	if below != nil {
		defer below.Close()
		h.below = newUnderlayWatch(below)
	}
	hosts := cfg.EndpointHosts
	if cfg.Mode == cluster.Server {
		hosts = []string{""} // a server learns where its peer is
	}
	for _, host := range hosts {
		gw.resolvers = append(gw.resolvers, newResolver(host, cfg.EndpointPort, net.DefaultResolver.LookupNetIP, gw.down, cfg.Logger))
	}
	gw.connection = newReporter("Connection.status", cfg.Logger, func(a, b ConnectionStatus) bool { return a == b }, cfg.WriteConnection)
	gw.reports = newReporter("GatewayReport.status", cfg.Logger, ReportStatus.equal, cfg.WriteReport)

	c := newTunnelCollector(cfg.RemoteID)
	_, peer := desired.TunnelAddresses(cfg.Mode)
	if err := h.ns.Do(func() (err error) {
		gw.prober, err = probe.Open(ctx, probe.Config{
			Peer: netip.AddrPortFrom(peer, cfg.PingPort),
			// The public system sends the ID of the cluster that it asks.
			ClusterID: cfg.RemoteID,
			Interval:  cfg.PingInterval, Threshold: cfg.PingThreshold, Logger: cfg.Logger,
			RoundTrip: func(d time.Duration) { c.roundTrips.Observe(float64(d.Microseconds())) },
		})
		return err
	}); err != nil {
		return err
	}
	if cfg.NetNS != "" {
		if err := kernel.GiveUpSysAdmin(); err != nil { // all that needed it is open
			return err
		}
	}
	c.peer, c.status, c.implementation = gw.shown, gw.prober.Status, h.ns.Implementation
	c.blocked = func() bool {
		gw.mu.Lock()
		defer gw.mu.Unlock()
		return gw.blocked != ""
	}
	c.denied = func() (uint64, error) {
		internal, err := h.ns.Counted(netstate.TableID{Family: netstate.FamilyINET, Name: desired.InternalOnlyTable})
		if err != nil && !errors.Is(err, fs.ErrNotExist) { // there may be no address of the internal CIDR yet
			return 0, err
		}
		itself, err := h.ns.Counted(netstate.TableID{Family: netstate.FamilyINET, Name: desired.PeersRefusedTable})
		return internal + itself, err
	}
	h.metrics.registry.MustRegister(c)

	g, ctx := newGroup(ctx)
	if err := h.serve(ctx, g, cfg.Serving); err != nil {
		return err
	}
	if cfg.NetNS != "" {
		g.run("network namespace", func() error { return gw.watchNetNS(ctx) })
	}
	g.run("gateway", func() error { return gw.run(ctx, g) })
	return g.wait(ctx)
}

// A gateway is the running gateway daemon.
type gateway struct {
	*host
	cfg        GatewayConfig
	keys       *keyring
	resolvers  []*resolver // of EndpointHosts; one of a server
	learned    learnedPlaces
	prober     *probe.Prober
	connection *reporter[ConnectionStatus]
	reports    *reporter[ReportStatus]
	passed     chan struct{} // yields after a pass
	handover   *handover     // nil: it takes part in no invitation
	rotating   *rotating     // nil: it takes part in no change of keys
	exchange   *exchanger
	repair     chan struct{} // yields when a pass has something to put right
	confirm    *confirmer

	mu      sync.Mutex
	mtu     int
	path    pathToPeer // that the last pass read
	applied []cluster.Applied
	ready   Condition
	fits    Condition
	overlay Condition
	place   Condition // EndpointConfigured, as it was when the peer answered last
	// computed: there was a pass that knew what is wanted; wanted: it wanted a peer.
	computed, wanted bool
	// temporary: that pass was about the tunnel of an invitation.
	temporary bool
	blocked   string // see tunnelFacts
	// configuration is that of the peer, as that pass had it; nil: there was none.
	configuration *cluster.Configuration
	// lastPeer is the peer as it was shown last.
	lastPeer kernel.PeerStatus
}

func (gw *gateway) run(ctx context.Context, g *group) error {
	g.run("keys", func() error { return gw.keys.run(ctx) })
	for _, r := range gw.resolvers {
		g.run("resolver", func() error { return r.run(ctx) })
	}
	g.run("informers", func() error { return gw.cfg.API.Start(ctx) })
	if gw.rotating != nil {
		g.run("rotation informer", func() error { return gw.cfg.Rotation.Start(ctx) })
	}
	if err := gw.waitSynced(ctx, gw.cfg.API.Synced); err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return err
	}
	if !gw.waitKeys(ctx) {
		return nil
	}
	if view, err := gw.cfg.API.Read(ctx); err == nil {
		gw.confirm.inForce(gw.users(view.Input), view.Applied)
		gw.exchange.recall(view.Connection)
	}
	g.run("confirm", func() error { return gw.confirm.run(ctx) })
	g.run("connection status", func() error { return gw.connection.run(ctx) })
	g.run("report", func() error { return gw.reports.run(ctx) })
	g.run("underlay", func() error { return gw.below.run(ctx) })
	g.run("features", func() error { return gw.watchFeatures(ctx, gw.publish) })
	g.run("conncheck", func() error { return gw.watchTunnel(ctx, g) })
	if gw.cfg.Mode == cluster.Client {
		g.run("learned places", func() error { return gw.learnPlaces(ctx, g) })
	}
	if gw.handover != nil {
		g.run("invitation", func() error { return gw.runHandover(ctx, g) })
	}
	if gw.rotating != nil {
		gw.waitRotation(ctx)
		g.run("rotation", func() error { return gw.runRotation(ctx) })
		g.run("repair", func() error { return gw.runRepair(ctx) })
		g.run("repair of the peer", func() error { return gw.listenToFormer(ctx) })
	}
	return agent.Run(ctx, agent.Config[desired.GatewayInput]{
		Source: source[desired.GatewayInput]{
			merge(ctx, g, gw.cfg.API.Changed(), gw.below.changed, gw.keys.changed, gw.resolvers[0].changed, gw.repair, gw.confirm.changed), gw.read,
		},
		Target:  tunnelTarget{watched{gw.ns, gw.health}, gw},
		Desired: desired.Gateway,
		Report:  gw.report,
		Logger:  gw.log,
	})
}

// waitKeys waits for the first key pair; false when ctx ended before.
func (gw *gateway) waitKeys(ctx context.Context) bool {
	for ctx.Err() == nil {
		if _, ok := gw.keys.publicKey(); ok {
			return true
		}
		gw.health.waiting("waiting for the key pair in " + gw.cfg.KeysDir)
		select {
		case <-ctx.Done():
		case <-gw.keys.changed:
		}
	}
	return false
}

// read joins what the API says and what the gateway knows.
func (gw *gateway) read(ctx context.Context) (desired.GatewayInput, error) {
	view, err := gw.cfg.API.Read(ctx)
	if err != nil {
		return desired.GatewayInput{}, fmt.Errorf("read the objects: %w", err)
	}
	gw.health.At("reading what the host knows")
	defer gw.health.At("computing the desired state")
	in := view.Input
	in.NodeName, in.ListenPort, in.MTU = gw.cfg.NodeName, gw.cfg.ListenPort, gw.cfg.MTU
	in.HostInterface, in.ProbePort = gw.cfg.HostInterface, gw.cfg.PingPort
	in.GenevePort, in.RulePriority = gw.cfg.GenevePort, gw.cfg.RulePriority
	in.PublicKey, _ = gw.keys.publicKey()
	in.PresharedKey = gw.keys.presharedKey()
	in.PeerEndpoint, in.LearnedPorts = gw.resolvers[0].endpoint(), gw.learned.ports()
	in.PodIP = gw.podIP()
	gw.handOver(&in)
	left, instead := gw.confirm.choose(ctx, gw.users(in))
	in.LeftOut, in.APIServers = left, gw.confirm.apiServers()
	in.Routes, in.Firewalls = slices.Concat(in.Routes, instead.routes), slices.Concat(in.Firewalls, instead.firewalls)
	in.PeerHeard, in.PeerMTU = gw.heard(), gw.peerMTU()
	in.Underlay = gw.below.read(in.Remotes())
	gw.rotate(&in) // late: what else is read may take seconds, and the peer may change its key
	gw.prober.SetMTU(in.Room())
	var generation int64
	if view.Gateway != nil {
		generation = view.Gateway.Generation
	}
	gw.exchange.say(ownMessage(gw.cfg.Version, in, view.Gateway), generation)
	gw.mu.Lock()
	defer gw.mu.Unlock()
	gw.path = pathToPeer{in.PeerHeard, in.PeerMTU}
	return in, nil
}

// users are the objects of users that are addressed to the gateway.
func (gw *gateway) users(in desired.GatewayInput) users {
	label := cmp.Or(in.NodeLabel, in.NodeName)
	return usersOf(in.Routes, in.Firewalls, func(labels map[string]string) bool { return desired.GatewaySelects(labels, in.RemoteID, label) })
}

// A pathToPeer is what the tunnel's MTU depends on and no event of the kernel or the API
// tells.
type pathToPeer struct {
	heard netip.Addr // see desired.GatewayInput.PeerHeard
	mtu   int        // and PeerMTU
}

// heard is where WireGuard has last heard the peer. A client also has an endpoint that it
// has not heard; a server has it from what it heard, and keeps it when it begins anew.
func (gw *gateway) heard() netip.Addr {
	p, ok := gw.peer()
	if !ok || gw.cfg.Mode == cluster.Client && p.LastHandshake.IsZero() {
		return netip.Addr{}
	}
	return p.Endpoint.Addr().Unmap()
}

// watchPath has a pass made when the last one went by another path to the peer.
func (gw *gateway) watchPath() {
	now := pathToPeer{gw.heard(), gw.peerMTU()}
	gw.mu.Lock()
	was := gw.path
	gw.mu.Unlock()
	if now != was {
		notify(gw.repair)
	}
}

// podIP is the address that the pod's packets have.
func (gw *gateway) podIP() netip.Addr {
	if gw.cfg.PodIP.IsValid() {
		return gw.cfg.PodIP
	}
	return defaultSource(gw.ns)
}

// peer returns the live data of the one peer: with the key that was heard last, where it may
// have two.
func (gw *gateway) peer() (kernel.PeerStatus, bool) {
	peers, err := gw.ns.Peers(desired.TunnelInterface)
	if err != nil {
		return kernel.PeerStatus{}, false
	}
	former := gw.formerKey()
	peers = slices.DeleteFunc(peers, func(p kernel.PeerStatus) bool { return p.PublicKey == former })
	if len(peers) == 0 {
		return kernel.PeerStatus{}, false
	}
	heard := func(p kernel.PeerStatus) time.Time {
		if gw.rotating == nil || len(peers) == 1 {
			return p.LastHandshake
		}
		return gw.rotating.handshake(p.PublicKey, p.LastHandshake) // WireGuard forgets it when it begins anew
	}
	return slices.MaxFunc(peers, func(a, b kernel.PeerStatus) int { return heard(a).Compare(heard(b)) }), true
}

// shown is peer with the last handshake that there was: WireGuard forgets it when it
// begins anew.
func (gw *gateway) shown() (kernel.PeerStatus, bool) {
	p, ok := gw.peer()
	if !ok {
		return p, false
	}
	gw.mu.Lock()
	defer gw.mu.Unlock()
	if p.LastHandshake.IsZero() && p.PublicKey == gw.lastPeer.PublicKey {
		p.LastHandshake = gw.lastPeer.LastHandshake
	}
	gw.lastPeer = p
	return p, true
}

// down reports whether the tunnel is known not to work.
func (gw *gateway) down() bool { return gw.prober.Status().State != probe.Connected }

// report takes the result of a pass.
func (gw *gateway) report(r agent.Result[desired.GatewayInput]) {
	gw.health.At("telling what came of it")
	defer gw.health.At("") // the pass is over
	o := outcomeOf(r)
	gw.metrics.pass(o)
	gw.confirm.pass(o)
	isTunnel := func(l netstate.Link) bool { return l.Kind == netstate.KindWireGuard }
	if o.computed() && len(o.remaining.SetWireGuard) == 0 && !remainingLinks(o.remaining, isTunnel) {
		// Whether the peer answers doesn't matter: it may be configured
		// only once this gateway is ready. Nor does a user's bad route.
		gw.health.setReady()
	} else if o.err != nil {
		gw.health.waiting("the first pass failed: " + o.err.Error())
	}
	gw.mu.Lock()
	gw.ready, gw.fits, gw.overlay = readyCondition(o), mtuCondition(r.Input), gw.linkCondition(r.Input)
	if o.computed() {
		gw.computed, gw.blocked = true, blockedBy(r.Input)
		gw.temporary, gw.configuration = r.Input.Handover != nil, r.Input.Configuration()
		gw.wanted = !gw.temporary && slices.ContainsFunc(o.want.WireGuard, func(w netstate.WireGuard) bool { return len(w.Peers) > 0 })
		failed := blame(objects{r.Input.Routes, r.Input.Firewalls, r.Input.Tunnels}, o.remaining, o.err)
		gw.applied = applied(o.results, failed, gw.applied, time.Now())
		for _, l := range o.want.Links {
			if isTunnel(l) {
				gw.mtu = l.MTU
			}
		}
	}
	gw.mu.Unlock()
	notify(gw.passed)
	if gw.handover != nil {
		notify(gw.handover.arrived)
	}
	if gw.rotating != nil && o.computed() && len(o.remaining.SetWireGuard) == 0 {
		gw.rotationApplied(r.Input)
	}
	gw.publish()
}

// linkCondition says whether the gateway's own kernel has what joins it to
// nodes. In the VXLAN overlay that is their business: they send to the pod.
func (gw *gateway) linkCondition(in desired.GatewayInput) Condition {
	if in.ExpectedOverlay() == cluster.OverlayVXLAN {
		how := "nodes reach this pod by its own link"
		if in.HostInterface != "" {
			how = "nodes reach this gateway by the link " + in.HostInterface + " of its node"
		}
		return Condition{"OverlaySupported", "Supported", how, true}
	}
	return gw.overlayCondition(cluster.OverlayGeneve)
}

// mtuCondition says whether the MTU that somebody wrote fits into the network
// below.
func mtuCondition(in desired.GatewayInput) Condition {
	mtu, problem := in.TunnelMTU()
	if problem != "" {
		return Condition{"MTUFits", "TooLarge", problem, false}
	}
	text := fmt.Sprintf("packets of %d bytes fit into the network below, which has room for %d", mtu, in.Room())
	if in.PeerMTU > 0 {
		text += fmt.Sprintf("; below the peer there is room for %d", in.PeerMTU)
	}
	return Condition{"MTUFits", "Fits", text, true}
}

// publish has the report written as it is now.
func (gw *gateway) publish() {
	gw.mu.Lock()
	st := ReportStatus{
		Implementation: string(gw.ns.Implementation()),
		MTU:            gw.mtu,
		Applied:        slices.Clone(gw.applied),
	}
	ready, fits, overlay := gw.ready, gw.fits, gw.overlay
	gw.mu.Unlock()
	if ready.Type == "" {
		return // there was no pass yet
	}
	st.Conditions = []Condition{ready, overlay, fits}
	if p, ok := gw.shown(); ok {
		st.Endpoint, st.LastHandshake = p.Endpoint, p.LastHandshake
	}
	if gw.cfg.Mode == cluster.Client {
		gw.mu.Lock()
		// Where nobody answers it only looks for the peer: that is no news of where it is.
		if gw.place.Type == "" || !gw.down() {
			gw.place = gw.endpointCondition(st.Endpoint)
		}
		st.Conditions = append(st.Conditions, gw.place)
		gw.mu.Unlock()
	}
	gw.reports.set(st)
}

// watchTunnel probes the tunnel as soon as it has a peer, and has what it
// finds written: at once when the state changes, the latency every so often.
func (gw *gateway) watchTunnel(ctx context.Context, g *group) error {
	for !gw.wantsPeer() {
		select {
		case <-ctx.Done():
			return nil
		case <-gw.passed:
		}
		gw.tell(false) // what is missing
	}
	g.run("conncheck", func() error { return gw.prober.Run(ctx) })
	g.run("session", func() error { return gw.watchSession(ctx) })
	g.run("exchange", func() error { return gw.tellPeer(ctx) })
	g.run("exchange with who dials", func() error { return gw.listenToPeer(ctx) })
	tick := time.NewTicker(gw.cfg.StatusInterval)
	defer tick.Stop()
	for {
		gw.watchPath()
		gw.tell(true)
		gw.publish() // endpoint and handshake
		for waiting := true; waiting; {
			select {
			case <-ctx.Done():
				return nil
			case <-gw.passed:
				gw.tell(false)
				continue
			case <-tick.C:
			case <-gw.prober.Changed():
				notify(gw.exchange.news)
			}
			waiting = false
		}
	}
}

// wantsPeer reports whether the tunnel is to have a peer.
func (gw *gateway) wantsPeer() bool {
	gw.mu.Lock()
	defer gw.mu.Unlock()
	return gw.wanted
}
