package netstate

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// DigestChain is the name of a chain that no table may have: what writes
// tables keeps their digest in a chain of this name.
const DigestChain = "digest"

const (
	maxName        = 15  // IFNAMSIZ-1
	maxDescription = 100 // of an alias of 255 bytes that also holds endpoints
	maxComment     = 127 // NFTNL_UDATA_COMMENT_MAXLEN of nft(8), with its final zero
	minMTU         = 68  // of IPv4, RFC 791
)

// Validate says what in the state no kernel could apply; each error names
// the thing it is about. Applying a state that is not valid does no harm:
// the invalid things fail, one by one.
func (s State) Validate() error {
	var errs []error
	kinds := map[string]LinkKind{}
	for _, l := range s.Links {
		if _, ok := kinds[l.Name]; ok {
			errs = append(errs, fmt.Errorf("link %s: is there twice; links need different names", l.Name))
		}
		kinds[l.Name] = l.Kind
		errs = wrap(errs, "link "+l.Name, l.validate())
	}
	for _, a := range s.Addresses {
		if _, ok := kinds[a.Dev]; !ok {
			errs = append(errs, fmt.Errorf("address %s: dev is not a link of this state", a))
		}
		if !a.Prefix.IsValid() {
			errs = append(errs, fmt.Errorf("address %s: not an address with a prefix length", a))
		}
	}
	errs = append(errs, s.validateStations()...)
	routes := make(map[routeKey]Route, len(s.Routes))
	for _, r := range s.Routes {
		r = r.normal()
		if other, ok := routes[r.key()]; ok && other != r {
			errs = append(errs, fmt.Errorf("route %s: contradicts %s", r, other))
		}
		routes[r.key()] = r
		errs = wrap(errs, "route "+r.String(), r.validate())
	}
	for _, r := range s.Rules {
		errs = wrap(errs, "rule "+r.String(), r.validate())
	}
	devs := map[string]bool{}
	for _, w := range s.WireGuard {
		if kinds[w.Dev] != KindWireGuard {
			errs = append(errs, fmt.Errorf("wireguard %s: dev is not a wireguard link of this state", w.Dev))
		}
		if devs[w.Dev] {
			errs = append(errs, fmt.Errorf("wireguard %s: is there twice", w.Dev))
		}
		devs[w.Dev] = true
		errs = wrap(errs, "wireguard "+w.Dev, w.validate())
	}
	tables := map[TableID]bool{}
	for _, t := range s.Tables {
		if tables[t.ID()] {
			errs = append(errs, fmt.Errorf("table %s: is there twice; tables of a family need different names", t.ID()))
		}
		tables[t.ID()] = true
		errs = wrap(errs, "table "+t.ID().String(), t.Validate())
	}
	return errors.Join(errs...)
}

func wrap(errs []error, what string, err error) []error {
	if err == nil {
		return errs
	}
	return append(errs, fmt.Errorf("%s: %w", what, err))
}

// linkName reports whether a link may be called so.
func linkName(s string) bool {
	return s != "" && len(s) <= maxName && s != "." && s != ".." && !strings.ContainsAny(s, "/: \t\n")
}

func (l Link) validate() error {
	switch {
	case !linkName(l.Name):
		return fmt.Errorf("a link's name has 1 to %d bytes without slash, colon and space", maxName)
	case l.Kind != KindGeneve && l.Kind != KindVXLAN && l.Kind != KindWireGuard && l.Kind != KindVeth:
		return fmt.Errorf("kind %q: only %s, %s, %s and %s are made", l.Kind, KindGeneve, KindVXLAN, KindWireGuard, KindVeth)
	case l.Kind == KindVeth && !linkName(l.Peer):
		return fmt.Errorf("peer %q: a veth pair has two ends, and a link's name has 1 to %d bytes without slash, colon and space", l.Peer, maxName)
	case l.MTU != 0 && (l.MTU < minMTU || l.MTU > 65535):
		return fmt.Errorf("mtu %d: must be %d to 65535, or 0 for the kernel's choice", l.MTU, minMTU)
	case len(l.Description) > maxDescription || strings.ContainsAny(l.Description, "\n\x00"):
		return fmt.Errorf("description %q: must be one line of at most %d bytes", l.Description, maxDescription)
	case l.MAC[0]&1 != 0:
		return fmt.Errorf("address %s: must be that of one station, not of a group", l.MAC)
	case l.RPFilter < 0 || l.RPFilter > 2:
		return fmt.Errorf("rp_filter %d: must be 0, 1 or 2", l.RPFilter)
	case l.Kind == KindVXLAN:
		return l.VXLAN.validate()
	case l.Kind != KindGeneve:
		return nil
	case l.Geneve.VNI >= 1<<24:
		return fmt.Errorf("geneve id %d: must be less than %d", l.Geneve.VNI, 1<<24)
	case !unicast(l.Geneve.Remote):
		return fmt.Errorf("geneve remote %s: must be the unicast address of the other end", l.Geneve.Remote)
	case l.Geneve.Port == 0:
		return errors.New("geneve dstport: must not be 0")
	}
	return nil
}

func (r Route) validate() error {
	switch {
	case !r.Dst.IsValid():
		return errors.New("no destination")
	case r.Table == 0:
		return errors.New("table 0: must be 1 or more")
	case r.Type != Unicast && r.Type != Unreachable && r.Type != Throw:
		return fmt.Errorf("type %q: only unicast, unreachable and throw are made", r.Type)
	case r.Type == Unicast && r.Dev == "":
		return errors.New("no dev")
	case r.Via.IsValid() && r.Via.Is4() != r.Dst.Addr().Is4():
		return fmt.Errorf("via %s: not of the destination's family", r.Via)
	case r.Src.IsValid() && r.Src.Is4() != r.Dst.Addr().Is4():
		return fmt.Errorf("src %s: not of the destination's family", r.Src)
	case !slices.Contains([]Scope{ScopeGlobal, ScopeSite, ScopeLink, ScopeHost, ScopeNowhere}, r.Scope):
		return fmt.Errorf("scope %q: must be global, site, link, host or nowhere", r.Scope)
	}
	return nil
}

func (r Rule) validate() error {
	switch {
	case r.Src.IsValid() && r.Dst.IsValid() && unmap(r.Src).Addr().Is4() != unmap(r.Dst).Addr().Is4():
		return errors.New("from and to are of different families")
	case r.looksUp() && r.Table == 0:
		return errors.New("table 0: must be 1 or more")
	case r.Goto != 0 && r.Goto <= r.Priority:
		return fmt.Errorf("goto %d: must be greater than the rule's own priority", r.Goto)
	case r.Priority == 0:
		return errors.New("priority 0: belongs to the local table")
	case len(r.IIF) > maxName || len(r.OIF) > maxName:
		return fmt.Errorf("iif, oif: a link's name has at most %d bytes", maxName)
	}
	return nil
}

func (w WireGuard) validate() error {
	var errs []error
	if w.PublicKey == (Key{}) {
		errs = append(errs, errors.New("no public key"))
	}
	keys := map[Key]bool{w.PublicKey: true}
	for _, p := range w.Peers {
		switch {
		case keys[p.PublicKey]:
			errs = append(errs, fmt.Errorf("peer %s: is there twice, or is the device itself", p.PublicKey))
		case p.PublicKey == Key{}:
			errs = append(errs, errors.New("a peer without public key"))
		case p.Keepalive < 0 || p.Keepalive > 65535:
			errs = append(errs, fmt.Errorf("peer %s: keepalive %d: must be 0 to 65535 seconds", p.PublicKey, p.Keepalive))
		case p.Endpoint.IsValid() && p.Endpoint.Port() == 0:
			errs = append(errs, fmt.Errorf("peer %s: endpoint %s: no port", p.PublicKey, p.Endpoint))
		}
		keys[p.PublicKey] = true
	}
	return errors.Join(errs...)
}

// Validate says what in the table no kernel could apply.
func (t Table) Validate() error {
	if t.Family.Hooks("filter") == nil {
		return fmt.Errorf("family %q: must be ip, ip6, inet, arp or bridge", t.Family)
	}
	if p := NameProblem(t.Name); p != "" {
		return errors.New("name: " + p)
	}
	var errs []error
	names := map[string]bool{DigestChain: true}
	for _, c := range t.Chains {
		if names[c.Name] {
			errs = append(errs, fmt.Errorf("chain %s: the name is taken (%q is reserved)", c.Name, DigestChain))
		}
		names[c.Name] = true
		errs = wrap(errs, "chain "+c.Name, c.validate(t.Family))
	}
	return errors.Join(errs...)
}

func (c Chain) validate(f Family) error {
	var errs []error
	if p := NameProblem(c.Name); p != "" {
		errs = append(errs, errors.New("name: "+p))
	}
	switch allowed := f.Hooks(c.Type); {
	case FamilyINET.Hooks(c.Type) == nil:
		errs = append(errs, fmt.Errorf("type %q: must be filter, nat or route", c.Type))
	case allowed == nil:
		errs = append(errs, fmt.Errorf("type %q: the family %s has only chains of type filter", c.Type, f))
	case !slices.Contains(allowed, c.Hook):
		errs = append(errs, fmt.Errorf("hook %q: a %s chain may be at %s", c.Hook, c.Type, strings.Join(allowed, ", ")))
	}
	if c.Type == "nat" && c.Priority <= -200 {
		errs = append(errs, fmt.Errorf("priority %d: a nat chain must come after connection tracking (-200)", c.Priority))
	}
	if p := c.policy(); p != "accept" && p != "drop" {
		errs = append(errs, fmt.Errorf("policy %q: must be accept or drop", p))
	}
	for i, r := range c.Rules {
		name := r.Name
		if name == "" {
			name = fmt.Sprintf("#%d", i)
		}
		errs = wrap(errs, "rule "+name, r.validate(c, f))
	}
	return errors.Join(errs...)
}

func (r FirewallRule) validate(c Chain, f Family) error {
	if p := CommentProblem(r.Name); p != "" {
		return errors.New("name: " + p)
	}
	is6, known := r.Is6(f)
	for i, m := range r.Matches {
		if err := m.validate(c, f, is6, known); err != nil {
			return fmt.Errorf("match %d: %w", i, err)
		}
	}
	return r.Action.validate(r, c, f, is6, known)
}

// NameProblem says what is wrong with the name of a table or a chain; empty:
// nothing. Longer ones than 200 bytes leave nft(8) no room for a prefix, of the
// 255 that it allows.
func NameProblem(name string) string {
	if name == "" || len(name) > 200 || strings.ContainsAny(name, " \t\n\"{};") {
		return "must have 1 to 200 bytes without space, quote, brace and semicolon"
	}
	return ""
}

// CommentProblem says why nft(8) can't show a name as a comment; empty: it can.
func CommentProblem(name string) string {
	if len(name) > maxComment || strings.ContainsAny(name, "\"\n\x00") {
		return fmt.Sprintf("must have at most %d bytes, without quote and line break", maxComment)
	}
	return ""
}

func (m Match) validate(c Chain, f Family, is6, known bool) error {
	what := 0
	for _, set := range []bool{m.Addr != (AddrRange{}), m.Ports != (PortRange{}), m.L4Proto != "", m.Dev != "", m.ICMPError, m.ICMPRedirect, m.CTDir != "", m.CTMark != 0, m.ToHost} {
		if set {
			what++
		}
	}
	switch {
	case what != 1:
		return errors.New("must look at exactly one of address, ports, protocol, device, ICMP errors, ICMP redirects, direction and mark of the connection, and whether the packet is for the host")
	case (m.Addr != AddrRange{} || m.Ports != PortRange{}) && m.Dir != "src" && m.Dir != "dst":
		return fmt.Errorf("position %q: must be src or dst", m.Dir)
	case m.Dev != "" && m.Dir != "in" && m.Dir != "out":
		return fmt.Errorf("position %q: must be in or out", m.Dir)
	case m.Dev != "" && len(m.Dev) > maxName:
		return fmt.Errorf("device %q: has more than %d bytes", m.Dev, maxName)
	case m.Dev != "" && !f.HasDevice(c.Hook, m.Dir):
		return fmt.Errorf("device %q: at hook %s no packet has an %s device", m.Dev, c.Hook, m.Dir)
	case m.Addr != AddrRange{} && (m.Addr.From.BitLen() != m.Addr.To.BitLen() || m.Addr.To.Less(m.Addr.From)):
		return fmt.Errorf("addresses %s to %s: not a range", m.Addr.From, m.Addr.To)
	case f == FamilyARP && m.Addr == AddrRange{} && m.Dev == "":
		return errors.New("of a packet of ARP only the addresses and the device can be looked at")
	case m.Of != OfPacket && (f != FamilyIPv4 || m.Addr == AddrRange{}):
		return fmt.Errorf("header %q: only addresses are looked at there, in tables of family ip", m.Of)
	case m.Of == OfQuoted && !m.Addr.isPrefix():
		return fmt.Errorf("quoted address %s: must be a prefix", m.Addr)
	case m.Addr != AddrRange{} && m.Addr.From.Is6() != is6:
		return fmt.Errorf("address %s: the rule is about the other IP family", m.Addr)
	case m.Ports.To < m.Ports.From:
		return fmt.Errorf("ports %s: not a range", m.Ports)
	case m.L4Proto != "" && !slices.Contains([]string{"tcp", "udp", "sctp", "icmp", "icmpv6"}, m.L4Proto):
		return fmt.Errorf("protocol %q: must be tcp, udp, sctp, icmp or icmpv6", m.L4Proto)
	case m.CTDir != "" && m.CTDir != "original" && m.CTDir != "reply":
		return fmt.Errorf("direction %q: must be original or reply", m.CTDir)
	case m.ToHost && !f.IsIP():
		return fmt.Errorf("whether the packet is for the host: tables of family %s don't know", f)
	case (m.ICMPError || m.ICMPRedirect) && !known:
		return errors.New("ICMP errors and redirects: in a table of both IP families the rule needs an address that tells IPv4 from IPv6")
	}
	return nil
}

func (a Action) validate(r FirewallRule, c Chain, f Family, is6, known bool) error {
	nat := a.Kind == SNAT || a.Kind == DNAT || a.Kind == Masquerade
	switch a.Kind {
	case Accept, Drop, Reject, NoTrack, SetCTMark, RestoreCT, SetMark, ClampMSS, SNAT, DNAT, Masquerade, SetSource, SetPrefix:
	default:
		return fmt.Errorf("action %q: unknown", a.Kind)
	}
	at := f.ActionHooks(a.Kind)
	switch {
	case at == nil:
		return fmt.Errorf("%s: tables of family %s have no such action", a.Kind, f)
	case nat && c.Type != "nat":
		return fmt.Errorf("%s: only in chains of type nat, not %s", a.Kind, c.Type)
	case a.Kind == NoTrack && (c.Type != "filter" || !slices.Contains(at, c.Hook) || c.Priority >= -200):
		return fmt.Errorf("notrack: only in filter chains at %s before connection tracking (priority below -200)", strings.Join(at, " and "))
	case !slices.Contains(at, c.Hook):
		return fmt.Errorf("%s: only at %s, not %s", a.Kind, strings.Join(at, " and "), c.Hook)
	case a.Mask != 0 && a.Kind != SetCTMark && a.Kind != RestoreCT:
		return fmt.Errorf("%s: takes no mask", a.Kind)
	case a.Mask != 0 && a.Mark&^a.Mask != 0:
		return fmt.Errorf("%s: the mark 0x%x has bits that the mask 0x%x has not", a.Kind, a.Mark, a.Mask)
	case a.Kind == ClampMSS && r.L4Proto() != "" && r.L4Proto() != "tcp":
		return fmt.Errorf("tcp maxseg: the rule is about %s", r.L4Proto())
	case a.Kind == ClampMSS && a.MSS == 0 && f == FamilyBridge:
		return errors.New("tcp maxseg set rt mtu: a bridge knows no routes")
	case a.Kind == ClampMSS && a.MSS == 0 && c.Hook != "forward" && c.Hook != "output" && c.Hook != "postrouting":
		return fmt.Errorf("tcp maxseg set rt mtu: only at forward, output and postrouting, not %s", c.Hook)
	case len(a.Map.Entries) > 0 && r.Counter:
		return errors.New("counter: it would count what is not in the map, too")
	case len(a.Map.Entries) > 0:
		if err := a.Map.validate(a, c, f, is6); err != nil {
			return fmt.Errorf("map: %w", err)
		}
	case a.Kind == SetPrefix && (a.Dir != "src" && a.Dir != "dst" || a.Of != OfPacket && a.Of != OfQuoted):
		return fmt.Errorf("%s: must name the source or the destination, of the packet or of the quoted one", a.Kind)
	case a.Kind == SetPrefix && a.Of == OfQuoted && !slices.ContainsFunc(r.Matches, func(m Match) bool { return m.ICMPError && !m.Negate }):
		return fmt.Errorf("%s: only ICMP errors quote a packet, and the rule must match them", a.Kind)
	case a.Kind == SetPrefix && c.Type != "filter":
		return fmt.Errorf("%s: only in chains of type filter, not %s", a.Kind, c.Type)
	case (a.Kind == SNAT || a.Kind == DNAT || a.Kind == SetSource || a.Kind == SetPrefix) && !a.To.IsValid():
		return fmt.Errorf("%s: no address", a.Kind)
	case a.Kind == SetSource && a.To.Addr().Is6() && !slices.ContainsFunc(r.Matches, func(m Match) bool { return m.ICMPError && !m.Negate }):
		return errors.New("source address set: in IPv6 only for ICMP errors, the rule must match them")
	case a.To.IsValid() && known && a.To.Addr().Is6() != is6:
		return fmt.Errorf("%s to %s: the rule is about the other IP family", a.Kind, a.To)
	}
	return nil
}
