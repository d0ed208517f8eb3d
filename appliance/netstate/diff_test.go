package netstate

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
	"gotest.tools/v3/golden"
)

func prefix(s string) netip.Prefix { return netip.MustParsePrefix(s) }
func addr(s string) netip.Addr     { return netip.MustParseAddr(s) }

// geneve returns a link as it is desired.
func geneve(name string, change ...func(*Link)) Link {
	l := Link{Name: name, Kind: KindGeneve, MTU: 1450, Description: "to rome", Geneve: Geneve{VNI: 5, Remote: addr("172.18.1.11"), Port: 6091}}
	for _, f := range change {
		f(&l)
	}
	return l
}

func wireGuard(change ...func(*WireGuard)) WireGuard {
	w := WireGuard{Dev: "wg", ListenPort: 51840, PublicKey: Key{1}, Peers: []WireGuardPeer{{
		PublicKey: Key{2}, Endpoint: netip.MustParseAddrPort("203.0.113.2:51840"),
		AllowedIPs: []netip.Prefix{prefix("10.2.0.0/16"), prefix("10.72.0.0/16")},
	}}}
	for _, f := range change {
		f(&w)
	}
	return w
}

func table(name string, rules ...string) Table {
	c := Chain{Name: "c", Type: "filter", Hook: "forward"}
	for _, r := range rules {
		c.Rules = append(c.Rules, FirewallRule{Name: r, Action: Action{Kind: Drop}})
	}
	return Table{Family: FamilyIPv4, Name: name, Chains: []Chain{c}}
}

// seen returns a table as it is observed.
func seen(t Table) Table {
	out := Table{Family: t.Family, Name: t.Name, Seen: t.Digest()}
	for _, c := range t.Chains {
		c.Policy = "accept"
		c.Rules = slices.Clone(c.Rules)
		for i := range c.Rules {
			c.Rules[i] = FirewallRule{Name: c.Rules[i].Name}
		}
		out.Chains = append(out.Chains, c)
	}
	return out
}

func TestDiff(t *testing.T) {
	a := Address{"g", prefix("10.80.0.1/32")}
	r := Route{Table: 9, Dst: prefix("10.1.0.0/16"), Dev: "g"}
	moved := r
	moved.Via, moved.OnLink = addr("10.80.0.2"), true
	second := r
	second.Metric = 7
	rule := Rule{Priority: 310, Src: prefix("10.0.0.0/8"), Table: 9}
	pass, end := Rule{Priority: 300, Src: prefix("10.0.0.7/32"), Goto: 391}, Rule{Priority: 391, Nop: true}
	odd := rule
	odd.Other = "ipproto udp"

	for _, tt := range []struct {
		name              string
		observed, desired State
		want              Changes
	}{
		{"nothing", State{}, State{}, Changes{}},
		{"a route outlives its link: it is replaced, for the link goes last",
			State{Links: []Link{{Name: "g", Kind: KindGeneve}}, Routes: []Route{r, {Table: 9, Dst: prefix("10.2.0.0/16"), Dev: "g"}}},
			State{Routes: []Route{{Table: 9, Dst: r.Dst, Type: Unreachable}}},
			Changes{ReplaceRoutes: []Route{{Table: 9, Dst: r.Dst, Type: Unreachable}}, DeleteLinks: []Link{{Name: "g", Kind: KindGeneve}}}},
		{"the order does not matter",
			State{Routes: []Route{r, {Table: 1, Dst: prefix("::/0"), Dev: "g"}}, Rules: []Rule{rule, {Priority: 1, Table: 1}}},
			State{Routes: []Route{{Table: 1, Dst: prefix("::/0"), Dev: "g"}, r}, Rules: []Rule{{Priority: 1, Table: 1}, rule}}, Changes{}},
		{"the same in other words",
			State{Routes: []Route{r}, Rules: []Rule{{Priority: 1, Src: prefix("10.0.0.0/8"), Mark: 1, Table: 1}, {Priority: 2, IPv6: true, Table: 1}}},
			State{Routes: []Route{{Table: 9, Dst: prefix("10.1.2.3/16"), Dev: "g", OnLink: true}},
				Rules: []Rule{{Priority: 1, Src: prefix("10.9.9.9/8"), Mark: 1, Mask: 0xffffffff, Table: 1}, {Priority: 2, Dst: prefix("::/0"), Table: 1}}}, Changes{}},
		{"twice is once", State{}, State{Routes: []Route{r, r}, Rules: []Rule{rule, rule}}, Changes{AddRoutes: []Route{r}, AddRules: []Rule{rule}}},

		{"link added", State{}, State{Links: []Link{geneve("g")}}, Changes{AddLinks: []Link{geneve("g")}}},
		{"link removed, what is on it goes by itself",
			State{Links: []Link{geneve("g")}, Addresses: []Address{a}, Routes: []Route{r}, Rules: []Rule{rule}}, State{},
			Changes{DeleteLinks: []Link{geneve("g")}, DeleteRules: []Rule{rule}}},
		{"MTU changed", State{Links: []Link{geneve("g", func(l *Link) { l.MTU = 1500 })}}, State{Links: []Link{geneve("g")}}, Changes{ChangeLinks: []Link{geneve("g")}}},
		{"any MTU is good",
			State{Links: []Link{geneve("g")}}, State{Links: []Link{geneve("g", func(l *Link) { l.MTU = 0 })}}, Changes{}},
		{"MAC changed", State{Links: []Link{geneve("g", func(l *Link) { l.MAC = MAC{2, 0, 0, 0, 0, 1} })}}, State{Links: []Link{geneve("g", func(l *Link) { l.MAC = MAC{2, 0, 0, 0, 0, 2} })}},
			Changes{ChangeLinks: []Link{geneve("g", func(l *Link) { l.MAC = MAC{2, 0, 0, 0, 0, 2} })}}},
		{"any MAC is good",
			State{Links: []Link{geneve("g", func(l *Link) { l.MAC = MAC{2, 0, 0, 0, 0, 1} })}}, State{Links: []Link{geneve("g")}}, Changes{}},
		{"link down", State{Links: []Link{geneve("g", func(l *Link) { l.Down = true })}}, State{Links: []Link{geneve("g")}}, Changes{ChangeLinks: []Link{geneve("g")}}},
		{"forwarding off", State{Links: []Link{geneve("g")}}, State{Links: []Link{geneve("g", func(l *Link) { l.Forwarding = true })}},
			Changes{ChangeLinks: []Link{geneve("g", func(l *Link) { l.Forwarding = true })}}},
		{"remote moved: in place, routes stay",
			State{Links: []Link{geneve("g", func(l *Link) { l.Geneve.Remote = addr("172.18.1.12") })}, Routes: []Route{r}},
			State{Links: []Link{geneve("g")}, Routes: []Route{r}}, Changes{ChangeLinks: []Link{geneve("g")}}},
		{"id changed: anew, with all that was on it",
			State{Links: []Link{geneve("g", func(l *Link) { l.Geneve.VNI = 6 })}, Addresses: []Address{a}, Routes: []Route{r}, Rules: []Rule{rule}},
			State{Links: []Link{geneve("g")}, Addresses: []Address{a}, Routes: []Route{r}, Rules: []Rule{rule}},
			Changes{RecreateLinks: []Link{geneve("g")}, AddAddresses: []Address{a}, AddRoutes: []Route{r}}},
		{"family of the remote changed: anew",
			State{Links: []Link{geneve("g", func(l *Link) { l.Geneve.Remote = addr("2001:db8::1") })}},
			State{Links: []Link{geneve("g")}}, Changes{RecreateLinks: []Link{geneve("g")}}},
		{"another kind: anew, and configured",
			State{Links: []Link{{Name: "wg", Kind: "tun"}}},
			State{Links: []Link{{Name: "wg", Kind: KindWireGuard}}, WireGuard: []WireGuard{wireGuard()}},
			Changes{RecreateLinks: []Link{{Name: "wg", Kind: KindWireGuard}}, SetWireGuard: []WireGuard{wireGuard()}}},

		{"peers and allowed IPs in another order",
			State{WireGuard: []WireGuard{wireGuard()}},
			State{WireGuard: []WireGuard{wireGuard(func(w *WireGuard) { slices.Reverse(w.Peers[0].AllowedIPs) })}}, Changes{}},
		{"any port is good", State{WireGuard: []WireGuard{wireGuard()}}, State{WireGuard: []WireGuard{wireGuard(func(w *WireGuard) { w.ListenPort = 0 })}}, Changes{}},
		{"endpoint moved",
			State{WireGuard: []WireGuard{wireGuard(func(w *WireGuard) { w.Peers[0].Endpoint = netip.AddrPort{} })}},
			State{WireGuard: []WireGuard{wireGuard()}}, Changes{SetWireGuard: []WireGuard{wireGuard()}}},
		{"key changed", State{WireGuard: []WireGuard{wireGuard(func(w *WireGuard) { w.PublicKey = Key{9} })}},
			State{WireGuard: []WireGuard{wireGuard()}}, Changes{SetWireGuard: []WireGuard{wireGuard()}}},

		{"next hop moved", State{Routes: []Route{r}}, State{Routes: []Route{moved}}, Changes{ReplaceRoutes: []Route{moved}}},
		{"a second of ours with another metric", State{Routes: []Route{r, second}}, State{Routes: []Route{r}}, Changes{DeleteRoutes: []Route{second}}},
		{"routes to next hops first", State{},
			State{Routes: []Route{moved, {Table: 9, Dst: prefix("10.80.0.2/32"), Dev: "g", Scope: ScopeLink}}},
			Changes{AddRoutes: []Route{{Table: 9, Dst: prefix("10.80.0.2/32"), Dev: "g", Scope: ScopeLink}, moved}}},
		{"rule with a selector of its own", State{Rules: []Rule{odd}}, State{Rules: []Rule{rule}}, Changes{AddRules: []Rule{rule}, DeleteRules: []Rule{odd}}},
		{"rules that lead behind others", State{}, State{Rules: []Rule{pass, end, rule}}, Changes{AddPassRules: []Rule{end, pass}, AddRules: []Rule{rule}}},
		{"and no more", State{Rules: []Rule{pass, end, rule}}, State{}, Changes{DeleteRules: []Rule{rule}, DeletePassRules: []Rule{pass, end}}},
		{"elsewhere", State{Rules: []Rule{pass, end}}, State{Rules: []Rule{{Priority: 300, Src: pass.Src, Goto: 392}, end}},
			Changes{AddPassRules: []Rule{{Priority: 300, Src: pass.Src, Goto: 392}}, DeletePassRules: []Rule{pass}}},
		{"rules of both families differ", State{Rules: []Rule{{Priority: 1, Table: 1}}}, State{Rules: []Rule{{Priority: 1, Table: 1, IPv6: true}}},
			Changes{AddRules: []Rule{{Priority: 1, Table: 1, IPv6: true}}, DeleteRules: []Rule{{Priority: 1, Table: 1}}}},

		{"table as it should be", State{Tables: []Table{seen(table("t", "a", "b"))}}, State{Tables: []Table{table("t", "a", "b")}}, Changes{}},
		{"table with another digest", State{Tables: []Table{seen(table("t", "a", "b"))}}, State{Tables: []Table{table("t", "b", "a")}}, Changes{SetTables: []Table{table("t", "b", "a")}}},
		{"table that lost a rule",
			State{Tables: []Table{func() Table { s := seen(table("t", "a", "b")); s.Chains[0].Rules = s.Chains[0].Rules[:1]; return s }()}},
			State{Tables: []Table{table("t", "a", "b")}}, Changes{SetTables: []Table{table("t", "a", "b")}}},
		{"table that got a chain",
			State{Tables: []Table{func() Table { s := seen(table("t")); s.Chains = append(s.Chains, Chain{Name: "d"}); return s }()}},
			State{Tables: []Table{table("t")}}, Changes{SetTables: []Table{table("t")}}},
		{"table of another family", State{Tables: []Table{{Family: FamilyIPv6, Name: "t", Seen: "x"}}}, State{Tables: []Table{table("t")}},
			Changes{SetTables: []Table{table("t")}, DeleteTables: []TableID{{FamilyIPv6, "t"}}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := Diff(tt.observed, tt.desired)
			assert.Equal(t, got.String(), tt.want.String())
			assert.Equal(t, got.Empty(), tt.want.Empty())
			assert.Equal(t, got.Len(), strings.Count(summary(tt.want), "\n"))
		})
	}
}

// summary returns one line for each change.
func summary(c Changes) string {
	for i := range c.SetTables {
		c.SetTables[i] = Table{}
	}
	n := c.Len()
	return strings.Repeat("\n", n)
}

// TestDiffIsDeterministic shuffles what is desired and what is observed.
func TestDiffIsDeterministic(t *testing.T) {
	var observed, desired State
	for i := range 40 {
		dst := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i)}), 16)
		for s, keep := range map[*State]bool{&observed: i%3 != 0, &desired: i%2 != 0} {
			if keep {
				s.Routes = append(s.Routes, Route{Table: 9, Dst: dst, Dev: "g"})
				s.Rules = append(s.Rules, Rule{Priority: 310, Src: dst, Table: 9})
				s.Tables = append(s.Tables, table(dst.String(), "a"))
				s.Settings = append(s.Settings, Setting{Dev: dst.String(), Forwarding: keep == (i%5 != 0)})
				s.Neighbors = append(s.Neighbors, Neighbor{"x", dst.Addr(), MAC{2, byte(len(s.Neighbors))}})
				s.FDB = append(s.FDB, FDBEntry{"x", MAC{2, byte(i)}, addr("172.18.0.1")})
			}
		}
	}
	want := Diff(observed, desired).String()
	for range 20 {
		for _, s := range []*State{&observed, &desired} {
			rand.Shuffle(len(s.Routes), func(i, j int) { s.Routes[i], s.Routes[j] = s.Routes[j], s.Routes[i] })
			rand.Shuffle(len(s.Rules), func(i, j int) { s.Rules[i], s.Rules[j] = s.Rules[j], s.Rules[i] })
			rand.Shuffle(len(s.Tables), func(i, j int) { s.Tables[i], s.Tables[j] = s.Tables[j], s.Tables[i] })
			rand.Shuffle(len(s.Settings), func(i, j int) { s.Settings[i], s.Settings[j] = s.Settings[j], s.Settings[i] })
			rand.Shuffle(len(s.Neighbors), func(i, j int) { s.Neighbors[i], s.Neighbors[j] = s.Neighbors[j], s.Neighbors[i] })
			rand.Shuffle(len(s.FDB), func(i, j int) { s.FDB[i], s.FDB[j] = s.FDB[j], s.FDB[i] })
		}
		assert.Equal(t, Diff(observed, desired).String(), want)
	}
}

// everything has one of each.
func everything() State {
	return State{
		Links: []Link{
			geneve("liqo.rome", func(l *Link) { l.Forwarding, l.RPFilter = true, 2 }),
			{Name: "wg", Kind: KindWireGuard, MTU: 1440, Description: "tunnel to rome"},
			vxlan("liqo.vxlan"),
		},
		Settings: []Setting{{"eth0", true}, {"eth1", false}},
		Neighbors: []Neighbor{
			{"liqo.vxlan", addr("10.80.0.9"), MAC{2, 0, 10, 80, 0, 9}}, {"liqo.vxlan", addr("fd80::9"), MAC{2, 0, 10, 80, 0, 9}},
		},
		FDB:       []FDBEntry{{"liqo.vxlan", MAC{2, 0, 10, 80, 0, 9}, addr("172.18.1.12")}},
		Addresses: []Address{{"wg", prefix("169.254.18.1/30")}, {"liqo.rome", prefix("fd80::1/128")}},
		Routes: []Route{
			{Table: 5, Dst: prefix("10.2.0.0/16"), Via: addr("10.80.0.9"), Dev: "liqo.rome", OnLink: true},
			{Table: 5, Dst: prefix("10.80.0.9/32"), Dev: "liqo.rome", Scope: ScopeLink, Src: addr("10.80.0.1"), MTU: 1400},
			{Table: 254, Dst: prefix("::/0"), Type: Unreachable},
		},
		Rules: []Rule{
			{Priority: 300, Src: prefix("10.1.0.7/32"), Table: 254},
			{Priority: 310, IIF: "wg", Dst: prefix("fd02::/64"), Mark: 2, Mask: 0xff, Table: 5},
			{Priority: 390, IIF: "wg", Unreachable: true},
		},
		WireGuard: []WireGuard{wireGuard(func(w *WireGuard) { w.Peers[0].Keepalive = 25 })},
		Tables:    []Table{table("t", "a", "b")},
	}
}

func TestString(t *testing.T) {
	golden.Assert(t, everything().String(), "state.golden")
	changed := everything()
	changed.Links[0].MTU = 1400
	changed.Links[1].Kind = "tun"
	changed.Routes = changed.Routes[:1]
	changed.Routes[0].Via = addr("10.80.0.8")
	changed.Rules[0].Table = 6
	changed.Tables = nil
	changed.Links[2].MAC = MAC{2, 0, 0, 0, 0, 1}
	changed.Settings[0].Forwarding = false
	changed.FDB[0].Remote = addr("172.18.1.13")
	changed.FDB = append(changed.FDB, FDBEntry{"liqo.vxlan", MAC{}, addr("172.18.1.13")})
	golden.Assert(t, Diff(changed, everything()).String(), "changes.golden")
	golden.Assert(t, Diff(everything(), State{}).String(), "removal.golden")
}

func TestRanges(t *testing.T) {
	for _, tt := range []struct{ from, to, want string }{
		{"10.0.0.0", "10.255.255.255", "10.0.0.0/8"},
		{"10.0.0.1", "10.0.0.1", "10.0.0.1"},
		{"10.0.0.1", "10.0.0.2", "10.0.0.1-10.0.0.2"},
		{"10.0.0.0", "10.0.0.2", "10.0.0.0-10.0.0.2"},
		{"0.0.0.0", "255.255.255.255", "0.0.0.0/0"},
		{"fd00::", "fd00::ffff", "fd00::/112"},
		{"fd00::8000", "fd00::ffff", "fd00::8000/113"},
	} {
		r := AddrRange{addr(tt.from), addr(tt.to)}
		assert.Check(t, is.Equal(r.String(), tt.want))
		if p, ok := r.AsPrefix(); ok {
			assert.Check(t, is.Equal(RangeOf(p), r))
		}
	}
}

func TestValidate(t *testing.T) {
	assert.NilError(t, everything().Validate())
	chain := func(c Chain) State {
		return State{Tables: []Table{{Family: FamilyIPv4, Name: "t", Chains: []Chain{c}}}}
	}
	rule := func(c Chain, a Action, ms ...Match) State {
		c.Name, c.Rules = "c", []FirewallRule{{Name: "r", Matches: ms, Action: a}}
		return chain(c)
	}
	forward := Chain{Type: "filter", Hook: "forward"}
	for _, tt := range []struct {
		state State
		want  string
	}{
		{State{Links: []Link{geneve("sixteen-bytes-xx")}}, "link sixteen-bytes-xx: a link's name has 1 to 15 bytes"},
		{State{Links: []Link{geneve("a/b")}}, "without slash"},
		{State{Links: []Link{geneve("g"), geneve("g")}}, "link g: is there twice"},
		{State{Links: []Link{{Name: "x", Kind: "vlan"}}}, `link x: kind "vlan"`},
		{State{Links: []Link{geneve("g", func(l *Link) { l.Geneve.VNI = 1 << 24 })}}, "geneve id 16777216: must be less than"},
		{State{Links: []Link{geneve("g", func(l *Link) { l.Geneve.Remote = netip.Addr{} })}}, "geneve remote"},
		{State{Links: []Link{geneve("g", func(l *Link) { l.Geneve.Port = 0 })}}, "geneve dstport"},
		{State{Links: []Link{geneve("g", func(l *Link) { l.MTU = 10 })}}, "mtu 10: must be 68 to 65535"},
		{State{Links: []Link{geneve("g", func(l *Link) { l.MAC = MAC{1, 0, 0x5e} })}}, "address 01:00:5e:00:00:00: must be that of one station"},
		{State{Links: []Link{geneve("g", func(l *Link) { l.RPFilter = 3 })}}, "rp_filter 3"},
		{State{Links: []Link{geneve("g", func(l *Link) { l.Description = "a\nb" })}}, "one line"},
		{State{Addresses: []Address{{"eth0", prefix("10.0.0.1/8")}}}, "address 10.0.0.1/8 dev eth0: dev is not a link of this state"},
		{State{Routes: []Route{{Table: 1, Dst: prefix("10.0.0.0/8")}}}, "route 10.0.0.0/8 table 1: no dev"},
		{State{Routes: []Route{{Dst: prefix("10.0.0.0/8"), Dev: "g"}}}, "table 0"},
		{State{Routes: []Route{{Table: 1, Dst: prefix("10.0.0.0/8"), Dev: "g", Via: addr("fd00::1")}}}, "via fd00::1: not of the destination's family"},
		{State{Routes: []Route{{Table: 1, Dst: prefix("10.0.0.0/8"), Dev: "g"}, {Table: 1, Dst: prefix("10.0.0.0/8"), Dev: "h"}}}, "contradicts"},
		{State{Rules: []Rule{{Priority: 1}}}, "rule 1: from all lookup 0: table 0"},
		{State{Rules: []Rule{{Table: 1}}}, "priority 0"},
		{State{Rules: []Rule{{Priority: 1, Table: 1, Src: prefix("10.0.0.0/8"), Dst: prefix("fd00::/8")}}}, "different families"},
		{State{WireGuard: []WireGuard{wireGuard()}}, "wireguard wg: dev is not a wireguard link of this state"},
		{State{Links: []Link{{Name: "wg", Kind: KindWireGuard}}, WireGuard: []WireGuard{wireGuard(func(w *WireGuard) { w.Peers = append(w.Peers, w.Peers[0]) })}}, "is there twice"},
		{State{Tables: []Table{{Family: "netdev", Name: "t"}}}, `table netdev t: family "netdev": must be ip, ip6, inet, arp or bridge`},
		{State{Tables: []Table{{Family: FamilyBridge, Name: "t", Chains: []Chain{{Name: "c", Type: "nat", Hook: "prerouting"}}}}}, `type "nat": the family bridge has only chains of type filter`},
		{State{Tables: []Table{table("t"), table("t")}}, "table ip t: is there twice"},
		{chain(Chain{Name: "digest", Type: "filter", Hook: "input"}), "is reserved"},
		{chain(Chain{Name: "c", Type: "nat", Hook: "forward"}), `hook "forward": a nat chain may be at prerouting`},
		{chain(Chain{Name: "c", Type: "odd"}), `type "odd"`},
		{chain(Chain{Name: "c", Type: "filter", Hook: "input", Policy: "maybe"}), `policy "maybe"`},
		{rule(forward, Action{Kind: SNAT, To: prefix("10.0.0.1/32")}), "chain c: rule r: snat: only in chains of type nat"},
		{rule(Chain{Type: "nat", Hook: "prerouting"}, Action{Kind: SNAT, To: prefix("10.0.0.1/32")}), "snat: only at postrouting"},
		{rule(Chain{Type: "nat", Hook: "postrouting"}, Action{Kind: SNAT}), "snat: no address"},
		{rule(Chain{Type: "nat", Hook: "postrouting"}, Action{Kind: SNAT, To: prefix("fd00::1/128")}), "other IP family"},
		{rule(forward, Action{Kind: NoTrack}), "notrack: only in filter chains at prerouting"},
		{rule(forward, Action{Kind: "jump"}), `action "jump": unknown`},
		{rule(forward, Action{Kind: Drop}, Match{}), "match 0: must look at exactly one of"},
		{rule(forward, Action{Kind: Drop}, Match{Dir: "in", Addr: AddrRange{addr("10.0.0.1"), addr("10.0.0.1")}}), `position "in": must be src or dst`},
		{rule(forward, Action{Kind: Drop}, Match{Dir: "src", Addr: AddrRange{addr("10.0.0.2"), addr("10.0.0.1")}}), "not a range"},
		{rule(forward, Action{Kind: Drop}, Match{Dir: "src", Addr: AddrRange{addr("fd00::"), addr("fd00::")}}), "other IP family"},
		{rule(forward, Action{Kind: Drop}, Match{Dir: "src", Ports: PortRange{9, 8}}), "ports 9-8: not a range"},
		{rule(forward, Action{Kind: Drop}, Match{L4Proto: "gre"}), `protocol "gre"`},
		{rule(Chain{Type: "filter", Hook: "output"}, Action{Kind: Drop}, Match{Dir: "in", Dev: "eth0"}), "at hook output no packet has an in device"},
		{rule(forward, Action{Kind: ClampMSS}, Match{L4Proto: "udp"}), "the rule is about udp"},
		{rule(forward, Action{Kind: Drop}, Match{CTDir: "back"}), `direction "back": must be original or reply`},
		{rule(forward, Action{Kind: SetCTMark, Mark: 3, Mask: 1}), "the mark 0x3 has bits that the mask 0x1 has not"},
		{rule(forward, Action{Kind: SetMark, Mark: 1, Mask: 1}), "meta mark set: takes no mask"},
	} {
		assert.Check(t, is.ErrorContains(tt.state.Validate(), tt.want))
	}
}

func TestIPv6NeedsItsFamily(t *testing.T) {
	table := Table{Family: FamilyINET, Name: "t", Chains: []Chain{{Name: "c", Type: "filter", Hook: "forward", Rules: []FirewallRule{
		{Name: "r", Matches: []Match{{ICMPError: true}}, Action: Action{Kind: Drop}},
	}}}}
	assert.ErrorContains(t, table.Validate(), "needs an address that tells IPv4 from IPv6")
	table.Chains[0].Rules[0].Action = Action{Kind: SetSource, To: prefix("fd00::1/128")}
	assert.NilError(t, table.Validate())
	table.Chains[0].Rules[0].Matches = nil
	assert.ErrorContains(t, table.Validate(), "in IPv6 only for ICMP errors")
}

// FuzzDiffRoutes: whatever is observed and desired, the changes make the one of the
// other.
func FuzzDiffRoutes(f *testing.F) {
	f.Add(uint64(0), uint64(0))
	f.Add(uint64(0x1234), uint64(0xff00ff))
	routes := func(bits uint64) (s State) {
		for i := range 16 {
			if n := bits >> (4 * i) & 15; n != 0 {
				s.Routes = append(s.Routes, Route{Table: 1, Dst: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i)}), 16), Dev: string('a' + rune(n))})
			}
		}
		return s
	}
	f.Fuzz(func(t *testing.T, observed, desired uint64) {
		have, want := routes(observed), routes(desired)
		c := Diff(have, want)
		got := map[Route]bool{}
		for _, r := range have.Routes {
			got[r] = true
		}
		for _, r := range c.DeleteRoutes {
			delete(got, r)
		}
		for _, r := range c.ReplaceRoutes {
			for old := range got {
				if old.Dst == r.Dst {
					delete(got, old)
				}
			}
			got[r] = true
		}
		for _, r := range c.AddRoutes {
			got[r] = true
		}
		assert.Equal(t, len(got), len(want.Routes))
		for _, r := range want.Routes {
			assert.Assert(t, got[r], "%s is missing", r)
		}
	})
}
