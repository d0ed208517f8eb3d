package daemon

import (
	"context"
	"slices"
	"time"

	"github.com/isthmus-net/isthmus/appliance/desired"
	"github.com/isthmus-net/isthmus/appliance/kernel"
	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// followPeer has what the peer may send go with the key that had the last handshake, and
// reports whether that is another one than before.
func (gw *gateway) followPeer() bool {
	r := gw.rotating
	r.mu.Lock()
	c, now, inUse := r.state.Candidate(r.over), r.peer, r.inUse
	r.mu.Unlock()
	if c == nil {
		return false
	}
	peers, err := gw.ns.Peers(desired.TunnelInterface)
	if err != nil {
		return false
	}
	last := func(key netstate.Key) (time.Time, bool) {
		i := slices.IndexFunc(peers, func(p kernel.PeerStatus) bool { return p.PublicKey == key })
		if i < 0 {
			return time.Time{}, false
		}
		return r.handshake(key, peers[i].LastHandshake), true
	}
	next := netstate.Key(*c.Key)
	before, known := last(now)
	after, added := last(next)
	if !known || !added || after.After(before) == inUse {
		return false
	}
	r.mu.Lock()
	r.inUse = !inUse
	r.mu.Unlock()
	from, to := now, next
	if inUse {
		from, to = next, now
	}
	gw.movePeer(from, to)
	gw.log.Info("the peer's last handshake was with its other key", "publicKey", to)
	notify(gw.repair)
	return true
}

// A tunnelTarget is the Target of a gateway. The peer may come with its other key at any time.
// WireGuard then expects the peer's networks with that key, and a pass that has begun before must
// not give them back to the other one.
type tunnelTarget struct {
	watched
	gw *gateway
}

// Apply implements agent.Target.
func (t tunnelTarget) Apply(ctx context.Context, c netstate.Changes) error {
	r := t.gw.rotating
	if r == nil {
		return t.watched.Apply(ctx, c)
	}
	if from, to, overtaken := r.noteOvertaken(); overtaken {
		c.SetWireGuard = withNetworksMoved(c.SetWireGuard, from, to)
	}
	err := t.watched.Apply(ctx, c)
	if from, to, overtaken := r.noteOvertaken(); overtaken && len(c.SetWireGuard) > 0 {
		t.gw.movePeer(from, to)
	}
	return err
}

// noteOvertaken reports whether the peer has come with its other key since the pass was told which
// one it has. Then the peer's networks belong to the key to, and the pass would give them to the
// key from. It notes that, too: what such a pass does to WireGuard does not count as applied, and
// followPeer has asked for another pass.
func (r *rotating) noteOvertaken() (from, to netstate.Key, overtaken bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.overtaken = r.overtaken || r.given != r.inUse
	from, to = r.peer, r.next
	if !r.inUse {
		from, to = to, from
	}
	return from, to, r.overtaken
}

// withNetworksMoved returns the configurations, with the networks of the peer from given to the peer to.
func withNetworksMoved(all []netstate.WireGuard, from, to netstate.Key) []netstate.WireGuard {
	all = slices.Clone(all)
	for i := range all {
		peers := slices.Clone(all[i].Peers)
		at := func(key netstate.Key) int {
			return slices.IndexFunc(peers, func(p netstate.WireGuardPeer) bool { return p.PublicKey == key })
		}
		if a, b := at(from), at(to); a >= 0 && b >= 0 && len(peers[a].AllowedIPs) > 0 {
			peers[a].AllowedIPs, peers[b].AllowedIPs = nil, peers[a].AllowedIPs
			all[i].Peers = peers
		}
	}
	return all
}

// movePeer has WireGuard expect the peer's networks with its other key.
func (gw *gateway) movePeer(from, to netstate.Key) {
	if err := gw.ns.MovePeer(desired.TunnelInterface, from, to); err != nil {
		gw.log.Warn("the peer has another key, and its networks did not move with it; a pass moves them", "err", err)
	}
}

// handshake returns when the last handshake with a key of the peer was. WireGuard says that it
// was at is; an earlier answer counts where that was later.
func (r *rotating) handshake(key netstate.Key, is time.Time) time.Time {
	r.mu.Lock()
	defer r.mu.Unlock()
	if is.After(r.handshakes[key]) {
		r.handshakes[key] = is
	}
	return r.handshakes[key]
}
