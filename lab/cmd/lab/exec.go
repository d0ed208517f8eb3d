package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/isthmus-net/isthmus/lab/internal/world"
)

func newExecCommand(a *app) *cobra.Command {
	var req world.ExecRequest
	cmd := &cobra.Command{
		Use:   "exec TARGET -- COMMAND...",
		Short: "run a command on a node, a router, an outside host, or in a pod",
		Long: `exec runs a command where a name says: on a node, a router or an outside host;
for a pod with the lab's tools in the pod's network namespace, or with
--container inside the container.`,
		Example: `  lab exec milan/node-1 -- ip -d link show type geneve
  lab exec milan/gateway -- wg show
  lab exec milan/web -- ping -c1 10.1.1.2
  lab exec milan/gateway --container gateway -- /bin/isthmus --help`,
		Args: cobra.MinimumNArgs(2),
	}
	name := labFlag(cmd)
	cmd.Flags().StringVarP(&req.Container, "container", "c", "", "run inside this container of the pod")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		req.Target, req.Argv = args[0], args[1:]
		req.Host = req.Container == ""
		return a.stream(cmd.Context(), *name, req)
	}
	return cmd
}

func newShellCommand(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "shell TARGET",
		Short:   "open a shell on a node, a router, an outside host, or in a pod's network",
		Example: "  lab shell milan/node-1\n  lab shell milan/gateway",
		Args:    cobra.ExactArgs(1),
	}
	name := labFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		return a.stream(cmd.Context(), *name, world.ExecRequest{
			Target: args[0], Host: true, Argv: []string{"sh", "-i"}, Env: []string{"PS1=" + args[0] + " # "},
		})
	}
	return cmd
}

// stream runs a command with this process' input and output, on a terminal
// when they are one, and ends with the command's exit code.
func (a *app) stream(ctx context.Context, lab string, req world.ExecRequest) error {
	c, _, err := running(lab)
	if err != nil {
		return err
	}
	var resize chan world.Resize
	stdin, isFile := a.stdin.(*os.File)
	out, outIsFile := a.stdout.(*os.File)
	if isFile && outIsFile && term.IsTerminal(int(stdin.Fd())) && term.IsTerminal(int(out.Fd())) {
		restore, err := rawTerminal(stdin, &req)
		if err != nil {
			return infraError(err)
		}
		defer restore()
		var stop func()
		resize, stop = followSize(ctx, out)
		defer stop()
	}
	var in io.Reader = a.stdin
	if isFile && !req.TTY {
		if info, err := stdin.Stat(); err == nil && info.Mode()&os.ModeCharDevice != 0 {
			in = nil // a terminal, but the output is none: nobody types
		}
	}
	code, err := c.ExecStream(ctx, req, in, a.stdout, a.stderr, resize)
	if err != nil {
		return infraError(err)
	}
	if code != 0 {
		return exitError{code: code}
	}
	return nil
}

func rawTerminal(f *os.File, req *world.ExecRequest) (restore func(), err error) {
	cols, rows, err := term.GetSize(int(f.Fd()))
	if err != nil {
		return nil, fmt.Errorf("size of the terminal: %w", err)
	}
	old, err := term.MakeRaw(int(f.Fd()))
	if err != nil {
		return nil, fmt.Errorf("terminal: %w", err)
	}
	req.TTY, req.Rows, req.Cols = true, uint16(rows), uint16(cols)
	if t := os.Getenv("TERM"); t != "" {
		req.Env = append(req.Env, "TERM="+t)
	}
	// Nothing can be done, or needs to be, when the terminal is gone.
	return func() { _ = term.Restore(int(f.Fd()), old) }, nil
}

// followSize sends the size of a terminal whenever it changes.
func followSize(ctx context.Context, f *os.File) (chan world.Resize, func()) {
	ctx, cancel := context.WithCancel(ctx)
	sizes := make(chan world.Resize, 1)
	changed := make(chan os.Signal, 1)
	signal.Notify(changed, syscall.SIGWINCH)
	go func() {
		defer close(sizes)
		defer signal.Stop(changed)
		for {
			select {
			case <-ctx.Done():
				return
			case <-changed:
				if cols, rows, err := term.GetSize(int(f.Fd())); err == nil {
					select {
					case sizes <- world.Resize{Rows: uint16(rows), Cols: uint16(cols)}:
					case <-ctx.Done():
						return
					}
				}
			}
		}
	}()
	return sizes, cancel
}

func newCaptureCommand(a *app) *cobra.Command {
	var file string
	cmd := &cobra.Command{
		Use:   "capture",
		Short: "write the packets of all interfaces, as far as they are kept, to a pcapng file",
		Long: `capture writes what the rings hold: the latest packets of every interface of
every host, each as an interface of its own with the host's name. tcpdump can't
read it, because WireGuard's interfaces have no Ethernet header.`,
		Example: `  lab capture -w lab.pcapng && tshark -nr lab.pcapng -Y 'frame.interface_name contains "milan/gateway:"' | less
  lab capture -w - | wireshark -k -i -`,
		Args: cobra.NoArgs,
	}
	name := labFlag(cmd)
	cmd.Flags().StringVarP(&file, "write", "w", "lab.pcapng", "file; - is the standard output")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		c, _, err := running(*name)
		if err != nil {
			return err
		}
		if file == "-" {
			return infraError(c.WritePcap(cmd.Context(), a.stdout))
		}
		f, err := os.Create(file)
		if err != nil {
			return infraError(err)
		}
		defer f.Close()
		if err := c.WritePcap(cmd.Context(), f); err != nil {
			return infraError(err)
		}
		info, err := f.Stat()
		if err != nil {
			return infraError(err)
		}
		fmt.Fprintf(a.stdout, "%s: %d bytes\n", file, info.Size())
		return infraError(f.Close())
	}
	return cmd
}
