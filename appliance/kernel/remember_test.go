package kernel

import (
	"bytes"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"
	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// TestMemory goes from a device that has had peer 2 at 192.0.2.2:1000 to the
// wanted peers.
func TestMemory(t *testing.T) {
	at := func(n byte, endpoint string) wgtypes.Peer {
		return wgtypes.Peer{PublicKey: key(n).PublicKey(), Endpoint: net.UDPAddrFromAddrPort(netip.MustParseAddrPort(endpoint))}
	}
	dials := func(n byte) netstate.WireGuardPeer { return netstate.WireGuardPeer{PublicKey: public(n)} }
	dialled := func(n byte, endpoint string) netstate.WireGuardPeer {
		return netstate.WireGuardPeer{PublicKey: public(n), Endpoint: netip.MustParseAddrPort(endpoint)}
	}
	changed := dials(2)
	changed.Keepalive = 21
	configured := alias{endpoints: encodeEndpoints([]netstate.WireGuardPeer{dialled(2, "192.0.2.9:51840")})}

	for _, tt := range []struct {
		name  string
		have  []wgtypes.Peer
		alias alias
		want  []netstate.WireGuardPeer
		given string // endpoints of the changes, - for none
		kept  string // what is remembered of peer 2 and 3
	}{
		{
			name: "the device is new", want: []netstate.WireGuardPeer{dials(2)},
			given: "192.0.2.2:1000", kept: "192.0.2.2:1000 -",
		},
		{
			name: "there is an endpoint to dial", want: []netstate.WireGuardPeer{dialled(2, "192.0.2.9:51840")},
			given: "192.0.2.9:51840", kept: "192.0.2.2:1000 -",
		},
		{
			name: "the peer is there and has moved", have: []wgtypes.Peer{at(2, "192.0.2.2:2000")}, want: []netstate.WireGuardPeer{changed},
			given: "-", kept: "192.0.2.2:2000 -",
		},
		{
			name: "the peer is there and nobody knows where", have: []wgtypes.Peer{{PublicKey: key(2).PublicKey()}}, want: []netstate.WireGuardPeer{changed},
			given: "-", kept: "192.0.2.2:1000 -",
		},
		{
			name: "nothing to do", have: []wgtypes.Peer{at(2, "192.0.2.2:1000")}, want: []netstate.WireGuardPeer{dials(2)},
			given: "", kept: "192.0.2.2:1000 -",
		},
		{
			name: "another key", have: []wgtypes.Peer{at(2, "192.0.2.2:1000")}, want: []netstate.WireGuardPeer{dials(3)},
			given: "- -", kept: "- -",
		},
		{
			name: "another key on a new device", want: []netstate.WireGuardPeer{dials(3)},
			given: "-", kept: "- -",
		},
		{
			name: "a second peer", have: []wgtypes.Peer{at(2, "192.0.2.2:1000")}, want: []netstate.WireGuardPeer{dials(2), dials(3)},
			given: "-", kept: "192.0.2.2:1000 -",
		},
		{
			name: "no peers", have: []wgtypes.Peer{at(2, "192.0.2.2:1000")},
			given: "-", kept: "- -",
		},
		{
			name: "no longer an endpoint to dial", have: []wgtypes.Peer{at(2, "192.0.2.9:51840")}, alias: configured, want: []netstate.WireGuardPeer{dials(2)},
			given: "- -", kept: "- -",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			m := newMemory(dir, slog.New(slog.DiscardHandler))
			m.learn(tunnel, []wgtypes.Peer{at(2, "192.0.2.2:1000")})
			m = newMemory(dir, slog.New(slog.DiscardHandler)) // a restart

			m.learn(tunnel, tt.have)
			changes := diffPeers(tt.have, tt.want, tt.alias, nil)
			m.recall(tunnel, tt.want, changes)
			var given []string
			for _, c := range changes {
				given = append(given, endpointText(addrPort(c.Endpoint)))
			}
			assert.Equal(t, strings.Join(given, " "), tt.given)
			for _, m := range []*memory{m, newMemory(dir, slog.New(slog.DiscardHandler))} {
				kept := m.of(tunnel)
				assert.Equal(t, endpointText(kept[public(2).String()])+" "+endpointText(kept[public(3).String()]), tt.kept)
			}
		})
	}
}

func endpointText(e netip.AddrPort) string {
	if !e.IsValid() {
		return "-"
	}
	return e.String()
}

// TestMemoryOnDisk can't read what there is, and can't write for a while.
func TestMemoryOnDisk(t *testing.T) {
	dir := t.TempDir()
	var log bytes.Buffer
	m := newMemory(dir, slog.New(slog.NewTextHandler(&log, nil)))
	assert.NilError(t, os.WriteFile(m.file(tunnel), []byte(`{"half": `), 0o600))
	peer := wgtypes.Peer{PublicKey: key(2).PublicKey(), Endpoint: &net.UDPAddr{IP: net.IP{192, 0, 2, 2}, Port: 1000}}
	assert.Equal(t, len(m.of(tunnel)), 0)
	assert.Equal(t, strings.Count(log.String(), "unreadable"), 1, log.String())

	m.dir = filepath.Join(dir, "absent")
	for range 3 {
		m.learn(tunnel, []wgtypes.Peer{peer})
	}
	assert.Equal(t, strings.Count(log.String(), "not remembered"), 1, log.String())
	assert.NilError(t, os.Mkdir(m.dir, 0o700))
	m.learn(tunnel, []wgtypes.Peer{peer})
	assert.Equal(t, newMemory(m.dir, nil).of(tunnel)[public(2).String()].String(), "192.0.2.2:1000")
}

// TestDeletedLink deletes the link of either side, as somebody may by hand, and
// brings it back by one pass. Whoever has the new device initiates: the other
// side would use the session that is gone for 15 s.
func TestDeletedLink(t *testing.T) {
	both(t, func(t *testing.T, impl Implementation) {
		server, client := tunnelSides(t, impl)
		from := func(port uint16) netstate.State {
			s := clientState()
			s.WireGuard[0].ListenPort = port
			return s
		}
		place := func() string {
			peers, err := server.Peers(tunnel)
			assert.NilError(t, err)
			assert.Equal(t, len(peers), 1)
			return endpointText(peers[0].Endpoint)
		}
		remake := func(s *side, want netstate.State, check func()) {
			t.Helper()
			s.rest(t)
			s.test.Run("ip", "link", "del", tunnel)
			applyOnceFree(t, s.NetNS, want)
			start := time.Now() // the initiation leaves now
			check()
			took := time.Since(start)
			t.Logf("after %v", took.Round(time.Millisecond))
			assert.Assert(t, took < 10*time.Second, "it took %v", took)
			left := netstate.Diff(observe(t, s.NetNS), want)
			assert.Assert(t, left.Empty(), left.String())
		}
		converge(t, server.NetNS, serverState())
		converge(t, client.NetNS, from(50001))
		exchange(t, client, server, "169.254.18.1")
		assert.Equal(t, place(), "192.0.2.2:50001")

		remake(client, from(50002), func() { exchange(t, client, server, "169.254.18.1") })
		assert.Equal(t, place(), "192.0.2.2:50002")
		// What was learned later stays, whatever else is set.
		keepalive := serverState()
		keepalive.WireGuard[0].Peers[0].Keepalive = 100
		converge(t, server.NetNS, keepalive)
		assert.Equal(t, place(), "192.0.2.2:50002")

		remake(server, serverState(), func() {
			assert.Equal(t, place(), "192.0.2.2:50002")
			exchange(t, server, client, "169.254.18.2")
		})
		exchange(t, client, server, "169.254.18.1")
		out := server.test.Run("ip", "link", "show", tunnel)
		assert.Assert(t, !strings.Contains(out, "192.0.2.2"), "the alias has what was learned: %s", out)

		// The place of one peer is not that of another, and forgotten.
		client.test.Run("ip", "link", "del", tunnel) // the client would begin a handshake by itself after 15 s
		other := serverState()
		other.WireGuard[0].Peers[0].PublicKey = public(3)
		remake(server, other, func() { assert.Equal(t, place(), "-") })
		converge(t, server.NetNS, serverState())
		assert.Equal(t, place(), "-")
	})
}
