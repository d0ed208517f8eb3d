package peer

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/util/retry"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
)

// rollBack takes back what this run made and nothing else, the last first.
func (r *run) rollBack(ctx context.Context) error {
	var failed []error
	for _, e := range slices.Backward(r.journal) {
		ref := r.both.ref(e.On, e.Object)
		var err error
		switch e.Deed {
		case Create:
			err = r.unmake(ctx, e, ref)
		case Update:
			err = r.restore(ctx, e, ref)
		}
		if err != nil {
			failed = append(failed, fmt.Errorf("%s: %w", ref, err))
		}
	}
	return errors.Join(failed...)
}

// unmake deletes an object that this run made, a namespace only when nobody else
// has come to use it.
func (r *run) unmake(ctx context.Context, e entry, ref Ref) error {
	if _, ok := e.Object.(*corev1.Namespace); ok {
		r.both[e.On].Namespace.Name = e.Object.GetName()
		who, err := r.occupants(ctx, e.On)
		if err != nil {
			return err
		}
		if len(who) > 0 {
			r.note(left(ref, who))
			return nil
		}
	}
	uid := e.Object.GetUID()
	err := r.Clusters[e.On].Client.Delete(ctx, e.Object, client.Preconditions{UID: &uid})
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) { // gone, or another of the same name
		return nil
	}
	if err == nil {
		r.Say(ref.String() + " deleted again")
	}
	return err
}

// restore writes the spec that an object had before, unless somebody else has
// changed it since. The controller writes the status of such an object, perhaps between our read and our
// write: then both are done again.
func (r *run) restore(ctx context.Context, e entry, ref Ref) error {
	if e.before == nil {
		return nil
	}
	return retry.RetryOnConflict(wait.Backoff{Steps: 8, Duration: 20 * time.Millisecond, Factor: 2}, func() error { return r.restoreOnce(ctx, e, ref) })
}

func (r *run) restoreOnce(ctx context.Context, e entry, ref Ref) error {
	cl := r.Clusters[e.On].Client
	now := e.Object.DeepCopyObject().(client.Object)
	if err := cl.Get(ctx, client.ObjectKeyFromObject(now), now); err != nil {
		return client.IgnoreNotFound(err)
	}
	if !sameSpec(now, e.Object) {
		r.note(ref.String() + " stays: somebody else has changed it since")
		return nil
	}
	was := now.DeepCopyObject().(client.Object)
	setSpec(now, e.before)
	if err := cl.Patch(ctx, now, client.MergeFromWithOptions(was, client.MergeFromWithOptimisticLock{}), FieldOwner); err != nil {
		return err
	}
	r.Say(ref.String() + " is as it was before")
	return nil
}

func sameSpec(a, b client.Object) bool {
	c := a.DeepCopyObject().(client.Object)
	setSpec(c, b)
	return reflect.DeepEqual(a, c)
}

// setSpec gives an object the spec of another one of its kind.
func setSpec(o, from client.Object) {
	switch o := o.(type) {
	case *v1beta1.Configuration:
		o.Spec = from.(*v1beta1.Configuration).Spec
	case *v1beta1.GatewayServer:
		o.Spec = from.(*v1beta1.GatewayServer).Spec
	case *v1beta1.GatewayClient:
		o.Spec = from.(*v1beta1.GatewayClient).Spec
	case *v1beta1.PublicKey:
		o.Spec = from.(*v1beta1.PublicKey).Spec
	}
}
