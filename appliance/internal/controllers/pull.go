package controllers

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/plan"
)

// Namespaces of peerings come and go, so the right to have pods there can't be
// that of a Role. The admission policy isthmus-controller-pulls leaves of it those
// that pull images and may do nothing.
//
// +kubebuilder:rbac:groups="",resources=pods,verbs=create;delete

// pull makes a pod that pulls images exist. A pod never changes, so one that is
// there is what is planned.
func (w *writer) pull(ctx context.Context, want *corev1.Pod) error {
	key := keyFor(want)
	live, err := w.live(ctx, key)
	switch {
	case err != nil:
		return fmt.Errorf("%v: %w", key, err)
	case live != nil && live.GetDeletionTimestamp() != nil:
		return fmt.Errorf("%v: %w", key, errDeleting)
	case live != nil:
		return nil
	}
	o := want.DeepCopy()
	err = w.cache.Create(ctx, o, client.FieldOwner(name))
	if (apierrors.IsForbidden(err) || apierrors.IsInvalid(err)) && !deletedMeanwhile(err) {
		// A quota, or a policy of somebody's: it is the user's to know.
		w.mu.Lock()
		defer w.mu.Unlock()
		if _, known := w.refused[key.ObjectKey]; !known {
			w.notify() // the next plan says so
		}
		w.refused[key.ObjectKey] = cluster.Pull{
			Meta:  cluster.Meta{Ref: cluster.Ref{Namespace: key.Namespace, Name: key.Name}, Created: time.Now()},
			Image: want.Spec.Containers[0].Image, Why: "the API server refuses a pod for it: " + err.Error(),
		}
		return nil
	}
	if err != nil {
		return fmt.Errorf("%v: %w", key, err)
	}
	w.mu.Lock()
	delete(w.refused, key.ObjectKey)
	w.mu.Unlock()
	w.log.Info("created", "object", key.String())
	w.metrics.wrote(key.Kind, "create")
	w.mu.Lock()
	defer w.mu.Unlock()
	w.writes.expect(w.scheme, key, o)
	return nil
}

// prunePulls deletes the pods that have pulled what they were for, or for which
// nobody waits any more.
func (w *writer) prunePulls(ctx context.Context, planned []*corev1.Pod) {
	keep := map[client.ObjectKey]bool{}
	for _, o := range planned {
		keep[client.ObjectKeyFromObject(o)] = true
	}
	for key := range w.refused {
		if !keep[key] {
			delete(w.refused, key)
		}
	}
	var list corev1.PodList
	if err := w.cache.List(ctx, &list, client.MatchingLabels{v1beta1.LabelManagedBy: v1beta1.ManagedBy, v1beta1.LabelComponent: v1beta1.ComponentGatewayPull}); err != nil {
		w.fail(fmt.Errorf("read pods: %w", err))
		return
	}
	for i := range list.Items {
		o := &list.Items[i]
		o.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Pod"))
		if keep[client.ObjectKeyFromObject(o)] || o.DeletionTimestamp != nil {
			continue
		}
		key := keyFor(plan.Object(o))
		if err := w.remove(ctx, key, o, "its images are not waited for any more"); err != nil && !apierrors.IsNotFound(err) {
			w.fail(fmt.Errorf("delete %v: %w", key, err))
		}
	}
}
