// Package desired computes what one host should have: from the objects that
// are addressed to it, and from what it knows of the network below it, to a
// [netstate.State]. Its functions are pure: the same input in any order gives
// an equal State.
//
// An object that cannot be compiled is left out as a whole, its [Result] says
// why, and the others are not disturbed. Which object is addressed to which
// host is decided here too (select.go).
package desired

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// Numbers of the appliance.
const (
	// GenevePort is the UDP port of Geneve unless the installation says
	// otherwise.
	GenevePort = 6091
	// WireGuardPort is the UDP port that a server listens on by default.
	WireGuardPort = 51840
	// TableMain is the kernel's main routing table (RT_TABLE_MAIN).
	TableMain = 254
)

// A Result is what became of one object that is addressed to this host. OK is
// false when the object was left out. A Message with OK is a warning: the
// object is in force, but not quite as it is written. Since is left zero.
type Result = cluster.Applied

// Underlay is what the host knows of the network that carries its tunnels.
type Underlay struct {
	// MTU is that of the link of the host's default route; 0: not known.
	MTU int
	// Paths holds the MTU of the route towards some addresses, where it is
	// known. It wins over MTU.
	Paths map[netip.Addr]int
	// Devs holds the link that packets to some addresses leave by, Sources the address
	// of this host that they have, and Routers the router that they go to first, where
	// there is one.
	Devs             map[netip.Addr]string
	Sources, Routers map[netip.Addr]netip.Addr
	// Links holds the names of those links that were asked for and are there.
	Links map[string]bool
	// Uplinks are the links by which packets of other hosts may come in, sorted: all
	// but those of the node's own pods. They are known where they were asked for; nil:
	// not known.
	Uplinks []string
}

// To returns the MTU towards an address; 0: not known.
func (u Underlay) To(remote netip.Addr) int {
	if mtu := u.Paths[remote.Unmap()]; mtu > 0 {
		return mtu
	}
	return u.MTU
}

// NodeInput is what [Node] computes from. Objects that are not addressed to
// the node are skipped, so the slices may hold more than that. Slices may be
// in any order.
type NodeInput struct {
	Name string // of the Node and of the InternalNode
	// Label is the value of labels that name the node, where it differs
	// from Name because that is longer than a label may be.
	Label string
	// NodeIP is the node's address below the tunnels; needed in the VXLAN
	// overlay only.
	NodeIP netip.Addr

	GenevePort   uint16 // 0: GenevePort
	RulePriority uint32 // first of the 100 rule priorities that are ours; 0: 300
	Underlay     Underlay

	Fabrics   []cluster.InternalFabric
	Tunnels   []cluster.GeneveTunnel
	Nodes     []cluster.InternalNode // with Geneve, this node's is enough
	Routes    []cluster.RouteConfiguration
	Firewalls []cluster.FirewallConfiguration

	// APIServers are where the API server answers: as this host dials it, and as it
	// calls itself; empty: not known. No object of a user's own cuts the host off
	// from them.
	APIServers []netip.AddrPort
	// LeftOut are objects that are not used, whatever they say.
	LeftOut []LeftOut

	// Problems lists what did not parse, and what was read differently
	// than it was written, in the objects above.
	Problems []cluster.InvalidError
}

// GatewayInput is what [Gateway] computes from. Objects that are not
// addressed to the gateway are skipped.
type GatewayInput struct {
	Name      string // of the GatewayServer or GatewayClient
	Namespace string // tenant namespace
	RemoteID  string // cluster ID of the peer
	Mode      string // cluster.Server or cluster.Client
	NodeName  string // of the Node that the gateway's pod runs on
	NodeLabel string // see NodeInput.Label

	// HostInterface is the node's end of the pair that leads to a gateway in a
	// network namespace of its node; empty: the gateway is a pod with a
	// network of its own.
	HostInterface string

	PodIP     netip.Addr // address of the gateway's pod, which carries the tunnels
	PublicKey netstate.Key
	// PresharedKey stands for the key that the gateway shares with the peer; zero: it has none.
	PresharedKey netstate.Fingerprint
	ListenPort   uint16 // of a server; 0: WireGuardPort
	ProbePort    uint16 // UDP port of the probe in the tunnel; 0: there is none
	// Handover is the temporary tunnel of an invitation; nil: there is none.
	Handover *Handover
	// PeerNext is another key that the peer may have by now; nil: there is none.
	PeerNext *PeerNext
	// PeerFormer is the key that the peer had before its last change of keys, by which it may
	// ask for a repair and do nothing else; nil: no such key is known.
	PeerFormer *PeerFormer
	// Repairs says that the peer knows this gateway by its former key only.
	Repairs bool
	// PeerEndpoint is where the peer is: for a client what its GatewayClient
	// says, resolved; for a server invalid, for its WireGuard learns it.
	PeerEndpoint netip.AddrPort
	// LearnedPorts are the UDP ports where the peer may be besides, as it says.
	LearnedPorts []uint16
	// PeerHeard is where WireGuard has last heard the peer; invalid: nowhere yet.
	PeerHeard netip.Addr
	// PeerMTU is the longest packet that the peer has room for in the tunnel, as it says:
	// the network below it, or who wrote its MTU; 0: it does not say.
	PeerMTU      int
	MTU          int    // of all links; 0: derive from the underlay
	GenevePort   uint16 // 0: GenevePort
	RulePriority uint32 // first of the 100 rule priorities that are ours; 0: 300
	Underlay     Underlay

	Configurations []cluster.Configuration
	PublicKeys     []cluster.PublicKey
	BlockedKeys    cluster.BlockedKeys
	Fabrics        []cluster.InternalFabric
	Tunnels        []cluster.GeneveTunnel
	Nodes          []cluster.InternalNode
	Routes         []cluster.RouteConfiguration
	Firewalls      []cluster.FirewallConfiguration
	APIServers     []netip.AddrPort // see NodeInput
	LeftOut        []LeftOut        // see NodeInput
	Problems       []cluster.InvalidError
}

// Remotes returns the underlay addresses that the MTU of a link depends on:
// those that Underlay.Paths is asked for.
func (in NodeInput) Remotes() []netip.Addr {
	var out []netip.Addr
	for _, f := range in.Fabrics {
		out = append(out, f.GatewayIP)
	}
	for _, n := range in.Nodes {
		if n.Name != in.Name {
			out = append(out, n.VTEP.IP)
		}
	}
	for _, a := range in.APIServers {
		out = append(out, a.Addr())
	}
	return addrs(append(out, in.podsOutside()...))
}

// NeedsUplinks reports whether Underlay.Uplinks is asked for.
func (in NodeInput) NeedsUplinks() bool { return len(in.own().PodNetworks) > 0 }

// podsOutside returns the addresses of those pods of the node that are known one by
// one, in a cluster where pods are outside of the podCIDRs of their nodes.
func (in NodeInput) podsOutside() []netip.Addr {
	own := in.own()
	var out []netip.Addr
	for _, p := range own.PodCIDRs {
		if p.IsSingleIP() && slices.ContainsFunc(own.PodNetworks, func(n netip.Prefix) bool { return n.Contains(p.Addr()) }) {
			out = append(out, p.Addr())
		}
	}
	return out
}

// HostInterfaces returns the links that lead from this node to gateways in
// namespaces of it: those that Underlay.Links is asked for.
func (in NodeInput) HostInterfaces() []string {
	var out []string
	for _, f := range in.Fabrics {
		if f.HostInterface != "" && f.GatewayNode == in.Name {
			out = append(out, f.HostInterface)
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// Remotes returns the underlay addresses that the MTU of a link depends on.
func (in GatewayInput) Remotes() []netip.Addr {
	out := []netip.Addr{in.peerAddr()}
	for _, n := range in.Nodes {
		out = append(out, underlayOf(n, in.NodeName))
	}
	for _, a := range in.APIServers {
		out = append(out, a.Addr())
	}
	return addrs(out)
}

// addrs sorts, and drops what is invalid or there twice.
func addrs(in []netip.Addr) []netip.Addr {
	in = slices.DeleteFunc(in, func(a netip.Addr) bool { return !a.IsValid() })
	slices.SortFunc(in, netip.Addr.Compare)
	return slices.Compact(in)
}

// compareRef orders objects by kind, namespace and name.
func compareRef(a, b cluster.Ref) int {
	return cmp.Or(
		strings.Compare(a.Kind, b.Kind),
		strings.Compare(a.Namespace, b.Namespace),
		strings.Compare(a.Name, b.Name))
}

// compareAge orders objects by age, the oldest first. Those of the same
// second are ordered by name, then namespace.
func compareAge(a, b cluster.Meta) int {
	return cmp.Or(
		a.Created.Compare(b.Created),
		strings.Compare(a.Name, b.Name),
		strings.Compare(a.Namespace, b.Namespace),
		strings.Compare(a.Kind, b.Kind))
}
