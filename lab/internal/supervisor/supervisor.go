// Package supervisor runs a lab: PID 1 of the lab's own PID, mount, network
// and IPC namespaces, with the control planes, each in a network namespace of
// its own, and the world beside them. All of it ends with that one process,
// whatever ends it, because the kernel ends what lives in its namespaces.
package supervisor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/isthmus-net/isthmus/lab/internal/kubelet"
	"github.com/isthmus-net/isthmus/lab/internal/rundir"
	"github.com/isthmus-net/isthmus/lab/internal/topology"
	"github.com/isthmus-net/isthmus/lab/internal/vm"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// Worlds that a lab's nodes can live in.
const (
	Native = "native" // namespaces of this kernel
	VM     = "vm"     // namespaces inside a virtual machine
)

// Config says which lab to start. Name, World, Spec and BinDir are required.
type Config struct {
	Name   string     `json:"name"`
	World  string     `json:"world"` // Native or VM
	Spec   world.Spec `json:"spec"`
	BinDir string     `json:"binDir"` // has isthmus, lab, kubernetes and cni/
	RunDir string     `json:"runDir"` // default: rundir.Path(Name); on the host's file system
	// Ephemeral labs end with the process that started them.
	Ephemeral bool `json:"ephemeral"`
	// Executable is started with the argument "supervise", and with "agent"
	// for the native world; default: this one.
	Executable string `json:"executable,omitempty"`
	// CRDs is a directory of CustomResourceDefinitions, a file each, that
	// every cluster has from its start. Optional.
	CRDs string `json:"crds,omitempty"`
	// Programs are needed in BinDir beside those that every lab needs. Optional.
	Programs []string `json:"programs,omitempty"`
	// KubernetesLess labs have no control planes and no kubelets: for tests
	// of the world itself.
	KubernetesLess bool `json:"kubernetesLess,omitempty"`
	// Snapshots lets a virtual machine be restored from a snapshot in the
	// cache rather than booted, and leave one there.
	Snapshots bool `json:"snapshots,omitempty"`
	// Image is the virtual machine's; when it is not set the lab builds it.
	Image vm.Image `json:"image,omitzero"`
	// Restore is the key of a snapshot of a lab that has converged, by
	// SnapshotKey: the lab is restored from it rather than built.
	Restore string `json:"restore,omitempty"`
	// HostPID is the supervisor's own number on the host. Start sets it.
	HostPID int `json:"hostPID,omitempty"`
	// Cgroup is the lab's, where nodes with containerd have theirs. Start sets
	// it.
	Cgroup string `json:"cgroup,omitempty"`
	// Progress hears what happens until the lab is ready. Optional.
	Progress func(world.Progress) `json:"-"`
}

// Files of a lab in its run directory, beside those that package rundir has.
const (
	socketFile = "control.sock"
	logFile    = "supervisor.log"
	stateDir   = "state" // a tmpfs that only the lab sees

	// OriginFile is for who started the lab: what it is made from, once it is
	// whole. It goes when a lab of that name starts.
	OriginFile = "origin.json"
)

// labName is what a lab may be called: it becomes a directory.
var labName = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,62}$`)

func (c *Config) complete() error {
	var errs []error
	if !labName.MatchString(c.Name) {
		errs = append(errs, fmt.Errorf("lab name %q: use up to 63 small letters, digits and hyphens", c.Name))
	}
	if c.World != Native && c.World != VM {
		errs = append(errs, fmt.Errorf("world %q: use %s or %s", c.World, Native, VM))
	}
	if c.RunDir == "" {
		c.RunDir = rundir.Path(c.Name)
	}
	if !filepath.IsAbs(c.RunDir) {
		errs = append(errs, fmt.Errorf("run directory %q: use an absolute path", c.RunDir))
	}
	// A socket's path has 108 bytes.
	if n := len(filepath.Join(c.RunDir, socketFile)); n > 107 {
		errs = append(errs, fmt.Errorf("run directory %q: its path is %d bytes too long for a socket", c.RunDir, n-107))
	}
	if c.Executable == "" {
		exe, err := os.Executable()
		errs = append(errs, err)
		c.Executable = exe
	}
	for _, b := range c.binaries() {
		errs = append(errs, checkProgram(c.BinDir, b))
	}
	return errors.Join(errs...)
}

// wantsCgroup tells whether the lab has nodes that need cgroups of their own.
func (c *Config) wantsCgroup() bool {
	return c.World == Native && !c.KubernetesLess &&
		slices.ContainsFunc(c.Spec.Clusters, func(cl world.ClusterSpec) bool { return cl.Runtime == topology.RuntimeContainerd })
}

// cniBinaries are what a CNI profile needs beyond the bridge's.
var cniBinaries = map[string][]string{
	topology.CNIPtP:     {"cni/ptp"},
	topology.CNIIPPool:  {"cni/ptp"},
	topology.CNIVPC:     {"cni/ptp"},
	topology.CNIFlannel: {"cni/flannel", "flanneld"},
}

// Files are the files of BinDir that a lab is made from, by their paths in it.
func (c *Config) Files() []string {
	files := c.binaries()
	if slices.ContainsFunc(c.Spec.Clusters, func(cl world.ClusterSpec) bool { return cl.Runtime == topology.RuntimeContainerd }) {
		for _, image := range kubelet.Images() {
			files = append(files, filepath.Join(world.ImagesDir, image))
		}
	}
	return files
}

func (c *Config) binaries() []string {
	need := slices.Clone(c.Programs)
	if !c.KubernetesLess {
		need = append(need, "kubernetes", "kube-proxy", "isthmus", "lab", "probe", "cni/bridge", "cni/host-local", "cni/portmap")
		for _, cl := range c.Spec.Clusters {
			add := cniBinaries[cl.CNI]
			if cl.Runtime == topology.RuntimeContainerd {
				add = slices.Concat(add, kubelet.Programs())
			}
			for _, b := range add {
				if !slices.Contains(need, b) {
					need = append(need, b)
				}
			}
		}
	}
	if c.World == VM && !slices.Contains(need, "lab") {
		need = append(need, "lab")
	}
	return need
}

// Find returns the client of a running lab, or world.ErrNotRunning.
func Find(name string) (*world.Client, error) {
	if !labName.MatchString(name) {
		return nil, fmt.Errorf("lab name %q: use up to 63 small letters, digits and hyphens", name)
	}
	dir := rundir.Path(name)
	if !rundir.Running(dir) {
		others, err := List()
		if err != nil {
			return nil, err
		}
		there := "no lab runs"
		if len(others) > 0 {
			there = "there runs " + strings.Join(others, ", ")
		}
		return nil, fmt.Errorf("lab %s: %w; %s: `lab up TOPOLOGY` starts one", name, world.ErrNotRunning, there)
	}
	return newClient(dir), nil
}

// newClient is the client of the lab of a run directory. Down returns when
// nothing of the lab is left.
func newClient(dir string) *world.Client {
	c := world.NewClient(filepath.Join(dir, socketFile))
	c.OnDown(func(ctx context.Context) error { return removeRest(ctx, dir) })
	return c
}

// removeRest waits until a lab that is ending has ended, and removes what it has
// not removed itself.
func removeRest(ctx context.Context, dir string) error {
	ctx, cancel := context.WithTimeout(ctx, endTimeout)
	defer cancel()
	return rundir.Remove(ctx, dir)
}

// List returns the names of the labs that run.
func List() ([]string, error) {
	entries, err := os.ReadDir(rundir.Base())
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var names []string
	for _, e := range entries {
		if e.IsDir() && rundir.Running(rundir.Path(e.Name())) {
			names = append(names, e.Name())
		}
	}
	return names, nil
}
