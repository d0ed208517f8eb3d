package runner

import (
	"context"

	"github.com/isthmus-net/isthmus/lab/internal/expect"
	"github.com/isthmus-net/isthmus/lab/internal/scenario"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// impair changes what a link does to packets. At the end of the row it does
// again what the topology says.
func (r *Runner) impair(ctx context.Context, row *expect.Row, a *scenario.Impair, undo *undoList) error {
	host := a.Of.HostName(row.Topology)
	undo.add(func(ctx context.Context) error { return r.World.Impair(ctx, world.ImpairRequest{Host: host}) })
	return r.World.Impair(ctx, world.ImpairRequest{Host: host, With: &a.With})
}
