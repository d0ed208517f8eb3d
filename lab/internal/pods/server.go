package pods

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"time"

	"github.com/isthmus-net/isthmus/lab/internal/netns"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/cri-streaming/pkg/streaming/remotecommand"
	utilexec "k8s.io/utils/exec"
)

// Timeouts of an exec's connection, as the real kubelet has them.
const (
	streamIdle     = 4 * time.Hour
	streamCreation = 30 * time.Second
)

// listen opens the kubelet's port on the node's address.
func (n *node) listen(ctx context.Context) (net.Listener, error) {
	pair, err := tls.X509KeyPair(n.cfg.ServingCert, n.cfg.ServingKey)
	if err != nil {
		return nil, fmt.Errorf("serving certificate: %w", err)
	}
	clients := x509.NewCertPool()
	if !clients.AppendCertsFromPEM(n.cfg.ClientCA) {
		return nil, errors.New("ClientCA holds no certificate")
	}
	address := netip.AddrPortFrom(n.cfg.Addr, kubeletPort).String()
	l, err := netns.Listen(ctx, n.cfg.NetNS, "tcp", address)
	if err != nil {
		return nil, fmt.Errorf("kubelet port %s: %w", address, err)
	}
	return tls.NewListener(l, &tls.Config{
		Certificates: []tls.Certificate{pair},
		ClientAuth:   tls.RequireAndVerifyClientCert,
		ClientCAs:    clients,
		NextProtos:   []string{"http/1.1"}, // an exec upgrades its connection
	}), nil
}

// serve answers the API server until ctx ends.
func (n *node) serve(ctx context.Context, l net.Listener) {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "ok") })
	mux.HandleFunc("GET /containerLogs/{namespace}/{pod}/{container}", n.serveLogs)
	for _, path := range []string{"/exec/{namespace}/{pod}/{container}", "/exec/{namespace}/{pod}/{uid}/{container}"} {
		mux.HandleFunc(path, n.serveExec)
	}
	for _, path := range []string{"/attach/", "/portForward/"} {
		mux.HandleFunc(path, func(w http.ResponseWriter, r *http.Request) {
			http.Error(w, "the lab's kubelet serves logs and exec, not "+r.URL.Path, http.StatusNotImplemented)
		})
	}
	srv := &http.Server{
		Handler:           authorize(mux),
		ReadHeaderTimeout: streamCreation,
		BaseContext:       func(net.Listener) context.Context { return ctx },
	}
	stop := context.AfterFunc(ctx, func() { srv.Close() })
	defer stop()
	if err := srv.Serve(l); err != nil && !errors.Is(err, http.ErrServerClosed) {
		n.log.Error("kubelet port", "err", err)
	}
}

// authorize lets in the API server, which comes as one of system:masters. A
// node's or another component's certificate is of the same authority but may
// not exec.
func authorize(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if len(r.TLS.PeerCertificates) == 0 || !slices.Contains(r.TLS.PeerCertificates[0].Subject.Organization, "system:masters") {
			http.Error(w, "only the API server may use this port", http.StatusForbidden)
			return
		}
		next.ServeHTTP(w, r)
	})
}

func (n *node) serveLogs(w http.ResponseWriter, r *http.Request) {
	opts, err := logOptions(r)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	p, err := n.find(r.PathValue("namespace"), r.PathValue("pod"))
	if err != nil {
		http.Error(w, err.Error(), http.StatusNotFound)
		return
	}
	p.mu.Lock()
	c := p.find(r.PathValue("container"))
	var log *logFile
	if c != nil {
		log = c.log
		// Between two runs the latest one is already the previous one.
		if opts.Previous && !(c.state.Waiting != nil && c.last.Terminated != nil) {
			log = c.previous
		}
	}
	p.mu.Unlock()
	switch {
	case c == nil:
		http.Error(w, fmt.Sprintf("container %q not found in pod %q", r.PathValue("container"), r.PathValue("pod")), http.StatusNotFound)
		return
	case log == nil && opts.Previous:
		http.Error(w, fmt.Sprintf("previous terminated container %q in pod %q not found", c.spec.Name, r.PathValue("pod")), http.StatusBadRequest)
		return
	case log == nil:
		http.Error(w, fmt.Sprintf("container %q in pod %q is waiting to start", c.spec.Name, r.PathValue("pod")), http.StatusBadRequest)
		return
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	var out io.Writer = w
	if opts.Follow {
		out = flusher{w, http.NewResponseController(w)}
		w.WriteHeader(http.StatusOK)
	}
	if err := log.read(r.Context(), out, opts); err != nil && r.Context().Err() == nil {
		n.log.Debug("serve logs", "err", err)
	}
}

// flusher sends every line at once.
type flusher struct {
	io.Writer
	c *http.ResponseController
}

func (f flusher) Write(p []byte) (int, error) {
	n, err := f.Writer.Write(p)
	if err == nil {
		err = f.c.Flush()
	}
	return n, err
}

func logOptions(r *http.Request) (corev1.PodLogOptions, error) {
	q := r.URL.Query()
	var o corev1.PodLogOptions
	var errs []error
	number := func(name string, to **int64) {
		if s := q.Get(name); s != "" {
			v, err := strconv.ParseInt(s, 10, 64)
			if err != nil {
				errs = append(errs, fmt.Errorf("%s: %w", name, err))
			}
			*to = &v
		}
	}
	flag := func(name string, to *bool) {
		if s := q.Get(name); s != "" {
			v, err := strconv.ParseBool(s)
			if err != nil {
				errs = append(errs, fmt.Errorf("%s: %w", name, err))
			}
			*to = v
		}
	}
	flag("follow", &o.Follow)
	flag("previous", &o.Previous)
	flag("timestamps", &o.Timestamps)
	number("tailLines", &o.TailLines)
	number("sinceSeconds", &o.SinceSeconds)
	number("limitBytes", &o.LimitBytes)
	if s := q.Get("sinceTime"); s != "" {
		t, err := time.Parse(time.RFC3339Nano, s)
		if err != nil {
			errs = append(errs, fmt.Errorf("sinceTime: %w", err))
		}
		mt := metav1.NewTime(t)
		o.SinceTime = &mt
	}
	return o, errors.Join(errs...)
}

func (n *node) serveExec(w http.ResponseWriter, r *http.Request) {
	opts, err := remotecommand.NewOptions(r)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	p, err := n.find(r.PathValue("namespace"), r.PathValue("pod"))
	if err != nil {
		http.Error(w, err.Error(), http.StatusNotFound)
		return
	}
	remotecommand.ServeExec(w, r, executor{p}, r.PathValue("pod"), r.PathValue("uid"), r.PathValue("container"), r.URL.Query()["command"],
		opts, streamIdle, streamCreation, remotecommand.SupportedStreamingProtocols)
}

// executor runs the commands of kubectl exec.
type executor struct{ p *pod }

// ExecInContainer implements remotecommand.Executor.
func (e executor) ExecInContainer(ctx context.Context, _, _, container string, cmd []string, in io.Reader, out, errOut io.WriteCloser, tty bool, resize <-chan remotecommand.TerminalSize, _ time.Duration) error {
	req := ExecRequest{Container: container, Argv: cmd, TTY: tty}
	// An interface that holds a nil pointer is not nil.
	if in != nil {
		req.Stdin = in
	}
	if out != nil {
		req.Stdout = out
	}
	if errOut != nil {
		req.Stderr = errOut
	}
	if tty && resize != nil {
		ctx, done := context.WithCancel(ctx)
		defer done()
		sizes := make(chan TerminalSize)
		go forwardSizes(ctx, resize, sizes)
		req.Resize = sizes
	}
	code, err := e.p.exec(ctx, req)
	if err == nil && code != 0 {
		return utilexec.CodeExitError{Err: fmt.Errorf("command terminated with exit code %d", code), Code: code}
	}
	return err
}

// forwardSizes translates until ctx ends, and closes to.
func forwardSizes(ctx context.Context, from <-chan remotecommand.TerminalSize, to chan<- TerminalSize) {
	defer close(to)
	for {
		select {
		case <-ctx.Done():
			return
		case s, ok := <-from:
			if !ok {
				return
			}
			select {
			case <-ctx.Done():
				return
			case to <- TerminalSize{s.Width, s.Height}:
			}
		}
	}
}
