package kernel

import (
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"time"

	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// Rehandshake makes the WireGuard of a device begin anew with a peer, now: its
// peer is removed and added again, so that the session is gone and the next
// packet begins a handshake. A valid endpoint is where the peer is dialled; else
// that is where its packets went last. [netstate.Diff] finds nothing to do
// afterwards: the link's alias goes on naming the endpoint that is configured.
//
// With newPort the device gets another port of the kernel's choice: what is
// between the two may remember a way that leads nowhere for the one that it has.
// So does conntrack where a NodePort is dialled before kube-proxy knows of it,
// for as long as somebody dials (nf_conntrack_udp_timeout is 30 s).
//
// WireGuard by itself holds on to a session that its peer has lost for 15 s
// (https://www.wireguard.com/papers/wireguard.pdf, KEEPALIVE_TIMEOUT and
// REKEY_TIMEOUT in §6), and has no other means to hurry it.
//
// After an error the peer may be missing: a pass adds it.
func (ns *NetNS) Rehandshake(dev string, key netstate.Key, endpoint netip.AddrPort, newPort bool) error {
	ns.lockAfter(peerOf{dev, key})
	defer ns.wgMu.Unlock()
	d, err := ns.readWireGuard(dev)
	if err != nil {
		return fmt.Errorf("wireguard %s: %w", dev, err)
	}
	i := slices.IndexFunc(d.Peers, func(p wgtypes.Peer) bool { return netstate.Key(p.PublicKey) == key })
	if i < 0 {
		return fmt.Errorf("wireguard %s: there is no peer %s", dev, key)
	}
	c := wgtypes.Config{Peers: anew(d.Peers[i], endpoint)}
	if newPort {
		c.ListenPort = new(int)
	}
	err = ns.wireGuard(dev).set(c)
	ns.begun[peerOf{dev, key}] = time.Now() // the initiation leaves at the end
	if err != nil {
		return fmt.Errorf("wireguard %s: add peer %s anew: %w", dev, key, err)
	}
	return nil
}

// A peerOf is a peer of a device.
type peerOf struct {
	dev string
	key netstate.Key
}

// beginAgain is the least time between two initiations that the same peer takes, with room
// for what delays one of them: 50 of them in a second (wireguard-go, device/constants.go, and
// INITIATIONS_PER_SECOND of the kernel, drivers/net/wireguard/messages.h). A peer that has
// dropped one is asked again after 5 s.
const beginAgain = 100 * time.Millisecond

// lockAfter takes wgMu once the peer would take another initiation.
func (ns *NetNS) lockAfter(p peerOf) {
	for {
		ns.wgMu.Lock()
		wait := time.Until(ns.begun[p].Add(beginAgain))
		if wait <= 0 {
			maps.DeleteFunc(ns.begun, func(_ peerOf, at time.Time) bool { return time.Since(at) >= beginAgain })
			return
		}
		ns.wgMu.Unlock()
		time.Sleep(wait)
	}
}

// anew returns how to remove a peer and to add it again. With a keepalive the
// kernel's WireGuard initiates by itself then; ours does always.
func anew(p wgtypes.Peer, endpoint netip.AddrPort) []wgtypes.PeerConfig {
	again := wgtypes.PeerConfig{
		PublicKey:                   p.PublicKey,
		PresharedKey:                &p.PresharedKey,
		Endpoint:                    p.Endpoint,
		PersistentKeepaliveInterval: &p.PersistentKeepaliveInterval,
		ReplaceAllowedIPs:           true,
		AllowedIPs:                  p.AllowedIPs,
	}
	if endpoint.IsValid() {
		again.Endpoint = net.UDPAddrFromAddrPort(endpoint)
	}
	return []wgtypes.PeerConfig{{PublicKey: p.PublicKey, Remove: true}, again}
}
