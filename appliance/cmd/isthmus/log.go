package main

import (
	"context"
	"errors"
	"log/slog"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// clientHandler is what client-go logs to. Two things are errors to client-go and none to an
// operator: a request that ends because the daemon does, or because its reader has gone
// ("Unexpected error when reading response body"), and a write that came a moment after
// somebody else's, which is made again: of two controllers that want the lease one is later
// ("Failed to update lease").
type clientHandler struct{ slog.Handler }

// Handle logs an error about something canceled for those who debug, and one about a write
// that came too late as information.
func (h clientHandler) Handle(ctx context.Context, r slog.Record) error {
	r.Attrs(func(a slog.Attr) bool {
		err, ok := a.Value.Any().(error)
		switch {
		case !ok:
			return true
		case errors.Is(err, context.Canceled):
			r.Level = min(r.Level, slog.LevelDebug)
		case apierrors.IsConflict(err):
			r.Level = min(r.Level, slog.LevelInfo)
		}
		return false
	})
	if !h.Enabled(ctx, r.Level) {
		return nil
	}
	return h.Handler.Handle(ctx, r)
}

// WithAttrs returns a handler that adds the attributes.
func (h clientHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return clientHandler{h.Handler.WithAttrs(attrs)}
}

// WithGroup returns a handler whose attributes are in that group.
func (h clientHandler) WithGroup(name string) slog.Handler {
	return clientHandler{h.Handler.WithGroup(name)}
}
