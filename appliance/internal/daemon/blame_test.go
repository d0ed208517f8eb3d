package daemon

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/kernel"
	"github.com/isthmus-net/isthmus/appliance/netstate"
)

func ref(kind, name string) cluster.Ref {
	return cluster.Ref{Kind: kind, Namespace: "liqo-tenant-rome", Name: name, UID: name}
}

func meta(kind, name string) cluster.Meta { return cluster.Meta{Ref: ref(kind, name), Generation: 3} }

func TestBlame(t *testing.T) {
	prefix, addr := netip.MustParsePrefix, netip.MustParseAddr
	o := objects{
		routes: []cluster.RouteConfiguration{
			{Meta: meta(kindRoute, "rome-node-gw"), Rules: []cluster.RouteRule{
				{Dst: prefix("10.1.0.0/16"), Routes: []cluster.TableRoute{{Dst: prefix("10.1.0.0/16"), Via: addr("10.80.0.5"), Dev: "liqo.rome"}}},
			}},
			{Meta: meta(kindRoute, "user"), Rules: []cluster.RouteRule{
				{IIF: "eth7", Routes: []cluster.TableRoute{{Dst: prefix("10.2.0.0/16"), Dev: "eth7"}}},
			}},
			{Meta: meta(kindRoute, "rome-gw-ext"), Rules: []cluster.RouteRule{
				{IIF: "liqo.node-1", Routes: []cluster.TableRoute{{Dst: prefix("10.3.0.0/16"), Dev: "liqo-tunnel"}}},
			}},
			{Meta: meta(kindRoute, "node-1-gw-node"), Rules: []cluster.RouteRule{
				{IIF: "liqo-tunnel", Routes: []cluster.TableRoute{{Dst: prefix("10.4.0.0/24"), Dev: "liqo.node-1"}}},
			}},
		},
		firewalls: []cluster.FirewallConfiguration{
			{Meta: meta(kindFirewall, "clamp"), Table: "clamp", Family: "IPV4"},
			{Meta: meta(kindFirewall, "lan"), Table: "clamp", Family: "BRIDGE"},
		},
		tunnels: []cluster.GeneveTunnel{{Meta: meta("GeneveTunnel", "rome-n1"), VNI: 7}},
	}
	route := netstate.Route{Table: 1234, Dst: prefix("10.2.0.0/16"), Dev: "eth7"}
	for _, tc := range []struct {
		name      string
		remaining netstate.Changes
		err       error
		want      map[string]string // name to a part of the message
	}{
		{"nothing", netstate.Changes{}, nil, nil},
		{
			"one route of many", netstate.Changes{AddRoutes: []netstate.Route{route}},
			fmt.Errorf("apply: %w", errors.Join(errors.New("link foo: no"), errors.New("route "+route.String()+": no such device"))),
			map[string]string{"user": "no such device"},
		},
		{
			"a rule", netstate.Changes{AddRules: []netstate.Rule{{Priority: 310, Dst: prefix("10.1.0.0/16"), Table: 99}}},
			errors.New("permission denied"), map[string]string{"rome-node-gw": "permission denied"},
		},
		{
			"a rule for several destinations", netstate.Changes{AddRules: []netstate.Rule{{Priority: 310, Table: 99}}},
			errors.New("permission denied"), map[string]string{"rome-node-gw": "permission denied"},
		},
		{
			"a rule for several links", netstate.Changes{AddRules: []netstate.Rule{{Priority: 310, Not: true, IIF: "lo", Table: 99}}},
			errors.New("permission denied"), map[string]string{"rome-gw-ext": "permission denied"},
		},
		{
			"the rule that ends the lookup", netstate.Changes{AddRules: []netstate.Rule{{Priority: 390, Not: true, IIF: "lo", Unreachable: true}}},
			errors.New("permission denied"), nil,
		},
		{
			"a link takes its routes along", netstate.Changes{AddLinks: []netstate.Link{{Name: "liqo.rome", Kind: netstate.KindGeneve, Geneve: netstate.Geneve{VNI: 7}}}},
			errors.New("link liqo.rome: operation not supported"),
			map[string]string{"rome-node-gw": "not supported", "rome-n1": "not supported"},
		},
		{
			"a table", netstate.Changes{SetTables: []netstate.Table{{Family: netstate.FamilyIPv4, Name: "clamp"}}},
			errors.New("nft: table clamp: out of memory"), map[string]string{"clamp": "out of memory"},
		},
		{
			"a table of a family that the kernel lacks", netstate.Changes{SetTables: []netstate.Table{{Family: netstate.FamilyBridge, Name: "clamp"}}},
			fmt.Errorf("apply: %w", errors.Join(
				errors.New("route "+route.String()+": no such device"),
				fmt.Errorf("table bridge clamp: %w", fmt.Errorf("%w: the kernel lacks bridges: %w", kernel.ErrUnsupported, syscall.EOPNOTSUPP)))),
			map[string]string{"lan": "table bridge clamp: not supported here: the kernel lacks bridges: operation not supported"},
		},
		{
			"somebody else's", netstate.Changes{AddRoutes: []netstate.Route{{Table: 1, Dst: prefix("10.9.0.0/16"), Dev: "liqo.rome"}}},
			errors.New("no"), nil,
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got := blame(o, tc.remaining, tc.err)
			assert.Equal(t, len(got), len(tc.want), "%v", got)
			for r, msg := range got {
				want, ok := tc.want[r.Name]
				assert.Assert(t, ok && strings.Contains(msg, want), "%s: %s", r, msg)
			}
			if len(got) == 1 && tc.name == "one route of many" {
				for _, msg := range got {
					assert.Assert(t, !strings.Contains(msg, "link foo"), "the failure of another: %s", msg)
				}
			}
		})
	}
}

func TestApplied(t *testing.T) {
	t0, t1, t2 := time.Unix(100, 0), time.Unix(200, 0), time.Unix(300, 0)
	results := []cluster.Applied{
		{Object: ref("GeneveTunnel", "quiet"), OK: true},
		{Object: ref(kindRoute, "b"), OK: true, ObservedGeneration: 3},
		{Object: ref(kindRoute, "a"), OK: false, Message: "dev: is empty"},
		{Object: ref("GeneveTunnel", "loud"), OK: false, Message: "no address"},
	}
	first := applied(results, nil, nil, t0)
	var names []string
	for _, a := range first {
		names = append(names, a.Object.Name)
		assert.Equal(t, a.Since, t0)
	}
	assert.DeepEqual(t, names, []string{"loud", "a", "b"})
	assert.Assert(t, equalApplied(first, applied(results, nil, first, t1)), "nothing happened")

	second := applied(results, map[cluster.Ref]string{ref(kindRoute, "b"): "no such device"}, first, t2)
	assert.Assert(t, !second[2].OK && second[2].Message == "no such device" && second[2].Since.Equal(t2))
	assert.Assert(t, second[1].Message == "dev: is empty" && second[1].Since.Equal(t0))
}
