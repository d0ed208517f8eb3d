package netstate

import "net/netip"

// A Family is the family of an nftables table (nft(8), "ADDRESS FAMILIES").
type Family string

// The families that tables may have. The one of the API that is missing, netdev,
// has a device for each chain, and the API has no field for it.
const (
	FamilyINET   Family = "inet"
	FamilyIPv4   Family = "ip"
	FamilyIPv6   Family = "ip6"
	FamilyARP    Family = "arp"
	FamilyBridge Family = "bridge"
)

// A Table is an nftables table of ours. It is replaced whole, in one
// transaction with all other tables that changed. Family and Name identify
// it.
type Table struct {
	Family Family
	Name   string
	Chains []Chain
	// Seen is set only in observed tables: the digest that the table was
	// written with. The rules of such a table have names only.
	Seen string
	// Made is set only in observed tables: what the table was written to
	// translate and not to track. It is nil where that is not known.
	Made []Translation
}

// A Chain is a base chain: Type (filter, nat, route), Hook, Priority and
// Policy are those of nft(8).
type Chain struct {
	Name     string
	Type     string
	Hook     string
	Priority int32
	Policy   string // accept or drop
	Rules    []FirewallRule
}

// A FirewallRule is one rule of a chain; its matches are ANDed.
type FirewallRule struct {
	Name    string // kept as the rule's comment
	Matches []Match
	Counter bool
	Action  Action
}

// A Match is one condition. Exactly one of Addr, Ports, L4Proto, Dev, ICMPError,
// ICMPRedirect, CTDir, CTMark and ToHost says what is looked at.
type Match struct {
	Negate bool
	// Dir is "src" or "dst" for addresses and ports, "in" or "out" for
	// devices.
	Dir  string
	Addr AddrRange
	// Of says whose address is looked at.
	Of      Header
	Ports   PortRange
	L4Proto string // tcp, udp, icmp, icmpv6
	// Dev is the name of a device, or the beginning of it before "*". AnyDev is any
	// device at all: what the host's own programs send has come in by none.
	Dev string
	// ICMPError matches ICMP and ICMPv6 messages that report an error about
	// another packet (RFC 792, RFC 4443 §2.1).
	ICMPError bool
	// ICMPRedirect matches the messages by which a router tells a host of a
	// better next hop (RFC 792, RFC 4861 §8).
	ICMPRedirect bool
	// CTDir matches packets that travel in one direction of their connection,
	// "original" or "reply"; an error about a packet travels the other way. CTMark
	// matches packets whose connection has one of these bits in its mark. What
	// conntrack does not know matches neither, negated or not.
	CTDir  string
	CTMark uint32
	// ToHost matches packets whose destination is an address of the host itself, or one
	// of a broadcast or multicast group, as the host's table of local addresses says: what
	// programs of the host would get. It is asked before NAT in a chain that is before NAT.
	ToHost bool
}

// AnyDev is the Dev of a Match for packets that have a device.
const AnyDev = "*"

// A Header says where an address is.
type Header string

// The headers. Those besides the packet's own are looked at in tables of IPv4 only.
const (
	OfPacket Header = "" // the packet's own
	// OfQuoted is the header of the packet that an ICMP error is about (RFC 792),
	// OfConnection that of the packet that began the connection, before any NAT.
	OfQuoted     Header = "quoted"
	OfConnection Header = "ct original"
)

// An AddrRange is an inclusive range of addresses.
type AddrRange struct{ From, To netip.Addr }

// A PortRange is an inclusive range of ports.
type PortRange struct{ From, To uint16 }

// An ActionKind says what a rule does to a packet that it matches.
type ActionKind string

// The actions.
const (
	Accept     ActionKind = "accept"
	Drop       ActionKind = "drop"
	Reject     ActionKind = "reject"
	NoTrack    ActionKind = "notrack"
	SetCTMark  ActionKind = "ct mark set"        // Action.Mark or Action.Map
	RestoreCT  ActionKind = "meta mark set ct"   // to the connection's mark
	SetMark    ActionKind = "meta mark set"      // Action.Mark; in a route chain the packet is routed anew
	ClampMSS   ActionKind = "tcp maxseg set"     // Action.MSS, 0: the route's MTU
	SNAT       ActionKind = "snat"               // Action.To or Action.Map
	DNAT       ActionKind = "dnat"               // Action.To or Action.Map
	Masquerade ActionKind = "masquerade"         // Action.Map, if only for the addresses in it
	SetSource  ActionKind = "source address set" // stateless, to Action.To's address; checksums corrected
	// SetPrefix gives one address of the packet, which Action.Dir and Action.Of name,
	// the prefix Action.To. It is stateless, keeps the host bits, corrects checksums,
	// and ends the chain, so no rule sees what another has made.
	SetPrefix ActionKind = "prefix set"
)

// An Action is what a rule does.
type Action struct {
	Kind ActionKind
	Mark uint32
	// Mask has the bits of the mark that SetCTMark sets, the others stay, and
	// that RestoreCT takes, the others are 0. No bits: all of them.
	Mask uint32
	MSS  uint16
	// To is the new address. With Prefix, the host bits are kept and only
	// the bits of the prefix replaced (nft(8) "prefix to").
	To     netip.Prefix
	Prefix bool
	// Dir ("src" or "dst") and Of name the address that SetPrefix changes: one of the
	// packet itself, or of the packet that an ICMP error quotes.
	Dir string
	Of  Header
	// Map, if it has entries, stands for one rule for each of them. The rule
	// does not match a packet whose address has no entry.
	Map AddrMap
}
