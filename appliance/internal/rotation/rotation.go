// Package rotation is how the gateways of two clusters change the keys of their tunnel
// without anybody at the other end: who told whom what, which keys are in use, and when a
// side goes back. It holds values only: nobody is asked anything, and no clock is read.
//
// One side begins, because its administrator wants another key pair: it offers the public
// half, and a pre-shared key where there is to be one, through the tunnel as it is. The
// other side stores the offer, says that it is ready, and has WireGuard know both keys from
// then on. It decides nothing: what the peer may send and is sent goes with the key that
// had the last handshake. So no moment has to be agreed on, and one side alone decides:
// it uses the new pair, and either there is a handshake within [Trial], or it takes the old
// one back. Whichever it is, the other side follows at the next handshake, also after
// either was killed, and forgets the other key when it is told how it ended.
//
// One tunnel can't have both keys valid for data, so some packets are lost between the
// switch of one side and that of the other: 16 and 22 of 1,000 packets/s were measured with
// wireguard-go when who begins changes first, and the other side looks every 20 ms. In the
// other order it is more than a second's.
//
// A pre-shared key goes through the tunnel, which is encrypted with the one before it, as
// that of an invitation does.
package rotation

import (
	"encoding/hex"
	"fmt"
	"io"
	"regexp"
	"time"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/internal/invitation"
)

const (
	// Patience is how long an offer stands before the peer has said that it is ready.
	Patience = 2 * time.Minute
	// Trial is how long new keys are in use without a handshake.
	Trial = 30 * time.Second
	// Kept is how long the key that a peer has changed is known, for its repair only.
	Kept = 24 * time.Hour
	// ahead is how far an offer may be in the future that comes by a former key: none of
	// the peer's own would count before that time.
	ahead = time.Hour
	// putBack is how far a clock may be put back while a key that was changed is known.
	putBack = time.Minute
	// Told is after how long the peer knows how a rotation ended: gateways tell each other
	// what is new, and all of it every 30 s.
	Told = 30 * time.Second
)

// A Phase is how far a rotation is.
type Phase string

// The phases. Those of the side that begins are Waiting, Trying and one of the last two,
// those of the other side Ready and one of the last two.
const (
	// Waiting: the peer has not said that it is ready.
	Waiting Phase = "Waiting"
	// Trying: the new keys are in use, and there was no handshake yet.
	Trying Phase = "Trying"
	// Ready: both keys of the peer are known to WireGuard.
	Ready Phase = "Ready"
	// Committed: the new keys are the keys.
	Committed Phase = "Committed"
	// Aborted: the old keys are.
	Aborted Phase = "Aborted"
)

// active reports whether a rotation is under way.
func (p Phase) active() bool { return p == Waiting || p == Trying || p == Ready }

// An Order is what the controller of the side that begins has made for its gateway.
type Order struct {
	// ID tells rotations apart, and At puts those of a side in order: no later one has
	// an earlier time.
	ID string    `json:"id"`
	At time.Time `json:"at"`
	// From is the private key in use, and To the one that is to be.
	From invitation.Key `json:"from"`
	To   invitation.Key `json:"to"`
	// PresharedKey is to be that of the peering; nil: it is to have none.
	PresharedKey *invitation.Key `json:"presharedKey,omitempty"`
	Manner
}

// A Manner is what is particular about a rotation.
type Manner struct {
	// Repair says that the peer takes the key in use for the repair only: it has been told
	// of a later one, which this side has lost.
	Repair bool `json:"repair,omitempty"`
	// Compromised says that the keys before are in other hands: the peer is to forget them
	// at once.
	Compromised bool `json:"compromised,omitempty"`
}

// A PublicKeyRef is an object as it was when something was learned about what it says. What
// was learned counts for as long as it is that.
type PublicKeyRef struct {
	UID        string `json:"uid"`
	Generation int64  `json:"generation"`
}

// An Attempt is a rotation that this side has begun.
type Attempt struct {
	ID    string       `json:"id"`
	At    time.Time    `json:"at"` // of the order
	Phase Phase        `json:"phase"`
	Since time.Time    `json:"since"` // of the phase
	Over  PublicKeyRef `json:"over"`
	// Reason is why it was aborted.
	Reason string `json:"reason,omitempty"`
	// Took is the time from the switch to the handshake, once there was one.
	Took time.Duration `json:"took,omitempty"`
}

// A Change is a rotation that the peer has begun.
type Change struct {
	ID           string          `json:"id"`
	At           time.Time       `json:"at"` // by the peer's clock
	Key          invitation.Key  `json:"key"`
	PresharedKey *invitation.Key `json:"presharedKey,omitempty"`
	Phase        Phase           `json:"phase"`
	Since        time.Time       `json:"since"` // of the phase, by the own clock
	Over         PublicKeyRef    `json:"over"`
	Compromised  bool            `json:"compromised,omitempty"`
	// ByFormer says that who offered it has a former key of the peer.
	ByFormer bool `json:"byFormer,omitempty"`
}

// A Former key is the one that the peer had before its last rotation. It takes no data, and
// no more than an offer comes with it: a peer that has lost its later keys has this one. So
// may somebody else, so nothing counts that comes with it while the peer answers, and it ends
// nothing that the peer has begun with another key.
type Former struct {
	Key          invitation.Key  `json:"key"`
	PresharedKey *invitation.Key `json:"presharedKey,omitempty"`
	Since        time.Time       `json:"since"` // when it was superseded
	Over         PublicKeyRef    `json:"over"`
}

// Learned is what the last rotation that was committed, of either side, has changed about
// the peer.
type Learned struct {
	Over         PublicKeyRef    `json:"over"`
	Key          *invitation.Key `json:"key,omitempty"`          // public; nil: as the PublicKey says
	PresharedKey *invitation.Key `json:"presharedKey,omitempty"` // nil: there is none
}

// A State is what a gateway has to know again after it was killed. The zero value knows of
// no rotation.
type State struct {
	Own     *Attempt `json:"own,omitempty"`
	Theirs  *Change  `json:"theirs,omitempty"`
	Learned *Learned `json:"learned,omitempty"`
	Former  *Former  `json:"former,omitempty"`
	// Committed is the ID of the last own rotation that was, and Ended the time of the
	// order of the last one that ended, however it did. The peer learns by them how the
	// one that it is ready for ended: no other one can be committed before it knows.
	Committed string    `json:"committed,omitempty"`
	Ended     time.Time `json:"ended,omitzero"`
	// Refused is the peer's offer that was refused last.
	Refused *Refusal `json:"refused,omitempty"`
}

// Facts are what a step depends on besides the state.
type Facts struct {
	Now   time.Time
	Order *Order // nil: there is none
	// Accept says that offers of the peer are taken.
	Accept bool
	// Recorded is the ID of the peer's rotation that the controller has recorded.
	Recorded string
	// Yields says that the peer's rotation goes first when both begin at once. One side
	// yields and the other does not.
	Yields bool
	Heard  *Message // that the peer has told last; nil: nothing
	// Whole says that Heard is all of that: the peer has not been silent since.
	Whole bool
	// Former is what somebody has told last who has the former key of the peer: of that
	// Offer and Ended count. Answer is what the peer has answered last to somebody who has
	// the former key of this side, which this gateway is: of that Ready and Refused count.
	Former, Answer *Message
	// Silent says that the peer does not answer through the tunnel, and InUse that its last
	// handshake was with the key that it is to have.
	Silent, InUse bool
	// Handshake is when there was the last one with the keys of the order; zero: none.
	// Tried is since when those are in use.
	Handshake, Tried time.Time
	// Over is the PublicKey of the peer that counts.
	Over PublicKeyRef
	// Current is what WireGuard knows of the peer.
	Current Peer
	// Keys are public ones that no offer may name: of this side, and the peer's own.
	Keys []invitation.Key
	// Blocked are those that this cluster has nothing to do with.
	Blocked cluster.BlockedKeys
}

// Next takes one step. What it returns is to be stored before anything of it is done or
// told, except that keys may be taken back before.
func (s State) Next(f Facts) State {
	return s.Forget(f).follow(f).lead(f)
}

// FormerKey returns the former key of the peer as long as it is known; nil: none is.
func (s State) FormerKey(now time.Time, over PublicKeyRef, keys cluster.BlockedKeys) *Former {
	f := s.Former
	if f == nil || f.Over != over || now.Sub(f.Since) >= Kept || f.Since.Sub(now) > putBack || blocked(keys, f.Key) {
		return nil
	}
	return f
}

// Forget drops the former key of the peer once it is of no use, and what came by it. That is
// done before it is stored.
func (s State) Forget(f Facts) State {
	if s.Former == nil || f.Over == (PublicKeyRef{}) || s.FormerKey(f.Now, f.Over, f.Blocked) != nil {
		return s
	}
	s.Former = nil
	if s.ready() && s.Theirs.ByFormer && !f.InUse {
		change := *s.Theirs
		change.Phase, change.Since = Aborted, f.Now
		s.Theirs = &change
	}
	return s
}

// lead goes on with what this side has begun.
func (s State) lead(f Facts) State {
	if s.Own != nil && s.Own.Phase.active() && (f.Order == nil || f.Order.ID != s.Own.ID) {
		return s.end(f.Now, Aborted, "its keys are not in the Secret of the rotation any more: begin again")
	}
	if f.Order == nil {
		return s
	}
	if s.Own == nil || s.Own.ID != f.Order.ID {
		s.Own = &Attempt{ID: f.Order.ID, At: f.Order.At, Phase: Waiting, Since: f.Now, Over: f.Over}
	}
	waited := f.Now.Sub(s.Own.Since)
	switch s.Own.Phase {
	case Waiting:
		refused, ready := f.answered(s.Own.ID)
		switch {
		case refused != "":
			return s.end(f.Now, Aborted, "the peer refuses: "+refused)
		case waited >= Patience && f.Order.Repair:
			return s.end(f.Now, Aborted, fmt.Sprintf("the peer's gateway has not taken the key of this one within %v: see whether it runs, and whether UDP reaches it; it knows the key that this one had before for %v, and not after --compromised: if that is over, connect the two clusters again", Patience, Kept))
		case waited >= Patience:
			return s.end(f.Now, Aborted, fmt.Sprintf("the peer's gateway has not said within %v that it has stored the new key: see whether the two are connected, and whether the peer runs a version of Isthmus that rotates keys", Patience))
		case ready && !s.ready():
			own := *s.Own
			own.Phase, own.Since = Trying, f.Now
			s.Own = &own
		}
	case Trying:
		switch {
		case f.Handshake.After(s.Own.Since): // which decides, even if that could not be stored in time
			s.Committed = s.Own.ID
			own := *s.Own
			own.Took = f.Handshake.Sub(f.Tried)
			s.Own = &own
			s.Learned = s.learn(s.Own.Over, nil, f.Order.PresharedKey)
			return s.end(f.Now, Committed, "")
		case waited >= Trial:
			return s.end(f.Now, Aborted, fmt.Sprintf("there was no handshake with the new keys within %v: the old ones are in use again", Trial))
		}
	}
	return s
}

// answered returns what the peer has said to an offer of this side: why it is refused, or
// that the peer is ready for it.
func (f Facts) answered(id string) (refused string, ready bool) {
	for _, m := range []*Message{f.Heard, f.Answer} {
		if m == nil {
			continue
		}
		ready = ready || m.Ready == id
		if m.Refused != nil && m.Refused.ID == id {
			refused = m.Refused.Reason
		}
	}
	return refused, ready
}

func (s State) end(now time.Time, how Phase, why string) State {
	own := *s.Own
	own.Phase, own.Since, own.Reason = how, now, why
	s.Own, s.Ended = &own, own.At
	return s
}

// ready reports whether a rotation of the peer is under way.
func (s State) ready() bool { return s.Theirs != nil && s.Theirs.Phase == Ready }

// follow goes on with what the peer has begun.
func (s State) follow(f Facts) State {
	if s.ready() {
		s = s.settle(f)
	}
	if f.Silent { // what the peer had offered before does not count
		if f.Former != nil && f.Former.Offer != nil && s.FormerKey(f.Now, f.Over, f.Blocked) != nil {
			s = s.take(f, f.Former.Offer, true)
		}
	} else if f.Heard != nil && f.Heard.Offer != nil {
		s = s.take(f, f.Heard.Offer, false)
	}
	return s
}

// settle goes on with a change that this side is ready for.
func (s State) settle(f Facts) State {
	change, told := *s.Theirs, f.Heard
	ended := told != nil && told.Ended.Equal(change.At)
	switch {
	case told != nil && told.Committed == change.ID, f.forgotten(change) && f.InUse && !change.ByFormer && !ended:
		change.Phase = Committed
		switch {
		case change.ByFormer && !change.Compromised:
			// The peer has lost the key that this one replaces. It may be restored to its
			// former key once more, so that key stays known.
		case change.Compromised, f.Current.Key == nil:
			s.Former = nil
		default:
			s.Former = &Former{*f.Current.Key, f.Current.PresharedKey, f.Now, change.Over}
		}
		s.Learned = s.learn(change.Over, &change.Key, change.PresharedKey)
	case ended, f.forgotten(change) && !f.InUse,
		change.ByFormer && f.Former != nil && !f.Former.Ended.Before(change.At),
		change.ByFormer && !f.Silent && !f.InUse: // the peer answers with its own key
		change.Phase = Aborted
	default:
		return s
	}
	change.Since = f.Now
	s.Theirs = &change
	return s
}

// forgotten reports whether the peer knows nothing any more of a change that it has begun,
// since its Secret was deleted: what it tells is of a later one, or it has told nothing of it
// for longer than a change takes. Its last handshake then says which key it has. Otherwise
// nobody would tell how the change ended.
func (f Facts) forgotten(c Change) bool {
	switch {
	case f.Heard == nil:
		return false
	case f.Heard.Ended.After(c.At):
		return true
	case f.Silent:
		return false
	case f.Heard.Offer != nil:
		return f.Heard.Offer.ID != c.ID && f.Heard.Offer.At.After(c.At)
	}
	return f.Whole && f.Now.Sub(c.Since) >= Patience+Trial
}

// take is ready for an offer, refuses it, or leaves it for later. What came by a former key
// takes the place of another change only when nothing can come of that any more.
func (s State) take(f Facts, o *Offer, byFormer bool) State {
	if s.Theirs != nil && s.Theirs.ID == o.ID || s.Refused != nil && s.Refused.ID == o.ID {
		return s
	}
	// When it was ordered says nothing where somebody else may have written that.
	doubtful := s.Theirs != nil && s.Theirs.ByFormer && s.Theirs.Phase != Committed
	replaces := byFormer && s.ready() && !f.InUse && f.Now.Sub(s.Theirs.Since) >= Patience+Trial
	refuse := func(reason string) State {
		s.Refused = &Refusal{ID: o.ID, Reason: reason}
		return s
	}
	switch {
	case !f.Accept:
		return refuse("in that cluster the value networking.keyRotation.accept is false: ask its administrator, or rotate with --allow-loss and tell them the new key")
	case byFormer && o.At.Sub(f.Now) > ahead:
		return refuse(fmt.Sprintf("the offer is of %s, and in that cluster it is %s: see whether the clocks of your nodes are right", o.At.UTC().Format(time.RFC3339), f.Now.UTC().Format(time.RFC3339)))
	case s.Theirs != nil && !doubtful && !o.At.After(s.Theirs.At):
		return refuse(fmt.Sprintf("the offer is of %s, and there was a later one, of %s: see whether the clocks of your nodes are right", o.At.UTC().Format(time.RFC3339), s.Theirs.At.UTC().Format(time.RFC3339)))
	case blocked(f.Blocked, o.Key):
		return refuse("that cluster has blocked the new key: begin again, which makes another one")
	case has(f.Keys, o.Key):
		return refuse("the new key is in use already")
	case o.PresharedKey == nil && s.Learned != nil && s.Learned.Over == f.Over && s.Learned.PresharedKey != nil:
		return refuse("it has no pre-shared key, and the peering has had one since a moment ago: begin again")
	case f.Over == (PublicKeyRef{}):
		return s // it is on its way, or the peer is not one any more
	case s.ready() && !replaces, s.Theirs != nil && s.Theirs.Phase == Committed && f.Recorded != s.Theirs.ID:
		return s // one after the other
	case s.Own != nil && (s.Own.Phase == Trying || s.Own.Phase == Waiting && !f.Yields && !byFormer):
		return s
	}
	s.Theirs = &Change{
		ID: o.ID, At: o.At, Key: o.Key, PresharedKey: o.PresharedKey, Phase: Ready, Since: f.Now, Over: f.Over,
		Compromised: o.Compromised, ByFormer: byFormer,
	}
	return s
}

// blocked reports whether a key is. Who has done it, and why, is not for the peer.
func blocked(list cluster.BlockedKeys, key invitation.Key) bool {
	_, is := list.Of(key[:])
	return is
}

func has(list []invitation.Key, key invitation.Key) bool {
	for _, k := range list {
		if k == key {
			return true
		}
	}
	return false
}

// Tell returns what the peer is told.
func (s State) Tell(order *Order) Message {
	m := Message{Committed: s.Committed, Ended: s.Ended, Refused: s.Refused}
	if s.ready() {
		m.Ready = s.Theirs.ID
	}
	if order == nil || s.Own == nil || s.Own.ID != order.ID {
		return m
	}
	if s.Own.Phase == Trying || s.Own.Phase == Waiting && !s.ready() {
		if key, err := order.To.Public(); err == nil {
			m.Offer = &Offer{ID: order.ID, At: order.At, Key: key, PresharedKey: order.PresharedKey, Compromised: order.Compromised}
		}
	}
	return m
}

// TellFormer returns what somebody is told who has the former key of the peer: what became of
// an offer that came by it.
func (s State) TellFormer() Message {
	m := Message{Refused: s.Refused}
	if s.ready() && s.Theirs.ByFormer {
		m.Ready = s.Theirs.ID
	}
	return m
}

// TellRepair returns what the peer is told that takes the former key of this side only.
func (s State) TellRepair(order *Order) Message {
	m := s.Tell(order)
	return Message{Offer: m.Offer, Ended: m.Ended}
}

// learn returns what is known of the peer after a rotation; without a key that is the one
// that was known before.
func (s State) learn(over PublicKeyRef, key, shared *invitation.Key) *Learned {
	if key == nil && s.Learned != nil && s.Learned.Over == over {
		key = s.Learned.Key
	}
	return &Learned{over, key, shared}
}

// Private returns the private key that this side's tunnel has; nil: that of the gateway's
// Secret.
func (s State) Private(order *Order) *invitation.Key {
	switch {
	case order == nil:
		return nil
	case s.Own != nil && s.Own.ID == order.ID && (s.Own.Phase == Trying || s.Own.Phase == Committed):
		return &order.To
	}
	return &order.From
}

// A Peer is what WireGuard is to know of the peer.
type Peer struct {
	Key          *invitation.Key // nil: as the PublicKey says
	PresharedKey *invitation.Key // nil: there is none
}

// Peer returns what counts instead of what the PublicKey says; nil: nothing does.
func (s State) Peer(order *Order, over PublicKeyRef) *Peer {
	if order != nil && s.Own != nil && s.Own.ID == order.ID && s.Own.Phase == Trying && s.Own.Over == over {
		l := s.learn(over, nil, order.PresharedKey)
		return &Peer{l.Key, l.PresharedKey}
	}
	if s.Learned != nil && s.Learned.Over == over {
		return &Peer{s.Learned.Key, s.Learned.PresharedKey}
	}
	return nil
}

// Candidate returns what the peer may use soon; nil: there is nothing.
func (s State) Candidate(over PublicKeyRef) *Peer {
	if !s.ready() || s.Theirs.Over != over {
		return nil
	}
	return &Peer{&s.Theirs.Key, s.Theirs.PresharedKey}
}

// Repairs reports whether this side has nothing but its former key to begin with.
func (s State) Repairs(order *Order) bool {
	return order != nil && order.Repair && s.Own != nil && s.Own.ID == order.ID && s.Own.Phase == Waiting
}

// NewID returns the ID of a new rotation.
func NewID(random io.Reader) (string, error) {
	var b [8]byte
	if _, err := io.ReadFull(random, b[:]); err != nil {
		return "", err
	}
	return hex.EncodeToString(b[:]), nil
}

var hexID = regexp.MustCompile(`^[0-9a-f]{16}$`)
