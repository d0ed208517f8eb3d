package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"
	"gotest.tools/v3/assert"
	"gotest.tools/v3/poll"

	"github.com/isthmus-net/isthmus/appliance/netstate"
	"github.com/isthmus-net/isthmus/appliance/nettest"
)

// A stream sends a numbered datagram every millisecond and counts what
// arrives.
type stream struct {
	stop  chan struct{}
	ended atomic.Bool     // nothing is sent any more
	n     atomic.Uint32   // how many were sent by now
	sent  chan uint32     // how many in the end
	got   chan streamTold // what arrived in the end
}

type streamTold struct {
	received uint32
	longest  uint32 // numbers in a row that are missing
}

const streamPeriod = time.Millisecond

func startStream(t *testing.T, from, to *side, dst string, port uint16) *stream {
	t.Helper()
	in := listen(t, to.test, netip.AddrPortFrom(netip.IPv4Unspecified(), port))
	// A reader that waits for a processor loses none of them, where the test may ask for that.
	conn, err := in.SyscallConn()
	assert.NilError(t, err)
	assert.NilError(t, conn.Control(func(fd uintptr) {
		_ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 4<<20)
	}))
	out := listen(t, from.test, netip.MustParseAddrPort("0.0.0.0:0"))
	s := &stream{stop: make(chan struct{}), sent: make(chan uint32, 1), got: make(chan streamTold, 1)}
	at := netip.AddrPortFrom(addr(dst), port)
	go func() {
		tick := time.NewTicker(streamPeriod)
		defer tick.Stop()
		for {
			select {
			case <-s.stop:
				s.sent <- s.n.Load()
				return
			case <-tick.C:
			}
			_, _ = out.WriteToUDPAddrPort(binary.BigEndian.AppendUint32(nil, s.n.Add(1)), at)
		}
	}()
	go func() {
		var told streamTold
		seen := uint32(0)
		buf := make([]byte, 100)
		for {
			// Half a second of silence is the end once nothing is sent any more: nothing is
			// as late as that.
			over := s.ended.Load()
			_ = in.SetReadDeadline(time.Now().Add(500 * time.Millisecond))
			n, _, err := in.ReadFromUDPAddrPort(buf)
			if errors.Is(err, os.ErrDeadlineExceeded) && !over {
				continue
			}
			if err != nil || n != 4 {
				s.got <- told
				return
			}
			told.received++
			if is := binary.BigEndian.Uint32(buf); is > seen {
				told.longest = max(told.longest, is-seen-1)
				seen = is
			}
		}
	}()
	return s
}

// end returns how many datagrams were sent and lost.
func (s *stream) end() (sent, lost, longest uint32) {
	close(s.stop)
	sent = <-s.sent
	s.ended.Store(true)
	told := <-s.got
	return sent, sent - told.received, told.longest
}

// TestRehandshake begins a session anew that works, under traffic of 1000
// datagrams a second in both directions, and counts what that costs.
func TestRehandshake(t *testing.T) {
	both(t, func(t *testing.T, impl Implementation) {
		server, client := tunnelSides(t, impl)
		converge(t, server.NetNS, serverState())
		// The endpoint in use is a learned one: there is nobody at the
		// configured one.
		want := clientState()
		want.WireGuard[0].Peers[0].Keepalive = 25
		converge(t, client.NetNS, want)
		exchange(t, client, server, "169.254.18.1")
		want.WireGuard[0].Peers[0].Endpoint = netip.MustParseAddrPort("192.0.2.99:51840")
		converge(t, client.NetNS, want)
		exchange(t, server, client, "169.254.18.2")
		place := func() string {
			t.Helper()
			peers, err := client.Peers(tunnel)
			assert.NilError(t, err)
			assert.Equal(t, len(peers), 1)
			return endpointText(peers[0].Endpoint)
		}
		assert.Equal(t, place(), "192.0.2.1:51840")

		const times = 5
		up := startStream(t, client, server, "169.254.18.1", 7001)
		down := startStream(t, server, client, "169.254.18.2", 7002)
		var slowest time.Duration // handshake: under emulation it takes its time
		for range times {
			client.rest(t)
			began := time.Now()
			assert.NilError(t, client.Rehandshake(tunnel, public(1), netip.AddrPort{}, false))
			assert.Equal(t, place(), "192.0.2.1:51840")
			left := netstate.Diff(observe(t, client.NetNS), want)
			assert.Assert(t, left.Empty(), left.String())
			poll.WaitOn(t, func(poll.LogT) poll.Result {
				peers, err := client.Peers(tunnel)
				switch {
				case err != nil:
					return poll.Error(err)
				case peers[0].LastHandshake.IsZero():
					return poll.Continue("no handshake yet")
				case peers[0].LastHandshake.Before(began):
					return poll.Error(fmt.Errorf("the old session is still there: %+v", peers[0]))
				}
				return poll.Success()
			}, poll.WithDelay(time.Millisecond))
			slowest = max(slowest, time.Since(began))
		}
		// What the server had sent with the old keys is lost, and what it sends
		// until it has the new ones. What is for it waits.
		for name, s := range map[string]*stream{"to the server": up, "from the server": down} {
			poll.WaitOn(t, func(poll.LogT) poll.Result {
				if n := s.n.Load(); n <= 100 {
					return poll.Continue("%s: %d were sent, which tells nothing", name, n) // on a busy machine
				}
				return poll.Success()
			}, poll.WithTimeout(2*time.Minute))
			sent, lost, longest := s.end()
			t.Logf("%s: %d of %d datagrams lost in %d times, %d in a row at most; a handshake took %v", name, lost, sent, times, longest, slowest.Round(time.Millisecond))
			few := 20 + 2*uint32(slowest/streamPeriod)
			assert.Assert(t, lost <= few*times && longest <= few, "%s: %d of %d datagrams lost, %d in a row", name, lost, sent, longest)
		}

		// An endpoint that is given is taken, one that leads nowhere too.
		assert.NilError(t, client.Rehandshake(tunnel, public(1), netip.MustParseAddrPort("192.0.2.99:51840"), false))
		assert.Equal(t, place(), "192.0.2.99:51840")
		assert.NilError(t, client.Rehandshake(tunnel, public(1), netip.MustParseAddrPort("192.0.2.1:51840"), false))
		exchange(t, client, server, "169.254.18.1")
		left := netstate.Diff(observe(t, client.NetNS), want)
		assert.Assert(t, left.Empty(), left.String())

		// A port of its own stays, unless another one is asked for.
		before := observe(t, client.NetNS).WireGuard[0].ListenPort
		assert.NilError(t, client.Rehandshake(tunnel, public(1), netip.AddrPort{}, false))
		assert.Equal(t, observe(t, client.NetNS).WireGuard[0].ListenPort, before)
		assert.NilError(t, client.Rehandshake(tunnel, public(1), netip.AddrPort{}, true))
		after := observe(t, client.NetNS).WireGuard[0].ListenPort
		assert.Assert(t, after != 0 && after != before, "port %d, then %d", before, after)
		exchange(t, client, server, "169.254.18.1")
		left = netstate.Diff(observe(t, client.NetNS), want)
		assert.Assert(t, left.Empty(), left.String())

		// Errors name public keys only.
		err := client.Rehandshake(tunnel, public(3), netip.AddrPort{}, false)
		assert.ErrorContains(t, err, "there is no peer "+public(3).String())
		assert.ErrorContains(t, client.Rehandshake("absent", public(1), netip.AddrPort{}, false), "absent")
		assert.Assert(t, !strings.Contains(err.Error(), wgtypes.Key(key(2)).String()))
	})
}

// A peer takes no second initiation at once: who begins anew twice waits for it, and not for
// what WireGuard asks after 5 s.
func TestRehandshakeTwice(t *testing.T) {
	nettest.Need(t, "nft")
	both(t, func(t *testing.T, impl Implementation) {
		server, client, _ := tunnelInUse(t, impl)
		server.rest(t)
		server.test.Run("nft", "add table inet asked; add chain inet asked in { type filter hook prerouting priority 0; }; add rule inet asked in udp length 156 counter; "+
			"add chain inet asked out { type filter hook output priority 0; }; add rule inet asked out udp length 100 counter")
		var before time.Time
		for n := range 3 {
			assert.NilError(t, client.Rehandshake(tunnel, public(1), netip.AddrPort{}, false))
			client.wgMu.Lock()
			at := client.begun[peerOf{tunnel, public(1)}]
			client.wgMu.Unlock()
			assert.Assert(t, at.Sub(before) >= beginAgain, "it began again after %v", at.Sub(before))
			before = at
			// A server that is late reads two initiations at once and drops the second, however far apart they were sent.
			waitForCount(t, server.test, "list chain inet asked out", n+1)
		}
		exchange(t, client, server, "169.254.18.1")
		assert.Assert(t, strings.Contains(server.test.Run("nft", "list chain inet asked in"), "counter packets 3 "), server.test.Run("nft", "list table inet asked"))
	})
}

// waitForCount waits until the only counter that nft lists has counted so many packets, or more.
func waitForCount(t testing.TB, ns *nettest.NS, list string, packets int) {
	t.Helper()
	poll.WaitOn(t, func(poll.LogT) poll.Result {
		out := ns.Run("nft", list)
		_, rest, _ := strings.Cut(out, "counter packets ")
		n := 0
		if _, err := fmt.Sscan(rest, &n); err != nil || n < packets {
			return poll.Continue("%s", out)
		}
		return poll.Success()
	}, poll.WithTimeout(20*time.Second), poll.WithDelay(time.Millisecond))
}

// tunnelInUse returns two sides that have just exchanged a datagram, and the client's state, which
// keeps the tunnel alive.
func tunnelInUse(t *testing.T, impl Implementation) (server, client *side, want netstate.State) {
	t.Helper()
	server, client = tunnelSides(t, impl)
	converge(t, server.NetNS, serverState())
	want = clientState()
	want.WireGuard[0].Peers[0].Keepalive = 25
	converge(t, client.NetNS, want)
	exchange(t, client, server, "169.254.18.1")
	return server, client, want
}

// TestServerReplaced ends the server and starts one that has its key and its
// address and has never heard of the client. The client goes on with the
// session that is gone; a new handshake brings the tunnel back at once.
func TestServerReplaced(t *testing.T) {
	both(t, func(t *testing.T, impl Implementation) {
		server, client, want := tunnelInUse(t, impl)
		client.rest(t)

		replace(t, server)
		in := listen(t, server.test, netip.MustParseAddrPort("169.254.18.1:7000"))
		out := listen(t, client.test, netip.MustParseAddrPort("0.0.0.0:0"))
		peers, err := server.Peers(tunnel)
		assert.NilError(t, err)
		assert.Assert(t, len(peers) == 1 && peers[0].LastHandshake.IsZero(), "the session was not lost: %+v", peers)

		start := time.Now()
		assert.NilError(t, client.Rehandshake(tunnel, public(1), netip.AddrPort{}, false))
		send(t, out, netip.MustParseAddrPort("169.254.18.1:7000"))
		receive(t, in)
		took := time.Since(start)
		t.Logf("back after %v", took.Round(time.Millisecond))
		assert.Assert(t, took < 10*time.Second, "it took %v", took) // 15 s without
		left := netstate.Diff(observe(t, client.NetNS), want)
		assert.Assert(t, left.Empty(), left.String())
	})
}

// replace ends a side with all that it has, and starts it again on an empty
// disk.
func replace(t *testing.T, s *side) {
	t.Helper()
	closeAlone(t, s)
	if s.impl == Kernel {
		s.test.Run("ip", "link", "del", tunnel)
	}
	s.cfg.StateDir = t.TempDir()
	s.open(t)
	converge(t, s.NetNS, serverState())
}
