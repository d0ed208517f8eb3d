package world

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/wgctrl"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"
	"gotest.tools/v3/assert"
	"gotest.tools/v3/poll"

	"github.com/isthmus-net/isthmus/appliance/nettest"
	"github.com/isthmus-net/isthmus/lab/internal/pods"
)

// TestConnectionsEnd: those to the addresses that are meant are aborted, on both
// families and at once, and no others.
func TestConnectionsEnd(t *testing.T) {
	nettest.NeedRoot(t)
	ns, err := NewNamespace()
	assert.NilError(t, err)
	defer ns.Close()
	connect := func(address string) (client net.Conn, at netip.AddrPort) {
		t.Helper()
		assert.NilError(t, ns.Do(func() error {
			l, err := net.Listen("tcp", address)
			if err != nil {
				return err
			}
			t.Cleanup(func() { l.Close() })
			at = netip.MustParseAddrPort(l.Addr().String())
			client, err = net.Dial("tcp", l.Addr().String())
			return err
		}))
		t.Cleanup(func() { client.Close() })
		return client, at
	}
	meant4, at4 := connect("127.0.0.1:0")
	meant6, at6 := connect("[::1]:0")
	other, _ := connect("127.0.0.1:0")
	err = ns.Do(func() error { return endConnections(map[netip.AddrPort]bool{at4: true, at6: true}) })
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EOPNOTSUPP) {
		nettest.SkipOrFail(t, "sock_diag", err)
	}
	assert.NilError(t, err)
	for _, c := range []net.Conn{meant4, meant6} {
		assert.NilError(t, c.SetReadDeadline(time.Now().Add(10*time.Second)))
		_, err := c.Read(make([]byte, 1))
		assert.ErrorIs(t, err, unix.ECONNABORTED, "%s", c.RemoteAddr())
	}
	_, err = io.WriteString(other, "still there")
	assert.NilError(t, err)
}

// TestSessionsEnd: a session of WireGuard has ended when the next packet makes a
// new handshake, and the link still has its key.
func TestSessionsEnd(t *testing.T) {
	nettest.NeedRoot(t)
	a, err := NewNamespace()
	assert.NilError(t, err)
	defer a.Close()
	b, err := NewNamespace()
	assert.NilError(t, err)
	defer b.Close()
	assert.NilError(t, Wire(a, "eth0", b, "eth0"))
	ends := []struct {
		ns   *Namespace
		at   string
		addr string
	}{{a, "192.0.2.1", "10.9.0.1"}, {b, "192.0.2.2", "10.9.0.2"}}
	keys := make([]wgtypes.Key, 2)
	for i := range keys {
		keys[i], err = wgtypes.GeneratePrivateKey()
		assert.NilError(t, err)
	}
	const link, port = "wg0", 51820
	device := func(ns *Namespace) (d *wgtypes.Device) {
		t.Helper()
		assert.NilError(t, ns.Do(func() error {
			wg, err := wgctrl.New()
			if err != nil {
				return err
			}
			defer wg.Close()
			d, err = wg.Device(link)
			return err
		}))
		return d
	}
	for i, e := range ends {
		assert.NilError(t, e.ns.up("eth0"))
		assert.NilError(t, e.ns.AddAddress("eth0", netip.MustParsePrefix(e.at+"/24")))
		if err := e.ns.nl.LinkAdd(&netlink.Wireguard{LinkAttrs: netlink.LinkAttrs{Name: link}}); err != nil {
			nettest.SkipOrFail(t, "wireguard", err)
		}
		assert.NilError(t, e.ns.Do(func() error {
			wg, err := wgctrl.New()
			if err != nil {
				return err
			}
			defer wg.Close()
			all := net.IPNet{IP: net.IPv4zero, Mask: net.CIDRMask(0, 32)}
			listen := port
			return wg.ConfigureDevice(link, wgtypes.Config{PrivateKey: &keys[i], ListenPort: &listen, Peers: []wgtypes.PeerConfig{{
				PublicKey: keys[1-i].PublicKey(), AllowedIPs: []net.IPNet{all},
				Endpoint: net.UDPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr(ends[1-i].at), port)),
			}}})
		}))
		assert.NilError(t, e.ns.AddAddress(link, netip.MustParsePrefix(e.addr+"/24")))
		assert.NilError(t, e.ns.up(link))
	}
	handshake := func(after time.Time) (last time.Time) {
		t.Helper()
		poll.WaitOn(t, func(poll.LogT) poll.Result {
			assert.NilError(t, a.Do(func() error {
				conn, err := net.Dial("udp", ends[1].addr+":9")
				if err != nil {
					return err
				}
				defer conn.Close()
				_, _ = conn.Write([]byte("x")) // nobody listens: the second one may be refused
				return nil
			}))
			if last = device(a).Peers[0].LastHandshakeTime; last.After(after) {
				return poll.Success()
			}
			return poll.Continue("the last handshake was at %s", last)
		}, poll.WithTimeout(20*time.Second))
		return last
	}
	first := handshake(time.Time{})
	for _, e := range ends {
		assert.NilError(t, e.ns.Do(endSessions))
	}
	for i, e := range ends {
		assert.Equal(t, device(e.ns).PrivateKey, keys[i])
	}
	// Without it the session would last for two minutes.
	handshake(first)
}

func TestFreezingIsForMachines(t *testing.T) {
	a := &agent{registry: pods.NewRegistry()}
	assert.ErrorContains(t, a.freeze(), "belong to the host")
	assert.ErrorContains(t, a.thaw(t.Context(), thawRequest{}), "belong to the host")
}
