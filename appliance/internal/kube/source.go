package kube

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	networkingv1beta1 "github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/desired"
	"github.com/isthmus-net/isthmus/appliance/plan"
)

// A source is a set of informers. It tells when something changed that
// matters, and keeps what it knows while the API server is away.
type source struct {
	cache   cache.Cache
	client  client.Client
	changed chan struct{}
	log     *slog.Logger

	scheme   *runtime.Scheme
	selected []client.Object
	memory   *memory       // nil: none
	synced   chan struct{} // closed when everything has been read once
	gate     *gate
	said     said
}

// newSource returns a source of the objects that are selected. What it knows is
// remembered in m, which may be nil.
func newSource(config *rest.Config, selected map[client.Object]cache.ByObject, m *memory, log *slog.Logger) (*source, error) {
	scheme, mapper := Scheme(), mapper()
	newInformer, gate, err := newInformers(config, log)
	if err != nil {
		return nil, err
	}
	opts := cache.Options{
		Scheme:           scheme,
		Mapper:           mapper,
		ByObject:         selected,
		DefaultTransform: cache.TransformStripManagedFields(),
		// An object of a kind that nobody selected would start a watch
		// that RBAC does not allow.
		ReaderFailOnMissingInformer: true,
		DefaultWatchErrorHandler: func(_ context.Context, _ *toolscache.Reflector, err error) {
			log.Debug("watch", "err", err)
		},
		NewInformer: newInformer,
	}
	ca, err := cache.New(config, opts)
	if err != nil {
		return nil, fmt.Errorf("informers for %s: %w", config.Host, err)
	}
	cl, err := client.New(config, client.Options{Scheme: scheme, Mapper: mapper})
	if err != nil {
		return nil, fmt.Errorf("client for %s: %w", config.Host, err)
	}
	s := &source{
		cache: ca, client: cl, changed: make(chan struct{}, 1), log: log,
		scheme: scheme, memory: m, synced: make(chan struct{}), gate: gate,
	}
	for o := range selected {
		s.selected = append(s.selected, o)
		informer, err := ca.GetInformer(context.Background(), o, cache.BlockUntilSynced(false))
		if err != nil {
			return nil, fmt.Errorf("informer for %T: %w", o, err)
		}
		if _, err := informer.AddEventHandler(s.handler()); err != nil {
			return nil, fmt.Errorf("informer for %T: %w", o, err)
		}
	}
	return s, nil
}

// Start runs the informers until ctx is done.
func (s *source) Start(ctx context.Context) error {
	go func() {
		if s.cache.WaitForCacheSync(ctx) {
			close(s.synced)
			s.notify()
			if s.memory != nil {
				s.memory.run(ctx, s.cache, s.remembered)
			}
		}
	}()
	if err := s.cache.Start(ctx); err != nil {
		return fmt.Errorf("informers: %w", err)
	}
	return nil
}

// Synced waits until everything has been read once, or until it is clear that the API
// server is away and there is what the process before this one knew. The error
// is that of ctx.
func (s *source) Synced(ctx context.Context) error {
	for {
		if s.isSynced() || s.memory.usable() && s.memory.inUse.Load() {
			return nil
		}
		var away <-chan struct{}
		var late <-chan time.Time
		if s.memory.usable() {
			t := time.NewTimer(memoryPatience)
			defer t.Stop()
			away, late = s.gate.lost, t.C
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-s.synced:
			return nil
		case <-away:
			s.memory.use()
		case <-late:
			// Requests may be on their way to nowhere for half a minute. One that is answered,
			// whatever the answer, says that somebody is there.
			if s.gate.silent(ctx, memoryPatience) {
				s.memory.use()
			}
		}
	}
}

func (s *source) isSynced() bool {
	select {
	case <-s.synced:
		return true
	default:
		return false
	}
}

// A lists fills a list with the objects that are known. They are shared: nobody may
// change them.
type lists func(context.Context, client.ObjectList) error

// lists returns where all objects of one reading are from, and whether they are of
// today: half of them of today, and half of what was remembered, would contradict each
// other. So whoever reads asks once, for everything may be read any moment.
func (s *source) lists() (known lists, today bool) {
	if !s.isSynced() {
		return s.memory.list, false
	}
	return func(ctx context.Context, l client.ObjectList) error {
		return s.cache.List(ctx, l, client.UnsafeDisableDeepCopy)
	}, true
}

// remembered are the lists that the next process needs, by kind.
func (s *source) remembered() []client.ObjectList {
	var out []client.ObjectList
	for _, o := range s.selected {
		if _, own := o.(*networkingv1beta1.GatewayReport); own {
			continue // a gateway writes it, and reads it only to see whether it must
		}
		kinds, _, err := s.scheme.ObjectKinds(o)
		if err != nil {
			continue // it would have been refused by the informers
		}
		l, err := s.scheme.New(kinds[0].GroupVersion().WithKind(kinds[0].Kind + "List"))
		if err != nil {
			continue
		}
		out = append(out, l.(client.ObjectList))
	}
	slices.SortFunc(out, func(a, b client.ObjectList) int { return strings.Compare(listName(a), listName(b)) })
	return out
}

// Changed yields a value after something that matters has changed.
func (s *source) Changed() <-chan struct{} { return s.changed }

// Client returns a client that reads and writes directly, without the
// informers. It knows the kinds of the daemons only.
func (s *source) Client() client.Client { return s.client }

func (s *source) notify() {
	s.memory.touch()
	select {
	case s.changed <- struct{}{}:
	default: // one is waiting already
	}
}

func (s *source) handler() toolscache.ResourceEventHandler {
	return toolscache.ResourceEventHandlerFuncs{
		AddFunc:    func(any) { s.notify() },
		DeleteFunc: func(any) { s.notify() },
		UpdateFunc: func(old, updated any) {
			if matters(old, updated) {
				s.notify()
			}
		},
	}
}

// matters reports whether an update can change what a host should have. The
// status that hosts and the controller write all the time does not: with N
// nodes that report to N readers it would wake everybody N² times.
func matters(old, updated any) bool {
	a, ok1 := old.(client.Object)
	b, ok2 := updated.(client.Object)
	if !ok1 || !ok2 {
		return true
	}
	if a.GetUID() != b.GetUID() || a.GetGeneration() != b.GetGeneration() ||
		(a.GetDeletionTimestamp() == nil) != (b.GetDeletionTimestamp() == nil) ||
		!equality.Semantic.DeepEqual(a.GetLabels(), b.GetLabels()) {
		return true
	}
	switch b := b.(type) {
	case *networkingv1beta1.InternalNode:
		a := a.(*networkingv1beta1.InternalNode)
		return !equality.Semantic.DeepEqual(a.Status.NodeIP, b.Status.NodeIP) || !equality.Semantic.DeepEqual(a.Status.VTEP, b.Status.VTEP)
	case *networkingv1beta1.GatewayServer: // tells the peer
		return !equality.Semantic.DeepEqual(a.(*networkingv1beta1.GatewayServer).Status.Endpoint, b.Status.Endpoint)
	case *networkingv1beta1.PublicKey: // what was learned of the peer
		return !equality.Semantic.DeepEqual(a.(*networkingv1beta1.PublicKey).Status.Learned, b.Status.Learned)
	case *corev1.Secret:
		return !equality.Semantic.DeepEqual(a.(*corev1.Secret).Data, b.Data)
	case *corev1.ConfigMap:
		return !equality.Semantic.DeepEqual(a.(*corev1.ConfigMap).Data, b.Data)
	case *networkingv1beta1.Configuration:
		a := a.(*networkingv1beta1.Configuration)
		was, blocked := a.Annotations[networkingv1beta1.AnnotationBlocked]
		is, blocks := b.Annotations[networkingv1beta1.AnnotationBlocked]
		return was != is || blocked != blocks || !equality.Semantic.DeepEqual(a.Status.Remote, b.Status.Remote) ||
			!equality.Semantic.DeepEqual(a.Status.Local, b.Status.Local) || !equality.Semantic.DeepEqual(a.Status.Follow, b.Status.Follow)
	}
	return false
}

// A NodeSource knows what the API says about one node.
type NodeSource struct {
	*source
	cfg NodeSourceConfig

	// others has the InternalNodes of all nodes. It is needed in the VXLAN
	// overlay only: otherwise every node would be told of every other one.
	mu        sync.Mutex
	others    *source
	forgotten bool // there is no file of them
}

// NodeSourceConfig says what a [NodeSource] reads.
type NodeSourceConfig struct {
	Config *rest.Config // required
	Node   string       // name of the Node; required
	Logger *slog.Logger // optional
	// StateDir is where what is known is kept for the next process, which may start
	// while the API server is away; empty: nowhere.
	StateDir string
}

// A NodeView is what the API says about one node.
type NodeView struct {
	// Input has the objects, and no host facts.
	Input desired.NodeInput
}

// +kubebuilder:rbac:roleName=isthmus-node,groups=networking.liqo.io,resources=firewallconfigurations;genevetunnels;internalfabrics;internalnodes;routeconfigurations,verbs=list;watch

// NewNodeSource returns a source that needs to list and watch, in all
// namespaces: InternalNodes (its own; in the VXLAN overlay all), GeneveTunnels (those labelled with the
// node), InternalFabrics, and Route- and FirewallConfigurations of the category
// fabric. Where gateways are it knows by their InternalFabrics, not by their pods.
func NewNodeSource(cfg NodeSourceConfig) (*NodeSource, error) {
	if cfg.Config == nil || cfg.Node == "" {
		return nil, errors.New("kube: Config and Node are required")
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	label := func(key, value string) cache.ByObject {
		return cache.ByObject{Label: labels.SelectorFromSet(labels.Set{key: value})}
	}
	s, err := newSource(cfg.Config, map[client.Object]cache.ByObject{
		&networkingv1beta1.InternalNode{}:          {Field: fields.OneTermEqualSelector("metadata.name", cfg.Node)},
		&networkingv1beta1.GeneveTunnel{}:          label(networkingv1beta1.LabelNodeName, plan.Label(cfg.Node)),
		&networkingv1beta1.InternalFabric{}:        {},
		&networkingv1beta1.RouteConfiguration{}:    label(networkingv1beta1.LabelRouteCategory, networkingv1beta1.CategoryFabric),
		&networkingv1beta1.FirewallConfiguration{}: label(networkingv1beta1.LabelFirewallCategory, networkingv1beta1.CategoryFabric),
	}, openMemory(inDir(cfg.StateDir, "node.json"), cfg.Node, cfg.Logger), cfg.Logger)
	if err != nil {
		return nil, err
	}
	return &NodeSource{source: s, cfg: cfg}, nil
}

// othersFile is where the InternalNodes of all nodes are remembered.
const othersFile = "nodes.json"

// inDir returns a file of a directory; empty: there is no directory.
func inDir(dir, name string) string {
	if dir == "" {
		return ""
	}
	return filepath.Join(dir, name)
}

// forgetOthers removes what an earlier process remembered of other nodes, once nobody needs them:
// it would be old if they were needed again.
func (s *NodeSource) forgetOthers() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if file := inDir(s.cfg.StateDir, othersFile); file != "" && s.others == nil && !s.forgotten {
		s.forgotten = removeFile(file) == nil
	}
}

// allNodes returns a source of all InternalNodes when everything has been read
// once. It is started with the first call.
func (s *NodeSource) allNodes(ctx context.Context) (*source, error) {
	all, err := s.startOthers(ctx)
	if err != nil {
		return nil, err
	}
	return all, all.Synced(ctx)
}

func (s *NodeSource) startOthers(ctx context.Context) (*source, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.others == nil {
		all, err := newSource(s.cfg.Config, map[client.Object]cache.ByObject{&networkingv1beta1.InternalNode{}: {}},
			openMemory(inDir(s.cfg.StateDir, othersFile), s.cfg.Node, s.log), s.log)
		if err != nil {
			return nil, err
		}
		all.changed = s.changed
		s.others = all
		go func() {
			if err := all.Start(ctx); err != nil {
				s.log.Error("InternalNodes of the other nodes are no longer followed", "err", err)
			}
		}()
	}
	return s.others, nil
}

// Read returns what is known. It waits until that is everything there was
// when the daemon started; after that it does not depend on the API server.
func (s *NodeSource) Read(ctx context.Context) (NodeView, error) {
	if err := s.Synced(ctx); err != nil {
		return NodeView{}, err
	}
	var p problems
	known, today := s.lists()
	v := NodeView{Input: desired.NodeInput{
		Name:      s.cfg.Node,
		Label:     plan.Label(s.cfg.Node),
		Fabrics:   list(ctx, known, &p, &networkingv1beta1.InternalFabricList{}, InternalFabric),
		Tunnels:   list(ctx, known, &p, &networkingv1beta1.GeneveTunnelList{}, GeneveTunnel),
		Nodes:     list(ctx, known, &p, &networkingv1beta1.InternalNodeList{}, InternalNode),
		Routes:    list(ctx, known, &p, &networkingv1beta1.RouteConfigurationList{}, RouteConfiguration),
		Firewalls: list(ctx, known, &p, &networkingv1beta1.FirewallConfigurationList{}, FirewallConfiguration),
	}}
	if slices.ContainsFunc(v.Input.Nodes, func(n cluster.InternalNode) bool { return n.Overlay == cluster.OverlayVXLAN }) {
		all, err := s.allNodes(ctx)
		if err != nil {
			return NodeView{}, fmt.Errorf("read the InternalNodes of all nodes: %w", err)
		}
		own := v.Input.Nodes
		others, _ := all.lists()
		v.Input.Nodes = slices.DeleteFunc(list(ctx, others, &p, &networkingv1beta1.InternalNodeList{}, InternalNode),
			func(n cluster.InternalNode) bool { return n.Name == s.cfg.Node })
		v.Input.Nodes = append(v.Input.Nodes, own...)
	} else if today {
		s.forgetOthers()
	}
	v.Input.Problems = p.invalid
	return v, errors.Join(p.errs...)
}

// A GatewaySource knows what the API says about one gateway.
type GatewaySource struct {
	*source
	cfg GatewaySourceConfig
}

// GatewaySourceConfig says what a [GatewaySource] reads.
type GatewaySourceConfig struct {
	Config    *rest.Config // required
	Name      string       // of the GatewayServer or GatewayClient; required
	Namespace string       // tenant namespace; required
	System    string       // system namespace; required
	RemoteID  string       // cluster ID of the peer; required
	Node      string       // name of the Node that the gateway's pod runs on
	Mode      string       // cluster.Server or cluster.Client; required
	StateDir  string       // see NodeSourceConfig
	Logger    *slog.Logger // optional
}

// A GatewayView is what the API says about one gateway.
type GatewayView struct {
	// Input has the objects, and no host facts and no own key.
	Input desired.GatewayInput
	// Gateway is the gateway's own object; nil when it is not there (any
	// more).
	Gateway *cluster.Gateway
	// Connection is the gateway's own, nil as long as the controller has
	// not made it.
	Connection *cluster.Connection
	// Applied is what the gateway has reported last; nil as well while the API server is
	// away from a daemon that starts.
	Applied []cluster.Applied
}

// What every gateway reads outside of its own namespace: there it may do what
// plan's Role of the gateway says. A gateway asks for the FirewallConfigurations
// of IPs only, but RBAC can't be limited to labels.
//
// +kubebuilder:rbac:roleName=liqo-gateway,groups=networking.liqo.io,resources=firewallconfigurations;internalnodes,verbs=list;watch
// +kubebuilder:rbac:roleName=liqo-gateway,groups=networking.liqo.io,namespace=system,resources=routeconfigurations,verbs=list;watch
// +kubebuilder:rbac:roleName=liqo-gateway,groups="",namespace=system,resources=configmaps,resourceNames=isthmus-blocked-keys,verbs=list;watch

// NewGatewaySource returns a source that needs to list and watch, in the
// tenant namespace: Configurations, PublicKeys, GeneveTunnels,
// InternalFabrics, Route- and FirewallConfigurations, the GatewayServer or
// GatewayClient, the Connection and the GatewayReport of its own; in the
// system namespace: Route- and FirewallConfigurations, and the ConfigMap of the keys that
// are blocked; InternalNodes; and in all namespaces the FirewallConfigurations of IPs.
func NewGatewaySource(cfg GatewaySourceConfig) (*GatewaySource, error) {
	if cfg.Config == nil || cfg.Name == "" || cfg.Namespace == "" || cfg.System == "" || cfg.RemoteID == "" {
		return nil, errors.New("kube: Config, Name, Namespace, System and RemoteID are required")
	}
	if cfg.Mode != cluster.Server && cfg.Mode != cluster.Client {
		return nil, fmt.Errorf("kube: mode %q: write %s or %s", cfg.Mode, cluster.Server, cluster.Client)
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	tenant := map[string]cache.Config{cfg.Namespace: {}}
	named := func(name string) cache.ByObject {
		return cache.ByObject{Namespaces: tenant, Field: fields.OneTermEqualSelector("metadata.name", name)}
	}
	ofGateways := func(key string) map[string]cache.Config {
		c := cache.Config{LabelSelector: labels.SelectorFromSet(labels.Set{key: networkingv1beta1.CategoryGateway})}
		return map[string]cache.Config{cfg.Namespace: c, cfg.System: c}
	}
	firewalls := ofGateways(networkingv1beta1.LabelFirewallCategory)
	// Those of IPs are where the IP is; in the two others they are among the rest.
	firewalls[cache.AllNamespaces] = cache.Config{LabelSelector: labels.SelectorFromSet(labels.Set{
		networkingv1beta1.LabelFirewallCategory: networkingv1beta1.CategoryGateway, networkingv1beta1.LabelFirewallSubcategory: networkingv1beta1.SubcategoryIPMapping,
	})}
	selected := map[client.Object]cache.ByObject{
		&networkingv1beta1.Configuration{}:         {Namespaces: tenant},
		&networkingv1beta1.PublicKey{}:             {Namespaces: tenant},
		&corev1.ConfigMap{}:                        {Namespaces: map[string]cache.Config{cfg.System: {}}, Field: fields.OneTermEqualSelector("metadata.name", networkingv1beta1.BlockedKeysConfigMap)},
		&networkingv1beta1.GeneveTunnel{}:          {Namespaces: tenant},
		&networkingv1beta1.InternalFabric{}:        {Namespaces: tenant},
		&networkingv1beta1.InternalNode{}:          {},
		&networkingv1beta1.RouteConfiguration{}:    {Namespaces: ofGateways(networkingv1beta1.LabelRouteCategory)},
		&networkingv1beta1.FirewallConfiguration{}: {Namespaces: firewalls},
		&networkingv1beta1.Connection{}:            named(plan.GatewayName(cfg.Name)),
		&networkingv1beta1.GatewayReport{}:         named(plan.GatewayName(cfg.Name)),
	}
	if cfg.Mode == cluster.Client {
		selected[&networkingv1beta1.GatewayClient{}] = named(cfg.Name)
	} else {
		selected[&networkingv1beta1.GatewayServer{}] = named(cfg.Name)
	}
	owner := cfg.Mode + " " + cfg.Namespace + "/" + cfg.Name
	s, err := newSource(cfg.Config, selected, openMemory(inDir(cfg.StateDir, "gateway.json"), owner, cfg.Logger), cfg.Logger)
	if err != nil {
		return nil, err
	}
	return &GatewaySource{s, cfg}, nil
}

// Read returns what is known. It waits until that is everything there was
// when the daemon started; after that it does not depend on the API server.
func (s *GatewaySource) Read(ctx context.Context) (GatewayView, error) {
	if err := s.Synced(ctx); err != nil {
		return GatewayView{}, err
	}
	var p problems
	known, today := s.lists()
	v := GatewayView{Input: desired.GatewayInput{
		Name:           s.cfg.Name,
		Namespace:      s.cfg.Namespace,
		RemoteID:       s.cfg.RemoteID,
		Mode:           s.cfg.Mode,
		NodeName:       s.cfg.Node,
		NodeLabel:      plan.Label(s.cfg.Node),
		Configurations: list(ctx, known, &p, &networkingv1beta1.ConfigurationList{}, Configuration),
		PublicKeys:     list(ctx, known, &p, &networkingv1beta1.PublicKeyList{}, PublicKey),
		Fabrics:        list(ctx, known, &p, &networkingv1beta1.InternalFabricList{}, InternalFabric),
		Tunnels:        list(ctx, known, &p, &networkingv1beta1.GeneveTunnelList{}, GeneveTunnel),
		Nodes:          list(ctx, known, &p, &networkingv1beta1.InternalNodeList{}, InternalNode),
		Routes:         list(ctx, known, &p, &networkingv1beta1.RouteConfigurationList{}, RouteConfiguration),
		Firewalls:      list(ctx, known, &p, &networkingv1beta1.FirewallConfigurationList{}, FirewallConfiguration),
	}}
	v.Input.BlockedKeys = slices.Concat(list(ctx, known, &p, &corev1.ConfigMapList{}, BlockedKeys)...)
	var gateways []cluster.Gateway
	if s.cfg.Mode == cluster.Client {
		gateways = list(ctx, known, &p, &networkingv1beta1.GatewayClientList{}, GatewayClient)
	} else {
		gateways = list(ctx, known, &p, &networkingv1beta1.GatewayServerList{}, GatewayServer)
	}
	for _, g := range gateways {
		v.Gateway = &g
	}
	for _, c := range list(ctx, known, &p, &networkingv1beta1.ConnectionList{}, Connection) {
		v.Connection = &c
	}
	if today { // it is not among what is remembered
		for _, r := range list(ctx, known, &p, &networkingv1beta1.GatewayReportList{}, GatewayReport) {
			v.Applied = r.Applied
		}
	}
	v.Input.Problems = p.invalid
	return v, errors.Join(p.errs...)
}

// problems collects what went wrong while lists were read.
type problems struct {
	invalid []cluster.InvalidError
	errs    []error
}

// list returns the values of all objects of one kind that are known.
func list[T, V any](ctx context.Context, known lists, p *problems, l client.ObjectList, parse func(*T) (V, []cluster.InvalidError)) []V {
	// The values share maps with the objects.
	if err := known(ctx, l); err != nil {
		p.errs = append(p.errs, fmt.Errorf("list %T: %w", l, err))
		return nil
	}
	var out []V
	err := meta.EachListItem(l, func(o runtime.Object) error {
		t, ok := any(o).(*T)
		if !ok {
			return fmt.Errorf("item %T", o)
		}
		v, invalid := parse(t)
		out = append(out, v)
		p.invalid = append(p.invalid, invalid...)
		return nil
	})
	if err != nil {
		p.errs = append(p.errs, fmt.Errorf("list %T: %w", l, err))
	}
	return out
}
