package desired_test

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/desired"
	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// A probe is a packet at the time when it is routed.
type probe struct {
	iif      string
	src, dst netip.Addr
	mark     uint32
	asked    bool // by the reverse-path filter, which sends nothing
}

// A router is what a kernel has of rules, in the order in which it asks them,
// and of routes: ours, and those of others that are in tables with a number. Some
// that are forwarded to the peer it refuses.
type router struct {
	rules  []netstate.Rule
	routes []netstate.Route
	others []netstate.Route
	refuse []netstate.FirewallRule
	// filters: it has a reverse-path filter.
	filters bool
}

func routerOf(s netstate.State, others []netstate.Route) *router {
	s = s.Normalized()
	return &router{rules: s.Rules, routes: s.Routes, others: others, refuse: refusals(s)}
}

// refusals returns the rules that keep what came in by no node's link from the peer.
func refusals(s netstate.State) []netstate.FirewallRule {
	for _, t := range s.Tables {
		if t.Name == desired.NodesOnlyTable {
			return t.Chains[0].Rules
		}
	}
	return nil
}

// refuses reports whether a rule of that table matches a packet that goes out by a link.
func refuses(rule netstate.FirewallRule, p probe, out string) bool {
	for _, m := range rule.Matches {
		is := false
		switch {
		case m.Dev != "":
			dev := p.iif
			if m.Dir == "out" {
				dev = out
			}
			prefix, wild := strings.CutSuffix(m.Dev, "*")
			is = dev == m.Dev || wild && strings.HasPrefix(dev, prefix)
		default:
			a := p.dst
			if m.Dir == "src" {
				a = p.src
			}
			is = !a.Less(m.Addr.From) && !m.Addr.To.Less(a)
		}
		if is == m.Negate {
			return false
		}
	}
	return !p.asked // the reverse-path filter asks no table
}

// forward returns where a packet goes that a link is found for.
func (k *router) forward(p probe, r netstate.Route) string {
	if p.iif != "lo" && slices.ContainsFunc(k.refuse, func(rule netstate.FirewallRule) bool { return refuses(rule, p, r.Dev) }) {
		return "unreachable"
	}
	// The reverse-path filter (loose): is there a way back, as if it had come by that link?
	if k.filters && !p.asked && p.iif != "lo" && !p.dst.Is6() {
		if back := k.route(probe{iif: r.Dev, src: p.dst, dst: p.src, asked: true}); back == "unreachable" || back == "nowhere" {
			return "unreachable"
		}
	}
	if !r.Via.IsValid() { // on the link: the next hop is the packet's own destination
		r.Via = p.dst
	}
	return fmt.Sprintf("%s %s src %s", r.Via, r.Dev, r.Src)
}

// route returns where a packet goes.
func (k *router) route(p probe) string {
	skipTo := uint32(0)
	for _, r := range k.rules {
		switch {
		case r.Priority < skipTo, r.Is6() != p.dst.Is6(), r.Not == ((r.IIF == "" || r.IIF == p.iif) && (r.Mark == 0 || r.Mark == p.mark) &&
			(!r.Src.IsValid() || r.Src.Contains(p.src)) && (!r.Dst.IsValid() || r.Dst.Contains(p.dst))):
			continue
		case r.Unreachable:
			return "unreachable"
		case r.Nop:
			continue
		case r.Goto != 0:
			if slices.ContainsFunc(k.rules, func(o netstate.Rule) bool { return o.Priority == r.Goto && o.Is6() == r.Is6() }) {
				skipTo = r.Goto
			}
			continue
		}
		var best netstate.Route
		for _, routes := range [][]netstate.Route{k.routes, k.others} {
			for _, route := range routes {
				if route.Table == r.Table && route.Dst.Contains(p.dst) && (!best.Dst.IsValid() || route.Dst.Bits() > best.Dst.Bits()) {
					best = route
				}
			}
		}
		switch {
		case best.Type == netstate.Unreachable:
			return "unreachable"
		case best.Dev != "":
			return k.forward(p, best)
		}
	}
	return "nowhere"
}

// add adds a rule as the kernel does: after those of its priority.
func (k *router) add(r netstate.Rule) {
	i := slices.IndexFunc(k.rules, func(o netstate.Rule) bool { return o.Priority > r.Priority })
	if i < 0 {
		i = len(k.rules)
	}
	k.rules = slices.Insert(k.rules, i, r)
}

// remove deletes the first rule that has everything that the request says
// (fib_rules_delrule), and returns it.
func (k *router) remove(r netstate.Rule) netstate.Rule {
	i := slices.IndexFunc(k.rules, func(o netstate.Rule) bool {
		return o.Priority == r.Priority && o.Is6() == r.Is6() && o.Unreachable == r.Unreachable && (o.Goto != 0) == (r.Goto != 0) && o.Nop == r.Nop && o.Table == r.Table &&
			(r.IIF == "" || r.IIF == o.IIF) && (r.OIF == "" || r.OIF == o.OIF) && (r.Mark == 0 || r.Mark == o.Mark) &&
			(!r.Src.IsValid() || r.Src == o.Src) && (!r.Dst.IsValid() || r.Dst == o.Dst)
	})
	if i < 0 {
		return netstate.Rule{}
	}
	gone := k.rules[i]
	k.rules = slices.Delete(k.rules, i, i+1)
	return gone
}

// change leads the router to another state, as appliance/kernel does, and calls
// look after every single step.
func (k *router) change(to netstate.State, look func(step string)) {
	c := netstate.Diff(netstate.State{Rules: k.rules, Routes: k.routes}, to)
	// A table with refusals comes after the rule that it belongs to, and goes before it:
	// what nobody answers for finds its way to the peer for that long.
	k.refuse = append(k.refuse, refusals(to)...)
	for _, r := range c.AddPassRules {
		k.add(r)
		look("add " + r.String())
	}
	for _, r := range c.AddRoutes {
		k.routes = append(k.routes, r)
		look("add " + r.String())
	}
	for _, r := range c.ReplaceRoutes {
		i := slices.IndexFunc(k.routes, func(o netstate.Route) bool { return o.Table == r.Table && o.Dst == r.Dst })
		k.routes[i] = r
		look("replace " + r.String())
	}
	for _, r := range c.AddRules {
		k.add(r)
		look("add " + r.String())
	}
	remove := func(r netstate.Rule) {
		if gone := k.remove(r); gone != r && gone.Priority != 0 {
			k.add(gone) // by mistake; it is put back
			k.remove(r)
		}
		look("delete " + r.String())
	}
	for _, r := range c.DeleteRules {
		remove(r)
	}
	for _, r := range c.DeleteRoutes {
		k.routes = slices.DeleteFunc(k.routes, func(o netstate.Route) bool { return o == r })
		look("delete " + r.String())
	}
	for _, r := range c.DeletePassRules {
		remove(r)
	}
}

// probes returns packets that tell states apart: to and from an address of
// every network that they know, the first and the last one, by every link.
func probes(states ...netstate.State) []probe {
	known := map[netip.Prefix]bool{prefix("203.0.113.0/24"): true, prefix("2001:db8::/32"): true}
	sources := map[netip.Addr]bool{addr("203.0.113.7"): true, addr("2001:db8::7"): true}
	links := map[string]bool{"lo": true, "net1": true, desired.PodInterface: true, desired.TunnelInterface: true}
	marks := map[uint32][]netip.Addr{}
	for _, s := range states {
		for _, r := range s.Routes {
			known[r.Dst] = true
		}
		for _, r := range s.Rules {
			for _, p := range []netip.Prefix{r.Src, r.Dst} {
				if p.IsValid() {
					known[p] = true
				}
			}
			if r.Src.IsValid() {
				sources[r.Src.Addr()] = true
			}
			if r.IIF != "" {
				links[r.IIF] = true
			}
			if _, seen := marks[r.Mark]; r.Mark != 0 && !seen {
				marks[r.Mark] = nil
			}
		}
		for _, table := range s.Tables {
			for _, c := range table.Chains {
				for _, r := range c.Rules {
					for _, m := range r.Matches {
						if r.Action.Kind == netstate.SetCTMark && m.Dir == "src" {
							marks[r.Action.Mark] = append(marks[r.Action.Mark], m.Addr.From)
						}
					}
					for _, e := range r.Action.Map.Entries {
						if r.Action.Kind == netstate.SetCTMark {
							mark := e.Mark &^ desired.ReservedMarks // as a packet gets it
							marks[mark] = append(marks[mark], e.Addr.From)
						}
					}
				}
			}
		}
	}
	var out []probe
	for p := range known {
		last := p.Addr()
		for i := p.Bits(); i < last.BitLen(); i++ { // set the host bits
			b := last.As16()
			j := i + 128 - last.BitLen()
			b[j/8] |= 0x80 >> (j % 8)
			if last = netip.AddrFrom16(b); p.Addr().Is4() {
				last = last.Unmap()
			}
		}
		for _, dst := range []netip.Addr{p.Addr(), last, last.Next()} {
			if !dst.IsValid() {
				continue
			}
			for iif := range links {
				for src := range sources {
					if src.Is6() == dst.Is6() {
						out = append(out, probe{iif: iif, src: src, dst: dst})
					}
				}
				for mark, stands := range marks {
					// A connection has a mark because of its source, and its
					// answers are for that.
					if len(stands) == 0 || slices.Contains(stands, dst) {
						out = append(out, probe{iif: iif, src: addr("203.0.113.7"), dst: dst, mark: mark})
					}
				}
			}
		}
	}
	slices.SortFunc(out, func(a, b probe) int {
		return cmp.Or(a.dst.Compare(b.dst), a.src.Compare(b.src), cmp.Compare(a.iif, b.iif), cmp.Compare(a.mark, b.mark))
	})
	return slices.Compact(out)
}

// same fails where two states send a packet different ways.
func same(t *testing.T, plain, fewer netstate.State, others []netstate.Route, name string) {
	t.Helper()
	a, b := routerOf(plain, others), routerOf(fewer, others)
	for _, p := range probes(plain) {
		if want, got := a.route(p), b.route(p); got != want {
			t.Fatalf("%s: %v: %s, not %s\n%s\nbecame\n%s", name, p, got, want, plain, fewer)
		}
	}
}

// randomRules returns a state with rules and routes that overlap in every way, and the routes of
// others.
func randomRules(r *rand.Rand) (s netstate.State, others []netstate.Route) {
	v6 := r.IntN(4) == 0
	network := func() netip.Prefix {
		if v6 {
			return prefix(pick(r, "::/0", "fd00::/16", "fd00:1::/32", "fd00:1:1::/48", "fd00:1:1::1/128", "fd00:2::/32", "fd00:2::2/128"))
		}
		return prefix(pick(r, "0.0.0.0/0", "10.0.0.0/8", "10.3.0.0/16", "10.4.4.4/32", "10.1.0.0/16", "10.1.1.0/24", "10.1.1.1/32", "10.1.1.2/32", "10.2.0.0/16", "10.2.2.0/24", "10.2.2.2/32"))
	}
	tables := []uint32{1000, 1001, 1002, 1003, 1004, 1005, 18952}
	for i, link := range []string{"liqo.node-1", "liqo.node-2", "liqo.node-3"}[:r.IntN(4)] {
		s.Links = append(s.Links, netstate.Link{Name: link, Kind: netstate.KindGeneve, Geneve: netstate.Geneve{VNI: uint32(i + 1), Remote: addr("192.0.2.1"), Port: 6091}})
		if r.IntN(4) > 0 {
			s.Rules = append(s.Rules, netstate.Rule{Priority: 390, IPv6: v6, IIF: pick(r, link, "lo"), Not: r.IntN(2) == 0, Unreachable: true})
		}
		if r.IntN(2) > 0 {
			s.Rules = append(s.Rules, netstate.Rule{Priority: 320 + uint32(i), IPv6: v6, IIF: link, Table: 1000})
		}
	}
	if r.IntN(4) == 0 { // some skip these rules
		s.Rules = append(s.Rules, netstate.Rule{Priority: 395, IPv6: v6, Nop: true})
		for i := range 1 + r.IntN(2) {
			s.Rules = append(s.Rules, netstate.Rule{Priority: 290 + uint32(i*r.IntN(30)), IPv6: v6, Src: network(), Goto: 395})
		}
	}
	priorities := r.Perm(20)
	if r.IntN(2) == 0 {
		for i := range priorities { // some have the same one
			priorities[i] = r.IntN(20)
		}
	}
	have := map[string]bool{}
	route := func(table uint32, dst netip.Prefix) netstate.Route {
		out := netstate.Route{Table: table, Dst: dst, Dev: pick(r, "a", "b", "c")}
		if r.IntN(8) == 0 {
			out.Dev, out.Type = "", pick(r, netstate.Unreachable, netstate.Unreachable, netstate.Throw)
		}
		return out
	}
	give := func(to *[]netstate.Route, table uint32, dst netip.Prefix) {
		if key := fmt.Sprint(table, dst); !have[key] {
			have[key] = true
			*to = append(*to, route(table, dst))
		}
	}
	for i := range 1 + r.IntN(8) {
		rule := netstate.Rule{Priority: 300 + uint32(priorities[i]), IPv6: v6, Table: pick(r, append(tables, tables...)...)}
		if r.IntN(8) == 0 {
			rule.Table = pick[uint32](r, 77, 254)
		}
		if r.IntN(4) > 0 {
			rule.Dst = network()
		}
		if r.IntN(8) == 0 {
			rule.Src = network()
		}
		if r.IntN(2) == 0 {
			rule.IIF = pick(r, "liqo.node-1", "liqo.node-2", "liqo-tunnel")
		}
		if r.IntN(8) == 0 {
			rule.Mark = 7
		}
		s.Rules = append(s.Rules, rule)
		if rule.Table != 77 && rule.Table != 254 {
			if rule.Dst.IsValid() && r.IntN(8) > 0 {
				give(&s.Routes, rule.Table, rule.Dst)
			} else {
				give(&s.Routes, rule.Table, network())
			}
		}
	}
	for range r.IntN(3) {
		give(&s.Routes, pick(r, tables...), network())
	}
	for _, table := range []uint32{77, 254} {
		for range r.IntN(3) {
			give(&others, table, network())
		}
	}
	return s, others
}

// Fewer rules do the same: whatever is in them, to every packet, and while they
// take the place of the others, and give it back, one by one.
func TestFewerRulesDoTheSame(t *testing.T) {
	was, is, walks := 0, 0, 0
	for seed := range uint64(3000) {
		r := rand.New(rand.NewPCG(seed, 11))
		plain, others := randomRules(r)
		var explicit []uint32
		if r.IntN(3) == 0 {
			explicit = []uint32{300 + uint32(r.IntN(20)), 310}
		}
		fewer := desired.FewerRules(plain, []uint32{77, 18952}, explicit)
		assert.NilError(t, fewer.Validate())
		same(t, plain, fewer, others, fmt.Sprintf("seed %d", seed))
		// The kernel's order of rules with the same priority is that in which
		// they came.
		ties := slices.ContainsFunc(plain.Rules, func(a netstate.Rule) bool {
			return slices.ContainsFunc(plain.Rules, func(b netstate.Rule) bool { return a != b && a.Priority == b.Priority && !a.Unreachable })
		})
		if seed%4 == 0 && !ties {
			walks++
			steady(t, plain, fewer, others)
			steady(t, fewer, plain, others)
		}
		was, is = was+len(plain.Normalized().Rules), is+len(fewer.Rules)
	}
	assert.Assert(t, is < was*19/20, "%d rules of %d are left: nothing was tried", is, was)
	assert.Assert(t, walks > 100)
	t.Logf("%d rules became %d, %d times one by one", was, is, walks)
}

// A deployment is what a host is given.
type deployment struct {
	name   string
	plain  netstate.State
	fewer  netstate.State
	rules  int // that it has of IPv4; 0: whatever
	others []netstate.Route
}

// deployments are hosts of all kinds.
func deployments() []deployment {
	node := func(name string, in desired.NodeInput, rules int) deployment {
		s, _ := desired.Node(in)
		return deployment{name: name, plain: desired.PlainNode(in), fewer: s, rules: rules}
	}
	gateway := func(name string, in desired.GatewayInput, rules int) deployment {
		s, _ := desired.Gateway(in)
		return deployment{name: name, plain: desired.PlainGateway(in), fewer: s, rules: rules}
	}
	mapped := romeGateway()
	mapped.Firewalls = append(mapped.Firewalls, mappedIP("host", "10.70.0.7", "192.168.40.10"))
	out := []deployment{
		node("a node", milanNode(), 2+1+1),
		node("a node of the VXLAN overlay", overlayNode("node-1"), 1+1+1),
		node("a gateway's node", overlayNode("node-2"), 1+1+2+1),
		node("a namespace's node", hostNode("node-2"), 1+3),
		gateway("a gateway", romeGateway(), 3+4),
		gateway("a gateway with mapped hosts", mapped, 3+4),
		gateway("a gateway of the VXLAN overlay", overlayGateway(), 0),
		gateway("a gateway in a namespace", hostGateway(), 0),
		gateway("a gateway of IPv6", sixGateway(), 0),
		gateway("a large gateway", large(9), 1+4),
		gateway("a large gateway with a node whose link is called otherwise", called(large(9), "eth7"), 9+4),
		gateway("a large gateway that a node has not joined yet", joining(large(9)), 1+4),
		gateway("a large gateway that marks", marking(large(9)), 1+4),
		gateway("a crowded gateway", crowded(), 0),
		gateway("a gateway that marks", marking(romeGateway()), 3+4),
	}
	for i := range out {
		out[i].others = []netstate.Route{
			{Table: desired.TableMain, Dst: prefix("0.0.0.0/0"), Dev: "eth0"}, {Table: desired.TableMain, Dst: prefix("::/0"), Dev: "eth0"},
			{Table: desired.TableMain, Dst: prefix("10.127.65.0/24"), Dev: "cni0"},
		}
	}
	return out
}

// called gives the link to the last node another name.
func called(in desired.GatewayInput, name string) desired.GatewayInput {
	n := &in.Nodes[len(in.Nodes)-1]
	for i := range in.Routes {
		for j := range in.Routes[i].Rules {
			r := &in.Routes[i].Rules[j]
			r.Routes = slices.Clone(r.Routes)
			if r.IIF == n.GatewayInterface {
				r.IIF = name
			}
			for k := range r.Routes {
				if r.Routes[k].Dev == n.GatewayInterface {
					r.Routes[k].Dev = name
				}
			}
		}
	}
	n.GatewayInterface = name
	return in
}

// joining adds a node whose daemon has not said yet where it is: there is no link to it.
func joining(in desired.GatewayInput) desired.GatewayInput {
	for i := range in.Routes {
		if rc := &in.Routes[i]; strings.HasSuffix(rc.Table, "-gw-ext") {
			r := rc.Rules[0]
			r.IIF = "liqo.node-new"
			rc.Rules = append(slices.Clone(rc.Rules), r)
		}
	}
	return in
}

// marking adds what the controller plans for connections of nodes.
func marking(in desired.GatewayInput) desired.GatewayInput {
	c := cluster.Chain{Name: "mark-to-conntrack", Type: "filter", Hook: "forward", Policy: "accept"}
	for i, n := range in.Nodes {
		c.Filter = append(c.Filter, cluster.FilterRule{
			Name: n.Name, Action: "ctmark", Value: fmt.Sprint(i + 1),
			Match: []cluster.Match{{Dev: n.GatewayInterface, Position: "in"}, {IP: cluster.AddrRange{From: n.InternalIP, To: n.InternalIP}, Position: "src"}},
		})
		name := "milan-" + n.Name + "-service-nodeport-routing"
		in.Routes = append(in.Routes, cluster.RouteConfiguration{
			Meta: meta("RouteConfiguration", "liqo", name, routeCategory, "gateway", routeSubcategory, "fabric"), Table: name,
			Rules: []cluster.RouteRule{{IIF: desired.TunnelInterface, Mark: uint32(i + 1), Routes: []cluster.TableRoute{
				{Dst: prefix("0.0.0.0/0"), Via: n.InternalIP, Dev: n.GatewayInterface, OnLink: true},
			}}},
		})
	}
	in.Firewalls = append(in.Firewalls, cluster.FirewallConfiguration{
		Meta:  meta("FirewallConfiguration", "liqo", "service-nodeport-routing", fwCategory, "gateway", fwSubcategory, "fabric"),
		Table: "service-nodeport-routing", Family: "IPV4", Chains: []cluster.Chain{c},
	})
	return in
}

// What hosts are given does the same with fewer rules, and not one packet takes
// another way while an installation that has the others is brought up to date,
// or back.
func TestHostsWithFewerRules(t *testing.T) {
	for _, d := range deployments() {
		t.Run(d.name, func(t *testing.T) {
			same(t, d.plain, d.fewer, d.others, d.name)
			if d.rules != 0 {
				n := 0
				for _, r := range d.fewer.Rules {
					if !r.Is6() {
						n++
					}
				}
				assert.Equal(t, n, d.rules, "%s", d.fewer)
			}
			steady(t, d.plain, d.fewer, d.others)
			steady(t, d.fewer, d.plain, d.others)
		})
	}
}

// steady fails if a packet that goes the same way in both states goes another
// one on the way from the first to the second.
func steady(t *testing.T, from, to netstate.State, others []netstate.Route) {
	t.Helper()
	k, end := routerOf(from, others), routerOf(to, others)
	ways := map[probe]string{}
	for _, p := range probes(from, to) {
		if way := k.route(p); way == end.route(p) {
			ways[p] = way
		}
	}
	k.change(to, func(step string) {
		for p, way := range ways {
			if got := k.route(p); got != way {
				t.Fatalf("after %q: %v: %s, not %s\n%s\nto\n%s\nnow %v", step, p, got, way, from, to, k.rules)
			}
		}
	})
	assert.DeepEqual(t, netstate.State{Rules: k.rules, Routes: k.routes}.Normalized(), netstate.State{Rules: to.Rules, Routes: to.Routes}.Normalized(), comparers)
}

// Peers, nodes and users' objects come and go, and nobody else's packets notice.
func TestOthersDoNotNotice(t *testing.T) {
	users := cluster.RouteConfiguration{
		Meta: meta("RouteConfiguration", "liqo", "oslo-users-own", routeCategory, "fabric"), Table: "users-own",
		Rules: []cluster.RouteRule{
			{Dst: prefix("10.71.0.0/20"), IIF: "cni0", Routes: []cluster.TableRoute{{Dst: prefix("10.71.0.0/24"), Dev: "eth1"}}},
			{Dst: prefix("10.71.8.0/24"), Routes: []cluster.TableRoute{{Dst: prefix("10.71.8.0/24"), Dev: "eth1"}}},
		},
	}
	node := func(edit func(*desired.NodeInput)) netstate.State {
		in := milanNode()
		edit(&in)
		s, _ := desired.Node(in)
		return s
	}
	gateway := func(edit func(*desired.GatewayInput)) netstate.State {
		in := large(9)
		edit(&in)
		s, _ := desired.Gateway(in)
		return s
	}
	for _, tt := range []struct {
		name     string
		from, to netstate.State
	}{
		{"a peer less", node(func(*desired.NodeInput) {}), node(func(in *desired.NodeInput) { in.Fabrics, in.Routes = in.Fabrics[:1], in.Routes[:1] })},
		{"the other peer less", node(func(*desired.NodeInput) {}), node(func(in *desired.NodeInput) { in.Fabrics, in.Routes = in.Fabrics[1:], in.Routes[1:] })},
		{"users' routes", node(func(*desired.NodeInput) {}), node(func(in *desired.NodeInput) { in.Routes = append(in.Routes, users) })},
		{"a node less", gateway(func(*desired.GatewayInput) {}), gateway(func(in *desired.GatewayInput) {
			in.Nodes, in.Tunnels, in.Routes = in.Nodes[1:], in.Tunnels[1:], in.Routes[1:]
		})},
		{"users' routes in a gateway", gateway(func(*desired.GatewayInput) {}), gateway(func(in *desired.GatewayInput) {
			users := users
			users.Labels = map[string]string{routeCategory: "gateway", routeUnique: "rome"}
			users.Rules = append(users.Rules, cluster.RouteRule{Dst: prefix("10.80.1.0/24"), Priority: 320, Routes: []cluster.TableRoute{{Dst: prefix("10.80.1.3/32"), Dev: "eth1"}}})
			in.Routes = append(in.Routes, users)
		})},
	} {
		t.Run(tt.name, func(t *testing.T) {
			steady(t, tt.from, tt.to, nil)
			steady(t, tt.to, tt.from, nil)
		})
	}
}

// A mark stands for a node's address as long as nothing else gets it.
func TestMarksThatSayMore(t *testing.T) {
	marks := func(t *testing.T, in desired.GatewayInput) (n int) {
		t.Helper()
		s, _ := desired.Gateway(in)
		same(t, desired.PlainGateway(in), s, nil, "a gateway")
		for _, r := range s.Rules {
			if r.Mark != 0 && r.IIF != "lo" { // that is for the gateway's own errors
				n++
			}
		}
		return n
	}
	last := func(in *desired.GatewayInput) *cluster.Chain {
		return &in.Firewalls[len(in.Firewalls)-1].Chains[0]
	}
	for _, tt := range []struct {
		name string
		edit func(in *desired.GatewayInput)
		want int
	}{
		{"as planned", func(*desired.GatewayInput) {}, 0},
		{"by the link alone", func(in *desired.GatewayInput) {
			for i := range last(in).Filter {
				last(in).Filter[i].Match = last(in).Filter[i].Match[:1]
			}
		}, 3},
		{"for everybody else", func(in *desired.GatewayInput) { last(in).Filter[0].Match[1].Negate = true }, 1},
		{"for a network", func(in *desired.GatewayInput) { last(in).Filter[1].Match[1].IP.To = addr("10.80.0.9") }, 1},
		{"for two", func(in *desired.GatewayInput) { last(in).Filter[1].Value = "1" }, 2},
		{"after translation", func(in *desired.GatewayInput) { last(in).Hook = "postrouting" }, 3},
		{"the destination leads elsewhere", func(in *desired.GatewayInput) {
			in.Routes[len(in.Routes)-1].Rules[0].Routes[0].Via = addr("10.80.0.3")
			in.Routes[len(in.Routes)-1].Rules[0].Routes[0].Dev = "liqo.node-2"
		}, 1},
		{"nobody knows the destination", func(in *desired.GatewayInput) { in.Routes = in.Routes[len(in.Routes)-3:] }, 3},
	} {
		t.Run(tt.name, func(t *testing.T) {
			in := marking(romeGateway())
			tt.edit(&in)
			assert.Equal(t, marks(t, in), tt.want)
		})
	}
}

// Whatever objects say, fewer rules do the same.
func TestRandomObjectsWithFewerRules(t *testing.T) {
	for seed := range uint64(400) {
		node, gateway := random(rand.New(rand.NewPCG(seed, 0)))
		fewer, _ := desired.Node(node)
		same(t, desired.PlainNode(node), fewer, nil, fmt.Sprintf("node, seed %d", seed))
		fewer, _ = desired.Gateway(gateway)
		same(t, desired.PlainGateway(gateway), fewer, nil, fmt.Sprintf("gateway, seed %d", seed))
	}
}
