package runner

import (
	"context"
	"fmt"
	"time"

	"github.com/isthmus-net/isthmus/lab/internal/expect"
	"github.com/isthmus-net/isthmus/lab/internal/scenario"
)

const (
	// unchangedFor is how long hosts have to stay the same before a row begins that
	// finds them changed, and unchangedWithin by when.
	unchangedFor    = time.Second
	unchangedWithin = 30 * time.Second
)

// lookBefore looks at what there is on hosts before a row. If that is not what an
// earlier row waited for, it looks until hosts stay the same:
//
//   - Before the first row hosts may be about to apply what statuses have already: no
//     status says that a node knows the tunnel's MTU, which its InternalFabric got last.
//   - Before a later row a host may have something that is about to go. A controller
//     whose informers are behind makes objects again that have just been deleted with
//     their owner, and the garbage collector deletes them a moment later.
func (r *Runner) lookBefore(ctx context.Context, s *scenario.Scenario) (expect.Leftovers, error) {
	look := func(ctx context.Context) (expect.Leftovers, error) {
		return expect.Observe(ctx, r.World, r.api, s.Topology)
	}
	now, err := look(ctx)
	if err != nil {
		return nil, err
	}
	if r.before != nil && same(r.before, now) {
		return now, nil
	}
	if now, err = unchanged(ctx, r, now, look, same); err != nil {
		return nil, fmt.Errorf("before the row: %w", err)
	}
	r.before = now
	return now, nil
}

// unchanged looks until hosts have stayed the same for a second, or longer on a slower machine: a node takes
// a moment to apply what it has just been told.
func unchanged[T any](ctx context.Context, r *Runner, now T, look func(context.Context) (T, error), same func(a, b T) bool) (T, error) {
	since := time.Now()
	err := until(ctx, r.allowAction(unchangedWithin), "hosts go on changing, though the clusters have converged", func(ctx context.Context) (bool, error) {
		next, err := look(ctx)
		if err != nil {
			return false, err
		}
		if !same(now, next) {
			now, since = next, time.Now()
		}
		return time.Since(since) >= r.Pace.Longer(r.patient(unchangedFor), since, time.Time{}), nil
	})
	return now, err
}

func same(before, now expect.Leftovers) bool {
	more, less := before.Compare(now)
	return len(more)+len(less) == 0
}
