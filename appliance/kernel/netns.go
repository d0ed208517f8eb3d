package kernel

import (
	"context"
	"net/netip"

	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// A NetNS is a handle on one network namespace.
type NetNS struct {
	cfg     Config
	changed chan struct{}
}

// Open returns a NetNS for the namespace of the calling thread. Its sockets
// stay bound to that namespace whatever thread later uses them.
func Open(cfg Config) (*NetNS, error) { return &NetNS{cfg: cfg, changed: make(chan struct{}, 1)}, nil }

// Changed yields a value after something of ours was touched by somebody
// else. Bursts are merged; a reader that is late misses nothing.
func (ns *NetNS) Changed() <-chan struct{} { return ns.changed }

// Observe returns what is in place of the things we own.
func (ns *NetNS) Observe(ctx context.Context) (netstate.State, error) { return netstate.State{}, nil }

// Apply carries out the changes. It goes on after a failure and returns all
// failures joined, so that one bad route does not hold back the others.
func (ns *NetNS) Apply(ctx context.Context, c netstate.Changes) error { return nil }

// Close releases the sockets. It changes nothing in the kernel, except that
// links of userspace WireGuard end with the process that serves them.
func (ns *NetNS) Close() error { return nil }

// Implementation says which WireGuard is in use: Kernel or Userspace.
func (ns *NetNS) Implementation() Implementation { return Kernel }

// Peers returns the live data of a WireGuard device's peers.
func (ns *NetNS) Peers(dev string) ([]PeerStatus, error) { return nil, nil }

// Features probes what this kernel can do, in a namespace of its own where
// it may make one.
func (ns *NetNS) Features(ctx context.Context) []Feature { return nil }

// RouteTo returns the path to dst, as "ip route get" does.
func (ns *NetNS) RouteTo(dst netip.Addr) (Path, error) { return Path{}, nil }

// LinkMTU returns the MTU of a link, ours or not.
func (ns *NetNS) LinkMTU(name string) (int, error) { return 0, nil }

// InNoRoutes returns how many packets of both families this namespace could
// not route (IpInNoRoutes + Ip6InNoRoutes).
func (ns *NetNS) InNoRoutes() (uint64, error) { return 0, nil }
