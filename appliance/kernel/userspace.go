package kernel

import (
	"bufio"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/device"
	"golang.zx2c4.com/wireguard/tun"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// defaultMTU of a tun device that nobody gave one: what is left of 1500 bytes
// after IPv6, UDP and WireGuard.
const defaultMTU = 1420

// A userDevice is a WireGuard device served by this process: a tun device
// and wireguard-go. It ends with the process. So that a restart costs no more
// than a handshake, it initiates as soon as it is configured again.
type userDevice struct {
	name   string
	dev    *device.Device
	logger *slog.Logger
}

// serve makes a tun device and serves it.
func (ns *NetNS) serve(l netstate.Link) error {
	if ns.exists(l.Name) {
		return unix.EEXIST // else the tun device of somebody else would be joined
	}
	if old := ns.served(l.Name); old != nil {
		old.dev.Close() // somebody has deleted its link; it may still have the port
	}
	u := &userDevice{name: l.Name, logger: ns.logger}
	mtu := l.MTU
	if mtu == 0 {
		mtu = defaultMTU
	}
	var t tun.Device
	if err := ns.Do(func() (err error) {
		if t, err = tun.CreateTUN(l.Name, mtu); err != nil {
			return tunError(err)
		}
		return nil
	}); err != nil {
		return err
	}
	bind := conn.Bind(singlyBind{conn.NewStdNetBind()})
	if ns.elsewhere {
		t = nsTUN{t, ns.Do}
	}
	switch {
	case ns.around != nil:
		bind = nsBind{bind, ns.around.do}
	case ns.elsewhere:
		bind = nsBind{bind, ns.Do}
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
	ns.serves(l.Name, u)
	return nil
}

// served returns the device of that name that this process serves; nil: it serves none.
func (ns *NetNS) served(name string) *userDevice {
	ns.wgMu.Lock()
	defer ns.wgMu.Unlock()
	return ns.user[name]
}

// serves notes that this process serves a device of that name; nil: no longer.
func (ns *NetNS) serves(name string, u *userDevice) {
	ns.wgMu.Lock()
	defer ns.wgMu.Unlock()
	if u == nil {
		delete(ns.user, name)
	} else {
		ns.user[name] = u
	}
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
		if p.PresharedKey != nil {
			fmt.Fprintf(&b, "preshared_key=%s\n", hex.EncodeToString(p.PresharedKey[:]))
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
		case k == "preshared_key":
			p.PresharedKey = hexKey(v)
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
	in func(func() error) error
}

// MTU asks for the device by name, which is that of another one elsewhere.
func (t nsTUN) MTU() (mtu int, err error) {
	err = t.in(func() error {
		mtu, err = t.Device.MTU()
		return err
	})
	return mtu, err
}

// nsBind is to sockets what nsTUN is to the device.
type nsBind struct {
	conn.Bind
	in func(func() error) error
}

// Open opens the sockets in the namespace: around the device's, where there is
// one.
func (b nsBind) Open(port uint16) (fns []conn.ReceiveFunc, actual uint16, err error) {
	err = b.in(func() error {
		fns, actual, err = b.Bind.Open(port)
		return err
	})
	return fns, actual, err
}

// singlyBind sends one by one what the kernel refuses to send together. It cuts
// several datagrams out of one (UDP_SEGMENT) only where each fits into what it
// knows of the path's MTU, and says that they are too long otherwise; a datagram
// alone it fragments (udp_send_skb and ip_make_skb, net/ipv4). What was sent
// already of a batch arrives twice; WireGuard takes a packet once only.
type singlyBind struct{ conn.Bind }

// Send sends all that can be sent.
func (b singlyBind) Send(bufs [][]byte, to conn.Endpoint) error {
	err := b.Bind.Send(bufs, to)
	if len(bufs) < 2 || !tooLong(err) {
		return err
	}
	var errs []error
	for i := range bufs {
		errs = append(errs, b.Bind.Send(bufs[i:i+1], to))
	}
	return errors.Join(errs...)
}

// tooLong tells whether the kernel refuses to cut datagrams of that length:
// older ones say EINVAL.
func tooLong(err error) bool { return errors.Is(err, unix.EMSGSIZE) || errors.Is(err, unix.EINVAL) }
