package desired

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// Families of the API and of nft(8). The API knows NETDEV too, whose chains are
// each at a device, but has no field that names one.
var families = map[string]netstate.Family{
	"INET": netstate.FamilyINET, "IPV4": netstate.FamilyIPv4, "IPV6": netstate.FamilyIPv6,
	"ARP": netstate.FamilyARP, "BRIDGE": netstate.FamilyBridge,
}

// TableOf returns the identity of the table that an object asks for.
func TableOf(fc cluster.FirewallConfiguration) netstate.TableID {
	return netstate.TableID{Family: families[fc.Family], Name: fc.Table}
}

const (
	// conntrackPriority is where connections are looked up
	// (NF_IP_PRI_CONNTRACK): NAT is possible only after, notrack only before.
	conntrackPriority = -200
	leastMSS          = 88 // TCP_MIN_MSS of include/net/tcp.h
)

// tables adds the tables of the FirewallConfigurations that are selected.
// Reserved are the names of tables that we need ourselves.
//
// Rules that differ in one address become one with a map, and the tables of
// mapped addresses become one.
func (h *host) tables(all []cluster.FirewallConfiguration, selects func(map[string]string) bool, reserved []string) {
	type id struct {
		family netstate.Family
		name   string
	}
	taken := map[id]cluster.Ref{}
	var mapping ipMapping
	for _, fc := range living(all, func(fc cluster.FirewallConfiguration) cluster.Meta { return fc.Meta }) {
		if !selects(fc.Labels) || !h.accept(fc.Meta) {
			continue
		}
		table, problems := guarded(func() (netstate.Table, []string) { return compileTable(fc) })
		if len(problems) > 0 {
			h.refuse(fc.Meta, "%s", strings.Join(problems, "; "))
			continue
		}
		if field := reservedMark(fc); field != "" && h.gateway {
			h.refuse(fc.Meta, "%s: gateways need the bits 0x%x of marks themselves; write a mark without them, one below %d for instance",
				field, ReservedMarks, originalByTunnel)
			continue
		}
		if isPrefixTranslation(fc.Labels) && h.gateway {
			h.prefixTranslation(fc.Meta, table)
			continue
		}
		mapped := fc.Labels[labelFirewallSubcategory] == subcategoryIPMapping
		if mapped && mapping.fits(table) {
			if problem := mapping.add(fc.Ref, table); problem != "" {
				h.refuse(fc.Meta, "%s", problem)
				continue
			}
			h.mapTo(fc.Meta, table)
			continue
		}
		if slices.Contains(reserved, table.Name) || table.Name == IPMappingTable {
			h.refuse(fc.Meta, "spec.table.name: %q is a table of Isthmus itself; choose another name", table.Name)
			continue
		}
		if other, ok := taken[id{table.Family, table.Name}]; ok {
			h.refuse(fc.Meta, "spec.table.name: %q is the table of %s already; choose another name", table.Name, other)
			continue
		}
		taken[id{table.Family, table.Name}] = fc.Ref
		if mapped {
			h.mapTo(fc.Meta, table)
		}
		if table.Family.IsIP() {
			for i, c := range table.Chains {
				table.Chains[i].Rules = withMaps(c.Rules, leastMapped)
			}
		}
		h.state.Tables = append(h.state.Tables, table)
	}
	h.state.Tables = append(h.state.Tables, mapping.done()...)
}

// compileTable compiles a table. It returns all that is wrong with it.
func compileTable(fc cluster.FirewallConfiguration) (netstate.Table, []string) {
	var c tableCompiler
	family, ok := families[fc.Family]
	switch {
	case fc.Family == "NETDEV":
		c.complain("spec.table.family", "chains of family NETDEV are each at a device, and a chain has no field that names one; write INET, IPV4, IPV6, ARP or BRIDGE")
	case !ok:
		c.complain("spec.table.family", "%q is not a table family; write INET, IPV4, IPV6, ARP or BRIDGE", fc.Family)
	}
	if !ok {
		return netstate.Table{}, c.problems
	}
	c.family = family
	if p := netstate.NameProblem(fc.Table); p != "" {
		c.complain("spec.table.name", "%q %s", fc.Table, p)
	}
	table := netstate.Table{Family: family, Name: fc.Table}
	names := map[string]int{}
	for i, chain := range fc.Chains {
		field := fmt.Sprintf("spec.table.chains[%d]", i)
		if first, twice := names[chain.Name]; twice {
			c.complain(field+".name", "%q is the name of spec.table.chains[%d] already; choose another one", chain.Name, first)
			continue
		}
		names[chain.Name] = i
		table.Chains = append(table.Chains, c.chain(field, chain))
	}
	if len(c.problems) == 0 {
		if err := table.Validate(); err != nil {
			c.complain("spec.table", "%s", strings.ReplaceAll(err.Error(), "\n", "; "))
		}
	}
	return table, c.problems
}

// A tableCompiler collects what is wrong with a table.
type tableCompiler struct {
	family   netstate.Family
	problems []string
}

func (c *tableCompiler) complain(field, format string, args ...any) {
	c.problems = append(c.problems, field+": "+fmt.Sprintf(format, args...))
}

func (c *tableCompiler) chain(field string, chain cluster.Chain) netstate.Chain {
	out := netstate.Chain{
		Name: chain.Name, Type: chain.Type, Hook: chain.Hook,
		Priority: chain.Priority, Policy: cmp.Or(chain.Policy, "accept"),
	}
	if p := netstate.NameProblem(chain.Name); p != "" {
		c.complain(field+".name", "%q %s", chain.Name, p)
	}
	if chain.Name == netstate.DigestChain {
		c.complain(field+".name", "%q is reserved; choose another one", chain.Name)
	}
	if out.Policy != "accept" && out.Policy != "drop" {
		c.complain(field+".policy", "%q is not a policy; write accept or drop", chain.Policy)
	}
	switch allowed := c.family.Hooks(chain.Type); {
	case netstate.FamilyINET.Hooks(chain.Type) == nil:
		c.complain(field+".type", "%q is not a type of chain; write filter, nat or route", chain.Type)
		return out
	case allowed == nil:
		c.complain(field+".type", "a table of family %s has no chains of type %s; write filter", c.family, chain.Type)
	case !slices.Contains(allowed, chain.Hook):
		c.complain(field+".hook", "%q is not a hook of a %s chain of family %s; write %s",
			chain.Hook, chain.Type, c.family, strings.Join(allowed, ", "))
	}
	if chain.Type == "nat" && chain.Priority <= conntrackPriority {
		c.complain(field+".priority", "%d is too early for nat, which needs connection tracking; write %d or more",
			chain.Priority, conntrackPriority+1)
	}
	if len(chain.NAT) > 0 && chain.Type != "nat" {
		c.complain(field+".rules.natRules", "are for chains of type nat, not %s", chain.Type)
	}
	if len(chain.Filter) > 0 && chain.Type != "filter" {
		c.complain(field+".rules.filterRules", "are for chains of type filter, not %s", chain.Type)
	}
	names := ruleNames{compiler: c, field: field, taken: map[string]string{}}
	for i, r := range chain.Filter {
		place := fmt.Sprintf("filterRules[%d]", i)
		r.Name = names.of(place, r.Name)
		out.Rules = append(out.Rules, c.filterRule(field+".rules."+place, chain, r))
	}
	for i, r := range chain.NAT {
		place := fmt.Sprintf("natRules[%d]", i)
		r.Name = names.of(place, r.Name)
		out.Rules = append(out.Rules, c.natRule(field+".rules."+place, chain, r))
	}
	return out
}

// ruleNames are the names of the rules of one chain.
type ruleNames struct {
	compiler *tableCompiler
	field    string            // of the chain
	taken    map[string]string // the place of the rule that has the name
}

// of returns the name of the rule at a place of the chain's list: its own, or the place.
// It complains of a name that another rule has.
func (n ruleNames) of(place, name string) string {
	if name == "" {
		return place
	}
	if first, twice := n.taken[name]; twice {
		n.compiler.complain(n.field+".rules."+place+".name", "%q is the name of %s already; choose another one, or leave it out", name, first)
	} else {
		n.taken[name] = place
	}
	return name
}

// filterActions are the actions of the API that need no check.
var filterActions = map[string]netstate.ActionKind{
	"accept": netstate.Accept, "drop": netstate.Drop, "reject": netstate.Reject, "notrack": netstate.NoTrack,
	"ctmark": netstate.SetCTMark, "metamarkfromctmark": netstate.RestoreCT, "tcpmssclamp": netstate.ClampMSS,
}

func (c *tableCompiler) filterRule(field string, chain cluster.Chain, r cluster.FilterRule) netstate.FirewallRule {
	out := netstate.FirewallRule{Name: r.Name, Counter: r.Counter, Matches: c.matches(field, chain.Hook, r.Name, r.Match)}
	kind, ok := filterActions[r.Action]
	if !ok {
		c.complain(field+".action", "%q is not an action; write accept, drop, reject, notrack, ctmark, metamarkfromctmark or tcpmssclamp", r.Action)
		return out
	}
	out.Action.Kind = kind
	switch kind {
	case netstate.SetCTMark:
		mark, err := strconv.ParseUint(r.Value, 0, 32)
		if err != nil {
			c.complain(field+".value", "%q is not a mark; write a number from 0 to 4294967295", r.Value)
		}
		out.Action.Mark = uint32(mark)
	case netstate.ClampMSS:
		mss, err := strconv.ParseUint(cmp.Or(r.Value, "0"), 10, 16)
		if err != nil {
			c.complain(field+".value", "%q is not a segment size; write a number of bytes, or 0 for what the route's MTU allows", r.Value)
		}
		out.Action.MSS = uint16(mss)
		if mss > 0 && mss < leastMSS {
			c.complain(field+".value", "%q is less than the %d bytes that TCP is good for; write more, or 0 for what the route's MTU allows", r.Value, leastMSS)
		}
		switch {
		case mss > 0:
		case c.family == netstate.FamilyBridge:
			c.complain(field+".value", "a bridge knows no route whose MTU could be taken; write a number of bytes")
		case chain.Hook == "prerouting" || chain.Hook == "input":
			c.complain(field+".value", "the route is not known yet in %s; write a number of bytes, or choose the hook forward", chain.Hook)
		}
		if !slices.ContainsFunc(r.Match, func(m cluster.Match) bool { return m.Proto == "tcp" && !m.Negate }) {
			c.complain(field+".match", "tcpmssclamp is for TCP; add a match with proto tcp")
		}
	}
	switch at := c.family.ActionHooks(kind); {
	case at == nil:
		c.complain(field+".action", "a table of family %s has no action %s; write accept or drop", c.family, r.Action)
	case kind == netstate.NoTrack && (!slices.Contains(at, chain.Hook) || chain.Priority >= conntrackPriority):
		c.complain(field+".action", "notrack is too late here; choose the hook %s, and a priority below %d", strings.Join(at, " or "), conntrackPriority)
	case kind == netstate.Reject && !slices.Contains(at, chain.Hook):
		last := len(at) - 1
		c.complain(field+".action", "reject does not work in %s; write drop, or choose the hook %s or %s", chain.Hook, strings.Join(at[:last], ", "), at[last])
	}
	switch kind {
	case netstate.SetCTMark, netstate.ClampMSS:
	default:
		if r.Value != "" {
			c.complain(field+".value", "%s takes no value; leave it out", r.Action)
		}
	}
	return out
}

func (c *tableCompiler) natRule(field string, chain cluster.Chain, r cluster.NATRule) netstate.FirewallRule {
	out := netstate.FirewallRule{Name: r.Name, Matches: c.matches(field, chain.Hook, r.Name, r.Match)}
	switch r.Type {
	case "dnat":
		out.Action.Kind = netstate.DNAT
	case "snat":
		out.Action.Kind = netstate.SNAT
	case "masquerade":
		out.Action.Kind = netstate.Masquerade
	default:
		c.complain(field+".natType", "%q is not a kind of NAT; write dnat, snat or masquerade", r.Type)
		return out
	}
	if allowed := c.family.ActionHooks(out.Action.Kind); allowed != nil && !slices.Contains(allowed, chain.Hook) {
		c.complain(field+".natType", "%s is for the hook %s, not %s", r.Type, strings.Join(allowed, " or "), chain.Hook)
	}
	switch {
	case r.Type == "masquerade" && r.To.IsValid():
		c.complain(field+".to", "%s: masquerade takes the address of the outgoing link; leave it out, or write snat", r.To)
	case r.Type == "masquerade":
	case !r.To.IsValid():
		c.complain(field+".to", "is empty; write the new address, or a CIDR to keep the host part")
	case !c.carries(r.To.Addr()):
		c.complain(field+".to", "%s is not of the family of the table, %s", r.To, c.family)
	case r.To.Addr().IsMulticast() || r.To.Addr().IsUnspecified():
		c.complain(field+".to", "%s is not the address of a host; write the one that packets are to have", r.To)
	case familyOf(out.Matches) != 0 && familyOf(out.Matches) != r.To.Addr().BitLen():
		c.complain(field+".to", "%s is not of the family of the addresses in match; write one that is", r.To)
	default:
		out.Action.To, out.Action.Prefix = r.To, r.ToIsPrefix
		if r.ToIsPrefix {
			out.Action.To = r.To.Masked()
		}
	}
	return out
}

// matches compiles the matches of a rule.
func (c *tableCompiler) matches(field, hook, name string, matches []cluster.Match) []netstate.Match {
	if p := netstate.CommentProblem(name); p != "" {
		c.complain(field+".name", "%q %s", name, p)
	}
	var out []netstate.Match
	var places []int // in matches, of what is in out
	for i, m := range matches {
		field := fmt.Sprintf("%s.match[%d]", field, i)
		n := netstate.Match{Negate: m.Negate}
		set := 0
		if m.IP != (cluster.AddrRange{}) {
			set++
			n.Dir, n.Addr = m.Position, netstate.AddrRange(m.IP)
			c.position(field+".ip.position", m.Position, "src", "dst")
			switch {
			case !m.IP.From.IsValid() || !m.IP.To.IsValid() || m.IP.From.BitLen() != m.IP.To.BitLen() || m.IP.To.Less(m.IP.From):
				c.complain(field+".ip.value", "%s-%s is not a range; write the lower address first", m.IP.From, m.IP.To)
			case c.family == netstate.FamilyARP && !c.carries(m.IP.From):
				c.complain(field+".ip.value", "%s: ARP asks for addresses of IPv4; write one", m.IP.From)
			case !c.carries(m.IP.From):
				c.complain(field+".ip.value", "%s is not of the family of the table, %s", m.IP.From, c.family)
			}
		}
		if m.Ports != (cluster.PortRange{}) {
			set++
			n.Dir, n.Ports = m.Position, netstate.PortRange(m.Ports)
			c.position(field+".port.position", m.Position, "src", "dst")
			if m.Ports.To < m.Ports.From {
				c.complain(field+".port.value", "%d-%d is not a range; write the lower port first", m.Ports.From, m.Ports.To)
			}
			if !c.ip() {
				c.complain(field+".port", "a table of family %s knows no ports; match ip or dev", c.family)
			}
		}
		if m.Proto != "" {
			set++
			n.L4Proto = m.Proto
			if m.Proto != "tcp" && m.Proto != "udp" {
				c.complain(field+".proto.value", "%q is not a protocol; write tcp or udp", m.Proto)
			}
			if !c.ip() {
				c.complain(field+".proto", "a table of family %s knows no protocols above IP; match ip or dev", c.family)
			}
		}
		if m.Dev != "" {
			set++
			n.Dir, n.Dev = m.Position, m.Dev
			c.position(field+".dev.position", m.Position, "in", "out")
			switch p := linkNameProblem(m.Dev); {
			case p != "":
				c.complain(field+".dev.value", "%q %s", m.Dev, p)
			case (m.Position == "in" || m.Position == "out") && !c.family.HasDevice(hook, m.Position):
				c.complain(field+".dev.position", "a packet in %s has no device %s", hook, map[string]string{"in": "that it came in by", "out": "to go out by yet"}[m.Position])
			}
		}
		if set != 1 {
			c.complain(field, "says %d things; write exactly one of ip, port, proto and dev, and a match for each further one", set)
			continue
		}
		for j, other := range out {
			if opposed(other, n) || opposed(n, other) {
				c.complain(field, "no packet matches it and match[%d], so the rule would do nothing; remove one of the two", places[j])
			}
		}
		out, places = append(out, n), append(places, i)
	}
	return out
}

// familyOf returns the bits of the addresses that all matches of a rule ask
// for; 0: of either family.
func familyOf(matches []netstate.Match) int {
	for _, m := range matches {
		if m.Addr.From.IsValid() {
			return m.Addr.From.BitLen()
		}
	}
	return 0
}

func (c *tableCompiler) position(field, position, a, b string) {
	if position != a && position != b {
		c.complain(field, "%q is not a position; write %s or %s", position, a, b)
	}
}

// ip reports whether packets of the table's family may be IP.
func (c *tableCompiler) ip() bool { return c.family != netstate.FamilyARP }

// carries reports whether a packet of the table's family may have the address.
func (c *tableCompiler) carries(a netip.Addr) bool {
	switch c.family {
	case netstate.FamilyINET, netstate.FamilyBridge:
		return true
	case netstate.FamilyIPv4, netstate.FamilyARP:
		return a.Is4()
	case netstate.FamilyIPv6:
		return a.Is6()
	}
	return false
}
