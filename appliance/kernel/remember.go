package kernel

import (
	"encoding/json"
	"errors"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// rememberEvery is how old a remembered endpoint can be.
const rememberEvery = time.Second

// A memory holds where the peers of our WireGuard devices were last. A peer
// that dials us has no configured endpoint: WireGuard learns it, and it is
// lost with the device. A new device could not reach such a peer, and the peer
// would go on using a session that only the old one knew, for 15 s
// (https://www.wireguard.com/papers/wireguard.pdf, KEEPALIVE_TIMEOUT and
// REKEY_TIMEOUT in §6). A device that starts from what is remembered can
// initiate.
//
// It is a place to start from and no configuration: it is given to peers that
// are added, never to one that is there, and neither the alias of a link nor
// a State has it.
type memory struct {
	dir    string // where it is kept for the next process; empty: nowhere
	logger *slog.Logger

	last    map[string]map[string]netip.AddrPort // by device and public key
	unsaved map[string]bool                      // by device
	failing bool                                 // the last save failed
}

func newMemory(dir string, logger *slog.Logger) *memory {
	return &memory{dir: dir, logger: logger, last: map[string]map[string]netip.AddrPort{}, unsaved: map[string]bool{}}
}

// learn remembers where the peers of a device are now. A peer that is not
// there keeps its place: it may be the device that is new.
func (m *memory) learn(dev string, peers []wgtypes.Peer) {
	last := m.of(dev)
	for _, p := range peers {
		if e, key := addrPort(p.Endpoint), p.PublicKey.String(); e.IsValid() && last[key] != e {
			last[key] = e
			m.unsaved[dev] = true
		}
	}
	m.save(dev)
}

// recall gives the peers that are added to a device, and have no endpoint
// configured, the one where they were last. Peers that are not wanted any
// more are forgotten, and so are those that are removed to be added anew:
// their endpoint was one that is not configured any more.
func (m *memory) recall(dev string, want []netstate.WireGuardPeer, changes []wgtypes.PeerConfig) {
	last := m.of(dev)
	forget := func(key string) {
		if _, ok := last[key]; ok {
			delete(last, key)
			m.unsaved[dev] = true
		}
	}
	for key := range last {
		if !slices.ContainsFunc(want, func(w netstate.WireGuardPeer) bool { return w.PublicKey.String() == key }) {
			forget(key)
		}
	}
	for i := range changes {
		c := &changes[i]
		key := c.PublicKey.String()
		switch {
		case c.Remove:
			forget(key)
		case !c.UpdateOnly && c.Endpoint == nil && last[key].IsValid():
			c.Endpoint = net.UDPAddrFromAddrPort(last[key])
		}
	}
	m.save(dev)
}

// of returns what is remembered of a device.
func (m *memory) of(dev string) map[string]netip.AddrPort {
	if m.last[dev] == nil {
		m.last[dev] = m.load(dev)
	}
	return m.last[dev]
}

func (m *memory) file(dev string) string { return filepath.Join(m.dir, "wireguard-"+dev+".json") }

func (m *memory) load(dev string) map[string]netip.AddrPort {
	last := map[string]netip.AddrPort{}
	if m.dir == "" {
		return last
	}
	b, err := os.ReadFile(m.file(dev))
	if err == nil {
		err = json.Unmarshal(b, &last)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		m.logger.Warn("remembered endpoints are unreadable; peers that dial us may take 15 s to come back", "dev", dev, "err", err)
		return map[string]netip.AddrPort{}
	}
	return last
}

// save writes down what has changed. What can't be written is tried again at
// the next occasion.
func (m *memory) save(dev string) {
	if m.dir == "" || !m.unsaved[dev] {
		return
	}
	err := writeFile(m.file(dev), m.last[dev])
	if err != nil && !m.failing {
		m.logger.Warn("endpoints are not remembered; after a restart peers that dial us may take 15 s to come back", "dev", dev, "err", err)
	}
	m.failing, m.unsaved[dev] = err != nil, err != nil
}

// writeFile replaces a file by the JSON of v, whole or not at all.
func writeFile(name string, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if err := os.WriteFile(name+".new", b, 0o600); err != nil {
		return err
	}
	return os.Rename(name+".new", name)
}

// readWireGuard returns what a device has and does, and remembers where its
// peers are. wgMu is held.
func (ns *NetNS) readWireGuard(dev string) (*wgtypes.Device, error) {
	d, err := ns.wireGuard(dev).get()
	if err == nil {
		ns.memory.learn(dev, d.Peers)
	}
	return d, err
}

// watchPeers reads our devices every so often until stop is closed: a peer moves
// without a pass, and WireGuard tells nobody that it is configured otherwise
// (drivers/net/wireguard/netlink.c of Linux 6.1 has no multicast group). What a
// pass has configured is announced, too: somebody may have changed it since.
func (ns *NetNS) watchPeers(stop <-chan struct{}) {
	tick := time.NewTicker(rememberEvery)
	defer tick.Stop()
	was := map[string]string{} // by device
	for {
		select {
		case <-stop:
			return
		case <-tick.C:
		}
		ns.wgMu.Lock()
		for dev := range ns.memory.last {
			d, err := ns.readWireGuard(dev)
			if err != nil {
				continue // of one that is gone its link has told
			}
			if now := configuration(dev, d, alias{}).String(); now != was[dev] {
				was[dev] = now
				ns.mon.signal()
			}
		}
		ns.wgMu.Unlock()
	}
}
