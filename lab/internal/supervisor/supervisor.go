// Package supervisor runs a lab: PID 1 of the lab's own PID, mount, network
// and IPC namespaces, with the control planes, each in a network namespace of
// its own, and the world beside them. All of it ends with that one process,
// whatever ends it, because the kernel ends what lives in its namespaces.
package supervisor

import (
	"context"
	"errors"
	"log/slog"

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
	RunDir string     `json:"runDir"` // default: DefaultRunDir(Name); on the host's file system
	// Ephemeral labs end with the process that started them.
	Ephemeral bool `json:"ephemeral"`
	// Executable is started with the argument "supervise"; default: this one.
	Executable string `json:"executable,omitempty"`
	// Progress hears what happens until the lab is ready. Optional.
	Progress func(world.Progress) `json:"-"`
	Logger   *slog.Logger         `json:"-"` // optional
}

// Start starts a lab and returns when its control planes serve, its nodes are
// ready, or with the reason why they are not. Closing the client of an
// ephemeral lab ends the lab.
func Start(ctx context.Context, cfg Config) (*world.Client, error) {
	return nil, errors.ErrUnsupported
}

// Serve is the supervisor itself: what the hidden command `lab supervise`
// runs, in the namespaces that Start made. It reads its Config from file
// descriptor 3 and returns when the lab has ended.
func Serve(ctx context.Context, logger *slog.Logger) error { return errors.ErrUnsupported }

// DefaultRunDir is where a lab of that name has its control socket.
func DefaultRunDir(name string) string { return "/run/isthmus-lab/" + name }

// Find returns the client of a running lab, or world.ErrNotRunning.
func Find(name string) (*world.Client, error) { return nil, world.ErrNotRunning }

// List returns the names of the labs that run.
func List() ([]string, error) { return nil, errors.ErrUnsupported }
