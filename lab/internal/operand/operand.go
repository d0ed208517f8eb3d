// Package operand reads the names by which scenarios speak of hosts, pods and
// their addresses, and checks them against a topology. What address stands
// behind a name is known only when the lab runs; see package expect.
package operand

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/isthmus-net/isthmus/lab/internal/topology"
	"github.com/isthmus-net/isthmus/lab/internal/yamlfile"
)

// A Kind is what an operand names.
type Kind string

// Kinds.
const (
	Pod          Kind = "pod"           // milan/web
	Node         Kind = "node"          // milan/node-1
	Gateway      Kind = "gateway"       // milan/gateway, or milan/gateway.rome of several
	GatewayNode  Kind = "gateway-node"  // milan/gateway.node: the node that the gateway runs on; .othernode: the first of the others
	Router       Kind = "router"        // milan/router
	ControlPlane Kind = "control-plane" // milan/control-plane
	Daemon       Kind = "daemon"        // milan/node-1.daemon: the pod of the node daemon there
	Controller   Kind = "controller"    // milan/controller
	Outside      Kind = "outside"       // user
	WAN          Kind = "wan"
	Unknown      Kind = "unknown"   // unknown(milan, rome): the address by which rome knows what is none of milan's pods
	External     Kind = "external"  // external(db, milan): the address that milan gives a host by an IP object
	Ingress      Kind = "ingress"   // ingress(milan, web): of a Service of type LoadBalancer
	ClusterIP    Kind = "clusterip" // clusterip(milan, web): of a Service
)

// An Attr selects one of the addresses of an operand.
type Attr string

// Attributes.
const (
	IP       Attr = "ip"       // the address others reach it by; what no attribute means, too
	Internal Attr = "internal" // nodes and gateways: the address of the internal CIDR
	NodeAttr Attr = "nodename" // in texts: the name of the Node object
)

// An Operand is a parsed name.
type Operand struct {
	Kind    Kind
	Cluster string
	Name    string // of a pod, an outside host or a Service
	Node    int    // of a node, a daemon, or of the node of a pod of the topology
	Host    bool   // a pod in the host network: its packets are the node's
	Peer    string // of a gateway and its node: the cluster at the other end
	Other   bool   // of a gateway-node: the first node that the gateway is not on
	Attr    Attr
	// RemappedIn is set for remapped(x, cluster): the address by which that
	// cluster knows x.
	RemappedIn string
	// Inner is the host that an external address stands for.
	Inner *Operand

	text string
}

// String is the operand as written.
func (o Operand) String() string { return o.text }

// An Error says what is wrong with a name.
type Error struct {
	Message string
	Hint    string
}

// Error is the message with the hint behind it. Whoever prints hints on a line
// of their own takes the fields.
func (e *Error) Error() string {
	if e.Hint == "" {
		return e.Message
	}
	return e.Message + " (" + e.Hint + ")"
}

func fail(hint, format string, args ...any) error {
	return &Error{fmt.Sprintf(format, args...), hint}
}

// Parse reads a name and checks that the topology has what it names.
func Parse(text string, t *topology.Topology) (Operand, error) {
	o, err := parse(strings.TrimSpace(text), t)
	o.text = text
	return o, err
}

func parse(text string, t *topology.Topology) (Operand, error) {
	if function, args, ok := strings.Cut(text, "("); ok {
		return parseFunction(text, function, args, t)
	}
	cluster, rest, ok := strings.Cut(text, "/")
	if !ok {
		return parseOutside(text, t)
	}
	c, ok := t.Cluster(cluster)
	if !ok {
		return Operand{}, fail(yamlfile.DidYouMean(cluster, clusterNames(t)), "there is no cluster %q", cluster)
	}
	o := Operand{Cluster: cluster}
	name, dotted, _ := strings.Cut(rest, ".")
	attrs := splitDots(dotted)
	switch {
	case name == "gateway":
		return parseGateway(o, attrs, t)
	case name == "router":
		o.Kind = Router
	case name == "control-plane":
		o.Kind = ControlPlane
	case name == "controller":
		o.Kind = Controller
	case strings.HasPrefix(name, "node-"):
		n, err := strconv.Atoi(name[len("node-"):])
		if err != nil || n < 1 || n > c.Nodes {
			return Operand{}, fail("", "cluster %s has node-1 to node-%d, not %q", cluster, c.Nodes, name)
		}
		o.Kind, o.Node = Node, n
		if len(attrs) > 0 && attrs[0] == "daemon" {
			o.Kind, attrs = Daemon, attrs[1:]
		}
	default:
		p, ok := t.Pod(cluster, name)
		if !ok {
			return Operand{}, fail(yamlfile.DidYouMean(name, inCluster(c, t)), "cluster %s has no %q", cluster, name)
		}
		o.Kind, o.Name, o.Node, o.Host = Pod, name, p.Node, p.HostNetwork
		if len(attrs) > 0 && attrs[0] == "node" {
			o, attrs = Operand{Kind: Node, Cluster: cluster, Node: p.Node}, attrs[1:]
		}
	}
	return withAttr(o, attrs, text)
}

func parseOutside(text string, t *topology.Topology) (Operand, error) {
	name, dotted, _ := strings.Cut(text, ".")
	if name == "wan" {
		return withAttr(Operand{Kind: WAN}, splitDots(dotted), text)
	}
	names := []string{"wan"}
	for _, h := range t.Outside {
		names = append(names, h.Name)
		if h.Name == name {
			return withAttr(Operand{Kind: Outside, Name: name}, splitDots(dotted), text)
		}
	}
	if _, ok := t.Cluster(name); ok {
		return Operand{}, fail("write "+name+"/web or "+name+"/node-1", "%q is a whole cluster", name)
	}
	return Operand{}, fail(yamlfile.DidYouMean(name, names), "there is no host %q outside the clusters", name)
}

func parseGateway(o Operand, attrs []string, t *topology.Topology) (Operand, error) {
	o.Kind = Gateway
	peers := t.Peers(o.Cluster)
	if len(attrs) > 0 && !isAttr(attrs[0]) && !isGatewayNode(attrs[0]) {
		for _, p := range peers {
			if p == attrs[0] {
				o.Peer = p
			}
		}
		if o.Peer == "" {
			return Operand{}, fail(yamlfile.DidYouMean(attrs[0], append(slices.Clone(peers), "ip", "internal", "node", "othernode")), "%s does not peer with %q", o.Cluster, attrs[0])
		}
		attrs = attrs[1:]
	}
	switch {
	case o.Peer != "":
	case len(peers) == 0:
		return Operand{}, fail("", "%s has no gateway: it peers with nobody", o.Cluster)
	case len(peers) > 1:
		return Operand{}, fail(fmt.Sprintf("write %s/gateway.%s", o.Cluster, peers[0]), "%s has %d gateways", o.Cluster, len(peers))
	default:
		o.Peer = peers[0]
	}
	if len(attrs) > 0 && isGatewayNode(attrs[0]) {
		o.Kind, o.Other = GatewayNode, attrs[0] == "othernode"
		if c, _ := t.Cluster(o.Cluster); o.Other && c.Nodes < 2 {
			return o, fail("", "%s has no other node than the gateway's", o.Cluster)
		}
		attrs = attrs[1:]
	}
	return withAttr(o, attrs, o.Cluster+"/gateway")
}

// functions are what stands before parentheses, with an example each.
var functions = map[string]string{
	"remapped":        "remapped(milan/web, rome)",
	string(Unknown):   "unknown(milan, rome)",
	string(External):  "external(db, milan)",
	string(Ingress):   "ingress(milan, web)",
	string(ClusterIP): "clusterip(milan, web)",
}

// IsFunction tells whether a text starts like a function of names.
func IsFunction(text string) bool {
	name, _, ok := strings.Cut(text, "(")
	return ok && functions[name] != ""
}

func parseFunction(text, function, rest string, t *topology.Topology) (Operand, error) {
	example, known := functions[function]
	if !known {
		return Operand{}, fail(yamlfile.DidYouMean(function, slices.Sorted(maps.Keys(functions))), "%q: there is no %s(…)", text, function)
	}
	args, ok := strings.CutSuffix(rest, ")")
	comma := strings.LastIndex(args, ",")
	if !ok || comma < 0 {
		return Operand{}, fail("write "+example, "%q: %s takes two names", text, function)
	}
	first, second := strings.TrimSpace(args[:comma]), strings.TrimSpace(args[comma+1:])
	cluster := second
	if function == string(Ingress) || function == string(ClusterIP) {
		cluster = first
	}
	if _, ok := t.Cluster(cluster); !ok {
		return Operand{}, fail(yamlfile.DidYouMean(cluster, clusterNames(t)), "there is no cluster %q", cluster)
	}
	switch Kind(function) {
	case Ingress, ClusterIP:
		return Operand{Kind: Kind(function), Cluster: cluster, Name: second}, nil
	case Unknown:
		if _, ok := t.Cluster(first); !ok {
			return Operand{}, fail(yamlfile.DidYouMean(first, clusterNames(t)), "there is no cluster %q", first)
		}
		return Operand{Kind: Unknown, Cluster: first, RemappedIn: cluster}, nil
	}
	o, err := parse(first, t)
	if err != nil {
		return o, err
	}
	if Kind(function) == External {
		o.text = first
		return Operand{Kind: External, Cluster: cluster, Inner: &o}, nil
	}
	o.RemappedIn = cluster
	return o, nil
}

func withAttr(o Operand, attrs []string, text string) (Operand, error) {
	switch {
	case len(attrs) == 0:
		return o, nil
	case len(attrs) > 1 || !isAttr(attrs[0]):
		return o, fail(yamlfile.DidYouMean(attrs[0], []string{"ip", "internal", "node", "daemon"}), "%q: no such part of a %s", text, o.Kind)
	}
	o.Attr = Attr(attrs[0])
	if o.Attr == Internal && o.Kind != Node && o.Kind != Gateway && o.Kind != GatewayNode {
		return o, fail("only nodes and gateways have one", "%q: a %s has no address of the internal CIDR", text, o.Kind)
	}
	if o.Attr == NodeAttr && o.Kind != Node && o.Kind != GatewayNode {
		return o, fail("such as milan/web.node.nodename", "%q: only nodes have the name of a Node object", text)
	}
	return o, nil
}

// HostName is the name under which captures know the host whose interfaces
// an operand's packets pass. Which node a gateway runs on only a running lab
// knows: then it is empty.
func (o Operand) HostName(t *topology.Topology) string {
	switch o.Kind {
	case Pod:
		if o.Host {
			return o.Cluster + "/" + NodeName(o.Node)
		}
		return o.Cluster + "/" + o.Name
	case Node, Daemon:
		return o.Cluster + "/" + NodeName(o.Node)
	case Gateway:
		if len(t.Peers(o.Cluster)) > 1 {
			return o.Cluster + "/gateway." + o.Peer
		}
		return o.Cluster + "/gateway"
	case Router, ControlPlane, Controller:
		return o.Cluster + "/" + string(o.Kind)
	case WAN:
		return "wan"
	case External:
		return o.Inner.HostName(t)
	case Unknown, Ingress, ClusterIP:
		return "" // many, or whoever is behind it
	}
	return o.Name
}

// NodeName is the name of a cluster's n-th node, from 1.
func NodeName(n int) string { return fmt.Sprintf("node-%d", n) }

func isAttr(s string) bool {
	return s == string(IP) || s == string(Internal) || s == string(NodeAttr)
}

func isGatewayNode(s string) bool { return s == "node" || s == "othernode" }

func splitDots(s string) []string {
	if s == "" {
		return nil
	}
	return strings.Split(s, ".")
}

func clusterNames(t *topology.Topology) []string {
	var names []string
	for _, c := range t.Clusters {
		names = append(names, c.Name)
	}
	return names
}

func inCluster(c topology.Cluster, t *topology.Topology) []string {
	names := []string{"gateway", "router", "control-plane", "controller"}
	for n := range c.Nodes {
		names = append(names, NodeName(n+1))
	}
	for _, p := range t.Pods {
		if p.Cluster == c.Name {
			names = append(names, p.Name)
		}
	}
	return names
}
