package daemon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/appliance/agent"
	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/kernel"
	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// An outcome is what both daemons look at in the result of a pass.
type outcome struct {
	want      netstate.State
	results   []cluster.Applied
	changes   netstate.Changes
	remaining netstate.Changes
	err       error
	took      time.Duration
}

func outcomeOf[In any](r agent.Result[In]) outcome {
	return outcome{r.Desired, r.Objects, r.Changes, r.Remaining, r.Err, r.Duration}
}

// computed reports whether the pass got as far as applying something.
func (o outcome) computed() bool { return o.err == nil || !o.remaining.Empty() }

// A host is what both daemons are made of.
type host struct {
	log     *slog.Logger
	ns      *kernel.NetNS
	health  *health
	metrics *metrics
	below   *underlayWatch

	mu       sync.Mutex
	features []kernel.Feature
	// noWireGuard is how many probes in turn have said that the kernel has no WireGuard.
	noWireGuard int
}

// openHost opens the kernel, in the network namespace of the calling thread,
// and refuses one that is too old.
func openHost(ctx context.Context, cfg kernel.Config, log *slog.Logger) (*host, error) {
	h, err := newHost(cfg, log)
	if err != nil {
		return nil, err
	}
	h.probeFeatures(ctx)
	if err := h.feature(kernel.FeatureVersion); err != nil {
		return nil, errors.Join(err, h.ns.Close())
	}
	return h, nil
}

// newHost opens the kernel, whatever its version.
func newHost(cfg kernel.Config, log *slog.Logger) (*host, error) {
	cfg.Logger = log
	ns, err := kernel.Open(cfg)
	if err != nil {
		return nil, fmt.Errorf("open the network namespace: %w", err)
	}
	return &host{
		log: log, ns: ns,
		health:  newHealth(),
		metrics: newMetrics(ns.InNoRoutes),
		below:   newUnderlayWatch(ns),
	}, nil
}

// probeFeatures asks what the kernel can do. It is asked again while something
// is missing, because modules can be loaded.
func (h *host) probeFeatures(ctx context.Context) {
	if features := h.ns.Features(ctx); features != nil { // ctx is not done
		h.probed(features)
	}
}

// probed takes the result of a probe.
func (h *host) probed(features []kernel.Feature) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.features = features
	h.noWireGuard++
	if !errors.Is(kernel.Missing(features, kernel.FeatureWireGuard), kernel.ErrNotInKernel) {
		h.noWireGuard = 0
	}
}

// wireGuard reports whether the kernel has WireGuard; nil: not known. Gateways are
// replaced where a kernel has none, so that two probes have to say so: a module may not
// be loaded at once when a machine boots.
func (h *host) wireGuard() *bool {
	has := h.feature(kernel.FeatureWireGuard) == nil
	h.mu.Lock()
	defer h.mu.Unlock()
	if !has && h.noWireGuard < 2 {
		return nil
	}
	return &has
}

// featureInterval is how often a feature that is missing is looked for again.
const featureInterval = 30 * time.Second

// watchFeatures looks for overlays and WireGuard again as long as one of them is
// missing, and has what it finds published.
func (h *host) watchFeatures(ctx context.Context, publish func()) error {
	tick := time.NewTicker(featureInterval)
	defer tick.Stop()
	for len(h.overlays()) < len(overlayFeatures()) || h.feature(kernel.FeatureWireGuard) != nil {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			h.probeFeatures(ctx)
			publish()
		}
	}
	return nil
}

// overlayFeatures are what a kernel needs for each overlay.
func overlayFeatures() map[cluster.Overlay]string {
	return map[cluster.Overlay]string{
		cluster.OverlayGeneve: kernel.FeatureGeneve,
		cluster.OverlayVXLAN:  kernel.FeatureVXLAN,
	}
}

// overlays returns those that the kernel has, by name.
func (h *host) overlays() []cluster.Overlay {
	var out []cluster.Overlay
	for overlay, feature := range overlayFeatures() {
		if h.feature(feature) == nil {
			out = append(out, overlay)
		}
	}
	slices.Sort(out)
	return out
}

// feature returns why the kernel lacks a feature; nil when it doesn't.
func (h *host) feature(name string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, f := range h.features {
		if f.Name == name {
			return f.Err
		}
	}
	return nil
}

// waitSynced waits for the informers, and says so when that takes long.
func (h *host) waitSynced(ctx context.Context, wait func(context.Context) error) error {
	const patience = 5 * time.Second
	h.health.waiting("waiting for the API server: nothing is applied before all objects have been read once")
	t := time.AfterFunc(patience, func() {
		h.log.Warn("still waiting for the API server; what is in the kernel stays as it is")
	})
	defer t.Stop()
	start := time.Now()
	if err := wait(ctx); err != nil {
		return fmt.Errorf("read all objects once: %w", err)
	}
	h.log.Info("objects read", "took", time.Since(start).Round(time.Millisecond))
	h.health.waiting("waiting for the first pass")
	return nil
}

// watched is a Target that tells health at which step the loop is.
type watched struct {
	*kernel.NetNS
	health *health
}

// Observe implements agent.Target.
func (w watched) Observe(ctx context.Context) (netstate.State, error) {
	w.health.At("reading the kernel")
	defer w.health.At("comparing it with what is wanted")
	return w.NetNS.Observe(ctx)
}

// Apply implements agent.Target.
func (w watched) Apply(ctx context.Context, c netstate.Changes) error {
	w.health.At("changing the kernel")
	defer w.health.At("telling what came of it")
	return w.NetNS.Apply(ctx, c)
}

// A Condition is one of the conditions in a status.
type Condition struct {
	Type, Reason, Message string
	OK                    bool
}

// readyCondition says how the last pass went.
func readyCondition(o outcome) Condition {
	if o.err != nil {
		return Condition{"Ready", "Failed", shorten(o.err.Error()), false}
	}
	return Condition{"Ready", "Applied", "the kernel is as the objects want it", true}
}

// overlayCondition says whether the kernel has the overlay that is in use, and
// what to do if not.
func (h *host) overlayCondition(overlay cluster.Overlay) Condition {
	overlay = cmp.Or(overlay, cluster.OverlayGeneve)
	err := h.feature(overlayFeatures()[overlay])
	if err == nil {
		return Condition{"OverlaySupported", "Supported", fmt.Sprintf("the kernel has %s", overlay), true}
	}
	return Condition{"OverlaySupported", "Unsupported", shorten(fmt.Sprintf("%v: no link between nodes and gateways can be made here. Load the module on the node (modprobe %s), or install a kernel with CONFIG_%s",
		err, overlay, strings.ToUpper(string(overlay)))), false}
}

// A source is an agent.Source made of its two halves.
type source[In any] struct {
	changed <-chan struct{}
	read    func(context.Context) (In, error)
}

// Changed implements agent.Source.
func (s source[In]) Changed() <-chan struct{} { return s.changed }

// Read implements agent.Source.
func (s source[In]) Read(ctx context.Context) (In, error) { return s.read(ctx) }

// A fanout passes the values of one channel on to several readers.
type fanout struct {
	mu  sync.Mutex
	out []chan struct{}
}

func newFanout(ctx context.Context, g *group, in <-chan struct{}) *fanout {
	f := &fanout{}
	g.run("fan out", func() error {
		for {
			select {
			case <-ctx.Done():
				return nil
			case <-in:
			}
			f.mu.Lock()
			for _, ch := range f.out {
				notify(ch)
			}
			f.mu.Unlock()
		}
	})
	return f
}

// subscribe returns a channel that yields a value after every later one of the
// original, bursts merged.
func (f *fanout) subscribe() <-chan struct{} {
	ch := make(chan struct{}, 1)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.out = append(f.out, ch)
	return ch
}

// kernelRelease is what uname -r prints.
func kernelRelease() string {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return ""
	}
	return unix.ByteSliceToString(u.Release[:])
}
