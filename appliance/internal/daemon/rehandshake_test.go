package daemon

import (
	"crypto/ecdh"
	"encoding/base64"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/desired"
	"github.com/isthmus-net/isthmus/appliance/kernel"
	"github.com/isthmus-net/isthmus/appliance/nettest"
)

// TestPatience spends handshakes as fast as the patience allows.
func TestPatience(t *testing.T) {
	const second = time.Second
	start := time.Unix(1000, 0)
	p := patience{quick: second}
	now := start
	var waits []time.Duration
	spend := func(n int) (took time.Duration) {
		from := now
		for range n {
			waits = append(waits, p.silence())
			now = now.Add(p.silence())
			p.spend(now)
		}
		return now.Sub(from)
	}
	spend(11)
	assert.DeepEqual(t, waits, []time.Duration{
		second, second, second, second, second, 2 * second, 4 * second, 8 * second, 15 * second, 15 * second, 15 * second,
	})
	for _, tc := range []struct {
		name string
		well time.Duration // after the handshakes before
		want time.Duration
	}{
		{"at once", 0, 15 * second},
		{"what is spent comes back", 10 * second, 8 * second},
		{"slowly", 30 * second, 2 * second},
		{"until it is all there", time.Hour, second},
	} {
		q := p
		q.begin(now.Add(tc.well), 0)
		assert.Equal(t, q.silence(), tc.want, tc.name)
	}

	for _, tc := range []struct {
		name      string
		roundTrip time.Duration
		answer    time.Duration // after the last handshake
		last      time.Duration // how long the peer may be silent in the end
	}{
		{"a server that moves again and again, each time three handshakes away", 0, second / 2, second},
		{"a tunnel that loses many packets", 0, 2 * second, ownPatience},
		{"a short way", second / 10, second / 2, second},
		{"packets wait in queues", 2 * second, 5 * second, 6 * second},
		{"as long as WireGuard itself, and no longer", time.Minute, 5 * second, ownPatience},
	} {
		p, now = patience{quick: second}, start
		for range 20 {
			spent := p.begin(now, tc.roundTrip)
			spend(3)
			now = now.Add(tc.answer)
			p.end(now, spent)
			now = now.Add(3 * second)
		}
		assert.Equal(t, p.silence(), tc.last, tc.name)
	}
}

func TestOutage(t *testing.T) {
	const second = time.Second
	start := time.Unix(1000, 0)
	o := outage{began: start, heard: start, rx: 100}
	o.listen(100, start.Add(time.Second))
	assert.Equal(t, o.heard, start)
	o.listen(132, start.Add(2*time.Second)) // a keepalive: the session works
	assert.Equal(t, o.heard, start.Add(2*time.Second))

	// A gateway that did not run has not listened.
	const look = second / 2
	o = outage{heard: start}
	o.stopped(look, look+second/10)
	assert.Equal(t, o.heard, start)
	o.stopped(look, 3*second)
	assert.Equal(t, o.heard, start.Add(3*second-look))
	assert.Equal(t, listened(start, start.Add(second), look, second/100), start)
	assert.Equal(t, listened(start, start.Add(4*second), look, 0), start.Add(3*second))
	assert.Equal(t, listened(start, start.Add(4500*time.Millisecond), look, 2*second), start, "it was told after two round trips, with the next look")
	assert.Equal(t, listened(start, start.Add(6500*time.Millisecond), look, 2*second), start.Add(2*second))

	learned, configured, later := netip.MustParseAddrPort("192.0.2.1:7"), netip.MustParseAddrPort("192.0.2.2:51840"), netip.MustParseAddrPort("192.0.2.3:51840")
	only, both := []netip.AddrPort{configured}, []netip.AddrPort{configured, later}
	for _, tc := range []struct {
		name  string
		o     outage
		now   []netip.AddrPort // configured by now
		want  []netip.AddrPort
		round int // places: when nobody has answered at any of them, the port is another
	}{
		{"it roamed", outage{learned: learned, configured: only}, only, []netip.AddrPort{learned, configured, learned, configured}, 2},
		{"the name has another address", outage{learned: configured, configured: only}, []netip.AddrPort{later}, []netip.AddrPort{later, later, later}, 1},
		{"the name has an address", outage{}, only, []netip.AddrPort{configured, configured}, 1},
		{"nobody knows where", outage{}, nil, []netip.AddrPort{{}, {}}, 1},
		{"only configured", outage{configured: only}, only, []netip.AddrPort{configured, configured}, 1},
		{"several", outage{learned: configured, configured: both}, both, []netip.AddrPort{configured, later, configured}, 2},
		{"the second of several", outage{learned: later, configured: both}, both, []netip.AddrPort{later, configured, later}, 2},
		{"the client leaves the first of several", outage{learned: configured, configured: both, leaving: only}, []netip.AddrPort{later}, []netip.AddrPort{later, later, later}, 1},
		{"roamed from several", outage{learned: learned, configured: both}, both, []netip.AddrPort{learned, configured, later, learned}, 3},
	} {
		for i, want := range tc.want {
			tc.o.handshakes = i
			endpoint, newPort := tc.o.next(tc.now)
			assert.Equal(t, endpoint, want, "%s: %d", tc.name, i)
			assert.Equal(t, newPort, i > 0 && i%tc.round == 0, "%s: %d", tc.name, i)
		}
		// Of several places each is asked as often as WireGuard asks one.
		for spent, want := range map[int][2]time.Duration{0: {time.Second, time.Second}, 7: {8 * time.Second, placePatience}, 20: {ownPatience, placePatience}} {
			p := patience{quick: time.Second, spent: spent}
			assert.Equal(t, tc.o.silence(&p, tc.now), want[min(tc.round, 2)-1], "%s, %d handshakes spent", tc.name, spent)
		}
	}
}

// TestServerReplaced kills a server and starts another one in its place, as
// when a gateway moves to another node: it has the key, the address and nothing
// else, so that only the client can begin. Probes are as far apart as in a
// cluster.
func TestServerReplaced(t *testing.T) {
	nettest.Need(t, "ip")
	milan, rome := nettest.Another(t), nettest.Another(t)
	impl := implementation(t, milan)
	wire(t, milan, rome, milanAddr, romeAddr)
	const everyTwoSeconds = 2 * time.Second
	serverSide := child{Mode: cluster.Server, KeysDir: t.TempDir(), Implementation: impl, Ping: everyTwoSeconds}
	clientSide := child{Mode: cluster.Client, KeysDir: t.TempDir(), StateDir: t.TempDir(), Implementation: impl, Ping: everyTwoSeconds, Endpoint: milanAddr.String()}
	serverPrivate, clientPrivate := writeKeys(t, serverSide.KeysDir), writeKeys(t, clientSide.KeysDir)
	serverSide.PeerKey, clientSide.PeerKey = clientPrivate.PublicKey().Bytes(), serverPrivate.PublicKey().Bytes()
	for _, ns := range []*nettest.NS{milan, rome} { // through the tunnel or not at all
		ns.Run("ip", "route", "add", "unreachable", "169.254.0.0/16")
	}
	logs := &logBuffer{}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("log of both:\n%s", logs)
		}
	})
	start := func() func() {
		serverSide.StateDir = t.TempDir()
		p := serverSide.start(t, milan, logs)
		return func() {
			assert.NilError(t, p.Process.Kill())
			_ = p.Wait()
		}
	}
	first := time.Now()
	kill := start()
	clientSide.start(t, rome, logs)
	up := through(t, rome)
	within(t, 20*time.Second, up)
	busy := time.Since(first) // two processes at once, and a handshake
	within(t, 5*time.Second, func() error {
		if _, body, err := get(rome, "https://127.0.0.1:8082/metrics"); !strings.Contains(body, "\nliqo_peer_is_connected{cluster_id=\"milan\",driver=\"wireguard\"} 1") {
			return fmt.Errorf("no probe was answered: %v", err)
		}
		return nil
	})

	before := answersAgain(logs)
	for i := range 2 {
		kill()
		if impl == kernel.Kernel {
			milan.Run("ip", "link", "del", desired.TunnelInterface) // it outlives its process, but not its node
		}
		began := time.Now()
		kill = start()
		within(t, 30*time.Second, up)
		gap := time.Since(began)
		t.Logf("%v without an answer (%s WireGuard)", gap.Round(time.Millisecond), impl)
		assert.Assert(t, gap < 4*time.Second+2*busy, "it took %v, and at first %v", gap, busy)
		within(t, 5*time.Second, func() error { // of the next probe
			if answersAgain(logs) == before+i {
				return errors.New("the client has not told of it")
			}
			return nil
		})
	}
	for _, k := range []*ecdh.PrivateKey{serverPrivate, clientPrivate} {
		assert.Assert(t, !strings.Contains(logs.String(), base64.StdEncoding.EncodeToString(k.Bytes())), "a private key is logged")
	}
}

// TestNextEndpoint takes the server's address away and gives it another one, as
// when the node is lost whose NodePort the client dials. Both are configured.
func TestNextEndpoint(t *testing.T) {
	nettest.Need(t, "ip")
	milan, rome := nettest.Another(t), nettest.Another(t)
	impl := implementation(t, milan)
	wire(t, milan, rome, milanAddr, romeAddr)
	const other = "203.0.113.3"
	serverSide := child{Mode: cluster.Server, KeysDir: t.TempDir(), StateDir: t.TempDir(), Implementation: impl}
	clientSide := child{Mode: cluster.Client, KeysDir: t.TempDir(), StateDir: t.TempDir(), Implementation: impl, Ping: 2 * time.Second, Endpoint: milanAddr.String() + "," + other}
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
	first := time.Now()
	server := serverSide.start(t, milan, logs)
	clientSide.start(t, rome, logs)
	up := through(t, rome)
	within(t, 20*time.Second, up)
	busy := time.Since(first) // two processes at once, and a handshake

	assert.NilError(t, server.Process.Kill())
	_ = server.Wait()
	if impl == kernel.Kernel {
		milan.Run("ip", "link", "del", desired.TunnelInterface)
	}
	milan.Run("ip", "address", "flush", "dev", "eth0")
	milan.Run("ip", "address", "add", other+"/24", "dev", "eth0")
	milan.Run("ip", "route", "add", "default", "via", romeAddr.String())
	began := time.Now()
	serverSide.StateDir = t.TempDir()
	serverSide.start(t, milan, logs)
	within(t, 40*time.Second, up)
	gap := time.Since(began)
	t.Logf("%v without an answer (%s WireGuard)", gap.Round(time.Millisecond), impl)
	assert.Assert(t, gap < 5*time.Second+2*busy, "it took %v, and at first %v", gap, busy) // one place more than when it is the same
}

// answersAgain counts the outages that ended, as the client's log tells.
func answersAgain(log *logBuffer) int { return strings.Count(log.String(), "the peer answers again") }
