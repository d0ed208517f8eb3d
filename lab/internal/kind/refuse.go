package kind

import (
	"fmt"
	"strings"

	"github.com/isthmus-net/isthmus/lab/internal/topology"
)

// Refuse says what a topology has that clusters of kind can't: a *Refused, or
// nil. Nothing has been made then.
func Refuse(t *topology.Topology) error {
	r := &Refused{Topology: t.Name}
	for i, c := range t.Clusters {
		r.cluster(c, topology.DefaultNodeCIDR(i) == c.NodeCIDR)
	}
	for _, p := range t.Peerings {
		r.peering(p)
	}
	if len(r.Problems) == 0 {
		return nil
	}
	return r
}

// Refused is the error for a topology that can't be made of clusters of kind.
type Refused struct {
	Topology string
	Problems []string // each names a field and says why
}

// Error has a line for each problem.
func (r *Refused) Error() string {
	return "topology " + r.Topology + " can't be made of clusters of kind:\n  " + strings.Join(r.Problems, "\n  ")
}

func (r *Refused) add(field, format string, args ...any) {
	r.Problems = append(r.Problems, field+": "+fmt.Sprintf(format, args...))
}

func (r *Refused) cluster(c topology.Cluster, defaultNetwork bool) {
	at := "clusters." + c.Name
	if len(c.Name) > maxName {
		r.add(at, "the names of containers are made of it, so it has at most %d characters", maxName)
	}
	for _, field := range []struct {
		name string
		has  bool
		why  string
	}{
		{"cni", c.CNI == topology.CNIIPPool, "kind's nodes have no IPAM of their own"},
		{"cni", c.CNI == topology.CNIVPC, "kind's nodes have one interface"},
		{"nodeCIDR", !defaultNetwork, "the engine gives the nodes of all clusters addresses of one network"},
		{"flat", c.Flat, "the engine gives nodes their addresses, and none of the podCIDR"},
		{"nat", c.NAT, "all nodes are on one network: no router is between the clusters"},
		{"wan", c.Impairment != topology.Impairment{}, "no router is between the clusters whose link could do it"},
		{"icmp", c.BlocksICMP, "no router is between the clusters that could drop it"},
		{"routedServices", c.RoutedServices, "no router is between the clusters that could have the route"},
		{"sourceCheck", c.SourceCheck, "the engine's network does not look at sources"},
		{"mtu", c.MTU != topology.DefaultMTU, "the MTU is that of the engine's network"},
		{"wanMTU", c.WANMTU != topology.DefaultMTU, "no router is between the clusters whose link could have it"},
		{"nodeGracePeriod", c.NodeGracePeriod != topology.DefaultNodeGracePeriod, "kind starts the controller manager with its own"},
		{"absent", len(c.Absent) > 0, "all nodes of a cluster are made at once"},
	} {
		if field.has {
			r.add(at+"."+field.name, "%s", field.why)
		}
	}
}

func (r *Refused) peering(p topology.Peering) {
	at := fmt.Sprintf("peerings.%s-%s.", p.Server, p.Client)
	switch p.Service {
	case topology.ServiceLoadBalancer:
		r.add(at+"service", "nobody gives Services of kind an address of a load balancer; NodePort works")
	case topology.ServiceClusterIP:
		r.add(at+"service", "no router is between the clusters that could lead to a ClusterIP; NodePort works")
	}
	if p.Forward != nil {
		r.add(at+"forward", "no router is between the clusters that could have the port")
	}
	if p.Gateways == topology.GatewaysNetNS {
		r.add(at+"gateways", "network namespaces of nodes are kept by paths of the host, which is a container here")
	}
}
