package peer

import (
	"context"
	"time"
)

// A clock ends a run when its time is over. While somebody has to decide first, the time
// of the run stands still.
type clock struct {
	timer *time.Timer
	most  time.Duration // that somebody may take to decide; 0: as long as there is time for it
	ends  time.Time     // when the timer fires
	left  time.Duration // of the run, while it stands still
	held  bool
}

// limit returns a context that ends after this time, with context.DeadlineExceeded as its
// cause, and the clock that may put that off.
func limit(ctx context.Context, d, most time.Duration) (context.Context, context.CancelFunc, *clock) {
	ctx, cancel := context.WithCancelCause(ctx)
	c := &clock{most: most, timer: time.AfterFunc(d, func() { cancel(context.DeadlineExceeded) }), ends: time.Now().Add(d)}
	return ctx, func() { c.timer.Stop(); cancel(nil) }, c
}

// look tells the clock until when somebody may take to decide, in this step of the run;
// zero: nobody has to.
func (c *clock) look(until time.Time) {
	switch now := time.Now(); {
	case !until.IsZero() && !c.held:
		c.held, c.left = true, c.ends.Sub(now)
		d := until.Sub(now)
		if c.most > 0 {
			d = min(d, c.most)
		}
		c.set(now, d)
	case until.IsZero() && c.held:
		c.held = false
		c.set(now, c.left)
	}
}

func (c *clock) set(now time.Time, d time.Duration) {
	if !c.timer.Stop() {
		return // it is over
	}
	c.ends = now.Add(d)
	c.timer.Reset(d)
}
