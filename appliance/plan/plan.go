package plan

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
)

// Cluster returns what must be so in the cluster of s.
func Cluster(s cluster.Snapshot) Result {
	p := newPlanner(s)
	p.readProblems()
	p.tunnelEndpoints() // which are sound
	p.configurations()  // which are sound
	p.networks()        // all CIDRs
	p.unknownSources()  // of peers, as other peers see them
	p.addresses()       // of IPs
	p.chooseOverlay()   // between nodes and gateways
	p.gateways()        // which are sound, and their workloads
	p.podsOutside()     // of the podCIDRs of their nodes
	p.internalCIDR()    // addresses, interface names and VNIs
	p.nodes()
	p.annotateDaemons()
	p.fabrics()
	p.translations() // of addresses
	p.checkMarks()
	p.ipMappings() // to those of IPs
	p.ipServices()
	p.namespaces()
	p.publicKeys()
	p.fromTunnelEndpoints() // what they stand for
	p.hostReports()
	p.hostEvents()
	p.foreignClusters()
	p.writeStatuses()
	p.writeEvents()
	return p.sorted()
}

// A planner computes one Result.
type planner struct {
	s   cluster.Snapshot
	out Result

	verdicts map[objectKey]*verdict
	invalid  map[objectKey][]cluster.InvalidError
	notes    map[objectKey][]cluster.InvalidError

	peerings    []*peering         // by remote ID
	allGateways []*cluster.Gateway // oldest first
	// carries holds the peering that each gateway carries, gatewayNames who
	// has the name of a Deployment.
	carries      map[objectKey]*peering
	gatewayNames map[objectKey]*cluster.Gateway
	rolling      map[objectKey]step            // of gateways that are planned
	leaving      []cluster.Pod                 // that are being deleted
	keys         map[string]*cluster.PublicKey // of peers, by remote ID
	// endpoints are the TunnelEndpoints that stand for a peering, by remote ID.
	// Of what was made from them, superseded has what nobody needs any more.
	endpoints  map[string]*cluster.TunnelEndpoint
	superseded map[objectKey]bool
	local      localNetworks
	peers      []*peerNetwork // of all peerings
	needs      []need         // of this cluster's hosts, by address
	// ips are those that stay, oldest first. Of them, ownIPs are planned.
	ips    []*address
	ownIPs map[objectKey]netip.Addr
	// node and fabric hold what was given from the internal CIDR.
	node, fabric map[string]netip.Addr // by InternalNode's name, and by peering
	nodeIface    map[string]string     // names on gateways, by InternalNode's name
	fabricIface  map[string]string     // names on nodes, by remote ID
	vni          map[tunnelKey]uint32

	// hostNumbers are those of gateways in namespaces of nodes, by the UID of
	// the gateway, and hostTaken all that somebody has.
	hostNumbers map[string]uint32
	hostTaken   map[uint32]bool

	overlay   cluster.Overlay         // empty: to be decided
	reachable map[string]bool         // nodes that the VXLAN overlay leads to
	outside   map[string][]netip.Addr // pods outside the podCIDRs of their node, by node
}

// newPlanner returns one that has computed nothing yet.
func newPlanner(s cluster.Snapshot) *planner {
	p := &planner{
		s:        normalized(s),
		verdicts: map[objectKey]*verdict{},
		invalid:  map[objectKey][]cluster.InvalidError{},
		notes:    map[objectKey][]cluster.InvalidError{},

		superseded: map[objectKey]bool{},
		ownIPs:     map[objectKey]netip.Addr{},
		rolling:    map[objectKey]step{},
	}
	for _, x := range s.Pods {
		if x.Deleting {
			p.leaving = append(p.leaving, x)
		}
	}
	return p
}

// A peering is what is known about one remote cluster.
type peering struct {
	id      string
	config  *cluster.Configuration // nil: none is sound
	remote  cluster.CIDRs          // the networks of config and those that are followed
	remap   cluster.CIDRs          // as we call the networks of remote
	ready   bool                   // remap is complete
	follow  followed               // what has come of config.Follow
	gateway *cluster.Gateway       // as it is planned or kept; nil: there is none
	pod     *cluster.Pod           // that carries the traffic; nil: none
}

// remapped returns the networks by which this cluster reaches the peer's.
func (p *peering) remapped() []netip.Prefix { return p.remap.All() }

type objectKey struct{ kind, namespace, name string }

type tunnelKey struct{ namespace, fabric, node string }

func keyOf(r cluster.Ref) objectKey { return objectKey{r.Kind, r.Namespace, r.Name} }

// normalized returns s with all its slices sorted and without what is being
// deleted: objects in namespaces that are being deleted, too.
func normalized(s cluster.Snapshot) cluster.Snapshot {
	gone := map[string]bool{}
	for _, ns := range s.Namespaces {
		if ns.Deleting {
			gone[ns.Name] = true
		}
	}
	keep := func(m cluster.Meta) bool { return !m.Deleting && !gone[m.Namespace] }

	s.Nodes = living(s.Nodes, keep, func(x cluster.Node) cluster.Meta { return x.Meta })
	s.Pods = living(s.Pods, keep, func(x cluster.Pod) cluster.Meta { return x.Meta })
	s.Pulls = living(s.Pulls, keep, func(x cluster.Pull) cluster.Meta { return x.Meta })
	s.NodeDaemons = living(s.NodeDaemons, keep, func(x cluster.Pod) cluster.Meta { return x.Meta })
	s.Services = living(s.Services, keep, func(x cluster.Service) cluster.Meta { return x.Meta })
	s.Deployments = living(s.Deployments, keep, func(x cluster.Deployment) cluster.Meta { return x.Meta })
	s.Secrets = living(s.Secrets, keep, func(x cluster.KeySecret) cluster.Meta { return x.Meta })
	s.Namespaces = living(s.Namespaces, keep, func(x cluster.Namespace) cluster.Meta { return x.Meta })
	s.Configurations = living(s.Configurations, keep, func(x cluster.Configuration) cluster.Meta { return x.Meta })
	s.Connections = living(s.Connections, keep, func(x cluster.Connection) cluster.Meta { return x.Meta })
	s.GatewayServers = living(s.GatewayServers, keep, func(x cluster.Gateway) cluster.Meta { return x.Meta })
	s.GatewayClients = living(s.GatewayClients, keep, func(x cluster.Gateway) cluster.Meta { return x.Meta })
	s.ServerTemplates = living(s.ServerTemplates, keep, func(x cluster.Template) cluster.Meta { return x.Meta })
	s.ClientTemplates = living(s.ClientTemplates, keep, func(x cluster.Template) cluster.Meta { return x.Meta })
	s.PublicKeys = living(s.PublicKeys, keep, func(x cluster.PublicKey) cluster.Meta { return x.Meta })
	s.Routes = living(s.Routes, keep, func(x cluster.RouteConfiguration) cluster.Meta { return x.Meta })
	s.Firewalls = living(s.Firewalls, keep, func(x cluster.FirewallConfiguration) cluster.Meta { return x.Meta })
	s.Reports = living(s.Reports, keep, func(x cluster.GatewayReport) cluster.Meta { return x.Meta })
	s.Networks = living(s.Networks, keep, func(x cluster.Network) cluster.Meta { return x.Meta })
	s.IPs = living(s.IPs, keep, func(x cluster.IP) cluster.Meta { return x.Meta })
	s.ForeignClusters = living(s.ForeignClusters, keep, func(x cluster.ForeignCluster) cluster.Meta { return x.Meta })
	s.TunnelEndpoints = living(s.TunnelEndpoints, keep, func(x cluster.TunnelEndpoint) cluster.Meta { return x.Meta })

	// Of these, what is going away still holds its numbers.
	all := func(cluster.Meta) bool { return true }
	s.Fabrics = living(s.Fabrics, all, func(x cluster.InternalFabric) cluster.Meta { return x.Meta })
	s.InternalNodes = living(s.InternalNodes, all, func(x cluster.InternalNode) cluster.Meta { return x.Meta })
	s.Tunnels = living(s.Tunnels, all, func(x cluster.GeneveTunnel) cluster.Meta { return x.Meta })

	s.Invalid = slices.Clone(s.Invalid)
	slices.SortStableFunc(s.Invalid, compareInvalid)
	s.Notes = slices.Clone(s.Notes)
	slices.SortStableFunc(s.Notes, compareInvalid)
	return s
}

// living returns those of list that are to be kept, sorted by namespace and
// name.
func living[T any](list []T, keep func(cluster.Meta) bool, meta func(T) cluster.Meta) []T {
	out := make([]T, 0, len(list))
	for _, x := range list {
		if keep(meta(x)) {
			out = append(out, x)
		}
	}
	slices.SortFunc(out, func(a, b T) int { return compareRef(meta(a).Ref, meta(b).Ref) })
	return out
}

func compareRef(a, b cluster.Ref) int {
	return cmp.Or(strings.Compare(a.Kind, b.Kind), strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name))
}

func compareInvalid(a, b cluster.InvalidError) int {
	return cmp.Or(compareRef(a.Object, b.Object), strings.Compare(a.Field, b.Field),
		strings.Compare(a.Value, b.Value), strings.Compare(a.Reason, b.Reason))
}

// compareAge orders objects by age: who was first has the better right.
func compareAge(a, b cluster.Meta) int {
	return cmp.Or(a.Created.Compare(b.Created), strings.Compare(a.Namespace, b.Namespace),
		strings.Compare(a.Name, b.Name), strings.Compare(a.Kind, b.Kind))
}

// again has another plan made by then.
func (p *planner) again(then time.Time) {
	if p.out.Due.IsZero() || then.Before(p.out.Due) {
		p.out.Due = then
	}
}

// add plans an object.
func (p *planner) add(o Object) {
	labels := o.GetLabels()
	if labels == nil {
		labels = map[string]string{}
	}
	labels[v1beta1.LabelManagedBy] = v1beta1.ManagedBy
	o.SetLabels(labels)
	p.out.Objects = append(p.out.Objects, o)
}

// sorted returns what was computed, in order.
func (p *planner) sorted() Result {
	object := func(a, b Object) int {
		return cmp.Or(strings.Compare(a.GetObjectKind().GroupVersionKind().Kind, b.GetObjectKind().GroupVersionKind().Kind),
			strings.Compare(a.GetNamespace(), b.GetNamespace()), strings.Compare(a.GetName(), b.GetName()))
	}
	slices.SortFunc(p.out.Objects, object)
	slices.SortFunc(p.out.Statuses, object)
	slices.SortFunc(p.out.Applies, object)
	slices.SortFunc(p.out.Pulls, func(a, b *corev1.Pod) int { return object(a, b) })
	slices.SortFunc(p.out.Keep, compareRef)
	slices.SortFunc(p.out.Keys, func(a, b KeySecret) int {
		return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name))
	})
	slices.SortFunc(p.out.Events, func(a, b Event) int {
		return cmp.Or(compareRef(a.Object, b.Object), strings.Compare(a.Reason, b.Reason), strings.Compare(a.Message, b.Message))
	})
	return p.out
}
