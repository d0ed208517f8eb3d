package cluster

import (
	"net/netip"
	"slices"
	"time"
)

// Follow says which networks a peer may have besides those that are written.
type Follow struct {
	Ranges []netip.Prefix // that they have to be in
	Max    int            // how many
	Forget time.Time      // what was withdrawn by then is over
	// Problem says what can't be read of it, and what to write; empty: nothing. What is
	// followed already stays as it is then.
	Problem string
}

// Followed is a network that only the gateway of the peer has told.
type Followed struct {
	External   bool         // it is no pod network
	CIDR       netip.Prefix // as the peer calls it, and we do
	Withdrawn  time.Time    // the peer was seen to tell no more of it; zero: it tells it
	Generation int64        // of the spec with which it is followed
}

// Same reports whether two are of one kind and CIDR.
func (f Followed) Same(o Followed) bool { return f.External == o.External && f.CIDR == o.CIDR }

// Refused is a network that the gateway of the peer has told and that does not count.
type Refused struct {
	CIDR netip.Prefix
	Why  string
}

// Peer returns the networks of the peer as it calls them: those of the spec, and then those
// that are followed.
func (c *Configuration) Peer() CIDRs {
	out := CIDRs{Pod: slices.Clip(c.Remote.Pod), External: slices.Clip(c.Remote.External)}
	for _, f := range c.Followed {
		if f.External {
			out.External = append(out.External, f.CIDR)
		} else {
			out.Pod = append(out.Pod, f.CIDR)
		}
	}
	return out
}
