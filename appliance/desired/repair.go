package desired

import (
	"net/netip"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// ControlTable is the nftables table of a gateway whose peer may come with its former key, or
// that comes with its own.
const ControlTable = "control"

// A PeerFormer is a key that the peer had before its last change of keys. Who has it, which
// may be a peer whose cluster was restored, can reach the exchange and nothing else.
type PeerFormer struct {
	Key netstate.Key
	// PresharedKey is the fingerprint of the pre-shared key that was used with it; zero: none was.
	PresharedKey netstate.Fingerprint
}

// ControlAddresses returns the addresses of both ends of the tunnel for repairs: others than
// those of [TunnelAddresses], which WireGuard gives to one key only.
func ControlAddresses(mode string) (own netip.Prefix, peer netip.Addr) {
	server, client := netip.AddrFrom4([4]byte{169, 254, 18, 5}), netip.AddrFrom4([4]byte{169, 254, 18, 6})
	if mode == cluster.Client {
		return netip.PrefixFrom(client, 30), server
	}
	return netip.PrefixFrom(server, 30), client
}

// former returns the former key of the peer, where the tunnel is to take it; nil: it is not.
// It is not while this gateway has nothing but its own former key: the peer has its present one.
func (in GatewayInput) former() *PeerFormer {
	f := in.PeerFormer
	if f == nil || in.Handover != nil || in.Repairs || f.Key == in.PublicKey || in.PeerNext != nil && f.Key == in.PeerNext.Key {
		return nil
	}
	if _, blocked := in.BlockedKeys.Of(f.Key[:]); blocked {
		return nil
	}
	if i := in.CountingKey(); i < 0 || f.Key == netstate.Key(in.PublicKeys[i].Key) {
		return nil
	}
	return f
}

// controlled reports whether the tunnel has addresses for repairs.
func (in GatewayInput) controlled() bool {
	return in.former() != nil || in.Repairs && in.Handover == nil
}

// formerKey returns the peers of WireGuard, with the former key of this one, which has an
// address for repairs and no network, or with that address where this gateway is the one
// that has nothing but its former key.
func (in GatewayInput) formerKey(peers []netstate.WireGuardPeer) []netstate.WireGuardPeer {
	_, peer := ControlAddresses(in.Mode)
	f := in.former()
	switch {
	case f != nil:
		// A server that was restored does not know where the client is: the client comes.
		return append(peers, netstate.WireGuardPeer{
			PublicKey: f.Key, PresharedKey: f.PresharedKey, AllowedIPs: []netip.Prefix{hostPrefix(peer)},
			Endpoint: peers[0].Endpoint, Keepalive: peers[0].Keepalive,
		})
	case in.controlled():
		peers[0].AllowedIPs = append(peers[0].AllowedIPs, hostPrefix(peer))
	}
	return peers
}

// control gives the tunnel the address for repairs, and keeps what is from or to the one at
// the other end out of the networks of the cluster.
//
//	nft add rule … iifname liqo-tunnel ip saddr 169.254.18.6 counter drop
//	nft add rule … oifname liqo-tunnel ip daddr 169.254.18.6 counter drop
func (h *host) control(in GatewayInput) {
	if !in.controlled() {
		return
	}
	own, peer := ControlAddresses(in.Mode)
	h.state.Addresses = append(h.state.Addresses, netstate.Address{Dev: TunnelInterface, Prefix: own})
	var rules []netstate.FirewallRule
	for _, r := range []struct{ dir, end string }{{"in", "src"}, {"out", "dst"}} {
		rules = append(rules, netstate.FirewallRule{
			Name:    "control-" + r.dir,
			Matches: []netstate.Match{{Dir: r.dir, Dev: TunnelInterface}, {Dir: r.end, Addr: netstate.AddrRange{From: peer, To: peer}}},
			Counter: true, Action: netstate.Action{Kind: netstate.Drop},
		})
	}
	h.state.Tables = append(h.state.Tables, netstate.Table{
		Family: netstate.FamilyINET, Name: ControlTable,
		Chains: []netstate.Chain{{Name: "forward", Type: "filter", Hook: "forward", Policy: "accept", Rules: rules}},
	})
}
