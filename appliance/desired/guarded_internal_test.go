package desired

import (
	"strings"
	"testing"

	"gotest.tools/v3/assert"
)

// A panic is a problem of the object that is being compiled, and says where it was.
func TestGuarded(t *testing.T) {
	index := 3
	for _, test := range []struct {
		name    string
		compile func() (int, []string)
		want    int
		problem string
	}{
		{"all is well", func() (int, []string) { return 7, nil }, 7, ""},
		{"something is wrong", func() (int, []string) { return 7, []string{"too long"} }, 7, "too long"},
		{"a panic", func() (int, []string) { panic("no such rule") }, 0, "panic: no such rule at guarded_internal_test.go:"},
		{"an index out of range", func() (int, []string) { return make([]int, 1)[index], nil }, 0, "index out of range [3] with length 1 at guarded_internal_test.go:"},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, problems := guarded(test.compile)
			assert.Equal(t, got, test.want)
			assert.Assert(t, strings.Contains(strings.Join(problems, "; "), test.problem), problems)
			assert.Equal(t, len(problems) > 0, test.problem != "")
		})
	}
}
