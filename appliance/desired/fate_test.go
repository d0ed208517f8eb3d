package desired_test

import (
	"cmp"
	"net/netip"
	"slices"
	"testing"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/appliance/desired"
	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// A packet is one as it comes in by a link, or leaves a program of the host:
// then iif is lo, as rules call it.
type packet struct {
	iif      string
	src, dst string
}

// fate returns what a host does with a packet: the rule of a raw table that
// drops it, "local", "unreachable", "main" when no rule of ours is for it, or
// the link that it leaves by.
func fate(s netstate.State, p packet) string {
	for _, t := range s.Tables {
		for _, c := range t.Chains {
			if c.Hook != "prerouting" || c.Type != "filter" || p.iif == "lo" {
				continue
			}
			for _, r := range c.Rules {
				if r.Action.Kind == netstate.Drop && matches(r, p) {
					return "dropped by " + r.Name
				}
			}
		}
	}
	if slices.ContainsFunc(s.Addresses, func(a netstate.Address) bool { return a.Prefix.Addr() == addr(p.dst) }) {
		return "local"
	}
	return lookup(s, p)
}

// matches reports whether a rule that looks at devices and addresses is for a
// packet.
func matches(r netstate.FirewallRule, p packet) bool {
	for _, m := range r.Matches {
		var is bool
		switch m.Dir {
		case "in":
			is = m.Dev == p.iif
		case "src", "dst":
			a := addr(p.dst)
			if m.Dir == "src" {
				a = addr(p.src)
			}
			is = a.BitLen() == m.Addr.From.BitLen() && m.Addr.From.Compare(a) <= 0 && a.Compare(m.Addr.To) <= 0
		}
		if is == m.Negate {
			return false
		}
	}
	return true
}

// lookup is what the kernel's rules say about a packet, after its local table.
func lookup(s netstate.State, p packet) string {
	dst := addr(p.dst)
	in := func(want netip.Prefix, a string) bool { return !want.IsValid() || want.Contains(addr(a)) }
	rules := slices.Clone(s.Rules)
	slices.SortStableFunc(rules, func(a, b netstate.Rule) int { return cmp.Compare(a.Priority, b.Priority) })
	skipTo := uint32(0)
	for _, r := range rules {
		// No packet here has a mark.
		if r.Priority < skipTo || r.Nop || r.Is6() != dst.Is6() || r.Mark != 0 || r.Not == ((r.IIF == "" || r.IIF == p.iif) && in(r.Dst, p.dst) && in(r.Src, p.src)) {
			continue
		}
		if r.Unreachable {
			return "unreachable"
		}
		if r.Goto != 0 {
			skipTo = r.Goto
			continue
		}
		if r.Table == desired.TableMain {
			return "main"
		}
		var best netstate.Route
		for _, route := range s.Routes {
			if route.Table == r.Table && route.Dst.Contains(dst) && (!best.Dst.IsValid() || route.Dst.Bits() > best.Dst.Bits()) {
				best = route
			}
		}
		switch {
		case best.Type == netstate.Unreachable:
			return "unreachable"
		case best.Dev != "":
			return best.Dev
		}
	}
	return "main"
}

// The peer reaches pods and nothing else; nodes and the gateway reach each
// other; and whatever goes out to the peer has a way back, or the reverse-path
// filter would drop it.
func TestGatewayFate(t *testing.T) {
	state, _ := desired.Gateway(romeGateway())
	const peer, tunnel = "10.127.128.7", desired.TunnelInterface // as this cluster calls it
	for _, tt := range []struct {
		name string
		packet
		want string
	}{
		{"a pod", packet{tunnel, peer, "10.127.65.7"}, "liqo.node-1"},
		{"a pod of another node", packet{tunnel, peer, "10.127.66.7"}, "liqo.node-2"},
		{"a pod out of its node's range", packet{tunnel, peer, "10.127.66.200"}, "liqo.node-1"},
		{"a pod of a node without a link", packet{tunnel, peer, "10.127.67.7"}, "unreachable"},
		{"a node", packet{tunnel, peer, "10.80.0.2"}, "dropped by internal-cidr"},
		{"another node", packet{tunnel, peer, "10.80.0.3"}, "dropped by internal-cidr"},
		{"a node without a link", packet{tunnel, peer, "10.80.0.4"}, "dropped by internal-cidr"},
		{"the gateway, as its nodes call it", packet{tunnel, peer, "10.80.0.5"}, "dropped by internal-cidr"},
		{"a node, from the other end of the tunnel", packet{tunnel, "169.254.18.2", "10.80.0.2"}, "dropped by internal-cidr"},
		{"the internal CIDR, but nobody", packet{tunnel, peer, "10.80.0.1"}, "unreachable"},
		{"a node, below the tunnels", packet{tunnel, peer, "172.18.1.11"}, "unreachable"},
		{"a Service", packet{tunnel, peer, "10.96.0.1"}, "unreachable"},
		{"the other end of the tunnel", packet{tunnel, "169.254.18.2", "169.254.18.1"}, "local"},

		{"the gateway to a node", packet{"lo", "10.80.0.5", "10.80.0.2"}, "liqo.node-1"},
		{"the gateway to another node", packet{"lo", "10.80.0.5", "10.80.0.3"}, "liqo.node-2"},
		{"a node to the gateway", packet{"liqo.node-1", "10.80.0.2", "10.80.0.5"}, "local"},
		{"a pod to the peer", packet{"liqo.node-1", "10.127.65.7", peer}, tunnel},
		{"a node's ICMP error to the peer", packet{"liqo.node-2", "10.80.0.3", peer}, tunnel},
		{"a node to a Service", packet{"liqo.node-1", "10.127.65.7", "10.96.0.1"}, "unreachable"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			out := fate(state, tt.packet)
			assert.Equal(t, out, tt.want)
			if out == tunnel || out == "local" && tt.iif != tunnel {
				// As fib_validate_source asks: where would the answer go?
				back := packet{out, tt.dst, tt.src}
				if out == "local" {
					back.iif = "lo"
				}
				assert.Equal(t, lookup(state, back), tt.iif)
			}
		})
	}
}

// Neighbouring addresses are one range, whichever node has them; what lies
// between two ranges is not ours to drop.
func TestInternalOnly(t *testing.T) {
	for _, tt := range []struct {
		name      string
		addresses []string
		want      []string
	}{
		{"nobody", nil, nil},
		{"one", []string{"10.80.0.7"}, []string{"10.80.0.7"}},
		{"a row in any order", []string{"10.80.0.3", "10.80.0.1", "10.80.0.2"}, []string{"10.80.0.1-10.80.0.3"}},
		{"across a byte", []string{"10.80.0.255", "10.80.1.0"}, []string{"10.80.0.255-10.80.1.0"}},
		{"a gap", []string{"10.80.0.1", "10.80.0.2", "10.80.0.4"}, []string{"10.80.0.1-10.80.0.2", "10.80.0.4"}},
		{"twice", []string{"10.80.0.1", "10.80.0.1"}, []string{"10.80.0.1"}},
		{"two families", []string{"255.255.255.255", "fd80::1", "fd80::2"}, []string{"255.255.255.255", "fd80::1-fd80::2"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			in := desired.GatewayInput{Name: "rome", Namespace: "liqo-tenant-rome", RemoteID: "rome", Mode: "server", PublicKey: key(1)}
			for _, a := range tt.addresses {
				in.Nodes = append(in.Nodes, internalNode("node-"+a, "liqo.node", a, "", ""))
			}
			state, _ := desired.Gateway(in)
			assert.NilError(t, state.Validate())
			var got []string
			if table := tableOf(state, desired.InternalOnlyTable); table != nil {
				for _, r := range table.Chains[0].Rules {
					assert.Assert(t, r.Counter)
					assert.Equal(t, r.Matches[0].Dev, desired.TunnelInterface)
					got = append(got, r.Matches[1].Addr.String())
				}
			}
			assert.DeepEqual(t, got, tt.want)
		})
	}
}

// What is for a peer never leaves by the main table because its link is not
// there yet: it would be readable on the way to wherever that leads.
func TestNothingLeavesPastTheTunnel(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(*desired.NodeInput)
	}{
		{"the routes are known before all else", func(in *desired.NodeInput) { in.Tunnels, in.Fabrics = nil, nil }},
		{"the tunnel is not planned yet", func(in *desired.NodeInput) { in.Tunnels = nil }},
		{"the gateway has no address", func(in *desired.NodeInput) { in.Fabrics[0].GatewayIP = netip.Addr{} }},
		{"the node has no address", func(in *desired.NodeInput) { in.Nodes[0].InternalIP = netip.Addr{} }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			in := milanNode()
			tt.change(&in)
			state, results := desired.Node(in)
			assert.NilError(t, state.Validate())
			assert.Equal(t, fate(state, packet{"cni0", "10.127.65.7", "10.127.128.7"}), "unreachable")
			i := slices.IndexFunc(results, func(r desired.Result) bool { return r.Object.Name == "rome-node-gw" })
			assert.Assert(t, !results[i].OK)
		})
	}
}
