package scenario

import (
	"fmt"
	"slices"

	"github.com/goccy/go-yaml/ast"

	"github.com/isthmus-net/isthmus/lab/internal/expect"
	"github.com/isthmus-net/isthmus/lab/internal/operand"
	"github.com/isthmus-net/isthmus/lab/internal/topology"
	"github.com/isthmus-net/isthmus/lab/internal/yamlfile"
)

// NodeLeaves takes a node away as one goes whose machine is switched off: its
// cable, its kubelet with all that runs there, and its Node object. Pods of
// the topology wait for it to come back.
type NodeLeaves struct {
	Node expect.Ref
}

// NodeLost cuts the power of a node, which says goodbye to nobody: its Node object
// and its pods are there until Kubernetes notices. At the end of the row it has
// power again.
type NodeLost struct {
	Node expect.Ref
}

// NodeJoins brings a node of the topology into its cluster and waits until it
// is ready. It gets a podCIDR of its own, which is not the one it had before.
type NodeJoins struct {
	Node expect.Ref
}

// NodeReboots cuts the power of a node that has containerd and gives it back:
// its network and all that ran there are made anew, its disk and its Node
// object stay. It ends when the kubelet is ready again.
type NodeReboots struct {
	Node expect.Ref
}

// NodeDrained makes a node take no pods and evicts those that are there, by
// kubectl drain; the topology's own pods, which have no controller, stay. At the
// end of the row the node takes pods again.
type NodeDrained struct {
	Node expect.Ref
}

// GatewayMoves moves a gateway to a node, as an operator would who wants the
// other nodes for himself: cordon them, delete the gateway's pod, and wait
// until the one in its place is ready. A gateway that is there stays.
type GatewayMoves struct {
	Of   string     `lab:"of,required" doc:"cluster of the gateway"`
	Peer string     `lab:"peer" doc:"cluster at the other end; may be left out when there is only one"`
	To   expect.Ref `lab:"to,required" doc:"node, such as milan/node-2 or milan/gateway.othernode"`
}

// PodMoves puts a pod of the topology on another node, as its controller would:
// the old one ends, and one of the same name with another address starts. At the
// end of the row it is moved back.
type PodMoves struct {
	Pod expect.Ref `lab:"pod,required" doc:"pod of the topology with an address of its own"`
	To  expect.Ref `lab:"to,required" doc:"node, such as milan/node-2"`
}

// UnmarshalLab reads the name.
func (a *NodeLeaves) UnmarshalLab(f *yamlfile.File, n ast.Node, subst yamlfile.Subst) {
	f.Decode(n, &a.Node, subst)
}

// UnmarshalLab reads the name.
func (a *NodeLost) UnmarshalLab(f *yamlfile.File, n ast.Node, subst yamlfile.Subst) {
	f.Decode(n, &a.Node, subst)
}

// UnmarshalLab reads the name.
func (a *NodeJoins) UnmarshalLab(f *yamlfile.File, n ast.Node, subst yamlfile.Subst) {
	f.Decode(n, &a.Node, subst)
}

// UnmarshalLab reads the name.
func (a *NodeReboots) UnmarshalLab(f *yamlfile.File, n ast.Node, subst yamlfile.Subst) {
	f.Decode(n, &a.Node, subst)
}

// UnmarshalLab reads the name.
func (a *NodeDrained) UnmarshalLab(f *yamlfile.File, n ast.Node, subst yamlfile.Subst) {
	f.Decode(n, &a.Node, subst)
}

// LabSchema describes a name to editors.
func (*NodeReboots) LabSchema() map[string]any { return (&expect.Ref{}).LabSchema() }

// LabSchema describes a name to editors.
func (*NodeDrained) LabSchema() map[string]any { return (&expect.Ref{}).LabSchema() }

// LabSchema describes a name to editors.
func (*NodeLeaves) LabSchema() map[string]any { return (&expect.Ref{}).LabSchema() }

// LabSchema describes a name to editors.
func (*NodeLost) LabSchema() map[string]any { return (&expect.Ref{}).LabSchema() }

// LabSchema describes a name to editors.
func (*NodeJoins) LabSchema() map[string]any { return (&expect.Ref{}).LabSchema() }

// Lint resolves the node.
func (a *NodeLeaves) Lint(l *expect.Linter) {
	l.Resolve(&a.Node)
	lintNode(l, &a.Node, operand.Node, operand.GatewayNode)
}

// Lint resolves the node.
func (a *NodeLost) Lint(l *expect.Linter) {
	l.Resolve(&a.Node)
	lintNode(l, &a.Node, operand.Node, operand.GatewayNode)
}

// Lint resolves the node. The gateway's own is there already.
func (a *NodeJoins) Lint(l *expect.Linter) {
	l.Resolve(&a.Node)
	lintNode(l, &a.Node, operand.Node)
}

// Lint resolves the node.
func (a *NodeReboots) Lint(l *expect.Linter) {
	l.Resolve(&a.Node)
	lintNode(l, &a.Node, operand.Node, operand.GatewayNode)
	if c, ok := l.Topology.Cluster(a.Node.Cluster); ok && c.Runtime != topology.RuntimeContainerd {
		l.Problem(&a.Node, "take a topology with runtime: containerd", "the nodes of %s have no disk to boot from", c.Name)
	}
}

// Lint resolves the node.
func (a *NodeDrained) Lint(l *expect.Linter) {
	l.Resolve(&a.Node)
	lintNode(l, &a.Node, operand.Node, operand.GatewayNode)
}

// Lint resolves the gateway and the node, and fills in the only peer.
func (a *GatewayMoves) Lint(l *expect.Linter) {
	l.Cluster(&a.Of)
	l.Resolve(&a.To)
	lintNode(l, &a.To, operand.Node, operand.GatewayNode)
	if _, known := l.Topology.Cluster(a.Of); known && a.To.Cluster != "" && a.To.Cluster != a.Of {
		l.Problem(&a.To, "", "%s is no node of %s", a.To, a.Of)
	}
	peers := l.Topology.Peers(a.Of)
	switch {
	case a.Peer == "" && len(peers) == 1:
		a.Peer = peers[0]
	case a.Peer == "" && len(peers) > 1:
		l.Problem(a, "peer: "+peers[0], "%s has %d gateways: say which", a.Of, len(peers))
	case a.Peer != "" && !slices.Contains(peers, a.Peer):
		l.Problem(&a.Peer, yamlfile.DidYouMean(a.Peer, peers), "%s does not peer with %q", a.Of, a.Peer)
	}
}

// Lint resolves the pod and the node.
func (a *PodMoves) Lint(l *expect.Linter) {
	l.Resolve(&a.Pod)
	l.Resolve(&a.To)
	lintNode(l, &a.To, operand.Node, operand.GatewayNode)
	switch {
	case a.Pod.Kind == "":
	case a.Pod.Kind != operand.Pod || a.Pod.Host || a.Pod.Attr != "":
		l.Problem(&a.Pod, "name a pod, such as milan/web", "%s is no pod with an address of its own", a.Pod)
	case a.To.Cluster != "" && a.To.Cluster != a.Pod.Cluster:
		l.Problem(&a.To, "", "%s is no node of %s", a.To, a.Pod.Cluster)
	}
}

func lintNode(l *expect.Linter, r *expect.Ref, kinds ...operand.Kind) {
	if r.Kind == "" { // reported already
		return
	}
	for _, k := range kinds {
		if r.Kind == k && r.Attr == "" {
			return
		}
	}
	l.Problem(r, "name a node, such as "+r.Cluster+"/node-2", "%s is no node that this can be done with", r)
}

// String is the action on one line, for plans and reports.
func (a *NodeLeaves) String() string { return a.Node.Text + " leaves" }

// String is the action on one line, for plans and reports.
func (a *NodeLost) String() string { return a.Node.Text + " loses its power" }

// String is the action on one line, for plans and reports.
func (a *NodeReboots) String() string { return a.Node.Text + " reboots" }

// String is the action on one line, for plans and reports.
func (a *NodeDrained) String() string { return a.Node.Text + " is drained" }

// String is the action on one line, for plans and reports.
func (a *NodeJoins) String() string { return a.Node.Text + " joins" }

// String is the action on one line, for plans and reports.
func (a *GatewayMoves) String() string {
	return fmt.Sprintf("gateway of %s for %s moves to %s", a.Of, a.Peer, a.To)
}

// String is the action on one line, for plans and reports.
func (a *PodMoves) String() string { return fmt.Sprintf("%s moves to %s", a.Pod, a.To) }
