package deploy

import (
	"context"
	"errors"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// fieldOwner is the lab's name in the managed fields of what it applies.
const fieldOwner = client.FieldOwner("isthmus-lab")

// apply brings the objects to the API server by server-side apply, in their
// order. A kind that has just been defined is waited for.
func apply(ctx context.Context, c client.Client, objects []*unstructured.Unstructured) error {
	for _, o := range objects {
		if err := applyOne(ctx, c, o); err != nil {
			return fmt.Errorf("apply %s: %w", describe(o), err)
		}
	}
	return nil
}

func applyOne(ctx context.Context, c client.Client, o *unstructured.Unstructured) error {
	var last error
	err := wait.PollUntilContextTimeout(ctx, 100*time.Millisecond, 10*time.Second, true, func(ctx context.Context) (bool, error) {
		last = c.Apply(ctx, client.ApplyConfigurationFromUnstructured(o.DeepCopy()), fieldOwner, client.ForceOwnership)
		if last == nil {
			return true, nil
		}
		if meta.IsNoMatchError(last) {
			return false, nil // its CRD is not served yet
		}
		return false, last
	})
	if errors.Is(err, context.DeadlineExceeded) && last != nil {
		return last
	}
	return err
}

// waitEstablished waits until the API server serves the kinds.
func waitEstablished(ctx context.Context, c client.Client, crds []*unstructured.Unstructured) error {
	return poll(ctx, 20*time.Second, func(ctx context.Context) (string, error) {
		for _, crd := range crds {
			got := newUnstructured("apiextensions.k8s.io/v1", "CustomResourceDefinition")
			if err := c.Get(ctx, client.ObjectKeyFromObject(crd), got); err != nil {
				return err.Error(), nil
			}
			if !hasCondition(got, "Established") {
				return crd.GetName() + " is not established", nil
			}
		}
		return "", nil
	})
}

// poll calls check every 100 ms until it returns no reason to wait. The last
// reason is part of the error when the time is over.
func poll(ctx context.Context, timeout time.Duration, check func(context.Context) (waitingFor string, err error)) error {
	var reason string
	err := wait.PollUntilContextTimeout(ctx, 100*time.Millisecond, timeout, true, func(ctx context.Context) (bool, error) {
		r, err := check(ctx)
		if err != nil {
			return false, err
		}
		if ctx.Err() == nil { // what fails because the time is over is no reason
			reason = r
		}
		return r == "", nil
	})
	if err != nil && reason != "" {
		return fmt.Errorf("after %v still waiting: %s: %w", timeout, reason, err)
	}
	return err
}

func hasCondition(o *unstructured.Unstructured, name string) bool {
	conditions, _, _ := unstructured.NestedSlice(o.Object, "status", "conditions")
	for _, c := range conditions {
		if m, ok := c.(map[string]any); ok && m["type"] == name && m["status"] == "True" {
			return true
		}
	}
	return false
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
