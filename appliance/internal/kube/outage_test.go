package kube

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"gotest.tools/v3/assert"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

func TestUnreachable(t *testing.T) {
	pods := schema.GroupResource{Resource: "pods"}
	request := func(err error) error { return &url.Error{Op: "Get", URL: "https://10.96.0.1/api/v1/pods", Err: err} }
	op := func(op string, err error) error { return request(&net.OpError{Op: op, Net: "tcp", Err: err}) }
	code := func(code int) error { return apierrors.NewGenericServerResponse(code, "GET", pods, "", "", 0, true) }
	future := apierrors.NewTimeoutError("Too large resource version: 9, current: 3", 1)
	future.ErrStatus.Details.Causes = []metav1.StatusCause{{Type: metav1.CauseTypeResourceVersionTooLarge}}
	for name, tt := range map[string]struct {
		err  error
		want bool
	}{
		"none":                  {nil, false},
		"refused":               {op("dial", syscall.ECONNREFUSED), true},
		"reset":                 {op("read", syscall.ECONNRESET), true},
		"broken pipe":           {op("write", syscall.EPIPE), true},
		"no route":              {op("dial", syscall.EHOSTUNREACH), true},
		"no network":            {op("dial", syscall.ENETUNREACH), true},
		"name":                  {op("dial", &net.DNSError{Err: "no such host", Name: "api", IsNotFound: true}), true},
		"deadline":              {request(context.DeadlineExceeded), true},
		"EOF":                   {request(io.EOF), true},
		"cut off":               {fmt.Errorf("read: %w", io.ErrUnexpectedEOF), true},
		"goes away":             {request(errors.New("http2: server sent GOAWAY and closed the connection; LastStreamID=1")), true},
		"connection lost":       {request(errors.New("http2: client connection lost")), true},
		"wrapped":               {fmt.Errorf("pods: %w", op("dial", syscall.ECONNREFUSED)), true},
		"starting":              {apierrors.NewServiceUnavailable("starting"), true},
		"not ready":             {code(http.StatusInternalServerError), true},
		"load balancer":         {code(http.StatusBadGateway), true},
		"slow":                  {apierrors.NewTimeoutError("slow", 1), true},
		"version of the future": {future, false},
		"unauthorized":          {apierrors.NewUnauthorized("who"), false},
		"forbidden":             {apierrors.NewForbidden(pods, "", errors.New("no")), false},
		"not found":             {apierrors.NewNotFound(pods, "a"), false},
		"expired":               {apierrors.NewResourceExpired("too old"), false},
		"too many":              {apierrors.NewTooManyRequests("later", 1), false},
		"certificate":           {request(x509.UnknownAuthorityError{}), false},
		"refused by the peer":   {op("remote error", errors.New("tls: bad certificate")), false},
		"canceled":              {request(context.Canceled), false},
		"anything else":         {errors.New("what"), false},
	} {
		t.Run(name, func(t *testing.T) { assert.Equal(t, unreachable(tt.err), tt.want, "%v", tt.err) })
	}
}

// Many wait, one asks, and all go on together.
func TestGate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const waiters, outage = 30, 25 * time.Second
		var log strings.Builder
		start := time.Now()
		away := func() bool { return time.Since(start) < outage }
		var asking, asked, tried atomic.Int64
		var last time.Time
		g := newGate(slog.New(slog.NewTextHandler(&log, nil)), func(ctx context.Context) error {
			assert.Check(t, asking.Add(1) == 1)
			defer asking.Add(-1)
			if pause := time.Since(last); !last.IsZero() {
				// Twice 3 s when another one takes over.
				assert.Check(t, pause >= time.Second && pause <= 6*time.Second, "%v", pause)
			}
			last = time.Now()
			asked.Add(1)
			if away() {
				return syscall.ECONNREFUSED
			}
			return nil
		})
		request := func() (string, error) {
			tried.Add(1)
			if away() {
				return "", syscall.ECONNREFUSED
			}
			return "objects", nil
		}
		ended := make(chan time.Duration, waiters)
		// The one that asks first gives up; another one goes on.
		first, stop := context.WithTimeout(t.Context(), 5*time.Second)
		defer stop()
		go func() {
			_, err := try(first, g, request)
			assert.Check(t, errors.Is(err, syscall.ECONNREFUSED))
		}()
		synctest.Wait()
		for range waiters {
			go func() {
				v, err := try(t.Context(), g, request)
				assert.Check(t, err)
				assert.Check(t, v == "objects")
				ended <- time.Since(start)
			}()
		}
		took := <-ended
		for range waiters - 1 {
			assert.Equal(t, <-ended, took)
		}
		assert.Assert(t, took >= outage && took <= outage+3*time.Second, "%v", took)
		assert.Assert(t, asked.Load() <= 26, "%d", asked.Load())
		assert.Equal(t, tried.Load(), int64(1+2*waiters)) // before, and after the gate opened
		assert.Equal(t, strings.Count(log.String(), "\n"), 2, log.String())
	})
}

// An API server that answers, but not to this request, is asked for it once a
// second at most; one that says it is not ready is tried all the same.
func TestGateIsNoDeadEnd(t *testing.T) {
	for _, tt := range []struct {
		name     string
		ready    error
		min, max int64
	}{
		{"ready, but not for this", nil, 600 / 4, 600},
		{"never ready", apierrors.NewServiceUnavailable("not ready"), 600 / 66, 600/30 + 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := newGate(slog.New(slog.DiscardHandler), func(context.Context) error { return tt.ready })
				ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
				defer cancel()
				var tried int64
				_, err := try(ctx, g, func() (int, error) {
					tried++
					return 0, apierrors.NewServiceUnavailable("no")
				})
				assert.Assert(t, apierrors.IsServiceUnavailable(err))
				assert.Assert(t, tried >= tt.min && tried <= tt.max, "%d", tried)
			})
		})
	}
}
