package daemon

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/isthmus-net/isthmus/appliance/desired"
	"github.com/isthmus-net/isthmus/appliance/internal/exchange"
)

// learnedPlaces are those where the peer says that it can be dialled, beyond those that are
// configured. A server tells all of them at all times, for it can tell nothing once the one
// that a client dials is gone. The client tries them when the peer is silent (see
// rehandshake.go), and stays wherever the peer answers. It goes to another one before that
// when the server tells the one in use no more.
type learnedPlaces struct {
	mu   sync.Mutex
	list []learnedPlace
	// left are the places that the client has left, since the peer has ceased to tell them,
	// the latest first. They stay among those that are tried, as the last ones, but not while
	// the client goes to another one: they would answer sooner, and it would stay there.
	left  []netip.AddrPort
	going bool
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

// mostLeft is how many places that the client has left are tried, so that a peer that moves
// again and again does not have it try them all.
const mostLeft = 8

// leave notes a place that the client leaves for another one.
func (l *learnedPlaces) leave(place netip.AddrPort) {
	l.mu.Lock()
	defer l.mu.Unlock()
	left := []netip.AddrPort{place}
	for _, p := range l.left {
		if p != place && len(left) < mostLeft {
			left = append(left, p)
		}
	}
	l.left, l.going = left, true
}

// forget has places that the client has left count as any other.
func (l *learnedPlaces) forget(places []netip.AddrPort) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.left = slices.DeleteFunc(slices.Clone(l.left), func(p netip.AddrPort) bool { return slices.Contains(places, p) })
}

// stay notes that the client goes to no other place any more.
func (l *learnedPlaces) stay() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.going = false
}

// leftPlaces are those that the client has left, the latest first, and whether it is about to go to
// another one.
func (l *learnedPlaces) leftPlaces() (left []netip.AddrPort, going bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.left, l.going
}

// learnPlaces follows what the peer says until ctx is done.
func (gw *gateway) learnPlaces(ctx context.Context, g *group) error {
	var was *exchange.Endpoint
	for {
		is := gw.exchange.endpoint()
		at := gw.dialled()
		withdrawn := gw.isWithdrawn(was, is, at)
		if withdrawn {
			gw.learned.leave(at)
		}
		gw.setPlaces(ctx, g, is)
		gw.forgetLeft(is)
		if withdrawn {
			gw.goElsewhere(ctx, is, at)
			gw.learned.stay()
			gw.forgetLeft(is) // names that it tells have addresses by now
		}
		was = is
		select {
		case <-ctx.Done():
			return nil
		case <-gw.exchange.places:
		}
	}
}

// isWithdrawn reports whether the peer tells a place no more at which it is dialled. Where the
// client has come back to such a place, each change of what the peer tells counts.
func (gw *gateway) isWithdrawn(was, is *exchange.Endpoint, at netip.AddrPort) bool {
	if was == nil || is == nil || !at.IsValid() || gw.tells(is, at) {
		return false
	}
	left, _ := gw.learned.leftPlaces()
	changed := was.Port != is.Port || !slices.Equal(was.Addresses, is.Addresses)
	return gw.tells(was, at) || changed && slices.Contains(left, at)
}

// forgetLeft forgets which places the client has left when spec.endpoint counts again, and the
// one about which the peer has changed its mind.
func (gw *gateway) forgetLeft(told *exchange.Endpoint) {
	again, _ := gw.learned.leftPlaces()
	if told != nil {
		again = slices.DeleteFunc(slices.Clone(again), func(p netip.AddrPort) bool { return !gw.tells(told, p) })
	}
	gw.learned.forget(again)
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

// dialled is where the peer is dialled; invalid: nobody knows.
func (gw *gateway) dialled() netip.AddrPort {
	peer, ok := gw.peer()
	if !ok || !peer.Endpoint.IsValid() {
		return netip.AddrPort{}
	}
	return netip.AddrPortFrom(peer.Endpoint.Addr().Unmap(), peer.Endpoint.Port())
}

// tells reports whether a place is among those that the peer tells, be it by a name.
func (gw *gateway) tells(e *exchange.Endpoint, place netip.AddrPort) bool {
	return slices.ContainsFunc(gw.toldResolvers(e), func(r *resolver) bool { return r.endpoint() == place })
}

// toldResolvers are those of the places that the peer tells, in its order.
func (gw *gateway) toldResolvers(e *exchange.Endpoint) []*resolver {
	all := slices.Concat(gw.resolvers, gw.learned.resolvers())
	var out []*resolver
	for _, host := range e.Addresses {
		if i := slices.IndexFunc(all, func(r *resolver) bool { return r.host == host && r.port == e.Port }); i >= 0 {
			out = append(out, all[i])
		}
	}
	return out
}

// backAfter is how long the peer may be silent at a place that it has told in place of the
// one in use.
const backAfter = 10 * time.Second

// firstTold returns the first place that the peer tells and whose address is known. It waits a
// while for that of a name; invalid: there is none.
func (gw *gateway) firstTold(ctx context.Context, told *exchange.Endpoint) netip.AddrPort {
	for began := time.Now(); ctx.Err() == nil; pause(ctx, gw.prober.Hurry()) {
		for _, r := range gw.toldResolvers(told) {
			if at := r.endpoint(); at.IsValid() {
				return at
			}
		}
		if time.Since(began) >= placePatience {
			break
		}
	}
	return netip.AddrPort{}
}

// goElsewhere dials the peer at the first place that it tells, since it tells the one in use
// no more, and goes back to that if there is no answer. A new handshake costs what is on the
// way; without one, what the peer still sends from the former place would lead WireGuard back
// there.
func (gw *gateway) goElsewhere(ctx context.Context, told *exchange.Endpoint, from netip.AddrPort) {
	to := gw.firstTold(ctx, told)
	switch {
	case ctx.Err() != nil || to == from: // a name leads there, which is forgotten to have been left
		return
	case !to.IsValid():
		gw.log.Warn("the peer tells the place where it is dialled no more, and no other one is known: it is dialled there still", "endpoint", from, "told", places(told.Addresses, told.Port))
		return
	}
	if to.Port() != from.Port() {
		pause(ctx, gw.prober.Hurry()) // until a pass lets in what comes from there
	}
	gw.log.Info("the peer tells the place where it is dialled no more: it is dialled at another one", "endpoint", to, "was", from)
	if !gw.dial(to) {
		return
	}
	first := time.Now()
	began := first // what was asked before was answered from the former place
	redialled := false
	gw.prober.Probe()
	for ctx.Err() == nil && time.Since(first) < backAfter {
		pause(ctx, gw.prober.Hurry())
		// Whoever watched for silence had decided before. Once: what the server sends by itself may come from there.
		if !redialled && gw.dialled() == from {
			redialled = gw.dial(to)
			began = time.Now()
			gw.prober.Probe()
			continue
		}
		if st := gw.prober.Status(); st.Answered.After(began) {
			gw.log.Info("the peer answers again", "endpoint", gw.dialled(), "told", to, "was", from, "took", st.LastReply.Sub(began).Round(time.Millisecond))
			gw.publish()
			return
		}
	}
	if ctx.Err() == nil {
		gw.log.Warn("the peer does not answer at the place that it tells: back to the former one", "endpoint", from, "was", to, "silent", backAfter)
		gw.dial(from)
	}
}

// dial begins anew with the peer at a place, and reports whether that was possible.
func (gw *gateway) dial(place netip.AddrPort) bool {
	peer, ok := gw.peer()
	if !ok {
		return false
	}
	if err := gw.ns.Rehandshake(desired.TunnelInterface, peer.PublicKey, place, false); err != nil {
		gw.log.Warn("no new handshake", "err", err)
		notify(gw.repair)
		return false
	}
	return true
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
	is := netip.AddrPortFrom(at.Addr().Unmap(), at.Port())
	isAt := func(r *resolver) bool { return r.endpoint() == is }
	spec := fmt.Sprintf("spec.endpoint of GatewayClient %s/%s, which says %s", gw.cfg.Namespace, gw.cfg.Name, places(gw.cfg.EndpointHosts, gw.cfg.EndpointPort))
	left, going := gw.learned.leftPlaces()
	configured := slices.IndexFunc(left, func(p netip.AddrPort) bool {
		return slices.ContainsFunc(gw.resolvers, func(r *resolver) bool { return r.endpoint() == p })
	})
	switch {
	case at.IsValid() && slices.Contains(left, is) && !going:
		return Condition{kind, "Withdrawn", fmt.Sprintf("the peer has told that it is no longer dialled at %v, but it has answered nowhere else: look where its cluster is reached now, and correct %s", is, spec), false}
	case !at.IsValid() || slices.ContainsFunc(gw.resolvers, isAt) || !slices.ContainsFunc(gw.learned.resolvers(), isAt):
		return Condition{kind, "AsWritten", "the peer is dialled where spec.endpoint says", true}
	case configured >= 0:
		return Condition{kind, "Withdrawn", fmt.Sprintf("the peer has told that it is no longer dialled at %v, and is dialled at %v, which it has told besides: correct %s", left[configured], is, spec), false}
	}
	return Condition{kind, "Learned", fmt.Sprintf("the peer did not answer at %s, which spec.endpoint of GatewayClient %s/%s says, and is dialled at %v, which it has told itself: correct spec.endpoint",
		places(gw.cfg.EndpointHosts, gw.cfg.EndpointPort), gw.cfg.Namespace, gw.cfg.Name, is), false}
}
