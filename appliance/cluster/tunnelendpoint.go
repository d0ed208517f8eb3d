package cluster

import "net/netip"

// A TunnelEndpoint is all about a peering in one object: both clusters'
// networks, and where the peer's gateway is.
type TunnelEndpoint struct {
	Meta
	RemoteID string
	// Pod and External are the networks of either kind; invalid where they are
	// not written.
	Pod, External Mapping
	// Address is what to dial; empty: the peer dials.
	Address string
	Port    uint16 // 0: not written
	Key     []byte // public key of the peer's gateway; nil: not written
	// ServiceType is how the gateway is exposed, when the peer dials.
	ServiceType string
}

// A Mapping is one network of each of two clusters, and how the other one
// calls it.
type Mapping struct {
	Local, LocalNAT   netip.Prefix // LocalNAT invalid: as Local, or not known
	Remote, RemoteNAT netip.Prefix // RemoteNAT invalid: as Remote, or to be chosen
}

// Remote returns the networks of the peer, as it calls them itself.
func (e TunnelEndpoint) Remote() CIDRs {
	var out CIDRs
	if e.Pod.Remote.IsValid() {
		out.Pod = []netip.Prefix{e.Pod.Remote}
	}
	if e.External.Remote.IsValid() {
		out.External = []netip.Prefix{e.External.Remote}
	}
	return out
}
