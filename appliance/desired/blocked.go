package desired

import (
	"slices"

	"github.com/isthmus-net/isthmus/appliance/cluster"
)

// Blocked returns the Configuration that cuts the peer off. WireGuard has no peer then:
// it decrypts nothing of the peer's, and nothing is encrypted for it. One that is
// refused, or being deleted, cuts it off as well: whoever wrote it wants nothing of the
// peer to pass, and an error in another field does not change that.
func (in GatewayInput) Blocked() (cluster.Configuration, bool) {
	i := slices.IndexFunc(in.Configurations, func(c cluster.Configuration) bool { return c.RemoteID == in.RemoteID && c.Blocked })
	if i < 0 {
		return cluster.Configuration{}, false
	}
	return in.Configurations[i], true
}
