package yamlfiletest_test

import (
	"testing"
	"time"

	"github.com/goccy/go-yaml/ast"
	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/lab/internal/yamlfile"
	"github.com/isthmus-net/isthmus/lab/internal/yamlfile/yamlfiletest"
)

type inner struct {
	Bare    time.Duration `lab:"bare"`
	Bounded time.Duration `lab:"bounded" min:"1s" max:"2s"`
}

// share reads itself, and so knows its bounds.
type share float64

func (*share) UnmarshalLab(*yamlfile.File, ast.Node, yamlfile.Subst) {}

type outer struct {
	List    []int          `lab:"list"`
	Half    *int           `lab:"half" min:"1"`
	Inner   *inner         `lab:"inner"`
	Again   []inner        `lab:"again"`
	Values  map[string]int `lab:"values"`
	Text    string         `lab:"text"`
	Share   share          `lab:"share"`
	NotFile int
}

func TestUnbounded(t *testing.T) {
	assert.DeepEqual(t, yamlfiletest.Unbounded(outer{}), []string{
		"yamlfiletest_test.outer.List", "yamlfiletest_test.outer.Half", "yamlfiletest_test.inner.Bare", "map[string]int",
	})
}
