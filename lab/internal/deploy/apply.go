package deploy

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/lab/internal/pace"
)

// fieldOwner is the lab's name in the managed fields of what it applies.
const fieldOwner = client.FieldOwner("isthmus-lab")

// apply brings the objects to the API server by server-side apply, in their
// order.
func apply(ctx context.Context, c client.Client, objects []*unstructured.Unstructured) error {
	for _, o := range objects {
		if err := applyOne(ctx, c, o); err != nil {
			return err
		}
	}
	return nil
}

// applyTogether is apply without an order.
func applyTogether(ctx context.Context, c client.Client, objects []*unstructured.Unstructured) error {
	g, ctx := errgroup.WithContext(ctx)
	for _, o := range objects {
		g.Go(func() error { return applyOne(ctx, c, o) })
	}
	return g.Wait()
}

// applyOne applies an object, in the namespace of the installation when it
// needs one and names none. Of a kind or a namespace that is on its way it
// tries again.
func applyOne(ctx context.Context, c client.Client, o *unstructured.Unstructured) error {
	var last error
	err := wait.PollUntilContextTimeout(ctx, 50*time.Millisecond, 2*time.Minute, true, func(ctx context.Context) (bool, error) {
		var namespaced bool
		if namespaced, last = c.IsObjectNamespaced(o); last == nil {
			if namespaced && o.GetNamespace() == "" {
				o.SetNamespace(Namespace)
			}
			last = c.Apply(ctx, client.ApplyConfigurationFromUnstructured(o.DeepCopy()), fieldOwner, client.ForceOwnership)
		}
		if meta.IsNoMatchError(last) || apierrors.IsNotFound(last) {
			return false, nil
		}
		return true, last
	})
	if errors.Is(err, context.DeadlineExceeded) && last != nil {
		err = last
	}
	if err != nil {
		return fmt.Errorf("apply %s: %w", describe(o), err)
	}
	return nil
}

// Poll calls check every 100 ms until it returns no reason to wait. The last
// reason is part of the error when the time is over, or when ctx ends before. With a meter in
// ctx ([pace.With]) the time is as much longer as the machine is slower.
func Poll(ctx context.Context, timeout time.Duration, check func(context.Context) (waitingFor string, err error)) error {
	most, meter := timeout, pace.From(ctx)
	if meter != nil {
		most = timeout * pace.Most
	}
	start := time.Now()
	return poll(ctx, most, func() bool { return time.Since(start) >= meter.Longer(timeout, start, time.Time{}) }, check)
}

// poll is Poll until over reports true, and for the time most at most.
func poll(ctx context.Context, most time.Duration, over func() bool, check func(context.Context) (waitingFor string, err error)) error {
	var reason string
	start := time.Now()
	err := wait.PollUntilContextTimeout(ctx, 100*time.Millisecond, most, true, func(ctx context.Context) (bool, error) {
		if reason != "" && over() { // check was called at least once
			return false, context.DeadlineExceeded
		}
		r, err := check(ctx)
		if err != nil {
			return false, err
		}
		if ctx.Err() == nil { // what fails because the time is over is no reason
			reason = r
		}
		return r == "", nil
	})
	if err == nil || reason == "" {
		return err
	}
	if ctx.Err() != nil {
		return fmt.Errorf("interrupted after %v, still waiting: %s: %w", time.Since(start).Round(100*time.Millisecond), reason, err)
	}
	return fmt.Errorf("after %v still waiting: %s: %w", time.Since(start).Round(100*time.Millisecond), reason, err)
}

func newUnstructured(apiVersion, kind string) *unstructured.Unstructured {
	u := &unstructured.Unstructured{}
	u.SetGroupVersionKind(schema.FromAPIVersionAndKind(apiVersion, kind))
	return u
}

func describe(o *unstructured.Unstructured) string {
	if o.GetNamespace() == "" {
		return o.GetKind() + " " + o.GetName()
	}
	return o.GetKind() + " " + o.GetNamespace() + "/" + o.GetName()
}
