package desired

import (
	"net/netip"

	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// HandoverTable is the nftables table of a gateway with a temporary tunnel.
const HandoverTable = "handover"

// HandoverPort is the TCP port of the gateway that has invited, on its own address in the
// tunnel (see package invitation).
const HandoverPort = 12346

// ExchangePort is the TCP port of every gateway, on its own address in the tunnel, by which
// it and the peer's tell each other of their clusters (see package exchange).
const ExchangePort = 12347

// A Handover is the temporary tunnel of an invitation. While there is one the gateway has
// no other peer, whatever PublicKeys say.
type Handover struct {
	// Key is the public key of the other end.
	Key netstate.Key
}

// temporary is the one peer while there is a handover. It may send from its address in
// the tunnel and from no other.
func (in GatewayInput) temporary(peer netip.Addr) netstate.WireGuardPeer {
	return netstate.WireGuardPeer{PublicKey: in.Handover.Key, AllowedIPs: []netip.Prefix{hostPrefix(peer)}}
}

// handOver keeps all that is not for the gateway itself out of a temporary tunnel: its
// key was in the text of an invitation, which many may have read. What it may reach of
// the gateway itself says refusePeersAtGateway.
//
//	nft add rule … iifname liqo-tunnel counter drop
//	nft add rule … oifname liqo-tunnel counter drop
func (h *host) handOver(in GatewayInput) {
	if in.Handover == nil {
		return
	}
	var rules []netstate.FirewallRule
	for _, dir := range []string{"in", "out"} {
		rules = append(rules, netstate.FirewallRule{
			Name: "handover-" + dir, Matches: []netstate.Match{{Dir: dir, Dev: TunnelInterface}}, Counter: true, Action: netstate.Action{Kind: netstate.Drop},
		})
	}
	h.state.Tables = append(h.state.Tables, netstate.Table{
		Family: netstate.FamilyINET, Name: HandoverTable,
		Chains: []netstate.Chain{{Name: "forward", Type: "filter", Hook: "forward", Policy: "accept", Rules: rules}},
	})
}
