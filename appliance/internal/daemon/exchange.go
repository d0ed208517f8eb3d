package daemon

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/desired"
	"github.com/isthmus-net/isthmus/appliance/internal/exchange"
	"github.com/isthmus-net/isthmus/appliance/internal/probe"
)

// The times of exchanges between the gateways of a peering. Each of them dials the other
// when it has something new to tell, when the tunnel is up again, and every so often: a
// message that was read as another one was on its way is put right by the next.
const (
	tellEvery = 30 * time.Second
	tellLeast = time.Second // between two, of those that it begins and of those that it answers
	tellTime  = 10 * time.Second
	tellAgain = 2 * time.Second // after one that failed
	// A peer that answers probes and refuses so many in a row takes no part in exchanges, and
	// is asked rarely. One that learns it, by an upgrade, dials by itself.
	silentAfter = 5
	askSilent   = time.Minute
	// peerNews is the least time between two changes of what is written of the peer into the
	// API, whatever it tells.
	peerNews = 30 * time.Second
)

// featureMTU says that the gateway's tunnel has no more than the MTU that its peer tells.
const featureMTU = "mtu"

// An exchanger has what this gateway tells its peer, and what the peer has told.
type exchanger struct {
	news   chan struct{} // yields when there is something new to tell, or somebody to tell it to
	places chan struct{} // yields when the peer may be somewhere else

	mu       sync.Mutex
	own      exchange.Message
	told     *exchange.Message // nil: nothing yet
	since    time.Time         // when the peer told that first
	about    int64             // generation of our own gateway's spec when it was told
	is       int64             // and now
	failures int               // attempts in a row that the peer, which was there, refused
	shown    heard
	shownAt  time.Time
}

// heard is what is shown of the peer.
type heard struct {
	peer   *PeerStatus
	silent bool // it takes no part
}

// A PeerStatus is what the gateway of the peer tells of its cluster.
type PeerStatus struct {
	exchange.Message
	Since      time.Time // it tells this
	Generation int64     // of the spec of this cluster's gateway when it did
}

// API returns it as the status of a Connection has it.
func (p *PeerStatus) API() *v1beta1.ConnectionPeer {
	if p == nil {
		return nil
	}
	out := &v1beta1.ConnectionPeer{Version: p.Program, Features: p.Features, MTU: p.MTU, ObservedGeneration: p.Generation, Since: metav1.NewTime(p.Since.Truncate(time.Second))}
	if n := p.Networks; n != nil {
		out.Networks = &v1beta1.ClusterConfigCIDR{Pod: apiCIDRs(n.Pod), External: apiCIDRs(n.External)}
	}
	if e := p.Endpoint; e != nil {
		out.Endpoint = &v1beta1.ConnectionEndpoint{Addresses: e.Addresses, Port: int32(e.Port)}
	}
	return out
}

func newExchanger() *exchanger {
	return &exchanger{news: make(chan struct{}, 1), places: make(chan struct{}, 1)}
}

// recall begins with what an earlier process of the gateway was told: the peer may be where
// only it knew.
func (x *exchanger) recall(c *cluster.Connection) {
	if c == nil || c.Peer == nil {
		return
	}
	p := c.Peer
	m := exchange.Message{Version: exchange.Version, Program: p.Version, Features: p.Features, MTU: p.MTU}
	if p.Networks != nil {
		m.Networks = exchange.NewNetworks(p.Networks.Pod, p.Networks.External)
	}
	if p.Endpoint != nil {
		m.Endpoint = exchange.NewEndpoint(p.Endpoint.Addresses, p.Endpoint.Port)
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.told == nil {
		x.told, x.since, x.about = &m, p.Since, p.Generation
		notify(x.places)
	}
}

// endpoint is where the peer may be, as it has told since the spec of our own gateway is
// what it is; nil: it has told nothing.
func (x *exchanger) endpoint() *exchange.Endpoint {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.told == nil || x.about != x.is {
		return nil
	}
	return x.told.Endpoint
}

// ownMessage is what a gateway tells of its cluster. gateway is its own object; nil: that
// is not there.
func ownMessage(program string, in desired.GatewayInput, gateway *cluster.Gateway) exchange.Message {
	m := exchange.Message{Version: exchange.Version, Program: program, Features: []string{featureMTU, v1beta1.FeatureKeys}, MTU: in.OwnMTU()}
	if c := in.Configuration(); c != nil {
		own := c.Ours()
		m.Networks = exchange.NewNetworks(own.Pod, own.External)
	}
	if gateway != nil && gateway.Reached != nil {
		m.Endpoint = exchange.NewEndpoint(gateway.Reached.Addresses, gateway.Reached.Port)
	}
	return m
}

// say gives what the peer is told, and the generation of the spec of our own gateway. What
// the peer has told of where it is ends with that: the peer is asked again.
func (x *exchanger) say(m exchange.Message, generation int64) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if !x.own.Equal(m) || x.is != generation {
		x.own, x.is = m, generation
		notify(x.news)
		notify(x.places)
	}
}

// says returns what the peer is told.
func (x *exchanger) says() exchange.Message {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.own
}

// hear notes what the peer has told, and reports whether that is news.
func (x *exchanger) hear(m exchange.Message, now time.Time) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.failures = 0
	if x.told != nil && x.told.Equal(m) && x.about == x.is {
		return false
	}
	if x.told == nil || !x.told.Equal(m) {
		x.since = now
	}
	x.told, x.about = &m, x.is
	notify(x.places)
	return true
}

// fail notes that the peer, which is there, has refused an exchange.
func (x *exchanger) fail() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.failures++
}

// silent reports whether the peer takes no part in exchanges.
func (x *exchanger) silent() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.failures >= silentAfter
}

// mtu is what the peer has told of its MTU; 0: nothing.
func (x *exchanger) mtu() int {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.told == nil || x.failures >= silentAfter { // another system's, by now
		return 0
	}
	return x.told.MTU
}

// show returns what is shown of the peer: what it tells, or what it told when that was
// shown last, as long as something else would be news too soon.
func (x *exchanger) show(now time.Time) heard {
	x.mu.Lock()
	defer x.mu.Unlock()
	is := heard{x.shown.peer, x.failures >= silentAfter}
	if x.told != nil && (is.peer == nil || !is.peer.Equal(*x.told) || is.peer.Generation != x.about) {
		is.peer = &PeerStatus{*x.told, x.since, x.about}
	}
	if is != x.shown && now.Sub(x.shownAt) >= peerNews {
		x.shown, x.shownAt = is, now
	}
	return x.shown
}

// tells is the condition PeerTells.
func (h heard) tells() Condition {
	switch {
	case h.silent:
		return Condition{v1beta1.ConditionPeerTells, "PublicSystem",
			fmt.Sprintf("the gateway of the peer answers probes and does not talk on TCP port %d of the tunnel: it is one of another system, or of an older Isthmus. If its networks or its address change, write them here", desired.ExchangePort), false}
	case h.peer != nil:
		return Condition{v1beta1.ConditionPeerTells, "Told", "the gateway of the peer tells of its cluster: see status.peer", true}
	}
	return Condition{}
}

// networksMatch is the condition NetworksMatch. Networks of an address family that the
// Configuration has not are not missed: a peering has one.
func networksMatch(p *PeerStatus, c *cluster.Configuration) Condition {
	if p == nil || p.Networks == nil || c == nil {
		return Condition{}
	}
	// What the peer has withdrawn is not missed either.
	counts := *c
	counts.Followed = slices.DeleteFunc(slices.Clone(c.Followed), func(f cluster.Followed) bool { return !f.Withdrawn.IsZero() })
	known, more := counts.Peer(), ""
	if n := len(counts.Followed); n > 0 {
		more = fmt.Sprintf(" and %d in its status.follow", n)
	}
	var differ []string
	for _, kind := range []struct {
		name          string
		tells, writes []netip.Prefix
	}{{"pod", p.Networks.Pod, known.Pod}, {"external", p.Networks.External, known.External}} {
		tells := ofPeering(kind.tells, c)
		if !sameSet(tells, kind.writes) {
			differ = append(differ, fmt.Sprintf("its %s networks are %s, and spec.remote.cidr.%s of %s%s is %s", kind.name, texts(tells), kind.name, c.Ref, more, texts(kind.writes)))
		}
	}
	if news := undecided(p, &counts); len(differ) > 0 && len(news) > 0 {
		return Condition{v1beta1.ConditionNetworksMatch, "FollowPending", "the gateway of the peer has told of a change, of " + texts(news) + ", and the controller of this cluster is about to follow it or to say why not", true}
	}
	if len(differ) > 0 {
		allow := "isthmusctl peer follow " + c.RemoteID + " --range RANGE"
		cure := "correct the Configuration, delete it and run isthmusctl network connect again, or let the peer add networks: " + allow
		if len(c.Refused) > 0 {
			var refused []string
			for _, r := range c.Refused {
				refused = append(refused, fmt.Sprintf("%v %s", r.CIDR, r.Why))
			}
			cure = "this cluster does not follow these: " + strings.Join(refused, "; ") + ": have the cluster of the peer use other networks, write them into the Configuration, or allow them: " + allow + " --max N"
		}
		return Condition{v1beta1.ConditionNetworksMatch, "NetworksDiffer", "the gateway of the peer says that " + strings.Join(differ, "; ") + ": " + cure, false}
	}
	if more != "" {
		return Condition{v1beta1.ConditionNetworksMatch, "Followed", "the networks that the peer tells are those of " + c.Ref.String() + more, true}
	}
	return Condition{v1beta1.ConditionNetworksMatch, "Same", "the networks that the peer tells are those of " + c.Ref.String(), true}
}

// ofPeering are the networks of an address family that the peering has.
func ofPeering(list []netip.Prefix, c *cluster.Configuration) []netip.Prefix {
	return slices.DeleteFunc(slices.Clone(list), func(n netip.Prefix) bool {
		return !slices.ContainsFunc(c.Remote.All(), func(o netip.Prefix) bool { return o.Addr().BitLen() == n.Addr().BitLen() })
	})
}

// undecided returns the networks that the peer has added or withdrawn, and that the controller has
// not looked at yet: the status of c says nothing of them. It returns none where the peer may add
// no networks, and where something else differs as well.
func undecided(p *PeerStatus, c *cluster.Configuration) []netip.Prefix {
	if c.Follow == nil || c.Follow.Problem != "" {
		return nil
	}
	told, known := ofPeering(slices.Concat(p.Networks.Pod, p.Networks.External), c), c.Peer().All()
	var out []netip.Prefix
	for _, n := range told {
		if slices.ContainsFunc(c.Refused, func(r cluster.Refused) bool { return r.CIDR == n }) {
			return nil
		}
		if !slices.Contains(known, n) {
			out = append(out, n)
		}
	}
	for _, n := range known {
		if slices.Contains(told, n) {
			continue
		}
		if !slices.ContainsFunc(c.Followed, func(f cluster.Followed) bool { return f.CIDR == n }) {
			return nil
		}
		out = append(out, n)
	}
	return out
}

func apiCIDRs(list []netip.Prefix) []v1beta1.CIDR {
	out := make([]v1beta1.CIDR, len(list))
	for i, p := range list {
		out[i] = v1beta1.CIDR(p.String())
	}
	return out
}

func sameSet(a, b []netip.Prefix) bool {
	within := func(a, b []netip.Prefix) bool {
		return !slices.ContainsFunc(a, func(p netip.Prefix) bool { return !slices.Contains(b, p) })
	}
	return within(a, b) && within(b, a)
}

func texts(list []netip.Prefix) string {
	if len(list) == 0 {
		return "empty"
	}
	out := make([]string, len(list))
	for i, p := range list {
		out[i] = p.String()
	}
	return strings.Join(out, ", ")
}

// peerMTU is the longest packet that the peer has room for in the tunnel, as far as it
// says: the probe tells at once what the network below it has room for, an exchange also
// what somebody has written there.
func (gw *gateway) peerMTU() int {
	probed, told := gw.prober.Status().PeerMTU, gw.exchange.mtu()
	if probed == 0 || told == 0 {
		return max(probed, told)
	}
	return min(probed, told)
}

// meets reports whether the gateway at the other end is that of the peering, and there.
func (gw *gateway) meets() bool {
	return gw.wantsPeer() && gw.prober.Status().State == probe.Connected
}

// tellPeer begins exchanges until ctx is done.
func (gw *gateway) tellPeer(ctx context.Context) error {
	x, once := gw.exchange, newOnce(gw.log)
	var wait time.Duration
	for {
		news := x.news
		if x.silent() {
			news = nil
		}
		select {
		case <-ctx.Done():
			return nil
		case <-news:
		case <-time.After(wait):
		}
		wait = tellEvery
		if !gw.meets() {
			continue // the probe tells when it is there again
		}
		switch err := gw.tellOnce(ctx); {
		case ctx.Err() != nil:
			return nil
		case err == nil:
			once.report("tell the peer of this cluster", nil)
		case gw.meets():
			x.fail()
			wait = tellAgain
			if x.silent() {
				wait = askSilent
				once.report("tell the peer of this cluster", err)
				gw.tell(false)
			}
		}
		pause(ctx, tellLeast)
	}
}

func (gw *gateway) tellOnce(ctx context.Context) error {
	c, err := gw.dialInTunnel(ctx, desired.ExchangePort)
	if err != nil {
		return err
	}
	return gw.talk(ctx, c)
}

// listenToPeer takes part in the exchanges that the peer begins, until ctx is done.
func (gw *gateway) listenToPeer(ctx context.Context) error {
	own, _ := desired.TunnelAddresses(gw.cfg.Mode)
	once := newOnce(gw.log)
	for ctx.Err() == nil {
		once.report("listen to the peer", gw.takeCalls(ctx, netip.AddrPortFrom(own.Addr(), desired.ExchangePort), gw.calls, gw.talk))
		pause(ctx, tellLeast) // the tunnel may not have its address yet
	}
	return nil
}

// takeCalls takes one connection after the other, as slowly as is agreed: there is one peer.
func (gw *gateway) takeCalls(ctx context.Context, at netip.AddrPort, calls func(net.Conn) bool, talk func(context.Context, net.Conn) error) error {
	l, err := gw.listenInTunnel(ctx, at)
	if err != nil {
		return err
	}
	defer l.Close()
	defer context.AfterFunc(ctx, func() { l.Close() })()
	for {
		c, err := l.Accept()
		if err != nil {
			if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return nil
			}
			return err
		}
		if !calls(c) {
			c.Close() // at once and without a word: a pod must not keep the peer waiting
			continue
		}
		if err := talk(ctx, c); err != nil && ctx.Err() == nil {
			gw.log.Info("an exchange through the tunnel has failed", "err", err)
		}
		pause(ctx, tellLeast)
	}
}

// calls reports whether it is the gateway at the other end of the tunnel that has begun a
// connection: pods of this cluster reach the address, too.
func (gw *gateway) calls(c net.Conn) bool {
	_, peer := desired.TunnelAddresses(gw.cfg.Mode)
	return isFrom(c, peer) && gw.wantsPeer()
}

func isFrom(c net.Conn, peer netip.Addr) bool {
	from, ok := c.RemoteAddr().(*net.TCPAddr)
	return ok && from.AddrPort().Addr().Unmap() == peer
}

// talk is one exchange, and what comes of it. It ends the connection.
func (gw *gateway) talk(ctx context.Context, c net.Conn) error {
	defer c.Close()
	defer context.AfterFunc(ctx, func() { c.Close() })()
	if err := c.SetDeadline(time.Now().Add(tellTime)); err != nil {
		return err
	}
	own := gw.exchange.says()
	if gw.rotating != nil {
		own.Keys = gw.rotating.tell()
	}
	m, err := exchange.Meet(c, own)
	if err != nil {
		return err
	}
	if m.Keys != nil && gw.rotating != nil {
		gw.rotating.hear(*m.Keys)
	}
	m.Keys = nil // a secret may be in it
	if gw.exchange.hear(m, time.Now()) {
		gw.log.Info("the peer tells of its cluster", "version", m.Program, "mtu", m.MTU)
		gw.watchPath()
		gw.tell(false)
	}
	return nil
}
