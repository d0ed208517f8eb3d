// Package agent keeps one network namespace in its desired state. The node
// and the gateway daemon are this loop with different ingredients.
//
// A pass reads everything known, computes what should be there, observes what
// is there, applies the difference and reports. It runs when the source says
// that something new is known, when the kernel says that something of ours was
// touched, after a failure, and now and then for no reason at all. It
// remembers nothing from one pass to the next but when to try again.
//
// The loop takes nothing down when it ends: what it built goes on forwarding
// while the daemon is restarted.
package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// A Source delivers what is known of the world outside this namespace: In is
// the input of the desired state.
type Source[In any] interface {
	// Changed yields a value whenever Read may return something new.
	Changed() <-chan struct{}
	// Read returns everything known. It is not called before the loop runs
	// and blocks for as long as too little is known to decide anything.
	Read(ctx context.Context) (In, error)
}

// A Target is the network namespace that is kept in order.
type Target interface {
	// Changed yields a value whenever something we own was touched.
	Changed() <-chan struct{}
	// Observe returns what is there of ours.
	Observe(ctx context.Context) (netstate.State, error)
	// Apply carries the changes out. One that fails does not keep the others
	// from being made; what is left to do, a later Observe shows.
	Apply(ctx context.Context, changes netstate.Changes) error
}

// Config is everything the loop needs. Source, Target and Desired are
// required.
type Config[In any] struct {
	Source Source[In]
	Target Target
	// Desired computes what should be there, and says for every object that
	// it is about whether it could be used. It is pure.
	Desired func(In) (netstate.State, []cluster.Applied)
	// Report is told of every pass, in the loop: it must not block.
	Report func(Result[In])
	Logger *slog.Logger // optional

	// Settle is how long a pass waits for further changes after the first
	// one (default 50 ms); if there is one, it waits that long again, once.
	Settle time.Duration
	// Resync is the longest time between passes (default 10 min).
	Resync time.Duration
	// RetryMin and RetryMax bound the time between a failed pass and the
	// next, which doubles each time (default 200 ms and 5 s).
	RetryMin, RetryMax time.Duration
	// Calm is the least time between a failed pass and one that the kernel
	// asked for (default 1 s): what a failing pass did do is a change, too,
	// and must not make it fail again at once.
	Calm time.Duration
}

func (c *Config[In]) setDefaults() error {
	if c.Source == nil || c.Target == nil || c.Desired == nil {
		return errors.New("agent: Source, Target and Desired are required")
	}
	if c.Report == nil {
		c.Report = func(Result[In]) {}
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	for _, d := range []struct {
		value *time.Duration
		def   time.Duration
	}{
		{&c.Settle, 50 * time.Millisecond},
		{&c.Resync, 10 * time.Minute},
		{&c.RetryMin, 200 * time.Millisecond},
		{&c.RetryMax, 5 * time.Second},
		{&c.Calm, time.Second},
	} {
		if *d.value <= 0 {
			*d.value = d.def
		}
	}
	return nil
}

// A Result is the outcome of one pass.
type Result[In any] struct {
	Input   In
	Desired netstate.State
	// Objects is what Desired said of the objects, before anything was
	// applied.
	Objects []cluster.Applied
	// Changes is what the pass set out to change.
	Changes netstate.Changes
	// Remaining is, after an Apply that failed, what still differs.
	Remaining netstate.Changes
	Err       error
	Duration  time.Duration
}

// A PanicError is a panic of Read or Desired, or of another function that [Guard] called.
// The data plane is left as it is.
type PanicError struct {
	Value any
	Stack []byte
}

// Error has the value and the stack, for nobody else has seen them.
func (e *PanicError) Error() string {
	return fmt.Sprintf("panic: %v (a bug of isthmus; please report it with this stack)\n%s", e.Value, e.Stack)
}

// Run reconciles until ctx is done. It returns an error only for a bad Config;
// a failed pass is reported, logged and retried.
func Run[In any](ctx context.Context, cfg Config[In]) error {
	if err := cfg.setDefaults(); err != nil {
		return err
	}
	l := loop[In]{Config: cfg, timer: time.NewTimer(0)}
	defer l.timer.Stop()
	for l.wait(ctx) {
		l.pass(ctx)
	}
	return nil
}

// A loop is Run's memory: when to try again, and what was last complained of.
type loop[In any] struct {
	Config[In]
	timer    *time.Timer // the next pass, if nothing happens before
	next     time.Time   // when that is
	failures int         // passes that failed since one succeeded
	ended    time.Time   // when the last pass ended
	lastErr  string
	loggedAt time.Time
}

// wait returns true when it is time for a pass, false when ctx is done.
func (l *loop[In]) wait(ctx context.Context) bool {
	for settling := false; !settling; {
		select {
		case <-ctx.Done():
			return false
		case <-l.timer.C:
			return true // nothing is happening that could settle
		case <-l.Source.Changed():
			settling = true
		case <-l.Target.Changed():
			if l.failures == 0 {
				settling = true
			} else {
				l.schedule(l.ended.Add(l.Calm))
			}
		}
	}
	settle := time.NewTimer(l.Settle)
	defer settle.Stop()
	for again := false; ; {
		select {
		case <-ctx.Done():
			return false
		case <-settle.C:
			return true
		case <-l.Source.Changed():
		case <-l.Target.Changed():
		}
		if !again {
			again = true
			settle.Reset(l.Settle)
		}
	}
}

// schedule brings the next pass forward to at, if it is due later.
func (l *loop[In]) schedule(at time.Time) {
	if at.Before(l.next) {
		l.next = at
		l.timer.Reset(time.Until(at))
	}
}

// pass runs one pass, reports it, and sets the timer for the next.
func (l *loop[In]) pass(ctx context.Context) {
	start := time.Now()
	res := l.reconcile(ctx)
	if ctx.Err() != nil {
		return // interrupted: neither a success nor a failure
	}
	l.ended = time.Now()
	res.Duration = l.ended.Sub(start)
	l.log(ctx, res)
	l.Report(res)
	next := l.Resync
	if res.Err != nil {
		next = l.RetryMax
		if l.failures < 30 { // beyond that the shift would overflow
			next = min(l.RetryMin<<l.failures, l.RetryMax)
		}
		l.failures++
	} else {
		l.failures = 0
	}
	l.next = l.ended.Add(next)
	l.timer.Reset(next)
}

// reconcile is the whole path of data, once.
func (l *loop[In]) reconcile(ctx context.Context) (res Result[In]) {
	err := Guard(func() (err error) {
		res.Input, err = l.Source.Read(ctx)
		return err
	})
	if err != nil {
		res.Err = fmt.Errorf("read what is known: %w", err)
		return res
	}
	err = Guard(func() error {
		res.Desired, res.Objects = l.Desired(res.Input)
		return nil
	})
	if err != nil {
		res.Desired, res.Objects = netstate.State{}, nil
		res.Err = fmt.Errorf("compute the desired state: %w", err)
		return res
	}
	have, err := l.Target.Observe(ctx)
	if err != nil {
		res.Err = fmt.Errorf("observe: %w", err)
		return res
	}
	res.Changes = netstate.Diff(have, res.Desired)
	if res.Changes.Empty() {
		return res
	}
	if err := l.Target.Apply(ctx, res.Changes); err != nil {
		res.Err = fmt.Errorf("apply: %w", err)
		if have, err := l.Target.Observe(ctx); err == nil {
			res.Remaining = netstate.Diff(have, res.Desired)
		} else {
			res.Remaining = res.Changes // nothing better is known
		}
	}
	return res
}

// Guard calls f and turns a panic into a [PanicError]: a bug in reading or computing
// must not stop the process that keeps the data plane up.
func Guard(f func() error) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = &PanicError{Value: r, Stack: debug.Stack()}
		}
	}()
	return f()
}

// relog is how often a failure that stays the same is logged.
const relog = time.Minute

// onlyMissesLinks reports whether nothing failed but for links that are not there. What
// leads to a pod goes by the pod's link, which may go between the look at the host and
// the change of it. That is no fault unless the next pass misses it, too.
func onlyMissesLinks(err error) bool {
	switch e := err.(type) {
	case *netstate.NoLinkError:
		return true
	case interface{ Unwrap() error }:
		return onlyMissesLinks(e.Unwrap())
	case interface{ Unwrap() []error }:
		return !slices.ContainsFunc(e.Unwrap(), func(err error) bool { return !onlyMissesLinks(err) })
	}
	return false
}

// log writes what changed, and what failed: a failure that repeats itself only
// once a minute.
func (l *loop[In]) log(ctx context.Context, res Result[In]) {
	if res.Err == nil {
		if l.failures > 0 {
			l.Logger.InfoContext(ctx, "in order again", "failed", l.failures)
		}
		l.lastErr = ""
		if !res.Changes.Empty() {
			l.Logger.InfoContext(ctx, "changed", "changes", shorten(res.Changes), "took", res.Duration.Round(time.Microsecond))
		}
		return
	}
	if l.failures == 0 && onlyMissesLinks(res.Err) {
		l.Logger.WarnContext(ctx, "a link went away during the pass, looking again", "err", res.Err)
		return
	}
	if text := res.Err.Error(); text != l.lastErr || time.Since(l.loggedAt) >= relog {
		l.Logger.ErrorContext(ctx, "pass failed, retrying", "err", res.Err, "failed", l.failures+1)
		l.lastErr, l.loggedAt = text, time.Now()
	}
}

// maxLines is how many changes are logged one by one; a first pass on a large
// cluster has thousands.
const maxLines = 40

// shorten returns the changes as text, the first of them if they are many.
func shorten(c netstate.Changes) string {
	lines := strings.Split(strings.TrimSuffix(c.String(), "\n"), "\n")
	if len(lines) > maxLines {
		more := fmt.Sprintf("… and %d lines more", len(lines)-maxLines)
		lines = append(lines[:maxLines:maxLines], more)
	}
	return strings.Join(lines, "\n")
}
