package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/klog/v2"
)

// TestNoErrors logs as client-go does: what was canceled is for those who debug, a write
// that came too late is information, everything else is an error.
func TestNoErrors(t *testing.T) {
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
		{"info", apierrors.NewConflict(coordinationv1.Resource("leases"), "isthmus-controller", errors.New("the object has been modified")), "level=INFO"},
		{"info", apierrors.NewForbidden(coordinationv1.Resource("leases"), "isthmus-controller", errors.New("not yours")), "level=ERROR"},
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
