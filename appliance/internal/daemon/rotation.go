package daemon

import (
	"bytes"
	"context"
	"encoding/json"
	"net/netip"
	"reflect"
	"slices"
	"sync"
	"time"

	"golang.org/x/time/rate"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/desired"
	"github.com/isthmus-net/isthmus/appliance/internal/invitation"
	"github.com/isthmus-net/isthmus/appliance/internal/rotation"
	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// A Rotation is the Secret by which a gateway takes part in changes of keys.
type Rotation interface {
	// Start runs the informer until ctx is done.
	Start(ctx context.Context) error
	// Changed yields a value whenever Read may return something new.
	Changed() <-chan struct{}
	// Synced returns once the Secret has been read, or with the error of ctx.
	Synced(ctx context.Context) error
	// Read returns what is known; nil: there is none yet.
	Read(ctx context.Context) (*rotation.Secret, error)
	// Write writes the gateway's part over the version that Read returned last, or fails.
	Write(ctx context.Context, s rotation.State) error
}

const (
	// handshakePoll is how often WireGuard is asked for handshakes while a peer may change
	// its key: what comes with the new one is lost until it is seen.
	handshakePoll = 10 * time.Millisecond
	// hotTime is how long that is done after something has changed. A peer that says
	// nothing for so long loses more when it changes at last.
	hotTime = time.Minute
	// rotationTick is how often the time alone may change something.
	rotationTick = time.Second
	// firstRead is how long the first pass waits for the Secret once all other objects are
	// read: without it, the tunnel has the keys of the volume, which may be older.
	firstRead = time.Second
	// outdated is how long what a peer offers stands while it is silent: it may answer a
	// moment after it has told the first time.
	outdated = 5 * time.Second
	// writeTime is how long storing a step may take: the API server may drop what is sent.
	writeTime = 5 * time.Second
	// proofTime is how long a new key waits for a handshake before WireGuard begins anew, or
	// three round trips to the peer where those take longer. A message of it may have been
	// lost, and WireGuard itself begins anew after 5 s. A handshake from before the process
	// began proves nothing.
	proofTime = 500 * time.Millisecond
	// A peer that offers keys all the time has no more than writeBurst offers stored at once,
	// and then one every writeEvery.
	writeBurst = 6
	writeEvery = 30 * time.Second
)

// A rotating is what the gateway does for changes of keys.
type rotating struct {
	api    Rotation
	yields bool
	came   chan struct{} // yields after a pass, and after a message of the peer

	mu     sync.Mutex
	read   bool            // whether the Secret has been
	secret rotation.Secret // as it was read last
	state  rotation.State  // what counts: stored, or taken back
	stored rotation.State  // what the Secret has, as far as is known: that is told
	// unclear is what may have been stored, though the API server did not say so; nil: nothing.
	unclear *rotation.State
	writes  *rate.Limiter // of what the peer offers
	// heardAt is when heard came, and whole says that the peer has not been silent since.
	heardAt time.Time
	whole   bool
	// shook is when there was a handshake with the keys that are tried: it decides, however
	// long it takes to store that.
	shook time.Time
	heard *rotation.Message
	// byFormer is what somebody has told last who has the former key of the peer, and answer
	// what the peer has answered to this side's.
	byFormer, answer *rotation.Message
	// Of the last pass: the PublicKey that counts, and the public keys in use.
	over    rotation.PublicKeyRef
	keys    []invitation.Key
	blocked cluster.BlockedKeys
	current rotation.Peer
	former  netstate.Key // of the peer, for its repair; zero: none
	peer    netstate.Key // of the PublicKey, or what was learned since
	// next is the key that the peer is to have, and inUse: its last handshake was with that.
	// handshakes has, by key, the last handshake that was seen since then: WireGuard forgets
	// one when it begins anew.
	next       netstate.Key
	inUse      bool
	handshakes map[netstate.Key]time.Time
	// tried is since when the own next key may be in WireGuard, proved that it is, and
	// provedAt since when.
	tried    time.Time
	proved   netstate.Key
	provedAt time.Time
	// given is what the pass was told of inUse, and overtaken: the peer came with its other key
	// after that, so what the pass did does not count as applied.
	given, overtaken bool
	// added is the next key of the peer that WireGuard knows.
	added netstate.Key
	// begun is when WireGuard began anew to prove a key.
	begun time.Time
}

func newRotating(api Rotation, yields bool) *rotating {
	return &rotating{api: api, yields: yields, came: make(chan struct{}, 1), handshakes: map[netstate.Key]time.Time{}, writes: rate.NewLimiter(rate.Every(writeEvery), writeBurst)}
}

// waitRotation waits until it is known which keys are in use. Without the API server those of
// the volume are.
func (gw *gateway) waitRotation(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, firstRead)
	defer cancel()
	if gw.cfg.Rotation.Synced(ctx) == nil {
		newOnce(gw.log).report("rotation of keys", gw.readRotation(ctx))
	}
}

// readRotation takes what the controller has written.
func (gw *gateway) readRotation(ctx context.Context) error {
	s, err := gw.cfg.Rotation.Read(ctx)
	if s == nil || err != nil {
		return err
	}
	r := gw.rotating
	r.mu.Lock()
	defer r.mu.Unlock()
	// The controller takes the state away when somebody has replaced the keys. Otherwise
	// it is the gateway's own, and the informer may be behind.
	reset := reflect.ValueOf(s.State).IsZero() && !reflect.ValueOf(r.secret.State).IsZero()
	if reset {
		r.heard, r.answer = nil, nil // was said of what is no more
	}
	if !r.read || reset || r.unclear != nil && sameState(s.State, *r.unclear) {
		r.state, r.stored, r.unclear = s.State, s.State, nil
		notify(gw.repair) // the files may be as they were
	}
	r.read, r.secret = true, *s
	return nil
}

// sameState compares states of which one was stored.
func sameState(a, b rotation.State) bool {
	x, errX := json.Marshal(a)
	y, errY := json.Marshal(b)
	return errX == nil && errY == nil && bytes.Equal(x, y)
}

// runRotation takes part in changes of keys until ctx is done.
func (gw *gateway) runRotation(ctx context.Context) error {
	r := gw.rotating
	once := newOnce(gw.log)
	hot := time.Now()
	var failed time.Time
	for ctx.Err() == nil {
		once.report("rotation of keys", gw.readRotation(ctx))
		if time.Since(failed) >= rotationTick { // the API server may have enough to do
			changed, err := gw.stepRotation(ctx)
			once.report("store the rotation of keys", err)
			if changed {
				hot = time.Now()
			}
			if err != nil {
				failed = time.Now()
			}
		}
		if gw.followPeer() {
			hot = time.Now()
		}
		wait := rotationTick
		if r.busy() && time.Since(hot) < hotTime {
			wait = handshakePoll
		}
		select {
		case <-ctx.Done():
		case <-r.api.Changed():
		case <-r.came:
		case <-time.After(wait):
		}
	}
	return nil
}

// busy reports whether handshakes are looked for.
func (r *rotating) busy() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.state.Candidate(r.over) != nil || r.state.Own != nil && r.state.Own.Phase == rotation.Trying
}

// stepRotation takes one step, stores it, and has a pass made. Keys are taken back at once,
// also while the API server is away.
func (gw *gateway) stepRotation(ctx context.Context) (changed bool, err error) {
	r := gw.rotating
	silent := gw.down()
	r.mu.Lock()
	r.outdate(silent)
	heard, whole, byFormer, answer := r.heard, r.whole, r.byFormer, r.answer
	r.mu.Unlock()
	// The handshake by which that came is known by then.
	changed = gw.followPeer()
	r.mu.Lock()
	before, tried, proved, provedAt := r.state, r.tried, r.proved, r.provedAt
	f := rotation.Facts{
		Now: time.Now().Round(0), Order: r.secret.Order, Accept: r.secret.Rules.Accept, Recorded: r.secret.Recorded.Theirs,
		Yields: r.yields, Heard: heard, Whole: whole, Former: byFormer, Answer: answer, Silent: silent, InUse: r.inUse, Over: r.over, Current: r.current, Keys: r.keys, Blocked: r.blocked, Tried: tried,
	}
	r.mu.Unlock()
	if trying(before) && f.Order != nil {
		f.Handshake = gw.handshakeWith(f.Order.To, proved, tried, provedAt)
	}
	if back := before.Forget(f); !reflect.DeepEqual(back, before) {
		gw.setRotation(before, back)
		before, changed = back, true
	}
	next := before.Next(r.decided(f, trying(before)))
	if trying(before) && next.Own.Phase == rotation.Aborted {
		back := before
		back.Own, back.Ended = next.Own, next.Ended
		gw.setRotation(before, back)
		before, changed = back, true
	}
	if !r.stores(next, f.Now) {
		return changed, nil
	}
	in, cancel := context.WithTimeout(ctx, writeTime)
	defer cancel()
	if err = r.api.Write(in, next); err != nil {
		if apierrors.IsConflict(err) { // the informer is behind; what it learns leads to the next step
			return changed, nil
		}
		r.mu.Lock()
		r.unclear = &next
		r.mu.Unlock()
		return changed, err
	}
	r.wrote(next, f.Now)
	if !reflect.DeepEqual(next, before) {
		gw.setRotation(before, next)
		changed = true
	}
	return changed, nil
}

// stores reports whether a step is to be stored now: it is one, and the peer has not offered
// too much. What waits is done later.
func (r *rotating) stores(next rotation.State, now time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return !reflect.DeepEqual(next, r.stored) && (!r.bringsIn(next) || r.writes.TokensAt(now) >= 1)
}

// wrote notes that a step is stored.
func (r *rotating) wrote(next rotation.State, now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.bringsIn(next) {
		r.writes.AllowN(now, 1)
	}
	r.stored, r.unclear = next, nil
}

// bringsIn reports whether a step is about another offer of the peer, taken or refused, and
// about nothing else that matters: how a change ends is stored at once.
func (r *rotating) bringsIn(next rotation.State) bool {
	was, is := r.stored.Theirs, next.Theirs
	another := is != nil && (was == nil || was.ID != is.ID)
	ends := is != nil && was != nil && was.ID == is.ID && was.Phase != is.Phase
	return reflect.DeepEqual(next.Own, r.stored.Own) && !ends && (another || !reflect.DeepEqual(next.Refused, r.stored.Refused))
}

// outdate forgets what is not so any more: what the peer has offered before it fell silent,
// and what came by its former key before it answered again.
func (r *rotating) outdate(silent bool) {
	switch {
	case !silent:
		r.byFormer = nil
	case r.heard != nil && time.Since(r.heardAt) > outdated:
		heard := *r.heard
		heard.Offer, heard.Ready = nil, ""
		r.heard, r.whole = &heard, false
	}
}

// decided remembers the first handshake with the keys that are tried.
func (r *rotating) decided(f rotation.Facts, trying bool) rotation.Facts {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !trying {
		r.shook = time.Time{}
	} else if r.shook.IsZero() {
		r.shook = f.Handshake
	}
	f.Handshake = r.shook
	return f
}

// setRotation has the tunnel and the peer follow a step.
func (gw *gateway) setRotation(before, next rotation.State) {
	gw.rotating.mu.Lock()
	gw.rotating.state = next
	gw.rotating.mu.Unlock()
	gw.logRotation(before, next)
	notify(gw.repair)
	notify(gw.exchange.news)
	gw.tell(false)
}

func trying(s rotation.State) bool { return s.Own != nil && s.Own.Phase == rotation.Trying }

// handshakeWith returns when there was a handshake since then with a private key that is in
// WireGuard since applied; zero: there was none.
func (gw *gateway) handshakeWith(private invitation.Key, inForce netstate.Key, since, applied time.Time) time.Time {
	public, err := private.Public()
	p, ok := gw.peer()
	switch {
	case err != nil || !ok || since.IsZero() || netstate.Key(public) != inForce:
		return time.Time{}
	case p.LastHandshake.After(since):
		return p.LastHandshake
	case time.Since(applied) > max(proofTime, 3*gw.prober.Status().RoundTrip) && gw.rotating.prove():
		if err := gw.ns.Rehandshake(desired.TunnelInterface, p.PublicKey, netip.AddrPort{}, false); err != nil {
			gw.log.Warn("no new handshake", "err", err)
			notify(gw.repair)
		}
	}
	return time.Time{}
}

// prove reports whether it is time for WireGuard to begin anew, which it is every 5 s: that
// is how often WireGuard itself tries (REKEY_TIMEOUT, §6 of the paper).
func (r *rotating) prove() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if time.Since(r.begun) < 5*time.Second {
		return false
	}
	r.begun = time.Now()
	return true
}

// rotate has a pass work with the keys that count.
func (gw *gateway) rotate(in *desired.GatewayInput) {
	if gw.rotating == nil {
		return
	}
	r := gw.rotating
	r.mu.Lock()
	defer r.mu.Unlock()
	order := r.secret.Order
	keys := rotated{shared: map[netstate.Key]privateKey{}}
	if private := r.state.Private(order); private != nil {
		keys.private = &privateKey{*private}
	}
	if !trying(r.state) {
		r.tried = time.Time{}
	} else if r.tried.IsZero() {
		r.tried = time.Now()
	}
	r.over, r.keys, r.blocked, r.current, r.former = rotation.PublicKeyRef{}, nil, in.BlockedKeys, rotation.Peer{}, netstate.Key{}
	if i := in.CountingKey(); i >= 0 {
		in.PublicKeys = slices.Clone(in.PublicKeys)
		k := &in.PublicKeys[i]
		r.over = rotation.PublicKeyRef{UID: k.UID, Generation: k.Generation}
		if k.PresharedKey != "" {
			r.current.PresharedKey = gw.keys.shares()
		}
		if p := r.state.Peer(order, r.over); p != nil {
			r.current.PresharedKey = p.PresharedKey
			if p.Key != nil {
				k.Key = p.Key[:]
			}
			var fingerprint netstate.Fingerprint
			if k.PresharedKey = ""; p.PresharedKey != nil {
				fingerprint = netstate.FingerprintOf(*p.PresharedKey)
				k.PresharedKey = fingerprint.String()
				keys.shared[netstate.Key(k.Key)] = privateKey{*p.PresharedKey}
			}
			in.PresharedKey = fingerprint
		}
		r.peer = netstate.Key(k.Key)
		r.current.Key = (*invitation.Key)(k.Key)
		r.keys = append(r.keys, *r.current.Key)
	}
	in.Repairs = r.state.Repairs(order)
	// Where this gateway has nothing but its own former key, the peer's has no place.
	if f := r.state.FormerKey(time.Now(), r.over, in.BlockedKeys); f != nil && !in.Repairs {
		r.former = netstate.Key(f.Key)
		in.PeerFormer = &desired.PeerFormer{Key: r.former}
		if f.PresharedKey != nil {
			in.PeerFormer.PresharedKey = netstate.FingerprintOf(*f.PresharedKey)
			keys.shared[r.former] = privateKey{*f.PresharedKey}
		}
		r.keys = append(r.keys, f.Key)
	}
	if c := r.state.Candidate(r.over); c != nil {
		if r.next != netstate.Key(*c.Key) {
			r.next, r.inUse, r.handshakes = netstate.Key(*c.Key), false, map[netstate.Key]time.Time{}
		}
		in.PeerNext = &desired.PeerNext{Key: netstate.Key(*c.Key), InUse: r.inUse}
		if c.PresharedKey != nil {
			in.PeerNext.PresharedKey = netstate.FingerprintOf(*c.PresharedKey)
			keys.shared[in.PeerNext.Key] = privateKey{*c.PresharedKey}
		}
	} else {
		r.next, r.inUse = netstate.Key{}, false
	}
	r.given, r.overtaken = r.inUse, false
	gw.keys.rotate(keys)
	in.PublicKey, _ = gw.keys.publicKey()
	r.keys = append(r.keys, invitation.Key(in.PublicKey))
}

// rotationApplied notes the keys that a pass has left in WireGuard.
func (gw *gateway) rotationApplied(in desired.GatewayInput) {
	r := gw.rotating
	var next netstate.Key
	if in.PeerNext != nil {
		next = in.PeerNext.Key
	}
	r.mu.Lock()
	if r.overtaken {
		r.mu.Unlock()
		return // the next pass, which is about to come
	}
	news, another := r.added != next, r.proved != in.PublicKey
	if another {
		r.provedAt = time.Now()
	}
	r.proved, r.added = in.PublicKey, next
	r.mu.Unlock()
	notify(r.came)
	if another {
		gw.prober.Probe() // the peer hears of another key with the first packet
	}
	if news {
		notify(gw.exchange.news)
	}
}

// tell returns what the peer is told; nil: nothing.
func (r *rotating) tell() *rotation.Message { return r.tellBy(rotation.State.Tell) }

// tellBy returns what somebody is told of a state that is stored; nil: nothing, since that is
// not known yet.
func (r *rotating) tellBy(tell func(rotation.State, *rotation.Order) rotation.Message) *rotation.Message {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.read {
		return nil
	}
	m := tell(r.stored, r.secret.Order)
	if c := r.state.Candidate(r.over); c == nil || netstate.Key(*c.Key) != r.added {
		m.Ready = "" // a handshake with it would be lost
	}
	return &m
}

// hear takes what the peer tells, which has been checked.
func (r *rotating) hear(m rotation.Message) {
	r.mu.Lock()
	r.heard, r.heardAt, r.whole = &m, time.Now(), true
	r.mu.Unlock()
	notify(r.came)
}

// logRotation says what has changed.
func (gw *gateway) logRotation(before, now rotation.State) {
	if own := now.Own; own != nil && !reflect.DeepEqual(own, before.Own) {
		gw.log.Info("rotation of this gateway's keys", "rotation", own.ID, "phase", own.Phase, "reason", own.Reason, "silence", own.Took)
	}
	if theirs := now.Theirs; theirs != nil && !reflect.DeepEqual(theirs, before.Theirs) {
		gw.log.Info("rotation of the peer's keys", "rotation", theirs.ID, "phase", theirs.Phase, "publicKey", netstate.Key(theirs.Key))
	}
	if r := now.Refused; r != nil && !reflect.DeepEqual(r, before.Refused) {
		gw.log.Warn("a rotation of the peer's keys was refused", "rotation", r.ID, "reason", r.Reason)
	}
}

// rotationStatus is what the Connection says of the last change of keys.
func (gw *gateway) rotationStatus() RotationStatus {
	if gw.rotating == nil {
		return RotationStatus{}
	}
	r := gw.rotating
	r.mu.Lock()
	defer r.mu.Unlock()
	own, theirs := r.state.Own, r.state.Theirs
	switch {
	case own == nil && theirs == nil:
		return RotationStatus{}
	case own == nil, theirs != nil && theirs.Since.After(own.Since):
		return RotationStatus{ID: theirs.ID, ByPeer: true, Phase: string(theirs.Phase)}
	}
	return RotationStatus{ID: own.ID, Phase: string(own.Phase), Message: own.Reason, Silence: own.Took}
}
