package daemon

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/desired"
	"github.com/isthmus-net/isthmus/appliance/internal/kube"
	"github.com/isthmus-net/isthmus/appliance/kernel"
	"github.com/isthmus-net/isthmus/appliance/nettest"
)

// Two clusters: milan is the server, rome the client.
var (
	milanAddr = netip.AddrFrom4([4]byte{203, 0, 113, 1})
	romeAddr  = netip.AddrFrom4([4]byte{203, 0, 113, 2})
)

// childConfig names the environment variable by which the test binary runs one
// gateway, as a process of its own, instead of the tests.
const childConfig = "ISTHMUS_TEST_GATEWAY"

// A child is what such a process is told.
type child struct {
	Mode, KeysDir, StateDir string
	Endpoint                string
	PeerKey                 []byte
	Implementation          kernel.Implementation
	Ping                    time.Duration // 0: 100 ms
}

// config returns the configuration of a gateway whose API is view in memory.
func (c child) config(log *slog.Logger) (GatewayConfig, *memoryAPI[kube.GatewayView]) {
	name, remote := "rome", "rome"
	pods := "10.2.0.0/16"
	if c.Mode == cluster.Client {
		name, remote = "milan", "milan"
		pods = "10.1.0.0/16"
	}
	m := func(kind string) cluster.Meta {
		return cluster.Meta{Ref: cluster.Ref{Kind: kind, Namespace: "liqo-tenant-" + remote, Name: name}, Generation: 1}
	}
	view := kube.GatewayView{Input: desired.GatewayInput{
		Name: name, Namespace: "liqo-tenant-" + remote, RemoteID: remote, Mode: c.Mode,
		Nodes: []cluster.InternalNode{{
			Meta: cluster.Meta{Ref: cluster.Ref{Kind: "InternalNode", Name: "n1"}}, InternalIP: netip.AddrFrom4([4]byte{10, 80, 0, 1}),
		}},
		Configurations: []cluster.Configuration{{
			Meta: m("Configuration"), RemoteID: remote,
			Remote: cluster.CIDRs{Pod: []netip.Prefix{netip.MustParsePrefix(pods)}},
		}},
	}}
	if len(c.PeerKey) > 0 {
		view.Input.PublicKeys = []cluster.PublicKey{{Meta: m("PublicKey"), RemoteID: remote, Key: c.PeerKey}}
	}
	api := newMemoryAPI(view)
	cfg := GatewayConfig{
		Name: name, Namespace: "liqo-tenant-" + remote, RemoteID: remote, Mode: c.Mode, NodeName: "n1",
		KeysDir: c.KeysDir, StateDir: c.StateDir, Implementation: c.Implementation,
		PingInterval: cmp.Or(c.Ping, 100*time.Millisecond), StatusInterval: time.Second,
		API: api, Serving: Serving{Health: ":8081", Metrics: ":8082", Guard: tokenGuard}, Logger: log,
		WriteConnection: func(context.Context, ConnectionStatus) error { return nil },
		WriteReport:     func(context.Context, ReportStatus) error { return nil },
	}
	if c.Mode == cluster.Client {
		cfg.EndpointHosts, cfg.EndpointPort = strings.Split(c.Endpoint, ","), 51840
	}
	return cfg, api
}

// childGateway is the other process.
func childGateway() int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	var c child
	if err := json.Unmarshal([]byte(os.Getenv(childConfig)), &c); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	cfg, _ := c.config(slog.New(slog.NewTextHandler(os.Stderr, nil)))
	if err := RunGateway(ctx, cfg); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// start runs the process in a namespace, its log to w.
func (c child) start(t *testing.T, ns *nettest.NS, w *logBuffer) *exec.Cmd {
	t.Helper()
	b, err := json.Marshal(c)
	assert.NilError(t, err)
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), childConfig+"="+string(b))
	cmd.Stderr = w
	ns.Do(func() { assert.Check(t, cmd.Start()) })
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return cmd
}

// implementation returns the WireGuard of this kernel, or skips.
func implementation(t *testing.T, ns *nettest.NS) kernel.Implementation {
	t.Helper()
	var features []kernel.Feature
	ns.Do(func() {
		k, err := kernel.Open(kernel.Config{})
		if !assert.Check(t, err) {
			return
		}
		features = k.Features(t.Context())
		assert.Check(t, k.Close())
	})
	if kernel.Missing(features, kernel.FeatureWireGuard) == nil {
		return kernel.Kernel
	}
	if err := kernel.Missing(features, kernel.FeatureTUN); err != nil {
		nettest.SkipOrFail(t, kernel.FeatureWireGuard, err)
	}
	return kernel.Userspace
}

// TestTunnel runs both gateways of a peering as they are, from the first
// object to the answer through the tunnel.
func TestTunnel(t *testing.T) {
	nettest.Need(t, "ip")
	milan, rome := nettest.Another(t), nettest.Another(t)
	impl := implementation(t, milan)
	wire(t, milan, rome, milanAddr, romeAddr)

	type side struct {
		ns   *nettest.NS
		c    child
		cfg  GatewayConfig
		api  *memoryAPI[kube.GatewayView]
		conn latest[ConnectionStatus]
		rep  latest[ReportStatus]
		log  *logBuffer
	}
	server := &side{ns: milan, c: child{Mode: cluster.Server, KeysDir: t.TempDir(), StateDir: t.TempDir(), Implementation: kernel.Auto}}
	client := &side{ns: rome, c: child{Mode: cluster.Client, KeysDir: t.TempDir(), StateDir: t.TempDir(), Implementation: kernel.Auto, Endpoint: milanAddr.String()}}
	serverKey, clientKey := writeKeys(t, server.c.KeysDir), writeKeys(t, client.c.KeysDir)
	for _, s := range []*side{server, client} {
		log, text := newLog(t, s.c.Mode)
		s.log = text
		s.cfg, s.api = s.c.config(log)
		s.cfg.WriteConnection, s.cfg.WriteReport = s.conn.write, s.rep.write
		inNS(t, s.ns, func(ctx context.Context) error { return RunGateway(ctx, s.cfg) })
	}

	// Ready before anybody knows the peer's key: the keys are exchanged after
	// both gateways are ready.
	for _, s := range []*side{server, client} {
		within(t, 5*time.Second, func() error {
			code, body, err := get(s.ns, "http://127.0.0.1:8081/readyz")
			if err != nil || code != 200 {
				return fmt.Errorf("readyz of the %s: %d %q %v", s.c.Mode, code, body, err)
			}
			return nil
		})
	}
	for _, s := range []*side{server, client} {
		within(t, 5*time.Second, func() error {
			if st := s.conn.get(); st.Value != "Connecting" || st.Connected.Reason != "NoPublicKey" {
				return fmt.Errorf("%s: %+v", s.c.Mode, st)
			}
			return nil
		})
	}

	for _, p := range []struct {
		s   *side
		key []byte
	}{{server, clientKey.PublicKey().Bytes()}, {client, serverKey.PublicKey().Bytes()}} {
		m := cluster.Meta{Ref: cluster.Ref{Kind: "PublicKey", Name: p.s.cfg.RemoteID}}
		p.s.api.set(func(v *kube.GatewayView) {
			v.Input.PublicKeys = []cluster.PublicKey{{Meta: m, RemoteID: p.s.cfg.RemoteID, Key: p.key}}
		})
	}
	connected := func(s *side) func() error {
		return func() error {
			st := s.conn.get()
			if st.Value != "Connected" || !strings.HasSuffix(st.Latency, "s") || !st.Connected.OK {
				return fmt.Errorf("%s: %+v", s.c.Mode, st)
			}
			return nil
		}
	}
	took := within(t, 10*time.Second, connected(server)) + within(t, 10*time.Second, connected(client))
	t.Logf("connected %v after the keys were there, latency %s", took.Round(time.Millisecond), client.conn.get().Latency)

	within(t, 5*time.Second, func() error {
		r := client.rep.get()
		if r.Endpoint != netip.AddrPortFrom(milanAddr, 51840) || r.LastHandshake.IsZero() || r.MTU != 1440 || r.Implementation != string(impl) {
			return fmt.Errorf("%+v", r)
		}
		return nil
	})
	within(t, 5*time.Second, func() error {
		if r := server.rep.get(); r.Endpoint.Addr() != romeAddr {
			return fmt.Errorf("%+v", r)
		}
		return nil
	})
	metrics := func() (string, error) {
		code, body, err := get(rome, "https://127.0.0.1:8082/metrics")
		if err == nil && code != 200 {
			err = fmt.Errorf("metrics: %d", code)
		}
		return body, err
	}
	within(t, 5*time.Second, func() error { // an answer is measured after it is told that there is one
		body, err := metrics()
		for _, counts := range []string{"liqo_peer_latency_histogram_us_count{", "isthmus_pass_duration_seconds_count "} {
			_, rest, _ := strings.Cut(body, "\n"+counts)
			line, _, _ := strings.Cut(rest, "\n")
			if n, e := strconv.Atoi(line[strings.LastIndex(line, " ")+1:]); n <= 0 {
				return fmt.Errorf("%s%s: %v, %v", counts, line, e, err)
			}
		}
		if !strings.Contains(body, "\n"+`liqo_peer_is_connected{cluster_id="milan",driver="wireguard"} 1`) {
			return errors.New("it is not connected")
		}
		return nil
	})
	body, err := metrics()
	assert.NilError(t, err)
	for _, line := range []string{
		`isthmus_peer_blocked{cluster_id="milan",driver="wireguard"} 0`,
		`liqo_peer_receive_bytes_total{cluster_id="milan",driver="wireguard"}`,
		`liqo_peer_transmit_bytes_total{cluster_id="milan",driver="wireguard"}`,
		`liqo_peer_latency_us{cluster_id="milan",driver="wireguard"}`,
		`liqo_wireguard_implementation{driver="wireguard",implementation="` + string(impl) + `"} 1`,
		`liqo_peer_latency_histogram_us_bucket{cluster_id="milan",driver="wireguard",le="10000"} `,
		`liqo_peer_latency_histogram_us_bucket{cluster_id="milan",driver="wireguard",le="299992"} `,
		`isthmus_peer_denied_packets_total{cluster_id="milan",driver="wireguard"} 0`,
		`isthmus_peer_probe_loss_ratio{cluster_id="milan",driver="wireguard"} `,
		`isthmus_peer_last_handshake_timestamp_seconds{cluster_id="milan",driver="wireguard"} `,
		`isthmus_passes_total{result="changed"} `,
		`isthmus_pass_duration_seconds_bucket{le="0.001"} `,
		`isthmus_changes_total{kind="wireguard"} `,
		`isthmus_no_route_packets_total `,
	} {
		assert.Assert(t, strings.Contains(body, "\n"+line), "%s is not in\n%s", line, body)
	}

	// The underlay becomes smaller, and nobody tells us: so does the tunnel.
	rome.Run("ip", "link", "set", "eth0", "mtu", "1400")
	within(t, 5*time.Second, func() error {
		if r := client.rep.get(); r.MTU != 1340 {
			return fmt.Errorf("MTU %d", r.MTU)
		}
		return nil
	})

	// The wire is cut and mended.
	rome.Run("ip", "link", "set", "eth0", "down")
	within(t, 10*time.Second, func() error {
		if st := client.conn.get(); st.Value != "Error" || st.Latency != "N/A" || st.Connected.Reason != "NoAnswer" {
			return fmt.Errorf("%+v", st)
		}
		return nil
	})
	rome.Run("ip", "link", "set", "eth0", "up")
	rome.Run("ip", "route", "add", "default", "via", milanAddr.String())
	within(t, 30*time.Second, connected(client))

	// A new key pair of the server, exchanged: the tunnel comes back.
	// The GatewayReport can't tell: it takes handshakes that are less than three minutes apart for one.
	handshake := func() int64 {
		body, err := metrics()
		assert.NilError(t, err)
		_, rest, _ := strings.Cut(body, "\n"+`isthmus_peer_last_handshake_timestamp_seconds{cluster_id="milan",driver="wireguard"} `)
		line, _, _ := strings.Cut(rest, "\n")
		at, _ := strconv.ParseFloat(line, 64) // no such line: there was no handshake with this key yet
		return int64(at)
	}
	former := handshake()
	within(t, 5*time.Second, func() error { // times of handshakes are whole seconds
		if time.Now().Unix() <= former {
			return errors.New("the second of the last handshake is not over")
		}
		return nil
	})
	newKey := writeKeys(t, server.c.KeysDir)
	client.api.set(func(v *kube.GatewayView) {
		k := v.Input.PublicKeys[0]
		k.Key = newKey.PublicKey().Bytes()
		v.Input.PublicKeys = []cluster.PublicKey{k}
	})
	within(t, 30*time.Second, func() error {
		if handshake() <= former {
			return errors.New("no handshake with the new key")
		}
		return connected(client)()
	})
	for _, s := range []*side{server, client} {
		assert.Assert(t, !strings.Contains(s.log.String(), "panic"), s.log.String())
	}
}

// through returns a function that sends one ping through the tunnel of the client, and waits
// 20 ms for an answer to it, or to one before it that was sent since the last answer: on a
// busy machine answers are later than that.
func through(t *testing.T, client *nettest.NS) func() error {
	t.Helper()
	var c net.PacketConn
	client.Do(func() {
		var err error
		c, err = net.ListenPacket("ip4:icmp", "")
		assert.NilError(t, err)
	})
	t.Cleanup(func() { c.Close() })
	_, at := desired.TunnelAddresses(cluster.Client)
	var number, answered uint16
	return func() error {
		number++
		ping := icmp.Message{Type: ipv4.ICMPTypeEcho, Body: &icmp.Echo{ID: 7, Seq: int(number)}}
		raw, err := ping.Marshal(nil)
		assert.NilError(t, err)
		_, _ = c.WriteTo(raw, &net.IPAddr{IP: at.AsSlice()}) // no tunnel is a loss
		_ = c.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
		buf := make([]byte, 1500)
		for {
			n, _, err := c.ReadFrom(buf)
			if err != nil {
				return errors.New("no answer through the tunnel")
			}
			m, err := icmp.ParseMessage(int(ipv4.ICMPTypeEcho.Protocol()), buf[:n])
			if echo, ok := m.Body.(*icmp.Echo); err == nil && ok && m.Type == ipv4.ICMPTypeEchoReply && echo.Seq > int(answered) && echo.Seq <= int(number) {
				answered = number
				return nil
			}
		}
	}
}

// TestRestart kills a gateway as hard as it gets, or deletes its link, and
// measures for how long the tunnel does not carry anything.
func TestRestart(t *testing.T) {
	nettest.Need(t, "ip")
	milan, rome := nettest.Another(t), nettest.Another(t)
	impl := implementation(t, milan)
	wire(t, milan, rome, milanAddr, romeAddr)
	serverSide := child{Mode: cluster.Server, KeysDir: t.TempDir(), StateDir: t.TempDir(), Implementation: impl}
	clientSide := child{Mode: cluster.Client, KeysDir: t.TempDir(), StateDir: t.TempDir(), Implementation: impl, Endpoint: milanAddr.String()}
	serverSide.PeerKey = writeKeys(t, clientSide.KeysDir).PublicKey().Bytes()
	clientSide.PeerKey = writeKeys(t, serverSide.KeysDir).PublicKey().Bytes()

	for _, ns := range []*nettest.NS{milan, rome} { // through the tunnel or not at all
		ns.Run("ip", "route", "add", "unreachable", "169.254.0.0/16")
	}

	logs := &logBuffer{}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("log of both:\n%s", logs)
		}
	})
	sides := map[string]struct {
		ns *nettest.NS
		c  child
	}{"server": {milan, serverSide}, "client": {rome, clientSide}}
	processes := map[string]*exec.Cmd{}
	began := time.Now()
	for who, s := range sides {
		processes[who] = s.c.start(t, s.ns, logs)
	}
	up := through(t, rome)
	within(t, 20*time.Second, up)
	busy := time.Since(began) // two processes at once, and a handshake
	// A server remembers once a second where its peer is, and whenever it is
	// asked: one that is killed sooner after its peer moved knows the old place.
	remembered := func() {
		within(t, 10*time.Second, func() error {
			code, body, err := get(milan, "https://127.0.0.1:8082/metrics")
			if err != nil || code != 200 || !strings.Contains(body, "\nisthmus_peer_last_handshake_timestamp_seconds{") {
				return fmt.Errorf("the server does not know yet where its peer is: %d %v", code, err)
			}
			return nil
		})
	}
	remembered()
	for _, tt := range []struct{ who, what string }{
		{"server", "killed"}, {"client", "killed"}, {"server", "killed"},
		{"server", "link deleted"}, {"client", "link deleted"}, {"server", "link deleted"},
	} {
		s := sides[tt.who]
		start := time.Now()
		switch tt.what {
		case "killed":
			assert.NilError(t, processes[tt.who].Process.Kill())
			_ = processes[tt.who].Wait()
			start = time.Now()
			processes[tt.who] = s.c.start(t, s.ns, logs)
		case "link deleted":
			s.ns.Run("ip", "link", "del", desired.TunnelInterface)
		}
		within(t, 30*time.Second, up)
		gap := time.Since(start)
		remembered()
		t.Logf("%s, %s: %v without an answer (%s WireGuard)", tt.who, tt.what, gap.Round(time.Millisecond), impl)
		assert.Assert(t, gap < 3*time.Second+2*busy, "%s, %s: it took %v, and at first %v", tt.who, tt.what, gap, busy)
	}
}

func TestGatewayConfig(t *testing.T) {
	for _, tc := range []struct {
		name   string
		change func(*GatewayConfig)
		want   string
	}{
		{"no name", func(c *GatewayConfig) { c.Name = "" }, "name is required"},
		{"no mode", func(c *GatewayConfig) { c.Mode = "peer" }, `mode "peer"`},
		{"nowhere to dial", func(c *GatewayConfig) { c.Mode = cluster.Client }, "endpoint-address"},
		{"implementation", func(c *GatewayConfig) { c.Implementation = "fast" }, `implementation "fast"`},
		{"no API", func(c *GatewayConfig) { c.API = nil }, "API"},
	} {
		cfg, _ := child{Mode: cluster.Server, KeysDir: "/k"}.config(nil)
		tc.change(&cfg)
		assert.ErrorContains(t, RunGateway(t.Context(), cfg), tc.want, tc.name)
	}
}
