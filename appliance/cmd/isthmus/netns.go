package main

import (
	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/appliance/internal/daemon"
)

// newNetNSCommand returns the command that runs beside a gateway that is in a
// network namespace of its node.
func newNetNSCommand(g *globals) *cobra.Command {
	var cfg daemon.NetNSConfig
	cmd := &cobra.Command{
		Use:   "netns",
		Short: "Hold the network namespace of a gateway",
		Long: `Make a network namespace for a gateway, mount it at a path of the node, and
take it away at the end. Needs a privileged container with that directory of
the node mounted bidirectionally: only such a container can mount something on
the node.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg.Logger = g.log
			return daemon.HoldNetNS(cmd.Context(), cfg)
		},
	}
	f := cmd.Flags()
	f.StringVar(&cfg.Path, "path", "/run/netns/liqo-netns", "`file` to mount the namespace at")
	f.StringVar(&cfg.StateDir, "state-dir", "/run/isthmus", "`directory` of the pod that it shares with the gateway")
	return cmd
}
