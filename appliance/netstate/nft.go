package netstate

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// Digest returns a short fingerprint of all that the table says.
func (t Table) Digest() string {
	sum := sha256.Sum256([]byte(t.String()))
	return hex.EncodeToString(sum[:8])
}

// holds reports whether the table, as observed, is what want asks for. An
// observed table tells the digest that it was written with, its chains and
// the names of its rules, in order.
func (t Table) holds(want Table) bool {
	if t.Seen == "" {
		return t.String() == want.String()
	}
	return t.Seen == want.Digest() && slices.EqualFunc(t.Chains, want.Chains, func(a, b Chain) bool {
		return a.Name == b.Name && a.Type == b.Type && a.Hook == b.Hook && a.Priority == b.Priority &&
			a.policy() == b.policy() &&
			slices.EqualFunc(a.Rules, b.Rules, func(x, y FirewallRule) bool { return x.Name == y.Name })
	})
}

func (c Chain) policy() string {
	if c.Policy == "" {
		return "accept"
	}
	return c.Policy
}

// String returns the table in the language of nft(8).
func (t Table) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "table %s %s {\n", t.Family, t.Name)
	for _, c := range t.Chains {
		fmt.Fprintf(&b, "\tchain %s {\n\t\ttype %s hook %s priority %d; policy %s;\n", c.Name, c.Type, c.Hook, c.Priority, c.policy())
		for _, r := range c.Rules {
			fmt.Fprintf(&b, "\t\t%s\n", r.text(t.Family))
		}
		b.WriteString("\t}\n")
	}
	b.WriteString("}\n")
	return b.String()
}

// text returns the rule in the language of nft(8), for a table of the family.
func (r FirewallRule) text(f Family) string {
	var w []string
	// As nft(8) prints it: the protocol first, and not at all where a match
	// of ports says it.
	if p := r.L4Proto(); p != "" && !slices.ContainsFunc(r.Matches, func(m Match) bool { return m.Ports != PortRange{} }) {
		w = append(w, "meta l4proto "+p)
	}
	for _, m := range r.Matches {
		if m.L4Proto == "" || m.Negate || m.L4Proto != r.L4Proto() {
			w = append(w, m.text(r, f))
		}
	}
	if r.Counter {
		w = append(w, "counter")
	}
	if a := r.Action.text(f, r.L4Proto()); a != "" {
		w = append(w, a)
	}
	if r.Name != "" {
		w = append(w, fmt.Sprintf("comment %q", r.Name))
	}
	return strings.Join(w, " ")
}

// L4Proto returns the transport protocol that the rule's matches demand;
// empty: any.
func (r FirewallRule) L4Proto() string {
	for _, m := range r.Matches {
		if m.L4Proto != "" && !m.Negate {
			return m.L4Proto
		}
	}
	return ""
}

// Is6 reports whether the rule's matches or its action demand IPv6, and ok
// whether they, or the table's family, tell the IP family at all.
func (r FirewallRule) Is6(f Family) (is6, ok bool) {
	switch f {
	case FamilyIPv4, FamilyARP:
		return false, true
	case FamilyIPv6:
		return true, true
	}
	for _, m := range r.Matches {
		if m.Addr.From.IsValid() {
			return m.Addr.From.Is6(), true
		}
	}
	if r.Action.To.IsValid() {
		return r.Action.To.Addr().Is6(), true
	}
	if m := r.Action.Map; len(m.Entries) > 0 && m.Dir == "" {
		return m.IPv6, true
	} else if len(m.Entries) > 0 {
		return m.Entries[0].Addr.From.Is6(), true
	}
	return false, false
}

func (m Match) text(r FirewallRule, f Family) string {
	not := ""
	if m.Negate {
		not = "!= "
	}
	switch {
	case m.Of == OfQuoted:
		return fmt.Sprintf("%s %s", quotedAddress(m.Dir), m.quotedText())
	case m.Of == OfConnection:
		// Of a prefix nft(8) 1.0.6 makes something else here.
		if m.Addr.From != m.Addr.To {
			return fmt.Sprintf("ct original ip %saddr %s%s-%s", m.Dir[:1], not, m.Addr.From, m.Addr.To)
		}
		return fmt.Sprintf("ct original ip %saddr %s%s", m.Dir[:1], not, m.Addr.From)
	case m.Addr.From.IsValid() && f == FamilyARP:
		return fmt.Sprintf("arp %saddr ip %s%s", m.Dir[:1], not, m.Addr)
	case m.Addr.From.IsValid():
		return fmt.Sprintf("%s %saddr %s%s", ipKeyword(m.Addr.From), m.Dir[:1], not, m.Addr)
	case m.Ports != PortRange{}:
		keyword := r.L4Proto()
		if keyword == "" {
			keyword = "meta l4proto { tcp, udp, sctp } th"
		}
		return fmt.Sprintf("%s %sport %s%s", keyword, m.Dir[:1], not, m.Ports)
	case m.L4Proto != "":
		return fmt.Sprintf("meta l4proto %s%s", not, m.L4Proto)
	case m.Dev == AnyDev && m.Negate:
		return m.Dir[:1] + "if 0"
	case m.Dev == AnyDev:
		return m.Dir[:1] + "if != 0"
	case m.Dev != "":
		return fmt.Sprintf("%sifname %s%q", m.Dir[:1], not, m.Dev)
	case m.ICMPError:
		if is6, _ := r.Is6(f); is6 {
			return "icmpv6 type " + not + "{ destination-unreachable, packet-too-big, time-exceeded, parameter-problem }"
		}
		return "icmp type " + not + "{ destination-unreachable, time-exceeded, parameter-problem }"
	case m.ICMPRedirect:
		if is6, _ := r.Is6(f); is6 {
			return "icmpv6 type " + not + "nd-redirect"
		}
		return "icmp type " + not + "redirect"
	case m.CTDir != "":
		return "ct direction " + not + m.CTDir
	case m.CTMark != 0:
		op := "!="
		if m.Negate {
			op = "=="
		}
		return fmt.Sprintf("ct mark & 0x%x %s 0x0", m.CTMark, op)
	case m.ToHost && m.Negate:
		return "fib daddr type unicast"
	case m.ToHost:
		return "fib daddr type != unicast"
	default:
		return ""
	}
}

func (a Action) text(f Family, l4proto string) string {
	switch a.Kind {
	case SetCTMark:
		if len(a.Map.Entries) > 0 {
			return fmt.Sprintf("ct mark set %s map %s", a.Map.key(), a.elements())
		}
		if a.Mask != 0 {
			return fmt.Sprintf("ct mark set ct mark & 0x%x | 0x%x", ^a.Mask, a.Mark)
		}
		return fmt.Sprintf("ct mark set 0x%x", a.Mark)
	case RestoreCT:
		if a.Mask != 0 {
			return fmt.Sprintf("meta mark set ct mark & 0x%x", a.Mask)
		}
		return "meta mark set ct mark"
	case SetMark:
		return fmt.Sprintf("meta mark set 0x%x", a.Mark)
	case ClampMSS:
		to := "rt mtu"
		if a.MSS != 0 {
			to = fmt.Sprint(a.MSS)
		}
		return "tcp flags & (syn | rst) == syn tcp option maxseg size set " + to
	case SetSource:
		return fmt.Sprintf("%s saddr set %s", ipKeyword(a.To.Addr()), a.To.Addr())
	case SetPrefix:
		return a.prefixText()
	case SNAT, DNAT:
		if len(a.Map.Entries) > 0 {
			return a.mapText(f)
		}
		family := ""
		if f == FamilyINET {
			family = " " + ipKeyword(a.To.Addr())
		}
		if a.Prefix {
			return fmt.Sprintf("%s%s prefix to %s", a.Kind, family, a.To.Masked())
		}
		return fmt.Sprintf("%s%s to %s", a.Kind, family, a.To.Addr())
	case Masquerade:
		if len(a.Map.Entries) > 0 {
			return fmt.Sprintf("%s %s masquerade", a.Map.key(), a.elements())
		}
		return string(a.Kind)
	default:
		return string(a.Kind)
	}
}

// Offsets, in bits, of the addresses in the packet that an ICMP error quotes,
// from the beginning of the message: its own header has 8 bytes (RFC 792), then
// comes that of the packet (RFC 791).
const quotedSourceBit, quotedDestinationBit = (8 + 12) * 8, (8 + 16) * 8

// quotedAddress is an address of the packet that an ICMP error quotes. nft(8) has
// no name for it.
func quotedAddress(dir string) string {
	if dir == "src" {
		return fmt.Sprintf("@th,%d,32", quotedSourceBit)
	}
	return fmt.Sprintf("@th,%d,32", quotedDestinationBit)
}

// quotedText is what a quoted address is compared with. The match is one prefix.
func (m Match) quotedText() string {
	op := "=="
	if m.Negate {
		op = "!="
	}
	p, _ := m.Addr.AsPrefix()
	if p.IsSingleIP() {
		return fmt.Sprintf("%s 0x%x", op, number(p.Addr()))
	}
	return fmt.Sprintf("& 0x%x %s 0x%x", ^hostBits(p), op, number(p.Addr()))
}

// prefixText returns an action that replaces a prefix.
func (a Action) prefixText() string {
	to := a.To.Masked()
	if a.Of == OfQuoted {
		field := quotedAddress(a.Dir)
		return fmt.Sprintf("%s set %s & 0x%x | 0x%x accept", field, field, hostBits(to), number(to.Addr()))
	}
	field := fmt.Sprintf("%s %saddr", ipKeyword(to.Addr()), a.Dir[:1])
	var mask [4]byte
	binary.BigEndian.PutUint32(mask[:], hostBits(to))
	return fmt.Sprintf("%s set %s & %s | %s accept", field, field, netip.AddrFrom4(mask), to.Addr())
}

// hostBits are the bits of an IPv4 address that are not of its prefix.
func hostBits(p netip.Prefix) uint32 { return uint32(1<<(32-p.Bits()) - 1) }

// number is an IPv4 address as a number.
func number(a netip.Addr) uint32 {
	b := a.As4()
	return binary.BigEndian.Uint32(b[:])
}

// mapText returns an action whose address comes out of a map. As nft(8) prints
// it, prefixes tell their family in every table.
func (a Action) mapText(f Family) string {
	family, to := "", "to"
	if f == FamilyINET || a.Prefix {
		family = " " + ipKeyword(a.Map.Entries[0].Addr.From)
	}
	if a.Prefix {
		to = "prefix to"
	}
	return fmt.Sprintf("%s%s %s %s map %s", a.Kind, family, to, a.Map.key(), a.elements())
}

func ipKeyword(a netip.Addr) string {
	if a.Is6() {
		return "ip6"
	}
	return "ip"
}

// String returns the range as an address, a prefix or "from-to".
func (r AddrRange) String() string {
	if r.From == r.To {
		return r.From.String()
	}
	if p, ok := r.AsPrefix(); ok {
		return p.String()
	}
	return r.From.String() + "-" + r.To.String()
}

// AsPrefix returns the prefix that holds exactly the addresses of the range,
// if there is one.
func (r AddrRange) AsPrefix() (netip.Prefix, bool) {
	if !r.From.IsValid() || r.From.BitLen() != r.To.BitLen() {
		return netip.Prefix{}, false
	}
	from, to := r.From.AsSlice(), r.To.AsSlice()
	bits := 0
	for bits < len(from)*8 && bit(from, bits) == bit(to, bits) {
		bits++
	}
	for i := bits; i < len(from)*8; i++ {
		if bit(from, i) || !bit(to, i) {
			return netip.Prefix{}, false
		}
	}
	return netip.PrefixFrom(r.From, bits), true
}

func (r AddrRange) isPrefix() bool {
	_, ok := r.AsPrefix()
	return ok
}

func bit(b []byte, i int) bool { return b[i/8]&(0x80>>(i%8)) != 0 }

// RangeOf returns the addresses of a prefix.
func RangeOf(p netip.Prefix) AddrRange {
	p = p.Masked()
	to := p.Addr().AsSlice()
	for i := p.Bits(); i < len(to)*8; i++ {
		to[i/8] |= 0x80 >> (i % 8)
	}
	last, _ := netip.AddrFromSlice(to)
	return AddrRange{p.Addr(), last}
}

// WithHostBits returns the address that has the bits of the prefix, and all others
// of another address.
func WithHostBits(p netip.Prefix, host netip.Addr) netip.Addr {
	out, bits := p.Addr().AsSlice(), host.AsSlice()
	for i := p.Bits(); i < len(out)*8 && i < len(bits)*8; i++ {
		out[i/8] = out[i/8]&^(0x80>>(i%8)) | bits[i/8]&(0x80>>(i%8))
	}
	a, _ := netip.AddrFromSlice(out)
	return a
}

// String returns the range as a port or "from-to".
func (r PortRange) String() string {
	if r.From == r.To {
		return fmt.Sprint(r.From)
	}
	return fmt.Sprintf("%d-%d", r.From, r.To)
}
