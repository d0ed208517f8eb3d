package runner

import (
	"testing"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/lab/internal/scenario"
)

// TestSplit: what a step does after it stops a component is done while that is away.
func TestSplit(t *testing.T) {
	first, last, stop := &scenario.Kill{}, &scenario.Exec{}, &scenario.Stop{In: "milan"}
	for _, tc := range []struct{ do, before, meanwhile scenario.Actions }{
		{scenario.Actions{first, last}, scenario.Actions{first, last}, nil},
		{scenario.Actions{first, stop, last}, scenario.Actions{first}, scenario.Actions{last}},
		{scenario.Actions{stop}, scenario.Actions{}, scenario.Actions{}},
	} {
		before, got, meanwhile := split(tc.do)
		assert.Equal(t, got == stop, len(tc.before)+len(tc.meanwhile) < len(tc.do))
		assert.Equal(t, len(before), len(tc.before))
		assert.Equal(t, len(meanwhile), len(tc.meanwhile))
		for i := range before {
			assert.Assert(t, before[i] == tc.before[i])
		}
		for i := range meanwhile {
			assert.Assert(t, meanwhile[i] == tc.meanwhile[i])
		}
	}
}
