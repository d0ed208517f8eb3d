package kernel

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"
	"gotest.tools/v3/assert/cmp"

	"github.com/isthmus-net/isthmus/appliance/netstate"
	"github.com/isthmus-net/isthmus/appliance/nettest"
)

// inside opens a namespace with another one around it. The side's namespace is
// the inner one.
func inside(t *testing.T, around *nettest.NS, cfg Config) *side {
	t.Helper()
	s := &side{test: nettest.Another(t)}
	cfg.NetNS = fmt.Sprintf("/proc/self/fd/%d", s.test.FD())
	cfg.Logger = slog.New(slog.NewTextHandler(t.Output(), nil))
	var err error
	around.Do(func() { s.NetNS, err = Open(cfg) })
	assert.NilError(t, err)
	t.Cleanup(func() { assert.Check(t, s.Close()) })
	return s
}

// pair is a veth pair and what hangs on it.
func pair() netstate.State {
	return netstate.State{
		Links:     []netstate.Link{{Name: "liqo.gateway", Kind: netstate.KindVeth, MTU: 1400, Peer: "liqo.host", Description: "node node-1", Forwarding: true, RPFilter: 2}},
		Addresses: []netstate.Address{{Dev: "liqo.gateway", Prefix: prefix("10.80.0.7/32")}},
		Routes:    []netstate.Route{{Table: 254, Dst: prefix("0.0.0.0/0"), Via: addr("10.80.0.4"), Dev: "liqo.gateway", OnLink: true}},
	}
}

// linkIn returns a link of a namespace.
func linkIn(t *testing.T, ns *nettest.NS, name string) (l netlink.Link, err error) {
	t.Helper()
	ns.Do(func() { l, err = netlink.LinkByName(name) })
	return l, err
}

// The sockets of WireGuard are in the namespace around, where the peer reaches
// them, and the tunnel is in the inner one.
func TestWireGuardInside(t *testing.T) {
	nettest.Need(t, "ip")
	both(t, func(t *testing.T, impl Implementation) {
		var hosts [2]*nettest.NS
		var sides [2]*side
		for i := range sides {
			hosts[i] = nettest.Another(t)
			sides[i] = inside(t, hosts[i], Config{
				Implementation: impl, StateDir: t.TempDir(),
				PrivateKey: func(string) ([32]byte, error) { return key(byte(i + 1)), nil },
			})
		}
		if impl == Userspace {
			need(t, sides[0].NetNS, FeatureTUN)
		}
		veth(t, hosts[0], hosts[1], "192.0.2.1/24", "192.0.2.2/24")
		converge(t, sides[0].NetNS, serverState())
		converge(t, sides[1].NetNS, clientState())
		exchange(t, sides[1], sides[0], "169.254.18.1")
		exchange(t, sides[0], sides[1], "169.254.18.2")
		_, err := linkIn(t, hosts[0], tunnel)
		assert.Assert(t, errors.As(err, new(netlink.LinkNotFoundError)), "%s is seen around: %v", tunnel, err)

		// The port is taken around, and free inside.
		listen(t, sides[0].test, netip.MustParseAddrPort("0.0.0.0:51840"))
		hosts[0].Do(func() {
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
			assert.NilError(t, err)
			defer unix.Close(fd)
			assert.ErrorIs(t, unix.Bind(fd, &unix.SockaddrInet4{Port: 51840}), unix.EADDRINUSE)
		})
	})
}

// A pair has one end inside and one around, and belongs to the inside.
func TestPair(t *testing.T) {
	nettest.Need(t, "ip")
	t.Parallel()
	host := nettest.Another(t)
	s := inside(t, host, Config{})
	converge(t, s.NetNS, pair())
	for _, tt := range []struct {
		name  string
		spoil [][]string
	}{
		{"the other end is deleted", [][]string{{"ip", "link", "del", "liqo.host"}}},
		{"the other end is set down", [][]string{{"ip", "link", "set", "liqo.host", "down"}}},
		{"the other end is renamed", [][]string{{"ip", "link", "set", "liqo.host", "down"}, {"ip", "link", "set", "liqo.host", "name", "liqo.other"}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			quiet(t, s.NetNS, pair())
			for _, argv := range tt.spoil {
				host.Run(argv...)
			}
			assert.Assert(t, !netstate.Diff(observe(t, s.NetNS), pair()).Empty())
			converge(t, s.NetNS, pair())
			l, err := linkIn(t, host, "liqo.host")
			assert.NilError(t, err)
			assert.Equal(t, l.Attrs().MTU, 1400)
			assert.Assert(t, l.Attrs().RawFlags&unix.IFF_UP != 0 && l.Attrs().RawFlags&unix.IFF_LOWER_UP != 0)
		})
	}

	t.Run("who looks after the host leaves the other end alone", func(t *testing.T) {
		var node *NetNS
		var err error
		host.Do(func() { node, err = Open(Config{}) })
		assert.NilError(t, err)
		defer node.Close()
		converge(t, node, netstate.State{})
		_, err = linkIn(t, host, "liqo.host")
		assert.NilError(t, err)
		// And is told when something happens to it: its routes may be gone.
		for _, change := range []string{"down", "up"} {
			quiet(t, node, netstate.State{})
			host.Run("ip", "link", "set", "liqo.host", change)
			select {
			case <-node.Changed():
			case <-time.After(30 * time.Second):
				t.Fatalf("nobody was told that liqo.host is %s", change)
			}
		}
	})

	t.Run("one that a gateway left behind makes room", func(t *testing.T) {
		next := inside(t, host, Config{})
		converge(t, next.NetNS, pair())
		assert.Equal(t, len(observe(t, s.NetNS).Links), 0)
	})

	t.Run("one of somebody else stays", func(t *testing.T) {
		other := nettest.Another(t)
		other.Run("ip", "link", "add", "liqo.host", "type", "bridge")
		third := inside(t, other, Config{})
		err := third.Apply(t.Context(), netstate.Diff(netstate.State{}, pair()))
		assert.ErrorContains(t, err, "not ours (type bridge)")
	})

	t.Run("one that nobody wants goes", func(t *testing.T) {
		converge(t, s.NetNS, pair())
		var node *NetNS
		var err error
		host.Do(func() { node, err = Open(Config{}) })
		assert.NilError(t, err)
		defer node.Close()
		gone, err := node.RemovePeers(func(name string) bool { return name != "liqo.host" })
		assert.NilError(t, err)
		assert.Equal(t, len(gone), 0)
		gone, err = node.RemovePeers(func(name string) bool { return name == "liqo.host" || name == "v0" })
		assert.NilError(t, err)
		assert.DeepEqual(t, gone, []string{"liqo.host"})
	})

	t.Run("and goes", func(t *testing.T) {
		converge(t, s.NetNS, pair())
		converge(t, s.NetNS, netstate.State{})
		_, err := linkIn(t, host, "liqo.host")
		assert.Assert(t, errors.As(err, new(netlink.LinkNotFoundError)), "%v", err)
	})
}

// A namespace is held by name as long as its pod lives, and no longer.
func TestHoldNetNS(t *testing.T) {
	nettest.NeedRoot(t)
	path := filepath.Join(t.TempDir(), "netns", "liqo-netns")
	held, err := HoldNetNS(path, 0)
	assert.NilError(t, err)
	own, err := held.ID()
	assert.NilError(t, err)
	named := func() cmp.Comparison {
		return func() cmp.Result {
			id, err := NetNSID(path)
			if err != nil || id != own {
				return cmp.ResultFailure(fmt.Sprintf("%s is %d, %v; want %d", path, id, err, own))
			}
			return cmp.ResultSuccess
		}
	}
	assert.Assert(t, named())

	// What "ip netns delete" does.
	assert.NilError(t, unix.Unmount(path, unix.MNT_DETACH))
	assert.NilError(t, os.Remove(path))
	assert.NilError(t, held.Keep())
	assert.Assert(t, named())

	// The next holder of the same pod goes on with it.
	again, err := HoldNetNS(path, own)
	assert.NilError(t, err)
	assert.Assert(t, named())
	// That of another pod does not.
	other, err := HoldNetNS(path, 0)
	assert.NilError(t, err)
	id, err := NetNSID(path)
	assert.NilError(t, err)
	assert.Assert(t, id != own)
	assert.NilError(t, unix.Close(again.fd))
	assert.NilError(t, unix.Close(held.fd))

	assert.NilError(t, other.Remove())
	_, err = os.Stat(path)
	assert.ErrorIs(t, err, os.ErrNotExist)
}
