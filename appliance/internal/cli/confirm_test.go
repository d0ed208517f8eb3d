package cli

import (
	"context"
	"io"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
)

// TestConfirm tells a no from no answer, and a question does not outlive Ctrl-C.
func TestConfirm(t *testing.T) {
	var errs strings.Builder
	p := &program{in: strings.NewReader("y\nno\n\nYES"), err: &errs}
	for _, want := range []bool{true, false, false, true} {
		got, err := p.confirm(t.Context(), "Go on?")
		assert.NilError(t, err)
		assert.Equal(t, got, want)
	}
	_, err := p.confirm(t.Context(), "Go on?")
	assert.ErrorIs(t, err, errNoAnswer)
	assert.Check(t, is.Equal(strings.Count(errs.String(), "Go on? [y/N] "), 5))

	silent, end := io.Pipe()
	defer end.Close()
	p = &program{in: silent, err: &errs}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = p.confirm(ctx, "Go on?")
	assert.ErrorIs(t, err, context.Canceled)
}
