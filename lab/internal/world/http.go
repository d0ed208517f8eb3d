package world

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"sync"
	"time"
)

// Paths of the API. {cluster} and {component} are names. The supervisor serves
// the first group and passes the rest on to the agent.
const (
	PathStatus     = "/v1/status"
	PathProgress   = "/v1/progress"
	PathKubeconfig = "/v1/clusters/{cluster}/kubeconfig"
	PathDial       = "/v1/clusters/{cluster}/dial"
	PathComponent  = "/v1/clusters/{cluster}/components/{component}/{action}" // start, stop
	PathNode       = "/v1/clusters/{cluster}/nodes/{node}/{action}"           // join, leave
	PathDown       = "/v1/down"
	PathSnapshot   = "/v1/snapshot"

	PathExec       = "/v1/exec"        // POST; ?target=
	PathExecStream = "/v1/exec/stream" // websocket; ?target=
	PathLogs       = "/v1/logs"
	pathBuild      = "/v1/build"
	pathClock      = "/v1/clock"
	pathAwake      = "/v1/awake"
	pathFreeze     = "/v1/freeze"
	pathThaw       = "/v1/thaw"
	pathPods       = "/v1/pods"
	pathSightings  = "/v1/sightings"
	pathWire       = "/v1/wire"
	pathSealed     = "/v1/sealed"
	pathPcap       = "/v1/pcap"
	pathPause      = "/v1/captures/pause" // until the request ends
	pathState      = "/v1/state"
	pathInventory  = "/v1/inventory"
	pathPodLogs    = "/v1/pod-logs"
	pathKill       = "/v1/kill"
	pathJoinNode   = "/v1/node/join"
	pathLeaveNode  = "/v1/node/leave"
	pathImpair     = "/v1/impair"
)

// errorHeader tells the kind of an error to the client, so that errors.Is
// works there.
const errorHeader = "X-Lab-Error"

// Values of errorHeader, for ErrNoTarget and ErrNoAnswer.
const (
	noTarget = "no-target"
	noAnswer = "no-answer"
)

func newServer(h http.Handler, logger *slog.Logger) *http.Server {
	return &http.Server{Handler: h, ReadHeaderTimeout: 10 * time.Second, ErrorLog: slog.NewLogLogger(logger.Handler(), slog.LevelWarn)}
}

// WriteError answers with an error.
func WriteError(w http.ResponseWriter, err error) {
	code := http.StatusInternalServerError
	switch {
	case errors.Is(err, ErrNoTarget):
		w.Header().Set(errorHeader, noTarget)
		code = http.StatusNotFound
	case errors.Is(err, ErrNoAnswer):
		w.Header().Set(errorHeader, noAnswer)
		code = http.StatusBadGateway
	}
	http.Error(w, err.Error(), code)
}

// WriteJSON answers with a value.
func WriteJSON(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	// The client sees a truncated answer when this fails; nobody else can help.
	_ = json.NewEncoder(w).Encode(v)
}

// answer is a handler that takes a request value and answers with a value.
func answer[Req, Resp any](fn func(context.Context, Req) (Resp, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		var req Req
		if r.Method != http.MethodGet {
			if err := json.NewDecoder(r.Body).Decode(&req); err != nil && !errors.Is(err, io.EOF) {
				http.Error(w, "request: "+err.Error(), http.StatusBadRequest)
				return
			}
		}
		resp, err := fn(r.Context(), req)
		if err != nil {
			WriteError(w, err)
			return
		}
		WriteJSON(w, resp)
	}
}

// ProgressWriter writes lines of progress as they come. It is safe for
// concurrent use.
func ProgressWriter(w http.ResponseWriter) func(Progress) {
	w.Header().Set("Content-Type", "application/x-ndjson")
	w.WriteHeader(http.StatusOK)
	var mu sync.Mutex
	return func(p Progress) {
		mu.Lock()
		defer mu.Unlock()
		if p.Time.IsZero() {
			p.Time = time.Now()
		}
		if json.NewEncoder(w).Encode(p) == nil {
			http.NewResponseController(w).Flush()
		}
	}
}

type killRequest struct {
	Target    string `json:"target"`
	Container string `json:"container,omitempty"`
}

type clockRequest struct {
	Now time.Time `json:"now"`
}

type clockAnswer struct {
	Was time.Time `json:"was"`
}

// routes is the agent's API.
func (a *agent) routes(ctx context.Context) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST "+pathBuild, func(w http.ResponseWriter, r *http.Request) {
		var req BuildRequest
		if err := json.NewDecoder(r.Body).Decode(&req); err != nil {
			http.Error(w, "request: "+err.Error(), http.StatusBadRequest)
			return
		}
		progress := ProgressWriter(w)
		last := Progress{Done: true}
		// The world lives longer than the request.
		if err := a.build(ctx, req, progress); err != nil {
			last.Error = err.Error()
		}
		progress(last)
	})
	mux.HandleFunc("POST "+pathClock, answer(func(_ context.Context, r clockRequest) (clockAnswer, error) {
		was := time.Now()
		if r.Now.IsZero() {
			return clockAnswer{was}, nil
		}
		return clockAnswer{was}, a.setClock(r.Now)
	}))
	mux.HandleFunc("POST "+pathAwake, answer(func(_ context.Context, r AwakeRequest) (struct{}, error) { return struct{}{}, a.awake(r) }))
	mux.HandleFunc("POST "+pathFreeze, answer(func(context.Context, struct{}) (struct{}, error) { return struct{}{}, a.freeze() }))
	mux.HandleFunc("POST "+pathThaw, answer(func(ctx context.Context, r thawRequest) (struct{}, error) { return struct{}{}, a.thaw(ctx, r) }))
	mux.HandleFunc("GET "+pathPods, answer(func(context.Context, struct{}) (map[string][]PodStatus, error) { return a.podStatus(), nil }))
	mux.HandleFunc("POST "+pathSightings, answer(func(_ context.Context, q SightingQuery) ([]Sighting, error) { return a.captures.Sightings(q) }))
	mux.HandleFunc("POST "+pathWire, answer(func(_ context.Context, q WireQuery) (WireReport, error) { return a.captures.Wire(q, a.portsInto(q.On)) }))
	mux.HandleFunc("POST "+pathSealed, answer(func(_ context.Context, q SealedQuery) (SealedReport, error) {
		return a.captures.Sealed(q, a.portsInto(q.On))
	}))
	mux.HandleFunc("GET "+pathPcap, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/x-pcapng")
		if err := a.captures.WritePcap(w); err != nil {
			a.cfg.Logger.Error("capture file", "err", err)
		}
	})
	mux.HandleFunc("POST "+pathPause, a.servePause)
	mux.HandleFunc("GET "+pathState, answer(func(ctx context.Context, _ struct{}) ([]HostState, error) { return a.state(ctx), nil }))
	mux.HandleFunc("GET "+pathInventory, answer(func(context.Context, struct{}) ([]Inventory, error) { return a.inventory() }))
	mux.HandleFunc("POST "+PathLogs, answer(func(_ context.Context, q LogQuery) ([]Log, error) { return a.logs(q) }))
	mux.HandleFunc("POST "+pathPodLogs, answer(func(_ context.Context, q LogQuery) ([]Log, error) { return a.logs(q) }))
	mux.HandleFunc("POST "+pathKill, answer(func(_ context.Context, r killRequest) (struct{}, error) {
		return struct{}{}, a.killContainer(r.Target, r.Container)
	}))
	mux.HandleFunc("POST "+pathJoinNode, answer(func(_ context.Context, r NodeRequest) (struct{}, error) {
		// The node lives longer than the request.
		return struct{}{}, a.joinNode(ctx, r)
	}))
	mux.HandleFunc("POST "+pathLeaveNode, answer(func(_ context.Context, r NodeRequest) (struct{}, error) {
		return struct{}{}, a.leaveNode(r)
	}))
	mux.HandleFunc("POST "+pathImpair, answer(func(_ context.Context, r ImpairRequest) (struct{}, error) { return struct{}{}, a.impair(r) }))
	HandleExec(mux, a.exec)
	return mux
}

// servePause pauses the captures as long as the client holds the answer: also
// one that is killed leaves them as they were.
func (a *agent) servePause(w http.ResponseWriter, r *http.Request) {
	resume, err := a.captures.Pause()
	defer func() {
		if err := resume(); err != nil {
			a.cfg.Logger.Error("captures do not go on", "err", err)
		}
	}()
	if err != nil {
		WriteError(w, err)
		return
	}
	ProgressWriter(w)(Progress{Message: "captures are paused"})
	<-r.Context().Done()
}

func (a *agent) podStatus() map[string][]PodStatus {
	out := map[string][]PodStatus{}
	for _, p := range a.registry.Pods() {
		s := PodStatus{Namespace: p.Namespace, Name: p.Name, UID: p.UID, Node: p.Node, Labels: p.Labels, HostNet: p.HostNetwork}
		if len(p.IPs) > 0 {
			s.IP = p.IPs[0]
		}
		for _, c := range p.Containers {
			s.Containers = append(s.Containers, ContainerStatus{Name: c.Name, PID: c.PID})
		}
		out[p.Cluster] = append(out[p.Cluster], s)
	}
	return out
}

// portsInto are the interfaces by which packets enter a host, where that is asked
// for: the WAN's.
func (a *agent) portsInto(host string) []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	if host != WANHost || a.network == nil {
		return nil
	}
	return a.network.wanPorts
}

// HandleExec serves commands.
func HandleExec(mux *http.ServeMux, run ExecFunc) {
	mux.HandleFunc("POST "+PathExec, answer(func(ctx context.Context, req ExecRequest) (ExecResult, error) {
		var stdout, stderr bytes.Buffer
		req.TTY = false
		s := Streams{Stdout: &stdout, Stderr: &stderr}
		if req.Stdin != nil {
			s.Stdin = bytes.NewReader(req.Stdin)
		}
		code, err := run(ctx, req, s)
		return ExecResult{Stdout: stdout.Bytes(), Stderr: stderr.Bytes(), Code: code}, err
	}))
	mux.HandleFunc("GET "+PathExecStream, func(w http.ResponseWriter, r *http.Request) { serveStream(w, r, run) })
}
