package daemon

import (
	"testing"
	"time"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/internal/probe"
)

func TestWhyNotConnected(t *testing.T) {
	facts := func(change func(*tunnelFacts)) tunnelFacts {
		f := tunnelFacts{
			state: probe.Error, mode: cluster.Client, remoteID: "rome", namespace: "liqo-tenant-rome",
			wanted: true, peer: true, places: places([]string{"203.0.113.1", "fd00::1", "gw.rome.example"}, 30840), resolved: true, handshake: time.Second,
		}
		change(&f)
		return f
	}
	for _, tc := range []struct {
		facts        tunnelFacts
		reason, says string
	}{
		{facts(func(f *tunnelFacts) { f.state = probe.Connected }), "Connected", "answers through the tunnel"},
		{facts(func(f *tunnelFacts) {
			f.state, f.wanted, f.peer, f.blocked = probe.Connected, false, false, "rome is blocked"
		}), "Blocked", "rome is blocked"},
		{facts(func(f *tunnelFacts) { f.blocked = "rome is blocked" }), "NotApplied", "still has the peer, although rome is blocked"},
		{facts(func(f *tunnelFacts) { f.wanted, f.peer = false, false }), "NoPublicKey", "create a PublicKey in namespace liqo-tenant-rome with the label liqo.io/remote-cluster-id=rome"},
		{facts(func(f *tunnelFacts) { f.peer, f.problem = false, "the kernel has no wireguard" }), "NotApplied", "could not be set up: the kernel has no wireguard"},
		{facts(func(f *tunnelFacts) { f.peer, f.state = false, probe.Connecting }), "NotApplied", "has no peer yet"},
		{facts(func(f *tunnelFacts) { f.resolved, f.handshake = false, -1 }), "NoEndpoint", "gw.rome.example:30840"},
		{facts(func(f *tunnelFacts) { f.handshake = -1 }), "NoHandshake", "203.0.113.1:30840 or [fd00::1]:30840 or gw.rome.example:30840 does not answer WireGuard"},
		{facts(func(f *tunnelFacts) { f.handshake, f.mode, f.resolved = -1, cluster.Server, false }), "NoHandshake", "nobody has dialled this gateway with the key of cluster rome"},
		{facts(func(f *tunnelFacts) { f.handshake = sessionTime }), "NoAnswer", "does not answer"},
		{facts(func(f *tunnelFacts) { f.handshake = sessionTime + 1 }), "SessionExpired", "three minutes"},
		{facts(func(f *tunnelFacts) { f.state = probe.Connecting }), "Connecting", "has not answered a probe yet"},
		{facts(func(f *tunnelFacts) { f.state, f.handshake = probe.Connecting, -1 }), "Connecting", "dials the peer at 203.0.113.1:30840"},
		{facts(func(f *tunnelFacts) { f.state, f.handshake, f.mode = probe.Connecting, -1, cluster.Server }), "Connecting", "waits for the peer's gateway"},
	} {
		c := tc.facts.connected()
		assert.Check(t, is.Equal(c.Type+" "+c.Reason, "Connected "+tc.reason))
		assert.Check(t, is.Contains(c.Message, tc.says))
		assert.Check(t, is.Equal(c.OK, tc.reason == "Connected"))
	}
}
