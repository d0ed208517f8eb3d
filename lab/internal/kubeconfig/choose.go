package kubeconfig

import (
	"cmp"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"

	"github.com/isthmus-net/isthmus/lab/internal/expect"
	"github.com/isthmus-net/isthmus/lab/internal/operand"
	"github.com/isthmus-net/isthmus/lab/internal/scenario"
	"github.com/isthmus-net/isthmus/lab/internal/topology"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// CannotRun says why a row of a scenario can't run in clusters that are there, or
// nothing: what its topology is about and they are not, or what one of its steps
// does, names or expects. overlay is that of the row; empty: any.
func CannotRun(s *scenario.Scenario, r scenario.Row, overlay string, have []Cluster) (lack scenario.Lack, ok bool) {
	if s.World != scenario.WorldAuto {
		return scenario.Lack{What: "the scenario asks for the " + s.World + " world"}, true
	}
	for _, why := range []string{differs(s.Topology, have), otherOverlay(s.Topology, overlay, have)} {
		if why != "" {
			return scenario.Lack{What: why}, true
		}
	}
	n := needed{topology: s.Topology, have: have, byICMP: map[string]bool{}}
	return s.FirstLack(r, n.action, n.expectation)
}

// CannotSabotage says why a sabotage can't be made in clusters that are there.
func CannotSabotage(s scenario.Sabotage, have []Cluster) (lack scenario.Lack, ok bool) {
	if s.Plant != nil {
		return scenario.Lack{What: "the world " + World + " enters no host", At: s.String()}, true
	}
	why := (&needed{have: have}).names(s.Withhold)
	return scenario.Lack{What: why, At: s.String()}, why != ""
}

func find(have []Cluster, name string) (Cluster, bool) {
	i := slices.IndexFunc(have, func(c Cluster) bool { return c.Name == name })
	if i < 0 {
		return Cluster{}, false
	}
	return have[i], true
}

// differs says what a topology has that the clusters have not.
func differs(t *topology.Topology, have []Cluster) string {
	if t.Install == topology.InstallNone {
		return "of topology " + t.Name + ", install: clusters that are there keep their installation"
	}
	for _, c := range t.Clusters {
		real, ok := find(have, c.Name)
		if !ok {
			return fmt.Sprintf("topology %s has a cluster %s, which no --kubeconfig names", t.Name, c.Name)
		}
		for _, field := range []struct {
			name string
			has  bool
		}{
			{"absent", len(c.Absent) > 0}, {"cni", c.CNI == topology.CNIIPPool || c.CNI == topology.CNIVPC}, {"flat", c.Flat}, {"icmp", c.BlocksICMP},
			{"mtu", c.MTU != topology.DefaultMTU}, {"nat", c.NAT}, {"nodeGracePeriod", c.NodeGracePeriod != topology.DefaultNodeGracePeriod},
			{"routedServices", c.RoutedServices}, {"rpFilter", c.RPFilter != topology.RPFilterLoose}, {"sourceCheck", c.SourceCheck},
			{"wan", c.Impairment != topology.Impairment{}}, {"wanMTU", c.WANMTU != topology.DefaultMTU},
		} {
			if field.has {
				return fmt.Sprintf("of topology %s, clusters.%s.%s: nobody knows whether clusters that are there are so", t.Name, c.Name, field.name)
			}
		}
		if len(real.Spec.Nodes) < c.Nodes {
			return fmt.Sprintf("topology %s has %d nodes in %s; %s has %d that are ready for pods", t.Name, c.Nodes, c.Name, real.Access, len(real.Spec.Nodes))
		}
	}
	for _, p := range t.Peerings {
		server, _ := find(have, p.Server)
		client, _ := find(have, p.Client)
		if p.Absent {
			return fmt.Sprintf("of topology %s, peerings: scenarios connect %s and %s; clusters that are there keep their peerings", t.Name, p.Server, p.Client)
		}
		if !slices.Contains(server.Peers, client.Spec.ID) || !slices.Contains(client.Peers, server.Spec.ID) {
			return fmt.Sprintf("%s (cluster ID %s) and %s (cluster ID %s) are not peered: each needs a Configuration of the other", p.Server, server.Spec.ID, p.Client, client.Spec.ID)
		}
	}
	return sameRanges(t, have)
}

// sameRanges says which ranges are the same in a topology, which is about that, and
// do not overlap in the clusters.
func sameRanges(t *topology.Topology, have []Cluster) string {
	for i, a := range t.Clusters {
		for _, b := range t.Clusters[:i] {
			realA, _ := find(have, a.Name)
			realB, _ := find(have, b.Name)
			for _, r := range []struct {
				what                       string
				inA, inB, reallyA, reallyB netip.Prefix
			}{
				{"pod", a.PodCIDR, b.PodCIDR, realA.Spec.PodCIDR, realB.Spec.PodCIDR},
				{"service", a.ServiceCIDR, b.ServiceCIDR, realA.Spec.ServiceCIDR, realB.Spec.ServiceCIDR},
			} {
				if r.inA.Overlaps(r.inB) && !r.reallyA.Overlaps(r.reallyB) {
					return fmt.Sprintf("of topology %s, clusters.%s.%sCIDR: it is %s's, too; here they are %s and %s", t.Name, a.Name, r.what, b.Name, r.reallyA, r.reallyB)
				}
			}
		}
	}
	return ""
}

// otherOverlay says why clusters are not what a row of that overlay wants.
func otherOverlay(t *topology.Topology, overlay string, have []Cluster) string {
	for _, c := range t.Clusters {
		if real, _ := find(have, c.Name); real.Overlay == "" {
			return fmt.Sprintf("no node of %s says which overlay it has: kubectl get internalnodes -o yaml", real.Access)
		}
	}
	if is := Overlay(t, have); overlay != "" && overlay != is {
		return fmt.Sprintf("the overlay of %s is %s", t.Clusters[0].Name, is)
	}
	return ""
}

// Overlay is the one whose rows run in clusters that are there: that of the topology's
// first cluster. Each cluster chooses its own, and its peers see nothing of it.
func Overlay(t *topology.Topology, have []Cluster) string {
	real, _ := find(have, t.Clusters[0].Name)
	return string(real.Overlay)
}

// Take gives a topology the nodes and the address ranges of the clusters that its
// rows run in.
func Take(t *topology.Topology, have []Cluster) {
	t.OfOthers = true
	for i := range t.Clusters {
		c := &t.Clusters[i]
		if real, ok := find(have, c.Name); ok {
			c.Nodes = len(real.Spec.Nodes)
			c.PodCIDR, c.ServiceCIDR, c.ExternalCIDR, c.InternalCIDR = real.Spec.PodCIDR, real.Spec.ServiceCIDR, real.Spec.ExternalCIDR, real.Spec.InternalCIDR
		}
	}
}

// needed walks through a row and says what of it this world has not.
type needed struct {
	topology *topology.Topology
	have     []Cluster
	byICMP   map[string]bool // ends that an echo has reached last, by their host's name
}

const (
	noCapture = "packets are not captured in the world " + World
	noChange  = "the world " + World + " changes nothing of clusters that it has not made"
	noHost    = "the world " + World + " enters no host and no pod that is not the lab's"
)

// harmless tells whether a row may create objects of a kind: those that users of a
// cluster create every day, and that concern nobody else.
func harmless(kind string) bool {
	return slices.Contains([]string{"Service", "EndpointSlice", "ConfigMap", "IP"}, kind)
}

// kindOf finds the kinds in YAML documents.
var kindOf = regexp.MustCompile(`(?m)\bkind: *(\w+)`)

func (n *needed) action(a scenario.Action) string {
	switch a := a.(type) {
	case *scenario.Flow:
		return cmp.Or(n.sends(a.From.Operand), n.operand(a.To.Operand))
	case *scenario.Apply:
		for _, m := range kindOf.FindAllStringSubmatch(a.Objects, -1) {
			if !harmless(m[1]) {
				return noChange + ", such as a " + m[1]
			}
		}
		return cmp.Or(n.text(a.Objects), n.names(a.Objects))
	case *scenario.Delete:
		if kind, _, _ := strings.Cut(a.Object, "/"); !slices.Contains([]string{"service", "endpointslice", "configmap", "ip"}, kind) {
			return noChange
		}
		return ""
	case *scenario.Exec:
		return noHost
	}
	return noChange
}

func (n *needed) expectation(e expect.Expectation) string {
	switch e := e.(type) {
	case *expect.Reach:
		end := e.To
		if e.AnsweredBy.Kind != "" {
			end = e.AnsweredBy
		}
		n.byICMP[end.HostName(n.topology)] = e.Proto == "icmp"
		return cmp.Or(n.sends(e.From.Operand), n.operand(e.To.Operand), n.operand(e.AnsweredBy.Operand))
	case *expect.Unreachable:
		return cmp.Or(n.sends(e.From.Operand), n.operand(e.To.Operand))
	case *expect.MTU:
		return cmp.Or(n.sends(e.From.Operand), n.operand(e.To.Operand))
	case *expect.Flow:
		return ""
	case *expect.Source:
		if n.byICMP[e.SeenBy.HostName(n.topology)] {
			return "an echo's source is seen in captures only; " + noCapture
		}
		return cmp.Or(n.operand(e.SeenBy.Operand), n.operand(e.Is.Operand), n.remapped(e))
	case *expect.Kubectl:
		if e.Run != "" {
			return noChange
		}
		return cmp.Or(n.text(e.String()), n.names(e.Get), n.names(e.Namespace))
	case *expect.Event:
		return cmp.Or(n.text(e.String()), n.names(e.Of), n.names(e.Namespace))
	case *expect.Path, *expect.Never, *expect.MSS:
		return noCapture
	case *expect.Conntrack, *expect.Output, *expect.Log:
		return noHost
	}
	return "the world " + World + " has no way to see that"
}

// remapped says why a pod can't be seen with its own address in the other cluster.
func (n *needed) remapped(e *expect.Source) string {
	is, by := e.Is.Operand, e.SeenBy.Operand
	if is.Kind != operand.Pod || is.RemappedIn != "" || is.Cluster == by.Cluster {
		return ""
	}
	a, _ := find(n.have, is.Cluster)
	b, _ := find(n.have, by.Cluster)
	if a.Spec.PodCIDR.Overlaps(b.Spec.PodCIDR) {
		return fmt.Sprintf("pods of %s are seen with other addresses in %s, since the pod CIDRs overlap: %s and %s", is.Cluster, by.Cluster, a.Spec.PodCIDR, b.Spec.PodCIDR)
	}
	return ""
}

// sends says why nothing is sent from an operand.
func (n *needed) sends(o operand.Operand) string {
	switch o.Kind {
	case operand.Pod, operand.Node, operand.GatewayNode:
		return n.operand(o)
	}
	return noHost
}

// operand says why an operand stands for nothing.
func (n *needed) operand(o operand.Operand) string {
	switch o.Kind {
	case operand.Router, operand.WAN, operand.Outside, operand.ControlPlane, operand.Ingress:
		return "the world " + World + " knows of no routers, control planes, load balancers and hosts outside of the clusters"
	case operand.External:
		return n.operand(*o.Inner)
	case operand.GatewayNode:
		return n.gatewayNode(o)
	}
	return ""
}

// gatewayNode says why the node of a gateway has no pod of the lab. Another node than that
// is always found.
func (n *needed) gatewayNode(o operand.Operand) string {
	c, _ := find(n.have, o.Cluster)
	peer, _ := find(n.have, o.Peer)
	at, known := c.Gateways[peer.Spec.ID]
	if !known || o.Other || slices.ContainsFunc(c.Spec.Nodes, func(s world.NodeSpec) bool { return s.ObjectName() == at }) {
		return ""
	}
	return fmt.Sprintf("the gateway of %s for %s runs on node %s, which has a taint, is cordoned or is not ready, so that it takes no pods of the lab: %s describe node %s", o.Cluster, o.Peer, at, c.kubectl(), at)
}

// text says which name in a text stands for nothing.
func (n *needed) text(text string) string {
	for _, o := range expect.Operands(text, n.topology) {
		if why := n.operand(o); why != "" {
			return o.String() + ": " + why
		}
	}
	return ""
}

// names says which name of an object in a text is made of the name of a cluster that
// has another ID.
func (n *needed) names(text string) string {
	for _, c := range n.have {
		if c.Spec.ID != c.Name && objectOf(c.Name).MatchString(text) {
			return fmt.Sprintf("names of objects have the cluster ID in them, and that of %s is %s", c.Name, c.Spec.ID)
		}
	}
	return ""
}

// objectOf finds names of objects that are made of a cluster ID: liqo-tenant-rome,
// rome-gw-ext, configuration/rome.
func objectOf(id string) *regexp.Regexp {
	return regexp.MustCompile(`(^|[\s/])` + regexp.QuoteMeta(id) + `(-|$)|-` + regexp.QuoteMeta(id) + `\b`)
}
