package expect

import (
	"testing"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/lab/internal/yamlfile/yamlfiletest"
)

// TestBounds: every number and duration of an expectation has bounds.
func TestBounds(t *testing.T) {
	for _, make := range kinds() {
		assert.DeepEqual(t, yamlfiletest.Unbounded(make()), []string(nil))
	}
}
