package desired_test

import (
	"slices"
	"testing"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/desired"
	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// The key that a peer had before leads to the exchange and to nothing else: it has an address
// of its own, which is forwarded nothing from and to.
func TestPeerFormer(t *testing.T) {
	in := romeGateway()
	before, _ := desired.Gateway(in)
	was := before.WireGuard[0].Peers[0]
	former, shared := netstate.Key{9}, netstate.FingerprintOf([32]byte{7})
	blocked := netstate.Key{8}
	in.BlockedKeys = cluster.BlockedKeys{{Fingerprint: cluster.FingerprintOf(blocked[:])}}
	for _, c := range []struct {
		name string
		key  netstate.Key
		kept bool
	}{
		{"a key of before", former, true},
		{"the one that it has", was.PublicKey, false},
		{"that of this gateway", in.PublicKey, false},
		{"one that is blocked", blocked, false},
	} {
		for _, mode := range []string{cluster.Server, cluster.Client} {
			in.Mode, in.PeerFormer = mode, &desired.PeerFormer{Key: c.key, PresharedKey: shared}
			state, _ := desired.Gateway(in)
			assert.NilError(t, state.Validate(), c.name)
			peers := state.WireGuard[0].Peers
			if !c.kept {
				assert.Check(t, is.Len(peers, 1), c.name)
				continue
			}
			own, peer := desired.ControlAddresses(mode)
			assert.Assert(t, is.Len(peers, 2), c.name)
			assert.Check(t, is.Equal(peers[1].PublicKey, former))
			assert.Check(t, is.Equal(peers[1].PresharedKey, shared))
			assert.Check(t, is.Equal(peers[1].Endpoint, peers[0].Endpoint))
			assert.Check(t, is.DeepEqual(texts(peers[1].AllowedIPs), []string{peer.String() + "/32"}))
			assert.Check(t, slices.Contains(state.Addresses, netstate.Address{Dev: desired.TunnelInterface, Prefix: own}))

			forward := chain(t, state, desired.ControlTable, "forward")
			assert.Assert(t, is.Len(forward, 2))
			for i, want := range []netstate.Match{{Dir: "src"}, {Dir: "dst"}} {
				assert.Check(t, is.Equal(forward[i].Action.Kind, netstate.Drop))
				assert.Check(t, is.Equal(forward[i].Matches[1].Dir, want.Dir))
				assert.Check(t, is.Equal(forward[i].Matches[1].Addr.From, peer))
			}
			var open []netstate.FirewallRule
			for _, r := range chain(t, state, desired.PeersRefusedTable, "input") {
				if r.Name == "control" {
					open = append(open, r)
				}
			}
			assert.Assert(t, is.Len(open, 1))
			port := open[0].Matches[len(open[0].Matches)-1].Ports
			assert.Check(t, is.Equal(port, netstate.PortRange{From: desired.ExchangePort, To: desired.ExchangePort}))
		}
	}
}

// A gateway that has nothing but its former key sends to that address, too.
func TestRepairs(t *testing.T) {
	in := romeGateway()
	before, _ := desired.Gateway(in)
	in.Repairs = true
	state, _ := desired.Gateway(in)
	assert.NilError(t, state.Validate())
	own, peer := desired.ControlAddresses(in.Mode)
	peers := state.WireGuard[0].Peers
	assert.Assert(t, is.Len(peers, 1))
	assert.Check(t, is.Len(peers[0].AllowedIPs, len(before.WireGuard[0].Peers[0].AllowedIPs)+1))
	assert.Check(t, is.Contains(texts(peers[0].AllowedIPs), peer.String()+"/32"))
	assert.Check(t, slices.Contains(state.Addresses, netstate.Address{Dev: desired.TunnelInterface, Prefix: own}))
	// It begins, and is not called.
	for _, r := range chain(t, state, desired.PeersRefusedTable, "input") {
		assert.Check(t, r.Name != "control")
	}
}

// A gateway that has nothing but its former key speaks to the peer's present one.
func TestRepairsWithFormer(t *testing.T) {
	in := romeGateway()
	in.Repairs, in.PeerFormer = true, &desired.PeerFormer{Key: netstate.Key{9}}
	state, _ := desired.Gateway(in)
	assert.NilError(t, state.Validate())
	_, peer := desired.ControlAddresses(in.Mode)
	peers := state.WireGuard[0].Peers
	assert.Assert(t, is.Len(peers, 1))
	assert.Check(t, slices.Contains(texts(peers[0].AllowedIPs), peer.String()+"/32"))
}
