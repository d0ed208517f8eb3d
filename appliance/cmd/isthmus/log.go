package main

import (
	"context"
	"errors"
	"log/slog"
)

// canceledHandler is what client-go logs to. A request that ends because the
// daemon does, or because its reader has gone, is an error to client-go
// ("Unexpected error when reading response body") and none to an operator.
type canceledHandler struct{ slog.Handler }

// Handle logs an error about something canceled for those who debug.
func (h canceledHandler) Handle(ctx context.Context, r slog.Record) error {
	r.Attrs(func(a slog.Attr) bool {
		if err, ok := a.Value.Any().(error); ok && errors.Is(err, context.Canceled) {
			r.Level = min(r.Level, slog.LevelDebug)
			return false
		}
		return true
	})
	if !h.Enabled(ctx, r.Level) {
		return nil
	}
	return h.Handler.Handle(ctx, r)
}

// WithAttrs returns a handler that adds the attributes.
func (h canceledHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return canceledHandler{h.Handler.WithAttrs(attrs)}
}

// WithGroup returns a handler whose attributes are in that group.
func (h canceledHandler) WithGroup(name string) slog.Handler {
	return canceledHandler{h.Handler.WithGroup(name)}
}
