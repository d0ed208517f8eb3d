package main

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/internal/controllers"
)

// newControllerCommand returns the command that runs once in a cluster.
func newControllerCommand(g *globals) *cobra.Command {
	var cfg controllers.Config
	var pools, overlay, transit string
	cmd := &cobra.Command{
		Use:   "controller",
		Short: "Decide what must exist in this cluster",
		Long: `Decide what must exist in this cluster: which networks peers have, which
gateways run, and which routes lead to them. Everything that it decides is an
object of the API.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if cfg.Namespace == "" {
				return errors.New("--namespace is required: the namespace of the installation")
			}
			if pools != "" {
				var err error
				if cfg.Options.Pools, err = controllers.ParsePools(strings.Split(pools, ",")); err != nil {
					return fmt.Errorf("--pools: %w", err)
				}
			}
			switch o := cluster.Overlay(overlay); o {
			case cluster.OverlayGeneve, cluster.OverlayVXLAN, cluster.OverlayAuto:
				cfg.Options.Overlay = o
			default:
				return fmt.Errorf("--overlay %q: write %s, %s or %s", overlay, cluster.OverlayGeneve, cluster.OverlayVXLAN, cluster.OverlayAuto)
			}
			var err error
			if cfg.Options.Transit, cfg.Options.TransitPairs, err = parseTransit(transit); err != nil {
				return err
			}
			config, err := g.restConfig("isthmus-controller")
			if err != nil {
				return err
			}
			cfg.REST, cfg.Logger = config, g.log
			g.log.Info("controller", "version", version, "namespace", cfg.Namespace)
			return controllers.Run(cmd.Context(), cfg)
		},
	}
	f := cmd.Flags()
	f.StringVar(&cfg.Namespace, "namespace", v1beta1.DefaultNamespace, "`namespace` of the installation")
	f.StringVar(&pools, "pools", "", "`networks`, separated by commas, that remapped networks are taken from (default the private ones)")
	f.StringVar(&overlay, "overlay", string(cluster.OverlayGeneve), "what joins nodes and gateways: geneve, vxlan, or auto: what the kernels of all nodes have when it is first asked, Geneve first")
	f.Uint16Var(&cfg.Options.GenevePort, "geneve-port", 6091, "UDP `port` of the links between nodes and gateways")
	f.Uint32Var(&cfg.Options.RulePriority, "rule-priority", 0, "first of the 100 `priorities` of policy rules on nodes (default 300)")
	f.StringVar(&transit, "direct-connections", "", "`peers` that reach each other through this cluster: all, or pairs of cluster IDs such as rome:naples,rome:oslo; empty: none")
	f.BoolVar(&cfg.RefuseRotation, "refuse-key-rotation", false, "keep peers from changing their keys through the tunnel")
	f.DurationVar(&cfg.RotateEvery, "rotate-keys-every", 0, "`time` after which gateways change their keys, where the peer takes part; 0: never by themselves")
	f.BoolVar(&cfg.LeaderElection, "leader-election", false, "act only while holding the lease, so that several can run")
	f.StringVar(&cfg.Identity, "identity", os.Getenv("POD_NAME"), "`name` of this replica in the lease (default the name of the host)")
	f.StringVar(&cfg.Options.Revision, "revision", os.Getenv("POD_TEMPLATE_HASH"), "`name` of this version of the controller and its settings, written on what it makes of gateways' templates")
	f.DurationVar(&cfg.Resync, "resync", 0, "longest `time` between two passes (default 10m)")
	f.StringVar(&cfg.HealthAddress, "health-address", "", "`host:port` for /healthz and /readyz; empty or 0: none")
	f.StringVar(&cfg.MetricsAddress, "metrics-address", "", "`host:port` for /metrics, by https and for those who may get that path of the API server; empty or 0: none")
	return cmd
}

// parseTransit reads which peers reach each other through this cluster.
func parseTransit(text string) (all bool, pairs [][2]string, err error) {
	switch text {
	case "":
		return false, nil, nil
	case "all":
		return true, nil, nil
	}
	for _, pair := range strings.Split(text, ",") {
		a, b, ok := strings.Cut(pair, ":")
		if !ok || a == "" || b == "" || a == b || strings.Contains(b, ":") {
			return false, nil, fmt.Errorf("--direct-connections %q: %q: write all, or pairs of two cluster IDs such as rome:naples,rome:oslo", text, pair)
		}
		pairs = append(pairs, [2]string{a, b})
	}
	return false, pairs, nil
}
