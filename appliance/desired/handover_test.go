package desired_test

import (
	"net/netip"
	"slices"
	"testing"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/desired"
	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// A peer of which there is a key that is shared has a tunnel with that key, or none.
func TestPresharedKey(t *testing.T) {
	mine := netstate.FingerprintOf([32]byte{1})
	for _, c := range []struct {
		name, wanted string
		have         netstate.Fingerprint
		peers        int
		shared       netstate.Fingerprint
		refused      string
	}{
		{"none", "", netstate.Fingerprint{}, 1, netstate.Fingerprint{}, ""},
		{"one that nobody asks for", "", mine, 1, netstate.Fingerprint{}, ""},
		{"the one", mine.String(), mine, 1, mine, ""},
		{"not here yet", mine.String(), netstate.Fingerprint{}, 0, netstate.Fingerprint{}, "shares a key with the fingerprint " + mine.String()},
		{"another", mine.String(), netstate.FingerprintOf([32]byte{2}), 0, netstate.Fingerprint{}, "has no presharedKey with it"},
	} {
		in := romeGateway()
		in.PublicKeys[0].PresharedKey, in.PresharedKey = c.wanted, c.have
		state, results := desired.Gateway(in)
		peers := state.WireGuard[0].Peers
		assert.Assert(t, is.Len(peers, c.peers), c.name)
		if c.peers > 0 {
			assert.Check(t, is.Equal(peers[0].PresharedKey, c.shared), c.name)
		}
		assert.Check(t, is.Contains(resultOf(t, results, in.PublicKeys[0].Ref).Message, c.refused), c.name)
	}
}

// What is followed of what the peer tells it may send, like what is written.
func TestFollowedNetworks(t *testing.T) {
	in := romeGateway()
	more := netip.MustParsePrefix("10.64.0.0/16")
	before, _ := desired.Gateway(in)
	in.Configurations[0].Followed = []cluster.Followed{{CIDR: more}}
	after, _ := desired.Gateway(in)
	was, is := texts(before.WireGuard[0].Peers[0].AllowedIPs), texts(after.WireGuard[0].Peers[0].AllowedIPs)
	assert.Check(t, !slices.Contains(was, more.String()))
	assert.DeepEqual(t, slices.DeleteFunc(is, func(s string) bool { return s == more.String() }), was)
	assert.Check(t, len(after.WireGuard[0].Peers[0].AllowedIPs) == len(was)+1)
}

// While there is a temporary tunnel it is the only one, carries the addresses of its two
// ends alone, and leads to one port of a server.
func TestHandover(t *testing.T) {
	for _, mode := range []string{cluster.Server, cluster.Client} {
		in := romeGateway()
		in.Mode, in.ProbePort, in.Handover = mode, 12345, &desired.Handover{Key: key(7)}
		state, _ := desired.Gateway(in)
		assert.NilError(t, state.Validate())
		_, peer := desired.TunnelAddresses(mode)
		peers := state.WireGuard[0].Peers
		assert.Assert(t, is.Len(peers, 1))
		assert.Equal(t, peers[0].PublicKey, key(7))
		assert.DeepEqual(t, texts(peers[0].AllowedIPs), []string{peer.String() + "/32"})

		forward := chain(t, state, desired.HandoverTable, "forward")
		assert.Assert(t, is.Len(forward, 2))
		for i, dir := range []string{"in", "out"} {
			assert.Equal(t, forward[i].Action.Kind, netstate.Drop)
			assert.Assert(t, is.Len(forward[i].Matches, 1))
			assert.Equal(t, forward[i].Matches[0].Dir+" "+forward[i].Matches[0].Dev, dir+" "+desired.TunnelInterface)
		}
		var accepted []string
		for _, r := range chain(t, state, desired.PeersRefusedTable, "input") {
			if r.Action.Kind == netstate.Drop {
				break
			}
			accepted = append(accepted, r.Name)
		}
		want := []string{"answers"}
		if mode == cluster.Server {
			want = append(want, "handover")
		}
		assert.DeepEqual(t, accepted, want)
	}
	state, _ := desired.Gateway(romeGateway())
	in := romeGateway()
	in.Mode, in.PeerEndpoint, in.LearnedPorts = cluster.Client, netip.MustParseAddrPort("203.0.113.1:31840"), []uint16{31841, 31840}
	client, _ := desired.Gateway(in)
	assert.NilError(t, client.Validate())
	var ports []uint16
	for _, r := range chain(t, client, desired.PeersRefusedTable, "input") {
		if r.Name == "wireguard" {
			assert.Equal(t, r.Matches[1].Dir, "src")
			ports = append(ports, r.Matches[1].Ports.From)
		}
	}
	assert.DeepEqual(t, ports, []uint16{31840, 31841})
	exchange := chain(t, state, desired.PeersRefusedTable, "input")[1]
	assert.Equal(t, exchange.Name, "exchange")
	assert.Check(t, is.Contains(exchange.Matches, netstate.Match{Dir: "in", Dev: desired.TunnelInterface}))
	for _, table := range state.Tables {
		assert.Check(t, table.Name != desired.HandoverTable)
	}
}

func texts[T interface{ String() string }](list []T) []string {
	var out []string
	for _, x := range list {
		out = append(out, x.String())
	}
	return out
}

// chain returns the rules of a chain.
func chain(t *testing.T, s netstate.State, table, name string) []netstate.FirewallRule {
	t.Helper()
	for _, x := range s.Tables {
		for _, c := range x.Chains {
			if x.Name == table && c.Name == name {
				return c.Rules
			}
		}
	}
	t.Fatalf("there is no chain %s of table %s", name, table)
	return nil
}
