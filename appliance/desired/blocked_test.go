package desired_test

import (
	"testing"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/desired"
)

// blockedKeys blocks one key.
func blockedKeys(n byte) cluster.BlockedKeys {
	k := key(n)
	return cluster.BlockedKeys{{Fingerprint: cluster.FingerprintOf(k[:])}}
}

// WireGuard does not have a peer that is blocked. All else stays as it is.
func TestBlocked(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(*desired.GatewayInput)
		peers  int
	}{
		{"not blocked", func(*desired.GatewayInput) {}, 1},
		{"blocked", func(in *desired.GatewayInput) { in.Configurations[0].Blocked = true }, 0},
		{"blocked, of a client", func(in *desired.GatewayInput) {
			in.Mode, in.Configurations[0].Blocked = cluster.Client, true
		}, 0},
		{"blocked, and being deleted", func(in *desired.GatewayInput) {
			in.Configurations[0].Blocked, in.Configurations[0].Deleting = true, true
		}, 0},
		{"blocked by the younger of two", func(in *desired.GatewayInput) {
			younger := in.Configurations[0]
			younger.Name, younger.Created, younger.Blocked = "second", epoch.Add(1), true
			in.Configurations = append(in.Configurations, younger)
		}, 0},
		{"another peer is blocked", func(in *desired.GatewayInput) {
			other := in.Configurations[0]
			other.RemoteID, other.Blocked = "oslo", true
			in.Configurations = append(in.Configurations, other)
		}, 1},
		{"its key is blocked", func(in *desired.GatewayInput) { in.BlockedKeys = blockedKeys(2) }, 0},
		{"another key is blocked", func(in *desired.GatewayInput) { in.BlockedKeys = blockedKeys(3) }, 1},
		{"its key is blocked, and it has another one", func(in *desired.GatewayInput) {
			in.BlockedKeys = blockedKeys(2)
			fresh := key(3)
			younger := in.PublicKeys[0]
			younger.Name, younger.Created, younger.Key = "second", epoch.Add(1), fresh[:]
			in.PublicKeys = append(in.PublicKeys, younger)
		}, 1},
		{"its key is blocked, by whatever name", func(in *desired.GatewayInput) {
			in.BlockedKeys = blockedKeys(2)
			again := in.PublicKeys[0]
			again.Name, again.UID = "again", "another"
			in.PublicKeys = append(in.PublicKeys, again)
		}, 0},
		{"the key of an invitation is blocked", func(in *desired.GatewayInput) {
			in.Mode, in.Handover, in.BlockedKeys = cluster.Client, &desired.Handover{Key: key(4)}, blockedKeys(4)
		}, 0},
		{"another one than that of an invitation", func(in *desired.GatewayInput) {
			in.Mode, in.Handover, in.BlockedKeys = cluster.Client, &desired.Handover{Key: key(4)}, blockedKeys(2)
		}, 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			in := romeGateway()
			tt.change(&in)
			state, _ := desired.Gateway(in)
			assert.Assert(t, is.Len(state.WireGuard, 1))
			assert.Check(t, is.Len(state.WireGuard[0].Peers, tt.peers))
			_, cutOff := in.Blocked()
			_, blocked := in.BlockedKey()
			assert.Equal(t, cutOff || blocked, tt.peers == 0)
		})
	}
}
