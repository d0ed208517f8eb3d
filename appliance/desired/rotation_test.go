package desired_test

import (
	"reflect"
	"slices"
	"testing"
	"time"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/desired"
	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// A peer that may have another key by now is known by both, and has its networks with the one
// that was heard last.
func TestPeerNext(t *testing.T) {
	in := romeGateway()
	before, _ := desired.Gateway(in)
	was := before.WireGuard[0].Peers[0]
	blocked := netstate.Key{8}
	in.BlockedKeys = cluster.BlockedKeys{{Fingerprint: cluster.FingerprintOf(blocked[:])}}
	shared := netstate.FingerprintOf([32]byte{7})
	for _, c := range []struct {
		name  string
		next  desired.PeerNext
		blank int // index of the peer without networks; -1: there is one peer
	}{
		{"not used yet", desired.PeerNext{Key: netstate.Key{9}, PresharedKey: shared}, 1},
		{"in use", desired.PeerNext{Key: netstate.Key{9}, PresharedKey: shared, InUse: true}, 0},
		{"the one that it has", desired.PeerNext{Key: was.PublicKey}, -1},
		{"that of this gateway", desired.PeerNext{Key: in.PublicKey}, -1},
		{"one that is blocked", desired.PeerNext{Key: blocked}, -1},
	} {
		in.PeerNext = &c.next
		state, _ := desired.Gateway(in)
		assert.NilError(t, state.Validate(), c.name)
		peers := state.WireGuard[0].Peers
		if c.blank < 0 {
			assert.Check(t, reflect.DeepEqual(peers, []netstate.WireGuardPeer{was}), c.name)
			continue
		}
		assert.Assert(t, is.Len(peers, 2), c.name)
		assert.Check(t, is.Equal(peers[0].PublicKey, was.PublicKey), c.name)
		assert.Check(t, is.Equal(peers[1].PublicKey, c.next.Key), c.name)
		assert.Check(t, is.Equal(peers[1].PresharedKey, shared), c.name)
		assert.Check(t, is.Equal(peers[1].Endpoint, was.Endpoint), c.name)
		assert.Check(t, is.Len(peers[c.blank].AllowedIPs, 0), c.name)
		assert.Check(t, slices.Equal(peers[1-c.blank].AllowedIPs, was.AllowedIPs), c.name)
	}
}

func TestCountingKey(t *testing.T) {
	at := func(n int) cluster.Meta { return cluster.Meta{Created: time.Unix(int64(n), 0)} }
	key := make([]byte, 32)
	gone := at(0)
	gone.Deleting = true
	leaked := append([]byte{1}, key[1:]...)
	in := desired.GatewayInput{RemoteID: "rome", BlockedKeys: cluster.BlockedKeys{{Fingerprint: cluster.FingerprintOf(leaked)}}}
	in.PublicKeys = []cluster.PublicKey{
		{Meta: gone, RemoteID: "rome", Key: key},
		{Meta: at(1), RemoteID: "oslo", Key: key},
		{Meta: at(2), RemoteID: "rome", Key: key[:31]},
		{Meta: at(2), RemoteID: "rome", Key: leaked},
		{Meta: at(4), RemoteID: "rome", Key: key},
		{Meta: at(3), RemoteID: "rome", Key: key},
	}
	assert.Equal(t, in.CountingKey(), 5)
	in.RemoteID = "milan"
	assert.Equal(t, in.CountingKey(), -1)
}
