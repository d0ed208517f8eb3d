package controllers

import (
	"context"
	"fmt"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
)

// +kubebuilder:rbac:groups=coordination.k8s.io,namespace=system,resources=leases,verbs=get;create;update

// Leases outlast an API server that is away for a while: without one nobody
// else could take over anyway. One that ends gives its lease back, and the next
// looks for it every 1 to 2.2 s, with client-go's jitter: as long nobody tells
// the nodes where a gateway is that came up elsewhere, and an upgrade replaces
// both at once.
const (
	leaseDuration = 60 * time.Second
	renewDeadline = 50 * time.Second
	retryPeriod   = time.Second
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
}

// Start acts once the lease is there, until ctx is done, and gives the lease
// back when what it did has ended: the next leader never acts beside it. It
// returns an error when the lease is lost, and that of act.
func (l *leader) Start(ctx context.Context) error {
	elected, over := make(chan struct{}), make(chan struct{})
	elector, err := leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
		Lock: steadyLock{l.lock}, Name: name,
		LeaseDuration: l.duration, RenewDeadline: l.deadline, RetryPeriod: l.retry,
		ReleaseOnCancel: true,
		Callbacks: leaderelection.LeaderCallbacks{
			OnStartedLeading: func(context.Context) { close(elected) },
			OnStoppedLeading: func() {}, // Run returns then
		},
	})
	if err != nil {
		return fmt.Errorf("lease: %w", err)
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
	select {
	case <-ctx.Done():
		return nil
	case <-elected:
	}
	acting, stop := context.WithCancel(ctx)
	defer stop()
	ended := make(chan error, 1)
	go func() { ended <- l.act(acting) }()
	select {
	case err := <-ended:
		return err
	case <-over:
		stop()
		<-ended
		return fmt.Errorf("the lease %s is lost: it could not be renewed for %v, or somebody else has taken it", l.lock.Describe(), l.deadline)
	}
}

// lockTimeout is how long the API server may take to answer for a lease: two of
// these fit in the 30 s that Kubernetes gives a pod to end.
const lockTimeout = 10 * time.Second

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
