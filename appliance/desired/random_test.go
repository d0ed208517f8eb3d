package desired_test

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/desired"
)

// Numbers of tables are a function of the names, and names that collide get
// different ones.
func TestTableNumbers(t *testing.T) {
	byNumber := map[uint32]string{}
	var a, b string
	for i := 0; a == ""; i++ {
		name := fmt.Sprintf("table-%d", i)
		n := desired.TableNumber(name)
		assert.Assert(t, n > 255, "%s: %d", name, n)
		if other, taken := byNumber[n]; taken {
			a, b = other, name
		}
		byNumber[n] = name
	}
	numbers := desired.TableNumbers([]string{b, a, "rome-node-gw", a})
	assert.Equal(t, len(numbers), 3)
	assert.Assert(t, numbers[a] != numbers[b])
	assert.Equal(t, numbers["rome-node-gw"], desired.TableNumber("rome-node-gw"))
	assert.DeepEqual(t, numbers, desired.TableNumbers([]string{a, "rome-node-gw", b}))
}

// A pod may have an address out of another node's range. Whatever the nodes
// are called, its own route is the one that counts.
func TestLongestPrefixWinsAcrossObjects(t *testing.T) {
	for _, owner := range []int{0, 1} {
		in := romeGateway()
		exception := []string{"10.127.66.200/32", "10.127.65.200/32"}[owner]
		in.Routes = []cluster.RouteConfiguration{gwNode(in.Nodes[0], "10.127.65.0/24"), gwNode(in.Nodes[1], "10.127.66.0/24")}
		in.Routes[owner] = gwNode(in.Nodes[owner], []string{"10.127.65.0/24", "10.127.66.0/24"}[owner], exception)
		state, _ := desired.Gateway(in)

		var tables []uint32 // that packets out of the tunnel are looked up in, in order
		for _, r := range state.Rules {
			if r.IIF == desired.TunnelInterface && !r.Unreachable {
				tables = append(tables, r.Table)
			}
		}
		assert.Equal(t, len(tables), 1)
		found := ""
		for _, r := range state.Routes {
			if r.Table == tables[0] && r.Dst == prefix(exception) {
				found = r.Dev
			}
		}
		assert.Equal(t, found, in.Nodes[owner].GatewayInterface)
	}
}

// large is a gateway in a cluster of n nodes.
func large(n int) desired.GatewayInput {
	in := romeGateway()
	in.Nodes, in.Tunnels, in.Routes = nil, nil, nil
	for i := range n {
		n := internalNode(fmt.Sprintf("node-%03d", i), fmt.Sprintf("liqo.node-%03d", i),
			netip.AddrFrom4([4]byte{10, 80, byte(1 + i/250), byte(1 + i%250)}).String(), "",
			netip.AddrFrom4([4]byte{172, 18, byte(i / 250), byte(1 + i%250)}).String())
		in.Nodes = append(in.Nodes, n)
		in.Tunnels = append(in.Tunnels, tunnel("rome", n.Name, uint32(i+1)))
		in.Routes = append(in.Routes, gwNode(n, fmt.Sprintf("10.%d.%d.0/24", 128+i/250, i%250)))
	}
	in.Routes = append(in.Routes, gwExt("rome", "169.254.18.2", in.Nodes, "10.127.64.0/18", "10.70.0.0/16"))
	return in
}

// More objects than the band has priorities keep their order and stay in it.
func TestManyObjects(t *testing.T) {
	in := large(500)
	state, results := desired.Gateway(in)
	assert.NilError(t, state.Validate())
	for _, r := range results {
		assert.Assert(t, r.OK, "%s: %s", r.Object, r.Message)
	}
	last := uint32(0)
	for _, r := range state.Rules {
		if r.Unreachable {
			assert.Equal(t, r.Priority, uint32(390))
			continue
		}
		if r.IIF == "lo" && !r.Not { // the gateway's own errors
			assert.Equal(t, r.Priority, uint32(305))
			continue
		}
		assert.Assert(t, r.Priority >= 310 && r.Priority < 390 && r.Priority >= last)
		last = r.Priority
	}
	assert.Equal(t, len(state.Links), 501)
}

func BenchmarkGateway1000Nodes(b *testing.B) {
	in := large(1000)
	for b.Loop() {
		desired.Gateway(in)
	}
}

// Whatever the objects say, the outcome is a state that a kernel can take, the
// same one for the same objects, and a verdict on each of them.
func TestRandomObjects(t *testing.T) {
	for seed := range uint64(300) {
		check(t, seed)
	}
}

func FuzzDesired(f *testing.F) {
	f.Add(uint64(1))
	f.Fuzz(check)
}

func check(t *testing.T, seed uint64) {
	node, gateway := random(rand.New(rand.NewPCG(seed, 0)))
	state, results := desired.Node(node)
	assert.NilError(t, state.Validate(), "node, seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	shuffle(r, node.Routes)
	shuffle(r, node.Firewalls)
	shuffle(r, node.Tunnels)
	shuffle(r, node.Fabrics)
	again, resultsAgain := desired.Node(node)
	assert.DeepEqual(t, again, state, comparers)
	assert.DeepEqual(t, resultsAgain, results)

	state, results = desired.Gateway(gateway)
	assert.NilError(t, state.Validate(), "gateway, seed %d", seed)
	shuffle(r, gateway.Routes)
	shuffle(r, gateway.Firewalls)
	shuffle(r, gateway.Tunnels)
	shuffle(r, gateway.Nodes)
	again, resultsAgain = desired.Gateway(gateway)
	assert.DeepEqual(t, again, state, comparers)
	assert.DeepEqual(t, resultsAgain, results)
	for _, res := range results {
		assert.Assert(t, res.OK || res.Message != "", "%s: left out without a reason", res.Object)
	}
}

func pick[T any](r *rand.Rand, values ...T) T { return values[r.IntN(len(values))] }

// random returns inputs of which every field may be anything.
func random(r *rand.Rand) (desired.NodeInput, desired.GatewayInput) {
	randomAddr := func() netip.Addr {
		return pick(r, netip.Addr{}, addr("10.80.0.2"), addr("10.80.0.3"), addr("fd80::2"), addr("172.18.1.1"), addr("0.0.0.0"))
	}
	randomPrefix := func() netip.Prefix {
		return pick(r, netip.Prefix{}, prefix("10.80.0.2/32"), prefix("10.1.0.0/16"), prefix("10.1.2.0/24"), prefix("fd00::/48"), prefix("0.0.0.0/0"), prefix("::/0"))
	}
	dev := func() string {
		return pick(r, "", "eth0", "liqo-tunnel", "liqo.node-0", "liqo.node-1", "liqo.rome", "a-much-too-long-name", "a/b")
	}
	m := func(kind string, i int) cluster.Meta {
		m := meta(kind, pick(r, "liqo", "liqo-tenant-rome"), fmt.Sprintf("%s-%d", kind, i),
			routeCategory, pick(r, "fabric", "gateway"), routeSubcategory, pick(r, "", "fabric"), routeUnique, pick(r, "", "rome"),
			fwCategory, pick(r, "fabric", "gateway"), fwSubcategory, pick(r, "", "all-nodes", "all-gateways"))
		m.Created = epoch.Add(pick[time.Duration](r, 0, 1, 2))
		m.Deleting = r.IntN(10) == 0
		return m
	}
	position := func() string { return pick(r, "", "src", "dst", "in", "out") }
	matches := func() (out []cluster.Match) {
		for range r.IntN(3) {
			out = append(out, pick(r,
				cluster.Match{},
				cluster.Match{Negate: true, IP: cluster.AddrRange{From: randomAddr(), To: randomAddr()}, Position: position()},
				cluster.Match{IP: cluster.AddrRange{From: addr("10.0.0.0"), To: addr("10.0.0.255")}, Position: position()},
				cluster.Match{Ports: cluster.PortRange{From: uint16(r.IntN(9)), To: uint16(r.IntN(9))}, Position: position()},
				cluster.Match{Proto: pick(r, "tcp", "udp", "xxx")},
				cluster.Match{Dev: dev(), Position: position()}))
		}
		return out
	}

	var n desired.NodeInput
	n.Name, n.Underlay.MTU = "node-0", pick(r, 0, 40, 1280, 1500, 9000)
	for i := range r.IntN(4) {
		f := cluster.InternalFabric{Meta: m("InternalFabric", i), RemoteID: pick(r, "", "rome"), MTU: pick(r, 0, 1340, 2000), NodeInterface: dev(), GatewayIP: randomAddr(), InternalIP: randomAddr()}
		n.Fabrics = append(n.Fabrics, f)
		for j := range r.IntN(4) {
			n.Tunnels = append(n.Tunnels, cluster.GeneveTunnel{
				Meta: m("GeneveTunnel", 4*i+j), VNI: pick(r, 0, 1, uint32(i), 1<<24), Node: fmt.Sprintf("node-%d", j),
				Fabric: cluster.Ref{Namespace: f.Namespace, Name: pick(r, f.Name, "gone")},
			})
		}
	}
	for i := range r.IntN(4) {
		node := cluster.InternalNode{Meta: m("InternalNode", i), GatewayInterface: dev(), InternalIP: randomAddr(), Local: randomAddr(), Remote: randomAddr()}
		node.Name = fmt.Sprintf("node-%d", i)
		n.Nodes = append(n.Nodes, node)
	}
	for i := range r.IntN(8) {
		rc := cluster.RouteConfiguration{Meta: m("RouteConfiguration", i), Table: pick(r, "", "a", "b", fmt.Sprint(i))}
		for range r.IntN(3) {
			rule := cluster.RouteRule{Dst: randomPrefix(), Src: pick(r, netip.Prefix{}, randomPrefix()), IIF: dev(), Mark: pick[uint32](r, 0, 7), Priority: pick[uint32](r, 0, 0, 350)}
			for range r.IntN(3) {
				rule.Routes = append(rule.Routes, cluster.TableRoute{
					Dst: randomPrefix(), Src: pick(r, netip.Addr{}, randomAddr()), Via: pick(r, netip.Addr{}, randomAddr()),
					Dev: dev(), OnLink: r.IntN(3) == 0, Scope: pick(r, "", "", "link", "host", "what"),
				})
			}
			rc.Rules = append(rc.Rules, rule)
		}
		n.Routes = append(n.Routes, rc)
	}
	for i := range r.IntN(4) {
		fc := cluster.FirewallConfiguration{Meta: m("FirewallConfiguration", i), Table: pick(r, "", "a", "b", desired.ICMPErrorTable, desired.InternalOnlyTable, "a b"), Family: pick(r, "IPV4", "IPV4", "IPV6", "INET", "ARP", "BRIDGE", "NETDEV", "xxx")}
		for range r.IntN(3) {
			c := cluster.Chain{
				Name: pick(r, "", "a", "b", "digest"), Type: pick(r, "filter", "nat", "route", "xxx"),
				Hook: pick(r, "prerouting", "forward", "output", "postrouting", "ingress"), Policy: pick(r, "accept", "drop", "x"), Priority: pick[int32](r, -300, 0, 100),
			}
			for range r.IntN(3) {
				c.Filter = append(c.Filter, cluster.FilterRule{
					Name: pick(r, "", "a\"b", "x"), Match: matches(), Value: pick(r, "", "1", "x"),
					Action: pick(r, "accept", "drop", "reject", "notrack", "ctmark", "metamarkfromctmark", "tcpmssclamp", "x"),
				})
			}
			for range r.IntN(2) {
				c.NAT = append(c.NAT, cluster.NATRule{Match: matches(), Type: pick(r, "snat", "dnat", "masquerade", "x"), To: randomPrefix(), ToIsPrefix: r.IntN(2) == 0})
			}
			fc.Chains = append(fc.Chains, c)
		}
		n.Firewalls = append(n.Firewalls, fc)
	}

	for range r.IntN(6) { // of mapped addresses, some in contradiction
		fc := mappedIP(fmt.Sprintf("ip-%d", r.IntN(9)), pick(r, "10.70.0.1", "10.70.0.2", "10.70.0.3"), pick(r, "192.168.40.1", "192.168.40.2", "10.1.2.3"))
		if r.IntN(3) == 0 {
			fc = masqueradedIP(fmt.Sprintf("ip-%d", r.IntN(9)), pick(r, "192.168.40.1", "192.168.40.2"), "10.61.0.0/16", "10.71.0.0/16")
		}
		if slices.ContainsFunc(n.Firewalls, func(o cluster.FirewallConfiguration) bool { return o.Ref == fc.Ref }) {
			continue
		}
		fc.Created = epoch.Add(pick[time.Duration](r, 0, 1, 2))
		fc.Labels[fwCategory] = pick(r, fc.Labels[fwCategory], "fabric", "gateway")
		n.Firewalls = append(n.Firewalls, fc)
	}
	peer := key(2)
	g := desired.GatewayInput{
		Name: "rome", Namespace: "liqo-tenant-rome", RemoteID: "rome", Mode: pick(r, cluster.Server, cluster.Client), NodeName: "node-1",
		PodIP: randomAddr(), PublicKey: key(1), MTU: pick(r, 0, 1340, 9999), Underlay: n.Underlay,
		Fabrics: n.Fabrics, Tunnels: n.Tunnels, Nodes: n.Nodes, Routes: n.Routes, Firewalls: n.Firewalls,
	}
	for i := range r.IntN(3) {
		g.Configurations = append(g.Configurations, cluster.Configuration{
			Meta: m("Configuration", i), RemoteID: pick(r, "rome", "oslo"),
			Local:  pick(r, cluster.CIDRs{}, cluster.CIDRs{Pod: prefixes("10.0.0.0/16"), External: prefixes("10.70.0.0/16", "fd70::/64")}),
			Remote: pick(r, cluster.CIDRs{}, cluster.CIDRs{Pod: prefixes("10.0.0.0/16", "fd01::/48")}),
		})
		g.PublicKeys = append(g.PublicKeys, cluster.PublicKey{Meta: m("PublicKey", i), RemoteID: pick(r, "rome", "oslo"), Key: pick(r, nil, peer[:], peer[:5])})
	}
	return n, g
}
