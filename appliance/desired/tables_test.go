package desired_test

import (
	"net/netip"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/desired"
)

type badRoute struct {
	name string
	cluster.RouteConfiguration
	want string
}

func badRoutes() []badRoute {
	rc := func(table string, rules ...cluster.RouteRule) cluster.RouteConfiguration {
		return cluster.RouteConfiguration{Table: table, Rules: rules}
	}
	rule := func(routes ...cluster.TableRoute) cluster.RouteRule {
		return cluster.RouteRule{Dst: prefix("10.9.0.0/16"), Routes: routes}
	}
	to := prefix("10.9.0.0/16")
	return []badRoute{
		{"no-table", rc("", rule(cluster.TableRoute{Dst: to, Dev: "eth0"})),
			`spec.table.name: is empty; write a name, that of the object for instance`},
		{"taken-table", rc("rome-node-gw", rule(cluster.TableRoute{Dst: to, Dev: "eth0"})),
			`spec.table.name: "rome-node-gw" is the table of RouteConfiguration liqo-tenant-rome/rome-node-gw already; choose another name`},
		{"no-dst", rc("t1", rule(cluster.TableRoute{Dev: "eth0"})),
			`spec.table.rules[0].routes[0].dst: is empty; write a CIDR, 0.0.0.0/0 for all of IPv4`},
		{"nowhere-to-go", rc("t2", rule(cluster.TableRoute{Dst: to})),
			`spec.table.rules[0].routes[0].dev: is empty; write dev, gw or both`},
		{"via-unknown", rc("t3", rule(cluster.TableRoute{Dst: to, Via: addr("192.168.1.1")})),
			`spec.table.rules[0].routes[0].gw: 192.168.1.1 is not the other end of a link of this host; write dev, too`},
		{"via-other-family", rc("t4", rule(cluster.TableRoute{Dst: to, Via: addr("fd00::1"), Dev: "eth0"})),
			`spec.table.rules[0].routes[0].gw: fd00::1 is not of the family of dst 10.9.0.0/16`},
		{"src-other-family", rc("t5", rule(cluster.TableRoute{Dst: to, Src: addr("fd00::1"), Dev: "eth0"})),
			`spec.table.rules[0].routes[0].src: fd00::1 is not of the family of dst 10.9.0.0/16`},
		{"scope-with-gw", rc("t6", rule(cluster.TableRoute{Dst: to, Via: addr("10.0.0.1"), Dev: "eth0", Scope: "link"})),
			`spec.table.rules[0].routes[0].scope: link is for routes without gw; leave it out`},
		{"scope-unknown", rc("t7", rule(cluster.TableRoute{Dst: to, Dev: "eth0", Scope: "Link"})),
			`spec.table.rules[0].routes[0].scope: "Link" is not a scope; write global, site, link, host or nowhere`},
		{"onlink-without-gw", rc("t8", rule(cluster.TableRoute{Dst: to, Dev: "eth0", OnLink: true})),
			`spec.table.rules[0].routes[0].onlink: is for routes with gw; write gw, or leave onlink out`},
		{"long-dev", rc("t9", rule(cluster.TableRoute{Dst: to, Dev: "a-very-long-name"})),
			`spec.table.rules[0].routes[0].dev: "a-very-long-name" has 16 bytes; a link's name has 15 at most`},
		{"bad-iif", rc("t10", cluster.RouteRule{IIF: "a/b", Routes: []cluster.TableRoute{{Dst: to, Dev: "eth0"}}}),
			`spec.table.rules[0].iif: "a/b" is not a link's name; write letters, digits, dots and hyphens`},
		{"families-in-rule", rc("t11", cluster.RouteRule{Src: prefix("fd00::/64"), Dst: to, Routes: []cluster.TableRoute{{Dst: to, Dev: "eth0"}}}),
			`spec.table.rules[0]: src fd00::/64 and dst 10.9.0.0/16 are of different families; write two rules`},
		{"route-of-other-family", rc("t12", rule(cluster.TableRoute{Dst: prefix("fd00::/64"), Dev: "eth0"})),
			`spec.table.rules[0].routes[0].dst: fd00::/64 is not of the family of its rule; move it to a rule of its own`},
		{"two-ways", rc("t13", rule(cluster.TableRoute{Dst: to, Dev: "eth0"}), rule(cluster.TableRoute{Dst: to, Dev: "eth1"})),
			`spec.table.rules[1].routes[0].dst: 10.9.0.0/16 is in spec.table.rules[0].routes[0] too, with another next hop; a table has one route to a destination`},
		{"conflict", rc("t14", cluster.RouteRule{Dst: prefix("10.127.128.0/18"), Routes: []cluster.TableRoute{{Dst: prefix("10.127.128.0/18"), Dev: "eth0"}}}),
			`spec.table.rules: RouteConfiguration liqo-tenant-rome/rome-node-gw sends the same packets to 10.127.128.0/18 another way; change or delete one of the two`},
	}
}

func TestRouteProblems(t *testing.T) {
	for _, tt := range badRoutes() {
		t.Run(tt.name, func(t *testing.T) {
			in := milanNode()
			tt.RouteConfiguration.Meta = meta("RouteConfiguration", "liqo", "x", routeCategory, "fabric")
			tt.Created = epoch.Add(1) // younger than what the controller made
			in.Routes = append(in.Routes, tt.RouteConfiguration)
			_, results := desired.Node(in)
			r := resultOf(t, results, tt.Ref)
			assert.Equal(t, r.Message, tt.want)
			assert.Assert(t, !r.OK)
			assert.Equal(t, r.ObservedGeneration, int64(1))
		})
	}
}

func resultOf(t *testing.T, results []desired.Result, ref cluster.Ref) desired.Result {
	t.Helper()
	for _, r := range results {
		if r.Object == ref {
			return r
		}
	}
	t.Fatalf("no result for %s", ref)
	return desired.Result{}
}

type badFirewall struct {
	name string
	cluster.FirewallConfiguration
	want string
}

func badFirewalls() []badFirewall {
	fc := func(family string, chains ...cluster.Chain) cluster.FirewallConfiguration {
		return cluster.FirewallConfiguration{Table: "t", Family: family, Chains: chains}
	}
	filter := func(hook string, rules ...cluster.FilterRule) cluster.Chain {
		return cluster.Chain{Name: "c", Type: "filter", Hook: hook, Policy: "accept", Filter: rules}
	}
	nat := func(hook string, rules ...cluster.NATRule) cluster.Chain {
		return cluster.Chain{Name: "c", Type: "nat", Hook: hook, Policy: "accept", Priority: 100, NAT: rules}
	}
	match := func(m cluster.Match) cluster.FilterRule {
		return cluster.FilterRule{Action: "accept", Match: []cluster.Match{m}}
	}
	host := cluster.AddrRange{From: addr("10.0.0.1"), To: addr("10.0.0.1")}
	const rule = "spec.table.chains[0].rules.filterRules[0]"
	const natRule = "spec.table.chains[0].rules.natRules[0]"
	return []badFirewall{
		{"two filter rules of one name", fc("INET", filter("forward",
			cluster.FilterRule{Name: "r", Action: "accept"}, cluster.FilterRule{Action: "drop"}, cluster.FilterRule{Name: "r", Action: "drop"})),
			`spec.table.chains[0].rules.filterRules[2].name: "r" is the name of filterRules[0] already; choose another one, or leave it out`},
		{"two nat rules of one name", fc("IPV4", nat("postrouting",
			cluster.NATRule{Name: "r", Type: "masquerade"}, cluster.NATRule{Name: "r", Type: "masquerade"})),
			`spec.table.chains[0].rules.natRules[1].name: "r" is the name of natRules[0] already; choose another one, or leave it out`},
		{"family", fc("ip"), `spec.table.family: "ip" is not a table family; write INET, IPV4, IPV6, ARP or BRIDGE`},
		{"family-of-devices", fc("NETDEV", filter("ingress")),
			`spec.table.family: chains of family NETDEV are each at a device, and a chain has no field that names one; write INET, IPV4, IPV6, ARP or BRIDGE`},
		{"no-name", cluster.FirewallConfiguration{Family: "IPV4"}, `spec.table.name: "" must have 1 to 200 bytes without space, quote, brace and semicolon`},
		{"chain-twice", fc("IPV4", filter("input"), filter("output")),
			`spec.table.chains[1].name: "c" is the name of spec.table.chains[0] already; choose another one`},
		{"hook-of-type", fc("IPV4", nat("forward")),
			`spec.table.chains[0].hook: "forward" is not a hook of a nat chain of family ip; write prerouting, input, output, postrouting`},
		{"type-of-family", fc("ARP", nat("input")), `spec.table.chains[0].type: a table of family arp has no chains of type nat; write filter`},
		{"type-of-bridge", fc("BRIDGE", nat("prerouting")), `spec.table.chains[0].type: a table of family bridge has no chains of type nat; write filter`},
		{"hook-of-arp", fc("ARP", filter("forward")), `spec.table.chains[0].hook: "forward" is not a hook of a filter chain of family arp; write input, output`},
		{"hook-of-bridge", fc("BRIDGE", filter("ingress")),
			`spec.table.chains[0].hook: "ingress" is not a hook of a filter chain of family bridge; write prerouting, input, forward, output, postrouting`},
		{"action-of-arp", fc("ARP", filter("input", cluster.FilterRule{Action: "reject"})),
			rule + `.action: a table of family arp has no action reject; write accept or drop`},
		{"address-of-arp", fc("ARP", filter("input", match(cluster.Match{IP: cluster.AddrRange{From: addr("fd00::1"), To: addr("fd00::1")}, Position: "src"}))),
			rule + `.match[0].ip.value: fd00::1: ARP asks for addresses of IPv4; write one`},
		{"port-of-arp", fc("ARP", filter("input", match(cluster.Match{Ports: cluster.PortRange{From: 80, To: 80}, Position: "src"}))),
			rule + `.match[0].port: a table of family arp knows no ports; match ip or dev`},
		{"protocol-of-arp", fc("ARP", filter("input", match(cluster.Match{Proto: "tcp"}))),
			rule + `.match[0].proto: a table of family arp knows no protocols above IP; match ip or dev`},
		{"device-of-arp", fc("ARP", filter("output", match(cluster.Match{Dev: "eth0", Position: "in"}))),
			rule + `.match[0].dev.position: a packet in output has no device that it came in by`},
		{"device-of-bridge", fc("BRIDGE", filter("postrouting", match(cluster.Match{Dev: "eth0", Position: "in"}))),
			rule + `.match[0].dev.position: a packet in postrouting has no device that it came in by`},
		{"reject-of-bridge", fc("BRIDGE", filter("forward", cluster.FilterRule{Action: "reject"})),
			rule + `.action: reject does not work in forward; write drop, or choose the hook prerouting or input`},
		{"notrack-of-bridge", fc("BRIDGE", filter("output", cluster.FilterRule{Action: "notrack"})),
			rule + `.action: notrack is too late here; choose the hook prerouting, and a priority below -200`},
		{"mss-of-bridge", fc("BRIDGE", filter("prerouting", cluster.FilterRule{Action: "tcpmssclamp", Match: []cluster.Match{{Proto: "tcp"}}})),
			rule + `.value: a bridge knows no route whose MTU could be taken; write a number of bytes`},
		{"type", fc("IPV4", cluster.Chain{Name: "c", Type: "mangle", Hook: "input"}), `spec.table.chains[0].type: "mangle" is not a type of chain; write filter, nat or route`},
		{"policy", fc("IPV4", cluster.Chain{Name: "c", Type: "filter", Hook: "input", Policy: "reject"}), `spec.table.chains[0].policy: "reject" is not a policy; write accept or drop`},
		{"nat-too-early", fc("IPV4", cluster.Chain{Name: "c", Type: "nat", Hook: "prerouting", Priority: -200}),
			`spec.table.chains[0].priority: -200 is too early for nat, which needs connection tracking; write -199 or more`},
		{"nat-rules-in-filter", fc("IPV4", cluster.Chain{Name: "c", Type: "filter", Hook: "input", NAT: []cluster.NATRule{{Type: "masquerade"}}}),
			`spec.table.chains[0].rules.natRules: are for chains of type nat, not filter; ` + natRule + `.natType: masquerade is for the hook postrouting, not input`},
		{"filter-rules-in-nat", fc("IPV4", cluster.Chain{Name: "c", Type: "nat", Hook: "input", Filter: []cluster.FilterRule{{Action: "accept"}}}),
			`spec.table.chains[0].rules.filterRules: are for chains of type filter, not nat`},
		{"action", fc("IPV4", filter("input", cluster.FilterRule{Action: "allow"})),
			rule + `.action: "allow" is not an action; write accept, drop, reject, notrack, ctmark, metamarkfromctmark or tcpmssclamp`},
		{"mark", fc("IPV4", filter("input", cluster.FilterRule{Action: "ctmark", Value: "one"})),
			rule + `.value: "one" is not a mark; write a number from 0 to 4294967295`},
		{"mark-missing", fc("IPV4", filter("input", cluster.FilterRule{Action: "ctmark"})),
			rule + `.value: "" is not a mark; write a number from 0 to 4294967295`},
		{"value-of-none", fc("IPV4", filter("input", cluster.FilterRule{Action: "drop", Value: "1"})), rule + `.value: drop takes no value; leave it out`},
		{"mss", fc("IPV4", filter("forward", cluster.FilterRule{Action: "tcpmssclamp", Value: "70000", Match: []cluster.Match{{Proto: "tcp"}}})),
			rule + `.value: "70000" is not a segment size; write a number of bytes, or 0 for what the route's MTU allows`},
		{"mss-not-tcp", fc("IPV4", filter("forward", cluster.FilterRule{Action: "tcpmssclamp"})), rule + `.match: tcpmssclamp is for TCP; add a match with proto tcp`},
		{"mss-too-early", fc("IPV4", filter("prerouting", cluster.FilterRule{Action: "tcpmssclamp", Match: []cluster.Match{{Proto: "tcp"}}})),
			rule + `.value: the route is not known yet in prerouting; write a number of bytes, or choose the hook forward`},
		{"reject-too-late", fc("IPV4", filter("postrouting", cluster.FilterRule{Action: "reject"})),
			rule + `.action: reject does not work in postrouting; write drop, or choose the hook input, forward or output`},
		{"notrack-too-late", fc("IPV4", filter("prerouting", cluster.FilterRule{Action: "notrack"})),
			rule + `.action: notrack is too late here; choose the hook prerouting or output, and a priority below -200`},
		{"address-of-other-family", fc("IPV6", filter("input", match(cluster.Match{IP: host, Position: "src"}))),
			rule + `.match[0].ip.value: 10.0.0.1 is not of the family of the table, ip6`},
		{"position", fc("IPV4", filter("input", match(cluster.Match{IP: host, Position: "in"}))), rule + `.match[0].ip.position: "in" is not a position; write src or dst`},
		{"device-position", fc("IPV4", filter("prerouting", match(cluster.Match{Dev: "eth0", Position: "out"}))),
			rule + `.match[0].dev.position: a packet in prerouting has no device to go out by yet`},
		{"empty-match", fc("IPV4", filter("input", match(cluster.Match{}))),
			rule + `.match[0]: says 0 things; write exactly one of ip, port, proto and dev, and a match for each further one`},
		{"proto", fc("IPV4", filter("input", match(cluster.Match{Proto: "sctp"}))), rule + `.match[0].proto.value: "sctp" is not a protocol; write tcp or udp`},
		{"snat-in-prerouting", fc("IPV4", nat("prerouting", cluster.NATRule{Type: "snat", To: prefix("10.0.0.1/32")})),
			natRule + `.natType: snat is for the hook postrouting or input, not prerouting`},
		{"dnat-in-postrouting", fc("IPV4", nat("postrouting", cluster.NATRule{Type: "dnat", To: prefix("10.0.0.1/32")})),
			natRule + `.natType: dnat is for the hook prerouting or output, not postrouting`},
		{"nat-to-nowhere", fc("IPV4", nat("postrouting", cluster.NATRule{Type: "snat"})),
			natRule + `.to: is empty; write the new address, or a CIDR to keep the host part`},
		{"nat-to-other-family", fc("IPV4", nat("postrouting", cluster.NATRule{Type: "snat", To: prefix("fd00::1/128")})),
			natRule + `.to: fd00::1/128 is not of the family of the table, ip`},
		{"masquerade-to", fc("IPV4", nat("postrouting", cluster.NATRule{Type: "masquerade", To: prefix("10.0.0.1/32")})),
			natRule + `.to: 10.0.0.1/32: masquerade takes the address of the outgoing link; leave it out, or write snat`},
		{"long-comment", fc("IPV4", filter("input", cluster.FilterRule{Name: strings.Repeat("x", 128), Action: "accept"})),
			rule + `.name: "` + strings.Repeat("x", 128) + `" must have at most 127 bytes, without quote and line break`},
		{"mixed-families-in-rule", fc("INET", filter("input", cluster.FilterRule{Action: "accept", Match: []cluster.Match{
			{IP: host, Position: "src"},
			{IP: cluster.AddrRange{From: addr("fd00::1"), To: addr("fd00::1")}, Position: "dst"},
		}})), `spec.table.chains[0].rules.filterRules[0].match[1]: no packet matches it and match[0], so the rule would do nothing; remove one of the two`},
	}
}

func TestFirewallProblems(t *testing.T) {
	for _, tt := range badFirewalls() {
		t.Run(tt.name, func(t *testing.T) {
			tt.FirewallConfiguration.Meta = meta("FirewallConfiguration", "liqo", "x", fwCategory, "fabric", fwSubcategory, "all-nodes")
			state, results := desired.Node(desired.NodeInput{Name: "n", Firewalls: []cluster.FirewallConfiguration{tt.FirewallConfiguration}})
			r := resultOf(t, results, tt.Ref)
			assert.Equal(t, r.Message, tt.want)
			assert.Assert(t, !r.OK)
			assert.Assert(t, is.Len(state.Tables, 0))
		})
	}
}

// Tables of every family of the API, with all that they can have.
func TestFamilies(t *testing.T) {
	lan := cluster.AddrRange{From: addr("10.0.0.0"), To: addr("10.0.0.255")}
	host := cluster.AddrRange{From: addr("fd00::1"), To: addr("fd00::1")}
	source := cluster.Match{IP: lan, Position: "src"}
	in, out := cluster.Match{Dev: "eth0", Position: "in"}, cluster.Match{Dev: "eth1", Position: "out"}
	for _, tt := range []struct {
		family string
		chains []cluster.Chain
		want   string
	}{
		{"ARP", []cluster.Chain{
			{Name: "in", Type: "filter", Hook: "input", Policy: "drop", Filter: []cluster.FilterRule{
				{Name: "lan", Match: []cluster.Match{source, in}, Action: "accept", Counter: true},
			}},
			{Name: "out", Type: "filter", Hook: "output", Policy: "accept", Priority: 50, Filter: []cluster.FilterRule{
				{Name: "others", Match: []cluster.Match{{IP: lan, Position: "dst", Negate: true}, out}, Action: "drop"},
			}},
		}, `table arp t {
	chain in {
		type filter hook input priority 0; policy drop;
		arp saddr ip 10.0.0.0/24 iifname "eth0" counter accept comment "lan"
	}
	chain out {
		type filter hook output priority 50; policy accept;
		arp daddr ip != 10.0.0.0/24 oifname "eth1" drop comment "others"
	}
}
`},
		{"BRIDGE", []cluster.Chain{
			{Name: "early", Type: "filter", Hook: "prerouting", Policy: "accept", Priority: -300, Filter: []cluster.FilterRule{
				{Name: "untracked", Match: []cluster.Match{{Proto: "udp"}, {Ports: cluster.PortRange{From: 6091, To: 6091}, Position: "dst"}}, Action: "notrack"},
				{Name: "away", Match: []cluster.Match{{IP: host, Position: "dst"}}, Action: "reject"},
			}},
			{Name: "through", Type: "filter", Hook: "forward", Policy: "drop", Priority: -200, Filter: []cluster.FilterRule{
				{Name: "mark", Match: []cluster.Match{source, in, out}, Action: "ctmark", Value: "1"},
				{Name: "restore", Action: "metamarkfromctmark"},
				{Name: "mss", Match: []cluster.Match{{Proto: "tcp"}}, Action: "tcpmssclamp", Value: "1300"},
				{Name: "lan", Match: []cluster.Match{source}, Action: "accept", Counter: true},
			}},
		}, `table bridge t {
	chain early {
		type filter hook prerouting priority -300; policy accept;
		udp dport 6091 notrack comment "untracked"
		ip6 daddr fd00::1 reject comment "away"
	}
	chain through {
		type filter hook forward priority -200; policy drop;
		ip saddr 10.0.0.0/24 iifname "eth0" oifname "eth1" ct mark set 0x1 comment "mark"
		meta mark set ct mark comment "restore"
		meta l4proto tcp tcp flags & (syn | rst) == syn tcp option maxseg size set 1300 comment "mss"
		ip saddr 10.0.0.0/24 counter accept comment "lan"
	}
}
`},
	} {
		t.Run(tt.family, func(t *testing.T) {
			fc := cluster.FirewallConfiguration{
				Meta:  meta("FirewallConfiguration", "liqo", "x", fwCategory, "fabric", fwSubcategory, "all-nodes"),
				Table: "t", Family: tt.family, Chains: tt.chains,
			}
			state, results := desired.Node(desired.NodeInput{Name: "n", Firewalls: []cluster.FirewallConfiguration{fc}})
			assert.Equal(t, resultOf(t, results, fc.Ref).Message, "")
			assert.NilError(t, state.Validate())
			assert.Assert(t, is.Len(state.Tables, 1))
			assert.Equal(t, state.Tables[0].String(), tt.want)
			assert.Equal(t, state.Tables[0].ID(), desired.TableOf(fc))
		})
	}
}

func TestSelection(t *testing.T) {
	type labels = map[string]string
	for _, tt := range []struct {
		name          string
		labels        labels
		node, gateway bool // node-1; the gateway to rome on node-1
	}{
		{"none", labels{}, false, false},
		{"routes of nodes", labels{routeCategory: "fabric"}, true, false},
		{"routes of a peer's gateway", labels{routeCategory: "gateway", routeUnique: "rome"}, false, true},
		{"routes of another peer's gateway", labels{routeCategory: "gateway", routeUnique: "oslo"}, false, false},
		{"routes of gateways", labels{routeCategory: "gateway", routeSubcategory: "fabric"}, false, true},
		{"routes of gateways on the node", labels{routeCategory: "gateway", routeSubcategory: "fabric-node", routeUnique: "node-1"}, false, true},
		{"routes of gateways on another node", labels{routeCategory: "gateway", routeSubcategory: "fabric-node", routeUnique: "node-2"}, false, false},
		{"routes of gateways, nobody's", labels{routeCategory: "gateway"}, false, false},
		{"tables of nodes", labels{fwCategory: "fabric", fwSubcategory: "all-nodes"}, true, false},
		{"table of the node", labels{fwCategory: "fabric", fwSubcategory: "single-node", fwUnique: "node-1"}, true, false},
		{"table of another node", labels{fwCategory: "fabric", fwSubcategory: "single-node", fwUnique: "node-2"}, false, false},
		{"mapped addresses on nodes", labels{fwCategory: "fabric", fwSubcategory: "ip-mapping"}, true, false},
		{"category without subcategory", labels{fwCategory: "fabric"}, false, false},
		{"tables of all gateways", labels{fwCategory: "gateway", fwSubcategory: "all-gateways"}, false, true},
		{"tables of gateways", labels{fwCategory: "gateway", fwSubcategory: "fabric"}, false, true},
		{"mapped addresses on gateways", labels{fwCategory: "gateway", fwSubcategory: "ip-mapping"}, false, true},
		{"table of a peer's gateway", labels{fwCategory: "gateway", fwUnique: "rome"}, false, true},
		{"table of another peer's gateway", labels{fwCategory: "gateway", fwUnique: "oslo"}, false, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			assert.Equal(t, desired.NodeSelects(tt.labels, "node-1"), tt.node)
			assert.Equal(t, desired.GatewaySelects(tt.labels, "rome", "node-1"), tt.gateway)
		})
	}
}

// Gateways need two bits of the marks themselves; nodes do not.
func TestReservedMarks(t *testing.T) {
	for _, tt := range []struct {
		value string
		ok    bool
	}{{"1", true}, {"0x1fffffff", true}, {"0x20000000", false}, {"1073741824", false}, {"0x80000000", true}} {
		fc := cluster.FirewallConfiguration{Table: "users", Family: "IPV4", Chains: []cluster.Chain{{
			Name: "forward", Type: "filter", Hook: "forward", Filter: []cluster.FilterRule{{Name: "mark", Action: "ctmark", Value: tt.value}},
		}}}
		gateway, node := romeGateway(), milanNode()
		fc.Meta = meta("FirewallConfiguration", "liqo", "users", fwCategory, "gateway", fwSubcategory, "all-gateways")
		gateway.Firewalls = append(gateway.Firewalls, fc)
		_, results := desired.Gateway(gateway)
		message := ""
		for _, r := range results {
			if r.Object.Name == "users" {
				message = r.Message
			}
		}
		want := ""
		if !tt.ok {
			want = "spec.table.chains[0].rules.filterRules[0].value: gateways need the bits 0x60000000 of marks themselves; write a mark without them, one below 536870912 for instance"
		}
		assert.Equal(t, message, want, tt.value)
		fc.Meta = meta("FirewallConfiguration", "liqo", "users", fwCategory, "fabric", fwSubcategory, "all-nodes")
		node.Firewalls = append(node.Firewalls, fc)
		state, _ := desired.Node(node)
		assert.Assert(t, tableOf(state, "users") != nil, tt.value)
	}
}

func TestMTU(t *testing.T) {
	v4, v6, none := addr("10.0.0.1"), addr("fd00::1"), netip.Addr{}
	for _, tt := range []struct {
		underlay  int
		remote    netip.Addr
		geneve    int
		wireGuard int
	}{
		{1500, v4, 1450, 1440},
		{1500, v6, 1430, 1420},
		{1500, addr("::ffff:10.0.0.1"), 1450, 1440},
		{1500, none, 1430, 1420},
		{1280, v4, 1230, 1220},
		{9000, v4, 8950, 8940},
		{0, v4, 1340, 1340},
		{0, v6, 1340, 1340},
	} {
		assert.Equal(t, desired.GeneveMTU(tt.underlay, tt.remote), tt.geneve)
		assert.Equal(t, desired.WireGuardMTU(tt.underlay, tt.remote), tt.wireGuard)
	}
	mtu, problem := desired.ChooseMTU(0, 1440)
	assert.Equal(t, mtu, 1440)
	assert.Equal(t, problem, "")
	mtu, problem = desired.ChooseMTU(1340, 1440)
	assert.Equal(t, mtu, 1340)
	assert.Equal(t, problem, "")
	mtu, problem = desired.ChooseMTU(1460, 1440)
	assert.Equal(t, mtu, 1460)
	assert.Equal(t, problem, "mtu 1460 is more than the 1440 bytes that fit into the network below: larger packets are fragmented or lost; write 1440 or less, or 0 to have it derived")
}

// Rules without names are called by their places: each is another one, also where one
// with a map stands for several of them.
func TestRulesWithoutNames(t *testing.T) {
	in := milanNode()
	to := func(n string, at string) cluster.NATRule {
		a := addr(n)
		return cluster.NATRule{Type: "dnat", To: prefix(at), Match: []cluster.Match{{Position: "dst", IP: cluster.AddrRange{From: a, To: a}}}}
	}
	fc := cluster.FirewallConfiguration{Meta: meta("FirewallConfiguration", "liqo", "x", fwCategory, "fabric", fwSubcategory, "all-nodes"),
		Table: "unnamed", Family: "IPV4", Chains: []cluster.Chain{
			{Name: "f", Type: "filter", Hook: "forward", Policy: "accept", Filter: []cluster.FilterRule{
				{Action: "accept"}, {Name: "last", Action: "accept"}, {Action: "accept"}}},
			{Name: "n", Type: "nat", Hook: "prerouting", Policy: "accept", Priority: -100, NAT: []cluster.NATRule{
				to("192.0.2.1", "198.51.100.1/32"), to("192.0.2.2", "198.51.100.2/32")}},
		}}
	in.Firewalls = append(in.Firewalls, fc)
	state, results := desired.Node(in)
	r := resultOf(t, results, fc.Ref)
	assert.Assert(t, r.OK, r.Message)
	for _, table := range state.Tables {
		if table.Name != "unnamed" {
			continue
		}
		var names []string
		for _, c := range table.Chains {
			for _, rule := range c.Rules {
				names = append(names, rule.Name)
			}
		}
		assert.DeepEqual(t, names, []string{"filterRules[0]", "last", "filterRules[2]", "natRules[0]", "natRules[1]"})
		return
	}
	t.Fatal("there is no table unnamed")
}
