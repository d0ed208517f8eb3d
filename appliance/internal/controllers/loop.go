package controllers

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/record"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/appliance/agent"
	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/plan"
)

// A reconciler holds what passes share. Nothing in it is needed to decide.
type reconciler struct {
	cfg    Config
	log    *slog.Logger
	cache  client.Client // reads from informers
	direct client.Reader // reads from the API server
	// apiServers are the informers of apiServerEndpoints.
	apiServers cache.Cache
	recorder   record.EventRecorder
	scheme     *runtime.Scheme
	metrics    *metrics

	changed  chan struct{} // of capacity 1: something changed
	writes   writes        // that informers must have seen before the next pass
	settled  map[objectKey]settled
	standing map[event]standing // events of the pass before
	// refused are the pods for images that the API server has refused when it was last
	// asked, which is in every pass that wants one.
	refused map[client.ObjectKey]cluster.Pull
	// leftOut are the objects with which no plan can be made, by UID.
	leftOut    map[types.UID]leftOut
	nextSearch time.Time      // for more of them
	dog        agent.Watchdog // that liveness asks
}

// Backoff after passes that failed. Passes that are only out of date count as failed once they have followed
// one another for staleFor: the informers of a busy API server may be seconds late.
const (
	firstRetry = 200 * time.Millisecond
	lastRetry  = 5 * time.Second
	staleFor   = 10 * time.Second
)

// tries are the passes since one succeeded.
type tries struct {
	retry   time.Duration // that was waited last, after a failure
	stale   time.Time     // since when every pass was only out of date; zero: the last one was not
	failure string        // that the log knows
}

// after takes the outcome of a pass, and returns when to try again; 0: it succeeded.
func (t *tries) after(ctx context.Context, log *slog.Logger, err error) time.Duration {
	switch {
	case err == nil:
		if t.failure != "" {
			log.InfoContext(ctx, "works again")
		}
		*t = tries{}
		return 0
	case onlyStale(err) && (t.stale.IsZero() || time.Since(t.stale) < staleFor):
		// Somebody was faster; what they wrote leads to a pass.
		if t.stale.IsZero() {
			t.stale = time.Now()
		}
		t.retry = 0
		log.DebugContext(ctx, "out of date, trying again", "err", err)
		return firstRetry
	}
	if !onlyStale(err) {
		t.stale = time.Time{}
	}
	t.retry = min(max(2*t.retry, firstRetry), lastRetry)
	if text := err.Error(); text != t.failure {
		log.ErrorContext(ctx, "pass failed, trying again", "err", err)
		t.failure = text
	}
	return t.retry
}

// run makes passes until ctx is done.
func (r *reconciler) run(ctx context.Context) error {
	if !r.apiServers.WaitForCacheSync(ctx) {
		return nil // ctx is done
	}
	// Somebody else may have led meanwhile.
	r.settled, r.standing, r.refused = map[objectKey]settled{}, map[event]standing{}, map[client.ObjectKey]cluster.Pull{}
	r.leftOut, r.nextSearch = map[types.UID]leftOut{}, time.Time{}
	var tries tries
	for {
		start := time.Now()
		var again time.Duration
		err := agent.Guard(func() (err error) {
			again, err = r.pass(ctx)
			return err
		})
		if ctx.Err() != nil {
			return nil
		}
		r.metrics.passed(time.Since(start), err)
		wait := r.cfg.Resync
		if retry := tries.after(ctx, r.log, err); retry > 0 {
			wait = retry
		}
		if again > 0 {
			wait = min(wait, again)
		}
		if !r.sleep(ctx, wait) {
			return nil
		}
	}
}

// sleep returns after a change, once no more came for the time of the debounce
// or ten times that has passed; or after the longest time. It returns false
// when ctx is done.
func (r *reconciler) sleep(ctx context.Context, longest time.Duration) bool {
	timer := time.NewTimer(longest)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	case <-r.changed:
	}
	limit := time.NewTimer(10 * r.cfg.Debounce)
	defer limit.Stop()
	for {
		quiet := time.NewTimer(r.cfg.Debounce)
		select {
		case <-ctx.Done():
			quiet.Stop()
			return false
		case <-limit.C:
			quiet.Stop()
			return true
		case <-quiet.C:
			return true
		case <-r.changed:
			quiet.Stop()
		}
	}
}

// pass reads, plans and writes once. What fails does not keep the rest from
// being written. It returns when the next pass has something to tell or to
// do; 0: not because of the time.
func (r *reconciler) pass(ctx context.Context) (again time.Duration, err error) {
	defer r.dog.At("") // the pass is over
	r.dog.At("waiting for the informers")
	if err := r.writes.wait(ctx, r.cache); err != nil {
		r.log.Warn("informers are behind what was written; going on", "err", err)
	}
	r.dog.At("reading the informers")
	objects, err := r.read(ctx)
	if err != nil {
		return 0, err
	}
	r.dog.At("the plan")
	result, err := r.plan(objects)
	if err != nil {
		return 0, err
	}
	err = r.write(ctx, &result)
	open, failed := r.handovers(ctx, objects)
	rotate, failedToo := r.rotations(ctx, objects)
	err = errors.Join(err, failed, failedToo)
	r.dog.At("telling of events")
	again = r.tell(result.Events)
	for _, due := range []time.Duration{open, rotate} {
		if due > 0 && (again == 0 || due < again) {
			again = due
		}
	}
	if !result.Due.IsZero() {
		if due := max(time.Until(result.Due), time.Millisecond); again == 0 || due < again {
			again = due
		}
	}
	return again, err
}

// onlyStale reports whether every failure was that an object had changed since
// it was read, or that it or its namespace had been deleted. That a field is
// somebody else's (server-side apply) does not pass.
func onlyStale(err error) bool {
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		for _, e := range joined.Unwrap() {
			if !onlyStale(e) {
				return false
			}
		}
		return true
	}
	return apierrors.IsConflict(err) && !apierrors.HasStatusCause(err, metav1.CauseTypeFieldManagerConflict) || apierrors.IsAlreadyExists(err) || deletedMeanwhile(err) ||
		errors.Is(err, errDeleting) || errors.Is(err, errOvertaken)
}

// deletedMeanwhile reports whether an object could not be written because it or
// its namespace is not there any more, or not for long. That of a kind that the
// API server does not know is another matter.
func deletedMeanwhile(err error) bool {
	return apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) ||
		apierrors.IsNotFound(err) && !apierrors.HasStatusCause(err, metav1.CauseTypeUnexpectedServerResponse)
}

// An event is what makes a plan.Event the same in two passes.
type event struct {
	uid, reason, message string
}

// standing is since when an event has been in every plan, and whether it has
// been told.
type standing struct {
	since time.Time
	told  bool
}

// tell emits the events that did not hold in the pass before, and of what hosts
// report that which has lasted. It returns when the next of these is due; 0:
// there is none.
func (r *reconciler) tell(list []plan.Event) (next time.Duration) {
	now, stand := time.Now(), make(map[event]standing, len(list))
	for _, e := range list {
		key := event{e.Object.UID, e.Reason, e.Message}
		s, before := r.standing[key]
		if !before {
			s.since = now
		}
		if wait := s.since.Add(r.cfg.EventDelay).Sub(now); e.Reported && !s.told && wait > 0 {
			if next == 0 || wait < next {
				next = wait
			}
		} else if !s.told {
			s.told = true
			r.log.Info("event", "object", describeRef(e.Object.Kind, e.Object.Namespace, e.Object.Name), "type", e.Type, "reason", e.Reason, "message", e.Message)
			r.recorder.Event(objectReference(e), e.Type, e.Reason, e.Message)
		}
		stand[key] = s
	}
	r.standing = stand
	return next
}

func objectReference(e plan.Event) *corev1.ObjectReference {
	o := e.Object
	ref := &corev1.ObjectReference{APIVersion: o.APIVersion, Kind: o.Kind, Namespace: o.Namespace, Name: o.Name}
	ref.UID = uid(o.UID)
	return ref
}

// describeRef is how an object is named in logs and errors.
func describeRef(kind, namespace, name string) string {
	return strings.TrimSpace(fmt.Sprintf("%s %s", kind, strings.TrimPrefix(namespace+"/"+name, "/")))
}
