// Isthmus connects the pods of Kubernetes clusters. One binary is all of it:
// the controller of a cluster, the daemon of a node and the daemon of a
// gateway.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"github.com/go-logr/logr"
	"github.com/spf13/cobra"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"
)

// version is set by the linker.
var version = "devel"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

// run is the program; what it returns is the exit status.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	cmd := newRootCommand(stderr)
	cmd.SetArgs(args)
	cmd.SetOut(stdout)
	cmd.SetErr(stderr)
	if err := cmd.ExecuteContext(ctx); err != nil {
		fmt.Fprintf(stderr, "isthmus: %v\n", err)
		return 1
	}
	return 0
}

func newRootCommand(stderr io.Writer) *cobra.Command {
	g := &globals{stderr: stderr}
	cmd := &cobra.Command{
		Use:           "isthmus",
		Short:         "Connect the pods of Kubernetes clusters",
		Version:       version,
		SilenceErrors: true, // run prints them
		SilenceUsage:  true,
		PersistentPreRunE: func(*cobra.Command, []string) error {
			return g.setup()
		},
	}
	f := cmd.PersistentFlags()
	f.StringVar(&g.kubeconfig, "kubeconfig", os.Getenv("KUBECONFIG"), "`file` that says where the API server is; empty: the service account of the pod")
	f.StringVar(&g.level, "log-level", "info", "least `level` that is logged: debug, info, warn or error")
	f.StringVar(&g.format, "log-format", "text", "`form` of the log: text or json")
	cmd.AddCommand(newControllerCommand(g), newNodeCommand(g), newGatewayCommand(g), newNetNSCommand(g), newTeardownCommand(g))
	return cmd
}

// globals is what all commands share.
type globals struct {
	stderr        io.Writer
	kubeconfig    string
	level, format string
	log           *slog.Logger
}

// setup makes the logger, and has the libraries log to it.
func (g *globals) setup() error {
	var level slog.Level
	if err := level.UnmarshalText([]byte(g.level)); err != nil {
		return fmt.Errorf("--log-level %q is not a level; write debug, info, warn or error", g.level)
	}
	opts := &slog.HandlerOptions{Level: level}
	var h slog.Handler
	switch g.format {
	case "text":
		h = slog.NewTextHandler(g.stderr, opts)
	case "json":
		h = slog.NewJSONHandler(g.stderr, opts)
	default:
		return fmt.Errorf("--log-format %q is neither text nor json", g.format)
	}
	g.log = slog.New(h)
	slog.SetDefault(g.log)
	klog.SetSlogLogger(slog.New(clientHandler{h}))
	ctrllog.SetLogger(logr.FromSlogHandler(h))
	return nil
}

// restConfig says how to reach the API server.
func (g *globals) restConfig(userAgent string) (*rest.Config, error) {
	var config *rest.Config
	var err error
	if g.kubeconfig != "" {
		config, err = clientcmd.BuildConfigFromFlags("", g.kubeconfig)
	} else if config, err = rest.InClusterConfig(); errors.Is(err, rest.ErrNotInCluster) {
		err = errors.New("not in a pod, and no --kubeconfig: write where the API server is")
	}
	if err != nil {
		return nil, fmt.Errorf("API server: %w", err)
	}
	config.UserAgent = userAgent + "/" + version
	config.QPS, config.Burst = 50, 100
	return config, nil
}
