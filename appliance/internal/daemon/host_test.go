package daemon

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/appliance/kernel"
)

// TestKernelWithoutWireGuard: that a kernel has none is said when two probes in turn
// have found that for certain. What a probe could not find out says nothing.
func TestKernelWithoutWireGuard(t *testing.T) {
	none := fmt.Errorf("load the module: %w", kernel.ErrNotInKernel)
	unclear := errors.New("no buffer space available")
	for _, tc := range []struct {
		name   string
		probes []error
		want   string // after each of them
	}{
		{"there from the start", []error{nil, nil}, "true true"},
		{"none", []error{none, none, none}, "? false false"},
		{"a module that is loaded late", []error{none, nil}, "? true"},
		{"not found out", []error{unclear, unclear, unclear}, "? ? ?"},
		{"not found out in between", []error{none, unclear, none, none}, "? ? ? false"},
		{"loaded after all", []error{none, none, nil, none}, "? false true ?"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			h := &host{}
			var got []string
			for _, err := range tc.probes {
				h.probed([]kernel.Feature{{Name: kernel.FeatureWireGuard, Err: err}})
				said := "?"
				if has := h.wireGuard(); has != nil {
					said = fmt.Sprint(*has)
				}
				got = append(got, said)
			}
			assert.Equal(t, strings.Join(got, " "), tc.want)
		})
	}
}
