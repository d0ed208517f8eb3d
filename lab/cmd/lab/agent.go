package main

import (
	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// newAgentCommand is what the supervisor starts inside a world: natively, or
// as the virtual machine's only program.
func newAgentCommand(a *app) *cobra.Command {
	var cfg world.AgentConfig
	cmd := &cobra.Command{
		Use:    "agent",
		Short:  "build a world and answer questions about it (started by lab supervise)",
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg.Logger = a.logger
			return infraError(world.ServeAgent(cmd.Context(), cfg))
		},
	}
	f := cmd.Flags()
	f.StringVar(&cfg.Listen, "listen", "", "path of a socket; with --machine an address and port")
	f.StringVar(&cfg.Dir, "dir", "", "for the nodes' state")
	f.StringVar(&cfg.BinDir, "bin-dir", "", "has isthmus, lab, kubernetes and cni/")
	f.BoolVar(&cfg.Machine, "machine", false, "this is a virtual machine of the lab's")
	return cmd
}
