package desired

import (
	"slices"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/netstate"
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

// BlockedKey returns the key by which the peer is cut off: one that is blocked, where the
// peer has no other one. In a temporary tunnel it is that of whom the invitation names.
func (in GatewayInput) BlockedKey() (cluster.BlockedKey, bool) {
	if in.Handover != nil {
		return in.BlockedKeys.Of(in.Handover.Key[:])
	}
	var found cluster.BlockedKey
	any := false
	for _, k := range in.PublicKeys {
		if k.RemoteID != in.RemoteID || k.Deleting || len(k.Key) != len(netstate.Key{}) {
			continue
		}
		blocked, is := in.BlockedKeys.Of(k.Key)
		if !is {
			return cluster.BlockedKey{}, false
		}
		found, any = blocked, true
	}
	return found, any
}
