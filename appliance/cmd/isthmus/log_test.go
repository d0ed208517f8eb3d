package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	"k8s.io/klog/v2"
)

// TestCanceledIsNoError logs as client-go does: what was canceled is for those
// who debug, everything else is an error.
func TestCanceledIsNoError(t *testing.T) {
	t.Cleanup(klog.ClearLogger)
	for _, tt := range []struct {
		level string
		err   error
		want  string
	}{
		{"info", io.ErrUnexpectedEOF, "level=ERROR"},
		{"info", errors.New("context canceled, says somebody"), "level=ERROR"},
		{"info", context.DeadlineExceeded, "level=ERROR"},
		{"info", context.Canceled, ""},
		{"info", fmt.Errorf("get pods: %w", context.Canceled), ""},
		{"debug", context.Canceled, "level=DEBUG"},
	} {
		var out strings.Builder
		g := &globals{stderr: &out, level: tt.level, format: "text"}
		assert.NilError(t, g.setup())
		klog.Background().WithName("rest").WithValues("host", "milan").Error(tt.err, "Unexpected error when reading response body")
		if tt.want == "" {
			assert.Equal(t, out.String(), "", "%v", tt.err)
			continue
		}
		assert.Assert(t, strings.Contains(out.String(), tt.want) && strings.Contains(out.String(), "Unexpected error"), "%v: %s", tt.err, out.String())
	}
}
