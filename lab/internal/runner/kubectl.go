package runner

import (
	"context"
	"fmt"
	"strings"

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
	return r.runKubectl(ctx, a.In, run)
}

// runKubectl runs kubectl with arguments as a shell reads them.
func (r *Runner) runKubectl(ctx context.Context, cluster, arguments string) (*report.Fault, error) {
	res, err := r.World.Exec(ctx, world.ExecRequest{
		Target: cluster + "/" + world.ControlPlaneHost, Argv: []string{"sh", "-c", "exec kubernetes kubectl " + arguments},
	})
	if err != nil || res.Code == 0 {
		return nil, err
	}
	return &report.Fault{
		Expectation: fmt.Sprintf("kubectl %s in %s", arguments, cluster), Want: "exit code 0",
		Got: fmt.Sprintf("exit code %d: %s", res.Code, strings.TrimSpace(string(res.Stdout)+string(res.Stderr))),
	}, nil
}

func (r *Runner) undoKubectl(undo *undoList, cluster, arguments string) {
	undo.add(func(ctx context.Context) error {
		fault, err := r.runKubectl(ctx, cluster, arguments)
		if fault != nil {
			err = fmt.Errorf("undo: kubectl %s in %s: %s", arguments, cluster, fault.Got)
		}
		return err
	})
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
	return r.runKubectl(ctx, o.Cluster, fmt.Sprintf("drain %s --ignore-daemonsets --delete-emptydir-data --pod-selector='!%s' --timeout=%v", node, deploy.ProbeLabel, gatewayTime))
}
