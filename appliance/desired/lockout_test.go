package desired_test

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/desired"
)

// guardedNode is milan's node-1, which dials the API server at a Service's address
// (10.96.0.1) and knows it to be on a host beyond eth0 (172.18.1.1), and by IPv6.
func guardedNode() desired.NodeInput {
	in := milanNode()
	in.NodeIP = addr("172.18.1.11")
	in.APIServers = []netip.AddrPort{
		netip.MustParseAddrPort("10.96.0.1:443"), netip.MustParseAddrPort("172.18.1.1:6443"), netip.MustParseAddrPort("[fd00:18::1]:6443"),
	}
	in.Underlay.Devs = map[netip.Addr]string{
		addr("10.96.0.1"): "eth0", addr("172.18.1.1"): "eth0", addr("fd00:18::1"): "eth0", addr("10.127.65.9"): "cni0", addr("10.127.66.3"): "eth0",
	}
	in.Underlay.Sources = map[netip.Addr]netip.Addr{
		addr("10.96.0.1"): in.NodeIP, addr("172.18.1.1"): in.NodeIP, addr("fd00:18::1"): addr("fd00:18::11"),
		addr("10.127.65.9"): addr("10.127.65.1"), addr("10.127.66.3"): in.NodeIP,
	}
	in.Underlay.Routers = map[netip.Addr]netip.Addr{addr("10.96.0.1"): addr("172.18.1.254"), addr("10.127.66.3"): addr("172.18.1.12")}
	return in
}

// usersRoute is a RouteConfiguration of a user's for all nodes.
func usersRoute(rules ...cluster.RouteRule) cluster.RouteConfiguration {
	return cluster.RouteConfiguration{Meta: meta("RouteConfiguration", "users", "route", routeCategory, "fabric"), Table: "users-route", Rules: rules}
}

// usersTable is a FirewallConfiguration of a user's for all nodes.
func usersTable(family string, chains ...cluster.Chain) cluster.FirewallConfiguration {
	return cluster.FirewallConfiguration{
		Meta:  meta("FirewallConfiguration", "users", "table", fwCategory, "fabric", fwSubcategory, "all-nodes"),
		Table: "users-table", Family: family, Chains: chains,
	}
}

func filterChain(hook, policy string, rules ...cluster.FilterRule) cluster.Chain {
	return cluster.Chain{Name: hook, Type: "filter", Hook: hook, Policy: policy, Filter: rules}
}

func source(p string) cluster.Match {
	r := netip.MustParsePrefix(p)
	return cluster.Match{IP: cluster.AddrRange{From: r.Addr(), To: r.Addr()}, Position: "src"}
}

func port(position string, n uint16) cluster.Match {
	return cluster.Match{Ports: cluster.PortRange{From: n, To: n}, Position: position}
}

// What would cut a node off is refused by the field that does it and by what is
// cut; what leaves the node its API server, the kubelet and the overlay is not.
func TestLockOut(t *testing.T) {
	everywhere := func(dst string, route cluster.TableRoute) cluster.RouteRule {
		route.Dst = prefix(dst)
		return cluster.RouteRule{Routes: []cluster.TableRoute{route}}
	}
	astray := cluster.TableRoute{Dev: "dummy0", Scope: "link"}
	tcp, udp := cluster.Match{Proto: "tcp"}, cluster.Match{Proto: "udp"}
	for _, tt := range []struct {
		name   string
		object any
		vxlan  bool
		want   string // in the message; empty: the object is in force
	}{
		{name: "a default route by another link", object: usersRoute(everywhere("0.0.0.0/0", astray)),
			want: "spec.table.rules[0]: it would cut off the host: packets to the router 172.18.1.254 leave by dummy0, where nobody takes them; write dst"},
		{name: "the API server by another link", object: usersRoute(everywhere("192.0.2.0/24", astray), everywhere("172.18.1.1/32", astray), everywhere("198.51.100.0/24", astray)),
			want: "spec.table.rules[1]: it would cut off the host: connections to the API server (172.18.1.1:6443) leave by dummy0"},
		{name: "with a priority of its own", object: func() cluster.RouteConfiguration {
			r := everywhere("172.18.1.1/32", astray)
			r.Priority = 1
			return usersRoute(r)
		}(), want: "spec.table.rules[0]: it would cut off the host: connections to the API server (172.18.1.1:6443)"},
		{name: "what this node sends to the API server by IPv6", object: usersRoute(cluster.RouteRule{Src: prefix("fd00:18::11/128"),
			Routes: []cluster.TableRoute{{Dst: prefix("::/0"), Dev: "dummy0"}}}), want: "connections to the API server ([fd00:18::1]:6443)"},
		{name: "what other hosts send through it", object: usersRoute(cluster.RouteRule{IIF: "cni0",
			Routes: []cluster.TableRoute{{Dst: prefix("0.0.0.0/0"), Dev: "dummy0", Scope: "link"}}})},
		{name: "another network", object: usersRoute(everywhere("192.0.2.0/24", astray))},
		{name: "the same way, said once more", object: usersRoute(everywhere("10.96.0.0/16", cluster.TableRoute{Via: addr("172.18.1.254"), Dev: "eth0"}))},
		{name: "the gateway of a peer by another link", object: usersRoute(everywhere("10.127.65.9/32", astray)),
			want: "Geneve packets (UDP port 6091) to 10.127.65.9 leave by dummy0"},
		{name: "another node by another link", object: usersRoute(everywhere("172.18.1.12/32", astray)), vxlan: true,
			want: "VXLAN packets (UDP port 4879) to 172.18.1.12 leave by dummy0"},
		{name: "input drops all", object: usersTable("INET", filterChain("input", "drop")),
			want: "spec.table.chains[0]: it would cut off the host: connections to the API server (10.96.0.1:443) are answered, and the answers are dropped by the policy of table users-table, chain input"},
		{name: "output drops all of IPv6", object: usersTable("IPV6", filterChain("output", "drop")),
			want: "connections to the API server ([fd00:18::1]:6443) are dropped by the policy"},
		{name: "a rule drops the API server", object: usersTable("INET", filterChain("forward", "drop"), filterChain("output", "accept",
			cluster.FilterRule{Name: "web", Action: "accept", Match: []cluster.Match{tcp, port("dst", 443)}},
			cluster.FilterRule{Name: "no-api", Action: "reject", Match: []cluster.Match{tcp, port("dst", 6443)}})),
			want: "spec.table.chains[1]: it would cut off the host: connections to the API server (172.18.1.1:6443) are rejected by rule no-api of table users-table, chain output"},
		{name: "the kubelet", object: usersTable("IPV4", filterChain("input", "accept",
			cluster.FilterRule{Name: "no-kubelet", Action: "drop", Match: []cluster.Match{tcp, port("dst", 10250)}})),
			want: "to this node's kubelet (TCP port 10250) are dropped by rule no-kubelet"},
		{name: "Geneve that comes in", object: usersTable("IPV4", filterChain("prerouting", "accept",
			cluster.FilterRule{Name: "no-tunnel", Action: "drop", Match: []cluster.Match{udp, port("dst", 6091), source("10.127.65.9/32")}})),
			want: "Geneve packets (UDP port 6091) of 10.127.65.9 are dropped by rule no-tunnel"},
		{name: "VXLAN that goes out", vxlan: true, object: usersTable("IPV4", filterChain("postrouting", "accept",
			cluster.FilterRule{Name: "no-tunnel", Action: "drop", Match: []cluster.Match{udp, port("dst", 4879)}})),
			want: "VXLAN packets (UDP port 4879) to 172.18.1.12 are dropped by rule no-tunnel"},
		{name: "the API server is translated", object: usersTable("IPV4", cluster.Chain{Name: "out", Type: "nat", Hook: "output", Priority: -100,
			NAT: []cluster.NATRule{{Name: "away", Type: "dnat", To: prefix("192.0.2.7/32"), Match: []cluster.Match{tcp, port("dst", 6443)}}}}),
			want: "spec.table.chains[0]: it would cut off the host: connections to the API server (172.18.1.1:6443)"},
		{name: "input drops all but what the node needs", object: usersTable("IPV4", filterChain("input", "drop",
			cluster.FilterRule{Name: "api", Action: "accept", Match: []cluster.Match{tcp, port("src", 443)}},
			cluster.FilterRule{Name: "api-itself", Action: "accept", Match: []cluster.Match{tcp, port("src", 6443)}},
			cluster.FilterRule{Name: "kubelet", Action: "accept", Match: []cluster.Match{tcp, port("dst", 10250)}},
			cluster.FilterRule{Name: "geneve", Action: "accept", Match: []cluster.Match{udp, port("dst", 6091)}}))},
		{name: "forward drops all", object: usersTable("INET", filterChain("forward", "drop"))},
	} {
		t.Run(tt.name, func(t *testing.T) {
			in := guardedNode()
			if tt.vxlan {
				in.Nodes[0].Overlay = cluster.OverlayVXLAN
				other := internalNode("node-2", "liqo.node-2", "10.80.0.3", "", "172.18.1.12")
				other.VTEP = cluster.VTEP{IP: addr("172.18.1.12"), MAC: [6]byte{2, 0, 0, 0, 0, 2}}
				in.Nodes = append(in.Nodes, other)
				in.Underlay.Devs[other.VTEP.IP], in.Underlay.Sources[other.VTEP.IP] = "eth0", in.NodeIP
			}
			before, _ := desired.Node(in)
			switch o := tt.object.(type) {
			case cluster.RouteConfiguration:
				in.Routes = append(in.Routes, o)
			case cluster.FirewallConfiguration:
				in.Firewalls = append(in.Firewalls, o)
			}
			state, results := desired.Node(in)
			for _, r := range results {
				if r.Object.Namespace != "users" {
					continue
				}
				assert.Equal(t, r.OK, tt.want == "", r.Message)
				assert.Assert(t, strings.Contains(r.Message, tt.want), "%s\nlacks\n%s", r.Message, tt.want)
			}
			if tt.want != "" {
				assert.Equal(t, state.String(), before.String(), "nothing of the object is in force")
			} else {
				assert.Assert(t, state.String() != before.String())
			}
		})
	}
}

// Of several objects those are left out that do harm, and what the controller has
// made never is.
func TestLockOutOfSeveral(t *testing.T) {
	object := func(namespace, name string, age int, rule cluster.RouteRule) cluster.RouteConfiguration {
		rc := usersRoute(rule)
		rc.Namespace, rc.Name, rc.Table, rc.Created = namespace, name, name, epoch.Add(-time.Duration(age)*time.Hour)
		return rc
	}
	to := func(dst, dev string) cluster.RouteRule {
		return cluster.RouteRule{Dst: prefix(dst), Routes: []cluster.TableRoute{{Dst: prefix(dst), Dev: dev, Scope: "link"}}}
	}
	in := guardedNode()
	ours := object("liqo-tenant-rome", "ours", 9, to("10.127.66.3/32", "dummy0"))
	ours.Labels["app.kubernetes.io/managed-by"] = "isthmus"
	drop := usersTable("INET", filterChain("input", "drop"))
	drop.Created = epoch.Add(-2 * time.Hour)
	in.Routes = append(in.Routes, ours,
		object("users", "good-1", 8, to("192.0.2.0/25", "dummy0")),
		object("users", "bad-1", 7, to("172.18.1.0/24", "dummy0")),
		object("users", "good-2", 6, to("192.0.2.128/25", "dummy0")),
		object("users", "bad-2", 5, to("fd00:18::/64", "dummy0")),
	)
	in.Firewalls = append(in.Firewalls, drop)
	_, results := desired.Node(in)
	var got []string
	for _, r := range results {
		if r.Object.Namespace == "users" || r.Object.Name == "ours" {
			got = append(got, fmt.Sprintf("%s %t", r.Object.Name, r.OK))
		}
	}
	assert.DeepEqual(t, got, []string{"table false", "ours true", "bad-1 false", "bad-2 false", "good-1 true", "good-2 true"})

	// Without an API server that is known, or a way to it, there is nothing to lose.
	in.Underlay.Sources = nil
	_, results = desired.Node(in)
	for _, r := range results {
		assert.Assert(t, r.OK, "%v", r)
	}
}

// A gateway's pod needs its API server; one in a network namespace of its node hears
// of it by the node.
func TestGatewayLockOut(t *testing.T) {
	in := romeGateway()
	in.APIServers = []netip.AddrPort{netip.MustParseAddrPort("10.96.0.1:443")}
	in.Underlay.Devs = map[netip.Addr]string{addr("10.96.0.1"): "eth0"}
	in.Underlay.Sources = map[netip.Addr]netip.Addr{addr("10.96.0.1"): in.PodIP}
	in.Underlay.Routers = map[netip.Addr]netip.Addr{addr("10.96.0.1"): addr("10.127.65.1")}
	drop := usersTable("INET", filterChain("input", "drop"))
	drop.Labels = map[string]string{fwCategory: "gateway", fwSubcategory: "all-gateways"}
	in.Firewalls = append(in.Firewalls, drop)
	result := func() desired.Result {
		_, results := desired.Gateway(in)
		i := slices.IndexFunc(results, func(r desired.Result) bool { return r.Object == drop.Ref })
		return results[i]
	}
	r := result()
	assert.Assert(t, !r.OK)
	assert.Assert(t, strings.Contains(r.Message, "spec.table.chains[0]: it would cut off the host: connections to the API server (10.96.0.1:443) are answered, and the answers are dropped"), r.Message)
	in.HostInterface = "liqo.host"
	assert.Assert(t, result().OK)
}

// What a host has found to do harm is left out in this version, with the reason; an earlier
// version may take its place.
func TestLeftOut(t *testing.T) {
	in := milanNode()
	was := usersTable("IPV4", filterChain("forward", "accept"))
	was.Generation = 1
	now := was
	now.Generation, now.Chains = 2, []cluster.Chain{filterChain("forward", "drop")}
	in.Firewalls = append(in.Firewalls, was)
	want, _ := desired.Node(in)
	in.Firewalls = append(in.Firewalls, now)
	in.LeftOut = []desired.LeftOut{{Object: now.Ref, Generation: 2, Why: "it does harm"}}
	state, results := desired.Node(in)
	assert.Equal(t, state.String(), want.String())
	i := slices.IndexFunc(results, func(r desired.Result) bool { return r.Object == now.Ref })
	assert.Equal(t, results[i], desired.Result{Object: now.Ref, ObservedGeneration: 2, Message: "it does harm"})
}
