package supervisor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"slices"
	"strings"

	"github.com/isthmus-net/isthmus/lab/internal/controlplane"
	"github.com/isthmus-net/isthmus/lab/internal/netns"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

var errNoWorld = fmt.Errorf("%w: the world is not there yet: wait until the lab is ready", world.ErrNoAnswer)

// routes is the control socket's API: what the supervisor knows itself; the
// rest is the agent's.
func (l *lab) routes() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+world.PathStatus, func(w http.ResponseWriter, r *http.Request) { world.WriteJSON(w, l.currentStatus(r.Context())) })
	mux.HandleFunc("GET "+world.PathProgress, l.serveProgress)
	mux.HandleFunc("GET "+world.PathKubeconfig, l.serveKubeconfig)
	mux.HandleFunc("GET "+world.PathDial, l.serveDial)
	mux.HandleFunc("POST "+world.PathComponent, l.serveComponent)
	mux.HandleFunc("POST "+world.PathNode, l.serveNode)
	mux.HandleFunc("POST "+world.PathDown, func(w http.ResponseWriter, _ *http.Request) {
		world.WriteJSON(w, struct{}{})
		l.end(errors.New("lab down"))
	})
	mux.HandleFunc("POST "+world.PathLogs, l.serveLogs)
	mux.HandleFunc("POST "+world.PathSnapshot, l.serveSnapshot)

	// Commands in a control plane run here, all others in the world.
	own := http.NewServeMux()
	world.HandleExec(own, l.execControlPlane)
	proxy := l.proxy()
	here := func(w http.ResponseWriter, r *http.Request) {
		if _, ok := l.controlPlaneTarget(r.URL.Query().Get("target")); ok {
			own.ServeHTTP(w, r)
			return
		}
		proxy.ServeHTTP(w, r)
	}
	mux.HandleFunc(world.PathExec, here)
	mux.HandleFunc(world.PathExecStream, here)
	mux.Handle("/", proxy)
	return mux
}

// proxy passes requests on to the agent.
func (l *lab) proxy() http.Handler {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		a := l.currentAgent()
		if a == nil {
			return nil, errNoWorld
		}
		return a.dial(ctx)
	}
	proxy := &httputil.ReverseProxy{
		Rewrite:       func(r *httputil.ProxyRequest) { r.SetURL(&url.URL{Scheme: "http", Host: "agent"}) },
		Transport:     &http.Transport{DialContext: dial},
		FlushInterval: -1,
		ErrorHandler: func(w http.ResponseWriter, _ *http.Request, err error) {
			world.WriteError(w, fmt.Errorf("%w: agent: %w", world.ErrNoAnswer, err))
		},
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		// Otherwise the server closes the request's body when the answer begins. The
		// agent answers before the proxy has seen its end, and the answer would be
		// cut off.
		if err := http.NewResponseController(w).EnableFullDuplex(); err != nil {
			world.WriteError(w, err)
			return
		}
		proxy.ServeHTTP(w, r)
	})
}

func (l *lab) currentAgent() *agent {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.agent
}

func (l *lab) currentStatus(ctx context.Context) world.Status {
	var pods map[string][]world.PodStatus
	// Without /proc there are no figures.
	cpu, _ := processorTime("/proc")
	a := l.currentAgent()
	if a != nil {
		// Without an answer the pods are not listed.
		pods, _ = a.client.Pods(ctx)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.status
	s.CPU = cpu
	if s.VM != nil && a != nil && a.vm != nil {
		vm := *s.VM
		vm.Warnings = a.vm.Alarms()
		s.VM = &vm
	}
	s.Clusters = nil
	for _, spec := range l.cfg.Spec.Clusters {
		cs := world.ClusterStatus{Name: spec.Name, Pods: pods[spec.Name], Components: map[string]string{}}
		c := l.clusters[spec.Name]
		if c != nil {
			cs.Nodes = c.presentNodes()
		}
		if c != nil && c.cp != nil {
			cs.Server = "https://" + c.cp.Address().String()
			cs.Took = c.cp.Took()
			running := c.cp.Running()
			for _, name := range controlplane.Components() {
				cs.Components[name] = "stopped"
				if running[name] > 0 {
					cs.Components[name] = "running"
				}
			}
		}
		s.Clusters = append(s.Clusters, cs)
	}
	return s
}

func (l *lab) serveProgress(w http.ResponseWriter, r *http.Request) {
	write := world.ProgressWriter(w)
	for n := 0; ; {
		lines, more := l.progressFrom(n)
		for _, p := range lines {
			write(p)
			if p.Done {
				return
			}
		}
		n += len(lines)
		select {
		case <-more:
		case <-r.Context().Done():
			return
		}
	}
}

// cluster finds a cluster that has a control plane, or answers that it has not.
func (l *lab) cluster(w http.ResponseWriter, r *http.Request) (*cluster, bool) {
	name := r.PathValue("cluster")
	l.mu.Lock()
	defer l.mu.Unlock()
	c := l.clusters[name]
	if c == nil {
		world.WriteError(w, fmt.Errorf("%w: there is no cluster %q; there are %s", world.ErrNoTarget, name, strings.Join(l.clusterNames(), ", ")))
		return nil, false
	}
	if c.cp == nil {
		world.WriteError(w, fmt.Errorf("cluster %s has no control plane yet", name))
		return nil, false
	}
	return c, true
}

func (l *lab) clusterNames() []string {
	var names []string
	for _, c := range l.cfg.Spec.Clusters {
		names = append(names, c.Name)
	}
	return names
}

func (l *lab) serveKubeconfig(w http.ResponseWriter, r *http.Request) {
	c, ok := l.cluster(w, r)
	if !ok {
		return
	}
	b, err := c.cp.Kubeconfig("admin")
	if err != nil {
		world.WriteError(w, err)
		return
	}
	w.Header().Set("Content-Type", "application/yaml")
	w.Write(b)
}

// serveDial turns the connection into one to an address that the control
// plane's namespace reaches.
func (l *lab) serveDial(w http.ResponseWriter, r *http.Request) {
	c, ok := l.cluster(w, r)
	if !ok {
		return
	}
	to, err := netns.DialContext(r.Context(), c.ns.File, "tcp", r.URL.Query().Get("address"))
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadGateway)
		return
	}
	defer to.Close()
	from, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		world.WriteError(w, err)
		return
	}
	defer from.Close()
	if _, err := io.WriteString(from, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n"); err != nil {
		return
	}
	done := make(chan struct{}, 2)
	pass := func(dst net.Conn, src io.Reader) {
		io.Copy(dst, src)
		if half, ok := dst.(interface{ CloseWrite() error }); ok {
			half.CloseWrite()
		}
		done <- struct{}{}
	}
	go pass(to, buffered)
	go pass(from, to)
	<-done
	<-done
}

func (l *lab) serveComponent(w http.ResponseWriter, r *http.Request) {
	c, ok := l.cluster(w, r)
	if !ok {
		return
	}
	component := r.PathValue("component")
	if !slices.Contains(controlplane.Components(), component) {
		world.WriteError(w, fmt.Errorf("%w: component %q; there are %s", world.ErrNoTarget, component, strings.Join(controlplane.Components(), ", ")))
		return
	}
	var err error
	switch r.PathValue("action") {
	case "stop":
		err = c.cp.StopComponent(component)
	case "start":
		err = c.cp.StartComponent(r.Context(), component)
	default:
		err = fmt.Errorf("action %q: use start or stop", r.PathValue("action"))
	}
	if err != nil {
		world.WriteError(w, err)
		return
	}
	world.WriteJSON(w, struct{}{})
}

// controlPlaneTarget tells whether a target is a cluster's control plane.
func (l *lab) controlPlaneTarget(target string) (*cluster, bool) {
	name, host, _ := strings.Cut(target, "/")
	if host != world.ControlPlaneHost {
		return nil, false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	c, ok := l.clusters[name]
	return c, ok
}

// clientEnv is what kubectl, helm and isthmusctl find a cluster by. They keep the
// kinds that it serves by the address of its API server, which is the same in every
// lab: in the home directory one lab would find those of another.
func (l *lab) clientEnv(cluster string) []string {
	return []string{"KUBECONFIG=" + l.kubeconfigFile(cluster), world.KubeconfigsVariable + "=" + l.state("control-plane"), "KUBECACHEDIR=" + l.state("control-plane", cluster, "kube-cache")}
}

// execControlPlane runs a command in a control plane's namespace, with its
// administrator's kubeconfig.
func (l *lab) execControlPlane(ctx context.Context, req world.ExecRequest, s world.Streams) (int, error) {
	c, ok := l.controlPlaneTarget(req.Target)
	if !ok {
		return 0, fmt.Errorf("%w: %q", world.ErrNoTarget, req.Target)
	}
	req.Env = append(l.clientEnv(c.spec.Name), req.Env...)
	if err := world.OwnTemp(&req, l.state()); err != nil {
		return 0, err
	}
	return world.RunIn(ctx, c.ns, req, s)
}

// serveLogs adds the supervisor's and the control planes' logs to the agent's.
// Who wants all that was written since a mark gets that or an error.
func (l *lab) serveLogs(w http.ResponseWriter, r *http.Request) {
	var q world.LogQuery
	if err := json.NewDecoder(r.Body).Decode(&q); err != nil {
		http.Error(w, "request: "+err.Error(), http.StatusBadRequest)
		return
	}
	logs, err := world.LogsUnder(l.state("control-plane"), q, func(path string) string {
		return strings.Replace(path, "/log/", "/", 1) // milan/log/etcd
	})
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		world.WriteError(w, err)
		return
	}
	if a := l.currentAgent(); a != nil {
		inside, err := a.client.Logs(r.Context(), q.Since)
		if err != nil && q.Since != nil {
			world.WriteError(w, err)
			return
		}
		if err != nil {
			inside = []world.Log{{Name: "agent", Text: "no answer: " + err.Error()}}
		}
		logs = append(logs, inside...)
		if a.vm != nil {
			logs = append(logs, world.Log{Name: "console", Text: a.vm.Console()})
		} else {
			logs = append(logs, world.Log{Name: "agent", Text: logEnd(l.state("agent.log"))})
		}
	}
	logs = append(logs, world.Log{Name: "supervisor", Text: logEnd(l.cfg.RunDir + "/" + logFile)})
	world.WriteJSON(w, logs)
}
