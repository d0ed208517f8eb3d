// Package netstate describes the configuration of one Linux network namespace
// as plain values: what is there (observed) and what should be there
// (desired), and what leads from one to the other ([Diff]).
//
// It knows nothing of Kubernetes and nothing of netlink. Every type prints
// itself in the notation of iproute2, nft or wg. A private key is never part
// of a State.
package netstate

import (
	"crypto/sha256"
	"net/netip"
)

// A State is everything the appliance owns in one network namespace. The
// zero value owns nothing; applying it removes all that was owned before.
type State struct {
	Links     []Link
	Settings  []Setting // of links that are not ours
	Addresses []Address
	FDB       []FDBEntry
	Neighbors []Neighbor
	Routes    []Route
	Rules     []Rule
	WireGuard []WireGuard
	Tables    []Table
}

// A LinkKind is the rtnetlink kind of a link (IFLA_INFO_KIND).
type LinkKind string

// The kinds of links that the appliance creates.
const (
	KindGeneve    LinkKind = "geneve"
	KindVXLAN     LinkKind = "vxlan"
	KindWireGuard LinkKind = "wireguard" // kernel WireGuard, or a tun device served by wireguard-go
	KindVeth      LinkKind = "veth"      // the end of a pair that is in this namespace
)

// A Link is a network device of ours. It is up.
type Link struct {
	Name   string // at most 15 bytes (IFNAMSIZ-1)
	Kind   LinkKind
	MTU    int // bytes; 0 leaves what the kernel chose
	MAC    MAC // zero leaves what the kernel chose, or where there is none
	Geneve Geneve
	VXLAN  VXLAN
	// Peer is the name of the other end of a veth pair, in the namespace
	// around this one: that of the host. It is empty for other kinds. The
	// pair belongs to this namespace, and Down is true of either end.
	Peer string
	// Description says, for people, where the link leads. It is part of the
	// link's alias (ip-link(8) "alias"), which also marks it as ours.
	Description string
	// Forwarding lets IPv4 packets that come in by this link be forwarded,
	// and RPFilter is its reverse-path filter (0 off, 1 strict, 2 loose; the
	// kernel takes the larger of this and conf/all). With AcceptLocal a
	// packet may come in whose source is an address of this host. They are
	// per-link values of /proc/sys/net/ipv4/conf, set through
	// IFLA_INET_CONF.
	Forwarding  bool
	RPFilter    int
	AcceptLocal bool
	// Down is true only of observed links: ours are up.
	Down bool
}

// A MAC is the link-layer address of an Ethernet link (IEEE 802, 48 bits).
type MAC [6]byte

// Geneve holds what a Geneve link needs (RFC 8926). It is zero for other
// kinds.
type Geneve struct {
	VNI    uint32     // 24 bits
	Remote netip.Addr // outer destination; packets from elsewhere are not ours
	Port   uint16     // UDP destination port
}

// VXLAN holds what a VXLAN link needs (RFC 7348). It is zero for other kinds.
// The link neither learns nor floods: it sends to whom the [FDBEntry] values
// name, and drops what is for others.
type VXLAN struct {
	VNI   uint32     // 24 bits
	Local netip.Addr // outer source, an address of this host
	Port  uint16     // UDP destination port
}

// A Setting is how a link that is not ours treats packets: the eth0 of a
// gateway's pod, which the CNI made. Only what is given is set, and it is left
// as it is when the Setting goes: nobody can say what it was before.
type Setting struct {
	Dev        string
	Forwarding bool // of IPv4, as in Link
}

// An FDBEntry says behind which host a station of a VXLAN link of ours is
// (bridge(8) "fdb"): what is for MAC goes to Remote.
type FDBEntry struct {
	Dev    string
	MAC    MAC
	Remote netip.Addr
}

// A Neighbor is a permanent entry of the neighbour table (ip-neighbour(8)) of
// a link of ours: nobody is asked who has the address.
type Neighbor struct {
	Dev  string
	Addr netip.Addr
	MAC  MAC
}

// An Address is an address of a link of ours.
type Address struct {
	Dev    string
	Prefix netip.Prefix // with host bits
}

// A RouteType is the type of a route (ip-route(8)).
type RouteType string

// The types of routes that the appliance installs; the zero value is unicast.
const (
	Unicast     RouteType = ""
	Unreachable RouteType = "unreachable"
	// Throw ends the lookup in this table: the next rule has its say.
	Throw RouteType = "throw"
)

// A Scope is the scope of a route (ip-route(8)); the zero value is global.
type Scope string

// The scopes of the API.
const (
	ScopeGlobal  Scope = ""
	ScopeSite    Scope = "site"
	ScopeLink    Scope = "link"
	ScopeHost    Scope = "host"
	ScopeNowhere Scope = "nowhere"
)

// A Route is one entry of a routing table. It is comparable: two routes are
// the same configuration if and only if they are ==. Table and Dst identify
// it.
type Route struct {
	Table  uint32
	Dst    netip.Prefix // masked
	Type   RouteType
	Via    netip.Addr // invalid: directly on the link
	Dev    string     // empty for unreachable
	Src    netip.Addr // preferred source; invalid: the kernel's choice
	Scope  Scope
	OnLink bool // Via is taken to be on Dev although no route says so
	// MTU is that of the path as far as it is known; 0: that of the link. What
	// routers say on the way may lower it.
	MTU int
	// Metric and Other are set only in observed routes: what the appliance
	// never writes, so that such a route differs from every desired one.
	Metric uint32
	Other  string
}

// A Rule is one policy-routing rule (ip-rule(8)). It is comparable.
type Rule struct {
	Priority uint32
	IPv6     bool         // the family, where neither Src nor Dst tells
	Src, Dst netip.Prefix // invalid: any
	IIF, OIF string       // empty: any
	Mark     uint32
	Mask     uint32 // 0 with a Mark: all bits
	// Not makes it a rule for all packets of the family that the selectors are
	// not for (ip-rule(8) "not").
	Not bool
	// Table is the routing table to look in. The other three are used instead of
	// it. Unreachable ends the lookup with an error (ENETUNREACH, counted in
	// IpInNoRoutes). Goto is the priority of a later rule: the lookup goes on
	// there, and if there is no such rule, with the next one. Nop does nothing; it
	// is there so that a Goto can lead to it.
	Table       uint32
	Unreachable bool
	Goto        uint32
	Nop         bool
	// Other is set only in observed rules: selectors that the appliance
	// never writes, so that such a rule differs from every desired one.
	Other string
}

// A Key is a Curve25519 public key (RFC 7748).
type Key [32]byte

// A Fingerprint stands for a pre-shared key: the first 8 bytes of its SHA-256. Zero: there
// is none.
type Fingerprint [8]byte

// FingerprintOf returns the fingerprint of a pre-shared key. Of 32 zeros, which is none
// (wg(8)), it is zero.
func FingerprintOf(key [32]byte) Fingerprint {
	if key == [32]byte{} {
		return Fingerprint{}
	}
	sum := sha256.Sum256(key[:])
	return Fingerprint(sum[:8])
}

// WireGuard is the configuration of one WireGuard device. No secret is part of it: of the
// private key there is the public half, of a pre-shared key a fingerprint, so that a
// change is seen.
type WireGuard struct {
	Dev        string
	ListenPort uint16 // 0: the kernel's choice
	PublicKey  Key    // of this device
	Peers      []WireGuardPeer
}

// A WireGuardPeer is a peer of a device.
type WireGuardPeer struct {
	PublicKey Key
	// PresharedKey stands for the key that both ends have besides; zero: none.
	PresharedKey Fingerprint
	// Endpoint is the address to dial as configured; invalid for a peer that
	// dials us. The endpoint that WireGuard has learned since is kept as
	// long as this value does not change.
	Endpoint   netip.AddrPort
	AllowedIPs []netip.Prefix
	// Keepalive is the persistent keepalive in seconds; 0: off.
	Keepalive int
}
