package kernel

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"time"

	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// A wgDevice is a WireGuard device, whoever serves it.
type wgDevice interface {
	get() (*wgtypes.Device, error)
	set(wgtypes.Config) error
}

// wireGuard returns the device of a link. wgMu is held.
func (ns *NetNS) wireGuard(dev string) wgDevice {
	if u := ns.user[dev]; u != nil {
		return u
	}
	return kernelDevice{ns, dev}
}

// A kernelDevice is served by the kernel.
type kernelDevice struct {
	ns   *NetNS
	name string
}

func (d kernelDevice) get() (*wgtypes.Device, error) {
	w, err := d.ns.wg.Device(d.name)
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("there is no wireguard link %s: %w", d.name, err)
	}
	return w, err
}

func (d kernelDevice) set(c wgtypes.Config) error { return d.ns.wg.ConfigureDevice(d.name, c) }

// observeWireGuard returns the configuration of our WireGuard links.
func (ns *NetNS) observeWireGuard(links linkTable) ([]netstate.WireGuard, error) {
	ns.wgMu.Lock()
	defer ns.wgMu.Unlock()
	var out []netstate.WireGuard
	var errs []error
	for name, l := range links.byName {
		if !l.ours || l.state.Kind != netstate.KindWireGuard {
			continue
		}
		d, err := ns.readWireGuard(name)
		if err != nil {
			errs = append(errs, fmt.Errorf("wireguard %s: %w", name, err))
			continue
		}
		out = append(out, configuration(name, d, l.alias))
	}
	return out, errors.Join(errs...)
}

// configuration is what a device is configured to, with the endpoints that the
// alias of its link says. What peers learn and count is not part of it.
func configuration(name string, d *wgtypes.Device, a alias) netstate.WireGuard {
	w := netstate.WireGuard{Dev: name, ListenPort: uint16(d.ListenPort), PublicKey: netstate.Key(d.PublicKey)}
	for _, p := range d.Peers {
		peer := netstate.WireGuardPeer{
			PublicKey:    netstate.Key(p.PublicKey),
			PresharedKey: netstate.FingerprintOf(p.PresharedKey),
			AllowedIPs:   prefixes(p.AllowedIPs),
			Keepalive:    int(p.PersistentKeepaliveInterval / time.Second),
		}
		if p.Endpoint != nil { // else it has lost what it was given
			peer.Endpoint = a.endpointOf(peer.PublicKey)
		}
		w.Peers = append(w.Peers, peer)
	}
	return w
}

// setWireGuard brings a device to the configuration, changing only what
// differs: a peer that stays keeps its session and the endpoint it learned.
func (ns *NetNS) setWireGuard(want netstate.WireGuard) error {
	links, err := ns.listLinks()
	if err != nil {
		return err
	}
	l, ok := links.byName[want.Dev]
	if !ok || !l.ours {
		return errors.New("there is no such link of ours")
	}
	if err := ns.configure(want, l.alias); err != nil {
		return err
	}
	l.alias.endpoints = encodeEndpoints(want.Peers)
	return ns.setAlias(l.index, l.alias)
}

// configure is setWireGuard for a device whose link has the alias.
func (ns *NetNS) configure(want netstate.WireGuard, al alias) error {
	ns.wgMu.Lock()
	defer ns.wgMu.Unlock()
	have, err := ns.readWireGuard(want.Dev)
	if err != nil {
		return err
	}
	shared, err := ns.presharedKeys(want)
	if err != nil {
		return err
	}
	c := wgtypes.Config{Peers: diffPeers(have.Peers, want.Peers, al, shared)}
	if netstate.Key(have.PublicKey) != want.PublicKey {
		key, err := ns.privateKey(want)
		if err != nil {
			return err
		}
		c.PrivateKey = &key
		if first := presharedFirst(c.Peers); len(first.Peers) > 0 {
			if err := ns.wireGuard(want.Dev).set(first); err != nil {
				return err
			}
		}
	}
	if port := int(want.ListenPort); port != 0 && port != have.ListenPort {
		c.ListenPort = &port
	}
	ns.memory.recall(want.Dev, want.Peers, c.Peers)
	if err := ns.wireGuard(want.Dev).set(c); err != nil {
		if c.ListenPort != nil {
			return fmt.Errorf("listen port %d: %w", *c.ListenPort, err)
		}
		return err
	}
	return nil
}

// presharedFirst has peers that stay take their pre-shared keys, and nothing else. WireGuard
// takes its own private key before anything of a peer, and a packet in between begins a
// handshake: an answer that comes before the new pre-shared key is there counts for nothing,
// and the next one is asked for after 5 s (REKEY_TIMEOUT, §6.1 of the paper). A session
// does not depend on the pre-shared key any more.
func presharedFirst(peers []wgtypes.PeerConfig) wgtypes.Config {
	var c wgtypes.Config
	for _, p := range peers {
		if p.UpdateOnly && p.PresharedKey != nil {
			c.Peers = append(c.Peers, wgtypes.PeerConfig{PublicKey: p.PublicKey, UpdateOnly: true, PresharedKey: p.PresharedKey})
		}
	}
	return c
}

// privateKey returns the private key that belongs to the public key of the
// configuration.
func (ns *NetNS) privateKey(w netstate.WireGuard) (wgtypes.Key, error) {
	if ns.cfg.PrivateKey == nil {
		return wgtypes.Key{}, errors.New("no private keys here: kernel.Config.PrivateKey is not set")
	}
	raw, err := ns.cfg.PrivateKey(w.Dev)
	if err != nil {
		return wgtypes.Key{}, fmt.Errorf("private key: %w", err)
	}
	key := wgtypes.Key(raw)
	if netstate.Key(key.PublicKey()) != w.PublicKey {
		return wgtypes.Key{}, fmt.Errorf("the private key belongs to public key %s, not to %s: the two halves in the Secret do not match, or one is older", key.PublicKey(), w.PublicKey)
	}
	return key, nil
}

// presharedKeys returns the pre-shared keys of those peers of the configuration that
// have one.
func (ns *NetNS) presharedKeys(w netstate.WireGuard) (map[netstate.Key]wgtypes.Key, error) {
	out := map[netstate.Key]wgtypes.Key{}
	for _, p := range w.Peers {
		if p.PresharedKey == (netstate.Fingerprint{}) {
			continue
		}
		if ns.cfg.PresharedKey == nil {
			return nil, errors.New("no pre-shared keys here: kernel.Config.PresharedKey is not set")
		}
		raw, err := ns.cfg.PresharedKey(w.Dev, p.PublicKey)
		if err != nil {
			return nil, fmt.Errorf("pre-shared key of peer %s: %w", p.PublicKey, err)
		}
		if got := netstate.FingerprintOf(raw); got != p.PresharedKey {
			return nil, fmt.Errorf("the pre-shared key of peer %s has the fingerprint %s, and that with %s is wanted: one of the two is older", p.PublicKey, got, p.PresharedKey)
		}
		out[p.PublicKey] = raw
	}
	return out, nil
}

// diffPeers returns what to change in the peers of a device whose link has
// the alias. Peers that are not in shared are to have no pre-shared key.
func diffPeers(have []wgtypes.Peer, want []netstate.WireGuardPeer, al alias, shared map[netstate.Key]wgtypes.Key) []wgtypes.PeerConfig {
	var remove, change []wgtypes.PeerConfig
	old := map[netstate.Key]wgtypes.Peer{}
	for _, p := range have {
		key := netstate.Key(p.PublicKey)
		old[key] = p
		if !slices.ContainsFunc(want, func(w netstate.WireGuardPeer) bool { return w.PublicKey == key }) {
			remove = append(remove, wgtypes.PeerConfig{PublicKey: p.PublicKey, Remove: true})
		}
	}
	for _, w := range want {
		p, ok := old[w.PublicKey]
		configured := al.endpointOf(w.PublicKey)
		if ok && configured.IsValid() && !w.Endpoint.IsValid() {
			// WireGuard can't unset an endpoint.
			remove = append(remove, wgtypes.PeerConfig{PublicKey: p.PublicKey, Remove: true})
			ok = false
		}
		keepalive := time.Duration(w.Keepalive) * time.Second
		c := wgtypes.PeerConfig{PublicKey: wgtypes.Key(w.PublicKey), UpdateOnly: ok}
		key := shared[w.PublicKey]
		if ok && key != p.PresharedKey || !ok && key != (wgtypes.Key{}) {
			c.PresharedKey = &key
		}
		if !ok || keepalive != p.PersistentKeepaliveInterval {
			c.PersistentKeepaliveInterval = &keepalive
		}
		if !ok || !samePrefixes(w.AllowedIPs, prefixes(p.AllowedIPs)) {
			c.ReplaceAllowedIPs, c.AllowedIPs = true, ipNets(w.AllowedIPs)
		}
		if w.Endpoint.IsValid() && (!ok || configured != w.Endpoint || p.Endpoint == nil) {
			c.Endpoint = net.UDPAddrFromAddrPort(w.Endpoint)
		}
		if !ok || c.PresharedKey != nil || c.PersistentKeepaliveInterval != nil || c.ReplaceAllowedIPs || c.Endpoint != nil {
			change = append(change, c)
		}
	}
	return append(remove, change...)
}

// Peers returns the live data of a WireGuard device's peers.
func (ns *NetNS) Peers(dev string) ([]PeerStatus, error) {
	ns.wgMu.Lock()
	d, err := ns.readWireGuard(dev)
	ns.wgMu.Unlock()
	if err != nil {
		return nil, fmt.Errorf("wireguard %s: %w", dev, err)
	}
	out := make([]PeerStatus, 0, len(d.Peers))
	for _, p := range d.Peers {
		out = append(out, PeerStatus{
			PublicKey:     netstate.Key(p.PublicKey),
			Endpoint:      addrPort(p.Endpoint),
			LastHandshake: p.LastHandshakeTime,
			Rx:            uint64(p.ReceiveBytes),
			Tx:            uint64(p.TransmitBytes),
		})
	}
	return out, nil
}

// hasNoPeers reports whether a device has none, as a new one.
func (ns *NetNS) hasNoPeers(dev string) bool {
	ns.wgMu.Lock()
	defer ns.wgMu.Unlock()
	d, err := ns.readWireGuard(dev)
	return err == nil && len(d.Peers) == 0
}

func addrPort(a *net.UDPAddr) netip.AddrPort {
	if a == nil {
		return netip.AddrPort{}
	}
	ap := a.AddrPort()
	return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
}

func samePrefixes(a, b []netip.Prefix) bool {
	sorted := func(ps []netip.Prefix) []netip.Prefix {
		ps = slices.Clone(ps)
		slices.SortFunc(ps, netip.Prefix.Compare)
		return slices.Compact(ps)
	}
	return slices.Equal(sorted(a), sorted(b))
}

func prefixes(nets []net.IPNet) []netip.Prefix {
	var out []netip.Prefix
	for _, n := range nets {
		ip, ok := netip.AddrFromSlice(n.IP)
		ones, _ := n.Mask.Size()
		if ok {
			out = append(out, netip.PrefixFrom(ip.Unmap(), ones))
		}
	}
	return out
}

func ipNets(ps []netip.Prefix) []net.IPNet {
	out := make([]net.IPNet, 0, len(ps))
	for _, p := range ps {
		p = p.Masked()
		out = append(out, net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())})
	}
	return out
}
