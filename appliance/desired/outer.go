package desired

import "github.com/isthmus-net/isthmus/appliance/netstate"

// outerPackets keeps the packets that carry the tunnels out of the connection
// table of the gateway: they are nothing that anybody translates here.
//
// The kernel says of such a packet that it came in by the tunnel that it carries
// (ip_output takes skb->dev, which is the link that encapsulated), and its
// source is a pod of this cluster. Where both clusters have the same networks it
// would look like one that came from the peer, and get an address of the peer's.
//
//	nft add rule … oifname != liqo-tunnel meta l4proto udp notrack
func (h *host) outerPackets() {
	h.state.Tables = append(h.state.Tables, netstate.Table{
		Family: netstate.FamilyINET, Name: OuterTable,
		Chains: []netstate.Chain{{
			Name: "output", Type: "filter", Hook: "output", Priority: asReceived, Policy: "accept",
			Rules: []netstate.FirewallRule{{
				Name:    "outer-packets",
				Matches: []netstate.Match{{Negate: true, Dir: "out", Dev: TunnelInterface}, {L4Proto: "udp"}},
				Action:  netstate.Action{Kind: netstate.NoTrack},
			}},
		}},
	})
}
