// Package kernel reads and writes the network configuration of one network
// namespace. It is the only package of the appliance that talks to the
// kernel: everything it is told to do arrives as [netstate.Changes], and
// everything it finds it returns as a [netstate.State].
//
// What is ours carries a mark that survives us: links an alias that begins
// with [AliasPrefix], routes and rules the protocol number [Protocol],
// nftables tables a name that begins with [TablePrefix]. Addresses are ours
// when they are on a link of ours, and so are the forwarding entries and the
// permanent neighbours of a VXLAN link of ours; what the kernel has learned
// there is its own. Nothing else is ever changed, except for what a
// [netstate.Setting] says of a link that is not ours.
package kernel

import (
	"errors"
	"log/slog"
	"net/netip"
	"time"

	"github.com/isthmus-net/isthmus/appliance/netstate"
)

const (
	// Protocol is the protocol number of our routes and rules (ip-route(8)
	// "protocol", ip-rule(8) "protocol").
	Protocol = 158
	// AliasPrefix begins the alias of every link of ours.
	AliasPrefix = "isthmus: "
	// TablePrefix begins the name of every nftables table of ours; the rest
	// is [netstate.Table.Name].
	TablePrefix = "isthmus-"
)

// An Implementation says who encrypts.
type Implementation string

// The implementations of WireGuard.
const (
	Auto      Implementation = "auto"      // the kernel's if it has one, else userspace
	Kernel    Implementation = "kernel"    // the kernel's, or an error
	Userspace Implementation = "userspace" // a tun device served by this process
)

// ErrUnsupported is wrapped by errors that say that this kernel, or what the
// process may do in it, lacks a feature.
var ErrUnsupported = errors.New("not supported here")

// Config is what a NetNS needs. The zero value is enough for hosts without
// WireGuard.
type Config struct {
	Logger *slog.Logger // optional
	// PrivateKey returns the private key of a WireGuard device. Required
	// when a State has WireGuard devices.
	PrivateKey func(dev string) ([32]byte, error)
	// PresharedKey returns the key that a device shares with a peer. Required when a
	// State has peers with one.
	PresharedKey func(dev string, peer netstate.Key) ([32]byte, error)
	// StateDir is where userspace WireGuard remembers the endpoints that it
	// has learned; empty: nowhere.
	StateDir       string
	Implementation Implementation // default Auto
	// NetNS is a file that stands for the network namespace to work in, such
	// as /run/netns/liqo-netns; empty: that of the calling thread. With it,
	// the calling thread's is the namespace around: WireGuard has its UDP
	// sockets there, and veth pairs their other ends.
	NetNS string
}

// PeerStatus is what WireGuard knows of a peer at one moment.
type PeerStatus struct {
	PublicKey     netstate.Key
	Endpoint      netip.AddrPort // where packets go now; invalid: not known
	LastHandshake time.Time      // zero: never
	Rx, Tx        uint64         // bytes
}

// A Path is the way out for a destination, as ip-route(8) "get" shows it.
type Path struct {
	Src netip.Addr
	Dev string
	MTU int // of the route if it has one, else of Dev
	// Via is the router that packets go to first; invalid: none, dst is on the link.
	Via netip.Addr
	// Ours says that Dev is a link of ours, or the other end of one.
	Ours bool
}

// A Feature is something that a kernel may lack. Err is nil when it is there
// and says why not otherwise.
type Feature struct {
	Name string
	Err  error
}

// Names of features.
const (
	FeatureVersion        = "kernel version"
	FeatureGeneve         = "geneve"
	FeatureVXLAN          = "vxlan"
	FeatureWireGuard      = "wireguard"
	FeatureTUN            = "tun"
	FeatureNFTables       = "nftables"
	FeatureNAT            = "nftables nat"
	FeatureNFTablesARP    = "nftables arp"
	FeatureNFTablesBridge = "nftables bridge"
	FeatureRules          = "policy routing"
)
