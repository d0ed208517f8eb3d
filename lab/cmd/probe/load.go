package main

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"net/netip"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/lab/internal/load"
	"github.com/isthmus-net/isthmus/lab/internal/niceness"
)

// newLoadCommand is the load generator. Unlike probes it does not go first:
// what is measured is shared with the daemons, and starving them would say
// nothing of them.
func newLoadCommand() *cobra.Command {
	var nice int
	cmd := &cobra.Command{
		Use:   "load",
		Short: "measure a path: throughput, packets, connections, latency",
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error {
			heedInput(cmd)
			if nice == 0 {
				return nil
			}
			return niceness.Set(nice)
		},
	}
	cmd.PersistentFlags().IntVar(&nice, "nice", 0, "niceness of this process, like that of the daemons on the path")
	cmd.AddCommand(newLoadServeCommand(), newLoadMeasureCommand())
	return cmd
}

func newLoadServeCommand() *cobra.Command {
	listen := fmt.Sprintf(":%d", load.Port)
	cmd := &cobra.Command{
		Use:     "serve",
		Short:   "serve measurements; prints the address once it listens",
		Example: "  probe load serve --listen :8090",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			logger := slog.New(slog.NewTextHandler(cmd.ErrOrStderr(), nil))
			return load.Serve(cmd.Context(), listen, logger, func(a netip.AddrPort) { fmt.Fprintln(cmd.OutOrStdout(), a) })
		},
	}
	cmd.Flags().StringVar(&listen, "listen", listen, "address and port")
	return cmd
}

func newLoadMeasureCommand() *cobra.Command {
	var m load.Measurement
	var kind, to string
	cmd := &cobra.Command{
		Use:     "measure",
		Short:   "measure one thing for a while and print it as JSON",
		Example: "  probe load measure --kind throughput --streams 4 --to 10.1.0.5 --duration 1s",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			address, err := addressOf(cmd.Context(), to, load.Port)
			if err != nil {
				return err
			}
			m.Kind, m.To = load.Kind(kind), address
			r, err := load.Measure(cmd.Context(), m)
			if err != nil {
				return err
			}
			return json.NewEncoder(cmd.OutOrStdout()).Encode(r)
		},
	}
	f := cmd.Flags()
	f.StringVar(&kind, "kind", string(load.Throughput), "throughput, packets, connections or latency")
	f.StringVar(&to, "to", "", "address or name, with or without :port")
	f.IntVar(&m.Streams, "streams", 0, "connections at a time (default: 1; connections: 4)")
	f.BoolVar(&m.LongFirst, "long-first", false, "send packets first that are too long for any tunnel")
	f.DurationVar(&m.Duration, "duration", 0, "of the measurement (default 1s)")
	return cmd
}
