package kubeconfig

import (
	"context"
	"fmt"
	"io"

	"github.com/isthmus-net/isthmus/lab/internal/clusters"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

func (l *Lab) exec(ctx context.Context, req world.ExecRequest, s clusters.Streams) (int, error) {
	cluster, p, err := l.target(ctx, req)
	if err != nil {
		return 0, err
	}
	return l.InContainer(ctx, cluster, p, req, s)
}

// Exec runs the probe in a pod of the lab. A probe that ran has no error, whatever
// its exit code.
func (l *Lab) Exec(ctx context.Context, req world.ExecRequest) (world.ExecResult, error) {
	return clusters.Run(ctx, req, l.exec)
}

// ExecStream runs the probe with its input and output connected, and returns its
// exit code.
func (l *Lab) ExecStream(ctx context.Context, req world.ExecRequest, stdin io.Reader, stdout, stderr io.Writer, resize <-chan world.Resize) (int, error) {
	return clusters.Stream(ctx, req, clusters.Streams{Stdin: stdin, Stdout: stdout, Stderr: stderr, Resize: resize}, l.exec)
}

// Sightings is what other worlds have: nobody captures here.
func (l *Lab) Sightings(context.Context, world.SightingQuery) ([]world.Sighting, error) {
	return nil, world.ErrNoCaptures
}

// WirePackets is what other worlds have.
func (l *Lab) WirePackets(context.Context, world.WireQuery) (world.WireReport, error) {
	return world.WireReport{}, world.ErrNoCaptures
}

// Sealed is what other worlds have.
func (l *Lab) Sealed(context.Context, world.SealedQuery) (world.SealedReport, error) {
	return world.SealedReport{}, world.ErrNoCaptures
}

// WritePcap is what other worlds have.
func (l *Lab) WritePcap(context.Context, io.Writer) error { return world.ErrNoCaptures }

// PauseCaptures has nothing to pause.
func (l *Lab) PauseCaptures(context.Context) (resume func() error, err error) {
	return func() error { return nil }, nil
}

// Inventory is empty: nobody looks into the kernels of these clusters. What a row
// leaves behind in their APIs is seen all the same.
func (l *Lab) Inventory(context.Context) ([]world.Inventory, error) { return nil, nil }

// State is empty, as Inventory is.
func (l *Lab) State(context.Context) ([]world.HostState, error) { return nil, nil }

// cannot is the error of what would change clusters that are not the lab's.
func cannot(what string, args ...any) error {
	return fmt.Errorf("%s: the world %s does not do that to clusters that it has not made", fmt.Sprintf(what, args...), World)
}

// StopComponent is what other worlds have.
func (l *Lab) StopComponent(_ context.Context, cluster, component string) error {
	return cannot("stop %s of %s", component, cluster)
}

// StartComponent is what other worlds have.
func (l *Lab) StartComponent(_ context.Context, cluster, component string) error {
	return cannot("start %s of %s", component, cluster)
}

// Impair is what other worlds have.
func (l *Lab) Impair(_ context.Context, req world.ImpairRequest) error {
	return cannot("impair the link of %s", req.Host)
}

// KillContainer is what other worlds have.
func (l *Lab) KillContainer(_ context.Context, target, _ string) error {
	return cannot("kill in %s", target)
}

// JoinNode is what other worlds have.
func (l *Lab) JoinNode(_ context.Context, cluster, node string) error {
	return cannot("%s/%s joins", cluster, node)
}

// LeaveNode is what other worlds have.
func (l *Lab) LeaveNode(_ context.Context, cluster, node string) error {
	return cannot("%s/%s leaves", cluster, node)
}

// LoseNode is what other worlds have.
func (l *Lab) LoseNode(_ context.Context, cluster, node string) error {
	return cannot("%s/%s loses its power", cluster, node)
}

// RebootNode is what other worlds have.
func (l *Lab) RebootNode(_ context.Context, cluster, node string) error {
	return cannot("%s/%s reboots", cluster, node)
}
