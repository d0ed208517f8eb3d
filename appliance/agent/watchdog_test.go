package agent

import (
	"testing"
	"testing/synctest"
	"time"

	"gotest.tools/v3/assert"
)

// A step that takes too long is named; the next one has its own time, and who
// waits is never late.
func TestWatchdog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var w Watchdog
		time.Sleep(time.Hour)
		assert.NilError(t, w.Err())

		w.At("the plan")
		time.Sleep(Stuck)
		assert.NilError(t, w.Err())
		w.At("writing")
		time.Sleep(Stuck)
		assert.NilError(t, w.Err())
		time.Sleep(time.Second)
		assert.ErrorContains(t, w.Err(), "writing has taken 2m1s")

		w.At("")
		time.Sleep(time.Hour)
		assert.NilError(t, w.Err())
	})
}
