package daemon

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

// Bounds of the wait after a status that could not be written.
const (
	writeRetryMin = 200 * time.Millisecond
	writeRetryMax = 5 * time.Second
	writeTimeout  = 10 * time.Second
	// rewrite is how often the value is handed to write although it is the
	// same: somebody may have changed what it wrote.
	rewrite = 10 * time.Minute
)

// A reporter writes the latest value that it was given, as soon as it can.
// Older values are forgotten, equal ones written again only now and then.
// Nobody waits for it: an API server that is gone costs one line in the log.
type reporter[T any] struct {
	what  string
	write func(context.Context, T) error
	equal func(a, b T) bool
	log   *slog.Logger

	wake chan struct{}
	mu   sync.Mutex
	next T
	have bool
}

func newReporter[T any](what string, log *slog.Logger, equal func(a, b T) bool, write func(context.Context, T) error) *reporter[T] {
	return &reporter[T]{what: what, write: write, equal: equal, log: log, wake: make(chan struct{}, 1)}
}

// set gives the value to be written.
func (r *reporter[T]) set(v T) {
	r.mu.Lock()
	r.next, r.have = v, true
	r.mu.Unlock()
	notify(r.wake)
}

func (r *reporter[T]) latest() (T, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.next, r.have
}

// run writes until ctx is done.
func (r *reporter[T]) run(ctx context.Context) error {
	var written T
	var done bool // written holds what the API server has
	wait := writeRetryMin
	once := newOnce(r.log)
	retry := time.NewTimer(0)
	defer retry.Stop()
	again := time.NewTicker(rewrite)
	defer again.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-r.wake:
		case <-retry.C:
		case <-again.C:
			done = false
		}
		v, have := r.latest()
		if !have || done && r.equal(v, written) {
			continue
		}
		err := r.attempt(ctx, v)
		if ctx.Err() != nil {
			return nil
		}
		once.report("write "+r.what, err)
		if err == nil {
			written, done, wait = v, true, writeRetryMin
			again.Reset(rewrite)
			continue
		}
		done = false
		// Values that arrive meanwhile wait, too: the next attempt takes
		// the latest.
		pause(ctx, wait)
		wait = min(2*wait, writeRetryMax)
		retry.Reset(0)
	}
}

func (r *reporter[T]) attempt(ctx context.Context, v T) error {
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	return r.write(ctx, v)
}
