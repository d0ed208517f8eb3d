package netstate

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// An AddrMap tells by one address of a packet whether a rule is about it, and what
// the new address, or the connection's mark, is: one rule instead of one for every
// entry (nft(8), "MAPS"). What it costs to look an address up hardly depends on how
// many there are.
type AddrMap struct {
	// Dir is "src" or "dst": the address of the packet that is looked up. It is empty
	// where the link alone is.
	Dir string
	// ByLink says that an entry is for packets only that came in by its link.
	ByLink bool
	// IPv6 is the family of the packets where there is no Dir, which says it otherwise.
	IPv6 bool
	// Entries are sorted by Addr, and no address is in two of them; without Dir the same
	// of Link.
	Entries []MapEntry
}

// A MapEntry is what an AddrMap knows of some addresses.
type MapEntry struct {
	Addr AddrRange // if the map has a Dir
	Link string    // if the map is ByLink
	// To is Action.To for packets with these addresses. It is invalid for
	// Masquerade, which asks only whether there is an entry, and for SetCTMark,
	// whose Action.Mark is Mark.
	To   netip.Prefix
	Mark uint32
	Name string // kept as the element's comment
}

// Find returns the entry that an address has, of a packet that came in by a link.
func (m AddrMap) Find(a netip.Addr, link string) (MapEntry, bool) {
	if m.Dir == "" {
		i, found := slices.BinarySearchFunc(m.Entries, link, func(e MapEntry, link string) int { return strings.Compare(e.Link, link) })
		if !found || a.Is6() != m.IPv6 {
			return MapEntry{}, false
		}
		return m.Entries[i], true
	}
	i, found := slices.BinarySearchFunc(m.Entries, a, func(e MapEntry, a netip.Addr) int {
		switch {
		case a.Less(e.Addr.From):
			return 1
		case e.Addr.To.Less(a):
			return -1
		}
		return 0
	})
	if !found || m.ByLink && m.Entries[i].Link != link {
		return MapEntry{}, false
	}
	return m.Entries[i], true
}

// Intervals reports whether an entry stands for more than one address.
func (m AddrMap) Intervals() bool {
	return slices.ContainsFunc(m.Entries, func(e MapEntry) bool { return e.Addr.From != e.Addr.To })
}

// key returns what is looked up in the language of nft(8).
func (m AddrMap) key() string {
	link := ""
	if m.Dir == "" {
		return "iifname . meta protocol"
	}
	if m.ByLink {
		link = "iifname . "
	}
	return fmt.Sprintf("%s%s %saddr", link, ipKeyword(m.Entries[0].Addr.From), m.Dir[:1])
}

// elements returns the entries of an action's map in the language of nft(8). The
// value of a prefix map is a prefix, even if it is of one address.
func (a Action) elements() string {
	m := a.Map
	var b strings.Builder
	for i, e := range m.Entries {
		if i > 0 {
			b.WriteString(", ")
		}
		switch {
		case m.Dir == "":
			family := "ip"
			if m.IPv6 {
				family = "ip6"
			}
			fmt.Fprintf(&b, "%q . %s", e.Link, family)
		case m.ByLink:
			fmt.Fprintf(&b, "%q . %s", e.Link, e.Addr)
		default:
			b.WriteString(e.Addr.String())
		}
		if e.Name != "" {
			fmt.Fprintf(&b, " comment %q", e.Name)
		}
		switch {
		case a.Kind == SetCTMark:
			fmt.Fprintf(&b, " : 0x%x", e.Mark)
		case !e.To.IsValid():
		case a.Prefix:
			b.WriteString(" : " + e.To.Masked().String())
		default:
			b.WriteString(" : " + e.To.Addr().String())
		}
	}
	return "{ " + b.String() + " }"
}

// validate says what is wrong with the map of an action.
func (m AddrMap) validate(a Action, c Chain, f Family, is6 bool) error {
	switch {
	case m.Dir != "src" && m.Dir != "dst" && !(m.Dir == "" && m.ByLink):
		return fmt.Errorf("position %q: must be src or dst", m.Dir)
	case a.Kind != SNAT && a.Kind != DNAT && a.Kind != Masquerade && a.Kind != SetCTMark || !f.IsIP():
		return fmt.Errorf("%s takes no map in a table of family %s", a.Kind, f)
	case a.Mark != 0 || a.Mask != 0:
		return fmt.Errorf("mark 0x%x: the map says it", a.Mark)
	case m.ByLink && (a.Kind != SetCTMark || !f.HasDevice(c.Hook, "in")):
		return fmt.Errorf("%s in %s takes no map by link", a.Kind, c.Hook)
	case a.To.IsValid():
		return fmt.Errorf("to %s: the map says it", a.To)
	case a.Prefix && a.Kind == Masquerade:
		return errors.New("masquerade takes no prefix")
	}
	if m.Dir == "" && m.IPv6 != is6 {
		return errors.New("the rule is about the other IP family")
	}
	for i, e := range m.Entries {
		if m.Dir == "" {
			if err := e.validateLink(m.Entries[:i]); err != nil {
				return err
			}
			continue
		}
		switch {
		case e.Addr.From.BitLen() != e.Addr.To.BitLen() || !e.Addr.From.IsValid() || e.Addr.To.Less(e.Addr.From):
			return fmt.Errorf("%s-%s: not a range of addresses", e.Addr.From, e.Addr.To)
		case e.Addr.From.Is6() != is6:
			return fmt.Errorf("%s: the rule is about the other IP family", e.Addr)
		case i > 0 && !m.Entries[i-1].Addr.To.Less(e.Addr.From):
			return fmt.Errorf("%s: must come before %s, and have no address in common with it", e.Addr, m.Entries[i-1].Addr)
		case (a.Kind == Masquerade || a.Kind == SetCTMark) && e.To.IsValid():
			return fmt.Errorf("%s: %s takes no address", e.Addr, a.Kind)
		case a.Kind != Masquerade && a.Kind != SetCTMark && !e.To.IsValid():
			return fmt.Errorf("%s: no new address", e.Addr)
		case a.Kind != SetCTMark && e.Mark != 0:
			return fmt.Errorf("%s: %s takes no mark", e.Addr, a.Kind)
		case m.ByLink != (e.Link != "") || len(e.Link) > maxName || strings.HasSuffix(e.Link, "*"):
			return fmt.Errorf("%s: link %q: must be the name of one link where the map is by link, and empty elsewhere", e.Addr, e.Link)
		case m.ByLink && e.Addr.From != e.Addr.To:
			return fmt.Errorf("%s: must be one address where the map is by link", e.Addr)
		case e.To.IsValid() && e.To.Addr().Is6() != is6:
			return fmt.Errorf("%s to %s: not of one IP family", e.Addr, e.To)
		case CommentProblem(e.Name) != "":
			return fmt.Errorf("%s: name %q: must have at most %d bytes, without quote and line break", e.Addr, e.Name, maxComment)
		}
	}
	return nil
}

// validateLink says what is wrong with an entry of a map by the link alone, behind others.
func (e MapEntry) validateLink(before []MapEntry) error {
	switch {
	case e.Link == "" || len(e.Link) > maxName || strings.HasSuffix(e.Link, "*"):
		return fmt.Errorf("link %q: must be the name of one link", e.Link)
	case e.Addr != AddrRange{} || e.To.IsValid():
		return fmt.Errorf("%s: a map by the link alone has no addresses", e.Link)
	case len(before) > 0 && before[len(before)-1].Link >= e.Link:
		return fmt.Errorf("%s: must come before %s, and be there once", e.Link, before[len(before)-1].Link)
	case CommentProblem(e.Name) != "":
		return fmt.Errorf("%s: name %q: must have at most %d bytes, without quote and line break", e.Link, e.Name, maxComment)
	}
	return nil
}
