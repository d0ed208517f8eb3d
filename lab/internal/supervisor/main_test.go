package supervisor_test

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/appliance/nettest"
	"github.com/isthmus-net/isthmus/lab/internal/containerinit"
	"github.com/isthmus-net/isthmus/lab/internal/kubelet"
	"github.com/isthmus-net/isthmus/lab/internal/supervisor"
	"github.com/isthmus-net/isthmus/lab/internal/topology"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// init keeps the goroutines of tests off the main thread: one that tries whether
// it may make namespaces would take /proc/self into them, for good.
func init() { runtime.LockOSThread() }

// runner is the argument that makes this program start a lab and wait to be
// killed.
const runner = "runner"

// TestMain is also what `lab` is: the supervisor, the agent and the containers
// are this program again.
func TestMain(m *testing.M) {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	logger := slog.New(slog.NewTextHandler(os.Stderr, nil))
	if len(os.Args) < 2 {
		os.Exit(m.Run())
	}
	var err error
	switch os.Args[1] {
	case "supervise":
		err = supervisor.Serve(ctx, logger)
	case "agent":
		f := flag.NewFlagSet("agent", flag.ExitOnError)
		cfg := world.AgentConfig{Logger: logger}
		f.StringVar(&cfg.Listen, "listen", "", "")
		f.StringVar(&cfg.Dir, "dir", "", "")
		f.StringVar(&cfg.BinDir, "bin-dir", "", "")
		f.BoolVar(&cfg.Machine, "machine", false, "")
		f.Parse(os.Args[2:])
		err = world.ServeAgent(ctx, cfg)
	case containerinit.Argument:
		os.Exit(containerinit.Init())
	case kubelet.Argument:
		end, children := make(chan os.Signal, 1), make(chan os.Signal, 1)
		signal.Notify(end, syscall.SIGTERM)
		signal.Notify(children, syscall.SIGCHLD)
		os.Exit(kubelet.Boot(end, children))
	case runner:
		err = runLab(ctx, os.Args[2])
	default:
		os.Exit(m.Run())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// two is a small world of two clusters and a host outside.
func two(t testing.TB) world.Spec {
	t.Helper()
	top, err := topology.Load(filepath.Join("testdata", "two.yaml"))
	assert.NilError(t, err)
	return world.Plan(top)
}

func binDir(t testing.TB) string {
	t.Helper()
	dir, err := filepath.Abs("../../../bin")
	assert.NilError(t, err)
	return dir
}

// runDir is short: it will have a socket in it.
func runDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "lab")
	assert.NilError(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// native starts a lab without Kubernetes in it.
func native(t *testing.T) *world.Client {
	t.Helper()
	nettest.NeedRoot(t)
	c, err := supervisor.Start(t.Context(), supervisor.Config{
		Name: "test", World: supervisor.Native, Spec: two(t), BinDir: binDir(t), RunDir: runDir(t), Ephemeral: true, KubernetesLess: true,
		Progress: func(p world.Progress) { t.Log(p.Message, p.Took) },
	})
	assert.NilError(t, err)
	t.Cleanup(func() { c.Close() })
	return c
}
