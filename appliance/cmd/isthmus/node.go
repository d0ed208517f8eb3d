package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/appliance/internal/daemon"
	"github.com/isthmus-net/isthmus/appliance/internal/kube"
)

// newNodeCommand returns the command that runs on every node.
func newNodeCommand(g *globals) *cobra.Command {
	var cfg daemon.NodeConfig
	var podName, nodeIP, stateDir string
	var undo bool
	cmd := &cobra.Command{
		Use:   "node",
		Short: "Give the pods of this node a way to the pods of the peers",
		Long: `Give the pods of this node a way to the pods of the peers: a Geneve link to
the gateway of every peering, or a VXLAN link to all nodes, with the routes, rules
and tables that lead there.

Runs in the network namespace of the node and needs CAP_NET_ADMIN. What it has
made stays when it ends; --undo takes it back. That is how an installation is
removed: isthmus teardown has the pods of all nodes started with it.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if cfg.NodeName == "" {
				return errors.New("--node-name is required: the name of the Node object of this machine")
			}
			if nodeIP != "" {
				ip, err := netip.ParseAddr(nodeIP)
				if err != nil {
					return fmt.Errorf("--node-ip %q: write an address such as 172.18.1.11", nodeIP)
				}
				cfg.NodeIP = ip
			}
			log := g.log.With("node", cfg.NodeName)
			if undo {
				log.Info("taking back what is in the kernel of this node", "version", version, "pod", podName)
				return daemon.UndoNode(cmd.Context(), daemon.UndoConfig{
					HealthAddress: cfg.Serving.Health, Logger: log,
				})
			}
			config, err := g.restConfig("isthmus-node")
			if err != nil {
				return err
			}
			source, err := kube.NewNodeSource(kube.NodeSourceConfig{Config: config, Node: cfg.NodeName, StateDir: stateDir, Logger: log})
			if err != nil {
				return err
			}
			if cfg.Knock, err = kube.NewKnock(config); err != nil {
				return err
			}
			cfg.API, cfg.APIServer, cfg.StateDir = source, config.Host, stateDir
			if cfg.Serving.Guard, err = kube.NewGuard(config, log); err != nil {
				return fmt.Errorf("who may see metrics: %w", err)
			}
			cfg.Logger = log
			cfg.WriteStatus = func(ctx context.Context, st daemon.NodeStatus) error {
				return source.WriteStatus(ctx, kube.NodeStatus{
					Local: st.Local, Remote: st.Remote, Kernel: st.Kernel, Overlays: st.Overlays, WireGuard: st.WireGuard, VTEP: st.VTEP, Needs: st.Needs,
					Addresses: st.Addresses,
					Applied:   st.Applied, Conditions: conditions(st.Conditions),
				})
			}
			log.Info("node daemon", "version", version, "pod", podName)
			return daemon.RunNode(cmd.Context(), cfg)
		},
	}
	f := cmd.Flags()
	f.StringVar(&cfg.NodeName, "node-name", "", "`name` of the Node object of this machine (required)")
	f.StringVar(&nodeIP, "node-ip", "", "`address` of this machine that the other nodes reach it at (default the source of its default route)")
	f.StringVar(&podName, "pod-name", "", "`name` of the daemon's own pod, for the log")
	f.StringVar(&stateDir, "state-dir", "", "`directory` to keep the objects in that were known last, for a daemon that starts while the API server is away; empty: none")
	f.BoolVar(&undo, "undo", false, "remove everything of Isthmus from the kernel of this node, be ready when it is gone, and see that nothing comes back; there are no metrics then")
	f.Uint16Var(&cfg.GenevePort, "geneve-port", 0, "UDP `port` of the links to gateways (default 6091)")
	f.Uint32Var(&cfg.RulePriority, "rule-priority", 0, "first of the 100 `priorities` of policy rules that are ours (default 300)")
	addServing(cmd, &cfg.Serving)
	return cmd
}

// addServing adds the flags of both daemons that say where they answer.
func addServing(cmd *cobra.Command, s *daemon.Serving) {
	f := cmd.Flags()
	f.StringVar(&s.Health, "health-address", "", "`host:port` for /healthz and /readyz; empty or 0: none")
	f.StringVar(&s.Metrics, "metrics-address", "", "`host:port` for /metrics, by https and for those who may get that path of the API server; empty or 0: none")
}

// conditions are a daemon's conditions as the API has them.
func conditions(in []daemon.Condition) []metav1.Condition {
	out := make([]metav1.Condition, 0, len(in))
	for _, c := range in {
		status := metav1.ConditionFalse
		if c.OK {
			status = metav1.ConditionTrue
		}
		out = append(out, metav1.Condition{Type: c.Type, Status: status, Reason: c.Reason, Message: c.Message})
	}
	return out
}
