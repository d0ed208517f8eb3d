package daemon

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"gotest.tools/v3/assert"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/internal/invitation"
	"github.com/isthmus-net/isthmus/appliance/internal/rotation"
	"github.com/isthmus-net/isthmus/appliance/kernel"
	"github.com/isthmus-net/isthmus/appliance/netstate"
	"github.com/isthmus-net/isthmus/appliance/nettest"
)

// memoryRotation is the Secret of a gateway's rotations in memory. What was read is what may
// be written over, as with an API server.
type memoryRotation struct {
	changed chan struct{}
	mu      sync.Mutex
	s       rotation.Secret
	version int
	read    int
	away    bool // nothing can be written
}

func newMemoryRotation() *memoryRotation {
	return &memoryRotation{changed: make(chan struct{}, 1), s: rotation.Secret{Rules: rotation.Rules{Accept: true}}}
}

func (m *memoryRotation) Changed() <-chan struct{} { return m.changed }

func (m *memoryRotation) Start(ctx context.Context) error {
	<-ctx.Done()
	return nil
}

func (m *memoryRotation) Synced(context.Context) error { return nil }

func (m *memoryRotation) Read(context.Context) (*rotation.Secret, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.read = m.version
	s := m.s
	return &s, nil
}

func (m *memoryRotation) Write(_ context.Context, s rotation.State) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.away {
		return errors.New("the API server is away")
	}
	if m.read != m.version {
		return apierrors.NewConflict(schema.GroupResource{Resource: "secrets"}, "gw-rotation", errors.New("it has changed"))
	}
	m.s.State, m.version = s, m.version+1
	notify(m.changed)
	return nil
}

// set is what the controller writes.
func (m *memoryRotation) set(change func(*rotation.Secret)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	change(&m.s)
	m.version++
	notify(m.changed)
}

func (m *memoryRotation) get() rotation.State {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.s.State
}

// A rotatingSide is one gateway of TestRotation.
type rotatingSide struct {
	ns     *nettest.NS
	c      child
	secret *memoryRotation
	conn   latest[ConnectionStatus]
	log    *logBuffer // of the gateway that was started last
	stop   func()
}

func (s *rotatingSide) start(t *testing.T) {
	log, text := newLog(t, s.c.Mode)
	s.log = text
	cfg, _ := s.c.config(log)
	cfg.Rotation, cfg.WriteConnection = s.secret, s.conn.write
	s.stop = inNS(t, s.ns, func(ctx context.Context) error { return RunGateway(ctx, cfg) })
}

// A rotatingPair is two gateways that are joined by a wire.
type rotatingPair struct {
	t              *testing.T
	server, client *rotatingSide
	private        map[string][]byte // by mode
}

func newRotatingPair(t *testing.T) *rotatingPair {
	milan, rome := nettest.Another(t), nettest.Another(t)
	implementation(t, milan)
	wire(t, milan, rome, milanAddr, romeAddr)
	p := &rotatingPair{
		t:      t,
		server: &rotatingSide{ns: milan, c: child{Mode: cluster.Server, KeysDir: t.TempDir(), StateDir: t.TempDir(), Implementation: kernel.Auto}, secret: newMemoryRotation()},
		client: &rotatingSide{ns: rome, c: child{Mode: cluster.Client, KeysDir: t.TempDir(), StateDir: t.TempDir(), Implementation: kernel.Auto, Endpoint: milanAddr.String()}, secret: newMemoryRotation()},
	}
	serverKey, clientKey := writeKeys(t, p.server.c.KeysDir), writeKeys(t, p.client.c.KeysDir)
	p.private = map[string][]byte{cluster.Server: serverKey.Bytes(), cluster.Client: clientKey.Bytes()}
	p.server.c.PeerKey, p.client.c.PeerKey = clientKey.PublicKey().Bytes(), serverKey.PublicKey().Bytes()
	p.server.start(t)
	p.client.start(t)
	return p
}

// connected waits until both gateways say so.
func (p *rotatingPair) connected() {
	p.t.Helper()
	for _, s := range []*rotatingSide{p.server, p.client} {
		within(p.t, 15*time.Second, func() error {
			if st := s.conn.get(); st.Value != "Connected" {
				return fmt.Errorf("%s: %+v", s.c.Mode, st)
			}
			return nil
		})
	}
}

// TestRotation changes the key pair of the server and then of the client, each with a
// pre-shared key, and asks what it costs: what is lost of 1,000 packets a second is for the
// scenario keys-rotate.
func TestRotation(t *testing.T) {
	nettest.Need(t, "ip")
	began := time.Now()
	p := newRotatingPair(t)
	p.connected()
	busy := time.Since(began) // two gateways, and a handshake
	server, client := p.server, p.client
	ping := through(t, client.ns)

	for i, c := range []struct {
		from, to *rotatingSide
		private  []byte
	}{{server, client, p.private[cluster.Server]}, {client, server, p.private[cluster.Client]}} {
		id := fmt.Sprintf("%016x", i+1)
		shared := invitation.Key{byte(i + 1), 7}
		c.from.secret.set(func(s *rotation.Secret) {
			s.Order = &rotation.Order{ID: id, At: time.Now(), From: invitation.Key(c.private), To: invitation.Key{byte(8 * (i + 1)), 9}, PresharedKey: &shared}
		})
		// The time in which no ping is answered in a row.
		var lost, longest time.Duration
		last := time.Now()
		within(t, 30*time.Second, func() error {
			for range 50 {
				if ping() == nil {
					last = time.Now()
				}
				lost = time.Since(last)
				longest = max(longest, lost)
			}
			from, to := c.from.secret.get(), c.to.secret.get()
			if from.Own == nil || from.Own.ID != id || from.Own.Phase != rotation.Committed || to.Theirs == nil || to.Theirs.ID != id || to.Theirs.Phase != rotation.Committed {
				return fmt.Errorf("%s: %+v, %+v", c.from.c.Mode, from.Own, to.Theirs)
			}
			return nil
		})
		t.Logf("%s: at most %v without an answer, and %v between the switch and the handshake", c.from.c.Mode, longest, c.from.secret.get().Own.Took)
		// WireGuard itself tries again after 5 s (REKEY_TIMEOUT), and the machine may be busy.
		assert.Check(t, longest < 4*time.Second+2*busy, "%v without an answer, and at first %v", longest, busy)
		within(t, 5*time.Second, ping)
		within(t, 5*time.Second, func() error { // the Connection is written after the Secret
			if st := c.from.conn.get().Rotation; st.ID != id || st.Phase != string(rotation.Committed) {
				return fmt.Errorf("%+v", st)
			}
			return nil
		})
		for _, s := range []*rotatingSide{server, client} {
			s.secret.set(func(s *rotation.Secret) { s.Recorded = rotation.Recorded{Own: id, Theirs: id} })
		}
	}
}

// Keys that somebody has put back count at once: the files, which the gateway looks at, may
// never have had others.
func TestKeysPutBack(t *testing.T) {
	secret := newMemoryRotation()
	gw := &gateway{cfg: GatewayConfig{Rotation: secret}, rotating: newRotating(secret, false), repair: make(chan struct{}, 1)}
	read := func() (pass bool) {
		assert.NilError(t, gw.readRotation(t.Context()))
		select {
		case <-gw.repair:
			return true
		default:
			return false
		}
	}
	order := &rotation.Order{ID: "00000000000000aa", At: time.Now(), From: invitation.Key{1}, To: invitation.Key{2}}
	secret.set(func(s *rotation.Secret) {
		s.Order, s.State = order, rotation.State{Own: &rotation.Attempt{ID: order.ID, At: order.At, Phase: rotation.Committed}}
	})
	read()
	assert.DeepEqual(t, *gw.rotating.state.Private(order), order.To)
	assert.Assert(t, !read())
	secret.set(func(s *rotation.Secret) { s.Order, s.State = nil, rotation.State{} })
	assert.Assert(t, read())
	assert.Assert(t, gw.rotating.state.Private(gw.rotating.secret.Order) == nil)
	assert.Assert(t, !read())
}

// TestNothingToRotate: where there was no rotation, and none is accepted, what is read leads to
// no pass after the first, each of which reads it again.
func TestNothingToRotate(t *testing.T) {
	secret := newMemoryRotation()
	secret.set(func(s *rotation.Secret) { *s = rotation.Secret{} })
	gw := &gateway{cfg: GatewayConfig{Rotation: secret}, rotating: newRotating(secret, false), repair: make(chan struct{}, 1)}
	for i := range 3 {
		assert.NilError(t, gw.readRotation(t.Context()))
		select {
		case <-gw.repair:
			assert.Equal(t, i, 0, "it was read, and another pass is made")
		default:
		}
	}
}

// TestStoredWithoutAnAnswer: what the API server has stored without saying so counts as soon as
// it is read. The controller goes by it already.
func TestStoredWithoutAnAnswer(t *testing.T) {
	secret := newMemoryRotation()
	gw := &gateway{cfg: GatewayConfig{Rotation: secret}, rotating: newRotating(secret, false), repair: make(chan struct{}, 1)}
	r := gw.rotating
	at := func(p rotation.Phase) rotation.State {
		return rotation.State{Own: &rotation.Attempt{ID: "00000000000000aa", At: time.Now().Round(0), Phase: p}}
	}
	trying, committed, other := at(rotation.Trying), at(rotation.Committed), at(rotation.Aborted)
	secret.set(func(s *rotation.Secret) { s.State = trying })
	assert.NilError(t, gw.readRotation(t.Context()))
	r.unclear = &committed

	for _, tt := range []struct {
		stored rotation.State
		want   rotation.Phase
	}{{trying, rotation.Trying}, {other, rotation.Trying}, {committed, rotation.Committed}} {
		secret.set(func(s *rotation.Secret) { s.State = tt.stored })
		assert.NilError(t, gw.readRotation(t.Context()))
		assert.Equal(t, r.state.Own.Phase, tt.want)
		assert.Equal(t, r.stored.Own.Phase, tt.want)
	}
	assert.Assert(t, r.unclear == nil)
}

// TestStores: of a peer that offers one key after the other six are stored at once, and then
// one every 30 s. How a change ends does not wait, and neither do steps of this side's own
// rotation.
func TestStores(t *testing.T) {
	r, now := newRotating(nil, false), time.Now()
	stored := 0
	for i := range 120 { // seconds
		now = now.Add(time.Second)
		next := r.stored
		if id := fmt.Sprintf("%016x", i); i%2 == 0 {
			next.Refused = &rotation.Refusal{ID: id, Reason: "not today"}
		} else {
			next.Theirs = &rotation.Change{ID: id, Phase: rotation.Ready}
		}
		if r.stores(next, now) {
			r.wrote(next, now)
			assert.Assert(t, !r.stores(next, now), "what is stored is stored again")
			stored++
		}
	}
	assert.Equal(t, stored, 6+3)
	next := r.stored
	next.Theirs = &rotation.Change{ID: "0000000000000fff", Phase: rotation.Ready}
	assert.Assert(t, !r.stores(next, now))
	next.Own = &rotation.Attempt{Phase: rotation.Waiting}
	assert.Assert(t, r.stores(next, now))
	next = r.stored
	change := *next.Theirs
	change.Phase = rotation.Committed
	next.Theirs, next.Refused = &change, nil
	assert.Assert(t, r.stores(next, now))
}

// TestHandshakes: a handshake that WireGuard has forgotten, since it began anew, is still the
// last one with that key.
func TestHandshakes(t *testing.T) {
	r, start := newRotating(nil, false), time.Now()
	old, next := netstate.Key{1}, netstate.Key{2}
	assert.Assert(t, r.handshake(next, start).Equal(start))
	assert.Assert(t, r.handshake(old, start.Add(time.Second)).After(r.handshake(next, start)))
	assert.Assert(t, r.handshake(old, time.Time{}).After(r.handshake(next, start)))
	assert.Assert(t, r.handshake(next, start.Add(2*time.Second)).After(r.handshake(old, time.Time{})))
}
