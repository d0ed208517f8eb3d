package kernel

import (
	"testing"

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
