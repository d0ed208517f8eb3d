package daemon

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/isthmus-net/isthmus/appliance/cluster"
)

// detectInterval is how often the routes to the gateways are looked at. They
// belong to the CNI, so the kernel's change events, which are about what is
// ours, do not tell of them; one lookup per gateway takes microseconds.
const detectInterval = time.Second

// sources is what a node knows of its own addresses: the source of a packet
// to a gateway on this node, and to one elsewhere, as "ip route get" prints
// it. Geneve needs both ends to agree on the pair of addresses.
type sources struct {
	local, remote netip.Addr
	problems      []string // why one of them is missing, or what is odd
}

func (s sources) equal(o sources) bool {
	return s.local == o.local && s.remote == o.remote && slices.Equal(s.problems, o.problems)
}

// detect asks the kernel for the way to every gateway. An address that no
// gateway confirms is not known: a stale one would be worse. Where no gateway is there,
// one that has ended confirms its side's address until it is back, so that links stay
// as they are while the only gateway is replaced.
//
// InternalNode has one address for all gateways of a side. Where the routes
// to several gateways have different sources, the one of the first gateway by
// name wins, and a problem names the others.
func detect(r router, node string, gateways []cluster.InternalFabric) sources {
	var s sources
	gateways = slices.Clone(gateways)
	slices.SortFunc(gateways, func(a, b cluster.InternalFabric) int {
		switch {
		case a.GatewayGone == b.GatewayGone:
			return strings.Compare(a.Namespace+"/"+a.Name, b.Namespace+"/"+b.Name)
		case a.GatewayGone: // after those that are there
			return 1
		}
		return -1
	})
	var firstLocal, firstRemote string
	for _, g := range gateways {
		if !g.GatewayIP.IsValid() || g.Deleting {
			continue
		}
		name, dst := g.Namespace+"/"+g.Name, g.GatewayIP
		if g.GatewayNode == "" {
			s.problems = append(s.problems, fmt.Sprintf("InternalFabric %s says that its gateway is %s, but not on which node: bring the CustomResourceDefinitions up to date, which may not know its field gatewayNode",
				name, dst))
			continue
		}
		side, addr, first := "remote", &s.remote, &firstRemote
		if g.GatewayNode == node {
			side, addr, first = "local", &s.local, &firstLocal
		}
		path, err := r.RouteTo(dst)
		switch {
		case g.GatewayGone:
			if err == nil && path.Src.IsValid() && !addr.IsValid() {
				*addr = path.Src.Unmap()
			}
		case err != nil:
			s.problems = append(s.problems, fmt.Sprintf("route to the gateway of InternalFabric %s (%s): %v", name, dst, err))
		case !path.Src.IsValid():
			s.problems = append(s.problems, fmt.Sprintf("route to the gateway of InternalFabric %s (%s) has no source address: give the link %s an address, or the route a src",
				name, dst, path.Dev))
		case !addr.IsValid():
			*addr, *first = path.Src.Unmap(), name
		case *addr != path.Src.Unmap():
			s.problems = append(s.problems, fmt.Sprintf("%s: the gateway of InternalFabric %s is reached from %s, but that of %s from %s, and an InternalNode has one %s address: give the routes to both the same src",
				side, *first, *addr, name, path.Src, side))
		}
	}
	return s
}
