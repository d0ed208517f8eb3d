package netstate

import (
	"net/netip"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
)

// nat returns a table with one chain of NAT rules, or of others that decide
// what is tracked.
func nat(name, hook string, priority int32, rules ...FirewallRule) Table {
	c := Chain{Name: "c", Type: "nat", Hook: hook, Priority: priority, Rules: rules}
	if len(rules) > 0 && rules[0].Action.Kind == NoTrack {
		c.Type = "filter"
	}
	return Table{Family: FamilyINET, Name: name, Chains: []Chain{c}}
}

func to(kind ActionKind, dst string, matches ...Match) FirewallRule {
	r := FirewallRule{Matches: matches, Action: Action{Kind: kind}}
	if dst != "" {
		p := prefix(dst)
		r.Action.To, r.Action.Prefix = p, !p.IsSingleIP()
	}
	return r
}

func src(s string) Match { return Match{Dir: "src", Addr: RangeOf(prefix(s))} }
func dst(s string) Match { return Match{Dir: "dst", Addr: RangeOf(prefix(s))} }
func not(m Match) Match  { m.Negate = true; return m }
func in(s string) Match  { return Match{Dir: "in", Dev: s} }

// written returns a table as it is observed by who knows what it was written
// with.
func written(t Table) Table {
	out := seen(t)
	out.Made = t.Translations()
	return out
}

// conn returns an entry of the connection table: "proto src>dst src<dst", the
// second pair being that of the answer as it comes in.
func conn(s string) Connection {
	f := strings.Fields(s)
	tuple := func(s, sep string) Tuple {
		a, b, _ := strings.Cut(s, sep)
		x, y := netip.MustParseAddrPort(a), netip.MustParseAddrPort(b)
		return Tuple{x.Addr(), y.Addr(), x.Port(), y.Port()}
	}
	reply := tuple(f[2], "<")
	return Connection{
		L4Proto: l4Numbers[f[0]], Orig: tuple(f[1], ">"),
		Reply: Tuple{reply.Dst, reply.Src, reply.DstPort, reply.SrcPort},
	}
}

// TestEvictions: which entries go when a table changes. What an entry has is
// written as the connection with its addresses in both places.
func TestEvictions(t *testing.T) {
	remap := func(from, dest string) Table {
		return nat("remap", "prerouting", -100, to(DNAT, dest, dst(from), not(in("liqo-tunnel"))))
	}
	nodeAddress := func(own ...string) Table {
		var m []Match
		for _, o := range own {
			m = append(m, not(src(o)))
		}
		return nat("node-address", "postrouting", -160, to(SNAT, "10.80.0.2/32", append(m, dst("10.1.0.0/16"))...))
	}
	bypass := nat("bypass", "postrouting", -150, to(SNAT, "10.0.0.0/16", src("10.0.0.0/16"), dst("10.1.0.0/16")))
	udp, port := Match{L4Proto: "udp"}, Match{Dir: "dst", Ports: PortRange{6091, 6091}}
	notrack := nat("notrack", "prerouting", -300, to(NoTrack, "", udp, port))

	mapped := func(pairs ...string) Table {
		r := to(DNAT, "", not(in("liqo-tunnel")))
		r.Action.Map.Dir, r.Action.Prefix = "dst", true
		for i := 0; i+1 < len(pairs); i += 2 {
			r.Action.Map.Entries = append(r.Action.Map.Entries, MapEntry{Addr: RangeOf(prefix(pairs[i])), To: prefix(pairs[i+1])})
		}
		return nat("maps", "prerouting", -100, r)
	}

	const (
		remapped   = "udp 10.0.0.5:4000>11.0.0.5:53 10.0.0.5:4000<10.1.0.5:53"
		remapped2  = "udp 10.0.0.5:4000>11.0.0.5:53 10.0.0.5:4000<10.2.0.5:53"
		untouched  = "udp 10.0.0.5:4000>11.0.0.5:53 10.0.0.5:4000<11.0.0.5:53"
		elsewhere  = "udp 10.0.0.5:4000>12.0.0.5:53 10.0.0.5:4000<12.0.0.5:53"
		pod        = "tcp 10.0.0.5:4000>10.1.0.5:80 10.0.0.5:4000<10.1.0.5:80"
		masqPod    = "tcp 10.0.0.5:4000>10.1.0.5:80 172.18.0.2:4000<10.1.0.5:80"
		client     = "tcp 192.0.2.9:4000>172.18.0.2:30080 10.80.0.2:999<10.1.0.5:80"
		otherPod   = "tcp 10.0.9.5:4000>10.1.0.5:80 10.80.0.2:999<10.1.0.5:80"
		geneve     = "udp 172.18.0.2:33333>10.0.0.9:6091 172.18.0.2:33333<10.0.0.9:6091"
		geneveBack = "udp 10.0.0.9:6091>172.18.0.2:33333 10.0.0.9:6091<172.18.0.2:33333"
		geneveTCP  = "tcp 172.18.0.2:33333>10.0.0.9:6091 172.18.0.2:33333<10.0.0.9:6091"
		ping       = "icmp 10.0.0.5:0>11.0.0.5:0 10.0.0.5:0<10.1.0.5:0"
		six        = "udp [fd00::5]:4000>[fd11::5]:53 [fd00::5]:4000<[fd01::5]:53"
	)
	all := []string{remapped, remapped2, untouched, elsewhere, pod, masqPod, client, otherPod, geneve, geneveBack, geneveTCP, ping, six}
	for _, tt := range []struct {
		name          string
		before, after []Table
		texts         string
		gone          []string
	}{
		{"unchanged", []Table{written(remap("11.0.0.0/16", "10.1.0.0/16"))}, []Table{remap("11.0.0.0/16", "10.1.0.0/16")}, "", nil},
		{"moved to a table of another name", []Table{written(remap("11.0.0.0/16", "10.1.0.0/16"))},
			[]Table{{Family: FamilyINET, Name: "other", Chains: remap("11.0.0.0/16", "10.1.0.0/16").Chains}}, "", nil},
		{"remap changed", []Table{written(remap("11.0.0.0/16", "10.1.0.0/16"))}, []Table{remap("11.0.0.0/16", "10.2.0.0/16")},
			"conntrack -D --orig-dst 11.0.0.0/16 --reply-src 10.1.0.0/16\nconntrack -D --orig-dst 11.0.0.0/16 ! --reply-src 10.2.0.0/16",
			[]string{remapped, ping}},
		{"remap moved to another network", []Table{written(remap("11.0.0.0/16", "10.1.0.0/16"))}, []Table{remap("12.0.0.0/16", "10.1.0.0/16")},
			"conntrack -D --orig-dst 11.0.0.0/16 --reply-src 10.1.0.0/16\nconntrack -D --orig-dst 12.0.0.0/16 ! --reply-src 10.1.0.0/16",
			[]string{remapped, ping, elsewhere}},
		{"remap withdrawn", []Table{written(remap("11.0.0.0/16", "10.1.0.0/16"))}, nil,
			"conntrack -D --orig-dst 11.0.0.0/16 --reply-src 10.1.0.0/16", []string{remapped, ping}},
		{"remap is new", nil, []Table{remap("11.0.0.0/16", "10.1.0.0/16")},
			"conntrack -D --orig-dst 11.0.0.0/16 ! --reply-src 10.1.0.0/16", []string{remapped2, untouched}},
		{"what it was is not known", []Table{seen(remap("11.0.0.0/16", "10.9.0.0/16"))}, []Table{remap("11.0.0.0/16", "10.1.0.0/16")},
			"conntrack -D --orig-dst 11.0.0.0/16 ! --reply-src 10.1.0.0/16", []string{remapped2, untouched}},
		{"IPv6 remap withdrawn", []Table{written(remap("fd11::/64", "fd01::/64"))}, nil,
			"conntrack -D --orig-dst fd11::/64 --reply-src fd01::/64", []string{six}},
		{"an entry of a map changed", []Table{written(mapped("11.0.0.0/16", "10.1.0.0/16", "12.0.0.0/16", "10.3.0.0/16"))},
			[]Table{mapped("11.0.0.0/16", "10.2.0.0/16", "12.0.0.0/16", "10.3.0.0/16")},
			"conntrack -D --orig-dst 11.0.0.0/16\nconntrack -D --orig-dst 11.0.0.0/16", []string{remapped, ping}},
		{"an entry of a map withdrawn", []Table{written(mapped("11.0.0.0/16", "10.1.0.0/16", "12.0.0.0/16", "10.3.0.0/16"))},
			[]Table{mapped("12.0.0.0/16", "10.3.0.0/16")}, "conntrack -D --orig-dst 11.0.0.0/16", []string{remapped, ping}},
		{"a rule becomes part of a map", []Table{written(remap("11.0.0.0/16", "10.1.0.0/16"))},
			[]Table{mapped("11.0.0.0/16", "10.1.0.0/16", "13.0.0.0/16", "10.3.0.0/16")},
			"conntrack -D --orig-dst 11.0.0.0/16 --reply-src 10.1.0.0/16\nconntrack -D --orig-dst 11.0.0.0/16,13.0.0.0/16", nil},
		{"a pod outside the node's CIDR is new", []Table{written(nodeAddress("10.0.0.0/24"))}, []Table{nodeAddress("10.0.0.0/24", "10.0.9.5/32")},
			"conntrack -D ! --orig-src 10.0.0.0/24 --reply-src 10.1.0.0/16 --reply-dst 10.80.0.2\n" +
				"conntrack -D ! --orig-src 10.0.0.0/24 ! --orig-src 10.0.9.5 --reply-src 10.1.0.0/16 ! --reply-dst 10.80.0.2",
			[]string{otherPod}},
		{"masquerade bypass is new", []Table{written(nodeAddress("10.0.0.0/24"))}, []Table{nodeAddress("10.0.0.0/24"), bypass},
			"conntrack -D --orig-src 10.0.0.0/16 --reply-src 10.1.0.0/16 ! --reply-dst 10.0.0.0/16", []string{masqPod}},
		{"masquerade withdrawn", []Table{written(nat("m", "postrouting", 100, to(Masquerade, "", dst("10.1.0.0/16"))))}, nil,
			"conntrack -D --reply-src 10.1.0.0/16", []string{masqPod, client, otherPod}},
		{"notrack is new", nil, []Table{notrack}, "conntrack -D --proto udp --orig-port-dst 6091", []string{geneve, geneveBack}},
		{"notrack withdrawn", []Table{written(notrack)}, nil, "", nil},
		{"notrack on bridges", nil, []Table{{Family: FamilyBridge, Name: "t", Chains: notrack.Chains}}, "", nil},
		{"notrack of a link", nil, []Table{nat("outer", "output", -300, to(NoTrack, "", not(Match{Dir: "out", Dev: "liqo-tunnel"}), udp))}, "", nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := Diff(State{Tables: tt.before}, State{Tables: tt.after})
			var texts []string
			for _, e := range c.Evict {
				texts = append(texts, e.String())
			}
			assert.Equal(t, strings.Join(texts, "\n"), tt.texts)
			gone := map[string]bool{}
			for _, s := range tt.gone {
				gone[s] = true
			}
			for _, s := range all {
				var got bool
				for _, e := range c.Evict {
					got = got || e.Evicts(conn(s))
				}
				assert.Check(t, got == gone[s], "%s: evicted %v", s, got)
			}
		})
	}
}
