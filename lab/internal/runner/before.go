package runner

import (
	"context"
	"fmt"
	"time"

	"github.com/isthmus-net/isthmus/lab/internal/expect"
	"github.com/isthmus-net/isthmus/lab/internal/scenario"
)

const (
	// unchangedFor is how long hosts have to stay the same before the first row, and
	// unchangedWithin by when.
	unchangedFor    = time.Second
	unchangedWithin = 30 * time.Second
)

// lookBefore looks at what there is before a row. Before the first one hosts may be about
// to apply what statuses have already: no status says that a node knows the tunnel's MTU,
// which its InternalFabric got last. So hosts are looked at until they stay the same.
func (r *Runner) lookBefore(ctx context.Context, s *scenario.Scenario) (expect.Leftovers, error) {
	now, err := expect.Observe(ctx, r.World, r.api, s.Topology)
	if err != nil || r.looked {
		return now, err
	}
	since := time.Now()
	err = until(ctx, r.allowAction(unchangedWithin), "hosts go on changing, though the clusters have converged", func(ctx context.Context) (bool, error) {
		next, err := expect.Observe(ctx, r.World, r.api, s.Topology)
		if err != nil {
			return false, err
		}
		if more, less := now.Compare(next); len(more)+len(less) > 0 {
			now, since = next, time.Now()
		}
		return time.Since(since) >= r.patient(unchangedFor), nil
	})
	if err != nil {
		return nil, fmt.Errorf("before the first row: %w", err)
	}
	r.looked = true
	return now, nil
}
