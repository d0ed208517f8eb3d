package daemon

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/internal/exchange"
	"github.com/isthmus-net/isthmus/appliance/internal/kube"
	"github.com/isthmus-net/isthmus/appliance/kernel"
	"github.com/isthmus-net/isthmus/appliance/nettest"
)

func networksOf(pod, external []string) cluster.CIDRs {
	var out cluster.CIDRs
	for _, p := range pod {
		out.Pod = append(out.Pod, netip.MustParsePrefix(p))
	}
	for _, p := range external {
		out.External = append(out.External, netip.MustParsePrefix(p))
	}
	return out
}

func TestNetworksMatch(t *testing.T) {
	c := &cluster.Configuration{Meta: cluster.Meta{Ref: cluster.Ref{Kind: "Configuration", Namespace: "ns", Name: "rome"}}, Remote: networksOf([]string{"10.1.0.0/16", "10.2.0.0/16"}, []string{"10.70.0.0/16"})}
	for _, tt := range []struct {
		name          string
		pod, external []string
		want, says    string
	}{
		{"the same, in another order", []string{"10.2.0.0/16", "10.1.0.0/16"}, []string{"10.70.0.0/16"}, "Same", "Configuration ns/rome"},
		{"another family is not missed", []string{"10.2.0.0/16", "10.1.0.0/16", "fd00::/64"}, []string{"10.70.0.0/16"}, "Same", ""},
		{"one more", []string{"10.1.0.0/16", "10.2.0.0/16", "10.3.0.0/16"}, []string{"10.70.0.0/16"}, "NetworksDiffer",
			"its pod networks are 10.1.0.0/16, 10.2.0.0/16, 10.3.0.0/16, and spec.remote.cidr.pod of Configuration ns/rome is 10.1.0.0/16, 10.2.0.0/16"},
		{"one less", []string{"10.1.0.0/16"}, []string{"10.70.0.0/16"}, "NetworksDiffer", "correct the Configuration"},
		{"no external ones", []string{"10.1.0.0/16", "10.2.0.0/16"}, nil, "NetworksDiffer", "its external networks are empty"},
	} {
		n := networksOf(tt.pod, tt.external)
		got := networksMatch(&PeerStatus{Message: exchange.Message{Networks: exchange.NewNetworks(n.Pod, n.External)}}, c)
		assert.Check(t, is.Equal(got.Type+" "+got.Reason, v1beta1.ConditionNetworksMatch+" "+tt.want), tt.name)
		assert.Check(t, is.Contains(got.Message, tt.says), tt.name)
		assert.Check(t, is.Equal(got.OK, tt.want == "Same"), tt.name)
	}
	for _, p := range []*PeerStatus{nil, {}} {
		assert.Equal(t, networksMatch(p, c), Condition{})
	}
}

// TestNetworksFollowed: what is followed is not missed, what has been withdrawn is no longer,
// and what is refused is said with the reason.
func TestNetworksFollowed(t *testing.T) {
	c := cluster.Configuration{Meta: cluster.Meta{Ref: cluster.Ref{Kind: "Configuration", Namespace: "ns", Name: "rome"}}, RemoteID: "rome", Remote: networksOf([]string{"10.1.0.0/16"}, []string{"10.70.0.0/16"}), Follow: &cluster.Follow{}}
	more, gone := netip.MustParsePrefix("10.64.0.0/16"), netip.MustParsePrefix("10.65.0.0/16")
	for _, tt := range []struct {
		name       string
		tells      []string
		followed   []cluster.Followed
		refused    []cluster.Refused
		want, says string
	}{
		{"nothing", []string{"10.1.0.0/16"}, nil, nil, "Same", "are those of Configuration ns/rome"},
		{"not yet", []string{"10.1.0.0/16", "10.64.0.0/16"}, nil, nil, "FollowPending", "has told of a change, of 10.64.0.0/16, and the controller"},
		{"not yet, beside one of another family", []string{"10.1.0.0/16", "10.64.0.0/16", "fd00::/64"}, nil, nil, "FollowPending", "of a change, of 10.64.0.0/16, and"},
		{"no longer, and nobody has looked", []string{"10.1.0.0/16"}, []cluster.Followed{{CIDR: more}}, nil, "FollowPending", "has told of a change, of 10.64.0.0/16, and"},
		{"not yet, and what is written is not told", []string{"10.64.0.0/16"}, nil, nil, "NetworksDiffer", "or let the peer add networks: isthmusctl peer follow rome --range RANGE"},
		{"one", []string{"10.64.0.0/16", "10.1.0.0/16"}, []cluster.Followed{{CIDR: more}}, nil, "Followed", "are those of Configuration ns/rome and 1 in its status.follow"},
		{"one that was withdrawn", []string{"10.1.0.0/16"}, []cluster.Followed{{CIDR: gone, Withdrawn: time.Now()}}, nil, "Same", ""},
		{"and one more", []string{"10.64.0.0/16", "10.1.0.0/16"}, []cluster.Followed{{CIDR: more}, {CIDR: gone, Withdrawn: time.Now()}}, nil, "Followed", "and 1 in its status.follow"},
		{"refused", []string{"10.64.0.0/16", "10.1.0.0/16", "10.0.0.0/16"}, []cluster.Followed{{CIDR: more}}, []cluster.Refused{{CIDR: netip.MustParsePrefix("10.0.0.0/16"), Why: "overlaps Network liqo/pod-cidr (10.0.0.0/16)"}},
			"NetworksDiffer", "this cluster does not follow these: 10.0.0.0/16 overlaps Network liqo/pod-cidr (10.0.0.0/16): have the cluster of the peer use other networks, write them into the Configuration, or allow them: isthmusctl peer follow rome --range RANGE --max N"},
	} {
		n := networksOf(tt.tells, []string{"10.70.0.0/16"})
		c.Followed, c.Refused = tt.followed, tt.refused
		got := networksMatch(&PeerStatus{Message: exchange.Message{Networks: exchange.NewNetworks(n.Pod, n.External)}}, &c)
		assert.Check(t, is.Equal(got.Reason, tt.want), "%s: %s", tt.name, got.Message)
		assert.Check(t, is.Contains(got.Message, tt.says), tt.name)
		assert.Check(t, is.Equal(got.OK, tt.want != "NetworksDiffer"), tt.name)
		assert.Check(t, is.Len(c.Followed, len(tt.followed)), tt.name)
	}
}

// TestShown: whatever the peer tells and however often, what is written of it changes at
// most twice a minute, and is the latest in the end.
func TestShown(t *testing.T) {
	x := newExchanger()
	now := time.Date(2026, 3, 14, 12, 0, 0, 0, time.UTC)
	assert.Equal(t, x.show(now), heard{})
	var shown []string
	for i := range 120 {
		x.hear(exchange.Message{Program: fmt.Sprintf("v%d", i)}, now)
		if p := x.show(now).peer; len(shown) == 0 || shown[len(shown)-1] != p.Program {
			shown = append(shown, p.Program)
			assert.Check(t, p.Since.Equal(now), "%v", p.Since)
		}
		now = now.Add(time.Second)
	}
	assert.DeepEqual(t, shown, []string{"v0", "v30", "v60", "v90"})
	now = now.Add(peerNews)
	first := x.show(now)
	assert.Equal(t, first.peer.Program, "v119")
	assert.Check(t, !x.hear(exchange.Message{Program: "v119"}, now), "the same again is news")
	assert.Equal(t, x.show(now.Add(time.Hour)), first)
	assert.Equal(t, first.tells().Reason, "Told")

	for range silentAfter - 1 {
		x.fail()
	}
	assert.Check(t, !x.silent())
	x.fail()
	assert.Equal(t, x.show(now.Add(time.Second)).tells().Reason, "Told")
	later := x.show(now.Add(peerNews))
	assert.Equal(t, later.tells().Reason, "PublicSystem")
	assert.Equal(t, later.peer, first.peer)
	x.hear(exchange.Message{Program: "v119"}, now)
	assert.Check(t, !x.silent(), "who has spoken is no longer silent")
}

// TestCallsAreTakenSlowly: a peer that begins one exchange after the other is answered once a
// second at most, and each time that it waits.
func TestCallsAreTakenSlowly(t *testing.T) {
	nettest.Need(t, "ip")
	own := nettest.Another(t)
	own.Run("ip", "link", "set", "lo", "up")
	var ns *kernel.NetNS
	var err error
	own.Do(func() { ns, err = kernel.Open(kernel.Config{}) })
	assert.NilError(t, err)
	defer ns.Close()
	log, _ := newLog(t, "server")
	gw := &gateway{host: &host{ns: ns, log: log}}
	at := netip.MustParseAddrPort("127.0.0.1:12347")
	ctx, cancel := context.WithCancel(t.Context())
	var taken []time.Time
	ended := make(chan error, 1)
	go func() {
		ended <- gw.takeCalls(ctx, at, func(net.Conn) bool { return true }, func(_ context.Context, c net.Conn) error {
			defer c.Close()
			taken = append(taken, time.Now())
			_, err := c.Write([]byte("x"))
			return err
		})
	}()
	for range 3 {
		within(t, 20*time.Second, func() error {
			c, err := gw.dialFromGateway(ctx, at)
			if err != nil {
				return err
			}
			defer c.Close()
			_, err = c.Read(make([]byte, 1))
			return err
		})
	}
	cancel()
	assert.NilError(t, <-ended)
	assert.Equal(t, len(taken), 3)
	for i := range 2 {
		assert.Check(t, taken[i+1].Sub(taken[i]) >= tellLeast, "%v after the one before", taken[i+1].Sub(taken[i]))
	}
}

// TestExchange runs both gateways of a peering: each knows of the other's cluster what it is
// now, and the tunnel has the smaller MTU on both sides, and the larger again afterwards.
func TestExchange(t *testing.T) {
	nettest.Need(t, "ip")
	milan, rome := nettest.Another(t), nettest.Another(t)
	wire(t, milan, rome, milanAddr, romeAddr)
	type side struct {
		ns   *nettest.NS
		c    child
		cfg  GatewayConfig
		conn latest[ConnectionStatus]
		rep  latest[ReportStatus]
	}
	implementation(t, milan)
	server := &side{ns: milan, c: child{Mode: cluster.Server, KeysDir: t.TempDir(), StateDir: t.TempDir(), Implementation: kernel.Auto}}
	client := &side{ns: rome, c: child{Mode: cluster.Client, KeysDir: t.TempDir(), StateDir: t.TempDir(), Implementation: kernel.Auto, Endpoint: milanAddr.String()}}
	server.c.PeerKey = writeKeys(t, client.c.KeysDir).PublicKey().Bytes()
	client.c.PeerKey = writeKeys(t, server.c.KeysDir).PublicKey().Bytes()
	var stopClient func()
	for _, s := range []*side{server, client} {
		log, _ := newLog(t, s.c.Mode)
		cfg, api := s.c.config(log)
		s.cfg = cfg
		s.cfg.Version, s.cfg.WriteConnection, s.cfg.WriteReport = "v-of-"+s.c.Mode, s.conn.write, s.rep.write
		api.set(func(v *kube.GatewayView) {
			v.Input.Configurations[0].Local = networksOf([]string{"10.2.0.0/16"}, nil)
			if s.c.Mode == cluster.Server {
				// What is, and not what is written.
				v.Input.Configurations[0].Own = networksOf([]string{"10.1.0.0/16", "10.9.0.0/16"}, nil)
				v.Gateway = &cluster.Gateway{Reached: &cluster.Endpoint{Addresses: []string{milanAddr.String(), "gw.milan.example"}, Port: 51840}}
			} else {
				s.cfg.MTU = 1300
			}
		})
		stopClient = inNS(t, s.ns, func(ctx context.Context) error { return RunGateway(ctx, s.cfg) })
	}
	told := func(s *side, program, networks string, endpoint *exchange.Endpoint) func() error {
		return func() error {
			st := s.conn.get()
			if st.Peer == nil || st.Peer.Program != program || st.Tells.Reason != "Told" || st.Networks.Reason != networks || fmt.Sprint(st.Peer.Endpoint) != fmt.Sprint(endpoint) {
				return fmt.Errorf("%s: %+v", s.c.Mode, st)
			}
			return nil
		}
	}
	within(t, 20*time.Second, told(client, "v-of-server", "NetworksDiffer", &exchange.Endpoint{Addresses: []string{milanAddr.String(), "gw.milan.example"}, Port: 51840}))
	within(t, 20*time.Second, told(server, "v-of-client", "Same", nil))
	mtu := func(want int) func() error {
		return func() error {
			for _, s := range []*side{server, client} {
				if r := s.rep.get(); r.MTU != want {
					return fmt.Errorf("%s: MTU %d, not %d", s.c.Mode, r.MTU, want)
				}
			}
			return nil
		}
	}
	within(t, 10*time.Second, mtu(1300))

	// Pods of the cluster itself are not the peer, though they may reach the port.
	var stranger net.Conn
	var err error
	milan.Do(func() { stranger, err = net.DialTimeout("tcp", "169.254.18.1:12347", time.Second) })
	if err == nil {
		defer stranger.Close()
		_, err = exchange.Meet(stranger, exchange.Message{Program: "stranger"})
	}
	assert.Check(t, err != nil, "a stranger was told of the cluster")
	assert.Equal(t, server.conn.get().Peer.Program, "v-of-client")

	// Without what was written the tunnel is as large as the networks below allow.
	stopClient()
	client.cfg.MTU = 0
	inNS(t, rome, func(ctx context.Context) error { return RunGateway(ctx, client.cfg) })
	within(t, 30*time.Second, mtu(1440))
}

// TestPublicPeer: who answers probes and has no exchange is recognised, and asked rarely.
func TestPublicPeer(t *testing.T) {
	nettest.Need(t, "ip", "nft")
	milan, rome := nettest.Another(t), nettest.Another(t)
	implementation(t, milan)
	wire(t, milan, rome, milanAddr, romeAddr)
	serverSide := child{Mode: cluster.Server, KeysDir: t.TempDir(), StateDir: t.TempDir(), Implementation: kernel.Auto}
	clientSide := child{Mode: cluster.Client, KeysDir: t.TempDir(), StateDir: t.TempDir(), Implementation: kernel.Auto, Endpoint: milanAddr.String()}
	serverSide.PeerKey = writeKeys(t, clientSide.KeysDir).PublicKey().Bytes()
	clientSide.PeerKey = writeKeys(t, serverSide.KeysDir).PublicKey().Bytes()

	// The other one has WireGuard and the probe, and is not there by TCP.
	milan.Run("nft", "add table inet public; add chain inet public input { type filter hook input priority -10; }; add chain inet public output { type filter hook output priority 0; };"+
		"add rule inet public input tcp dport 12347 reject with tcp reset; add rule inet public output tcp dport 12347 reject with tcp reset")
	log, text := newLog(t, "client")
	cfg, _ := clientSide.config(log)
	var conn latest[ConnectionStatus]
	cfg.WriteConnection = conn.write
	inNS(t, rome, func(ctx context.Context) error { return RunGateway(ctx, cfg) })
	other, _ := newLog(t, "server")
	serverCfg, _ := serverSide.config(other)
	inNS(t, milan, func(ctx context.Context) error { return RunGateway(ctx, serverCfg) })
	within(t, 45*time.Second, func() error {
		if st := conn.get(); st.Value != "Connected" || st.Tells.Reason != "PublicSystem" || st.Tells.OK || st.Peer != nil || st.Networks != (Condition{}) {
			return fmt.Errorf("%+v", st)
		}
		return nil
	})
	within(t, time.Second, func() error { // it is logged after the status is written
		if n := strings.Count(text.String(), "tell the peer of this cluster: failed"); n != 1 {
			return fmt.Errorf("%d times", n)
		}
		return nil
	})

	// It is upgraded: it tells by itself.
	milan.Run("nft", "delete table inet public")
	within(t, 150*time.Second, func() error {
		if st := conn.get(); st.Tells.Reason != "Told" || st.Peer == nil {
			return fmt.Errorf("%+v", st)
		}
		return nil
	})
}

// TestLearnedEndpoint takes away the address that the client's GatewayClient says. The server
// has told another one, where the traffic goes on; a new process of the client knows it, too,
// unless the spec has changed since.
func TestLearnedEndpoint(t *testing.T) {
	nettest.Need(t, "ip")
	milan, rome := nettest.Another(t), nettest.Another(t)
	implementation(t, milan)
	wire(t, milan, rome, milanAddr, romeAddr)
	const other = "203.0.113.3"
	for _, ns := range []*nettest.NS{milan, rome} { // through the tunnel or not at all
		ns.Run("ip", "route", "add", "unreachable", "169.254.0.0/16")
	}
	serverSide := child{Mode: cluster.Server, KeysDir: t.TempDir(), StateDir: t.TempDir(), Implementation: kernel.Auto, Ping: 500 * time.Millisecond}
	clientSide := child{Mode: cluster.Client, KeysDir: t.TempDir(), StateDir: t.TempDir(), Implementation: kernel.Auto, Ping: 500 * time.Millisecond, Endpoint: milanAddr.String()}
	serverSide.PeerKey = writeKeys(t, clientSide.KeysDir).PublicKey().Bytes()
	clientSide.PeerKey = writeKeys(t, serverSide.KeysDir).PublicKey().Bytes()

	log, _ := newLog(t, "server")
	serverCfg, serverAPI := serverSide.config(log)
	serverAPI.set(func(v *kube.GatewayView) {
		v.Gateway = &cluster.Gateway{Reached: &cluster.Endpoint{Addresses: []string{milanAddr.String(), other}, Port: 51840}}
	})
	began := time.Now()
	stopServer := inNS(t, milan, func(ctx context.Context) error { return RunGateway(ctx, serverCfg) })
	log, _ = newLog(t, "client")
	cfg, api := clientSide.config(log)
	api.set(func(v *kube.GatewayView) { v.Gateway = &cluster.Gateway{Meta: cluster.Meta{Generation: 3}} })
	var conn *latest[ConnectionStatus]
	var rep *latest[ReportStatus]
	fresh := func() {
		conn, rep = &latest[ConnectionStatus]{}, &latest[ReportStatus]{}
		cfg.WriteConnection, cfg.WriteReport = conn.write, rep.write
	}
	fresh()
	stop := inNS(t, rome, func(ctx context.Context) error { return RunGateway(ctx, cfg) })
	at := func(reason string) func() error {
		return func() error {
			c := slices.IndexFunc(rep.get().Conditions, func(c Condition) bool { return c.Type == "EndpointConfigured" })
			if c < 0 || rep.get().Conditions[c].Reason != reason || conn.get().Value != "Connected" {
				return fmt.Errorf("%+v %+v", rep.get(), conn.get())
			}
			return nil
		}
	}
	within(t, 20*time.Second, at("AsWritten"))
	busy := time.Since(began) // two gateways, and a handshake
	within(t, 20*time.Second, func() error {
		if p := conn.get().Peer; p == nil || p.Endpoint == nil || p.Generation != 3 {
			return fmt.Errorf("%+v", p)
		}
		return nil
	})

	// A server that went on would send from its new address, and be heard there.
	anew := func(ns *nettest.NS) {
		if implementation(t, ns) == kernel.Kernel {
			ns.Run("ip", "link", "del", "liqo-tunnel") // it outlives its daemon, and knows where the peer is
		}
	}
	stopServer()
	anew(milan)
	milan.Run("ip", "address", "flush", "dev", "eth0")
	milan.Run("ip", "address", "add", other+"/24", "dev", "eth0")
	milan.Run("ip", "route", "add", "default", "via", romeAddr.String())
	serverCfg.StateDir = t.TempDir()
	inNS(t, milan, func(ctx context.Context) error { return RunGateway(ctx, serverCfg) })
	gap := within(t, 30*time.Second, through(t, rome))
	t.Logf("%v without an answer", gap.Round(time.Millisecond))
	// Since the outage began the client has dialled the right place after 0.6, 1.2, 2, 5 and 14 s: a
	// server that is there a moment too late for one of them is found by the next.
	assert.Assert(t, gap < 10*time.Second+2*busy, "it took %v, and at first %v", gap, busy)
	within(t, 20*time.Second, at("Learned"))

	told := conn.get().Peer
	stop()
	anew(rome)
	api.set(func(v *kube.GatewayView) {
		v.Connection = &cluster.Connection{Peer: &cluster.Told{
			Version: told.Program, Generation: told.Generation, Endpoint: &cluster.Endpoint{Addresses: told.Endpoint.Addresses, Port: told.Endpoint.Port},
		}}
	})
	cfg.StateDir = t.TempDir()
	fresh()
	stop = inNS(t, rome, func(ctx context.Context) error { return RunGateway(ctx, cfg) })
	within(t, 30*time.Second, at("Learned"))
	stop()

	x := newExchanger()
	x.recall(&cluster.Connection{Peer: &cluster.Told{Version: "v1", Generation: 3, Endpoint: &cluster.Endpoint{Addresses: []string{other}, Port: 1}}})
	x.say(exchange.Message{}, 3)
	assert.Check(t, x.endpoint() != nil)
	x.say(exchange.Message{}, 4)
	assert.Check(t, x.endpoint() == nil, "it counts although the spec is another one")
	assert.Check(t, x.hear(*x.told, time.Now()), "that it counts again is no news")
	assert.Check(t, x.endpoint() != nil)
}
