package desired

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// mappedHostsTable is the name that the number of the table is derived from. No
// table of the API can be called so.
const mappedHostsTable = "\x00hosts with mapped addresses"

// A mappedTarget is what an object translates a mapped address to.
type mappedTarget struct {
	dst    netip.Prefix
	object cluster.Meta
}

// mapTo notes what the table of a mapped address translates it to.
func (h *host) mapTo(object cluster.Meta, t netstate.Table) {
	for _, c := range t.Chains {
		for _, r := range c.Rules {
			if r.Action.Kind != netstate.DNAT {
				continue
			}
			dst := hostPrefix(r.Action.To.Addr())
			if r.Action.Prefix {
				dst = r.Action.To.Masked()
			}
			h.mapped = append(h.mapped, mappedTarget{dst, object})
		}
	}
}

// mappedHosts leads what comes out of the tunnel for a mapped address to the
// host that has it: by the gateway's own node, which knows how to get out of
// the cluster. What other routes out of the tunnel know, a pod for one, they
// lead there: they are looked up before.
//
//	ip rule add iif liqo-tunnel priority 388 lookup 90
//	ip route add 192.168.40.10 via 10.80.0.4 dev liqo.node-1 onlink table 90
//
// Where the way to the node is that of the main table, the pod's or the
// namespace's default route, these hosts, and no others, are looked up there:
//
//	ip route add throw 192.168.40.10 table 90
//	ip route add unreachable default table 90
//	ip rule add iif liqo-tunnel priority 389 lookup main
func (h *host) mappedHosts(in GatewayInput) {
	known := h.knownFromTunnel()
	for _, p := range in.fabric().RemoteCIDRs {
		known[p.Masked()] = true // behind the tunnel itself: nothing goes back there
	}
	byMain := in.Overlay() == cluster.OverlayVXLAN || in.HostInterface != ""
	families := map[bool]bool{} // IPv6 or not
	seen := map[netip.Prefix]bool{}
	for _, t := range h.mapped {
		if known.contains(t.dst) {
			continue
		}
		route := netstate.Route{Dst: t.dst, Table: h.mappedTable, Type: netstate.Throw}
		if !byMain {
			var problem string
			if route, problem = h.toOwnNode(in, t.dst); problem != "" {
				h.impair(t.object, problem)
			}
			route.Table = h.mappedTable
		}
		if !seen[t.dst] {
			seen[t.dst] = true
			h.state.Routes = append(h.state.Routes, route)
			families[t.dst.Addr().Is6()] = true
		}
	}
	for _, v6 := range []bool{false, true} {
		if !families[v6] {
			continue
		}
		rule := netstate.Rule{Priority: h.base + mappedHosts, IPv6: v6, IIF: TunnelInterface, Table: h.mappedTable}
		h.state.Rules = append(h.state.Rules, rule)
		if byMain {
			rule.Priority, rule.Table = h.base+mappedToMain, TableMain
			h.state.Rules = append(h.state.Rules, rule)
			h.state.Routes = append(h.state.Routes, netstate.Route{Dst: anywhere(v6), Table: h.mappedTable, Type: netstate.Unreachable})
		}
	}
}

// toOwnNode returns the route by the link to the node that the gateway runs on.
// Without one, packets are refused, and the text says why.
func (h *host) toOwnNode(in GatewayInput, dst netip.Prefix) (route netstate.Route, problem string) {
	i := slices.IndexFunc(in.Nodes, func(n cluster.InternalNode) bool { return n.Name == in.NodeName && !n.Deleting })
	if i < 0 {
		problem = fmt.Sprintf("there is no InternalNode %s, the node of the gateway", in.NodeName)
	} else {
		n := in.Nodes[i]
		way := cluster.TableRoute{Dst: dst, Via: n.InternalIP, Dev: n.GatewayInterface, OnLink: true}
		switch problem = h.noWay(way); {
		case problem != "":
		case !n.InternalIP.IsValid() || n.GatewayInterface == "":
			problem = fmt.Sprintf("%s, the node of the gateway, has no address in the internal CIDR, or no link, yet", n.Ref)
		default:
			if route, problem = h.compileRoute(way); problem == "" {
				return route, ""
			}
			problem = fmt.Sprintf("by %s%s", n.Ref, problem)
		}
	}
	return netstate.Route{Dst: dst, Type: netstate.Unreachable}, fmt.Sprintf("no way to %s: %s", dst.Addr(), problem)
}

// networks tell quickly which of them contains another one.
type networks map[netip.Prefix]bool

func (n networks) contains(p netip.Prefix) bool {
	_, ok := longest(n, p)
	return ok
}

// knownFromTunnel returns where routes lead that whatever comes out of the
// tunnel is looked up in.
func (h *host) knownFromTunnel() networks {
	known := networks{}
	within := map[uint32][]netip.Prefix{} // by table: what its rules select, an invalid prefix is all
	for _, r := range h.state.Rules {
		switch {
		case r.IIF != TunnelInterface || r.Src.IsValid() || r.Mark != 0 || r.OIF != "" || r.Unreachable:
		case r.Table == TableMain:
			if r.Dst.IsValid() {
				known[r.Dst.Masked()] = true
			}
		default:
			within[r.Table] = append(within[r.Table], r.Dst)
		}
	}
	for _, route := range h.state.Routes {
		if slices.ContainsFunc(within[route.Table], func(dst netip.Prefix) bool {
			return !dst.IsValid() || dst.Contains(route.Dst.Addr()) && dst.Bits() <= route.Dst.Bits()
		}) {
			known[route.Dst] = true
		}
	}
	return known
}
