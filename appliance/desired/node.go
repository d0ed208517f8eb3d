package desired

import (
	"net/netip"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/netstate"
)

func compileNode(in NodeInput) (netstate.State, []Result) { return netstate.State{}, nil }

func compileGateway(in GatewayInput) (netstate.State, []Result) { return netstate.State{}, nil }

func underlayOf(n cluster.InternalNode, node string) netip.Addr {
	if n.Name == node {
		return n.Local
	}
	return n.Remote
}
