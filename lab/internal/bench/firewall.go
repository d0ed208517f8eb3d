package bench

import (
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strconv"
	"time"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/desired"
	"github.com/isthmus-net/isthmus/appliance/netstate"
	"github.com/isthmus-net/isthmus/lab/internal/report"
)

// A FirewallCase is what a gateway translates: mapped addresses of hosts, which
// the peer calls, or remapped networks of the peer, which nodes call. Or it is how many
// nodes there are, of which one calls the peer.
type FirewallCase struct {
	Addresses int  `json:"addresses,omitempty"`
	Networks  int  `json:"networks,omitempty"`
	Nodes     int  `json:"nodes,omitempty"`
	Linear    bool `json:"linear,omitempty"` // a rule for each instead of a map
}

// FirewallCases returns what is measured: each number of mapped addresses and
// of remapped networks, with maps and without. The first is what the others are
// compared with.
func FirewallCases(addresses, networks []int) []FirewallCase {
	var out []FirewallCase
	for _, linear := range []bool{false, true} {
		for _, n := range addresses {
			out = append(out, FirewallCase{Addresses: n, Linear: linear})
		}
		for _, n := range networks {
			out = append(out, FirewallCase{Networks: n, Linear: linear})
		}
	}
	return out
}

// String is the case for people.
func (c FirewallCase) String() string {
	what := fmt.Sprintf("%d mapped IPs", c.Addresses)
	switch {
	case c.Nodes > 0 && c.Linear:
		return fmt.Sprintf("%d nodes, rules for each", c.Nodes)
	case c.Nodes > 0:
		return fmt.Sprintf("%d nodes", c.Nodes)
	case c.Networks > 0:
		what = fmt.Sprintf("%d remapped networks", c.Networks)
	}
	if c.Linear {
		return what + ", a rule each"
	}
	return what + ", maps"
}

// MaxFirewall is how many addresses, or networks, a case may have: as many as
// the networks below have room for.
const MaxFirewall = 1 << 16

// The i-th mapped address and its host; the i-th network of the peer as we call
// it, and as it does itself.
func mappedAddr(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 70, byte(i >> 8), byte(i)}) }
func hostAddr(i int) netip.Addr   { return netip.AddrFrom4([4]byte{10, 140, byte(i >> 8), byte(i)}) }
func remapped(i int) netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{100, byte(i >> 8), byte(i), 0}), 24)
}
func original(i int) netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{101, byte(i >> 8), byte(i), 0}), 24)
}

// Addresses of the gateway's two neighbours, which are all there is around it.
func peerAddr() netip.Addr { return netip.AddrFrom4([4]byte{169, 254, 18, 2}) }
func nodeAddr() netip.Addr { return netip.AddrFrom4([4]byte{10, 80, 0, 2}) }

const (
	firewallNode = "node-1"
	firewallPeer = "rome"
	nodeLink     = "liqo.node-1"
)

// destination returns the i-th address that is called: behind a map.
func (c FirewallCase) destination(i int) netip.Addr {
	switch {
	case c.Nodes > 0:
		return original(0).Addr().Next()
	case c.Networks > 0:
		return remapped(i % c.Networks).Addr().Next()
	}
	return mappedAddr(i % c.Addresses)
}

// object is the metadata of an object with these labels and their values.
func object(kind, namespace, name string, labels ...string) cluster.Meta {
	m := cluster.Meta{Ref: cluster.Ref{Kind: kind, Namespace: namespace, Name: name}, Generation: 1, Labels: map[string]string{}}
	for pair := range slices.Chunk(labels, 2) {
		m.Labels["networking.liqo.io/"+pair[0]] = pair[1]
	}
	return m
}

// state returns what desired makes of the case's objects: the tables of the
// gateway, and the routes and rules that its packets take. The links are not
// those of a gateway: no tunnel shall be measured.
func (c FirewallCase) state() (netstate.State, error) {
	ns := "liqo-tenant-" + firewallPeer
	in := desired.GatewayInput{
		Name: firewallPeer, Namespace: ns, RemoteID: firewallPeer, Mode: cluster.Server, NodeName: firewallNode, PodIP: hostAddr(0),
		Nodes: []cluster.InternalNode{{
			Meta: object("InternalNode", "", firewallNode), GatewayInterface: nodeLink, InternalIP: nodeAddr(), Local: nodeAddr(), Remote: nodeAddr(),
		}},
		Fabrics: []cluster.InternalFabric{{Meta: object("InternalFabric", ns, firewallPeer), RemoteID: firewallPeer, InternalIP: nodeAddr().Next()}},
		Tunnels: []cluster.GeneveTunnel{{
			Meta: object("GeneveTunnel", ns, firewallNode), VNI: 1, Node: firewallNode, Fabric: cluster.Ref{Namespace: ns, Name: firewallPeer},
		}},
	}
	for i := range c.Addresses {
		in.Firewalls = append(in.Firewalls, mapping(object("FirewallConfiguration", "default", fmt.Sprintf("ip-%d-remap-ipmapping-gw", i),
			"firewall-category", "gateway", "firewall-subcategory", "ip-mapping"), i))
	}
	if c.Networks > 0 {
		in.Firewalls = append(in.Firewalls, remap(object("FirewallConfiguration", ns, firewallPeer+"-remap-podcidr",
			"firewall-category", "gateway", "firewall-unique", firewallPeer), c.Networks))
		out := cluster.RouteConfiguration{
			Meta:  object("RouteConfiguration", ns, firewallPeer+"-gw-ext", "route-category", "gateway", "route-unique", firewallPeer),
			Table: firewallPeer + "-gw-ext",
		}
		r := cluster.RouteRule{IIF: nodeLink}
		for i := range c.Networks {
			r.Routes = append(r.Routes, cluster.TableRoute{Dst: original(i), Via: peerAddr(), Dev: desired.TunnelInterface})
		}
		out.Rules = []cluster.RouteRule{r}
		in.Routes = []cluster.RouteConfiguration{out}
	}
	if c.Nodes > 0 {
		withNodes(&in, c.Nodes)
	}
	state, results := desired.Gateway(in)
	for _, r := range results {
		if !r.OK {
			return netstate.State{}, fmt.Errorf("%s: %s", r.Object, r.Message)
		}
	}
	if c.Linear {
		for _, t := range state.Tables {
			for i := range t.Chains {
				t.Chains[i].Rules = withoutMaps(markForEach(t.Chains[i].Rules))
			}
		}
		state.Rules = ruleForEach(in.Nodes, state.Rules)
	}
	return netstate.State{Routes: state.Routes, Rules: state.Rules, Tables: state.Tables}, nil
}

// mapping is what the controller writes for one IP.
func mapping(m cluster.Meta, i int) cluster.FirewallConfiguration {
	match := func(a netip.Addr, position string) cluster.Match {
		return cluster.Match{IP: cluster.AddrRange{From: a, To: a}, Position: position}
	}
	name := "ip-" + strconv.Itoa(i)
	return cluster.FirewallConfiguration{Meta: m, Table: m.Name, Family: "IPV4", Chains: []cluster.Chain{
		{Name: "prerouting", Type: "nat", Hook: "prerouting", Priority: -100, Policy: "accept", NAT: []cluster.NATRule{{
			Name: name, Type: "dnat", To: netip.PrefixFrom(hostAddr(i), 32), Match: []cluster.Match{match(mappedAddr(i), "dst")},
		}}},
		{Name: "postrouting", Type: "nat", Hook: "postrouting", Priority: 100, Policy: "accept", NAT: []cluster.NATRule{{
			Name: name, Type: "snat", To: netip.PrefixFrom(mappedAddr(i), 32),
			Match: []cluster.Match{{Dev: desired.TunnelInterface, Position: "out"}, match(hostAddr(i), "src")},
		}}},
	}}
}

// remap is a user's object that translates n networks by connection tracking. What the
// controller writes of that form a gateway translates without.
func remap(m cluster.Meta, n int) cluster.FirewallConfiguration {
	out := cluster.Chain{Name: "outgoing", Type: "nat", Hook: "prerouting", Priority: -100, Policy: "accept"}
	in := cluster.Chain{Name: "incoming", Type: "nat", Hook: "postrouting", Priority: 100, Policy: "accept"}
	match := func(p netip.Prefix, position string) cluster.Match {
		return cluster.Match{IP: cluster.AddrRange(netstate.RangeOf(p)), Position: position}
	}
	for i := range n {
		name := fmt.Sprintf("%s-%s", remapped(i), original(i))
		out.NAT = append(out.NAT, cluster.NATRule{Name: name, Type: "dnat", To: original(i), ToIsPrefix: true, Match: []cluster.Match{
			{Dev: desired.TunnelInterface, Position: "in", Negate: true}, match(remapped(i), "dst"),
		}})
		in.NAT = append(in.NAT, cluster.NATRule{Name: name, Type: "snat", To: remapped(i), ToIsPrefix: true, Match: []cluster.Match{
			{Dev: desired.TunnelInterface, Position: "in"}, match(original(i), "src"),
		}})
	}
	return cluster.FirewallConfiguration{Meta: m, Table: "remap-podcidr", Family: "IPV4", Chains: []cluster.Chain{out, in}}
}

// withoutMaps writes a rule for each entry of a map.
func withoutMaps(rules []netstate.FirewallRule) []netstate.FirewallRule {
	var out []netstate.FirewallRule
	for _, r := range rules {
		a := r.Action
		if len(a.Map.Entries) == 0 {
			out = append(out, r)
			continue
		}
		for _, e := range a.Map.Entries {
			out = append(out, netstate.FirewallRule{
				Name:    e.Name,
				Matches: append(slices.Clone(r.Matches), netstate.Match{Dir: a.Map.Dir, Addr: e.Addr}),
				Action:  netstate.Action{Kind: a.Kind, To: e.To, Prefix: a.Prefix},
			})
		}
	}
	return out
}

// A FirewallRow is one case over all rounds. The ratios are to the first case,
// pair by pair; those of the first case to itself show what the machine's noise
// makes of 1.
type FirewallRow struct {
	FirewallCase
	Applied          report.Duration `json:"applied"`     // how long it took to write tables, routes and rules
	Connections      Spread          `json:"connections"` // conntrack entries made, per second
	Packets          Spread          `json:"packets"`     // of connections that are there, that arrived per second; with nodes, round trips
	ConnectionsRatio Spread          `json:"connectionsRatio"`
	PacketsRatio     Spread          `json:"packetsRatio"`
}

// FirewallSamples are what was measured of one case.
type FirewallSamples struct {
	Applied time.Duration
	// Per second; each right after the same of the first case.
	Connections, Packets [][2]float64
}

// SummarizeFirewall makes the rows of the table.
func SummarizeFirewall(cases []FirewallCase, samples []FirewallSamples) ([]FirewallRow, error) {
	var rows []FirewallRow
	for i, c := range cases {
		s := samples[i]
		row := FirewallRow{FirewallCase: c, Applied: report.Duration(s.Applied)}
		for _, m := range []struct {
			pairs         [][2]float64
			values, ratio *Spread
		}{{s.Connections, &row.Connections, &row.ConnectionsRatio}, {s.Packets, &row.Packets, &row.PacketsRatio}} {
			var first, own []float64
			for _, p := range m.pairs {
				first, own = append(first, p[0]), append(own, p[1])
			}
			if len(own) == 0 || slices.Min(own) <= 0 || slices.Min(first) <= 0 {
				return nil, fmt.Errorf("%s: a measurement saw nothing; measure longer (--duration)", c)
			}
			*m.values, *m.ratio = spreadOf(own), spreadOf(ratios(own, first))
		}
		rows = append(rows, row)
	}
	return rows, nil
}

// A FirewallReport is one run of lab bench firewall.
type FirewallReport struct {
	Version  string          `json:"version"` // of the lab
	Started  time.Time       `json:"started"`
	Pairs    int             `json:"pairs"`
	Duration report.Duration `json:"duration"` // of one measurement, in seconds
	Rows     []FirewallRow   `json:"rows"`
}

// Write writes the report as a table.
func (r FirewallReport) Write(w io.Writer) {
	if len(r.Rows) == 0 {
		return
	}
	fmt.Fprintf(w, "\n%d interleaved pairs of %s each: medians; for ratios, to %s, median (smallest–largest)\n", r.Pairs, r.Duration, r.Rows[0].FirewallCase)
	packets := "packets"
	if r.Rows[0].Nodes > 0 {
		packets = "round trips"
	}
	lines := [][]string{{"", "applied in", "new connections", "ratio", packets, "ratio"}}
	for _, row := range r.Rows {
		lines = append(lines, []string{
			row.FirewallCase.String(), quantity(time.Duration(row.Applied).Seconds(), "s"),
			quantity(row.Connections.Median, "/s"), row.ConnectionsRatio.ratio(), quantity(row.Packets.Median, "/s"), row.PacketsRatio.ratio(),
		})
	}
	writeColumns(w, lines)
	if r.Rows[0].Nodes > 0 {
		fmt.Fprintf(w, "New connections are conntrack entries made; round trips are echo requests of one node, each sent when the one before is\nanswered. One sender; the gateway's tables, rules and routes, but no tunnel and no Geneve.\n")
		return
	}
	fmt.Fprintf(w, "New connections are conntrack entries made, to random destinations among all that are translated; packets are those of\n%d connections that arrive. One sender; the gateway's tables, rules and routes, but no tunnel and no Geneve.\n", established)
}
