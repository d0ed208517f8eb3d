package desired_test

import (
	"testing"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/desired"
)

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
	} {
		t.Run(tt.name, func(t *testing.T) {
			in := romeGateway()
			tt.change(&in)
			state, _ := desired.Gateway(in)
			assert.Assert(t, is.Len(state.WireGuard, 1))
			assert.Check(t, is.Len(state.WireGuard[0].Peers, tt.peers))
			_, blocked := in.Blocked()
			assert.Equal(t, blocked, tt.peers == 0)
		})
	}
}
