package daemon

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/desired"
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
	away    int // how many more times it can't be written that the answer was delivered
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
	if h.Delivered && m.away > 0 {
		m.away--
		return errors.New("the API server is away")
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
	// Who has invited has to know that the other side has the reply: it takes the tunnel away.
	server.handover.away = 1
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

// TestHandoverLeadsNowhere has what comes out of a temporary tunnel try to get past the
// gateway that has invited, and the other way round. The tunnel is a veth pair here: what
// comes out of it has been let through by WireGuard.
func TestHandoverLeadsNowhere(t *testing.T) {
	nettest.Need(t, "ip")
	milan, rome, pod := nettest.Another(t), nettest.Another(t), nettest.Another(t)
	pair := func(name string, other *nettest.NS, own, theirs, beyond string) {
		milan.Run("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), other.FD()))
		milan.Run("ip", "address", "add", own, "dev", name)
		milan.Run("ip", "link", "set", name, "up")
		other.Run("ip", "address", "add", theirs, "dev", "eth0")
		other.Run("ip", "link", "set", "eth0", "up")
		other.Run("ip", "route", "add", beyond, "via", strings.Split(own, "/")[0])
	}
	pair(desired.TunnelInterface, rome, "169.254.18.1/30", "169.254.18.2/30", "198.51.100.0/24")
	pair("pods", pod, "198.51.100.1/24", "198.51.100.7/24", "169.254.18.0/30")
	milan.Do(func() { assert.NilError(t, os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0)) })
	reaches := func() error {
		for _, way := range []struct {
			from, to *nettest.NS
			at       string
		}{{rome, pod, "198.51.100.7:7"}, {pod, rome, "169.254.18.2:7"}} {
			var in, out net.Conn
			var err error
			way.to.Do(func() {
				var l *net.UDPConn
				if l, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.MustParseAddrPort(way.at))); err == nil {
					in = l
				}
			})
			if err != nil {
				return err
			}
			defer in.Close()
			way.from.Do(func() { out, err = net.Dial("udp", way.at) })
			if err != nil {
				return err
			}
			defer out.Close()
			if _, err := out.Write([]byte("hello")); err != nil {
				return err
			}
			if err := in.SetReadDeadline(time.Now().Add(time.Second)); err != nil {
				return err
			}
			if _, err := in.Read(make([]byte, 9)); err != nil {
				return fmt.Errorf("%s: %w", way.at, err)
			}
		}
		return nil
	}
	within(t, 20*time.Second, reaches) // before there is a handover

	want, _ := desired.Gateway(desired.GatewayInput{Name: "rome", Namespace: "liqo-tenant-rome", RemoteID: "rome", Mode: cluster.Server, Handover: &desired.Handover{Key: netstate.Key{1}}})
	want = netstate.State{Tables: slices.DeleteFunc(want.Tables, func(x netstate.Table) bool { return x.Name != desired.HandoverTable })}
	assert.Equal(t, len(want.Tables), 1)
	var ns *kernel.NetNS
	var err error
	milan.Do(func() { ns, err = kernel.Open(kernel.Config{}) })
	assert.NilError(t, err)
	defer ns.Close()
	assert.NilError(t, ns.Apply(t.Context(), netstate.Diff(netstate.State{}, want)))
	assert.ErrorContains(t, reaches(), "198.51.100.7:7")
	by, err := ns.CountedBy(netstate.TableID{Family: netstate.FamilyINET, Name: desired.HandoverTable})
	assert.NilError(t, err)
	assert.Assert(t, by["handover-in"] > 0, "%v", by)
	var out net.Conn
	pod.Do(func() { out, err = net.Dial("udp", "169.254.18.2:7") })
	assert.NilError(t, err)
	defer out.Close()
	_, err = out.Write([]byte("hello"))
	assert.NilError(t, err)
	within(t, 5*time.Second, func() error {
		by, err := ns.CountedBy(netstate.TableID{Family: netstate.FamilyINET, Name: desired.HandoverTable})
		if err != nil || by["handover-out"] == 0 {
			return fmt.Errorf("nothing was dropped on its way into the tunnel: %v %v", by, err)
		}
		return nil
	})
}
