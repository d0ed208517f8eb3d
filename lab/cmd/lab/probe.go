package main

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"time"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/lab/internal/prober"
)

func newProbeCommand(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "probe",
		Short: "send and answer test traffic (runs in the lab's pods)",
	}
	cmd.AddCommand(newProbeServe(a), newProbeDial(a), newProbeFlow(a))
	return cmd
}

func newProbeServe(a *app) *cobra.Command {
	listen := fmt.Sprintf(":%d", prober.Port)
	cmd := &cobra.Command{
		Use:     "serve",
		Short:   "answer probes on TCP and UDP with the address they came from",
		Example: "  lab probe serve --listen :8080",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return infraError(prober.Serve(cmd.Context(), listen, a.logger))
		},
	}
	cmd.Flags().StringVar(&listen, "listen", listen, "address and port, TCP and UDP")
	return cmd
}

func newProbeDial(a *app) *cobra.Command {
	var p prober.Probe
	var to string
	cmd := &cobra.Command{
		Use:     "dial",
		Short:   "send one probe and print the outcome as JSON",
		Example: "  lab probe dial --proto udp --to 10.1.0.5 --token 5ca1ab1e5ca1ab1e --timeout 2s",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			address, err := parseTo(to)
			if err != nil {
				return err
			}
			p.To = address
			res, err := prober.Dial(cmd.Context(), p)
			if err != nil {
				return infraError(err)
			}
			return infraError(json.NewEncoder(a.stdout).Encode(res))
		},
	}
	f := cmd.Flags()
	f.StringVar(&p.Proto, "proto", "tcp", "tcp, udp or icmp")
	f.StringVar(&to, "to", "", "address, or address:port")
	f.StringVar(&p.Token, "token", "", "what the payload starts with")
	f.DurationVar(&p.Timeout, "timeout", time.Second, "for the whole probe")
	f.IntVar(&p.Count, "count", 1, "attempts of udp and icmp within the timeout")
	return cmd
}

func newProbeFlow(a *app) *cobra.Command {
	var fl prober.Flow
	var to string
	cmd := &cobra.Command{
		Use:     "flow",
		Short:   "send a numbered stream until interrupted and print how it stands, a line of JSON at a time",
		Example: "  lab probe flow --proto tcp --to 10.1.0.5 --token 5ca1ab1e5ca1ab1e",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			address, err := parseTo(to)
			if err != nil {
				return err
			}
			fl.To = address
			return infraError(fl.Run(cmd.Context(), a.stdout))
		},
	}
	f := cmd.Flags()
	f.StringVar(&fl.Proto, "proto", "tcp", "tcp or udp")
	f.StringVar(&to, "to", "", "address, or address:port")
	f.StringVar(&fl.Token, "token", "", "what the stream starts with")
	f.DurationVar(&fl.Interval, "interval", 50*time.Millisecond, "between two messages")
	f.DurationVar(&fl.Report, "report", 250*time.Millisecond, "between two lines")
	return cmd
}

func parseTo(s string) (netip.AddrPort, error) {
	if ap, err := netip.ParseAddrPort(s); err == nil {
		return ap, nil
	}
	a, err := netip.ParseAddr(s)
	if err != nil {
		return netip.AddrPort{}, usageError("--to %q: write an address, or address:port", s)
	}
	return netip.AddrPortFrom(a, prober.Port), nil
}
