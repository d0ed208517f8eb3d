package desired

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// IPMappingTable is the table of all addresses that IP objects map, one for
// each family.
const IPMappingTable = "ip-mapping"

// leastMappedIPs is how many rules become a map in it.
const leastMappedIPs = 2

// Priorities of the chains for mapped addresses.
const (
	destinationNAT = -100 // NF_IP_PRI_NAT_DST
	sourceNAT      = 100  // NF_IP_PRI_NAT_SRC
	masquerading   = -155 // before the masquerade bypass (-150, plan), that is before any CNI
)

// ipMapping makes one table of the FirewallConfigurations that the controller
// writes, one for every IP: with tables of their own, every new connection
// would go through all of them. The objects come in the order of their age.
type ipMapping struct {
	tables []netstate.Table // with the rules of all objects, one after the other
	owners map[mappingKey]mappingOwner
}

// A mappingKey is what only one object may translate.
type mappingKey struct {
	family netstate.Family
	chain  string
	addr   netip.Addr
}

type mappingOwner struct {
	to  netip.Addr
	ref cluster.Ref
}

// isIPMapping reports whether the table has one of the forms that the
// controller gives to one mapped address. On gateways:
//
//	prerouting: daddr 10.70.0.7 dnat to 192.168.40.10
//	postrouting: oif liqo-tunnel saddr 192.168.40.10 snat to 10.70.0.7
//
// or the first chain alone, for further addresses of the same host. On nodes, with a rule for each network of the peers:
//
//	postrouting: saddr 10.61.0.0/16 daddr 192.168.40.10 masquerade
func isIPMapping(t netstate.Table) bool {
	is := func(c netstate.Chain, hook string, priority int32) bool {
		return c.Name == hook && c.Type == "nat" && c.Hook == hook && c.Priority == priority && c.Policy == "accept"
	}
	switch len(t.Chains) {
	case 1:
		c := t.Chains[0]
		if is(c, "prerouting", destinationNAT) { // of a host that has another address already
			return len(c.Rules) == 1 && mapsOne(c.Rules[0], netstate.DNAT, "dst")
		}
		return is(c, "postrouting", masquerading) && !slices.ContainsFunc(c.Rules, func(r netstate.FirewallRule) bool { return !masqueradesOne(r) })
	case 2:
		in, out := t.Chains[0], t.Chains[1]
		if !is(in, "prerouting", destinationNAT) || !is(out, "postrouting", sourceNAT) || len(in.Rules) != 1 || len(out.Rules) != 1 {
			return false
		}
		dnat, snat := in.Rules[0], out.Rules[0]
		return mapsOne(dnat, netstate.DNAT, "dst") && mapsOne(snat, netstate.SNAT, "src", netstate.Match{Dir: "out", Dev: TunnelInterface}) &&
			keyOf(dnat, "dst").addr.From == snat.Action.To.Addr() && keyOf(snat, "src").addr.From == dnat.Action.To.Addr()
	}
	return false
}

// mapsOne reports whether the rule translates one address to one other, given
// the other matches.
func mapsOne(r netstate.FirewallRule, kind netstate.ActionKind, dir string, others ...netstate.Match) bool {
	k := keyOf(r, dir)
	return r.Action.Kind == kind && !r.Action.Prefix && k.ok && k.addr.From == k.addr.To && slices.Equal(k.others, others)
}

// masqueradesOne reports whether the rule masquerades what some addresses send
// to one.
func masqueradesOne(r netstate.FirewallRule) bool {
	k := keyOf(r, "dst")
	return r.Action.Kind == netstate.Masquerade && k.ok && k.addr.From == k.addr.To &&
		len(k.others) == 1 && k.others[0].Addr.From.IsValid() && !k.others[0].Negate
}

// add adds an object, or says what it contradicts.
func (m *ipMapping) add(ref cluster.Ref, t netstate.Table) (problem string) {
	if m.owners == nil {
		m.owners = map[mappingKey]mappingOwner{}
	}
	for i, c := range t.Chains {
		for j, r := range c.Rules {
			key, to, ok := mappingOf(t.Family, c.Name, r)
			if other, taken := m.owners[key]; ok && taken {
				return fmt.Sprintf("spec.table.chains[%d].rules.natRules[%d]: %s is translated to %s by %s already, and to %s here; delete one of the two IPs, or give it another address",
					i, j, key.addr, other.to, other.ref, to)
			}
		}
	}
	at := slices.IndexFunc(m.tables, func(o netstate.Table) bool { return o.Family == t.Family })
	if at < 0 {
		at = len(m.tables)
		m.tables = append(m.tables, netstate.Table{Family: t.Family, Name: IPMappingTable})
	}
	into := &m.tables[at]
	for _, c := range t.Chains {
		i := slices.IndexFunc(into.Chains, func(o netstate.Chain) bool { return o.Name == c.Name })
		if i < 0 {
			i = len(into.Chains)
			into.Chains = append(into.Chains, netstate.Chain{Name: c.Name, Type: c.Type, Hook: c.Hook, Priority: c.Priority, Policy: c.Policy})
		}
		into.Chains[i].Rules = append(into.Chains[i].Rules, c.Rules...)
		for _, r := range c.Rules {
			if key, to, ok := mappingOf(t.Family, c.Name, r); ok {
				m.owners[key] = mappingOwner{to, ref}
			}
		}
	}
	return ""
}

// fits reports whether a table can be made part of what is there: a chain of
// one name is one chain.
func (m *ipMapping) fits(t netstate.Table) bool {
	return isIPMapping(t) && !slices.ContainsFunc(m.tables, func(o netstate.Table) bool {
		return o.Family == t.Family && slices.ContainsFunc(o.Chains, func(c netstate.Chain) bool {
			return slices.ContainsFunc(t.Chains, func(d netstate.Chain) bool { return c.Name == d.Name && c.Priority != d.Priority })
		})
	})
}

// mappingOf returns what a rule translates, if it does.
func mappingOf(f netstate.Family, chain string, r netstate.FirewallRule) (key mappingKey, to netip.Addr, ok bool) {
	dir := "src"
	switch r.Action.Kind {
	case netstate.DNAT:
		dir = "dst"
	case netstate.SNAT:
	default:
		return key, to, false
	}
	return mappingKey{f, chain, keyOf(r, dir).addr.From}, r.Action.To.Addr(), true
}

// done returns the tables with their maps.
func (m *ipMapping) done() []netstate.Table {
	for _, t := range m.tables {
		for i := range t.Chains {
			t.Chains[i].Rules = withMaps(t.Chains[i].Rules, leastMappedIPs)
		}
	}
	return m.tables
}
