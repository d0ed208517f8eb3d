package kernel

import (
	"net/netip"
	"testing"
	"time"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// What a peer may send moves to its other key and back, as a pass would have it.
func TestMovePeer(t *testing.T) {
	both(t, func(t *testing.T, impl Implementation) {
		server, _ := tunnelSides(t, impl)
		want := serverState()
		first := want.WireGuard[0].Peers[0]
		second := first
		second.PublicKey, second.AllowedIPs = public(9), nil
		want.WireGuard[0].Peers = []netstate.WireGuardPeer{first, second}
		converge(t, server.NetNS, want)
		for range 2 {
			assert.NilError(t, server.MovePeer(tunnel, first.PublicKey, second.PublicKey))
			first.AllowedIPs, second.AllowedIPs = second.AllowedIPs, first.AllowedIPs
			want.WireGuard[0].Peers = []netstate.WireGuardPeer{first, second}
			left := netstate.Diff(observe(t, server.NetNS), want)
			assert.Assert(t, left.Empty(), left.String())
			// They have moved already, by a pass.
			assert.NilError(t, server.MovePeer(tunnel, first.PublicKey, second.PublicKey))
			left = netstate.Diff(observe(t, server.NetNS), want)
			assert.Assert(t, left.Empty(), left.String())
			first, second = second, first
		}
		assert.ErrorContains(t, server.MovePeer(tunnel, first.PublicKey, public(8)), "there are no two peers")
	})
}

// Who looks for a handshake, moves what a peer may send, or begins anew, does not wait for a
// pass: packets are lost meanwhile.
func TestWireGuardWaitsForNoPass(t *testing.T) {
	both(t, func(t *testing.T, impl Implementation) {
		server, _ := tunnelSides(t, impl)
		want := serverState()
		want.WireGuard[0].Peers = append(want.WireGuard[0].Peers, netstate.WireGuardPeer{PublicKey: public(9)})
		converge(t, server.NetNS, want)

		server.mu.Lock() // as Observe and Apply do
		defer server.mu.Unlock()
		done := make(chan struct{})
		go func() {
			defer close(done)
			peers, err := server.Peers(tunnel)
			assert.Check(t, err)
			assert.Check(t, len(peers) == 2)
			assert.Check(t, server.MovePeer(tunnel, public(2), public(9)))
			assert.Check(t, server.Rehandshake(tunnel, public(9), netip.AddrPort{}, false))
		}()
		select {
		case <-done:
		case <-time.After(time.Minute):
			t.Error("it waits for the pass")
		}
	})
}
