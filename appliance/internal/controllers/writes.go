package controllers

import (
	"context"
	"fmt"
	"maps"
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

// deleted takes note of an object that somebody has deleted, of the version that the
// informers had last. What was written to an earlier version they have seen; without
// this they would be waited for, since they have not what is gone.
func (w *writes) deleted(key objectKey, version string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if x, ok := w.todo[key]; ok && x.gone == "" && !older(version, x.version) {
		delete(w.todo, key)
	}
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
	limit := time.NewTimer(patience)
	defer limit.Stop()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		if w.allSeen(ctx, informers) {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-limit.C:
			return w.giveUp()
		case <-tick.C:
		}
	}
}

// allSeen forgets the writes that the informers have seen; true: no other is left.
func (w *writes) allSeen(ctx context.Context, informers client.Reader) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	maps.DeleteFunc(w.todo, func(key objectKey, x written) bool { return x.seen(ctx, informers, key) })
	return len(w.todo) == 0
}

// giveUp forgets all writes, and says what the informers have not seen.
func (w *writes) giveUp() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	todo := w.todo
	w.todo = nil
	for key := range todo {
		return fmt.Errorf("%d not seen after %v, among them %v", len(todo), patience, key)
	}
	return nil
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
