package desired_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/desired"
	"github.com/isthmus-net/isthmus/appliance/netstate"
)

func one(a string) cluster.AddrRange { return cluster.AddrRange{From: addr(a), To: addr(a)} }

func familyOf(a string) string {
	if addr(a).Is6() {
		return "IPV6"
	}
	return "IPV4"
}

// mappedIP is what the controller plans for gateways about an IP.
func mappedIP(name, mapped, host string) cluster.FirewallConfiguration {
	to := func(a string) netip.Prefix { return netip.PrefixFrom(addr(a), addr(a).BitLen()) }
	return cluster.FirewallConfiguration{
		Meta:  meta("FirewallConfiguration", "apps", name+"-remap-ipmapping-gw", fwCategory, "gateway", fwSubcategory, "ip-mapping"),
		Table: name + "-remap-ipmapping-gw-apps", Family: familyOf(mapped),
		Chains: []cluster.Chain{
			{Name: "prerouting", Type: "nat", Hook: "prerouting", Policy: "accept", Priority: -100, NAT: []cluster.NATRule{{
				Name: name, Type: "dnat", To: to(host), Match: []cluster.Match{{IP: one(mapped), Position: "dst"}},
			}}},
			{Name: "postrouting", Type: "nat", Hook: "postrouting", Policy: "accept", Priority: 100, NAT: []cluster.NATRule{{
				Name: name, Type: "snat", To: to(mapped),
				Match: []cluster.Match{{IP: one(host), Position: "src"}, {Dev: desired.TunnelInterface, Position: "out"}},
			}}},
		},
	}
}

// masqueradedIP is what it plans for nodes.
func masqueradedIP(name, host string, peers ...string) cluster.FirewallConfiguration {
	c := cluster.Chain{Name: "postrouting", Type: "nat", Hook: "postrouting", Policy: "accept", Priority: -155}
	for _, p := range peers {
		r := netstate.RangeOf(prefix(p))
		c.NAT = append(c.NAT, cluster.NATRule{Name: name + " " + p, Type: "masquerade", Match: []cluster.Match{
			{IP: cluster.AddrRange(r), Position: "src"}, {IP: one(host), Position: "dst"},
		}})
	}
	return cluster.FirewallConfiguration{
		Meta:  meta("FirewallConfiguration", "apps", name+"-remap-ipmapping-fabric", fwCategory, "fabric", fwSubcategory, "ip-mapping"),
		Table: name + "-remap-ipmapping-fabric-apps", Family: familyOf(host), Chains: []cluster.Chain{c},
	}
}

func tableNamed(s netstate.State, name string) string {
	var out strings.Builder
	for _, t := range s.Tables {
		if t.Name == name {
			out.WriteString(t.String())
		}
	}
	return out.String()
}

// Many mapped addresses are one table with one map each way.
func TestIPMappings(t *testing.T) {
	in := romeGateway()
	odd := mappedIP("odd", "10.70.0.30", "192.168.40.30")
	odd.Chains[0].NAT[0].Match = append(odd.Chains[0].NAT[0].Match, cluster.Match{Proto: "tcp"})
	in.Firewalls = []cluster.FirewallConfiguration{
		mappedIP("b", "10.70.0.7", "192.168.40.10"), odd,
		mappedIP("a", "10.70.0.9", "192.168.40.9"), mappedIP("six", "fd70::9", "fd40::9"),
	}
	state, results := desired.Gateway(in)
	assert.NilError(t, state.Validate())
	own := 0
	for _, r := range results {
		if r.Object.Kind != "FirewallConfiguration" {
			continue
		}
		own++
		want := ""
		if strings.HasPrefix(r.Object.Name, "six") {
			want = "no way to fd40::9: by InternalNode node-1.gw: 10.80.0.2 is not of the family of dst fd40::9/128"
		}
		assert.Equal(t, r.Message, want)
	}
	assert.Equal(t, own, len(in.Firewalls)) // each has its own
	assert.Equal(t, tableNamed(state, desired.IPMappingTable), `table ip ip-mapping {
	chain prerouting {
		type nat hook prerouting priority -100; policy accept;
		dnat to ip daddr map { 10.70.0.7 comment "b" : 192.168.40.10, 10.70.0.9 comment "a" : 192.168.40.9 }
	}
	chain postrouting {
		type nat hook postrouting priority 100; policy accept;
		oifname "liqo-tunnel" snat to ip saddr map { 192.168.40.9 comment "a" : 10.70.0.9, 192.168.40.10 comment "b" : 10.70.0.7 }
	}
}
table ip6 ip-mapping {
	chain prerouting {
		type nat hook prerouting priority -100; policy accept;
		ip6 daddr fd70::9 dnat to fd40::9 comment "six"
	}
	chain postrouting {
		type nat hook postrouting priority 100; policy accept;
		ip6 saddr fd40::9 oifname "liqo-tunnel" snat to fd70::9 comment "six"
	}
}
`)
	assert.Check(t, is.Contains(tableNamed(state, "odd-remap-ipmapping-gw-apps"), "ip daddr 10.70.0.30 dnat to 192.168.40.30"))
}

func TestIPMappingsOfNodes(t *testing.T) {
	in := milanNode()
	in.Firewalls = []cluster.FirewallConfiguration{
		masqueradedIP("a", "192.168.40.10", "10.61.0.0/16", "10.71.0.0/16"), masqueradedIP("b", "192.168.40.9", "10.61.0.0/16", "10.71.0.0/16"),
	}
	state, _ := desired.Node(in)
	assert.NilError(t, state.Validate())
	assert.Equal(t, tableNamed(state, desired.IPMappingTable), `table ip ip-mapping {
	chain postrouting {
		type nat hook postrouting priority -155; policy accept;
		ip saddr 10.61.0.0/16 ip daddr { 192.168.40.9 comment "b 10.61.0.0/16", 192.168.40.10 comment "a 10.61.0.0/16" } masquerade
		ip saddr 10.71.0.0/16 ip daddr { 192.168.40.9 comment "b 10.71.0.0/16", 192.168.40.10 comment "a 10.71.0.0/16" } masquerade
	}
}
`)
}

// Of two objects that contradict each other the younger is refused, whatever
// they are called, and the others stay.
func TestIPMappingsContradict(t *testing.T) {
	old := mappedIP("z", "10.70.0.7", "192.168.40.10")
	for _, tt := range []struct {
		name  string
		other cluster.FirewallConfiguration
		want  string
	}{
		{"the same address twice", mappedIP("a", "10.70.0.7", "192.168.40.11"),
			"spec.table.chains[0].rules.natRules[0]: 10.70.0.7 is translated to 192.168.40.10 by FirewallConfiguration apps/z-remap-ipmapping-gw already, and to 192.168.40.11 here; delete one of the two IPs, or give it another address"},
		{"one host, two addresses", mappedIP("a", "10.70.0.8", "192.168.40.10"),
			"spec.table.chains[1].rules.natRules[0]: 192.168.40.10 is translated to 10.70.0.7 by FirewallConfiguration apps/z-remap-ipmapping-gw already, and to 10.70.0.8 here; delete one of the two IPs, or give it another address"},
		{"the table's name", func() cluster.FirewallConfiguration {
			fc := mappedIP("a", "10.70.0.8", "192.168.40.11")
			fc.Table, fc.Chains = desired.IPMappingTable, fc.Chains[1:]
			return fc
		}(), `spec.table.name: "ip-mapping" is a table of Isthmus itself; choose another name`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			in := romeGateway()
			tt.other.Created = epoch.Add(time.Second)
			in.Firewalls = []cluster.FirewallConfiguration{tt.other, old, mappedIP("b", "10.70.0.9", "192.168.40.9")}
			state, results := desired.Gateway(in)
			r := resultOf(t, results, tt.other.Ref)
			assert.Equal(t, r.Message, tt.want)
			assert.Assert(t, !r.OK)
			assert.Assert(t, resultOf(t, results, old.Ref).OK)
			assert.Check(t, is.Contains(tableNamed(state, desired.IPMappingTable), `map { 10.70.0.7 comment "z" : 192.168.40.10, 10.70.0.9 comment "b" : 192.168.40.9 }`))
			for _, r := range state.Routes {
				assert.Assert(t, r.Dst != prefix("192.168.40.11/32"), "a route to what is not mapped")
			}
		})
	}
}

// A host may have several addresses. Only one of them is its own towards the
// peer; the others are ways to it, in the same map.
func TestFurtherIPsOfAHost(t *testing.T) {
	further := mappedIP("b", "10.70.0.8", "192.168.40.10")
	further.Chains = further.Chains[:1]
	in := romeGateway()
	in.Firewalls = []cluster.FirewallConfiguration{mappedIP("a", "10.70.0.7", "192.168.40.10"), further}
	state, results := desired.Gateway(in)
	assert.Assert(t, resultOf(t, results, further.Ref).OK)
	assert.Check(t, is.Contains(tableNamed(state, desired.IPMappingTable), `map { 10.70.0.7 comment "a" : 192.168.40.10, 10.70.0.8 comment "b" : 192.168.40.10 }`))
}

// fromTunnel looks up what comes out of the tunnel, as the kernel does.
func fromTunnel(s netstate.State, dst netip.Addr) string {
	for _, rule := range s.Rules {
		if rule.Not == (rule.IIF == desired.TunnelInterface || rule.IIF == "") || rule.Mark != 0 || rule.Src.IsValid() ||
			rule.Is6() != dst.Is6() || rule.Dst.IsValid() && !rule.Dst.Contains(dst) {
			continue
		}
		if rule.Unreachable {
			return "closed"
		}
		if rule.Table == desired.TableMain {
			return "main"
		}
		var best *netstate.Route
		for i, r := range s.Routes {
			if r.Table == rule.Table && r.Dst.Contains(dst) && (best == nil || r.Dst.Bits() > best.Dst.Bits()) {
				best = &s.Routes[i]
			}
		}
		switch {
		case best == nil || best.Type == netstate.Throw:
		case best.Type == netstate.Unreachable:
			return "unreachable"
		default:
			return best.Dev
		}
	}
	return "nowhere"
}

// What leads to a mapped host is the gateway's own node; what leads to a pod is
// the pod's.
func TestRoutesToMappedHosts(t *testing.T) {
	for _, tt := range []struct {
		name                  string
		input                 func() desired.GatewayInput
		host, ownPod, farPod  string
		wantHost, own, remote string
		problem               string
	}{
		{"Geneve", romeGateway, "192.168.40.10", "10.127.65.7", "10.127.66.9", "liqo.node-1", "liqo.node-1", "liqo.node-2", ""},
		{"a pod with an address out of another node's range", romeGateway, "192.168.40.10", "10.127.66.200", "10.127.66.201", "liqo.node-1", "liqo.node-1", "liqo.node-2", ""},
		{"a pod of a node without link", romeGateway, "192.168.40.10", "10.127.65.7", "10.127.67.9", "liqo.node-1", "liqo.node-1", "unreachable", ""},
		{"no link to the own node", func() desired.GatewayInput {
			in := romeGateway()
			in.Tunnels = in.Tunnels[1:]
			return in
		}, "192.168.40.10", "10.127.65.7", "10.127.66.9", "unreachable", "unreachable", "liqo.node-2",
			"no way to 192.168.40.10: the link liqo.node-1 is not there: no GeneveTunnel joins this gateway and InternalNode node-1 yet"},
		{"behind the tunnel itself", romeGateway, "10.71.0.1", "10.127.65.7", "10.127.66.9", "closed", "liqo.node-1", "liqo.node-2", ""},
		{"VXLAN", overlayGateway, "192.168.40.10", "10.127.65.7", "10.127.66.9", "main", "main", "main", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			in := tt.input()
			object := mappedIP("host", "10.70.0.7", tt.host)
			in.Firewalls = []cluster.FirewallConfiguration{object, mappedIP("own", "10.70.0.8", tt.ownPod), mappedIP("far", "10.70.0.9", tt.farPod)}
			state, results := desired.Gateway(in)
			assert.NilError(t, state.Validate())
			assert.Equal(t, fromTunnel(state, addr(tt.host)), tt.wantHost)
			assert.Equal(t, fromTunnel(state, addr(tt.ownPod)), tt.own)
			assert.Equal(t, fromTunnel(state, addr(tt.farPod)), tt.remote)
			neighbour := fromTunnel(state, addr(tt.host).Next())
			assert.Assert(t, neighbour == "closed" || neighbour == "unreachable", "a host without mapped address is reached: %s", neighbour)
			r := resultOf(t, results, object.Ref)
			assert.Equal(t, r.Message, tt.problem)
			assert.Equal(t, r.OK, tt.problem == "")
		})
	}
}

// Ten thousand mapped addresses: as many routes, but no more rules, chains and
// tables than ten.
func TestManyIPMappings(t *testing.T) {
	count := func(n int) (rules, tables, lines, routes int) {
		in := romeGateway()
		in.Firewalls = nil
		for i := range n {
			in.Firewalls = append(in.Firewalls, mappedIP(fmt.Sprintf("ip-%d", i), fmt.Sprintf("10.70.%d.%d", i>>8, i&255), fmt.Sprintf("192.168.%d.%d", i>>8, i&255)))
		}
		state, results := desired.Gateway(in)
		for _, r := range results {
			assert.Assert(t, r.OK || r.Object.Kind != "FirewallConfiguration", "%s: %s", r.Object, r.Message)
		}
		return len(state.Rules), len(state.Tables), strings.Count(tableNamed(state, desired.IPMappingTable), "\n"), len(state.Routes)
	}
	rules, tables, lines, routes := count(10)
	manyRules, manyTables, manyLines, manyRoutes := count(10_000)
	assert.Equal(t, manyRules, rules)
	assert.Equal(t, manyTables, tables)
	assert.Equal(t, manyLines, lines)
	assert.Equal(t, manyRoutes, routes+9_990)
}

func BenchmarkIPMappings10000(b *testing.B) {
	in := romeGateway()
	for i := range 10_000 {
		in.Firewalls = append(in.Firewalls, mappedIP(fmt.Sprintf("ip-%d", i), fmt.Sprintf("10.70.%d.%d", i>>8, i&255), fmt.Sprintf("192.168.%d.%d", i>>8, i&255)))
	}
	for b.Loop() {
		desired.Gateway(in)
	}
}
