package supervisor

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// poll looks until nothing is missing, at once and then every so often, at most
// for timeout. Its error says what was missing the last time that somebody
// answered. That a question failed is told beside it, unless it failed because
// the time was over: a client that sees the deadline come says so in words of
// its own, and that would hide the reason.
func poll(ctx context.Context, timeout, every time.Duration, look func(context.Context) (missing string, err error)) error {
	timed, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	tick := time.NewTicker(every)
	defer tick.Stop()
	end, _ := timed.Deadline()
	var missing string
	var failed error
	for {
		m, err := look(timed)
		switch {
		case err == nil && m == "":
			return nil
		case err == nil:
			missing, failed = m, nil
		case time.Now().Before(end):
			failed = err
		}
		select {
		case <-timed.Done():
			return waitedFor(ctx, timeout, missing, failed)
		case <-tick.C:
		}
	}
}

// waitedFor is the error of a wait that ended without success.
func waitedFor(ctx context.Context, timeout time.Duration, missing string, failed error) error {
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case missing == "" && failed == nil:
		return fmt.Errorf("there was no answer in %s", timeout)
	case missing == "":
		return fmt.Errorf("%w, after %s", failed, timeout)
	case failed == nil:
		return fmt.Errorf("%s after %s", missing, timeout)
	}
	return errors.Join(fmt.Errorf("%s after %s", missing, timeout), fmt.Errorf("the last question failed: %w", failed))
}
