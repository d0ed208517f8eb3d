package kernel

import (
	"fmt"
	"slices"

	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// MovePeer gives what one peer of a WireGuard device may send to another one that there is,
// at once: every packet is somebody's before and after. The next pass has to want the same.
func (ns *NetNS) MovePeer(dev string, from, to netstate.Key) error {
	ns.wgMu.Lock()
	defer ns.wgMu.Unlock()
	d, err := ns.readWireGuard(dev)
	if err != nil {
		return fmt.Errorf("wireguard %s: %w", dev, err)
	}
	has := func(key netstate.Key) int {
		return slices.IndexFunc(d.Peers, func(p wgtypes.Peer) bool { return netstate.Key(p.PublicKey) == key })
	}
	i, j := has(from), has(to)
	if i < 0 || j < 0 {
		return fmt.Errorf("wireguard %s: there are no two peers %s and %s", dev, from, to)
	}
	if len(d.Peers[i].AllowedIPs) == 0 {
		return nil // a pass has moved them
	}
	// WireGuard takes a network away from the peer that had it.
	c := wgtypes.Config{Peers: []wgtypes.PeerConfig{{PublicKey: wgtypes.Key(to), UpdateOnly: true, ReplaceAllowedIPs: true, AllowedIPs: d.Peers[i].AllowedIPs}}}
	if err := ns.wireGuard(dev).set(c); err != nil {
		return fmt.Errorf("wireguard %s: move the networks of peer %s to %s: %w", dev, from, to, err)
	}
	return nil
}
