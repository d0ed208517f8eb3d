// Package daemon is the two daemons of the data plane, wired: [RunNode] on
// every node, [RunGateway] in the pod of every gateway.
//
// Both are the loop of package agent between the informers of internal/kube,
// the computation of package desired and the kernel. What the API doesn't say
// is found out here and joined to what it does say: the addresses by which
// gateways see a node, the MTU of the network below, the gateway's keys, the
// peer's endpoint. And what came of it is told: status, health, metrics.
//
// Nothing here takes the data plane down: not the end of the process, not an
// API server that is gone, not a status that can't be written.
package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/isthmus-net/isthmus/appliance/desired"
	"github.com/isthmus-net/isthmus/appliance/kernel"
)

// notify puts a value into a channel of capacity 1, unless one is waiting.
func notify(ch chan<- struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

// pause waits for d or the end of ctx.
func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}

// A once logs a failure when it begins and when it is over, and in between, at
// most once a minute, when it has become another one. It belongs to one
// goroutine.
type once struct {
	log *slog.Logger
	was map[string]failure
}

type failure struct {
	text   string
	logged time.Time
}

func newOnce(log *slog.Logger) *once { return &once{log: log, was: map[string]failure{}} }

// report logs err under the name of what was tried.
func (o *once) report(what string, err error) {
	was, failing := o.was[what]
	switch {
	case err == nil && failing:
		o.log.Info(what + ": works again")
		delete(o.was, what)
	case err == nil:
	case !failing, err.Error() != was.text && time.Since(was.logged) >= time.Minute:
		o.log.Warn(what+": failed, trying again", "err", err)
		o.was[what] = failure{err.Error(), time.Now()}
	}
}

// merge returns a channel that yields a value after any of the others did.
// Its goroutine, one of group, ends with ctx.
func merge(ctx context.Context, group *group, in ...<-chan struct{}) <-chan struct{} {
	out := make(chan struct{}, 1)
	for _, ch := range in {
		group.run("merge", func() error {
			for {
				select {
				case <-ctx.Done():
					return nil
				case <-ch:
					notify(out)
				}
			}
		})
	}
	return out
}

// A group runs the parts of a daemon. The first that fails ends them all.
type group struct {
	cancel context.CancelCauseFunc
	wg     sync.WaitGroup
}

func newGroup(ctx context.Context) (*group, context.Context) {
	ctx, cancel := context.WithCancelCause(ctx)
	return &group{cancel: cancel}, ctx
}

func (g *group) run(name string, f func() error) {
	g.wg.Go(func() {
		if err := f(); err != nil {
			g.cancel(fmt.Errorf("%s: %w", name, err))
		}
	})
}

// wait returns when all parts have ended: nil when ctx's parent ended them.
func (g *group) wait(ctx context.Context) error {
	g.wg.Wait()
	err := context.Cause(ctx)
	g.cancel(nil)
	if errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

// Where the default route is asked for: addresses for documentation (RFC 5737, RFC
// 3849), which nobody routes specially.
var (
	anywhere4 = netip.AddrFrom4([4]byte{192, 0, 2, 1})
	anywhere6 = netip.MustParseAddr("2001:db8::1")
)

// A router answers what "ip route get" answers.
type router interface {
	RouteTo(dst netip.Addr) (kernel.Path, error)
}

// A linker answers whether there is a link, ours or not.
type linker interface {
	LinkMTU(name string) (int, error)
}

// An uplinker tells by which links packets of other hosts may come in.
type uplinker interface {
	Uplinks(node netip.Addr) ([]string, error)
}

// underlay reads what desired needs to know of the network below.
func underlay(r router, remotes []netip.Addr) desired.Underlay {
	u := desired.Underlay{
		Paths: map[netip.Addr]int{}, Devs: map[netip.Addr]string{}, Links: map[string]bool{},
		Sources: map[netip.Addr]netip.Addr{}, Routers: map[netip.Addr]netip.Addr{},
	}
	for _, dst := range []netip.Addr{anywhere4, anywhere6} {
		if p, err := r.RouteTo(dst); err == nil && p.MTU > 0 {
			u.MTU = p.MTU
			break
		}
	}
	for _, dst := range remotes {
		p, err := r.RouteTo(dst)
		if err != nil {
			continue
		}
		u.Devs[dst.Unmap()] = p.Dev
		if !p.Ours {
			u.Sources[dst.Unmap()] = p.Src
			if p.Via.IsValid() {
				u.Routers[dst.Unmap()] = p.Via
			}
		}
		if p.MTU > 0 {
			u.Paths[dst.Unmap()] = p.MTU
		}
	}
	return u
}

// defaultSource returns the address that a host's packets have: the source of
// its default route.
func defaultSource(r router) netip.Addr {
	for _, dst := range []netip.Addr{anywhere4, anywhere6} {
		if p, err := r.RouteTo(dst); err == nil && p.Src.IsValid() {
			return p.Src.Unmap()
		}
	}
	return netip.Addr{}
}

func equalUnderlay(a, b desired.Underlay) bool {
	return a.MTU == b.MTU && maps.Equal(a.Paths, b.Paths) && maps.Equal(a.Devs, b.Devs) && maps.Equal(a.Links, b.Links) &&
		maps.Equal(a.Sources, b.Sources) && maps.Equal(a.Routers, b.Routers) &&
		(a.Uplinks == nil) == (b.Uplinks == nil) && slices.Equal(a.Uplinks, b.Uplinks)
}

// underlayInterval is how often the routes below the tunnels are looked at.
// The kernel's change events are about what is ours, and about the links of
// gateways in namespaces of the node; these routes are neither.
const underlayInterval = 2 * time.Second

// An underlayWatch remembers what was last read for whom, and tells when a
// second reading differs.
type underlayWatch struct {
	router  router
	changed chan struct{}

	mu      sync.Mutex
	remotes []netip.Addr
	links   []string
	node    *netip.Addr // whose uplinks are asked for; nil: nobody asks
	last    desired.Underlay
}

func newUnderlayWatch(r router) *underlayWatch {
	return &underlayWatch{router: r, changed: make(chan struct{}, 1)}
}

// read returns the underlay towards the remotes, and which of the links are
// there.
func (w *underlayWatch) read(remotes []netip.Addr, links ...string) desired.Underlay {
	return w.readWith(nil, remotes, links...)
}

// readWith returns, besides, the uplinks of the node with an address; nil: they are
// not asked for.
func (w *underlayWatch) readWith(node *netip.Addr, remotes []netip.Addr, links ...string) desired.Underlay {
	u := underlay(w.router, remotes)
	u.Links = w.present(links)
	w.mu.Lock()
	defer w.mu.Unlock()
	u.Uplinks = w.uplinks(node)
	w.node, w.remotes, w.links, w.last = node, slices.Clone(remotes), slices.Clone(links), u
	return u
}

// uplinks returns the uplinks of a node, or the last known ones where they can't be
// read: without any, pods would be taken for others. The caller holds the lock.
func (w *underlayWatch) uplinks(node *netip.Addr) []string {
	u, ok := w.router.(uplinker)
	if node == nil || !ok {
		return nil
	}
	list, err := u.Uplinks(*node)
	if err != nil {
		return w.last.Uplinks
	}
	return list
}

// present returns those of the links that are there.
func (w *underlayWatch) present(links []string) map[string]bool {
	out := map[string]bool{}
	l, ok := w.router.(linker)
	for _, name := range links {
		if !ok {
			break
		}
		if _, err := l.LinkMTU(name); err == nil {
			out[name] = true
		}
	}
	return out
}

func (w *underlayWatch) run(ctx context.Context) error {
	tick := time.NewTicker(underlayInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		w.mu.Lock()
		remotes, links, last := w.remotes, w.links, w.last
		w.mu.Unlock()
		now := underlay(w.router, remotes)
		now.Links = w.present(links)
		w.mu.Lock()
		now.Uplinks = w.uplinks(w.node)
		w.mu.Unlock()
		if !equalUnderlay(now, last) {
			notify(w.changed)
		}
	}
}

// maskedEqual compares prefixes as the kernel does: host bits don't count, and
// one of length 0 is none.
func maskedEqual(a, b netip.Prefix) bool {
	norm := func(p netip.Prefix) netip.Prefix {
		if !p.IsValid() || p.Bits() == 0 {
			return netip.Prefix{}
		}
		return p.Masked()
	}
	return norm(a) == norm(b)
}
