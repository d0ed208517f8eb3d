package supervisor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/isthmus-net/isthmus/lab/internal/controlplane"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// Serve is the supervisor itself: what the hidden command `lab supervise`
// runs, in the namespaces that Start made. It returns when the lab has ended.
func Serve(ctx context.Context, logger *slog.Logger) error {
	config := os.NewFile(configFD, "config")
	if os.Getpid() == 1 {
		cfg, again, err := readConfig(config)
		if err != nil {
			return err
		}
		return runInit(ctx, cfg, again, logger)
	}
	if os.Getenv(innerEnv) == "" {
		return errors.New("`lab supervise` is started by `lab up` and `lab run`, not by hand")
	}
	cfg, again, err := readConfig(config)
	if err != nil {
		return err
	}
	again.Close()
	return serve(ctx, cfg, logger)
}

// readConfig reads the configuration and returns a file to read it from again.
func readConfig(f *os.File) (cfg Config, again *os.File, err error) {
	b, err := io.ReadAll(f)
	if err != nil {
		return cfg, nil, fmt.Errorf("configuration: %w: `lab supervise` is started by `lab up` and `lab run`, not by hand", err)
	}
	f.Close()
	if err := json.Unmarshal(b, &cfg); err != nil {
		return cfg, nil, fmt.Errorf("configuration: %w", err)
	}
	r, w, err := os.Pipe()
	if err != nil {
		return cfg, nil, err
	}
	go func() {
		defer w.Close()
		// A reader that is gone has nothing to read.
		_, _ = w.Write(b)
	}()
	return cfg, r, nil
}

// A lab is what the supervisor holds.
type lab struct {
	cfg    Config
	logger *slog.Logger
	end    context.CancelCauseFunc

	mu       sync.Mutex
	status   world.Status
	progress []world.Progress
	changed  chan struct{} // closed, and replaced, with each line
	clusters map[string]*cluster
	agent    *agent

	worldNS onceNamespace   // native
	taps    chan []*os.File // vm: management first
}

// A cluster is a control plane and its namespace.
type cluster struct {
	spec world.ClusterSpec
	ns   *world.Namespace
	cp   *controlplane.ControlPlane
	// present are the nodes that are there, by name; lab.mu guards it.
	present map[string]bool
}

func serve(ctx context.Context, cfg Config, logger *slog.Logger) error {
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	l := &lab{cfg: cfg, logger: logger, end: end, changed: make(chan struct{}), clusters: map[string]*cluster{}, taps: make(chan []*os.File, 1)}
	l.status = world.Status{Name: cfg.Name, World: cfg.World, Phase: world.PhaseStarting, Started: time.Now(), RunDir: cfg.RunDir, Spec: cfg.Spec, PID: cfg.HostPID}
	if cfg.Ephemeral {
		go func() {
			io.Copy(io.Discard, os.NewFile(lifelineFD, "lifeline"))
			end(errors.New("the process that started the lab has ended"))
		}()
	}
	// Beside its name first: whoever sees the socket can connect.
	socket := filepath.Join(cfg.RunDir, socketFile)
	listener, err := net.Listen("unix", socket+".new")
	if err != nil {
		return noSpace(cfg.RunDir, fmt.Errorf("control socket: %w", err))
	}
	listener.(*net.UnixListener).SetUnlinkOnClose(false)
	if err := errors.Join(os.Chmod(socket+".new", 0o600), os.Rename(socket+".new", socket)); err != nil {
		return fmt.Errorf("control socket: %w", err)
	}
	server := &http.Server{Handler: l.routes(), ReadHeaderTimeout: 10 * time.Second, BaseContext: func(net.Listener) context.Context { return ctx }}
	go server.Serve(listener)

	built := make(chan struct{})
	go func() {
		defer close(built)
		build := l.build
		if l.cfg.Restore != "" {
			build = l.restore
		}
		if err := build(ctx); err != nil {
			logger.Error("the lab did not come up", "err", err)
			l.failed(err)
			return
		}
		l.ready()
	}()
	<-ctx.Done()
	logger.Info("the lab ends", "why", context.Cause(ctx))
	l.setPhase(world.PhaseStopping)
	<-built
	l.close()
	server.Close()
	return os.Remove(socket)
}

// say adds a line of progress.
func (l *lab) say(p world.Progress) {
	if p.Time.IsZero() {
		p.Time = time.Now()
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.progress = append(l.progress, p)
	close(l.changed)
	l.changed = make(chan struct{})
	l.logger.Info(p.Message, "took", p.Took)
}

// step runs a part of the start and says how long it took.
func (l *lab) step(message string, fn func() error) error {
	start := time.Now()
	if err := fn(); err != nil {
		return err
	}
	l.say(world.Progress{Message: message, Took: time.Since(start)})
	return nil
}

func (l *lab) setPhase(phase string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.status.Phase = phase
}

func (l *lab) ready() {
	l.setPhase(world.PhaseReady)
	l.say(world.Progress{Message: "the lab is ready", Took: time.Since(l.status.Started), Done: true})
}

func (l *lab) failed(err error) {
	l.mu.Lock()
	l.status.Phase, l.status.Error = world.PhaseFailed, err.Error()
	l.mu.Unlock()
	l.say(world.Progress{Error: err.Error(), Done: true})
}

// progressFrom returns the lines from the n-th on, and what is closed when
// there are more.
func (l *lab) progressFrom(n int) ([]world.Progress, <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.progress[min(n, len(l.progress)):], l.changed
}

// close stops what runs, in order: the world first, so that no kubelet misses
// its API server.
func (l *lab) close() {
	l.mu.Lock()
	a, clusters := l.agent, l.clusters
	l.mu.Unlock()
	if a != nil {
		a.stop()
	}
	var wg sync.WaitGroup
	for _, c := range clusters {
		if c.cp != nil {
			wg.Go(func() { c.cp.Close() })
		}
	}
	stopped := make(chan struct{})
	go func() {
		wg.Wait()
		close(stopped)
	}()
	select {
	case <-stopped:
	case <-time.After(graceful / 2): // PID 1 ends the rest
	}
	for _, c := range clusters {
		c.ns.Close()
	}
}
