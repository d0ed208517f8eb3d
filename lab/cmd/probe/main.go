// Command probe is what the lab runs inside of pods: the program that becomes a
// container, and the two ends of test traffic. It is small on purpose: it is
// started for every container and every probe, in machines that may be
// emulated.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/lab/internal/containerinit"
	"github.com/isthmus-net/isthmus/lab/internal/niceness"
	"github.com/isthmus-net/isthmus/lab/internal/prober"
)

func main() {
	if len(os.Args) > 1 && os.Args[1] == containerinit.Argument {
		os.Exit(containerinit.Init())
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := newRoot().ExecuteContext(ctx)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "probe:", err)
		os.Exit(1)
	}
}

func newRoot() *cobra.Command {
	cmd := &cobra.Command{
		Use:           "probe",
		Short:         "send and answer test traffic (runs in the lab's pods)",
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	cmd.PersistentFlags().Bool(untilEOFFlag, false, "end with the standard input, as where nobody can send a signal")
	cmd.PersistentPreRun = func(cmd *cobra.Command, _ []string) {
		_ = niceness.Set(-15) // without the privilege everything stays as it is
		heedInput(cmd)
	}
	cmd.AddCommand(newServeCommand(), newDialCommand(), newFlowCommand(), newMTUCommand(), newLookupCommand(), newLoadCommand(), newPauseCommand())
	return cmd
}

const untilEOFFlag = "until-eof"

// heedInput ends the command with its input, if the flag says so. Each command that
// has a PersistentPreRun calls it: cobra runs the nearest one only.
func heedInput(cmd *cobra.Command) {
	if eof, err := cmd.Flags().GetBool(untilEOFFlag); err == nil && eof {
		cmd.SetContext(untilEOF(cmd.Context(), cmd.InOrStdin()))
	}
}

// newPauseCommand is what holds the namespaces of a pod where containerd runs
// it. It buries orphans when the pod's containers share its processes.
func newPauseCommand() *cobra.Command {
	return &cobra.Command{
		Use:    "pause",
		Short:  "do nothing until told to end (the first container of a pod)",
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			children := make(chan os.Signal, 1)
			signal.Notify(children, syscall.SIGCHLD)
			for {
				select {
				case <-cmd.Context().Done():
					return nil
				case <-children:
					for pid := 1; pid > 0; {
						pid, _ = syscall.Wait4(-1, nil, syscall.WNOHANG, nil)
					}
				}
			}
		},
	}
}

// untilEOF is a context that ends with a stream.
func untilEOF(ctx context.Context, r io.Reader) context.Context {
	ctx, cancel := context.WithCancel(ctx)
	go func() {
		_, _ = io.Copy(io.Discard, r) // an error ends it, too
		cancel()
	}()
	return ctx
}

func newServeCommand() *cobra.Command {
	listen := fmt.Sprintf(":%d", prober.Port)
	var as prober.Server
	cmd := &cobra.Command{
		Use:     "serve",
		Short:   "answer probes on TCP and UDP with the address they came from, and who answers",
		Example: "  probe serve --listen :8080 --cluster milan --pod web",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return prober.Serve(cmd.Context(), listen, as, slog.New(slog.NewTextHandler(cmd.ErrOrStderr(), nil)))
		},
	}
	f := cmd.Flags()
	f.StringVar(&listen, "listen", listen, "address and port, TCP and UDP")
	f.StringVar(&as.Cluster, "cluster", "", "cluster that it runs in")
	f.StringVar(&as.Pod, "pod", "", "name of the pod that it runs in")
	f.StringVar(&as.UID, "uid", "", "UID of that pod")
	f.StringVar(&as.Node, "node", "", "name of the node that the pod runs on")
	f.BoolVar(&as.HostNetwork, "host-network", false, "the pod is in the network of its node")
	f.StringVar(&as.Host, "host", "", "name of the host that it runs on, when that is of no cluster")
	return cmd
}

func newDialCommand() *cobra.Command {
	var p prober.Probe
	var to string
	cmd := &cobra.Command{
		Use:     "dial",
		Short:   "send one probe and print the outcome as JSON",
		Example: "  probe dial --proto udp --to 10.1.0.5 --token 5ca1ab1e5ca1ab1e --timeout 2s",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			address, err := addressOf(cmd.Context(), to, prober.Port)
			if err != nil {
				return err
			}
			p.To = address
			res, err := prober.Dial(cmd.Context(), p)
			if err != nil {
				return err
			}
			return json.NewEncoder(cmd.OutOrStdout()).Encode(res)
		},
	}
	f := cmd.Flags()
	f.StringVar(&p.Proto, "proto", "tcp", "tcp, udp or icmp")
	f.StringVar(&to, "to", "", "address or name, with or without :port")
	f.StringVar(&p.Token, "token", "", "what the payload starts with")
	f.DurationVar(&p.Timeout, "timeout", time.Second, "for the whole probe")
	f.IntVar(&p.Count, "count", 1, "attempts of udp and icmp within the timeout")
	return cmd
}

func newFlowCommand() *cobra.Command {
	var fl prober.Flow
	var to, from string
	cmd := &cobra.Command{
		Use:     "flow",
		Short:   "send a numbered stream until interrupted and print how it stands, a line of JSON at a time",
		Example: "  probe flow --proto tcp --to 10.1.0.5 --token 5ca1ab1e5ca1ab1e",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			address, err := addressOf(cmd.Context(), to, prober.Port)
			if err != nil {
				return err
			}
			fl.To = address
			if from != "" {
				if fl.From, err = netip.ParseAddrPort(from); err != nil {
					return fmt.Errorf("--from %q: write address:port", from)
				}
			}
			return fl.Run(cmd.Context(), cmd.OutOrStdout())
		},
	}
	f := cmd.Flags()
	f.StringVar(&fl.Proto, "proto", "tcp", "tcp or udp")
	f.StringVar(&to, "to", "", "address or name, with or without :port")
	f.StringVar(&from, "from", "", "address:port to send from; default: as the kernel chooses")
	f.StringVar(&fl.Token, "token", "", "what the stream starts with")
	f.DurationVar(&fl.Interval, "interval", 50*time.Millisecond, "between two messages")
	f.BoolVar(&fl.Fresh, "fresh", false, "a new socket for every message (udp)")
	f.DurationVar(&fl.Report, "report", 250*time.Millisecond, "between two lines")
	return cmd
}

func newMTUCommand() *cobra.Command {
	var p prober.PathMTU
	var to string
	cmd := &cobra.Command{
		Use:     "mtu",
		Short:   "find the longest packet that passes unfragmented, and print it as JSON",
		Example: "  probe mtu --to 10.1.0.5 --token 5ca1ab1e5ca1ab1e",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			address, err := addressOf(cmd.Context(), to, prober.Port)
			if err != nil {
				return err
			}
			p.To = address
			res, err := p.Search(cmd.Context())
			if err != nil {
				return err
			}
			return json.NewEncoder(cmd.OutOrStdout()).Encode(res)
		},
	}
	f := cmd.Flags()
	f.StringVar(&to, "to", "", "address or name, with or without :port")
	f.StringVar(&p.Token, "token", "", "what the payload starts with")
	f.IntVar(&p.Least, "least", 576, "length of an IP packet that passes")
	f.IntVar(&p.Most, "most", 1500, "length of the longest to try")
	f.DurationVar(&p.Timeout, "timeout", 300*time.Millisecond, "for the answer to one packet")
	return cmd
}

// newLookupCommand asks for a name as every program in this container does.
func newLookupCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "lookup NAME",
		Short:   "print the addresses of a name, a line each, as /etc/resolv.conf leads to them",
		Example: "  probe lookup kubernetes.default.svc.cluster.local",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			found, err := net.DefaultResolver.LookupNetIP(cmd.Context(), "ip", args[0])
			if err != nil {
				return err
			}
			for _, a := range found {
				fmt.Fprintln(cmd.OutOrStdout(), a.Unmap())
			}
			return nil
		},
	}
}

// addressOf reads an address or a name, with or without a port. Of a name with
// several addresses it takes the first.
func addressOf(ctx context.Context, s string, port uint16) (netip.AddrPort, error) {
	if ap, err := netip.ParseAddrPort(s); err == nil {
		return ap, nil
	}
	if a, err := netip.ParseAddr(s); err == nil {
		return netip.AddrPortFrom(a, port), nil
	}
	name := s
	if host, text, err := net.SplitHostPort(s); err == nil {
		n, err := strconv.ParseUint(text, 10, 16)
		if err != nil {
			return netip.AddrPort{}, fmt.Errorf("--to %q: %q is not a port; write a number up to 65535", s, text)
		}
		name, port = host, uint16(n)
	}
	found, err := net.DefaultResolver.LookupNetIP(ctx, "ip", name)
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("--to %q: write an address, or a name that this container can look up: %w", s, err)
	}
	return netip.AddrPortFrom(found[0].Unmap(), port), nil
}
