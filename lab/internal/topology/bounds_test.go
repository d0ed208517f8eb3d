package topology

import (
	"testing"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/lab/internal/yamlfile/yamlfiletest"
)

// TestBounds: every number of a topology has bounds.
func TestBounds(t *testing.T) {
	assert.DeepEqual(t, yamlfiletest.Unbounded(file{}), []string(nil))
}
