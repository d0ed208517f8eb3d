package kernel

import (
	"bytes"
	"context"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"
	"gotest.tools/v3/assert"
	"gotest.tools/v3/poll"

	"github.com/isthmus-net/isthmus/appliance/netstate"
	"github.com/isthmus-net/isthmus/appliance/nettest"
)

const tunnel = "liqo-tunnel"

// A side is one end of a tunnel in a namespace of its own.
type side struct {
	test *nettest.NS
	cfg  Config
	*NetNS
}

// tunnelSides returns two namespaces joined by a veth, 192.0.2.1 and .2.
// They are opened with the implementation, or the test is skipped.
func tunnelSides(t *testing.T, impl Implementation) (server, client *side) {
	t.Helper()
	nettest.Need(t, "ip")
	sides := make([]*side, 2)
	for i := range sides {
		s := &side{test: nettest.Another(t), cfg: Config{
			Implementation: impl,
			StateDir:       t.TempDir(),
			PrivateKey:     func(string) ([32]byte, error) { return key(byte(i + 1)), nil },
			Logger:         slog.New(slog.NewTextHandler(t.Output(), nil)),
		}}
		s.open(t)
		feature := FeatureWireGuard
		if impl == Userspace {
			feature = FeatureTUN
		}
		need(t, s.NetNS, feature)
		sides[i] = s
	}
	veth(t, sides[0].test, sides[1].test, "192.0.2.1/24", "192.0.2.2/24")
	t.Cleanup(func() {
		for _, s := range sides {
			assert.Check(t, s.Close())
		}
	})
	return sides[0], sides[1]
}

func (s *side) open(t *testing.T) {
	t.Helper()
	var err error
	s.test.Do(func() { s.NetNS, err = Open(s.cfg) })
	assert.NilError(t, err)
}

func serverState() netstate.State {
	return netstate.State{
		Links:     []netstate.Link{{Name: tunnel, Kind: netstate.KindWireGuard, MTU: 1380, Description: "tunnel to rome", Forwarding: true, RPFilter: 2, AcceptLocal: true}},
		Addresses: []netstate.Address{{Dev: tunnel, Prefix: prefix("169.254.18.1/30")}},
		WireGuard: []netstate.WireGuard{{Dev: tunnel, ListenPort: 51840, PublicKey: public(1), Peers: []netstate.WireGuardPeer{
			{PublicKey: public(2), AllowedIPs: []netip.Prefix{prefix("169.254.18.2/32"), prefix("10.2.0.0/16"), prefix("fd02::/64")}},
		}}},
	}
}

func clientState() netstate.State {
	return netstate.State{
		Links:     []netstate.Link{{Name: tunnel, Kind: netstate.KindWireGuard, MTU: 1380, Description: "tunnel to milan"}},
		Addresses: []netstate.Address{{Dev: tunnel, Prefix: prefix("169.254.18.2/30")}},
		WireGuard: []netstate.WireGuard{{Dev: tunnel, PublicKey: public(2), Peers: []netstate.WireGuardPeer{
			{PublicKey: public(1), Endpoint: netip.MustParseAddrPort("192.0.2.1:51840"), AllowedIPs: []netip.Prefix{prefix("169.254.18.1/32")}},
		}}},
	}
}

// exchange sends a datagram through the tunnel and waits for it.
func exchange(t *testing.T, from, to *side, dst string) {
	t.Helper()
	in := listen(t, to.test, netip.MustParseAddrPort(dst+":0"))
	out := listen(t, from.test, netip.MustParseAddrPort("0.0.0.0:0"))
	at := in.LocalAddr().(*net.UDPAddr).AddrPort()
	send(t, out, at)
	receive(t, in)
	assert.NilError(t, in.Close())
	assert.NilError(t, out.Close())
}

// rest waits until another handshake would be answered: WireGuard answers no
// more than 50 in a second.
func (s *side) rest(t *testing.T) {
	t.Helper()
	poll.WaitOn(t, func(poll.LogT) poll.Result {
		peers, err := s.Peers(tunnel)
		if err != nil {
			return poll.Error(err)
		}
		if time.Since(peers[0].LastHandshake) < 100*time.Millisecond {
			return poll.Continue("the last handshake was just now")
		}
		return poll.Success()
	}, poll.WithDelay(10*time.Millisecond))
}

func both(t *testing.T, f func(t *testing.T, impl Implementation)) {
	for _, impl := range []Implementation{Kernel, Userspace} {
		t.Run(string(impl), func(t *testing.T) {
			t.Parallel()
			if impl == Kernel {
				// Open refuses to be opened where there is none.
				probe, _ := openWith(t)
				need(t, probe, FeatureWireGuard)
			}
			f(t, impl)
		})
	}
}

func TestWireGuard(t *testing.T) {
	both(t, func(t *testing.T, impl Implementation) {
		server, client := tunnelSides(t, impl)
		converge(t, server.NetNS, serverState())
		converge(t, client.NetNS, clientState())
		assert.Equal(t, server.Implementation(), impl)
		exchange(t, client, server, "169.254.18.1")
		exchange(t, server, client, "169.254.18.2")

		peers, err := server.Peers(tunnel)
		assert.NilError(t, err)
		assert.Equal(t, len(peers), 1)
		assert.Equal(t, peers[0].PublicKey, public(2))
		assert.Equal(t, peers[0].Endpoint.Addr(), addr("192.0.2.2"))
		assert.Assert(t, peers[0].Rx > 0 && peers[0].Tx > 0 && time.Since(peers[0].LastHandshake) < time.Minute, "%+v", peers[0])
		_, err = server.Peers("absent")
		assert.ErrorContains(t, err, "absent")

		// What was learned is left alone: there is nothing to do.
		left := netstate.Diff(observe(t, server.NetNS), serverState())
		assert.Assert(t, left.Empty(), left.String())

		// The link carries what people and we need to know.
		out := server.test.Run("ip", "-d", "link", "show", tunnel)
		assert.Assert(t, strings.Contains(out, "alias isthmus: tunnel to rome"), out)
		assert.Assert(t, strings.Contains(out, "mtu 1380"), out)
		out = client.test.Run("ip", "link", "show", tunnel)
		assert.Assert(t, strings.Contains(out, "192.0.2.1:51840"), out)
		server.test.Do(func() {
			for name, want := range map[string]string{"forwarding": "1\n", "rp_filter": "2\n"} {
				b, err := os.ReadFile("/proc/sys/net/ipv4/conf/" + tunnel + "/" + name)
				assert.NilError(t, err)
				assert.Equal(t, string(b), want, name)
			}
		})
	})
}

// TestPresharedKey gives both ends of a tunnel a key that they share, then another one to one
// of them, and takes it away again. What is read back has fingerprints only.
func TestPresharedKey(t *testing.T) {
	both(t, func(t *testing.T, impl Implementation) {
		server, client := tunnelSides(t, impl)
		sharing := func(s netstate.State, key [32]byte) netstate.State {
			w := s.WireGuard[0]
			w.Peers = slices.Clone(w.Peers)
			w.Peers[0].PresharedKey = netstate.FingerprintOf(key)
			s.WireGuard = []netstate.WireGuard{w}
			return s
		}
		first, second := [32]byte{7: 1}, [32]byte{7: 2}
		err := client.Apply(t.Context(), netstate.Diff(observe(t, client.NetNS), sharing(clientState(), first)))
		assert.ErrorContains(t, err, "kernel.Config.PresharedKey is not set")

		keys := map[*side][32]byte{}
		for _, s := range []*side{server, client} {
			assert.NilError(t, s.Close())
			s.cfg.PresharedKey = func(string, netstate.Key) ([32]byte, error) { return keys[s], nil }
			s.open(t)
		}
		keys[server], keys[client] = first, first
		converge(t, server.NetNS, sharing(serverState(), first))
		converge(t, client.NetNS, sharing(clientState(), first))
		exchange(t, client, server, "169.254.18.1")
		assert.Equal(t, observe(t, server.NetNS).WireGuard[0].Peers[0].PresharedKey, netstate.FingerprintOf(first))

		// A peer that is added anew keeps its key.
		server.rest(t)
		assert.NilError(t, client.Rehandshake(tunnel, public(1), netip.AddrPort{}, false))
		exchange(t, client, server, "169.254.18.1")
		left := netstate.Diff(observe(t, client.NetNS), sharing(clientState(), first))
		assert.Assert(t, left.Empty(), left.String())

		err = client.Apply(t.Context(), netstate.Diff(observe(t, client.NetNS), sharing(clientState(), second)))
		assert.ErrorContains(t, err, netstate.FingerprintOf(second).String())
		keys[server], keys[client] = second, second
		converge(t, server.NetNS, sharing(serverState(), second))
		converge(t, client.NetNS, sharing(clientState(), second))
		server.rest(t)
		assert.NilError(t, client.Rehandshake(tunnel, public(1), netip.AddrPort{}, false))
		exchange(t, client, server, "169.254.18.1")

		// One end without it is heard no more.
		converge(t, client.NetNS, clientState())
		client.test.Run("nft", "add table inet told; add chain inet told in { type filter hook prerouting priority 0; }; add rule inet told in udp length 100 counter")
		assert.NilError(t, client.Rehandshake(tunnel, public(1), netip.AddrPort{}, false))
		out := listen(t, client.test, netip.MustParseAddrPort("0.0.0.0:0"))
		send(t, out, netip.MustParseAddrPort("169.254.18.1:7000")) // the kernel begins a handshake when there is something to send
		waitForCount(t, client.test, "list table inet told", 1)    // the other one has answered
		peers, err := client.Peers(tunnel)
		assert.NilError(t, err)
		assert.Assert(t, peers[0].LastHandshake.IsZero(), "%+v", peers[0])
		converge(t, server.NetNS, serverState())
		exchange(t, client, server, "169.254.18.1")
	})
}

// TestWireGuardWalk changes ports, endpoints, allowed IPs and peers in random
// order; afterwards traffic flows.
func TestWireGuardWalk(t *testing.T) {
	both(t, func(t *testing.T, impl Implementation) {
		server, client := tunnelSides(t, impl)
		change := func(s netstate.State, f func(*netstate.WireGuard)) netstate.State {
			w := s.WireGuard[0]
			w.Peers = append([]netstate.WireGuardPeer(nil), w.Peers...)
			f(&w)
			s.WireGuard = []netstate.WireGuard{w}
			return s
		}
		third := netstate.WireGuardPeer{PublicKey: public(3), Endpoint: netip.MustParseAddrPort("[2001:db8::7]:9"), AllowedIPs: []netip.Prefix{prefix("10.3.0.0/16"), prefix("fd03::/64")}, Keepalive: 25}
		states := []netstate.State{
			clientState(),
			change(clientState(), func(w *netstate.WireGuard) { w.Peers = append(w.Peers, third) }),
			change(clientState(), func(w *netstate.WireGuard) {
				w.Peers[0].AllowedIPs = append([]netip.Prefix{prefix("10.3.0.0/16")}, w.Peers[0].AllowedIPs...)
			}),
			change(clientState(), func(w *netstate.WireGuard) { w.ListenPort = 51999 }),
			change(clientState(), func(w *netstate.WireGuard) { w.Peers[0].Keepalive = 10 }),
			change(clientState(), func(w *netstate.WireGuard) { w.Peers = nil }),
			change(clientState(), func(w *netstate.WireGuard) { w.Peers = []netstate.WireGuardPeer{third} }),
			change(clientState(), func(w *netstate.WireGuard) {
				p := third
				p.Endpoint = netip.AddrPort{}
				w.Peers = append(w.Peers, p)
			}),
			{},
		}
		converge(t, server.NetNS, serverState())
		for i := range walkSteps / 2 {
			n := rand.IntN(len(states))
			t.Logf("step %d: state %d", i, n)
			converge(t, client.NetNS, states[n])
		}
		converge(t, client.NetNS, clientState())
		exchange(t, client, server, "169.254.18.1")

		// A changed endpoint is set, an unchanged one not, however the peer
		// was reached meanwhile.
		moved := change(clientState(), func(w *netstate.WireGuard) { w.Peers[0].Endpoint = netip.MustParseAddrPort("192.0.2.99:51840") })
		converge(t, client.NetNS, moved)
		peers, err := client.Peers(tunnel)
		assert.NilError(t, err)
		assert.Equal(t, peers[0].Endpoint.String(), "192.0.2.99:51840")
		exchange(t, server, client, "169.254.18.2") // the server knows where we are, we learn where it is
		peers, err = client.Peers(tunnel)
		assert.NilError(t, err)
		assert.Equal(t, peers[0].Endpoint.String(), "192.0.2.1:51840")
		// Something else changes: the endpoint is not touched.
		converge(t, client.NetNS, change(moved, func(w *netstate.WireGuard) { w.Peers[0].Keepalive = 21 }))
		peers, err = client.Peers(tunnel)
		assert.NilError(t, err)
		assert.Equal(t, peers[0].Endpoint.String(), "192.0.2.1:51840")
	})
}

// TestKeysChange gives the server a new key pair and tells the client.
func TestKeysChange(t *testing.T) {
	both(t, func(t *testing.T, impl Implementation) {
		server, client := tunnelSides(t, impl)
		current := byte(1)
		server.cfg.PrivateKey = func(string) ([32]byte, error) { return key(current), nil }
		assert.NilError(t, server.Close())
		server.open(t)
		converge(t, server.NetNS, serverState())
		converge(t, client.NetNS, clientState())
		exchange(t, client, server, "169.254.18.1")

		next := serverState()
		next.WireGuard[0].PublicKey = public(4)
		err := server.Apply(t.Context(), netstate.Diff(observe(t, server.NetNS), next))
		assert.ErrorContains(t, err, "the two halves in the Secret do not match")
		private := wgtypes.Key(key(1)).String()
		assert.Assert(t, !strings.Contains(err.Error(), private))

		server.rest(t)
		current = 4
		converge(t, server.NetNS, next)
		peer := clientState()
		peer.WireGuard[0].Peers[0].PublicKey = public(4)
		converge(t, client.NetNS, peer)
		exchange(t, client, server, "169.254.18.1")
	})
}

// A gateway that changes its own key and the pre-shared one asks for a session at once, while
// packets pass, and the first answer is the right one: another question would be 5 s later
// (REKEY_TIMEOUT, §6.1 of the paper). Other peers take their time between the two keys.
func TestKeysChangeTogether(t *testing.T) {
	nettest.Need(t, "nft")
	both(t, func(t *testing.T, impl Implementation) {
		server, client := tunnelSides(t, impl)
		first, second := [32]byte{7: 1}, [32]byte{7: 2}
		own, shared := byte(1), first
		others := 1000
		if impl == Kernel {
			others = 200 // as many as have room in a message to it
		}
		server.cfg.PrivateKey = func(string) ([32]byte, error) { return key(own), nil }
		server.cfg.PresharedKey = func(string, netstate.Key) ([32]byte, error) { return shared, nil }
		client.cfg.PresharedKey = func(_ string, peer netstate.Key) ([32]byte, error) {
			if peer == public(4) {
				return second, nil
			}
			return first, nil
		}
		for _, s := range []*side{server, client} {
			assert.NilError(t, s.Close())
			s.open(t)
		}
		serverWith := func() netstate.State {
			want := serverState()
			w := &want.WireGuard[0]
			w.PublicKey = public(own)
			for n := range others {
				other := wgtypes.Key{1: byte(n), 2: byte(n >> 8), 3: 1, 31: 64}
				if k := netstate.Key(other.PublicKey()); bytes.Compare(k[:], w.Peers[0].PublicKey[:]) < 0 { // peers are in the order of their keys
					w.Peers = append(w.Peers, netstate.WireGuardPeer{PublicKey: k})
				}
			}
			for i := range w.Peers {
				w.Peers[i].PresharedKey = netstate.FingerprintOf(shared)
			}
			return want.Normalized()
		}
		converge(t, server.NetNS, serverWith())
		want := clientState()
		peers := &want.WireGuard[0].Peers
		(*peers)[0].PresharedKey = netstate.FingerprintOf(first)
		*peers = append(*peers, netstate.WireGuardPeer{PublicKey: public(4), PresharedKey: netstate.FingerprintOf(second)})
		converge(t, client.NetNS, want)
		exchange(t, client, server, "169.254.18.1")

		client.test.Run("nft", "add table inet asked; add chain inet asked in { type filter hook prerouting priority 0; }; add rule inet asked in udp length 156 counter")
		stream := startStream(t, server, client, "169.254.18.2", 7002)
		own, shared = 4, second
		assert.NilError(t, server.Apply(t.Context(), netstate.Diff(observe(t, server.NetNS), serverWith())))
		poll.WaitOn(t, func(poll.LogT) poll.Result {
			now, err := client.Peers(tunnel)
			if err != nil {
				return poll.Error(err)
			}
			if !slices.ContainsFunc(now, func(p PeerStatus) bool { return p.PublicKey == public(4) && !p.LastHandshake.IsZero() }) {
				return poll.Continue("no handshake with the new key yet")
			}
			return poll.Success()
		}, poll.WithDelay(time.Millisecond), poll.WithTimeout(time.Minute))
		stream.end()
		// The client has answered, and the server has taken the answer: else it asks again.
		exchange(t, client, server, "169.254.18.1")
		assert.Assert(t, strings.Contains(client.test.Run("nft", "list table inet asked"), "counter packets 1 "), client.test.Run("nft", "list table inet asked"))
	})
}

// A new tunnel lets nobody in before the rules are there that say what a peer may reach.
func TestRulesBeforePeers(t *testing.T) {
	nettest.Need(t, "nft")
	both(t, func(t *testing.T, impl Implementation) {
		server, _ := tunnelSides(t, impl)
		want := serverState()
		want.Tables = []netstate.Table{many(3000)} // which takes its time
		changes := netstate.Diff(observe(t, server.NetNS), want)
		applied := make(chan error, 1)
		go func() { applied <- server.Apply(context.Background(), changes) }()
		poll.WaitOn(t, func(poll.LogT) poll.Result {
			if peers, err := server.Peers(tunnel); (err != nil || len(peers) == 0) && len(applied) == 0 {
				return poll.Continue("there is no peer yet")
			}
			return poll.Success()
		}, poll.WithDelay(time.Millisecond), poll.WithTimeout(10*time.Minute)) // an emulated machine takes long
		peers, err := server.Peers(tunnel)
		assert.NilError(t, err)
		assert.Assert(t, len(peers) > 0, "everything is applied, and there is no peer")
		tables := server.test.Run("nft", "list tables")
		assert.NilError(t, <-applied)
		assert.Assert(t, strings.Contains(tables, "isthmus-maps"), "%q", tables)
	})
}

// closeAlone closes a side for good. A program that another test starts holds all
// files of this process between its fork and its exec: without the lock, now and
// then, the sockets would outlive their closing.
func closeAlone(t *testing.T, s *side) {
	t.Helper()
	syscall.ForkLock.RLock()
	err := s.Close()
	syscall.ForkLock.RUnlock()
	assert.NilError(t, err)
}

// TestUserspaceRestart ends the process that serves WireGuard, as far as a
// test can, and starts it again: the client never dials, so the server must.
func TestUserspaceRestart(t *testing.T) {
	t.Parallel()
	server, client := tunnelSides(t, Userspace)
	converge(t, server.NetNS, serverState())
	converge(t, client.NetNS, clientState())
	exchange(t, client, server, "169.254.18.1")
	file := filepath.Join(server.cfg.StateDir, "wireguard-"+tunnel+".json")
	var remembered []byte
	poll.WaitOn(t, func(poll.LogT) poll.Result {
		b, err := os.ReadFile(file)
		if err != nil || !bytes.Contains(b, []byte("192.0.2.2:")) {
			return poll.Continue("endpoint not remembered: %s %v", b, err)
		}
		remembered = b
		return poll.Success()
	}, poll.WithDelay(20*time.Millisecond))
	assert.Assert(t, !bytes.Contains(remembered, []byte(key(1).String())), "a private key is written to disk")

	// The client talks all the time.
	in := listen(t, server.test, netip.MustParseAddrPort("0.0.0.0:7000"))
	ctx, cancel := context.WithCancel(t.Context())
	out := listen(t, client.test, netip.MustParseAddrPort("0.0.0.0:0"))
	talked := make(chan struct{})
	go func() {
		defer close(talked)
		tick := time.NewTicker(10 * time.Millisecond)
		defer tick.Stop()
		for ctx.Err() == nil {
			<-tick.C
			_, _ = out.WriteToUDPAddrPort([]byte("x"), netip.MustParseAddrPort("169.254.18.1:7000"))
		}
	}()
	defer func() { cancel(); <-talked }()
	receive(t, in)

	closeAlone(t, server)
	assert.NilError(t, os.WriteFile(file, remembered, 0o600)) // as if it had been killed
	assert.NilError(t, in.Close())                            // and forget what has arrived until now
	in = listen(t, server.test, netip.MustParseAddrPort("0.0.0.0:7000"))
	server.open(t)
	applyOnceFree(t, server.NetNS, serverState())
	start := time.Now()
	receive(t, in)
	gap := time.Since(start)
	t.Logf("gap: %v", gap)
	assert.Assert(t, gap < 10*time.Second)
}

// TestThreadsElsewhere opens a namespace that only one thread is in. That may
// be the main thread, of which /proc/self speaks.
func TestThreadsElsewhere(t *testing.T) {
	t.Parallel()
	test := nettest.NewNS(t)
	assert.Assert(t, !everyThreadIn(test.FD()), "the threads of other tests are not here")
	assert.Assert(t, isFile("/proc/thread-self/ns/net", test.FD()))
	ns := open(t, Config{})
	assert.Assert(t, ns.elsewhere)
	var inside bool
	assert.NilError(t, ns.Do(func() error { inside = isFile("/proc/thread-self/ns/net", test.FD()); return nil }))
	assert.Assert(t, inside)
}

// TestWireGuardByHand changes a device behind our back.
func TestWireGuardByHand(t *testing.T) {
	t.Parallel()
	server, _ := tunnelSides(t, Userspace)
	converge(t, server.NetNS, serverState())
	for _, argv := range [][]string{
		{"ip", "link", "set", tunnel, "down"},
		{"ip", "link", "set", tunnel, "mtu", "1300"},
		{"ip", "link", "set", tunnel, "alias", "isthmus: something else"},
		{"ip", "addr", "flush", "dev", tunnel},
		{"ip", "addr", "add", "10.99.0.1/24", "dev", tunnel},
		{"ip", "link", "del", tunnel},
	} {
		t.Run(strings.Join(argv, " "), func(t *testing.T) {
			for len(server.Changed()) > 0 {
				<-server.Changed()
			}
			server.test.Run(argv...)
			select {
			case <-server.Changed():
			case <-time.After(30 * time.Second):
				t.Fatal("the change was not announced")
			}
			assert.Assert(t, !netstate.Diff(observe(t, server.NetNS), serverState()).Empty(), "the change was not seen")
			converge(t, server.NetNS, serverState())
			quiet(t, server.NetNS, serverState())
		})
	}
}

// TestPeersByHand removes a peer, gives another what it may send and changes the
// port as wg does, of which the kernel tells nobody: it is announced all the same.
func TestPeersByHand(t *testing.T) {
	both(t, func(t *testing.T, impl Implementation) {
		server, _ := tunnelSides(t, impl)
		converge(t, server.NetNS, serverState())
		port := 51999
		for name, c := range map[string]wgtypes.Config{
			"a peer is removed":        {Peers: []wgtypes.PeerConfig{{PublicKey: wgtypes.Key(public(2)), Remove: true}}},
			"a peer may send nothing":  {Peers: []wgtypes.PeerConfig{{PublicKey: wgtypes.Key(public(2)), UpdateOnly: true, ReplaceAllowedIPs: true}}},
			"the port is another":      {ListenPort: &port},
			"somebody else's peer too": {Peers: []wgtypes.PeerConfig{{PublicKey: wgtypes.Key(public(3))}}},
		} {
			quiet(t, server.NetNS, serverState())
			server.mu.Lock() // so that nobody looks before it is done
			for len(server.Changed()) > 0 {
				<-server.Changed()
			}
			err := server.wireGuard(tunnel).set(c)
			server.mu.Unlock()
			assert.NilError(t, err, name)
			select {
			case <-server.Changed():
			case <-time.After(30 * time.Second):
				t.Fatal(name + ": it is not announced")
			}
			assert.Assert(t, !netstate.Diff(observe(t, server.NetNS), serverState()).Empty(), name+": it is not seen")
			converge(t, server.NetNS, serverState())
		}
	})
}
