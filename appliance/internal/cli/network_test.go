package cli

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"

	"github.com/isthmus-net/isthmus/appliance/internal/peer"
)

// runIn runs a command line without a kubeconfig of the machine's own.
func runIn(t *testing.T, args ...string) (code int, out, errs string) {
	t.Helper()
	t.Setenv("KUBECONFIG", filepath.Join(t.TempDir(), "none"))
	var stdout, stderr bytes.Buffer
	code = Run(t.Context(), "test", args, strings.NewReader(""), &stdout, &stderr)
	return code, stdout.String(), stderr.String()
}

func TestNetworkFlags(t *testing.T) {
	kubeconfig := filepath.Join(t.TempDir(), "config")
	assert.NilError(t, os.WriteFile(kubeconfig, []byte(`{apiVersion: v1, kind: Config, current-context: a, contexts: [{name: a, context: {cluster: a}}], clusters: [{name: a, cluster: {server: "http://127.0.0.1:1"}}]}`), 0o600))
	for _, tt := range []struct {
		args []string
		want []string
	}{
		{[]string{"network", "connect", "--mtu", "100"}, []string{"refused, nothing was changed", "--mtu: 100 is not an MTU"}},
		{[]string{"network", "connect", "--kubeconfig", kubeconfig, "--gw-server-type", "x/y"}, []string{`--gw-server-type "x/y"`, "networking.liqo.io/v1beta1/wggatewayservertemplates"}},
		{[]string{"network", "connect", "--kubeconfig", kubeconfig, "--remote-context", "b"}, []string{"which remote cluster", `"b" does not exist`, "--remote-kubeconfig or --remote-context"}},
		{[]string{"network", "reset", "--kubeconfig", kubeconfig}, []string{"cluster at http://127.0.0.1:1: the API server does not answer", "kubectl --kubeconfig " + kubeconfig + " version"}},
		{[]string{"network", "init", "milan"}, []string{"milan"}},
		{[]string{"network", "init", "--mtu", "1300"}, []string{"unknown flag: --mtu"}},
	} {
		code, _, errs := runIn(t, tt.args...)
		assert.Equal(t, code, 1, "%v", tt.args)
		for _, want := range tt.want {
			assert.Check(t, is.Contains(errs, want), "%v", tt.args)
		}
	}
	code, out, _ := runIn(t, "network", "connect", "--mtu", "100", "--json")
	assert.Equal(t, code, 1)
	assert.Check(t, is.Contains(out, `"object": "--mtu"`))
}

// The flags are those of the public CLI, and so are their defaults.
func TestNetworkHelp(t *testing.T) {
	_, out, _ := runIn(t, "network", "connect", "--help")
	for _, want := range []string{
		"--gw-server-type", "(default \"networking.liqo.io/v1beta1/wggatewayservertemplates\")", "--gw-server-template-name", "(default \"wireguard-server\")", "--gw-server-template-namespace",
		"--gw-server-service-type", "(default \"LoadBalancer\")", "--gw-server-service-port", "(default 51840)", "--gw-server-service-nodeport", "--gw-server-service-loadbalancerip",
		"--gw-client-type", "--gw-client-template-name", "(default \"wireguard-client\")", "--gw-client-template-namespace", "--gw-client-address", "--gw-client-port",
		"--mtu", "(default 1340)", "--disable-sharing-keys", "--timeout", "(default 2m0s)", "--wait", "--skip-validation", "--namespace", "--remote-namespace", "--liqo-namespace", "--remote-liqo-namespace",
		"--context", "--remote-context", "--kubeconfig", "--remote-kubeconfig", "--cluster", "--remote-cluster", "--user", "--remote-user", "--skip-confirm", "--global-labels", "--global-annotations", "--atomic", "--json",
	} {
		assert.Check(t, is.Contains(out, want))
	}
}

func TestTellsNetwork(t *testing.T) {
	pair := [2]peer.EndOfPair{{ID: "milan"}, {ID: "rome"}}
	for _, tt := range []struct {
		r    peer.Result
		want string
	}{
		{peer.Result{Action: peer.Connect, Connected: true}, "milan and rome are connected already: nothing to do."},
		{peer.Result{Action: peer.Connect}, "All objects of the peering of milan and rome are there: nothing to do. The gateways do not hear each other (yet): --wait waits for that, and says what to look at."},
		{peer.Result{Action: peer.Connect, Connected: true, Changed: 8, Seconds: 4.26}, "milan and rome are connected: 8 objects in 4.3s."},
		{peer.Result{Action: peer.Disconnect}, "milan and rome have no gateways for each other: nothing to do."},
		{peer.Result{Action: peer.Reset}, "milan and rome do not know each other: nothing to do."},
		{peer.Result{Action: peer.Init}, "milan and rome know each other's networks already: nothing to do."},
	} {
		var out bytes.Buffer
		tt.r.Clusters = pair
		assert.NilError(t, (&network{program: &program{out: &out}}).tell(tt.r))
		assert.Equal(t, out.String(), tt.want+"\n")
	}
}

// Where there is no terminal, what is waited for is said when it has lasted, once.
func TestTicker(t *testing.T) {
	var out bytes.Buffer
	p := newTicker(&out)
	p.waiting("waiting for a")
	assert.Equal(t, out.String(), "")
	p.since = p.since.Add(-patience)
	p.waiting("waiting for a")
	p.waiting("waiting for a")
	p.say("a is there")
	p.waiting("waiting for b")
	p.end()
	assert.Equal(t, out.String(), "waiting for a\na is there\n")

	out.Reset()
	p = &ticker{out: &out, terminal: true, width: 12}
	p.waiting("waiting for a")
	p.waiting("waiting for a")
	p.say("a is there")
	assert.Equal(t, out.String(), "… 0s waitin\r\x1b[K✓ a is there\n")
}
