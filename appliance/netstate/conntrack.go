package netstate

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// A Translation is a rule that decides what the connection table says of a
// connection: one that translates an address, or that keeps packets out of the
// table.
type Translation struct {
	Family   Family // of its table
	Hook     string
	Priority int32
	Rule     FirewallRule
}

// Translations returns the rules of the table that translate or do not track,
// in their order. Of an observed table they are those that it was written with.
// Bridges have none: the connection table does not tell what goes through one.
func (t Table) Translations() []Translation {
	if t.Seen != "" {
		return t.Made
	}
	if !t.Family.IsIP() {
		return nil
	}
	var out []Translation
	for _, c := range t.Chains {
		for _, r := range c.Rules {
			if translates(r.Action.Kind) || r.Action.Kind == NoTrack {
				out = append(out, Translation{t.Family, c.Hook, c.Priority, r})
			}
		}
	}
	return out
}

func translates(k ActionKind) bool { return k == SNAT || k == DNAT || k == Masquerade }

// A Tuple is one direction of a connection, as a packet shows it.
type Tuple struct {
	Src, Dst         netip.Addr
	SrcPort, DstPort uint16 // 0 of protocols without
}

// A Connection is an entry of the connection table (conntrack(8)): the tuple of
// the packet that began it, before any translation, and that of the answer.
type Connection struct {
	L4Proto     byte // RFC 5237
	Orig, Reply Tuple
}

// l4Numbers are the protocols that rules know.
var l4Numbers = map[string]byte{"icmp": 1, "tcp": 6, "udp": 17, "icmpv6": 58, "sctp": 132}

// An Eviction says which entries of the connection table are to go because a
// rule came into force or does not hold any more: a connection that the table
// knows is not asked for again, and would go on as before.
type Eviction struct {
	Translation
	// Withdrawn is true of a rule that was in force: what it has made goes,
	// unless another rule makes the same. Otherwise what it would make
	// different goes.
	Withdrawn bool
	// Before and After are all rules that were and are in force, the first
	// one first: of several that are about a packet, the first holds.
	Before, After []Translation
}

// Evicts reports whether an entry goes. What links a packet takes is not in the
// table, so matches of devices count as fulfilled.
func (e Eviction) Evicts(c Connection) bool {
	if e.Rule.Action.Kind == NoTrack {
		reply := Connection{L4Proto: c.L4Proto, Orig: c.Reply, Reply: c.Orig}
		return e.covers(c) || e.covers(reply)
	}
	if !e.covers(c) {
		return false
	}
	has := e.addressOf(c)
	before, after := outcome(e.Before, e.Translation, c), outcome(e.After, e.Translation, c)
	switch {
	case before == after:
		return false
	case before.rule && !before.gives(has, c, e.Translation):
		return false // it is of another's making, and was when that rule held
	default:
		return !after.rule && before.rule || after.rule && !after.gives(has, c, e.Translation)
	}
}

// source reports whether the rule is about the source address.
func (t Translation) source() bool { return t.Rule.Action.Kind != DNAT }

// addressOf returns what has become of the address that the rule is about.
func (t Translation) addressOf(c Connection) netip.Addr {
	if t.source() {
		return c.Reply.Dst
	}
	return c.Reply.Src
}

// original returns the address that the rule is about.
func (t Translation) original(c Connection) netip.Addr {
	if t.source() {
		return c.Orig.Src
	}
	return c.Orig.Dst
}

// An address is what rules make of one: to is invalid where the kernel chooses
// (masquerade), rule is false where none is about it.
type address struct {
	to   netip.Addr
	rule bool
}

// outcome returns what becomes of the address of a connection that a rule like
// this one is about.
func outcome(rules []Translation, like Translation, c Connection) address {
	for _, t := range rules {
		if translates(t.Rule.Action.Kind) && t.source() == like.source() && t.covers(c) {
			return address{t.to(c), true}
		}
	}
	return address{}
}

// gives reports whether an address that a connection has is this one.
func (a address) gives(has netip.Addr, c Connection, t Translation) bool {
	if !a.to.IsValid() {
		return has != t.original(c)
	}
	return has == a.to
}

// to returns what the rule makes of the address; invalid: the kernel chooses.
func (t Translation) to(c Connection) netip.Addr {
	a := t.Rule.Action
	dst := a.To
	if len(a.Map.Entries) > 0 {
		e, _ := a.Map.Find(t.key(c), "")
		dst = e.To
	}
	if !dst.IsValid() || !a.Prefix {
		return dst.Addr()
	}
	return WithHostBits(dst, t.original(c))
}

// key returns the address that the rule looks up in its map.
func (t Translation) key(c Connection) netip.Addr {
	if t.Rule.Action.Map.Dir == "dst" {
		return t.packet(c).Dst
	}
	return c.Orig.Src
}

// packet returns what the rule's hook sees of the packet that began a
// connection.
func (t Translation) packet(c Connection) Tuple {
	p := c.Orig
	if t.Hook == "postrouting" || t.Hook == "input" {
		p.Dst, p.DstPort = c.Reply.Src, c.Reply.SrcPort
	}
	return p
}

// covers reports whether the rule is about the packet that began a connection,
// as the rule's hook sees it: before a new source, after a new destination.
func (t Translation) covers(c Connection) bool {
	p := t.packet(c)
	if m := t.Rule.Action.Map; len(m.Entries) > 0 {
		if _, ok := m.Find(t.key(c), ""); !ok {
			return false
		}
	}
	switch {
	case t.Family == FamilyIPv4 && !p.Src.Is4(), t.Family == FamilyIPv6 && !p.Src.Is6():
		return false
	case t.Rule.Action.To.IsValid() && t.Rule.Action.To.Addr().Is4() != p.Src.Is4():
		return false
	}
	for _, m := range t.Rule.Matches {
		addr, port := p.Src, p.SrcPort
		if m.Dir == "dst" {
			addr, port = p.Dst, p.DstPort
		}
		var is bool
		switch {
		case m.Dev != "":
			continue
		case m.Addr.From.IsValid():
			is = m.Addr.From.BitLen() == addr.BitLen() && m.Addr.From.Compare(addr) <= 0 && addr.Compare(m.Addr.To) <= 0
		case m.Ports != PortRange{}:
			is = m.Ports.From <= port && port <= m.Ports.To
		case m.L4Proto != "":
			is = l4Numbers[m.L4Proto] == c.L4Proto
		default:
			return false // errors and redirects are in the table of others
		}
		if is == m.Negate {
			return false
		}
	}
	return true
}

// String returns the eviction in the notation of conntrack(8), with "!" before
// what must not be.
func (e Eviction) String() string {
	words := []string{"conntrack -D"}
	if p := e.Rule.L4Proto(); p != "" {
		words = append(words, "--proto "+p)
	}
	late := e.Hook == "postrouting" || e.Hook == "input"
	for _, m := range e.Rule.Matches {
		not := ""
		if m.Negate {
			not = "! "
		}
		side := "orig-" + m.Dir
		if late && m.Dir == "dst" {
			side = "reply-src"
		}
		switch {
		case m.Addr.From.IsValid():
			words = append(words, fmt.Sprintf("%s--%s %s", not, side, m.Addr))
		case m.Ports != PortRange{}:
			// orig-port-dst, reply-port-src
			way, end, _ := strings.Cut(side, "-")
			words = append(words, fmt.Sprintf("%s--%s-port-%s %s", not, way, end, m.Ports))
		}
	}
	if m := e.Rule.Action.Map; len(m.Entries) > 0 {
		side := "orig-" + m.Dir
		if late && m.Dir == "dst" {
			side = "reply-src"
		}
		const shown = 3
		var keys []string
		for _, entry := range m.Entries[:min(shown, len(m.Entries))] {
			keys = append(keys, entry.Addr.String())
		}
		if more := len(m.Entries) - shown; more > 0 {
			keys = append(keys, fmt.Sprintf("%d more", more))
		}
		return strings.Join(append(words, "--"+side+" "+strings.Join(keys, ",")), " ")
	}
	has, not := "--reply-dst", ""
	if !e.source() {
		has = "--reply-src"
	}
	if !e.Withdrawn {
		not = "! "
	}
	switch a := e.Rule.Action; {
	case a.Kind == NoTrack, a.Kind == Masquerade:
	case a.Prefix:
		words = append(words, fmt.Sprintf("%s%s %s", not, has, a.To.Masked()))
	default:
		words = append(words, fmt.Sprintf("%s%s %s", not, has, a.To.Addr()))
	}
	return strings.Join(words, " ")
}

// diffTranslations returns what goes from the connection table with a change of
// these tables.
func diffTranslations(c *Changes, observed, desired []Table) {
	if len(c.SetTables)+len(c.DeleteTables) == 0 {
		return
	}
	before, after := allTranslations(observed), allTranslations(desired)
	were, are := texts(before), texts(after)
	for _, t := range before {
		if t, ok := t.notIn(are); ok && translates(t.Rule.Action.Kind) {
			c.Evict = append(c.Evict, Eviction{t, true, before, after})
		}
	}
	for _, t := range after {
		if t, ok := t.notIn(were); ok && t.evictable() {
			c.Evict = append(c.Evict, Eviction{t, false, before, after})
		}
	}
}

// notIn returns what of the rule is in no other one: of one with a map, the
// entries. It is not ok when there is nothing.
func (t Translation) notIn(others map[string]bool) (rest Translation, ok bool) {
	if len(t.Rule.Action.Map.Entries) == 0 {
		return t, !others[t.text()]
	}
	var entries []MapEntry
	all := t.texts()
	for i, e := range t.Rule.Action.Map.Entries {
		if !others[all[i]] {
			entries = append(entries, e)
		}
	}
	t.Rule.Action.Map.Entries = entries
	return t, len(entries) > 0
}

// evictable reports whether a new rule says well enough which entries it is
// about. One that keeps packets of some links out of the table says it of no
// entry.
func (t Translation) evictable() bool {
	return t.Rule.Action.Kind != NoTrack || slices.ContainsFunc(t.Rule.Matches, func(m Match) bool {
		return m.Addr.From.IsValid() || m.Ports != PortRange{}
	})
}

// allTranslations returns what the tables translate, in the order in which the
// kernel asks: by priority.
func allTranslations(tables []Table) []Translation {
	tables = slices.Clone(tables)
	slices.SortFunc(tables, func(a, b Table) int { return compareTableIDs(a.ID(), b.ID()) })
	var out []Translation
	for _, t := range tables {
		out = append(out, t.Translations()...)
	}
	slices.SortStableFunc(out, func(a, b Translation) int { return cmp.Compare(a.Priority, b.Priority) })
	return out
}

func texts(all []Translation) map[string]bool {
	out := make(map[string]bool, len(all))
	for _, t := range all {
		for _, text := range t.texts() {
			out[text] = true
		}
	}
	return out
}

// texts says what the rule does, for each entry of its map.
func (t Translation) texts() []string {
	m := t.Rule.Action.Map
	if len(m.Entries) == 0 {
		return []string{t.text()}
	}
	t.Rule.Action.Map = AddrMap{}
	common := fmt.Sprintf("%s prefix %v %s ", t.text(), t.Rule.Action.Prefix, m.Dir)
	out := make([]string, len(m.Entries))
	for i, e := range m.Entries {
		out[i] = common + e.Addr.String() + " " + e.To.String()
	}
	return out
}

// text says what the rule does, whatever it is called.
func (t Translation) text() string {
	r := t.Rule
	r.Name, r.Counter = "", false
	return fmt.Sprintf("%s %s %s", t.Family, t.Hook, r.text(t.Family))
}
