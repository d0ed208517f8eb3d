package main

import (
	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/lab/internal/supervisor"
)

// newSuperviseCommand is what supervisor.Start starts: PID 1 of a lab.
func newSuperviseCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:    "supervise",
		Short:  "be PID 1 of a lab (started by lab up and lab run)",
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return infraError(supervisor.Serve(cmd.Context(), a.logger))
		},
	}
}
