package daemon

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"

	"github.com/isthmus-net/isthmus/appliance/internal/exchange"
)

// learnedPlaces are those where the peer says that it can be dialled, beyond those that are
// configured. A server tells all of them at all times, for it can tell nothing once the one
// that a client dials is gone. The client tries them when the peer is silent (see
// rehandshake.go), and stays wherever the peer answers.
type learnedPlaces struct {
	mu   sync.Mutex
	list []learnedPlace
}

type learnedPlace struct {
	*resolver
	stop context.CancelFunc
}

func (l *learnedPlaces) resolvers() []*resolver {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := make([]*resolver, len(l.list))
	for i, p := range l.list {
		out[i] = p.resolver
	}
	return out
}

func (l *learnedPlaces) ports() []uint16 {
	var out []uint16
	for _, r := range l.resolvers() {
		out = append(out, r.port)
	}
	return out
}

// learnPlaces follows what the peer says until ctx is done.
func (gw *gateway) learnPlaces(ctx context.Context, g *group) error {
	for {
		gw.setPlaces(ctx, g, gw.exchange.endpoint())
		select {
		case <-ctx.Done():
			return nil
		case <-gw.exchange.places:
		}
	}
}

// setPlaces makes these the learned places. One that was among them goes on with the
// address that it has.
func (gw *gateway) setPlaces(ctx context.Context, g *group, e *exchange.Endpoint) {
	l := &gw.learned
	l.mu.Lock()
	var hosts []string
	if e != nil {
		hosts = slices.DeleteFunc(slices.Clone(e.Addresses), func(host string) bool {
			return e.Port == gw.cfg.EndpointPort && slices.Contains(gw.cfg.EndpointHosts, host)
		})
	}
	var list []learnedPlace
	changed := false
	for _, host := range hosts {
		i := slices.IndexFunc(l.list, func(p learnedPlace) bool { return p.host == host && p.port == e.Port })
		if i >= 0 {
			list = append(list, l.list[i])
			continue
		}
		of, stop := context.WithCancel(ctx)
		r := newResolver(host, e.Port, lookupElsewhere, gw.down, gw.log)
		g.run("resolver of a learned place", func() error { return r.run(of) })
		list, changed = append(list, learnedPlace{r, stop}), true
	}
	for _, p := range l.list {
		if !slices.ContainsFunc(list, func(q learnedPlace) bool { return p.resolver == q.resolver }) {
			p.stop()
			changed = true
		}
	}
	l.list = list
	l.mu.Unlock()
	if changed {
		gw.log.Info("where the peer says that it can be dialled besides", "places", places(hosts, portOf(e)))
		notify(gw.repair)
	}
}

func portOf(e *exchange.Endpoint) uint16 {
	if e == nil {
		return 0
	}
	return e.Port
}

// lookupElsewhere looks up a name that a peer has told, which must not lead to this host.
func lookupElsewhere(ctx context.Context, network, host string) ([]netip.Addr, error) {
	found, err := net.DefaultResolver.LookupNetIP(ctx, network, host)
	return slices.DeleteFunc(found, func(a netip.Addr) bool { return !exchange.Elsewhere(a) }), err
}

// endpointCondition says whether the peer is dialled where the GatewayClient says, at the
// place at.
func (gw *gateway) endpointCondition(at netip.AddrPort) Condition {
	const kind = "EndpointConfigured"
	is := func(r *resolver) bool { return r.endpoint() == netip.AddrPortFrom(at.Addr().Unmap(), at.Port()) }
	if at.IsValid() && !slices.ContainsFunc(gw.resolvers, is) && slices.ContainsFunc(gw.learned.resolvers(), is) {
		return Condition{kind, "Learned", fmt.Sprintf("the peer did not answer at %s, which spec.endpoint of GatewayClient %s/%s says, and is dialled at %v, which it has told itself: correct spec.endpoint",
			places(gw.cfg.EndpointHosts, gw.cfg.EndpointPort), gw.cfg.Namespace, gw.cfg.Name, at), false}
	}
	return Condition{kind, "AsWritten", "the peer is dialled where spec.endpoint says", true}
}
