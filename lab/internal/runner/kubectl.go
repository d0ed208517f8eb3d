package runner

import (
	"context"
	"fmt"

	"github.com/isthmus-net/isthmus/lab/internal/deploy"
	"github.com/isthmus-net/isthmus/lab/internal/expect"
	"github.com/isthmus-net/isthmus/lab/internal/operand"
	"github.com/isthmus-net/isthmus/lab/internal/report"
	"github.com/isthmus-net/isthmus/lab/internal/scenario"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// kubectl runs kubectl in the control plane of a cluster.
func (r *Runner) kubectl(ctx context.Context, row *expect.Row, a *scenario.Kubectl, undo *undoList) (*report.Fault, error) {
	run, err := row.Expand(ctx, a.Run)
	if err != nil {
		return nil, err
	}
	if a.Undo != "" {
		back, err := row.Expand(ctx, a.Undo)
		if err != nil {
			return nil, err
		}
		r.undoKubectl(undo, a.In, back)
	}
	return nil, r.runKubectl(ctx, a.In, run)
}

// runKubectl runs kubectl with arguments as a shell reads them.
func (r *Runner) runKubectl(ctx context.Context, cluster, arguments string) error {
	res, err := r.World.Exec(ctx, world.ExecRequest{
		Target: cluster + "/" + world.ControlPlaneHost, Argv: []string{"sh", "-c", "exec kubernetes kubectl " + arguments},
	})
	if err == nil && res.Code != 0 {
		err = exitErrorOf(res)
	}
	if err != nil {
		return fmt.Errorf("kubectl %s in %s: %w", arguments, cluster, err)
	}
	return nil
}

func (r *Runner) undoKubectl(undo *undoList, cluster, arguments string) {
	undo.add(func(ctx context.Context) error { return r.runKubectl(ctx, cluster, arguments) })
}

// drain evicts what runs on a node. At the end of the row the gateways that it
// had are moved back, and those nodes take pods again that did before. Pods of
// the topology stay: nothing would make them again elsewhere.
func (r *Runner) drain(ctx context.Context, row *expect.Row, a *scenario.NodeDrained, undo *undoList) (*report.Fault, error) {
	o, err := row.Directory.Settle(ctx, a.Node.Operand)
	if err != nil {
		return nil, err
	}
	node := operand.NodeName(o.Node)
	cordoned, err := r.cordonedNodes(ctx, o.Cluster)
	if err != nil {
		return nil, err
	}
	// Undone last: a gateway is moved back by cordoning the other nodes.
	undo.add(func(ctx context.Context) error {
		return r.cordon(ctx, o.Cluster, func(name string) bool { return cordoned[name] })
	})
	for _, peer := range row.Topology.Peers(o.Cluster) {
		pods, err := r.gatewayPods(ctx, o.Cluster, peer)
		if err != nil {
			return nil, err
		}
		if _, there := settledOn(pods, node); there {
			undo.add(r.gatewayBack(o.Cluster, peer, node))
		}
	}
	r.undoKubectl(undo, o.Cluster, "uncordon "+node)
	return nil, r.runKubectl(ctx, o.Cluster, fmt.Sprintf("drain %s --ignore-daemonsets --delete-emptydir-data --pod-selector='!%s' --timeout=%v", node, deploy.ProbeLabel, gatewayTime))
}
