// Command lab builds Kubernetes clusters out of network namespaces, joins them
// with the shipped daemons, and runs the scenarios that show what packets do.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/lab/internal/kubelet"
	"github.com/isthmus-net/isthmus/lab/internal/report"
)

// version is set by the Makefile.
var version = "unknown"

func main() {
	if len(os.Args) > 1 && os.Args[1] == kubelet.Argument {
		end, children := make(chan os.Signal, 1), make(chan os.Signal, 1)
		signal.Notify(end, syscall.SIGTERM, syscall.SIGINT)
		signal.Notify(children, syscall.SIGCHLD)
		os.Exit(kubelet.Boot(end, children))
	}
	// As for the control planes: a lab lives for minutes.
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(400)
	}
	ends := []os.Signal{os.Interrupt, syscall.SIGTERM}
	if !signal.Ignored(syscall.SIGHUP) { // nohup(1)
		ends = append(ends, syscall.SIGHUP)
	}
	ctx, stop := signal.NotifyContext(context.Background(), ends...)
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	code := run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// An app is what the commands share.
type app struct {
	stdin  io.Reader
	stdout io.Writer
	stderr io.Writer
	logger *slog.Logger
}

// run is the program: it returns the exit code.
func run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	a := &app{stdin: stdin, stdout: stdout, stderr: stderr, logger: slog.New(slog.NewTextHandler(stderr, nil))}
	root := newRoot(a)
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	var exit exitError
	switch {
	case err == nil:
		return report.ExitPass
	case errors.As(err, &exit):
		if exit.message != "" {
			fmt.Fprintln(stderr, exit.message)
		}
		return exit.code
	}
	// What is left came from cobra: an unknown command or flag.
	fmt.Fprintf(stderr, "lab: %v\nlab --help lists the commands\n", err)
	return report.ExitUsage
}

// An exitError ends the program with a code; the message may be empty when
// everything has been said.
type exitError struct {
	code    int
	message string
}

// Error is the message; nothing when everything has been said.
func (e exitError) Error() string { return e.message }

func usageError(format string, args ...any) error {
	return exitError{report.ExitUsage, "lab: " + fmt.Sprintf(format, args...)}
}

// infraError is for what is wrong with the machine or the lab itself.
func infraError(err error) error {
	if err == nil {
		return nil
	}
	var exit exitError
	if errors.As(err, &exit) {
		return err
	}
	return exitError{report.ExitInfra, "lab: " + err.Error()}
}

func newRoot(a *app) *cobra.Command {
	root := &cobra.Command{
		Use:   "lab",
		Short: "Kubernetes clusters on one machine, and what the packets between them do",
		Long: `lab builds real Kubernetes clusters out of network namespaces, without Docker,
joins them with the shipped daemons and runs scenarios on them.

  lab doctor              what this machine can run, and how to fix what it can't
  lab up two-clusters     build a topology and leave it up
  lab kubectl milan -- get pods -A -o wide
  lab exec milan/web -- ip route
  lab run                 run every scenario and say what held
  lab bench datapath      how fast pods reach each other, beside the bare tunnel
  lab down                take it down

Names: milan is a cluster, milan/node-1 a node, milan/web a pod of the topology,
milan/gateway the gateway pod, milan/router its way out, wan what joins them.

Exit codes: 0 all held · 1 an expectation did not hold · 2 usage or a mistake in
a file · 3 the machine or the lab failed, or it was interrupted · 4 nothing ran.`,
		Version:       version,
		SilenceErrors: true,
		SilenceUsage:  true,
	}
	root.SetIn(a.stdin)
	root.SetOut(a.stdout)
	root.SetErr(a.stderr)
	root.CompletionOptions.HiddenDefaultCmd = true
	dir := root.PersistentFlags().String("root", "", "folder with topologies, scenarios, k8s and bin (default: found from here upwards)")
	root.AddCommand(
		newDoctorCommand(a, dir),
		newUpCommand(a, dir),
		newDownCommand(a),
		newLsCommand(a),
		newInspectCommand(a),
		newExecCommand(a),
		newShellCommand(a),
		newKubectlCommand(a, dir),
		newCaptureCommand(a),
		newRunCommand(a, dir),
		newBenchCommand(a, dir),
		newLintCommand(a, dir),
		newSchemaCommand(a),
		newVMCommand(a, dir),
		newSuperviseCommand(a),
		newAgentCommand(a),
	)
	return root
}
