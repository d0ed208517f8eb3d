package yamlfiletest_test

import (
	"testing"
	"time"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/lab/internal/yamlfile/yamlfiletest"
)

type inner struct {
	Bare    time.Duration `lab:"bare"`
	Bounded time.Duration `lab:"bounded" min:"1s" max:"2s"`
}

type outer struct {
	List    []int          `lab:"list"`
	Half    *int           `lab:"half" min:"1"`
	Inner   *inner         `lab:"inner"`
	Again   []inner        `lab:"again"`
	Values  map[string]int `lab:"values"`
	Text    string         `lab:"text"`
	NotFile int
}

func TestUnbounded(t *testing.T) {
	assert.DeepEqual(t, yamlfiletest.Unbounded(outer{}), []string{
		"yamlfiletest_test.outer.List", "yamlfiletest_test.outer.Half", "yamlfiletest_test.inner.Bare", "map[string]int",
	})
}
