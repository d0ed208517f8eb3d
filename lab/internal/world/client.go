package world

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/gorilla/websocket"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// A Client speaks to a lab's supervisor, or to the agent itself. It is safe
// for concurrent use.
type Client struct {
	socket  string
	dial    func(ctx context.Context) (net.Conn, error)
	http    *http.Client
	onClose func() error
	onDown  func(ctx context.Context) error
}

// NewClient returns a client of the control socket at that path. It does not
// connect.
func NewClient(socket string) *Client {
	c := newClient(func(ctx context.Context) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", socket)
	})
	c.socket = socket
	return c
}

// newClient returns a client that connects by dial.
func newClient(dial func(ctx context.Context) (net.Conn, error)) *Client {
	return &Client{dial: dial, http: &http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return dial(ctx) },
	}}}
}

// OnClose makes Close call fn.
func (c *Client) OnClose(fn func() error) { c.onClose = fn }

// OnDown makes Down call fn when the lab has ended.
func (c *Client) OnDown(fn func(ctx context.Context) error) { c.onDown = fn }

// Socket is the path of the control socket.
func (c *Client) Socket() string { return c.socket }

// Close ends an ephemeral lab; another one goes on.
func (c *Client) Close() error {
	c.http.CloseIdleConnections()
	if c.onClose != nil {
		return c.onClose()
	}
	return nil
}

// do sends a request and returns the answer when it is a good one.
func (c *Client) do(ctx context.Context, method, path string, body any) (*http.Response, error) {
	var r io.Reader
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			return nil, err
		}
		r = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://lab"+path, r)
	if err != nil {
		return nil, err
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, c.connectError(err)
	}
	if resp.StatusCode >= 300 {
		defer resp.Body.Close()
		return nil, answerError(resp)
	}
	return resp, nil
}

// connectError says ErrNotRunning when nobody listens, and ErrNoAnswer when
// somebody did and the connection broke.
func (c *Client) connectError(err error) error {
	var u *url.Error
	if errors.As(err, &u) {
		err = u.Err
	}
	if c.socket != "" && (errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED)) {
		return fmt.Errorf("%w: nobody answers on %s: start it with `lab up`", ErrNotRunning, c.socket)
	}
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) { // who asked gave up
		return err
	}
	return fmt.Errorf("%w: %w", ErrNoAnswer, err)
}

func answerError(resp *http.Response) error {
	b, err := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	if err != nil {
		return err
	}
	text := strings.TrimSpace(string(b))
	if kind, ok := map[string]error{noTarget: ErrNoTarget, noAnswer: ErrNoAnswer}[resp.Header.Get(errorHeader)]; ok {
		return fmt.Errorf("%w: %s", kind, strings.TrimPrefix(text, kind.Error()+": "))
	}
	return errors.New(text)
}

func (c *Client) call(ctx context.Context, method, path string, body, into any) error {
	resp, err := c.do(ctx, method, path, body)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if into == nil {
		_, err := io.Copy(io.Discard, resp.Body)
		return err
	}
	return json.NewDecoder(resp.Body).Decode(into)
}

// Status says what there is.
func (c *Client) Status(ctx context.Context) (s Status, err error) {
	err = c.call(ctx, http.MethodGet, PathStatus, nil, &s)
	return s, err
}

// Watch calls fn with each line of progress, from the first on, and returns
// when the lab is ready, or with the error that it failed with.
func (c *Client) Watch(ctx context.Context, fn func(Progress)) error {
	return c.progress(ctx, http.MethodGet, PathProgress, nil, fn)
}

func (c *Client) progress(ctx context.Context, method, path string, body any, fn func(Progress)) error {
	resp, err := c.do(ctx, method, path, body)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var p Progress
		if err := json.Unmarshal(lines.Bytes(), &p); err != nil {
			return fmt.Errorf("progress: %w", err)
		}
		if p.Message != "" && fn != nil {
			fn(p)
		}
		switch {
		case p.Error != "":
			return errors.New(p.Error)
		case p.Done:
			return nil
		}
	}
	if err := lines.Err(); err != nil {
		return err
	}
	return errors.New("the supervisor ended before the lab was ready")
}

// Exec runs a command to its end. A command that ran has no error, whatever
// its exit code.
func (c *Client) Exec(ctx context.Context, req ExecRequest) (r ExecResult, err error) {
	if len(req.Argv) == 0 {
		return r, errors.New("exec: there is no command")
	}
	err = c.call(ctx, http.MethodPost, PathExec+"?target="+url.QueryEscape(req.Target), req, &r)
	return r, err
}

// A Resize is a new size of a terminal.
type Resize struct{ Rows, Cols uint16 }

// ExecStream runs a command with its input and output connected, on a terminal
// when req.TTY is set (then there is no stderr), and returns its exit code.
func (c *Client) ExecStream(ctx context.Context, req ExecRequest, stdin io.Reader, stdout, stderr io.Writer, resize <-chan Resize) (int, error) {
	if len(req.Argv) == 0 {
		return 0, errors.New("exec: there is no command")
	}
	d := websocket.Dialer{NetDialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return c.dial(ctx) }}
	conn, resp, err := d.DialContext(ctx, "ws://lab"+PathExecStream+"?target="+url.QueryEscape(req.Target), nil)
	if err != nil {
		if resp != nil {
			defer resp.Body.Close()
			return 0, answerError(resp)
		}
		return 0, c.connectError(err)
	}
	return runStream(ctx, conn, req, stdin, stdout, stderr, resize)
}

// clusterPath fills in a path.
func clusterPath(path, cluster string) string {
	return strings.Replace(path, "{cluster}", url.PathEscape(cluster), 1)
}

// Dial connects to an address as a cluster's control plane would.
func (c *Client) Dial(ctx context.Context, cluster, network, address string) (net.Conn, error) {
	conn, err := c.dial(ctx)
	if err != nil {
		return nil, c.connectError(err)
	}
	stop := context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet,
		"http://lab"+clusterPath(PathDial, cluster)+"?address="+url.QueryEscape(address), nil)
	if err != nil {
		conn.Close()
		return nil, err
	}
	req.Header.Set("Connection", "Upgrade")
	req.Header.Set("Upgrade", "tcp")
	if err := req.Write(conn); err != nil {
		conn.Close()
		return nil, err
	}
	r := bufio.NewReader(conn)
	resp, err := http.ReadResponse(r, req)
	if err != nil {
		conn.Close()
		return nil, fmt.Errorf("dial %s in cluster %s: %w", address, cluster, err)
	}
	if resp.StatusCode != http.StatusSwitchingProtocols {
		defer conn.Close()
		return nil, fmt.Errorf("dial %s in cluster %s: %w", address, cluster, answerError(resp))
	}
	return bufferedConn{conn, r}, nil
}

// A bufferedConn is a connection of which some bytes have been read already.
type bufferedConn struct {
	net.Conn
	r *bufio.Reader
}

func (c bufferedConn) Read(b []byte) (int, error) { return c.r.Read(b) }

// RESTConfig is the administrator's access to a cluster's API server, through
// the supervisor.
func (c *Client) RESTConfig(ctx context.Context, cluster string) (*rest.Config, error) {
	kubeconfig, err := c.Kubeconfig(ctx, cluster)
	if err != nil {
		return nil, err
	}
	cfg, err := clientcmd.RESTConfigFromKubeConfig(kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("cluster %s: kubeconfig: %w", cluster, err)
	}
	cfg.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
		return c.Dial(ctx, cluster, network, address)
	}
	// Not by a proxy that the environment names: it can't be reached from there.
	cfg.Proxy = func(*http.Request) (*url.URL, error) { return nil, nil }
	cfg.QPS, cfg.Burst = 200, 400 // the lab's API servers have nothing else to do
	return cfg, nil
}

// Kubeconfig is the administrator's kubeconfig as it is valid inside the lab:
// for a command run in the target "<cluster>/control-plane", where KUBECONFIG
// already names such a file.
func (c *Client) Kubeconfig(ctx context.Context, cluster string) ([]byte, error) {
	resp, err := c.do(ctx, http.MethodGet, clusterPath(PathKubeconfig, cluster), nil)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	return io.ReadAll(resp.Body)
}

// StopComponent ends a component of a control plane, "kube-apiserver" or
// another, until StartComponent.
func (c *Client) StopComponent(ctx context.Context, cluster, component string) error {
	return c.component(ctx, cluster, component, "stop")
}

// StartComponent starts a component again and waits until it is healthy.
func (c *Client) StartComponent(ctx context.Context, cluster, component string) error {
	return c.component(ctx, cluster, component, "start")
}

func (c *Client) component(ctx context.Context, cluster, component, action string) error {
	path := strings.NewReplacer("{cluster}", url.PathEscape(cluster), "{component}", url.PathEscape(component), "{action}", action).Replace(PathComponent)
	return c.call(ctx, http.MethodPost, path, nil, nil)
}

// JoinNode brings a node of the topology into its cluster and waits until it is
// ready and has a podCIDR. One that is there is no error.
func (c *Client) JoinNode(ctx context.Context, cluster, node string) error {
	return c.node(ctx, cluster, node, "join")
}

// LeaveNode takes a node away as one goes whose machine is switched off, and
// deletes its Node object. What ran there is gone at once; the API server's
// objects of its pods are left to the cluster's own controllers. One that is
// not there is no error.
func (c *Client) LeaveNode(ctx context.Context, cluster, node string) error {
	return c.node(ctx, cluster, node, "leave")
}

// LoseNode cuts the power of a node, which says goodbye to nobody: its Node object
// and those of its pods are left to the cluster's own controllers. One that is not
// there is no error. JoinNode gives the power back.
func (c *Client) LoseNode(ctx context.Context, cluster, node string) error {
	return c.node(ctx, cluster, node, "lose")
}

// RebootNode cuts the power of a node that has containerd, gives it back, and
// waits until its kubelet is ready. Its disk and its Node object stay; its
// network, and all that ran there, are made anew.
func (c *Client) RebootNode(ctx context.Context, cluster, node string) error {
	return c.node(ctx, cluster, node, "reboot")
}

func (c *Client) node(ctx context.Context, cluster, node, action string) error {
	path := strings.NewReplacer("{cluster}", url.PathEscape(cluster), "{node}", url.PathEscape(node), "{action}", action).Replace(PathNode)
	return c.call(ctx, http.MethodPost, path, nil, nil)
}

// Sightings are the packets with a token, in the order of time.
func (c *Client) Sightings(ctx context.Context, q SightingQuery) (s []Sighting, err error) {
	err = c.call(ctx, http.MethodPost, pathSightings, q, &s)
	return s, err
}

// WirePackets says what passed on a host's interfaces.
func (c *Client) WirePackets(ctx context.Context, q WireQuery) (r WireReport, err error) {
	err = c.call(ctx, http.MethodPost, pathWire, q, &r)
	return r, err
}

// Sealed says what became of the packets with a token that were sent into
// WireGuard tunnels.
func (c *Client) Sealed(ctx context.Context, q SealedQuery) (r SealedReport, err error) {
	err = c.call(ctx, http.MethodPost, pathSealed, q, &r)
	return r, err
}

// WritePcap writes all packets that are still in the rings, merged, as pcapng
// with one interface per host and interface name.
func (c *Client) WritePcap(ctx context.Context, w io.Writer) error {
	resp, err := c.do(ctx, http.MethodGet, pathPcap, nil)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	_, err = io.Copy(w, resp.Body)
	return err
}

// PauseCaptures stops all captures until resume is called, ctx ends, or this
// process does. Those who ask for packets meanwhile hear that some are lost.
func (c *Client) PauseCaptures(ctx context.Context) (resume func() error, err error) {
	ctx, cancel := context.WithCancel(ctx)
	resp, err := c.do(ctx, http.MethodPost, pathPause, nil)
	if err != nil {
		cancel()
		return nil, err
	}
	// The line says that it has happened.
	if _, err := bufio.NewReader(resp.Body).ReadString('\n'); err != nil {
		cancel()
		return nil, errors.Join(fmt.Errorf("pause captures: %w", err), resp.Body.Close())
	}
	return func() error {
		cancel()
		return resp.Body.Close()
	}, nil
}

// State is what ip, nft, wg and conntrack say on every host, gateways and pods
// included.
func (c *Client) State(ctx context.Context) (s []HostState, err error) {
	err = c.call(ctx, http.MethodGet, pathState, nil, &s)
	return s, err
}

// Inventory is what only somebody's doing changes in the kernel of every host,
// gateways and pods included.
func (c *Client) Inventory(ctx context.Context) (i []Inventory, err error) {
	err = c.call(ctx, http.MethodGet, pathInventory, nil, &i)
	return i, err
}

// Logs are the logs of the control planes, the agent, the console and of every
// container, ended ones included, from the marks on; those that have none are
// whole. Without marks they are the ends of the logs.
func (c *Client) Logs(ctx context.Context, since map[string]LogMark) (l []Log, err error) {
	err = c.call(ctx, http.MethodPost, PathLogs, LogQuery{Since: since}, &l)
	return l, err
}

// PodLogs are the logs of the containers of one pod, ended ones included. The
// pod is given as for Exec, the marks as for Logs.
func (c *Client) PodLogs(ctx context.Context, target string, since map[string]LogMark) (l []Log, err error) {
	err = c.call(ctx, http.MethodPost, pathPodLogs, LogQuery{Pod: target, Since: since}, &l)
	return l, err
}

// KillContainer kills a container's process with SIGKILL. The kubelet starts
// it again. The empty container name means the pod's only one.
func (c *Client) KillContainer(ctx context.Context, target, container string) error {
	return c.call(ctx, http.MethodPost, pathKill, killRequest{target, container}, nil)
}

// Impair changes what a link to the WAN does to the packets that are sent into
// it.
func (c *Client) Impair(ctx context.Context, req ImpairRequest) error {
	return c.call(ctx, http.MethodPost, pathImpair, req, nil)
}

// Down ends the lab and returns when it is gone.
func (c *Client) Down(ctx context.Context) error {
	if err := c.call(ctx, http.MethodPost, PathDown, nil, nil); err != nil {
		return err
	}
	// The socket is the last thing that goes.
	for {
		conn, err := c.dial(ctx)
		if err != nil {
			break
		}
		// Nothing is ever sent on it: reading returns when the other side ends.
		stop := context.AfterFunc(ctx, func() { conn.Close() })
		_, _ = conn.Read(make([]byte, 1))
		stop()
		conn.Close()
		if ctx.Err() != nil {
			break
		}
	}
	if ctx.Err() != nil || c.onDown == nil {
		return ctx.Err()
	}
	return c.onDown(ctx)
}

// NewAgentClient returns a client of the agent itself, for the supervisor.
func NewAgentClient(dial func(ctx context.Context) (net.Conn, error)) *Client { return newClient(dial) }

// Build builds the world. Only the agent itself does that, and only once.
func (c *Client) Build(ctx context.Context, req BuildRequest, progress func(Progress)) error {
	return c.progress(ctx, http.MethodPost, pathBuild, req, progress)
}

// JoinHost makes the host of a node and starts what Credentials are there for.
// Only the supervisor does that: who wants a node of the cluster takes
// JoinNode.
func (c *Client) JoinHost(ctx context.Context, req NodeRequest) error {
	return c.call(ctx, http.MethodPost, pathJoinNode, req, nil)
}

// LeaveHost takes the host of a node away with all that runs there. Only the
// supervisor does that.
func (c *Client) LeaveHost(ctx context.Context, req NodeRequest) error {
	return c.call(ctx, http.MethodPost, pathLeaveNode, req, nil)
}

// Clock returns the clock of the agent's machine, and sets it when now is not
// zero.
func (c *Client) Clock(ctx context.Context, now time.Time) (was time.Time, err error) {
	var a clockAnswer
	err = c.call(ctx, http.MethodPost, pathClock, clockRequest{now}, &a)
	return a.Was, err
}

// Freeze stops all processes of the agent's machine, so that it can be saved;
// Thaw lets them go on. Only the supervisor does that.
func (c *Client) Freeze(ctx context.Context) error {
	return c.call(ctx, http.MethodPost, pathFreeze, struct{}{}, nil)
}

// Thaw is the other half of Freeze. With newServers all connections to API
// servers end before.
func (c *Client) Thaw(ctx context.Context, newServers bool) error {
	return c.call(ctx, http.MethodPost, pathThaw, thawRequest{newServers}, nil)
}

// Awake tells the agent of a machine that was saved frozen and is restored from
// a snapshot what it missed; Thaw comes then. Only the supervisor does that.
func (c *Client) Awake(ctx context.Context, req AwakeRequest) error {
	return c.call(ctx, http.MethodPost, pathAwake, req, nil)
}

// SaveSnapshot saves a lab of the vm world that has converged, with its control
// planes. The world stands still meanwhile, for a second or two.
func (c *Client) SaveSnapshot(ctx context.Context, req SnapshotRequest) (s SnapshotAnswer, err error) {
	err = c.call(ctx, http.MethodPost, PathSnapshot, req, &s)
	return s, err
}

// Pods are the pods that run, by cluster.
func (c *Client) Pods(ctx context.Context) (p map[string][]PodStatus, err error) {
	err = c.call(ctx, http.MethodGet, pathPods, nil, &p)
	return p, err
}
