package desired_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/appliance/desired"
	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// TestNodesAtOnce: whatever other rules and routes a gateway has, one rule for all links
// to nodes and the table that goes with it do to every packet what a rule for each does.
func TestNodesAtOnce(t *testing.T) {
	fewer, more := 0, 0
	for seed := range uint64(2000) {
		r := rand.New(rand.NewPCG(seed, 13))
		plain, others := randomRules(r)
		v6 := len(plain.Rules) > 0 && plain.Rules[0].Is6()
		plain.Links = nil
		plain.Rules = slices.DeleteFunc(plain.Rules, func(r netstate.Rule) bool { return r.Unreachable })
		plain.Rules = plain.Rules[:min(len(plain.Rules), r.IntN(4))] // of more than these some is always in the way
		for i := range plain.Routes {
			if plain.Routes[i].Dev != "" && r.IntN(2) == 0 {
				plain.Routes[i].Dev = desired.TunnelInterface
			}
		}
		priority := 300 + uint32(r.IntN(30))
		missing := r.IntN(20)
		for i := range 3 {
			link := fmt.Sprintf("liqo.node-%d", i+1)
			plain.Links = append(plain.Links, netstate.Link{Name: link, Kind: netstate.KindGeneve, Geneve: netstate.Geneve{VNI: uint32(i + 1), Remote: addr("192.0.2.1"), Port: 6091}})
			if i != missing {
				plain.Rules = append(plain.Rules, netstate.Rule{Priority: priority, IPv6: v6, IIF: link, Table: 1500})
			}
		}
		for _, dst := range []string{"10.1.0.0/16", "10.2.2.2/32", "fd00:1::/32", "fd00:9::/32"} {
			if p := prefix(dst); p.Addr().Is6() == v6 {
				plain.Routes = append(plain.Routes, netstate.Route{Table: 1500, Dst: p, Dev: pick(r, desired.TunnelInterface, desired.TunnelInterface, desired.TunnelInterface, "a")})
			}
		}
		if last := plain.Routes[len(plain.Routes)-1]; r.IntN(3) == 0 { // some may reach a part of it anyway
			last.Table = 1501
			plain.Routes = append(plain.Routes, last)
			plain.Rules = append(plain.Rules, netstate.Rule{Priority: 299 + uint32(r.IntN(30)), IPv6: v6, IIF: pick(r, "", "eth0", "liqo-tunnel"), Mark: pick[uint32](r, 0, 7), Table: 1501})
		}
		if r.IntN(3) == 0 && !v6 { // and there may be a way back by one link
			plain.Routes = append(plain.Routes, netstate.Route{Table: 1502, Dst: prefix(pick(r, "10.0.0.0/8", "10.1.0.0/16", "10.1.1.0/24")),
				Dev: pick(r, "a", "liqo.node-1", ""), Type: netstate.Unicast})
			if last := &plain.Routes[len(plain.Routes)-1]; last.Dev == "" {
				last.Type = netstate.Unreachable
			}
			plain.Rules = append(plain.Rules, netstate.Rule{Priority: 299, IIF: pick(r, "", "eth0", "liqo-tunnel"), Table: 1502})
		}
		if r.IntN(10) > 0 {
			plain.Rules = append(plain.Rules, netstate.Rule{Priority: 390, IPv6: v6, IIF: "lo", Not: true, Unreachable: true})
		}
		if plain.Validate() != nil {
			continue
		}
		s := desired.NodesAtOnce(plain, []uint32{77, 18952}, 3)
		assert.NilError(t, s.Validate())
		a, b := routerOf(plain, others), routerOf(s, others)
		a.filters, b.filters = true, true // as links of gateways have it
		all := probes(plain)
		for _, p := range probes(plain) { // what claims to be from the peer
			p.src = addr(pick(r, "10.1.0.9", "10.1.1.1", "10.2.2.2"))
			if p.dst.Is6() {
				p.src = addr(pick(r, "fd00:1::9", "fd00:9::1"))
			}
			all = append(all, p)
		}
		for _, p := range all {
			if want, got := a.route(p), b.route(p); got != want {
				t.Fatalf("seed %d: %v: %s, not %s\n%s\nbecame\n%s", seed, p, got, want, plain, s)
			}
		}
		if len(s.Rules) < len(plain.Normalized().Rules) {
			fewer++
			continue
		}
		more++
		assert.DeepEqual(t, s, plain.Normalized(), comparers)
	}
	t.Logf("%d of %d gateways have fewer rules", fewer, fewer+more)
	assert.Assert(t, fewer > 60 && more > 60, "%d have fewer rules, %d have not", fewer, more)
}
