package daemon

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/desired"
	"github.com/isthmus-net/isthmus/appliance/internal/kube"
	"github.com/isthmus-net/isthmus/appliance/nettest"
)

// routeTo is a RouteConfiguration addressed to nodes.
func routeTo(name, dst, dev string) cluster.RouteConfiguration {
	rc := cluster.RouteConfiguration{Meta: meta(kindRoute, name), Table: name}
	rc.Labels = map[string]string{"networking.liqo.io/route-category": "fabric"}
	p := netip.MustParsePrefix(dst)
	rc.Rules = []cluster.RouteRule{{Dst: p, Routes: []cluster.TableRoute{{Dst: p, Dev: dev, Scope: "link"}}}}
	return rc
}

// condition returns a condition by type.
func find(t *testing.T, conditions []Condition, typ string) Condition {
	t.Helper()
	for _, c := range conditions {
		if c.Type == typ {
			return c
		}
	}
	t.Fatalf("no condition %s in %v", typ, conditions)
	return Condition{}
}

// TestNode runs the node daemon as it is, in a namespace with two links, and
// does to it what happens to nodes.
func TestNode(t *testing.T) {
	nettest.Need(t, "ip")
	host, other := nettest.Another(t), nettest.Another(t)
	wire(t, host, other, netip.MustParseAddr("172.18.1.11"), netip.MustParseAddr("172.18.1.1"))
	host.Run("ip", "link", "add", "cni0", "type", "bridge")
	host.Run("ip", "address", "add", "10.0.1.1/24", "dev", "cni0")
	host.Run("ip", "link", "set", "cni0", "up")

	api := newMemoryAPI(kube.NodeView{
		Input: desired.NodeInput{
			Name:   "n1",
			Nodes:  []cluster.InternalNode{{Meta: cluster.Meta{Ref: cluster.Ref{Kind: "InternalNode", Name: "n1"}}, InternalIP: netip.MustParseAddr("10.80.0.2")}},
			Routes: []cluster.RouteConfiguration{routeTo("good", "10.9.0.0/16", "eth0")},
		},
	})
	api.synced = make(chan struct{}) // the API server does not answer yet
	var status latest[NodeStatus]
	log, text := newLog(t, "n1")
	cfg := NodeConfig{
		NodeName: "n1", API: api, WriteStatus: status.write,
		Serving: Serving{Health: "127.0.0.1:8081", Metrics: "127.0.0.1:8082", Guard: tokenGuard}, Logger: log,
	}
	stop := inNS(t, host, func(ctx context.Context) error { return RunNode(ctx, cfg) })

	rules := func() string { return host.Run("ip", "rule", "show") }
	hasRule := func() error {
		if !strings.Contains(rules(), "310:") {
			return errors.New(rules())
		}
		return nil
	}
	ready := func(want int) func() error {
		return func() error {
			code, body, err := get(host, "http://127.0.0.1:8081/readyz")
			if err != nil || code != want {
				return fmt.Errorf("readyz: %d %q %v", code, body, err)
			}
			return nil
		}
	}
	within(t, 5*time.Second, ready(503)) // nothing is applied before all is known
	assert.Assert(t, hasRule() != nil)
	code, _, err := get(host, "http://127.0.0.1:8081/healthz")
	assert.NilError(t, err)
	assert.Equal(t, code, 200)

	close(api.synced)
	within(t, 5*time.Second, hasRule)
	within(t, 5*time.Second, ready(200))
	within(t, 5*time.Second, func() error {
		if st := status.get(); len(st.Applied) != 1 || !st.Applied[0].OK || st.Applied[0].ObservedGeneration != 3 {
			return fmt.Errorf("%+v", st)
		}
		return nil
	})
	st := status.get()
	assert.Assert(t, st.Kernel != "")
	assert.Assert(t, find(t, st.Conditions, "Ready").OK)
	assert.Equal(t, find(t, st.Conditions, "SourceDetected").Reason, "NoGateway")
	if c := find(t, st.Conditions, "OverlaySupported"); !c.OK {
		assert.Assert(t, strings.Contains(c.Message, "modprobe geneve"), c.Message)
	}

	// Gateways appear: one here, one elsewhere.
	api.set(func(v *kube.NodeView) {
		v.Input.Fabrics = []cluster.InternalFabric{fabric("t1", "gw-a", "n1", "10.0.1.5"), fabric("t2", "gw-b", "n2", "10.0.2.5")}
	})
	sources := func(local, remote string) func() error {
		return func() error {
			text := func(a netip.Addr) string {
				if !a.IsValid() {
					return ""
				}
				return a.String()
			}
			if st := status.get(); text(st.Local) != local || text(st.Remote) != remote {
				return fmt.Errorf("local %s remote %s", st.Local, st.Remote)
			}
			return nil
		}
	}
	within(t, 2*time.Second, sources("10.0.1.1", "172.18.1.11"))

	// The route to the other gateway changes, and nobody tells us.
	host.Run("ip", "address", "add", "172.18.1.99/32", "dev", "eth0")
	host.Run("ip", "route", "add", "10.0.2.0/24", "via", "172.18.1.1", "src", "172.18.1.99")
	took := within(t, 2*time.Second, sources("10.0.1.1", "172.18.1.99"))
	t.Logf("a changed route was noticed after %v", took.Round(time.Millisecond))

	// There is no way any more: the address is withdrawn, and it is said why.
	host.Run("ip", "route", "replace", "unreachable", "10.0.2.0/24")
	within(t, 2*time.Second, sources("10.0.1.1", ""))
	within(t, 2*time.Second, func() error {
		if c := find(t, status.get().Conditions, "SourceDetected"); c.OK || !strings.Contains(c.Message, "t2/gw-b") {
			return fmt.Errorf("%+v", c)
		}
		return nil
	})
	api.set(func(v *kube.NodeView) { v.Input.Fabrics = v.Input.Fabrics[1:] })
	within(t, 2*time.Second, sources("", ""))

	// A bad object beside the good one: its own entry says so, the other one
	// stays; the daemon stays ready.
	api.set(func(v *kube.NodeView) {
		v.Input.Routes = []cluster.RouteConfiguration{routeTo("good", "10.9.0.0/16", "eth0"), routeTo("bad", "10.8.0.0/16", "eth7")}
	})
	within(t, 5*time.Second, func() error {
		st := status.get()
		if len(st.Applied) != 2 || st.Applied[0].OK || !st.Applied[1].OK || !strings.Contains(st.Applied[0].Message, "eth7") {
			return fmt.Errorf("%+v", st.Applied)
		}
		return nil
	})
	assert.NilError(t, ready(200)())

	// Drift, while that other thing keeps failing.
	for range 3 {
		host.Run("ip", "rule", "delete", "priority", "310")
		took := within(t, 2*time.Second, hasRule)
		t.Logf("a deleted rule was back after %v", took.Round(time.Millisecond))
	}

	// The API server is gone: traffic and repairs go on, one line in the log.
	status.fail(errors.New("connection refused"))
	api.set(func(v *kube.NodeView) { v.Input.Routes = v.Input.Routes[:1] })
	host.Run("ip", "rule", "delete", "priority", "310")
	within(t, 2*time.Second, hasRule)
	within(t, 5*time.Second, func() error {
		if !strings.Contains(text.String(), "InternalNode.status: failed") {
			return errors.New("no word of it in the log")
		}
		return nil
	})
	status.fail(nil)
	within(t, 10*time.Second, func() error {
		if st := status.get(); len(st.Applied) != 1 {
			return fmt.Errorf("%+v", st.Applied)
		}
		return nil
	})
	assert.Equal(t, strings.Count(text.String(), "InternalNode.status: failed"), 1)

	// Metrics are for those whom the guard lets through, by TLS; health is for
	// everybody, and neither is where the other is.
	for _, tt := range []struct {
		url, token string
		want       int
	}{
		{"http://127.0.0.1:8081/healthz", "", 200},
		{"http://127.0.0.1:8081/readyz", "", 200},
		{"http://127.0.0.1:8081/metrics", metricsToken, 404},
		{"https://127.0.0.1:8082/metrics", "", 401},
		{"https://127.0.0.1:8082/metrics", "guessed", 401},
		{"http://127.0.0.1:8082/metrics", metricsToken, 400},
		{"https://127.0.0.1:8082/healthz", metricsToken, 404},
	} {
		code, body, err := getWith(host, tt.url, tt.token)
		assert.NilError(t, err, tt.url)
		assert.Equal(t, code, tt.want, "%s with token %q: %.200s", tt.url, tt.token, body)
	}
	within(t, 5*time.Second, func() error { // a pass that finds nothing to do comes after those that do something
		code, body, err := get(host, "https://127.0.0.1:8082/metrics")
		if err != nil || code != 200 {
			return fmt.Errorf("%d %v", code, err)
		}
		for _, name := range []string{
			`isthmus_passes_total{result="failed"}`, `isthmus_passes_total{result="idle"}`, "isthmus_pass_duration_seconds_bucket",
			`isthmus_changes_total{kind="rule"}`, "isthmus_no_route_packets_total",
		} {
			if !strings.Contains(body, "\n"+name) {
				return fmt.Errorf("%s is not in\n%s", name, body)
			}
		}
		return nil
	})

	stop()
	assert.NilError(t, hasRule(), "the end of the daemon must leave everything in place")
}
