package trace_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"

	"github.com/isthmus-net/isthmus/appliance/netstate"
	"github.com/isthmus-net/isthmus/appliance/trace"
)

func addr(s string) netip.Addr     { return netip.MustParseAddr(s) }
func prefix(s string) netip.Prefix { return netip.MustParsePrefix(s) }

func udp(src, dst string) trace.Packet {
	return trace.Datagram(netip.MustParseAddrPort(src), netip.MustParseAddrPort(dst), 100)
}

func source(s string) netstate.Match {
	return netstate.Match{Dir: "src", Addr: netstate.RangeOf(prefix(s))}
}

func dest(s string) netstate.Match {
	return netstate.Match{Dir: "dst", Addr: netstate.RangeOf(prefix(s))}
}

func act(kind netstate.ActionKind, matches ...netstate.Match) netstate.FirewallRule {
	return netstate.FirewallRule{Name: string(kind), Matches: matches, Action: netstate.Action{Kind: kind}}
}

func nat(kind netstate.ActionKind, to string, matches ...netstate.Match) netstate.FirewallRule {
	r := act(kind, matches...)
	r.Action.To, r.Action.Prefix = prefix(to), !prefix(to).IsSingleIP()
	return r
}

// chains is a table of chains, called after their hooks.
func chains(list ...netstate.Chain) []netstate.Table {
	return []netstate.Table{{Family: netstate.FamilyIPv4, Name: "t", Chains: list}}
}

func chain(kind, hook string, priority int32, rules ...netstate.FirewallRule) netstate.Chain {
	return netstate.Chain{Name: fmt.Sprintf("%s%+d", hook, priority), Type: kind, Hook: hook, Priority: priority, Rules: rules}
}

// via is a route by one of the links of the host in the middle.
func via(table uint32, dst string, link int) netstate.Route {
	r := netstate.Route{Table: table, Dst: prefix(dst), OnLink: true}
	r.Dev, r.Via = fmt.Sprintf("e%d", link), addr(fmt.Sprintf("10.0.%d.2", link))
	return r
}

// middle returns the world of TestAgainstKernel.
func middle(t *testing.T, s netstate.State, rpFilter int) *trace.World {
	t.Helper()
	assert.NilError(t, s.Validate())
	w, err := trace.New(hostsOf(s, rpFilter)...)
	assert.NilError(t, err)
	return w
}

func TestRouting(t *testing.T) {
	type state = netstate.State
	rule := func(priority, table uint32) netstate.Rule { return netstate.Rule{Priority: priority, Table: table} }
	from := func(r netstate.Rule, src string) netstate.Rule { r.Src = prefix(src); return r }
	to := func(r netstate.Rule, dst string) netstate.Rule { r.Dst = prefix(dst); return r }
	by := func(r netstate.Rule, iif string) netstate.Rule { r.IIF = iif; return r }
	marked := func(r netstate.Rule, mark uint32) netstate.Rule { r.Mark = mark; return r }
	shut := func(r netstate.Rule) netstate.Rule { r.Table, r.Unreachable = 0, true; return r }
	past := func(r netstate.Rule, priority uint32) netstate.Rule { r.Table, r.Goto = 0, priority; return r }
	nop := func(priority uint32) netstate.Rule { return netstate.Rule{Priority: priority, Nop: true} }
	mark := act(netstate.SetCTMark, dest("10.9.0.7/32"))
	mark.Action.Mark = 2
	restore := chains(chain("filter", "prerouting", 0, mark, act(netstate.RestoreCT)))
	for _, tt := range []struct {
		name     string
		state    state
		rpFilter int
		from     string
		p        trace.Packet
		want     string // parts of the last hop and of the end
	}{
		{"main", state{}, 0, "a", udp("10.0.1.2:1", "10.9.0.5:2"), "c: e0|rule 32766"},
		{"the lower priority is the first", state{Rules: []netstate.Rule{rule(310, 7), rule(305, 8)}, Routes: []netstate.Route{via(7, "10.9.0.0/16", 1), via(8, "10.9.0.0/16", 2)}},
			0, "c", udp("10.0.3.2:1", "10.9.0.5:2"), "b: e0|rule 305"},
		{"a table without a route is passed over", state{Rules: []netstate.Rule{rule(305, 7), rule(310, 8)}, Routes: []netstate.Route{via(7, "10.8.0.0/16", 1), via(8, "10.9.0.0/16", 2)}},
			0, "c", udp("10.0.3.2:1", "10.9.0.5:2"), "b: e0|rule 310"},
		{"the longest prefix", state{Rules: []netstate.Rule{rule(305, 7)}, Routes: []netstate.Route{via(7, "0.0.0.0/0", 3), via(7, "10.9.0.0/16", 1), via(7, "10.9.0.0/24", 2)}},
			0, "a", udp("10.0.1.2:1", "10.9.0.5:2"), "b: e0|10.9.0.0/24 via 10.0.2.2"},
		{"iif", state{Rules: []netstate.Rule{by(rule(305, 7), "e2"), by(rule(306, 8), "e1")}, Routes: []netstate.Route{via(7, "0.0.0.0/0", 3), via(8, "0.0.0.0/0", 2)}},
			0, "a", udp("10.0.1.2:1", "10.9.0.5:2"), "b: e0|rule 306: from all iif e1"},
		{"its own packets come from lo", state{Rules: []netstate.Rule{by(rule(305, 7), "lo")}, Routes: []netstate.Route{via(7, "10.9.0.0/16", 2)}},
			0, "r", trace.Packet{Dst: addr("10.9.0.5"), Proto: "udp", Size: 60}, "b: e0|rule 305: from all iif lo|10.0.2.1"},
		{"from is not for a source that is not chosen", state{Rules: []netstate.Rule{from(rule(305, 7), "10.0.3.0/24")}, Routes: []netstate.Route{via(7, "0.0.0.0/0", 2)}},
			0, "r", trace.Packet{Dst: addr("10.9.0.5"), Proto: "udp", Size: 60}, "c: e0|rule 32766"},
		{"connect looks again with the source", state{Rules: []netstate.Rule{from(rule(305, 7), "10.0.3.0/24")}, Routes: []netstate.Route{via(7, "0.0.0.0/0", 2)}},
			0, "r", trace.Connect(netip.AddrPort{}, netip.MustParseAddrPort("10.9.0.5:80")), "b: e0|rule 305|10.0.3.1"},
		{"from and to", state{Rules: []netstate.Rule{to(from(rule(305, 7), "10.0.1.0/24"), "10.8.0.0/16"), to(from(rule(306, 8), "10.0.1.0/24"), "10.9.0.0/16")}, Routes: []netstate.Route{via(7, "0.0.0.0/0", 3), via(8, "0.0.0.0/0", 2)}},
			0, "a", udp("10.0.1.2:1", "10.9.0.5:2"), "b: e0|rule 306"},
		{"fwmark", state{Rules: []netstate.Rule{marked(rule(305, 7), 2)}, Routes: []netstate.Route{via(7, "0.0.0.0/0", 2)}, Tables: restore},
			0, "a", udp("10.0.1.2:1", "10.9.0.7:2"), "b: e0|fwmark 0x2"},
		{"another fwmark", state{Rules: []netstate.Rule{marked(rule(305, 7), 2)}, Routes: []netstate.Route{via(7, "0.0.0.0/0", 2)}, Tables: restore},
			0, "a", udp("10.0.1.2:1", "10.9.0.8:2"), "c: e0|rule 32766"},
		{"an unreachable rule", state{Rules: []netstate.Rule{shut(by(rule(305, 0), "e1"))}},
			0, "a", udp("10.0.1.2:1", "10.9.0.5:2"), "r: e1|unreachable at r: unreachable by rule 305: from all iif e1 unreachable"},
		{"behind others", state{Rules: []netstate.Rule{past(from(rule(300, 0), "10.0.1.2/32"), 391), rule(305, 7), nop(391), rule(400, 8)}, Routes: []netstate.Route{via(7, "0.0.0.0/0", 3), via(8, "0.0.0.0/0", 2)}},
			0, "a", udp("10.0.1.2:1", "10.9.0.5:2"), "b: e0|rule 400"},
		{"others do not go there", state{Rules: []netstate.Rule{past(from(rule(300, 0), "10.0.1.2/32"), 391), rule(305, 7), nop(391), rule(400, 8)}, Routes: []netstate.Route{via(7, "0.0.0.0/0", 2), via(8, "0.0.0.0/0", 3)}},
			0, "a", udp("10.0.1.3:1", "10.9.0.5:2"), "b: e0|rule 305"},
		{"to a rule that is not there", state{Rules: []netstate.Rule{past(from(rule(300, 0), "10.0.1.2/32"), 391), rule(305, 7), rule(400, 8)}, Routes: []netstate.Route{via(7, "0.0.0.0/0", 2), via(8, "0.0.0.0/0", 3)}},
			0, "a", udp("10.0.1.2:1", "10.9.0.5:2"), "b: e0|rule 305"},
		{"an unreachable route", state{Rules: []netstate.Rule{rule(305, 7)}, Routes: []netstate.Route{{Table: 7, Dst: prefix("10.9.0.0/16"), Type: netstate.Unreachable}}},
			0, "a", udp("10.0.1.2:1", "10.9.0.5:2"), "unreachable at r: unreachable by route unreachable 10.9.0.0/16 table 7, rule 305"},
		{"its own address comes before all rules", state{Rules: []netstate.Rule{shut(rule(305, 0))}},
			0, "a", udp("10.0.1.2:1", "10.0.2.1:2"), "delivered at r"},
		{"loose: any way back", state{}, 2, "a", udp("10.0.2.77:1", "10.9.0.5:2"), "c: e0"},
		{"loose: none", state{Rules: []netstate.Rule{shut(to(rule(305, 0), "10.5.0.0/16"))}}, 2, "a", udp("10.5.0.1:1", "10.9.0.5:2"), "dropped at r: rp_filter 2 of e1: no way back to 10.5.0.1"},
		{"the way back is asked for as from where the packet goes", state{Rules: []netstate.Rule{shut(by(to(rule(305, 0), "10.5.0.0/16"), "e2"))}}, 2, "a", udp("10.5.0.1:1", "10.9.0.5:2"), "c: e0"},
		{"strict", state{}, 1, "a", udp("10.0.2.77:1", "10.9.0.5:2"), "dropped at r: rp_filter 1 of e1: the way back to 10.0.2.77 is by e2"},
		{"the source is this host's", state{}, 0, "a", udp("10.0.2.1:1", "10.9.0.5:2"), "dropped at r: its source 10.0.2.1 is an address of this host (e2)"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tr := middle(t, tt.state, tt.rpFilter).Walk(&trace.Memory{}, tt.from, tt.p)
			last := tr.Hops[len(tr.Hops)-1]
			text := fmt.Sprintf("%s: %s\n%v", last.Host, last.In, tr)
			for part := range strings.SplitSeq(tt.want, "|") {
				assert.Check(t, is.Contains(text, part))
			}
		})
	}
}

func TestTranslation(t *testing.T) {
	for _, tt := range []struct {
		name   string
		chains []netstate.Chain
		want   string // how a packet of a's looks where it ends
	}{
		{"none", nil, "c: 10.0.1.2:1000 → 10.9.0.5:80"},
		{"prefixes keep the host", []netstate.Chain{
			chain("nat", "prerouting", -100, nat(netstate.DNAT, "10.8.0.0/16", dest("10.9.0.0/16"))),
			chain("nat", "postrouting", 100, nat(netstate.SNAT, "10.7.0.0/16", source("10.0.0.0/16"))),
		}, "c: 10.7.1.2:1000 → 10.8.0.5:80"},
		{"nat chains in the order of their priorities", []netstate.Chain{
			chain("nat", "postrouting", 100, nat(netstate.SNAT, "10.7.0.1/32")),
			chain("nat", "postrouting", -150, nat(netstate.SNAT, "10.7.0.2/32")),
		}, "c: 10.7.0.2:1000 → 10.9.0.5:80"},
		{"who translates to what is there already ends it", []netstate.Chain{
			chain("nat", "postrouting", -150, nat(netstate.SNAT, "10.0.1.0/24", source("10.0.1.0/24"))),
			chain("nat", "postrouting", 100, act(netstate.Masquerade)),
		}, "c: 10.0.1.2:1000 → 10.9.0.5:80"},
		{"accept ends its own chain only", []netstate.Chain{
			chain("nat", "postrouting", -150, act(netstate.Accept), nat(netstate.SNAT, "10.7.0.1/32")),
			chain("nat", "postrouting", 100, nat(netstate.SNAT, "10.7.0.2/32")),
		}, "c: 10.7.0.2:1000 → 10.9.0.5:80"},
		{"masquerade takes the link's address", []netstate.Chain{
			chain("nat", "postrouting", 100, act(netstate.Masquerade)),
		}, "c: 10.0.3.1:1000 → 10.9.0.5:80"},
		{"a filter chain with a nat chain's priority comes before all nat", []netstate.Chain{
			chain("nat", "postrouting", -150, nat(netstate.SNAT, "10.7.0.1/32")),
			chain("filter", "postrouting", -100, act(netstate.Drop, source("10.7.0.1/32"))),
		}, "c: 10.7.0.1:1000 → 10.9.0.5:80"},
		{"one after the nat hook sees what came of it", []netstate.Chain{
			chain("nat", "postrouting", -150, nat(netstate.SNAT, "10.7.0.1/32")),
			chain("filter", "postrouting", 101, act(netstate.Drop, source("10.7.0.1/32"))),
		}, "dropped at r: dropped by rule drop of table t, chain postrouting+101"},
		{"a filter before the nat hook sees what came in", []netstate.Chain{
			chain("nat", "prerouting", -180, nat(netstate.DNAT, "10.8.0.1/32")),
			chain("filter", "prerouting", -150, act(netstate.Drop, dest("10.9.0.5/32"))),
		}, "dropped at r"},
		{"what is not tracked is not translated", []netstate.Chain{
			chain("filter", "prerouting", -300, act(netstate.NoTrack)),
			chain("nat", "prerouting", -100, nat(netstate.DNAT, "10.8.0.1/32")),
			chain("nat", "postrouting", 100, act(netstate.Masquerade)),
		}, "c: 10.0.1.2:1000 → 10.9.0.5:80"},
		{"routed by its new destination", []netstate.Chain{
			chain("nat", "prerouting", -100, nat(netstate.DNAT, "10.0.2.2/32")),
		}, "b: 10.0.1.2:1000 → 10.0.2.2:80"},
		{"not for other devices", []netstate.Chain{
			chain("nat", "postrouting", 100, nat(netstate.SNAT, "10.7.0.1/32", netstate.Match{Dir: "out", Dev: "e2"}), nat(netstate.SNAT, "10.7.0.2/32", netstate.Match{Dir: "in", Dev: "e1"})),
		}, "c: 10.7.0.2:1000 → 10.9.0.5:80"},
		{"a policy", []netstate.Chain{{Name: "f", Type: "filter", Hook: "forward", Policy: "drop"}}, "dropped by the policy of table t, chain f"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := middle(t, netstate.State{Tables: chains(tt.chains...)}, 0)
			m := &trace.Memory{}
			tr := w.Walk(m, "a", udp("10.0.1.2:1000", "10.9.0.5:80"))
			seen := expected(tr)
			text := fmt.Sprintf("%v\n%s", tr, strings.Replace(seen.String(), "udp ", "", 1))
			assert.Assert(t, is.Contains(text, tt.want))
			if seen.host == "" {
				return
			}
			// The answer undoes it, whatever the chains would do with it.
			back := w.Walk(m, seen.host, seen.p.Reply())
			assert.Equal(t, expected(back).String(), "a: udp 10.9.0.5:80 → 10.0.1.2:1000", "%v", back)
		})
	}
}

// Two that would look the same to who answers are told apart by a port.
func TestTuplesDoNotCollide(t *testing.T) {
	w := middle(t, netstate.State{Tables: chains(chain("nat", "postrouting", 100, nat(netstate.SNAT, "10.7.0.1/32")))}, 0)
	m := &trace.Memory{}
	for _, from := range []string{"a", "b"} {
		src := map[string]string{"a": "10.0.1.2:1000", "b": "10.0.2.2:1000"}[from]
		tr := w.Walk(m, from, udp(src, "10.9.0.5:80"))
		back := w.Walk(m, "c", expected(tr).p.Reply())
		assert.Equal(t, expected(back).String(), from+": udp 10.9.0.5:80 → "+src)
	}
	assert.Equal(t, m.Connections("r"), 2)
	m.Forget("r")
	assert.Equal(t, m.Connections("r"), 0)
}

// Errors about a translated packet are translated with what they quote, and no
// chain decides about them; what is no error of a connection passes as it is.
func TestErrors(t *testing.T) {
	s := netstate.State{
		Rules:  []netstate.Rule{{Priority: 305, Dst: prefix("10.8.0.0/16"), Table: 7}},
		Routes: []netstate.Route{{Table: 7, Dst: prefix("10.8.0.0/16"), Dev: "e2", Via: addr("10.0.2.2"), OnLink: true, MTU: 1000}},
		Tables: chains(
			chain("nat", "prerouting", -100, nat(netstate.DNAT, "10.8.0.0/16", dest("10.9.0.0/16"))),
			chain("nat", "postrouting", 100, nat(netstate.SNAT, "10.7.0.1/32", netstate.Match{Dir: "out", Dev: "e2"})),
			chain("filter", "postrouting", 101, nat(netstate.SetSource, "10.70.0.0/32", netstate.Match{Dir: "out", Dev: "e1"}, netstate.Match{ICMPError: true}, source("10.0.3.0/24"))),
		),
	}
	w, m := middle(t, s, 0), &trace.Memory{}
	small := expected(w.Walk(m, "a", udp("10.0.1.2:1000", "10.9.0.5:80")))
	assert.Equal(t, small.String(), "b: udp 10.7.0.1:1000 → 10.8.0.5:80")

	// One that a router behind b sends, and b's own.
	for _, src := range []string{"10.99.0.1", "10.8.0.5"} {
		p := trace.Packet{Src: addr(src), Dst: addr("10.7.0.1"), Proto: trace.ICMP, ICMP: trace.TooBig, Quoted: &small.p, Size: 100}
		assert.Equal(t, expected(w.Walk(m, "b", p)).String(), "a: icmp too big mtu 0 10.9.0.5 → 10.0.1.2 about [udp 10.0.1.2:1000 → 10.9.0.5:80]")
	}
	// The host's own, before the packet got its new source.
	large := udp("10.0.1.2:1000", "10.9.0.5:80")
	large.Size, large.DF = 1200, true
	tr := w.Walk(m, "a", large)
	assert.Assert(t, is.Contains(tr.End.String(), "dropped at r: too big: 1200 bytes, mtu 1000 of e2"))
	assert.Equal(t, tr.End.Answer.MTU, 1000)
	assert.Equal(t, expected(w.Walk(m, "r", *tr.End.Answer)).String(), "a: icmp too big mtu 0 10.9.0.5 → 10.0.1.2 about [udp 10.0.1.2:1000 → 10.9.0.5:80]")
	// About nothing that this host knows: a new source, and nothing else.
	foreign := trace.Packet{Src: addr("10.0.3.9"), Dst: addr("10.0.1.2"), Proto: trace.ICMP, ICMP: trace.NoRoute, Quoted: &trace.Packet{Src: addr("10.0.1.2"), Dst: addr("10.6.0.1"), Proto: trace.UDP}, Size: 100}
	assert.Equal(t, expected(w.Walk(m, "c", foreign)).String(), "a: icmp unreachable 10.70.0.0 → 10.0.1.2 about [udp 10.0.1.2:0 → 10.6.0.1:0]")
	// A small one that may be cut goes on.
	large.DF = false
	tr = w.Walk(m, "a", large)
	assert.Assert(t, is.Contains(fmt.Sprint(tr), "fragmented: 1200 bytes, mtu 1000"))
	assert.Equal(t, expected(tr).host, "b")
	assert.Equal(t, tr.MTU, 1000)
}

func TestMSS(t *testing.T) {
	clamp := func(mss uint16) netstate.FirewallRule {
		r := act(netstate.ClampMSS, netstate.Match{L4Proto: "tcp"})
		r.Action.MSS = mss
		return r
	}
	for _, tt := range []struct{ fixed, route, want int }{{0, 0, 1460}, {0, 1400, 1360}, {1200, 0, 1200}, {9000, 0, 1460}} {
		s := netstate.State{Tables: chains(chain("filter", "forward", -150, clamp(uint16(tt.fixed))))}
		if tt.route > 0 {
			s.Rules = []netstate.Rule{{Priority: 305, Table: 7}}
			s.Routes = []netstate.Route{{Table: 7, Dst: prefix("0.0.0.0/0"), Dev: "e2", Via: addr("10.0.2.2"), OnLink: true, MTU: tt.route}}
		}
		w, m := middle(t, s, 0), &trace.Memory{}
		syn := trace.Connect(netip.MustParseAddrPort("10.0.1.2:1000"), netip.MustParseAddrPort("10.9.0.5:80"))
		assert.Equal(t, expected(w.Walk(m, "a", syn)).p.MSS, tt.want)
	}
}

// A table, and the first difference to what was seen.
func TestExplain(t *testing.T) {
	s := netstate.State{Tables: chains(chain("nat", "postrouting", 100, nat(netstate.SNAT, "10.7.0.1/32")))}
	w := middle(t, s, 0)
	tr := w.Walk(&trace.Memory{}, "a", udp("10.0.1.2:1000", "10.0.2.2:80"))
	assert.Equal(t, tr.String(), `HOST  LINKS    PACKET                               DECISIONS
a     · → e0   udp 10.0.1.2:1000 (a) → 10.0.2.2:80  rule 32766: from all lookup main: default via 10.0.1.1 dev e0 table 254; mtu 1500
r     e1 → e2  udp 10.7.0.1:1000 → 10.0.2.2:80      rule 32766: from all lookup main: 10.0.2.0/24 dev e2 table 254 src 10.0.2.1 scope link; source 10.0.1.2:1000 → 10.7.0.1:1000: rule snat of table t, chain postrouting+100; mtu 1500
b     e0 → ·   udp 10.7.0.1:1000 → 10.0.2.2:80 (b)
delivered at b
`)
	assert.DeepEqual(t, tr.Hosts(), []string{"a", "r", "b"})
	for _, tt := range []struct {
		seen string
		want string
	}{
		{"a r b", ""},
		{"a r", "it was not seen on b, after r; in the model it is delivered at b"},
		{"a r c", "after r it was seen on c, in the model it is on b, where r | e1 → e2 |"},
		{"a r b c", "it was seen on c; in the model it is delivered at b"},
		{"", "it was not seen on a, after its sender"},
	} {
		got := trace.Explain(tr, strings.Fields(tt.seen))
		assert.Check(t, strings.HasPrefix(got, tt.want) && (got == "") == (tt.want == ""), "%q: %s", tt.seen, got)
	}
}

func TestNew(t *testing.T) {
	host := trace.Host{Name: "a"}
	veth := trace.Host{Name: "gw", State: netstate.State{Links: []netstate.Link{{Name: "liqo.gateway", Kind: netstate.KindVeth, Peer: "liqo.host"}}}}
	around := veth
	around.Around.Outside = "nobody"
	wg := func(name string) trace.Host {
		return trace.Host{Name: name, Around: trace.Around{Outside: "a"}, State: netstate.State{WireGuard: []netstate.WireGuard{{Dev: "liqo-tunnel", ListenPort: 51840}}}}
	}
	for _, tt := range []struct {
		hosts []trace.Host
		want  string
	}{
		{[]trace.Host{host, host}, `host "a": its name is empty or there is another of that name`},
		{[]trace.Host{veth}, "host gw: the link liqo.gateway ends in the namespace around it, and there is none"},
		{[]trace.Host{around}, `host gw: there is no host "nobody" around it`},
		{[]trace.Host{host, wg("b"), wg("c")}, "host a: the port 51840 of liqo-tunnel is that of liqo-tunnel on b"},
	} {
		_, err := trace.New(tt.hosts...)
		assert.Check(t, is.Error(err, tt.want))
	}
}
