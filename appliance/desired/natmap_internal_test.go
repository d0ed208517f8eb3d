package desired

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// A packet is what rules of nat chains look at.
type packet struct {
	src, dst     netip.Addr
	proto        string
	sport, dport uint16
	in, out      string
}

func (p packet) satisfies(m netstate.Match) bool {
	pick := func(src bool, a, b netip.Addr) netip.Addr {
		if src {
			return a
		}
		return b
	}
	var ok bool
	switch {
	case m.Addr.From.IsValid():
		a := pick(m.Dir == "src", p.src, p.dst)
		if a.Is6() != m.Addr.From.Is6() {
			return false // "ip saddr != …" is about IPv4 only
		}
		ok = !a.Less(m.Addr.From) && !m.Addr.To.Less(a)
	case m.Ports != netstate.PortRange{}:
		port := p.dport
		if m.Dir == "src" {
			port = p.sport
		}
		ok = m.Ports.From <= port && port <= m.Ports.To
	case m.L4Proto != "":
		ok = p.proto == m.L4Proto
	case m.Dev != "":
		dev := p.in
		if m.Dir == "out" {
			dev = p.out
		}
		ok = dev == m.Dev
	}
	return ok != m.Negate
}

// fate returns what becomes of a packet: the first rule that matches it says, but
// for those that mark its connection.
func fate(rules []netstate.FirewallRule, p packet) string {
	mark := uint32(0)
next:
	for _, r := range rules {
		for _, m := range r.Matches {
			if !p.satisfies(m) {
				continue next
			}
		}
		a := r.Action
		to, prefix := a.To, a.Prefix
		if len(a.Map.Entries) > 0 {
			key := p.dst
			if a.Map.Dir == "src" {
				key = p.src
			}
			e, found := a.Map.Find(key, p.in)
			if !found {
				continue
			}
			to, a.Mark = e.To, e.Mark
		}
		switch a.Kind {
		case netstate.SetCTMark:
			mark = a.Mark
			continue
		case netstate.Drop:
			return fmt.Sprintf("drop with mark %d", mark)
		}
		if a.Kind == netstate.Masquerade {
			return "masquerade"
		}
		if to.Addr().Is6() != p.dst.Is6() {
			continue // the new address tells the family, too
		}
		if !prefix {
			return fmt.Sprintf("%s to %s", a.Kind, to.Addr())
		}
		old := p.src
		if a.Kind == netstate.DNAT {
			old = p.dst
		}
		return fmt.Sprintf("%s to %s", a.Kind, withHostBits(to, old))
	}
	return fmt.Sprintf("accept with mark %d", mark)
}

// withHostBits is what "prefix to" does.
func withHostBits(to netip.Prefix, host netip.Addr) netip.Addr {
	b, h := to.Addr().AsSlice(), host.AsSlice()
	for i := to.Bits(); i < len(b)*8; i++ {
		bit := byte(0x80 >> (i % 8))
		b[i/8] = b[i/8]&^bit | h[i/8]&bit
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}

// randomRules returns rules of a chain that overlap, and come in any order.
func randomRules(r *rand.Rand, hook string) []netstate.FirewallRule {
	six := r.IntN(4) == 0
	space := func(n int) netip.Addr {
		if six && r.IntN(2) == 0 {
			return netip.AddrFrom16([16]byte{0: 0xfd, 15: byte(n)})
		}
		return netip.AddrFrom4([4]byte{10, 0, 0, byte(n)})
	}
	address := func(like netip.Addr) netip.Prefix {
		a := space(r.IntN(32))
		for like.IsValid() && a.Is6() != like.Is6() {
			a = space(r.IntN(32))
		}
		return netip.PrefixFrom(a, a.BitLen()-[]int{0, 0, 0, 1, 2}[r.IntN(5)]).Masked()
	}
	few := func(list ...netstate.Match) []netstate.Match {
		var out []netstate.Match
		for _, m := range list {
			if r.IntN(4) == 0 {
				m.Negate = r.IntN(3) == 0
				out = append(out, m)
			}
		}
		return out
	}
	kinds := []netstate.ActionKind{netstate.SNAT, netstate.SNAT, netstate.Masquerade}
	switch hook {
	case "prerouting":
		kinds = []netstate.ActionKind{netstate.DNAT}
	case "forward":
		kinds = []netstate.ActionKind{netstate.SetCTMark, netstate.SetCTMark, netstate.SetCTMark, netstate.Drop}
	}
	type form struct {
		kind   netstate.ActionKind
		dirs   []string
		others []netstate.Match
		byLink bool
	}
	var forms []form
	for range 1 + r.IntN(3) {
		forms = append(forms, form{
			kind: kinds[r.IntN(len(kinds))],
			dirs: [][]string{{"dst"}, {"src"}, {"dst", "src"}, {"dst", "dst"}, {}}[min(r.IntN(8), 4)],
			others: few(
				netstate.Match{L4Proto: []string{"tcp", "udp"}[r.IntN(2)]},
				netstate.Match{Dir: "dst", Ports: netstate.PortRange{From: uint16(r.IntN(2)), To: 2}},
				netstate.Match{Dir: "in", Dev: "a"},
			),
		})
		if f := &forms[len(forms)-1]; f.kind == netstate.SetCTMark && r.IntN(2) == 0 { // each with its link
			f.others = slices.DeleteFunc(f.others, func(m netstate.Match) bool { return m.Dev != "" })
			f.byLink = true
		}
	}
	var out []netstate.FirewallRule
	common := address(netip.Addr{})
	for i := range r.IntN(40) {
		f := forms[r.IntN(len(forms))]
		first := address(netip.Addr{})
		rule := netstate.FirewallRule{
			Name:    []string{"", "all", fmt.Sprintf("r%d", i)}[r.IntN(3)],
			Matches: slices.Clone(f.others),
			Action:  netstate.Action{Kind: f.kind, Prefix: r.IntN(3) == 0},
		}
		for _, dir := range f.dirs {
			to := address(first.Addr())
			if len(rule.Matches) > len(f.others) && r.IntN(3) > 0 && common.Addr().Is6() == first.Addr().Is6() {
				to = common
			}
			rule.Matches = append(rule.Matches, netstate.Match{Dir: dir, Addr: netstate.RangeOf(to), Negate: r.IntN(20) == 0})
		}
		switch rule.Action.Kind {
		case netstate.SetCTMark:
			rule.Action.Prefix, rule.Action.Mark = false, 1+uint32(r.IntN(9))
			if f.byLink {
				rule.Matches = append(rule.Matches, netstate.Match{Dir: "in", Dev: []string{"a", "b", "c", "d"}[r.IntN(4)]})
			}
		case netstate.Masquerade, netstate.Drop:
			rule.Action.Prefix = false
		default:
			rule.Action.To = address(first.Addr())
		}
		out = append(out, rule)
	}
	return out
}

// TestMapsMeanTheSame: whatever the rules are, with maps they do to every packet
// what they do without.
func TestMapsMeanTheSame(t *testing.T) {
	mapped := map[string]int{}
	alone := 0 // maps by the link alone
	for seed := range uint64(1500) {
		r := rand.New(rand.NewPCG(seed, 7))
		hook, kind := []string{"prerouting", "postrouting", "forward"}[r.IntN(3)], "nat"
		if hook == "forward" {
			kind = "filter"
		}
		rules := randomRules(r, hook)
		least := 2 + r.IntN(4)
		short := withMaps(rules, least)
		assert.Assert(t, len(short) <= len(rules))
		if len(short) < len(rules) {
			mapped[hook]++
			table := netstate.Table{Family: netstate.FamilyINET, Name: "t", Chains: []netstate.Chain{{Name: "c", Type: kind, Hook: hook, Rules: short}}}
			assert.NilError(t, table.Validate())
			for _, rule := range short {
				n := len(rule.Action.Map.Entries)
				assert.Assert(t, n == 0 || n >= least)
				if n > 0 && rule.Action.Map.Dir == "" {
					alone++
				}
			}
		}
		for range 150 {
			src, dst := r.IntN(33), r.IntN(33)
			p := packet{
				src: netip.AddrFrom4([4]byte{10, 0, 0, byte(src)}), dst: netip.AddrFrom4([4]byte{10, 0, 0, byte(dst)}),
				proto: []string{"tcp", "udp", "icmp"}[r.IntN(3)], sport: uint16(r.IntN(4)), dport: uint16(r.IntN(4)), in: []string{"a", "b", "c", "d"}[r.IntN(4)],
			}
			if r.IntN(4) == 0 {
				p.src, p.dst = netip.AddrFrom16([16]byte{0: 0xfd, 15: byte(src)}), netip.AddrFrom16([16]byte{0: 0xfd, 15: byte(dst)})
			}
			assert.Equal(t, fate(short, p), fate(rules, p), "seed %d, %v:\n%v\n%v", seed, p, rules, short)
		}
	}
	assert.Assert(t, alone > 5, "only %d maps by the link alone", alone)
	for _, hook := range []string{"prerouting", "postrouting", "forward"} {
		assert.Assert(t, mapped[hook] > 70, "only %d of the chains in %s have maps", mapped[hook], hook)
	}
}
