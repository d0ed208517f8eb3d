package controllers

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
	"gotest.tools/v3/poll"
	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"k8s.io/klog/v2"
)

// aLease is a lease as the API server keeps it: who has not seen the last
// version can't write.
type aLease struct {
	mu            sync.Mutex
	record        resourcelock.LeaderElectionRecord
	version, seen int
	renewing      chan struct{} // if not nil: yields when a renewal has begun,
	answer        chan struct{} // and it is answered when this is closed
	away          bool          // no API server answers
}

func (l *aLease) Get(ctx context.Context) (*resourcelock.LeaderElectionRecord, []byte, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.away {
		return nil, nil, errors.New("nobody answers")
	}
	l.seen = l.version
	r := l.record
	return &r, []byte(r.HolderIdentity), ctx.Err()
}

func (l *aLease) Update(ctx context.Context, r resourcelock.LeaderElectionRecord) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.away {
		return errors.New("nobody answers")
	}
	if l.seen != l.version {
		return apierrors.NewConflict(coordinationv1.Resource("leases"), name, nil)
	}
	if l.renewing != nil && l.record.HolderIdentity == r.HolderIdentity {
		l.mu.Unlock()
		select {
		case l.renewing <- struct{}{}:
			<-l.answer
		default:
		}
		l.mu.Lock()
	}
	l.record, l.version = r, l.version+1
	l.seen = l.version
	return ctx.Err()
}

func (l *aLease) holder() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.record.HolderIdentity
}

// cut has no API server answer, or answer again.
func (l *aLease) cut(away bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.away = away
}

// take has somebody else write the lease.
func (l *aLease) take() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.record.HolderIdentity, l.version = "other", l.version+1
}

func (*aLease) Create(context.Context, resourcelock.LeaderElectionRecord) error { return nil }
func (*aLease) RecordEvent(string)                                              {}
func (*aLease) Identity() string                                                { return "me" }
func (*aLease) Describe() string                                                { return "liqo/" + name }

// TestLeader: one that is told to end gives its lease back after what it did,
// and complains about nothing, whatever it was at; one that loses its lease
// to another stops and says so, and one that can't renew it leads again.
func TestLeader(t *testing.T) {
	for _, tc := range []struct {
		name     string
		renewing bool // it is told to end while a renewal waits for its answer
		waiting  bool // it is told to end before it is elected
		away     bool // no API server answers for as long as it takes
		lost     bool // somebody else takes the lease
		holder   string
	}{
		{name: "told to end", holder: ""},
		{name: "told to end while it renews its lease", renewing: true, holder: ""},
		{name: "told to end while another one leads", waiting: true, holder: "other"},
		{name: "the lease is lost", lost: true, holder: "other"},
		{name: "nobody answers for a while", away: true, holder: ""},
		{name: "and meanwhile somebody else leads", away: true, lost: true, holder: "other"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			lease := &aLease{answer: make(chan struct{})}
			if tc.renewing {
				lease.renewing = make(chan struct{})
			}
			if tc.waiting {
				lease.record = resourcelock.LeaderElectionRecord{HolderIdentity: "other", LeaseDurationSeconds: 60}
			}
			log := &logBuffer{}
			ctx, end := context.WithCancel(klog.NewContext(t.Context(), logr.FromSlogHandler(slog.NewTextHandler(log, nil))))
			defer end()
			acting, holders := make(chan struct{}), make(chan string, 2)
			l := &leader{lock: lease, duration: 20 * time.Second, deadline: 3 * time.Second, retry: 20 * time.Millisecond, act: func(ctx context.Context) error {
				acting <- struct{}{}
				<-ctx.Done()
				holders <- lease.holder()
				return nil
			}, log: slog.New(slog.NewTextHandler(log, nil))}
			done := make(chan error, 1)
			go func() { done <- l.Start(ctx) }()
			switch {
			case tc.waiting:
				poll.WaitOn(t, func(poll.LogT) poll.Result {
					if !strings.Contains(log.String(), "Attempting to acquire") {
						return poll.Continue("it does not try yet")
					}
					return poll.Success()
				}, poll.WithDelay(5*time.Millisecond))
			default:
				<-acting
			}
			if tc.renewing {
				<-lease.renewing
			}
			if tc.away {
				lease.cut(true)
				assert.Equal(t, <-holders, "me", "who held the lease when it stopped")
			}
			if tc.lost {
				lease.take()
			}
			lease.cut(false)
			switch {
			case tc.lost && !tc.away:
				assert.Equal(t, <-holders, "other", "who held the lease when it stopped")
			case tc.away && !tc.lost:
				<-acting
				assert.Check(t, is.Contains(log.String(), "level=WARN msg=\"the lease could not be renewed"))
			}
			if !tc.lost {
				end()
			}
			if !tc.waiting && !tc.lost {
				assert.Equal(t, <-holders, "me", "who held the lease when it stopped")
			}
			close(lease.answer)
			err := <-done
			assert.Equal(t, lease.holder(), tc.holder)
			assert.Check(t, !strings.Contains(log.String(), "level=ERROR") || tc.lost || tc.away, log.String())
			if tc.lost {
				assert.Check(t, is.ErrorContains(err, "the lease liqo/isthmus-controller is lost"))
			} else {
				assert.Check(t, err)
			}
		})
	}
}

// Another one may have the lease leaseDuration after it was renewed last: by then
// this one has made its last attempt, has found that it can't give the lease back,
// and has stopped.
func TestLeaseOutlastsWhoLosesIt(t *testing.T) {
	assert.Assert(t, retryPeriod+renewDeadline+2*lockTimeout <= leaseDuration)
}

// TestSteady: a deadline holds, a cancellation does not.
func TestSteady(t *testing.T) {
	ctx, cancel := context.WithDeadline(t.Context(), time.Now().Add(time.Hour))
	cancel()
	calm, done := steady(ctx)
	defer done()
	assert.NilError(t, calm.Err())
	end, _ := calm.Deadline()
	assert.Check(t, time.Until(end) <= lockTimeout, "it ends at %v", end)

	ctx, cancel = context.WithDeadline(t.Context(), time.Now().Add(-time.Second))
	defer cancel()
	late, done := steady(ctx)
	defer done()
	assert.ErrorIs(t, late.Err(), context.DeadlineExceeded)
}
