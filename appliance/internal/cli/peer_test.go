package cli

import (
	"strings"
	"testing"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/appliance/internal/peers"
)

// What is missing is below its peering, and columns stay columns.
func TestPrintPeers(t *testing.T) {
	var out strings.Builder
	assert.NilError(t, printPeers(&out, []peers.Peer{
		{ID: "lima", MadeBy: []string{"kubectl-create"}, Missing: []string{"there is no gateway, which is a sentence that is longer than any column", "and another"}},
		{
			ID: "rome", Role: peers.Server, Connection: "Connected", RTT: "12ms", Endpoint: "192.0.2.1 port 31840", MadeBy: []string{"liqoctl"},
			Networks: []peers.Network{{Kind: "pod", CIDR: "10.0.0.0/16", Here: "10.1.0.0/16"}},
		},
	}))
	assert.Equal(t, out.String(), `PEER   ROLE     CONNECTION   RTT    ENDPOINT               NETWORKS                     MADE BY
lima   -        -            -      -                      -                            kubectl-create
  ✗ there is no gateway, which is a sentence that is longer than any column
  ✗ and another
rome   server   Connected    12ms   192.0.2.1 port 31840   10.0.0.0/16 as 10.1.0.0/16   liqoctl
`)
	out.Reset()
	assert.NilError(t, printPeers(&out, nil))
	assert.Equal(t, out.String(), "There are no peerings.\n")
}

// A peer that is blocked is shown so, whatever its gateway said last.
func TestPrintBlocked(t *testing.T) {
	var out strings.Builder
	assert.NilError(t, printPeers(&out, []peers.Peer{{ID: "rome", Role: peers.Client, Connection: "Connected", Blocked: true}}))
	assert.Equal(t, strings.Join(strings.Fields(strings.Split(out.String(), "\n")[1]), " "), "rome client blocked - - - -")
	for _, tt := range []struct {
		r    blockResult
		want string
	}{
		{blockResult{ID: "rome", Blocked: true, Changed: true}, "rome is blocked: its gateway is cut off as soon as this cluster's gateway has read that, and isthmusctl peer list shows it."},
		{blockResult{ID: "rome", Blocked: true, Changed: true, Applied: true}, "rome is blocked: this cluster's gateway has taken its key out of WireGuard. To end that: isthmusctl peer unblock rome"},
		{blockResult{ID: "rome", Applied: true}, "rome is not blocked, and connected."},
		{blockResult{ID: "rome", Blocked: true, Block: "by a at b"}, "rome is blocked already (by a at b): nothing to do."},
		{blockResult{ID: "rome", Blocked: true}, "rome is blocked already (without a reason): nothing to do."},
		{blockResult{ID: "rome", Changed: true}, "rome is no longer blocked: the gateways connect by themselves."},
		{blockResult{ID: "rome"}, "rome is not blocked: nothing to do."},
	} {
		assert.Equal(t, tt.r.String(), tt.want)
	}
}
