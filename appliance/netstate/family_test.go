package netstate

import (
	"slices"
	"testing"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
)

// TestFamilies holds what Validate says against what each family allows, for
// every type of chain, hook and action.
func TestFamilies(t *testing.T) {
	types := []string{"filter", "nat", "route"}
	at := []string{"prerouting", "input", "forward", "output", "postrouting", "ingress"}
	kinds := []ActionKind{Accept, Drop, Reject, NoTrack, SetCTMark, RestoreCT, SetMark, ClampMSS, SNAT, DNAT, Masquerade}
	for _, tt := range []struct {
		family   Family
		chains   int // types and hooks that go together
		actions  []ActionKind
		rejectAt string
	}{
		{FamilyINET, 10, kinds, "forward"},
		{FamilyIPv4, 10, kinds, "forward"},
		{FamilyIPv6, 10, kinds, "forward"},
		{FamilyBridge, 5, []ActionKind{Accept, Drop, Reject, NoTrack, SetCTMark, RestoreCT, ClampMSS}, "prerouting"},
		{FamilyARP, 2, []ActionKind{Accept, Drop}, ""},
		{"netdev", 0, nil, ""},
	} {
		t.Run(string(tt.family), func(t *testing.T) {
			chains := 0
			var actions []ActionKind
			for _, typ := range types {
				for _, hook := range at {
					c := Chain{Name: "c", Type: typ, Hook: hook, Priority: -199}
					valid := func() bool { return Table{Family: tt.family, Name: "t", Chains: []Chain{c}}.Validate() == nil }
					if valid() {
						chains++
					}
					for _, kind := range kinds {
						a := Action{Kind: kind}
						c.Priority = -199
						switch kind {
						case NoTrack:
							c.Priority = -300
						case ClampMSS:
							a.MSS = 1300
						case SNAT, DNAT:
							a.To = prefix("10.0.0.1/32")
							if tt.family == FamilyIPv6 {
								a.To = prefix("fd00::1/128")
							}
						}
						c.Rules = []FirewallRule{{Name: "r", Action: a}}
						if valid() && !slices.Contains(actions, kind) {
							actions = append(actions, kind)
						}
						if kind == Reject && typ == "filter" && hook == tt.rejectAt {
							assert.Check(t, valid(), hook)
						}
					}
				}
			}
			assert.Check(t, is.Equal(chains, tt.chains))
			for _, kind := range kinds {
				assert.Check(t, is.Equal(slices.Contains(actions, kind), slices.Contains(tt.actions, kind)), "%s", kind)
			}
		})
	}
}

// TestRulesOfLinkLayers are those of the families whose packets are not known to
// be IP; package kernel compares them with what nft(8) prints.
func TestRulesOfLinkLayers(t *testing.T) {
	v4 := Match{Dir: "src", Addr: RangeOf(prefix("10.0.0.0/8"))}
	v6 := Match{Dir: "dst", Addr: RangeOf(prefix("fd00::1/128"))}
	in, out := Match{Dir: "in", Dev: "eth0"}, Match{Dir: "out", Dev: "eth1"}
	port := Match{Dir: "dst", Ports: PortRange{53, 53}}
	tcp, notTCP := Match{L4Proto: "tcp"}, Match{Negate: true, L4Proto: "tcp"}
	drop := Action{Kind: Drop}
	for _, tt := range []struct {
		family  Family
		hook    string
		action  Action
		matches []Match
		text    string
		problem string
	}{
		{FamilyARP, "input", drop, []Match{v4, in}, `arp saddr ip 10.0.0.0/8 iifname "eth0" drop`, ""},
		{FamilyARP, "output", drop, []Match{{Negate: true, Dir: "dst", Addr: AddrRange{addr("10.0.0.1"), addr("10.0.0.9")}}, out},
			`arp daddr ip != 10.0.0.1-10.0.0.9 oifname "eth1" drop`, ""},
		{FamilyARP, "input", drop, []Match{v6}, "", "the rule is about the other IP family"},
		{FamilyARP, "input", drop, []Match{port}, "", "only the addresses and the device"},
		{FamilyARP, "input", drop, []Match{tcp}, "", "only the addresses and the device"},
		{FamilyARP, "input", drop, []Match{out}, "", "at hook input no packet has an out device"},
		{FamilyARP, "output", drop, []Match{in}, "", "at hook output no packet has an in device"},
		{FamilyARP, "input", Action{Kind: Reject}, nil, "", "reject: tables of family arp have no such action"},
		{FamilyBridge, "forward", drop, []Match{v4, in, out}, `ip saddr 10.0.0.0/8 iifname "eth0" oifname "eth1" drop`, ""},
		{FamilyBridge, "forward", drop, []Match{v6, notTCP}, `ip6 daddr fd00::1 meta l4proto != tcp drop`, ""},
		{FamilyBridge, "forward", drop, []Match{v4, v6}, "", "the rule is about the other IP family"},
		{FamilyBridge, "forward", drop, []Match{port}, "meta l4proto { tcp, udp, sctp } th dport 53 drop", ""},
		{FamilyBridge, "forward", Action{Kind: ClampMSS, MSS: 1300}, []Match{tcp}, "meta l4proto tcp tcp flags & (syn | rst) == syn tcp option maxseg size set 1300", ""},
		{FamilyBridge, "forward", Action{Kind: ClampMSS}, []Match{tcp}, "", "a bridge knows no routes"},
		{FamilyBridge, "postrouting", drop, []Match{out}, `oifname "eth1" drop`, ""},
		{FamilyBridge, "postrouting", drop, []Match{in}, "", "at hook postrouting no packet has an in device"},
		{FamilyBridge, "forward", Action{Kind: Reject}, nil, "", "reject: only at prerouting and input, not forward"},
		{FamilyBridge, "output", Action{Kind: NoTrack}, nil, "", "notrack: only in filter chains at prerouting before"},
	} {
		table := Table{Family: tt.family, Name: "t", Chains: []Chain{{Name: "c", Type: "filter", Hook: tt.hook, Priority: -300,
			Rules: []FirewallRule{{Name: "r", Matches: tt.matches, Action: tt.action}}}}}
		if tt.problem != "" {
			assert.Check(t, is.ErrorContains(table.Validate(), tt.problem), "%s", table)
			continue
		}
		assert.Check(t, table.Validate())
		assert.Check(t, is.Contains(table.String(), "\t\t"+tt.text+` comment "r"`+"\n"))
	}
}
