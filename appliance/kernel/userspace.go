package kernel

import (
	"bufio"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/device"
	"golang.zx2c4.com/wireguard/tun"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"github.com/isthmus-net/isthmus/appliance/netstate"
)

const (
	// defaultMTU of a tun device that nobody gave one: what is left of 1500
	// bytes after IPv6, UDP and WireGuard.
	defaultMTU = 1420
	// rememberEvery is how old a remembered endpoint can be.
	rememberEvery = time.Second
)

// A userDevice is a WireGuard device served by this process: a tun device
// and wireguard-go. It ends with the process. So that a restart costs no more
// than a handshake, it remembers the endpoints that it has learned and
// initiates as soon as it is configured again.
type userDevice struct {
	name   string
	dev    *device.Device
	logger *slog.Logger
	file   string // of remembered endpoints; empty: none

	stop chan struct{}
	done sync.WaitGroup

	mu         sync.Mutex
	endpoints  map[string]endpoint // by public key
	configured map[string]netip.AddrPort
}

// An endpoint is what is remembered of a peer.
type endpoint struct {
	Configured netip.AddrPort `json:"configured"`
	Learned    netip.AddrPort `json:"learned"`
}

// serve makes a tun device and serves it.
func (ns *NetNS) serve(l netstate.Link) error {
	if ns.exists(l.Name) {
		return unix.EEXIST // else the tun device of somebody else would be joined
	}
	u := &userDevice{
		name:       l.Name,
		logger:     ns.logger,
		stop:       make(chan struct{}),
		configured: map[string]netip.AddrPort{},
	}
	if ns.cfg.StateDir != "" {
		u.file = filepath.Join(ns.cfg.StateDir, "wireguard-"+l.Name+".json")
	}
	u.load()
	mtu := l.MTU
	if mtu == 0 {
		mtu = defaultMTU
	}
	err := ns.do(func() error {
		t, err := tun.CreateTUN(l.Name, mtu)
		if err != nil {
			return tunError(err)
		}
		bind := conn.NewStdNetBind()
		if ns.elsewhere {
			t, bind = nsTUN{t, ns}, nsBind{bind, ns}
		}
		u.dev = device.NewDevice(t, bind, &device.Logger{
			Verbosef: device.DiscardLogf,
			Errorf: func(format string, args ...any) {
				u.logger.Warn("wireguard: "+fmt.Sprintf(format, args...), "dev", l.Name)
			},
		})
		if err := u.dev.Up(); err != nil {
			u.dev.Close()
			return err
		}
		return nil
	})
	if err != nil {
		return err
	}
	ns.user[l.Name] = u
	u.done.Go(u.watch)
	return nil
}

// tunError says what to do when there is no tun device to be had.
func tunError(err error) error {
	switch {
	case errors.Is(err, fs.ErrNotExist), strings.Contains(err.Error(), "does not exist"):
		return fmt.Errorf("%w: userspace WireGuard needs /dev/net/tun: mount it into the container (hostPath) or load the module tun: %w", ErrUnsupported, err)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("%w: userspace WireGuard may not open /dev/net/tun or lacks NET_ADMIN: %w", ErrUnsupported, err)
	default:
		return err
	}
}

func (u *userDevice) close() {
	close(u.stop)
	u.done.Wait()
	u.remember()
	u.dev.Close()
}

// watch remembers endpoints until the device is closed.
func (u *userDevice) watch() {
	tick := time.NewTicker(rememberEvery)
	defer tick.Stop()
	for {
		select {
		case <-u.stop:
			return
		case <-u.dev.Wait():
			return
		case <-tick.C:
			u.remember()
		}
	}
}

func (u *userDevice) load() {
	u.endpoints = map[string]endpoint{}
	if u.file == "" {
		return
	}
	b, err := os.ReadFile(u.file)
	if err == nil {
		err = json.Unmarshal(b, &u.endpoints)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		u.logger.Warn("remembered endpoints are unreadable; peers that dial us may take 15 s to come back", "dev", u.name, "err", err)
		u.endpoints = map[string]endpoint{}
	}
}

// remember writes the endpoints down if they changed.
func (u *userDevice) remember() {
	d, err := u.get()
	if err != nil {
		return
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	now := map[string]endpoint{}
	for _, p := range d.Peers {
		key := p.PublicKey.String()
		if learned := addrPort(p.Endpoint); learned.IsValid() {
			now[key] = endpoint{u.configured[key], learned}
		}
	}
	if u.file == "" || len(now) == 0 || maps.Equal(now, u.endpoints) {
		return
	}
	if err := writeFile(u.file, now); err != nil {
		u.logger.Warn("endpoints are not remembered; after a restart peers that dial us may take 15 s to come back", "dev", u.name, "err", err)
		return
	}
	u.endpoints = now
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

// recall gives peers that are added the endpoints that they had before the
// process was restarted, unless they were configured otherwise since.
func (u *userDevice) recall(peers []wgtypes.PeerConfig) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for i := range peers {
		p := &peers[i]
		key := p.PublicKey.String()
		want := addrPort(p.Endpoint)
		switch {
		case p.Remove:
			delete(u.configured, key)
			continue
		case p.UpdateOnly && p.Endpoint == nil:
			continue
		}
		u.configured[key] = want
		if e, ok := u.endpoints[key]; ok && !p.UpdateOnly && e.Configured == want {
			p.Endpoint = net.UDPAddrFromAddrPort(e.Learned)
		}
	}
}

// set configures the device (https://www.wireguard.com/xplatform/).
func (u *userDevice) set(c wgtypes.Config) error {
	var b strings.Builder
	if c.PrivateKey != nil {
		fmt.Fprintf(&b, "private_key=%s\n", hex.EncodeToString(c.PrivateKey[:]))
	}
	if c.ListenPort != nil {
		fmt.Fprintf(&b, "listen_port=%d\n", *c.ListenPort)
	}
	for _, p := range c.Peers {
		fmt.Fprintf(&b, "public_key=%s\n", hex.EncodeToString(p.PublicKey[:]))
		if p.Remove {
			b.WriteString("remove=true\n")
			continue
		}
		if p.UpdateOnly {
			b.WriteString("update_only=true\n")
		}
		if p.Endpoint != nil {
			fmt.Fprintf(&b, "endpoint=%s\n", addrPort(p.Endpoint))
		}
		if p.ReplaceAllowedIPs {
			b.WriteString("replace_allowed_ips=true\n")
		}
		for _, a := range prefixes(p.AllowedIPs) {
			fmt.Fprintf(&b, "allowed_ip=%s\n", a)
		}
		if p.PersistentKeepaliveInterval != nil {
			fmt.Fprintf(&b, "persistent_keepalive_interval=%d\n", *p.PersistentKeepaliveInterval/time.Second)
		}
	}
	if err := u.dev.IpcSet(b.String()); err != nil {
		return err
	}
	// A peer that does not know that we were restarted would keep sending
	// what we can't decrypt, for 15 s.
	for _, p := range c.Peers {
		if p.Remove || p.Endpoint == nil {
			continue
		}
		if peer := u.dev.LookupPeer(device.NoisePublicKey(p.PublicKey)); peer != nil {
			if err := peer.SendHandshakeInitiation(false); err != nil {
				u.logger.Warn("handshake not sent; WireGuard will try again", "dev", u.name, "peer", p.PublicKey, "err", err)
			}
		}
	}
	return nil
}

// get returns the configuration and live data of the device.
func (u *userDevice) get() (*wgtypes.Device, error) {
	text, err := u.dev.IpcGet()
	if err != nil {
		return nil, err
	}
	d := &wgtypes.Device{Name: u.name, Type: wgtypes.Userspace}
	var p *wgtypes.Peer
	var seconds int64
	for s := bufio.NewScanner(strings.NewReader(text)); s.Scan(); {
		k, v, _ := strings.Cut(s.Text(), "=")
		n, _ := strconv.ParseInt(v, 10, 64) // 0 for what is not a number
		switch {
		case k == "private_key":
			d.PrivateKey = hexKey(v)
			d.PublicKey = d.PrivateKey.PublicKey()
		case k == "listen_port":
			d.ListenPort = int(n)
		case k == "public_key":
			d.Peers = append(d.Peers, wgtypes.Peer{PublicKey: hexKey(v)})
			p = &d.Peers[len(d.Peers)-1]
		case p == nil:
		case k == "endpoint":
			if e, err := netip.ParseAddrPort(v); err == nil {
				p.Endpoint = net.UDPAddrFromAddrPort(e)
			}
		case k == "last_handshake_time_sec":
			seconds = n
		case k == "last_handshake_time_nsec":
			if seconds != 0 || n != 0 {
				p.LastHandshakeTime = time.Unix(seconds, n)
			}
		case k == "tx_bytes":
			p.TransmitBytes = n
		case k == "rx_bytes":
			p.ReceiveBytes = n
		case k == "persistent_keepalive_interval":
			p.PersistentKeepaliveInterval = time.Duration(n) * time.Second
		case k == "allowed_ip":
			if a, err := netip.ParsePrefix(v); err == nil {
				p.AllowedIPs = append(p.AllowedIPs, ipNets([]netip.Prefix{a})...)
			}
		}
	}
	return d, nil
}

func hexKey(s string) (k wgtypes.Key) {
	b, _ := hex.DecodeString(s)
	copy(k[:], b)
	return k
}

// nsTUN serves a device where not every thread is in its namespace: wireguard-go
// opens sockets whenever it likes, on whatever thread.
type nsTUN struct {
	tun.Device
	ns *NetNS
}

// MTU asks for the device by name, which is that of another one elsewhere.
func (t nsTUN) MTU() (mtu int, err error) {
	err = t.ns.do(func() error {
		mtu, err = t.Device.MTU()
		return err
	})
	return mtu, err
}

// nsBind is to sockets what nsTUN is to the device.
type nsBind struct {
	conn.Bind
	ns *NetNS
}

// Open opens the sockets in the namespace.
func (b nsBind) Open(port uint16) (fns []conn.ReceiveFunc, actual uint16, err error) {
	err = b.ns.do(func() error {
		fns, actual, err = b.Bind.Open(port)
		return err
	})
	return fns, actual, err
}
