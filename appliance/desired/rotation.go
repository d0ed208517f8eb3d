package desired

import (
	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// A PeerNext is a key that the peer has said it may use soon, while the one before it is
// known as well.
type PeerNext struct {
	Key netstate.Key
	// PresharedKey stands for the key that belongs to it; zero: there is none.
	PresharedKey netstate.Fingerprint
	// InUse says that the last handshake was with it.
	InUse bool
}

// eitherKey returns the peer, and the same with its next key, if it has one. WireGuard takes
// handshakes with both, and has what the peer may send with one of them only: it has no
// network twice.
func (in GatewayInput) eitherKey(p netstate.WireGuardPeer) []netstate.WireGuardPeer {
	n := in.PeerNext
	if n == nil || in.Handover != nil || n.Key == p.PublicKey || n.Key == in.PublicKey {
		return []netstate.WireGuardPeer{p}
	}
	if _, blocked := in.BlockedKeys.Of(n.Key[:]); blocked {
		return []netstate.WireGuardPeer{p}
	}
	next := p
	next.PublicKey, next.PresharedKey = n.Key, n.PresharedKey
	if n.InUse {
		p.AllowedIPs = nil
	} else {
		next.AllowedIPs = nil
	}
	return []netstate.WireGuardPeer{p, next}
}

// CountingKey returns the index of the PublicKey that counts for the peer, the oldest one with
// a key that is not blocked; negative: there is none.
func (in GatewayInput) CountingKey() int {
	at := -1
	for i, k := range in.PublicKeys {
		_, blocked := in.BlockedKeys.Of(k.Key)
		if k.RemoteID == in.RemoteID && !k.Deleting && !blocked && len(k.Key) == len(netstate.Key{}) && (at < 0 || compareAge(k.Meta, in.PublicKeys[at].Meta) < 0) {
			at = i
		}
	}
	return at
}
