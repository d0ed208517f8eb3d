package daemon

import (
	"context"
	"net/netip"
	"slices"
	"time"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/desired"
	"github.com/isthmus-net/isthmus/appliance/kernel"
)

// A client whose server was replaced, on another node say, goes on with a
// session that the new server has never heard of. WireGuard begins anew after
// 15 s without an answer; these numbers are what a client waits instead. They
// are told in lost probes, whose time while one is missing is
// [probe.Prober.Hurry], 500 ms by default.
//
// A handshake costs a session that works few packets, but a tunnel that loses
// many must not lose its sessions as well. So the first ones in a row come
// after two lost probes, 1 s: as many as fit into the five seconds that a
// gateway may take to move. Every further one waits twice as long as the one
// before it, up to what WireGuard does by itself. That leaves little to gain:
// a peer that was begun anew with initiates every 5 s on its own
// (REKEY_TIMEOUT).
//
// A handshake also loses all that is on its way, which nobody can decrypt any
// more. Where a machine is so busy, or a line so full, that packets wait in queues
// for seconds, a second of silence is nothing, and new handshakes would make it
// worse. So a client waits for at least three round trips of the latest answer,
// which is what TCP waits for after the first one that it has measured (RFC 6298,
// §2.2). And a gateway that was stopped itself, with its virtual machine or
// because its container had used up its processor time, has not listened
// meanwhile: that time is no silence of the peer's.
//
// A peer that may be at several places is tried at the next one after 5 s at the
// latest, or three round trips: WireGuard by itself stays where it is, and asks no
// place more often.
//
// A server does not know where a client is that was replaced, so it waits for it. But
// WireGuard takes no handshake that says that it is older than the last one (TAI64N
// timestamps, §5.1 of the paper), and the clock of the client's new node may be behind
// that of its old one: the client would be refused for as long as that. A server that has
// heard nothing for 15 s forgets when the last handshake was. Somebody who has recorded
// one can repeat it then: no more comes of it than an answer to the wrong place, until the
// client is heard.
//
// What was spent comes back when the last one was what the tunnel needed: an
// answer came right after it. Otherwise it comes back slowly, while the tunnel
// is well: the answers that were missing were lost on the way, perhaps, and a
// handshake is no cure for that.
const (
	quickProbes     = 2
	quickHandshakes = 5
	ownPatience     = 15 * time.Second // KEEPALIVE_TIMEOUT + REKEY_TIMEOUT
	placePatience   = 5 * time.Second  // REKEY_TIMEOUT
	regainEvery     = 10 * time.Second
	roundTrips      = 3
)

// A patience says how long a peer may be silent before WireGuard is told to
// begin anew. It has no clock of its own.
type patience struct {
	quick     time.Duration // after which the first handshakes come
	roundTrip time.Duration // of the latest answer
	spent     int           // handshakes in a row, less what came back
	since     time.Time     // the last one
}

// first is how long the peer may be silent before the first handshakes.
func (p *patience) first() time.Duration {
	return min(max(p.quick, roundTrips*p.roundTrip), ownPatience)
}

// silence is how long the peer may be silent.
func (p *patience) silence() time.Duration {
	d := p.first()
	for i := quickHandshakes; i <= p.spent && d < ownPatience; i++ {
		d *= 2
	}
	return min(d, ownPatience)
}

// spend notes a handshake.
func (p *patience) spend(now time.Time) {
	if p.silence() < ownPatience { // beyond that it makes no difference
		p.spent++
	}
	p.since = now
}

// begin notes that the tunnel, which was in order since the last handshake, is
// silent from now on, and how long the latest answer took. It returns what is
// spent.
func (p *patience) begin(now time.Time, roundTrip time.Duration) (spent int) {
	p.roundTrip = roundTrip
	p.spent = max(0, p.spent-int(now.Sub(p.since)/regainEvery))
	return p.spent
}

// end notes an answer, in an outage that began with so much spent.
func (p *patience) end(answer time.Time, spent int) {
	if answer.Sub(p.since) <= p.first() {
		p.spent = spent
	}
}

// An outage is the time from the first lost probe to the next answer.
type outage struct {
	began time.Time // when the lost probe left
	rx    uint64    // bytes that the peer had sent when that was noticed, or later
	heard time.Time // when those had become more, at the latest; began if they haven't

	// Where the peer was and where it was configured to be. A peer that roams is
	// known at the first place only, and one that ceased to roam at the others.
	learned    netip.AddrPort
	configured []netip.AddrPort
	leaving    []netip.AddrPort // the places that the client is about to leave
	handshakes int
}

// listen notes what the peer has sent by now. Whatever it is, WireGuard has
// authenticated it: the session works, though a probe was lost.
func (o *outage) listen(rx uint64, now time.Time) {
	if rx != o.rx {
		o.rx, o.heard = rx, now
	}
}

// listened is since when the gateway has listened for the answer to a probe that
// left at began. It is told of silence by the second look after two round trips
// ([probe.Prober.Late]), and looks at every interval; if more time has gone by, it
// did not run.
func listened(began, now time.Time, interval, roundTrip time.Duration) time.Time {
	if at := now.Add(-2 * max(interval, roundTrip+interval/2)); at.After(began) {
		return at
	}
	return began
}

// stopped notes a pause that was to take so long and took longer: the gateway did
// not run, and what the peer sent meanwhile waits to be counted.
func (o *outage) stopped(pause, took time.Duration) {
	if took > 2*pause {
		o.heard = o.heard.Add(took - pause)
	}
}

// places are where the peer may be, in the order in which it is looked for: where it
// was, unless that is a place where it is no longer configured to be or that the client
// is about to leave, and then wherever it is.
func (o *outage) places(configured []netip.AddrPort) []netip.AddrPort {
	if slices.Contains(o.leaving, o.learned) {
		return configured
	}
	was := slices.Contains(o.configured, o.learned)
	switch i := slices.Index(configured, o.learned); {
	case i > 0:
		return slices.Concat(configured[i:], configured[:i])
	case i < 0 && o.learned.IsValid() && !was:
		return slices.Concat([]netip.AddrPort{o.learned}, configured)
	}
	return configured
}

// silence is how long to wait for the peer at one place before the next one is
// tried. It is shorter where there are several.
func (o *outage) silence(p *patience, configured []netip.AddrPort) time.Duration {
	if len(o.places(configured)) > 1 {
		return min(p.silence(), max(placePatience, p.first()))
	}
	return p.silence()
}

// next is where to try next, in turn. When nobody has answered at any of the places,
// the next round is from another port.
func (o *outage) next(configured []netip.AddrPort) (endpoint netip.AddrPort, newPort bool) {
	places := o.places(configured)
	if len(places) == 0 {
		return netip.AddrPort{}, o.handshakes > 0 // it stays where it is
	}
	i := o.handshakes % len(places)
	return places[i], i == 0 && o.handshakes > 0
}

// endpoints returns where the peer is configured to be, as far as that is known, and then
// where it says that it is besides. The places that it has withdrawn are the last ones; while
// the client goes to another one they are left out, and are those that it is leaving.
func (gw *gateway) endpoints() (known, leaving []netip.AddrPort) {
	left, going := gw.learned.leftPlaces()
	for _, r := range slices.Concat(gw.resolvers, gw.learned.resolvers()) {
		if e := r.endpoint(); e.IsValid() && !slices.Contains(left, e) && !slices.Contains(known, e) {
			known = append(known, e)
		}
	}
	if going {
		return known, left
	}
	return append(known, left...), nil
}

// lookUp has the names of the endpoint looked up soon.
func (gw *gateway) lookUp() {
	for _, r := range slices.Concat(gw.resolvers, gw.learned.resolvers()) {
		r.hurry()
	}
}

// watchSession has WireGuard begin anew when the peer is silent.
func (gw *gateway) watchSession(ctx context.Context) error {
	p := patience{quick: quickProbes * gw.prober.Hurry()}
	if gw.cfg.Mode != cluster.Client {
		p.quick = ownPatience
	}
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-gw.prober.Late():
			gw.endSilence(ctx, &p)
		}
	}
}

// endSilence lasts until the peer answers.
func (gw *gateway) endSilence(ctx context.Context, p *patience) {
	status := gw.prober.Status()
	o := outage{began: status.Waiting}
	o.configured, _ = gw.endpoints()
	if o.began.IsZero() {
		return // it has answered meanwhile
	}
	gw.lookUp()
	spent := p.begin(o.began, status.RoundTrip)
	o.heard = listened(o.began, time.Now(), gw.prober.Hurry(), status.RoundTrip)
	if peer, ok := gw.peer(); ok {
		o.rx, o.learned = peer.Rx, peer.Endpoint
	}
	for ctx.Err() == nil {
		before := time.Now()
		pause(ctx, gw.prober.Hurry())
		o.stopped(gw.prober.Hurry(), time.Since(before))
		if st := gw.prober.Status(); !st.Answered.Before(o.began) {
			last := st.LastReply
			if o.handshakes > 0 {
				p.end(last, spent)
				gw.log.Info("the peer answers again", "silent", last.Sub(o.began).Round(time.Millisecond), "handshakes", o.handshakes)
			}
			return
		}
		peer, ok := gw.peer()
		if !ok {
			continue // a pass is about to add it
		}
		now := time.Now()
		o.listen(peer.Rx, now)
		var known []netip.AddrPort
		known, o.leaving = gw.endpoints()
		if now.Sub(o.heard) >= o.silence(p, known) {
			gw.rehandshake(&o, peer, known, now)
			p.spend(now)
		}
	}
}

// rehandshake has WireGuard begin anew, and the name of the endpoint looked up. A server
// keeps its port, by which clients know it.
func (gw *gateway) rehandshake(o *outage, peer kernel.PeerStatus, known []netip.AddrPort, now time.Time) {
	var endpoint netip.AddrPort
	var newPort bool
	if gw.cfg.Mode == cluster.Client {
		endpoint, newPort = o.next(known)
	}
	log := gw.log.Debug
	if o.handshakes == 0 {
		log = gw.log.Info // the others are told of in the end
	}
	silent := now.Sub(o.began).Round(time.Millisecond)
	if gw.cfg.Mode == cluster.Client {
		log("the peer is silent: a new handshake", "silent", silent, "endpoint", endpoint, "newPort", newPort)
	} else {
		log("the peer is silent: every handshake of it is taken now, whatever its clock shows", "silent", silent)
	}
	if err := gw.ns.Rehandshake(desired.TunnelInterface, peer.PublicKey, endpoint, newPort); err != nil {
		gw.log.Warn("no new handshake", "err", err)
		notify(gw.repair)
	}
	gw.rehandshakeFormer(endpoint)
	gw.lookUp()
	o.handshakes++
	o.rx, o.heard = 0, now // WireGuard counts from the beginning
}
