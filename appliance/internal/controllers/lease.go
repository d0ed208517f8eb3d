package controllers

import (
	"context"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
)

// A releasingLock gives its lease back although a renewal that was cut short has
// reached the API server all the same, just before. client-go tries once; when
// that fails, nobody decides anything until the lease has run out.
type releasingLock struct{ resourcelock.Interface }

// Update writes the record. One without a holder gives the lease back: while it
// is still ours, that is tried again.
func (l releasingLock) Update(ctx context.Context, r resourcelock.LeaderElectionRecord) error {
	err := l.Interface.Update(ctx, r)
	for r.HolderIdentity == "" && apierrors.IsConflict(err) {
		now, _, getErr := l.Get(ctx)
		if getErr != nil || now.HolderIdentity != l.Identity() {
			return err
		}
		err = l.Interface.Update(ctx, r)
	}
	return err
}
