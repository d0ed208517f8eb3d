package agent

import (
	"fmt"
	"sync"
	"time"
)

// Stuck is how long one step of a pass may take before its process counts as hung.
// The slowest that was measured, 10,000 routes under emulation, took a second. A
// request to an API server that has gone away without a word fails after 45 s
// (client-go's check of its connection).
const Stuck = 2 * time.Minute

// A Watchdog knows at which step of a pass a loop is, and since when, for a
// liveness probe. The zero value is that of a loop that waits.
type Watchdog struct {
	mu    sync.Mutex
	step  string
	since time.Time
}

// At notes that a step of a pass begins, which ends the one before. An empty one is
// none: the loop waits for something to do.
func (w *Watchdog) At(step string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.step, w.since = step, time.Now()
}

// Err says which step has taken longer than [Stuck]; nil: none.
func (w *Watchdog) Err() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if d := time.Since(w.since); w.step != "" && d > Stuck {
		return fmt.Errorf("the process hangs: %s has taken %s", w.step, d.Round(time.Second))
	}
	return nil
}
