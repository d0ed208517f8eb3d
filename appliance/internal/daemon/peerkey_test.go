package daemon

import (
	"context"
	"net/netip"
	"slices"
	"testing"

	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"
	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/appliance/desired"
	"github.com/isthmus-net/isthmus/appliance/kernel"
	"github.com/isthmus-net/isthmus/appliance/netstate"
	"github.com/isthmus-net/isthmus/appliance/nettest"
)

// A pass that was told of the key that the peer had before does not take its networks back to
// that, and does the rest, whether the peer came with the other key before the pass changed WireGuard or meanwhile.
func TestPassTakesNothingBack(t *testing.T) {
	own, another := wgtypes.Key{1: 1, 31: 64}, wgtypes.Key{1: 2, 31: 64}
	before, next := netstate.Key(wgtypes.Key{1: 3, 31: 64}.PublicKey()), netstate.Key(wgtypes.Key{1: 4, 31: 64}.PublicKey())
	networks := []netip.Prefix{netip.MustParsePrefix("10.2.0.0/16")}
	with := func(private wgtypes.Key, at netstate.Key) netstate.State {
		w := netstate.WireGuard{Dev: desired.TunnelInterface, PublicKey: netstate.Key(private.PublicKey())}
		for _, key := range []netstate.Key{before, next} {
			peer := netstate.WireGuardPeer{PublicKey: key}
			if key == at {
				peer.AllowedIPs = networks
			}
			w.Peers = append(w.Peers, peer)
		}
		return netstate.State{Links: []netstate.Link{{Name: w.Dev, Kind: netstate.KindWireGuard, MTU: 1380}}, WireGuard: []netstate.WireGuard{w}}.Normalized()
	}
	for _, meanwhile := range []bool{false, true} {
		nettest.Need(t, "ip")
		test := nettest.Another(t)
		r := newRotating(nil, false)
		r.peer, r.next = before, next
		private, comes := own, func() {}
		cfg := kernel.Config{Implementation: implementation(t, test), PrivateKey: func(string) ([32]byte, error) {
			comes()
			return private, nil
		}}
		var ns *kernel.NetNS
		var err error
		test.Do(func() { ns, err = kernel.Open(cfg) })
		assert.NilError(t, err)
		t.Cleanup(func() { assert.Check(t, ns.Close()) })
		apply := func(target interface {
			Apply(ctx context.Context, c netstate.Changes) error
		}, want netstate.State) {
			t.Helper()
			have, err := ns.Observe(t.Context())
			assert.NilError(t, err)
			assert.NilError(t, target.Apply(t.Context(), netstate.Diff(have, want)))
		}
		apply(ns, with(own, before))

		log, _ := newLog(t, "gateway")
		gw := &gateway{host: &host{ns: ns, log: log}, rotating: r}
		if meanwhile {
			comes = func() {
				r.mu.Lock()
				r.inUse = true // and the one who moves its networks waits for the pass
				r.mu.Unlock()
			}
		} else {
			assert.NilError(t, ns.MovePeer(desired.TunnelInterface, before, next))
			r.inUse = true
		}
		private = another
		apply(tunnelTarget{watched{ns, newHealth()}, gw}, with(another, before))
		have, err := ns.Observe(t.Context())
		assert.NilError(t, err)
		i := slices.IndexFunc(have.WireGuard[0].Peers, func(p netstate.WireGuardPeer) bool { return p.PublicKey == next })
		assert.Assert(t, slices.Equal(have.WireGuard[0].Peers[i].AllowedIPs, networks), "%s", have)
		assert.Equal(t, have.WireGuard[0].PublicKey, netstate.Key(another.PublicKey()))
		// It has not brought in what it was to bring in: nobody is told that it has.
		in := desired.GatewayInput{}
		in.PublicKey, in.PeerNext = netstate.Key(another.PublicKey()), &desired.PeerNext{Key: next}
		gw.rotationApplied(in)
		assert.Equal(t, r.added, netstate.Key{})
	}
}
