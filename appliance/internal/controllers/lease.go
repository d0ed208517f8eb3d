package controllers

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
)

// +kubebuilder:rbac:groups=coordination.k8s.io,namespace=system,resources=leases,verbs=get;create;update

// Only the controller that holds the lease works. When its node is lost, another
// one takes the lease 15 s later, at its next attempt. Attempts come every 1 to
// 2.2 s (client-go adds jitter). A controller that ends gives the lease back, so
// that the next one need not wait: a gateway and a controller may have been
// replaced in one upgrade, and without a controller the nodes don't learn where the
// new gateway is.
//
// A controller that can't renew the lease stops before another one may take it. It
// gives up renewDeadline after its last attempt. Then it tries to give the lease
// back, with one read and one write, of lockTimeout each at most.
const (
	leaseDuration = 15 * time.Second
	renewDeadline = 8 * time.Second
	retryPeriod   = time.Second
	lockTimeout   = 3 * time.Second
)

// newLock returns the lease of the controller.
func newLock(cfg Config) (resourcelock.Interface, error) {
	clients, err := kubernetes.NewForConfig(cfg.REST)
	if err != nil {
		return nil, err
	}
	lock, err := resourcelock.New(resourcelock.LeasesResourceLock, cfg.Namespace, name,
		clients.CoreV1(), clients.CoordinationV1(), resourcelock.ResourceLockConfig{Identity: cfg.Identity})
	if err != nil {
		return nil, fmt.Errorf("lease: %w", err)
	}
	return lock, nil
}

// A leader acts in one replica at a time: in the one that holds the lease. It is
// a runnable of the manager, which has elections of its own; those say that the
// lease is lost, as an error, whenever a leader is told to end. All fields are
// required.
type leader struct {
	lock resourcelock.Interface
	// How long others wait for one that is silent, how long this one tries to
	// renew the lease before it gives up, and the time between two attempts.
	duration, deadline, retry time.Duration
	act                       func(context.Context) error
	log                       *slog.Logger

	lapsed bool // the lease was lost once
}

// Start acts whenever the lease is there, until ctx is done, and gives the lease
// back when what it did has ended: the next leader never acts beside it. When the
// lease could not be renewed, since no API server answered, it waits for it again.
// It returns an error when somebody else has led meanwhile, whose last writes what
// is known here may lack, and that of act.
func (l *leader) Start(ctx context.Context) error {
	for {
		again, err := l.lead(ctx)
		if !again || err != nil || ctx.Err() != nil {
			return err
		}
		l.log.Warn("the lease could not be renewed in time; waiting for it again", "lease", l.lock.Describe(), "deadline", l.deadline)
		l.lapsed = true
	}
}

// lead waits for the lease and acts until ctx is done, act returns, or the lease is
// lost to nobody, when it says that it can lead again.
func (l *leader) lead(ctx context.Context) (again bool, err error) {
	elected, over, taken := make(chan struct{}), make(chan struct{}), make(chan struct{})
	var once sync.Once
	elector, err := leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
		Lock: steadyLock{l.lock}, Name: name,
		LeaseDuration: l.duration, RenewDeadline: l.deadline, RetryPeriod: l.retry,
		ReleaseOnCancel: true,
		Callbacks: leaderelection.LeaderCallbacks{
			OnStartedLeading: func(context.Context) { close(elected) },
			OnStoppedLeading: func() {}, // Run returns then
			OnNewLeader: func(who string) {
				if who != "" && who != l.lock.Identity() && (l.lapsed || isClosed(elected)) {
					once.Do(func() { close(taken) })
				}
			},
		},
	})
	if err != nil {
		return false, fmt.Errorf("lease: %w", err)
	}
	// The lease is wanted for longer than ctx lasts: until act has returned.
	hold, giveBack := context.WithCancel(context.WithoutCancel(ctx))
	go func() {
		defer close(over)
		elector.Run(hold)
	}()
	defer func() {
		giveBack()
		<-over
	}()
	lost := fmt.Errorf("the lease %s is lost: somebody else has taken it", l.lock.Describe())
	select {
	case <-ctx.Done():
		return false, nil
	case <-taken:
		return false, lost
	case <-elected:
	}
	acting, stop := context.WithCancel(ctx)
	defer stop()
	ended := make(chan error, 1)
	go func() { ended <- l.act(acting) }()
	select {
	case err := <-ended:
		return false, err
	case <-over:
		stop()
		if err := <-ended; err != nil || !isClosed(taken) {
			return err == nil, err
		}
		return false, lost
	}
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// A steadyLock finishes what it has begun, whether or not its caller has been
// told to end meanwhile. A renewal that is cut short may reach the API server
// all the same, after which the lease can't be given back as it was read, and
// nobody decides anything until it has run out.
type steadyLock struct{ resourcelock.Interface }

// Get reads the record.
func (l steadyLock) Get(ctx context.Context) (*resourcelock.LeaderElectionRecord, []byte, error) {
	ctx, cancel := steady(ctx)
	defer cancel()
	return l.Interface.Get(ctx)
}

// Create makes the lease.
func (l steadyLock) Create(ctx context.Context, r resourcelock.LeaderElectionRecord) error {
	ctx, cancel := steady(ctx)
	defer cancel()
	return l.Interface.Create(ctx, r)
}

// Update writes the record.
func (l steadyLock) Update(ctx context.Context, r resourcelock.LeaderElectionRecord) error {
	ctx, cancel := steady(ctx)
	defer cancel()
	return l.Interface.Update(ctx, r)
}

// steady returns a context that ends when ctx would by its deadline, or after
// lockTimeout, and not because ctx is canceled.
func steady(ctx context.Context) (context.Context, context.CancelFunc) {
	end := time.Now().Add(lockTimeout)
	if d, ok := ctx.Deadline(); ok && d.Before(end) {
		end = d
	}
	return context.WithDeadline(context.WithoutCancel(ctx), end)
}
