package rotation

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"
	"time"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/internal/invitation"
)

var start = time.Date(2026, 3, 14, 12, 0, 0, 0, time.UTC)

const (
	first  = "0000000000000001"
	second = "0000000000000002"
)

func at(d time.Duration) time.Time { return start.Add(d) }

func shared(n byte) *invitation.Key { return &invitation.Key{n, 0xff} }

func order(id string, n byte) *Order {
	return &Order{ID: id, At: at(time.Duration(n) * time.Hour), From: invitation.Key{n}, To: invitation.Key{n + 1}, PresharedKey: shared(n)}
}

func offer(id string, n byte) *Offer {
	return &Offer{ID: id, At: at(time.Duration(n) * time.Hour), Key: invitation.Key{n, 1}, PresharedKey: shared(n)}
}

var over = PublicKeyRef{UID: "u", Generation: 1}

// Who begins waits for the peer, tries, and decides.
func TestLead(t *testing.T) {
	attempt := func(p Phase, since time.Duration) State {
		return State{Own: &Attempt{ID: first, At: order(first, 1).At, Phase: p, Since: at(since), Over: over}}
	}
	ready := &Message{Ready: first}
	following := attempt(Waiting, 0)
	following.Theirs = &Change{ID: second, At: at(0), Key: invitation.Key{9}, Phase: Ready, Over: over}
	for _, c := range []struct {
		name   string
		state  State
		facts  Facts
		want   Phase // of the own rotation; empty: there is none
		reason string
	}{
		{"nothing to do", State{}, Facts{}, "", ""},
		{"an order begins", State{}, Facts{Order: order(first, 1)}, Waiting, ""},
		{"the peer has said nothing", attempt(Waiting, 0), Facts{Order: order(first, 1), Now: at(Patience - 1)}, Waiting, ""},
		{"or something else", attempt(Waiting, 0), Facts{Order: order(first, 1), Heard: &Message{Ready: second}}, Waiting, ""},
		{"it is ready", attempt(Waiting, 0), Facts{Order: order(first, 1), Heard: ready}, Trying, ""},
		{"it is ready, and its own goes first", following, Facts{Order: order(first, 1), Heard: ready}, Waiting, ""},
		{"it refuses", attempt(Waiting, 0), Facts{Order: order(first, 1), Heard: &Message{Refused: &Refusal{first, "not today"}}}, Aborted, "the peer refuses: not today"},
		{"it has refused another one", attempt(Waiting, 0), Facts{Order: order(first, 1), Heard: &Message{Refused: &Refusal{second, "not today"}}}, Waiting, ""},
		{"it does not come", attempt(Waiting, 0), Facts{Order: order(first, 1), Now: at(Patience)}, Aborted, "has not said within 2m0s"},
		{"no handshake yet", attempt(Trying, 0), Facts{Order: order(first, 1), Now: at(Trial - 1)}, Trying, ""},
		{"one of before", attempt(Trying, 0), Facts{Order: order(first, 1), Now: at(1), Handshake: at(0)}, Trying, ""},
		{"a handshake", attempt(Trying, 0), Facts{Order: order(first, 1), Now: at(2), Handshake: at(1)}, Committed, ""},
		{"no handshake", attempt(Trying, 0), Facts{Order: order(first, 1), Now: at(Trial)}, Aborted, "no handshake with the new keys within 30s"},
		{"a handshake that could not be stored in time", attempt(Trying, 0), Facts{Order: order(first, 1), Now: at(2 * Trial), Handshake: at(1)}, Committed, ""},
		{"the keys are gone", attempt(Trying, 0), Facts{Handshake: at(1)}, Aborted, "not in the Secret"},
		{"an end is one", attempt(Aborted, 0), Facts{Order: order(first, 1), Heard: ready, Handshake: at(1)}, Aborted, ""},
		{"the next order", attempt(Committed, 0), Facts{Order: order(second, 2)}, Waiting, ""},
	} {
		if c.facts.Now.IsZero() {
			c.facts.Now = at(2)
		}
		got := c.state.Next(c.facts)
		if c.want == "" {
			assert.Check(t, got.Own == nil, c.name)
			continue
		}
		assert.Assert(t, got.Own != nil, c.name)
		assert.Check(t, is.Equal(got.Own.Phase, c.want), c.name)
		assert.Check(t, is.Contains(got.Own.Reason, c.reason), c.name)
		assert.Check(t, is.Equal(got.Committed == first, c.want == Committed), c.name)
		assert.Check(t, is.Equal(got.Ended.IsZero(), c.want != Committed && c.want != Aborted || c.state.Own.Phase == c.want), c.name)
	}
}

// Who is asked stores the offer, and learns how it ended.
func TestFollow(t *testing.T) {
	change := func(p Phase) State {
		return State{Theirs: &Change{ID: first, At: at(time.Hour), Key: invitation.Key{1, 1}, PresharedKey: shared(1), Phase: p, Since: start, Over: over}}
	}
	own := func(p Phase) State {
		return State{Own: &Attempt{ID: second, At: at(0), Phase: p, Since: at(0), Over: over}}
	}
	for _, c := range []struct {
		name    string
		state   State
		facts   Facts
		want    string // ID and phase of the peer's rotation
		refused string
	}{
		{"nothing was heard", State{}, Facts{}, "", ""},
		{"an offer", State{}, Facts{Heard: &Message{Offer: offer(first, 1)}}, first + " Ready", ""},
		{"it is told again", change(Ready), Facts{Heard: &Message{Offer: offer(first, 1)}}, first + " Ready", ""},
		{"it comes late", change(Committed), Facts{Heard: &Message{Offer: offer(first, 1)}, Recorded: first}, first + " Committed", ""},
		{"the peer's key is not known", State{}, Facts{Heard: &Message{Offer: offer(first, 1)}, Over: PublicKeyRef{UID: "-"}}, "", ""},
		{"of a key that is in use", State{}, Facts{Heard: &Message{Offer: offer(first, 1)}, Keys: []invitation.Key{{1, 1}}}, "", "in use already"},
		{"of a key that is blocked", State{}, Facts{Heard: &Message{Offer: offer(first, 1)}, Blocked: cluster.BlockedKeys{{Fingerprint: cluster.FingerprintOf((&invitation.Key{1, 1})[:]), Why: "by jane"}}}, "", "has blocked the new key: begin again"},
		{"while another one is", State{}, Facts{Heard: &Message{Offer: offer(first, 1)}, Blocked: cluster.BlockedKeys{{Fingerprint: cluster.FingerprintOf([]byte{1})}}}, first + " Ready", ""},
		{"switched off", State{}, Facts{Heard: &Message{Offer: offer(first, 1)}, Accept: false, Now: at(3)}, "", "networking.keyRotation.accept is false"},
		{"it is committed", change(Ready), Facts{Heard: &Message{Committed: first, Ended: at(time.Hour)}}, first + " Committed", ""},
		{"it is aborted", change(Ready), Facts{Heard: &Message{Ended: at(time.Hour)}}, first + " Aborted", ""},
		{"a later one is aborted", change(Ready), Facts{Heard: &Message{Ended: at(2 * time.Hour)}}, first + " Aborted", ""},
		{"one before ended", change(Ready), Facts{Heard: &Message{Ended: at(time.Minute)}}, first + " Ready", ""},
		{"a peer that knows nothing of it", change(Ready), Facts{Heard: &Message{}, Whole: true, Now: at(Patience + Trial)}, first + " Aborted", ""},
		{"a peer that may yet", change(Ready), Facts{Heard: &Message{}, Whole: true, Now: at(Patience + Trial - 1)}, first + " Ready", ""},
		{"a peer that was silent meanwhile", change(Ready), Facts{Heard: &Message{}, Now: at(Patience + Trial)}, first + " Ready", ""},
		{"a peer that is silent", change(Ready), Facts{Heard: &Message{}, Whole: true, Silent: true, Now: at(Patience + Trial)}, first + " Ready", ""},
		{"a peer that tells it still", change(Ready), Facts{Heard: &Message{Offer: offer(first, 1)}, Whole: true, Now: at(Patience + Trial)}, first + " Ready", ""},
		{"a peer that knows nothing of it, and has the key", change(Ready), Facts{Heard: &Message{}, Whole: true, InUse: true, Now: at(Patience + Trial)}, first + " Committed", ""},
		{"another one, of a peer that has forgotten this", change(Ready), Facts{Heard: &Message{Offer: offer(second, 2)}}, second + " Ready", ""},
		{"an older one, told again", change(Ready), Facts{Heard: &Message{Offer: offer(second, 0)}}, first + " Ready", "there was a later one"},
		{"another one, and the key of this is in use", change(Ready), Facts{Heard: &Message{Offer: offer(second, 2)}, InUse: true}, first + " Committed", ""},
		{"another one has ended, and the key of this is in use", change(Ready), Facts{Heard: &Message{Ended: at(2 * time.Hour)}, InUse: true}, first + " Committed", ""},
		{"it is aborted, and the last handshake with its key was a moment ago", change(Ready), Facts{Heard: &Message{Ended: at(time.Hour)}, InUse: true}, first + " Aborted", ""},
		{"the next one follows at once", change(Ready), Facts{Heard: &Message{Committed: first, Ended: at(time.Hour), Offer: offer(second, 2)}}, first + " Committed", ""},
		{"once the controller has recorded it", change(Committed), Facts{Heard: &Message{Offer: offer(second, 2)}, Recorded: first}, second + " Ready", ""},
		{"after one that was aborted", change(Ready), Facts{Heard: &Message{Ended: at(time.Hour), Offer: offer(second, 2)}}, second + " Ready", ""},
		{"an older one", change(Aborted), Facts{Heard: &Message{Offer: offer(second, 1)}}, first + " Aborted", "there was a later one"},
		{"while this side tries", own(Trying), Facts{Order: order(second, 0), Heard: &Message{Offer: offer(first, 1)}, Yields: true}, "", ""},
		{"while this side waits, and does not yield", own(Waiting), Facts{Order: order(second, 0), Heard: &Message{Offer: offer(first, 1)}}, "", ""},
		{"or does", own(Waiting), Facts{Order: order(second, 0), Heard: &Message{Offer: offer(first, 1)}, Yields: true}, first + " Ready", ""},
	} {
		c.facts.Accept = c.name != "switched off"
		switch c.facts.Over.UID {
		case "":
			c.facts.Over = over
		case "-":
			c.facts.Over = PublicKeyRef{}
		}
		if c.facts.Now.IsZero() {
			c.facts.Now = at(2)
		}
		got := c.state.Next(c.facts)
		text := ""
		if got.Theirs != nil {
			text = got.Theirs.ID + " " + string(got.Theirs.Phase)
		}
		assert.Check(t, is.Equal(text, c.want), c.name)
		assert.Check(t, is.Equal(got.Refused != nil, c.refused != ""), c.name)
		if got.Refused != nil {
			assert.Check(t, is.Contains(got.Refused.Reason, c.refused), c.name)
			assert.Check(t, got.Tell(nil).Check(), c.name)
		}
	}
}

// The key before is kept for a day, unless it was compromised or counts no more.
func TestFormer(t *testing.T) {
	key, psk := &invitation.Key{3}, shared(3)
	ready := func(compromised bool) State {
		return State{Theirs: &Change{ID: first, At: at(time.Hour), Key: invitation.Key{1, 1}, Phase: Ready, Over: over, Compromised: compromised}}
	}
	kept := State{Former: &Former{Key: *key, PresharedKey: psk, Since: start, Over: over}}
	committed := &Message{Committed: first, Ended: at(time.Hour)}
	blocks := cluster.BlockedKeys{{Fingerprint: cluster.FingerprintOf(key[:])}}
	for _, c := range []struct {
		name  string
		state State
		facts Facts
		want  bool
	}{
		{"a rotation", ready(false), Facts{Heard: committed}, true},
		{"of a key that was compromised", ready(true), Facts{Heard: committed}, false},
		{"one that was aborted", ready(false), Facts{Heard: &Message{Ended: at(time.Hour)}}, false},
		{"a day later", kept, Facts{Now: at(Kept)}, false},
		{"a moment before that", kept, Facts{Now: at(Kept - 1)}, true},
		{"somebody has written another key", kept, Facts{Over: PublicKeyRef{"u", 2}}, false},
		{"blocked", kept, Facts{Blocked: blocks}, false},
		{"the peer's key is not known for a moment", kept, Facts{Over: PublicKeyRef{UID: "-"}}, true},
	} {
		c.facts.Accept, c.facts.Current = true, Peer{key, psk}
		switch c.facts.Over.UID {
		case "":
			c.facts.Over = over
		case "-":
			c.facts.Over = PublicKeyRef{}
		}
		if c.facts.Now.IsZero() {
			c.facts.Now = at(1)
		}
		got := c.state.Next(c.facts)
		assert.Check(t, is.Equal(got.Former != nil, c.want), c.name)
		if got.Former != nil {
			assert.Check(t, is.DeepEqual(got.Former.Key, *key), c.name)
			assert.Check(t, is.DeepEqual(got.Former.PresharedKey, psk), c.name)
		}
	}
}

// Who has the former key may be somebody else than the peer. What comes by it counts while the
// peer is silent, and gives way to what the peer says.
func TestByFormer(t *testing.T) {
	key := invitation.Key{3}
	kept := State{Former: &Former{Key: key, Since: start, Over: over}}
	with := func(change Change) State {
		s := kept
		change.ID, change.At, change.Key, change.Since, change.Over = first, cmp.Or(change.At, at(time.Minute)), invitation.Key{1, 1}, start, over
		s.Theirs = &change
		return s
	}
	mine := Change{Phase: Ready, ByFormer: true}
	offered := func(o *Offer) *Message { return &Message{Offer: o} }
	late := offer(second, 2)
	late.At = at(30 * time.Hour)
	for _, c := range []struct {
		name  string
		state State
		facts Facts
		want  string // ID and phase of the peer's rotation, and whether it came by the former key
		keeps bool   // the former key
	}{
		{"an offer", kept, Facts{Silent: true, Former: offered(offer(second, 0))}, second + " Ready true", true},
		{"while the peer answers", kept, Facts{Former: offered(offer(second, 0))}, "", true},
		{"without such a key", State{}, Facts{Silent: true, Former: offered(offer(second, 0))}, "", false},
		{"a day later", kept, Facts{Silent: true, Former: offered(offer(second, 0)), Now: at(Kept)}, "", false},
		{"the clock was put back", kept, Facts{Silent: true, Former: offered(offer(second, 0)), Now: at(-time.Hour)}, "", false},
		{"of the future", kept, Facts{Silent: true, Former: offered(late)}, "", true},
		{"the peer is about to change", with(Change{Phase: Ready}), Facts{Silent: true, Former: offered(offer(second, 1))}, first + " Ready false", true},
		{"the peer was about to change", with(Change{Phase: Ready}), Facts{Silent: true, Former: offered(offer(second, 1)), Now: at(Patience + Trial)}, second + " Ready true", true},
		{"and has done so", with(Change{Phase: Ready}), Facts{Silent: true, InUse: true, Former: offered(offer(second, 1)), Now: at(Patience + Trial)}, first + " Ready false", true},
		{"another one at once", with(mine), Facts{Silent: true, Former: offered(offer(second, 1))}, first + " Ready true", true},
		{"another one later", with(mine), Facts{Silent: true, Former: offered(offer(second, 1)), Now: at(Patience + Trial)}, second + " Ready true", true},
		{"the peer answers again", with(mine), Facts{}, first + " Aborted true", true},
		{"it knows nothing of it, and answers with the new key", with(mine), Facts{Heard: &Message{}, Whole: true, InUse: true, Now: at(Patience + Trial)}, first + " Ready true", true},
		{"it answers with the new key", with(mine), Facts{InUse: true}, first + " Ready true", true},
		{"and is not silent", with(Change{Phase: Ready}), Facts{Former: offered(offer(second, 1))}, first + " Ready false", true},
		{"an end of what the peer has begun", with(Change{Phase: Ready}), Facts{Silent: true, Former: &Message{Ended: at(time.Hour)}}, first + " Ready false", true},
		{"that it is committed", with(mine), Facts{Silent: true, Former: &Message{Committed: first}}, first + " Ready true", true},
		{"an end of what came by it", with(mine), Facts{Silent: true, Former: &Message{Ended: at(time.Hour)}}, first + " Aborted true", true},
		{"an offer of the peer's own after that", with(Change{Phase: Ready, ByFormer: true, At: at(40 * time.Minute)}), Facts{Heard: offered(offer(second, 0))}, second + " Ready false", true},
		{"what the peer had offered before", with(mine), Facts{Silent: true, Heard: offered(offer(second, 0))}, first + " Ready true", true},
		{"the key is too old", with(mine), Facts{Silent: true, Now: at(Kept)}, first + " Aborted true", false},
		{"and the new one is in use", with(mine), Facts{InUse: true, Now: at(Kept)}, first + " Ready true", false},
		{"the key is blocked", with(mine), Facts{Silent: true, Blocked: cluster.BlockedKeys{{Fingerprint: cluster.FingerprintOf(key[:])}}}, first + " Aborted true", false},
		{"committed: it may be lost once more", with(mine), Facts{Heard: &Message{Committed: first}}, first + " Committed true", true},
		{"committed, and compromised", with(Change{Phase: Ready, ByFormer: true, Compromised: true}), Facts{Heard: &Message{Committed: first}}, first + " Committed true", false},
	} {
		c.facts.Accept, c.facts.Over, c.facts.Current = true, over, Peer{&invitation.Key{4}, nil}
		if c.facts.Now.IsZero() {
			c.facts.Now = at(2)
		}
		got := c.state.Next(c.facts)
		text := ""
		if got.Theirs != nil {
			text = fmt.Sprint(got.Theirs.ID, " ", got.Theirs.Phase, " ", got.Theirs.ByFormer)
		}
		assert.Check(t, is.Equal(text, c.want), c.name)
		assert.Check(t, is.Equal(got.Former != nil, c.keeps), c.name)
		if got.Former != nil {
			assert.Check(t, is.Equal(got.Former.Key, key), c.name)
		}
	}

	// Nothing of this side is told by it, and no key.
	o := order(second, 1)
	s := with(mine)
	s.Own, s.Committed, s.Ended = &Attempt{ID: second, At: o.At, Phase: Waiting, Over: over}, second, at(0)
	assert.Check(t, is.DeepEqual(s.TellFormer(), Message{Ready: first}))
	s.Theirs = &Change{ID: first, Phase: Ready}
	assert.Check(t, is.DeepEqual(s.TellFormer(), Message{}))
	assert.Check(t, is.DeepEqual(kept.Next(Facts{Now: start, Order: o, Over: over}).TellRepair(o).Offer.ID, second))
}

// A repair is one until the peer is ready.
func TestRepair(t *testing.T) {
	o := order(first, 1)
	o.Repair = true
	s := State{}.Next(Facts{Now: start, Order: o, Over: over})
	assert.Check(t, s.Repairs(o))
	assert.Check(t, !s.Repairs(order(first, 1)))
	assert.Check(t, !s.Repairs(nil))
	assert.Check(t, !s.Next(Facts{Now: start, Order: o, Over: over, Answer: &Message{Ready: first}}).Repairs(o))
	refused := s.Next(Facts{Now: start, Order: o, Over: over, Answer: &Message{Refused: &Refusal{first, "not today"}}})
	assert.Check(t, is.Equal(refused.Own.Reason, "the peer refuses: not today"))
	s = s.Next(Facts{Now: at(Patience), Order: o, Over: over})
	assert.Check(t, is.Contains(s.Own.Reason, "connect the two clusters again"))
	assert.Check(t, !s.Repairs(o))
}

// What was learned counts until somebody writes another key.
func TestLearnedUntilSpecChanges(t *testing.T) {
	s := State{}.Next(Facts{Now: start, Accept: true, Over: over, Heard: &Message{Offer: offer(first, 1)}})
	assert.Assert(t, s.Candidate(over) != nil)
	assert.Assert(t, s.Candidate(PublicKeyRef{"u", 2}) == nil)
	assert.Assert(t, s.Peer(nil, over) == nil)
	s = s.Next(Facts{Now: start, Over: over, Heard: &Message{Committed: first, Ended: at(time.Hour)}})
	assert.DeepEqual(t, *s.Peer(nil, over), Peer{&invitation.Key{1, 1}, shared(1)})
	assert.Assert(t, s.Candidate(over) == nil)
	assert.Assert(t, s.Peer(nil, PublicKeyRef{"u", 2}) == nil)
	assert.Assert(t, s.Peer(nil, PublicKeyRef{"v", 1}) == nil)
}

// A key pair that was in use for a period is due; a rotation that failed is tried again
// before that.
func TestDue(t *testing.T) {
	const period = 720 * time.Hour
	own := func(p Phase, ordered time.Duration) State {
		return State{Own: &Attempt{ID: first, At: at(ordered), Phase: p}}
	}
	for _, c := range []struct {
		name   string
		secret Secret
		period time.Duration
		now    time.Duration // since the keys were made
		want   time.Duration
	}{
		{"new keys", Secret{}, period, 0, period},
		{"old keys", Secret{}, period, period, 0},
		{"changed since", Secret{Recorded: Recorded{Begun: at(period)}, State: own(Committed, period)}, period, period + time.Hour, period - time.Hour},
		{"in vain", Secret{Recorded: Recorded{Begun: at(period)}, State: own(Aborted, period)}, period, period, time.Hour},
		{"in vain, before what came next", Secret{Recorded: Recorded{Begun: at(period)}, State: own(Aborted, 0)}, period, period, period},
		{"in vain, with a short period", Secret{Recorded: Recorded{Begun: at(time.Hour)}, State: own(Aborted, time.Hour)}, time.Minute, time.Hour, time.Minute},
		{"made after the last change", Secret{Recorded: Recorded{Begun: at(-period)}}, period, 0, period},
	} {
		assert.Check(t, is.Equal(c.secret.Due(c.period, start, at(c.now)), c.want), c.name)
	}
}

// A side of the walk: what lasts, what its process knows, and what its kernel has.
type side struct {
	yields   bool
	durable  Secret
	state    State // of the process
	stored   State // as the process believes
	unclear  *State
	shook    time.Time
	heard    *Message
	queue    []Message // what is on its way to it
	private  invitation.Key
	shared   *invitation.Key
	peerKey  invitation.Key // of the PublicKey's spec
	orders   int
	outcomes map[string]Phase
}

// end is one end of the tunnel as WireGuard has it: a private key, and peers.
func (s *side) end() (private invitation.Key, peers []Peer) {
	private = s.private
	if k := s.state.Private(s.durable.Order); k != nil {
		private = *k
	}
	now := Peer{&s.peerKey, s.shared}
	if p := s.state.Peer(s.durable.Order, over); p != nil {
		now.PresharedKey = p.PresharedKey
		if p.Key != nil {
			now.Key = p.Key
		}
	}
	peers = append(peers, now)
	if p := s.state.Candidate(over); p != nil {
		peers = append(peers, *p)
	}
	return private, peers
}

// An arithmetic remembers public keys, which take long to compute.
type arithmetic map[invitation.Key]invitation.Key

func (a arithmetic) public(k invitation.Key) invitation.Key {
	if p, ok := a[k]; ok {
		return p
	}
	p, err := k.Public()
	if err != nil {
		panic(err)
	}
	a[k] = p
	return p
}

func equalKeys(a, b *invitation.Key) bool {
	return a == nil && b == nil || a != nil && b != nil && *a == *b
}

// handshake reports whether there can be one between two ends.
func (m arithmetic) handshake(a, b *side) bool {
	privateA, peersA := a.end()
	privateB, peersB := b.end()
	publicA, publicB := m.public(privateA), m.public(privateB)
	for _, pa := range peersA {
		for _, pb := range peersB {
			if *pa.Key == publicB && *pb.Key == publicA && equalKeys(pa.PresharedKey, pb.PresharedKey) {
				return true
			}
		}
	}
	return false
}

// step lets the process of a side take one step. Its write may fail, and nobody may say that
// it has not.
func (s *side) step(now time.Time, works, writes, answers bool) {
	if s.unclear != nil && reflect.DeepEqual(s.durable.State, *s.unclear) { // it reads what it has written
		s.state, s.stored, s.unclear = s.durable.State, s.durable.State, nil
	}
	f := Facts{Now: now, Order: s.durable.Order, Accept: true, Recorded: s.durable.Recorded.Theirs, Yields: s.yields, Heard: s.heard, Over: over}
	trying := s.state.Own != nil && s.state.Own.Phase == Trying
	switch {
	case !trying:
		s.shook = time.Time{}
	case works && s.shook.IsZero() && now.After(s.state.Own.Since):
		s.shook = now
	}
	f.Handshake = s.shook
	next := s.state.Next(f)
	if trying && next.Own.Phase == Aborted {
		s.state.Own, s.state.Ended = next.Own, next.Ended
	}
	if reflect.DeepEqual(next, s.stored) || !writes {
		return
	}
	if s.durable.State = next; answers {
		s.state, s.stored, s.unclear = next, next, nil
	} else {
		s.unclear = &next
	}
}

// control is a pass of its controller: it records what was committed, and has a new
// rotation begin.
func (s *side) control(r *rand.Rand, now time.Time, begin bool) {
	d := s.durable.State
	if d.Own != nil && d.Own.Phase == Committed && s.durable.Recorded.Own != d.Own.ID && s.durable.Order != nil && s.durable.Order.ID == d.Own.ID {
		s.private, s.shared = s.durable.Order.To, d.Learned.PresharedKey
		s.durable.Recorded.Own = d.Own.ID
	}
	if d.Theirs != nil && d.Theirs.Phase == Committed && s.durable.Recorded.Theirs != d.Theirs.ID {
		s.shared = d.Learned.PresharedKey
		s.durable.Recorded.Theirs = d.Theirs.ID
	}
	idle := (d.Own == nil || !d.Own.Phase.active()) && (s.durable.Order == nil || d.Own != nil && d.Own.ID == s.durable.Order.ID)
	if begin && idle {
		s.orders++
		id := fmt.Sprintf("%08x%08x", map[bool]int{false: 1, true: 2}[s.yields], s.orders)
		var psk *invitation.Key
		if r.IntN(4) > 0 {
			psk = random(r)
		}
		s.durable.Order = &Order{ID: id, At: now, From: s.private, To: *random(r), PresharedKey: psk}
	}
}

func random(r *rand.Rand) *invitation.Key {
	var k invitation.Key
	for i := range k {
		k[i] = byte(r.Uint32())
	}
	return &k
}

// Two sides with messages that are lost, repeated and late, writes that fail, and processes
// that are killed at any step: in the end both have keys that match, and no rotation is
// under way.
func TestWalk(t *testing.T) {
	ended := map[Phase]int{}
	keys := arithmetic{}
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 16))
		now := start
		var a, b side
		a.yields = true
		a.private, b.private = *random(r), *random(r)
		a.peerKey, b.peerKey = keys.public(b.private), keys.public(a.private)
		sides := []*side{&a, &b}
		send := func(from, to *side) {
			if keys.handshake(from, to) {
				m := from.stored.Tell(from.durable.Order)
				assert.NilError(t, m.Check())
				to.queue = append(to.queue, m)
			}
		}
		for range 400 {
			now = now.Add(time.Duration(r.IntN(3000)) * time.Millisecond)
			i := r.IntN(2)
			s, other := sides[i], sides[1-i]
			switch r.IntN(12) {
			case 0: // killed
				s.state, s.stored, s.unclear, s.shook, s.heard = s.durable.State, s.durable.State, nil, time.Time{}, nil
				if r.IntN(3) == 0 {
					now = now.Add(Trial)
				}
			case 1:
				s.control(r, now, r.IntN(3) == 0)
			case 2, 3, 4:
				send(s, other)
			case 5, 6, 7: // a message arrives, now or again later, in any order
				if len(s.queue) > 0 {
					n := r.IntN(len(s.queue))
					m := s.queue[n]
					s.heard = &m
					if r.IntN(3) > 0 {
						s.queue = slices.Delete(s.queue, n, n+1)
					}
				}
			case 8: // lost
				s.queue = nil
			default:
				s.step(now, keys.handshake(&a, &b) && r.IntN(3) > 0, r.IntN(6) > 0, r.IntN(6) > 0)
			}
		}
		// Calm.
		for _, s := range sides {
			s.queue = nil
		}
		for range int((Patience + 2*Trial) / time.Second) {
			now = now.Add(time.Second)
			for i, s := range sides {
				s.step(now, keys.handshake(&a, &b), true, true)
				s.control(r, now, false)
				send(s, sides[1-i])
				if q := sides[1-i].queue; len(q) > 0 {
					sides[1-i].heard, sides[1-i].queue = &q[len(q)-1], nil
				}
			}
		}
		assert.Assert(t, keys.handshake(&a, &b), "seed %d: the keys do not match: %+v %+v", seed, a.state, b.state)
		for i, s := range sides {
			_, peers := s.end()
			assert.Equal(t, len(peers), 1, "seed %d: %+v", seed, s.state)
			if own := s.state.Own; own != nil {
				ended[own.Phase]++
				assert.Assert(t, !own.Phase.active(), "seed %d: %+v", seed, own)
				if theirs := sides[1-i].state.Theirs; theirs != nil && theirs.ID == own.ID {
					assert.Equal(t, theirs.Phase, own.Phase, "seed %d", seed)
				}
			}
			f, err := s.durable.Fields()
			assert.NilError(t, err)
			again, err := ReadSecret(f)
			assert.NilError(t, err)
			assert.DeepEqual(t, again, s.durable)
		}
	}
	// Otherwise it has shown nothing.
	assert.Assert(t, ended[Committed] > 50 && ended[Aborted] > 20, "%v", ended)
}

// No secret is printed, whatever prints it.
func TestSecretsAreNotPrinted(t *testing.T) {
	s := Secret{Order: order(first, 1), State: State{}.Next(Facts{Now: start, Accept: true, Over: over, Heard: &Message{Offer: offer(second, 2)}})}
	for _, format := range []string{"%v", "%+v", "%#v", "%s"} {
		text := fmt.Sprintf(format, s) + fmt.Sprintf(format, *s.Order) + fmt.Sprintf(format, *s.State.Theirs) + fmt.Sprintf(format, *s.State.Theirs.PresharedKey)
		assert.Check(t, !is.Contains(text, "255")().Success() && !is.Contains(text, "0xff")().Success(), text)
	}
}
