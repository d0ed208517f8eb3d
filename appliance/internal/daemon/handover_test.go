package daemon

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/internal/invitation"
	"github.com/isthmus-net/isthmus/appliance/internal/kube"
	"github.com/isthmus-net/isthmus/appliance/kernel"
	"github.com/isthmus-net/isthmus/appliance/netstate"
	"github.com/isthmus-net/isthmus/appliance/nettest"
)

// memoryHandover is the Secret of a gateway in memory. What was read is what may be written
// over, as with an API server.
type memoryHandover struct {
	changed chan struct{}
	mu      sync.Mutex
	h       invitation.Handover
	version int
	read    int
}

func newMemoryHandover() *memoryHandover { return &memoryHandover{changed: make(chan struct{}, 1)} }

func (m *memoryHandover) Changed() <-chan struct{} { return m.changed }

func (m *memoryHandover) Start(ctx context.Context) error {
	<-ctx.Done()
	return nil
}

func (m *memoryHandover) Read(context.Context) (invitation.Handover, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.read = m.version
	return m.h, nil
}

func (m *memoryHandover) Write(_ context.Context, h invitation.Handover) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.read != m.version {
		return errors.New("conflict")
	}
	m.h, m.version = h, m.version+1
	notify(m.changed)
	return nil
}

// set is what the controller writes.
func (m *memoryHandover) set(change func(*invitation.Handover)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	change(&m.h)
	m.version++
	notify(m.changed)
}

func (m *memoryHandover) get() invitation.Handover {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.h
}

// TestHandover takes an answer through the temporary tunnel, and its reply back; then the two
// gateways are peers by their own keys and a fresh one that they share.
func TestHandover(t *testing.T) {
	nettest.Need(t, "ip")
	milan, rome := nettest.Another(t), nettest.Another(t)
	implementation(t, milan)
	wire(t, milan, rome, milanAddr, romeAddr)

	type side struct {
		ns       *nettest.NS
		c        child
		cfg      GatewayConfig
		api      *memoryAPI[kube.GatewayView]
		handover *memoryHandover
		conn     latest[ConnectionStatus]
	}
	server := &side{ns: milan, c: child{Mode: cluster.Server, KeysDir: t.TempDir(), StateDir: t.TempDir(), Implementation: kernel.Auto}}
	client := &side{ns: rome, c: child{Mode: cluster.Client, KeysDir: t.TempDir(), StateDir: t.TempDir(), Implementation: kernel.Auto, Endpoint: "192.0.2.77," + milanAddr.String()}}
	serverKey, clientKey := writeKeys(t, server.c.KeysDir), writeKeys(t, client.c.KeysDir)
	for _, s := range []*side{server, client} {
		log, _ := newLog(t, s.c.Mode)
		s.cfg, s.api = s.c.config(log)
		s.handover = newMemoryHandover()
		s.cfg.Handover, s.cfg.WriteConnection = s.handover, s.conn.write
		inNS(t, s.ns, func(ctx context.Context) error { return RunGateway(ctx, s.cfg) })
	}

	private := invitation.Key{5}
	public, err := private.Public()
	assert.NilError(t, err)
	const id = "0123456789abcdef"
	networks := func(pod, external string) invitation.Networks {
		return invitation.Networks{Pod: []netip.Prefix{netip.MustParsePrefix(pod)}, External: []netip.Prefix{netip.MustParsePrefix(external)}}
	}
	answer := invitation.Answer{ID: id, From: "rome", To: "milan", Key: invitation.Key(clientKey.PublicKey().Bytes()), Networks: networks("10.1.0.0/16", "10.71.0.0/16")}
	server.handover.set(func(h *invitation.Handover) { h.Offer = &invitation.Offer{ID: id, Key: public} })
	client.handover.set(func(h *invitation.Handover) {
		h.Offer = &invitation.Offer{ID: id, Key: invitation.Key(serverKey.PublicKey().Bytes()), PrivateKey: &private}
		h.Answer = &answer
	})
	// Nobody is at the first address of the server.
	within(t, 40*time.Second, func() error {
		if h := server.handover.get(); h.Answer == nil || !h.Answer.Equal(answer) {
			return fmt.Errorf("no answer: %+v", h)
		}
		return nil
	})
	// By the temporary tunnel nothing else is reached of the gateway, and it is no peering.
	for _, port := range []uint16{8081, 8082} {
		var dialled error
		rome.Do(func() {
			_, dialled = (&net.Dialer{Timeout: 500 * time.Millisecond}).Dial("tcp", netip.AddrPortFrom(netip.MustParseAddr("169.254.18.1"), port).String())
		})
		assert.Check(t, dialled != nil, "port %d answers", port)
	}
	assert.Check(t, server.conn.get().Value != "Connected", "%+v", server.conn.get())

	server.handover.set(func(h *invitation.Handover) {
		h.Reply = &invitation.Reply{ID: id, Verdict: invitation.Waiting, Reason: "somebody has to say yes"}
	})
	within(t, 15*time.Second, func() error {
		if h := client.handover.get(); h.Reply == nil || h.Reply.Verdict != invitation.Waiting {
			return fmt.Errorf("nothing said: %+v", h.Reply)
		}
		return nil
	})
	shared := invitation.Key{6}
	server.handover.set(func(h *invitation.Handover) {
		h.Reply = &invitation.Reply{ID: id, Verdict: invitation.Accepted, PresharedKey: &shared, Networks: networks("10.0.0.0/16", "10.70.0.0/16")}
	})
	for _, s := range []*side{server, client} {
		within(t, 15*time.Second, func() error {
			h := s.handover.get()
			if !h.Delivered || h.Reply.Verdict != invitation.Accepted || *h.Reply.PresharedKey != shared {
				return fmt.Errorf("%s: not delivered: %+v", s.c.Mode, h)
			}
			return nil
		})
	}

	fingerprint := netstate.FingerprintOf(shared).String()
	for _, p := range []struct {
		s   *side
		key []byte
	}{{server, clientKey.PublicKey().Bytes()}, {client, serverKey.PublicKey().Bytes()}} {
		m := cluster.Meta{Ref: cluster.Ref{Kind: "PublicKey", Name: p.s.cfg.RemoteID}}
		p.s.api.set(func(v *kube.GatewayView) {
			v.Input.PublicKeys = []cluster.PublicKey{{Meta: m, RemoteID: p.s.cfg.RemoteID, Key: p.key, PresharedKey: fingerprint}}
		})
		p.s.handover.set(func(h *invitation.Handover) { *h = invitation.Handover{} })
	}
	for _, s := range []*side{server, client} {
		within(t, 15*time.Second, func() error {
			if st := s.conn.get(); st.Value != "Connected" {
				return fmt.Errorf("%s: %+v", s.c.Mode, st)
			}
			return nil
		})
	}
}
