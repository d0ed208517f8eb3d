package controllers

import (
	"context"
	"fmt"
	"strconv"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// writes are those of one pass. The plan takes what is free from what is
// taken; a pass that did not see what the one before had given away could give
// it away again.
type writes struct {
	mu   sync.Mutex
	todo map[objectKey]written
}

// written is an object after a write: of at least this version, or gone.
type written struct {
	scheme  *runtime.Scheme
	version string
	gone    types.UID
	// others made it, so that the informers had it before the write: where they
	// have not, it has been deleted since.
	others bool
}

func (w *writes) expect(scheme *runtime.Scheme, key objectKey, o client.Object) {
	w.put(key, written{scheme: scheme, version: o.GetResourceVersion()})
}

// expectOthers is expect for an object that somebody else made, and may delete at
// any time: an upgrade that replaces the pods of nodes does.
func (w *writes) expectOthers(scheme *runtime.Scheme, key objectKey, o client.Object) {
	w.put(key, written{scheme: scheme, version: o.GetResourceVersion(), others: true})
}

func (w *writes) expectGone(scheme *runtime.Scheme, key objectKey, id types.UID) {
	w.put(key, written{scheme: scheme, gone: id})
}

func (w *writes) put(key objectKey, x written) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.todo == nil {
		w.todo = map[objectKey]written{}
	}
	w.todo[key] = x
}

// patience is how long informers may take to see a write. They need
// milliseconds; if they need longer than this, a pass on what is known is
// better than none.
const patience = 5 * time.Second

// wait returns when the informers have seen all writes.
func (w *writes) wait(ctx context.Context, informers client.Reader) error {
	w.mu.Lock()
	todo := w.todo
	w.todo = nil
	w.mu.Unlock()
	limit := time.NewTimer(patience)
	defer limit.Stop()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		for key, x := range todo {
			if x.seen(ctx, informers, key) {
				delete(todo, key)
			}
		}
		if len(todo) == 0 {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-limit.C:
			for key := range todo {
				return fmt.Errorf("%d not seen after %v, among them %v", len(todo), patience, key)
			}
		case <-tick.C:
		}
	}
}

func (x written) seen(ctx context.Context, informers client.Reader, key objectKey) bool {
	o, err := x.scheme.New(key.GroupVersionKind)
	if err != nil {
		return true
	}
	live := o.(client.Object)
	err = informers.Get(ctx, key.ObjectKey, live)
	if x.gone != "" {
		return err != nil && client.IgnoreNotFound(err) == nil ||
			err == nil && (live.GetUID() != x.gone || live.GetDeletionTimestamp() != nil)
	}
	if x.others && apierrors.IsNotFound(err) {
		return true
	}
	return err == nil && !older(live.GetResourceVersion(), x.version)
}

// older compares resource versions, which are numbers that grow.
func older(a, b string) bool {
	x, err := strconv.ParseUint(a, 10, 64)
	if err != nil {
		return false
	}
	y, err := strconv.ParseUint(b, 10, 64)
	return err == nil && x < y
}
