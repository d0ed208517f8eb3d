package scenario

import (
	"testing"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/lab/internal/yamlfile/yamlfiletest"
)

// TestBounds: every number and duration of a scenario, a step, a sabotage and
// an action has bounds. Expectations are tested where they are.
func TestBounds(t *testing.T) {
	structs := []any{file{}, stepFile{}, sabotageFile{}}
	for _, make := range actions() {
		structs = append(structs, make())
	}
	for _, s := range structs {
		assert.DeepEqual(t, yamlfiletest.Unbounded(s), []string(nil))
	}
}
