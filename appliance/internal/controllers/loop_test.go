package controllers

import (
	"errors"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"gotest.tools/v3/assert"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// A pass that is out of date is tried again at once and without a word. One that
// always is backs off as any other that fails, and is told of once.
func TestTries(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		stale := apierrors.NewConflict(schema.GroupResource{Resource: "networks"}, "a", nil)
		refused := errors.New("refused")
		log := &logBuffer{}
		logger := slog.New(slog.NewTextHandler(log, nil))
		var tries tries
		passes := func(n int, err error) (waits []time.Duration) {
			for range n {
				wait := tries.after(t.Context(), logger, err)
				waits = append(waits, wait)
				time.Sleep(wait)
			}
			return waits
		}
		const ms = time.Millisecond
		accidents := int(staleFor / firstRetry)
		assert.DeepEqual(t, passes(accidents, stale), slices.Repeat([]time.Duration{200 * ms}, accidents))
		assert.Equal(t, log.String(), "")
		assert.DeepEqual(t, passes(7, stale), []time.Duration{200 * ms, 400 * ms, 800 * ms, 1600 * ms, 3200 * ms, 5000 * ms, 5000 * ms})
		assert.Equal(t, strings.Count(log.String(), "level=ERROR"), 1, log.String())

		assert.DeepEqual(t, passes(2, nil), []time.Duration{0, 0})
		assert.Equal(t, strings.Count(log.String(), "works again"), 1, log.String())

		assert.DeepEqual(t, passes(3, refused), []time.Duration{200 * ms, 400 * ms, 800 * ms})
		assert.Equal(t, strings.Count(log.String(), "level=ERROR"), 2, log.String())
		assert.DeepEqual(t, passes(1, stale), []time.Duration{200 * ms}) // others go on
		assert.DeepEqual(t, passes(2, refused), []time.Duration{200 * ms, 400 * ms})
		time.Sleep(time.Hour) // what was out of date once is long over
		assert.DeepEqual(t, passes(2, stale), []time.Duration{200 * ms, 200 * ms})
		assert.Equal(t, strings.Count(log.String(), "level=ERROR"), 2, log.String())
	})
}
