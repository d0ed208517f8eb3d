package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/client-go/rest"

	"github.com/isthmus-net/isthmus/lab/internal/bench"
	"github.com/isthmus-net/isthmus/lab/internal/kind"
	"github.com/isthmus-net/isthmus/lab/internal/kubeconfig"
	"github.com/isthmus-net/isthmus/lab/internal/report"
	"github.com/isthmus-net/isthmus/lab/internal/rundir"
	"github.com/isthmus-net/isthmus/lab/internal/runner"
	"github.com/isthmus-net/isthmus/lab/internal/supervisor"
	"github.com/isthmus-net/isthmus/lab/internal/topology"
	"github.com/isthmus-net/isthmus/lab/internal/world"
	"github.com/isthmus-net/isthmus/lab/internal/yamlfile"
)

// A place is where the lab's files are.
type place struct{ root string }

// findPlace looks for the repository: --root, then the working directory and
// those above, then where the binary is.
func findPlace(root string) (place, error) {
	if root != "" {
		if info, err := os.Stat(filepath.Join(root, "topologies")); err != nil || !info.IsDir() {
			return place{}, usageError("--root %s: there is no folder topologies in it", root)
		}
		abs, err := filepath.Abs(root)
		return place{abs}, infraError(err)
	}
	var starts []string
	if wd, err := os.Getwd(); err == nil {
		starts = append(starts, wd)
	}
	if exe, err := os.Executable(); err == nil {
		starts = append(starts, filepath.Dir(exe))
	}
	for _, dir := range starts {
		for {
			if info, err := os.Stat(filepath.Join(dir, "topologies")); err == nil && info.IsDir() {
				return place{dir}, nil
			}
			if parent := filepath.Dir(dir); parent != dir {
				dir = parent
				continue
			}
			break
		}
	}
	return place{}, usageError("there is no folder topologies here or above: run lab in the repository, or say --root DIR")
}

func (p place) topologies() string { return filepath.Join(p.root, "topologies") }
func (p place) scenarios() string  { return filepath.Join(p.root, "scenarios") }
func (p place) bin() string        { return filepath.Join(p.root, "bin") }
func (p place) chart() string      { return filepath.Join(p.root, "k8s", "chart") }
func (p place) runs() string       { return filepath.Join(p.root, "runs") }

// topologyNamed loads a topology by its name or its file.
func (p place) topologyNamed(name string) (*topology.Topology, error) {
	path := name
	if !strings.HasSuffix(name, ".yaml") {
		path = filepath.Join(p.topologies(), name+".yaml")
	}
	t, err := topology.Load(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, usageError("there is no topology %q in %s\n%s", name, p.topologies(), yamlfile.DidYouMean(name, p.topologyNames()))
	}
	var bad *yamlfile.Error
	if errors.As(err, &bad) {
		return nil, exitError{report.ExitUsage, bad.Error()}
	}
	if err != nil {
		return nil, fileError(path, err)
	}
	return t, nil
}

func (p place) topologyNames() []string {
	paths, err := filepath.Glob(filepath.Join(p.topologies(), "*.yaml"))
	if err != nil {
		return nil // the pattern is a constant
	}
	var names []string
	for _, path := range paths {
		names = append(names, strings.TrimSuffix(filepath.Base(path), ".yaml"))
	}
	return names
}

// A labClient speaks to a lab, whatever its world.
type labClient interface {
	runner.World
	bench.World
	// Dial connects to an address as the control plane of a cluster would.
	Dial(ctx context.Context, cluster, network, address string) (net.Conn, error)
	// Down ends the lab and returns when it is gone.
	Down(ctx context.Context) error
	// Close ends an ephemeral lab; another one goes on.
	Close() error
}

var (
	_ labClient = &world.Client{}
	_ labClient = &kind.Lab{}
	_ labClient = &kubeconfig.Lab{}
)

// kindLabs has the run directories of labs of the world kind: those of all
// labs are side by side.
func kindLabs() string { return rundir.Base() }

// listLabs returns the names of the labs of all worlds that run.
func listLabs() ([]string, error) {
	names, err := supervisor.List()
	if err != nil {
		return nil, err
	}
	more, err := kind.List(kindLabs())
	return slices.Sorted(slices.Values(append(names, more...))), err
}

// findLab returns the client of a running lab, or world.ErrNotRunning.
func findLab(name string) (labClient, error) {
	if l, err := kind.Open(filepath.Join(kindLabs(), name)); err == nil || !errors.Is(err, world.ErrNotRunning) {
		return l, err
	}
	return supervisor.Find(name)
}

// running returns the client of the lab of that name, or of the only one whose
// name starts so; without a name, of the only one that runs.
func running(name string) (labClient, string, error) {
	names, err := listLabs()
	if err != nil {
		return nil, "", infraError(err)
	}
	if name, err = pick(names, name); err != nil {
		return nil, "", err
	}
	c, err := findLab(name)
	if errors.Is(err, world.ErrNotRunning) { // it went down in between
		return nil, "", notRunning(name)
	}
	return c, name, infraError(err)
}

// pick finds the one of the running labs that is meant.
func pick(running []string, name string) (string, error) {
	if slices.Contains(running, name) {
		return name, nil
	}
	var fits []string
	for _, r := range running {
		if strings.HasPrefix(r, name) {
			fits = append(fits, r)
		}
	}
	switch {
	case len(fits) == 1:
		return fits[0], nil
	case len(fits) > 1 && name == "":
		return "", usageError("several labs are running: say --lab %s", strings.Join(fits, "|"))
	case len(fits) > 1:
		return "", usageError("%q may be any of the labs %s: write more of the name", name, strings.Join(fits, ", "))
	case name == "":
		return "", exitError{report.ExitInfra, "lab: no lab is running: lab up two-clusters starts one"}
	}
	return "", notRunning(name)
}

func notRunning(name string) error {
	return exitError{report.ExitInfra, fmt.Sprintf("lab: no lab %q is running: lab ls lists those that are", name)}
}

// labFlag adds --lab to a command that works on a running lab.
func labFlag(cmd *cobra.Command) *string {
	return cmd.Flags().String("lab", "", "name of the lab, or how it starts, when several run")
}

// clusters lets deploy reach the API servers.
type clusters struct {
	ctx    context.Context
	client labClient
}

// RESTConfig is how an administrator reaches a cluster's API server.
func (c clusters) RESTConfig(cluster string) (*rest.Config, error) {
	return c.client.RESTConfig(c.ctx, cluster)
}
