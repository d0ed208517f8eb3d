package daemon

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/isthmus-net/isthmus/appliance/internal/kube"
)

// off is the address of a server that is not wanted, as in controller-runtime.
const off = "0"

// Serving says where a daemon answers, and whom. The zero value: nobody.
type Serving struct {
	// Health is host:port of /healthz and /readyz, which are for everybody;
	// empty or "0": not served.
	Health string
	// Metrics is host:port of /metrics, by TLS and behind Guard; empty or "0":
	// not served.
	Metrics string
	// Guard puts a handler behind what decides who may ask. It is required
	// with Metrics.
	Guard func(http.Handler) (http.Handler, error)
}

// A server is one HTTP address of the daemon.
type server struct {
	listener net.Listener
	http     *http.Server
}

// listen binds an address for what register adds. With a certificate it speaks
// TLS and nothing else.
func listen(ctx context.Context, log *slog.Logger, addr string, certificate *tls.Certificate, register func(*http.ServeMux)) (server, error) {
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", addr)
	if err != nil {
		return server{}, fmt.Errorf("listen on %s: %w", addr, err)
	}
	if certificate != nil {
		l = tls.NewListener(l, &tls.Config{Certificates: []tls.Certificate{*certificate}, MinVersion: tls.VersionTLS12})
	}
	mux := http.NewServeMux()
	register(mux)
	return server{listener: l, http: &http.Server{
		Handler:           mux,
		ReadHeaderTimeout: 5 * time.Second,
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}}, nil
}

// run serves until ctx is done.
func (s server) run(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() { s.http.Close() })
	defer stop()
	if err := s.http.Serve(s.listener); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve on %s: %w", s.listener.Addr(), err)
	}
	return nil
}

// serve starts the HTTP servers.
func (h *host) serve(ctx context.Context, g *group, cfg Serving) error {
	wanted := func(addr string) bool { return addr != "" && addr != off }
	var servers []server
	if wanted(cfg.Health) {
		s, err := listen(ctx, h.log, cfg.Health, nil, h.health.register)
		if err != nil {
			return fmt.Errorf("health: %w", err)
		}
		servers = append(servers, s)
	}
	switch {
	case !wanted(cfg.Metrics):
	case cfg.Metrics == cfg.Health:
		// A template of somebody's own may say so. Its gateway is worth more than
		// its metrics.
		h.log.Warn("metrics are not served: they need an address of their own, since they are behind TLS and health is not; change --metrics-address", "address", cfg.Metrics)
	default:
		s, err := h.listenMetrics(ctx, cfg)
		if err != nil {
			for _, s := range servers {
				s.listener.Close()
			}
			return fmt.Errorf("metrics: %w", err)
		}
		servers = append(servers, s)
	}
	for _, s := range servers {
		g.run("http", func() error { return s.run(ctx) })
	}
	return nil
}

// listenMetrics binds the address of metrics, for those whom the guard lets through.
func (h *host) listenMetrics(ctx context.Context, cfg Serving) (server, error) {
	if cfg.Guard == nil {
		return server{}, errors.New("daemon: Serving.Guard is required: metrics are not for everybody")
	}
	handler, err := cfg.Guard(h.metrics.handler())
	if err != nil {
		return server{}, err
	}
	certificate, err := kube.SelfSigned()
	if err != nil {
		return server{}, fmt.Errorf("make a certificate: %w", err)
	}
	return listen(ctx, h.log, cfg.Metrics, certificate, func(mux *http.ServeMux) { mux.Handle("GET /metrics", handler) })
}
