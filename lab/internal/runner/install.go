package runner

import (
	"context"
	"errors"
	"fmt"

	"github.com/isthmus-net/isthmus/lab/internal/deploy"
	"github.com/isthmus-net/isthmus/lab/internal/report"
)

// operate lets the operator of a cluster do something with the installation, by
// a program. At the end of the row it is what it was when the row first did.
// What the program can't do is a fault of the product: it says why.
func (r *Runner) operate(ctx context.Context, cluster, by, what string, undo *undoList, do func(deploy.Operator) error) (*report.Fault, error) {
	if r.Operator == nil {
		return nil, fmt.Errorf("install: %w", errNotTold)
	}
	if !r.operated[cluster] {
		was, err := r.Operator(ctx).Installation(ctx, cluster)
		if err != nil {
			return nil, err
		}
		if r.operated == nil {
			r.operated = map[string]bool{}
		}
		r.operated[cluster] = true
		undo.add(func(ctx context.Context) error {
			delete(r.operated, cluster)
			defer r.api.Forget(cluster)
			return r.Operator(ctx).Restore(ctx, cluster, was)
		})
	}
	defer r.api.Forget(cluster) // the kinds are others now
	o := r.Operator(ctx)
	o.By = by
	err := do(o)
	var failed *deploy.CommandError
	if errors.As(err, &failed) {
		return &report.Fault{Expectation: what, Want: failed.Command + " succeeds", Got: err.Error()}, nil
	}
	return nil, err
}
