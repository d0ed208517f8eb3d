package kubelet

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/remotecommand"
	utilexec "k8s.io/client-go/util/exec"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/isthmus-net/isthmus/lab/internal/netns"
	"github.com/isthmus-net/isthmus/lab/internal/pods"
)

// A cri is containerd, as a kubelet speaks to it.
type cri struct {
	*grpc.ClientConn
	runtime runtimeapi.RuntimeServiceClient
}

func dialCRI(socket string) (*cri, error) {
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, fmt.Errorf("containerd: %w", err)
	}
	return &cri{conn, runtimeapi.NewRuntimeServiceClient(conn)}, nil
}

// A watcher tells the registry of pods what runs on the node.
type watcher struct {
	node *node
	cri  *cri

	mu     sync.Mutex
	closed bool
	pods   map[string]*entry            // by ID of the sandbox
	labels map[string]map[string]string // of pods, by UID: those of the API change
}

// An entry is a pod of the registry.
type entry struct {
	pod        pods.Pod
	containers map[string]string // ID by name
}

func newWatcher(n *node, c *cri) *watcher {
	return &watcher{node: n, cri: c, pods: map[string]*entry{}, labels: map[string]map[string]string{}}
}

// close takes all pods out of the registry.
func (w *watcher) close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.closed = true
	for id := range w.pods {
		w.drop(id)
	}
}

// followContainers keeps the registry current until ctx ends.
func (w *watcher) followContainers(ctx context.Context) {
	for ctx.Err() == nil {
		err := w.follow(ctx)
		select {
		case <-ctx.Done():
		case <-w.node.gone:
			return
		case <-time.After(200 * time.Millisecond):
			w.node.log.Debug("containerd's events", "err", err)
		}
	}
}

func (w *watcher) follow(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	events, err := w.cri.runtime.GetContainerEvents(ctx, &runtimeapi.GetEventsRequest{})
	if err != nil {
		return err
	}
	for {
		// What could not be looked at is looked at again.
		if err := w.refresh(ctx); err != nil {
			return err
		}
		if _, err := events.Recv(); err != nil {
			return err
		}
	}
}

// refresh compares the registry with what runs.
func (w *watcher) refresh(ctx context.Context) error {
	sandboxes, err := w.cri.runtime.ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{
		Filter: &runtimeapi.PodSandboxFilter{State: &runtimeapi.PodSandboxStateValue{State: runtimeapi.PodSandboxState_SANDBOX_READY}},
	})
	if err != nil {
		return err
	}
	containers, err := w.cri.runtime.ListContainers(ctx, &runtimeapi.ListContainersRequest{
		Filter: &runtimeapi.ContainerFilter{State: &runtimeapi.ContainerStateValue{State: runtimeapi.ContainerState_CONTAINER_RUNNING}},
	})
	if err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return nil
	}
	ready := map[string]bool{}
	for _, s := range sandboxes.Items {
		ready[s.Id] = true
	}
	for id := range w.pods {
		if !ready[id] {
			w.drop(id)
		}
	}
	var errs []error
	for _, s := range sandboxes.Items {
		if w.pods[s.Id] != nil {
			continue
		}
		e, err := w.open(ctx, s)
		if err != nil { // it may have ended since
			errs = append(errs, fmt.Errorf("pod %s/%s: %w", s.Metadata.Namespace, s.Metadata.Name, err))
			continue
		}
		w.pods[s.Id] = e
		w.node.cfg.Registry.Add(e.pod, func(ctx context.Context, req pods.ExecRequest) (int, error) { return w.exec(ctx, e, req) })
	}
	running := map[*entry]map[string]string{}
	for _, c := range containers.Containers {
		if e := w.pods[c.PodSandboxId]; e != nil {
			if running[e] == nil {
				running[e] = map[string]string{}
			}
			running[e][c.Metadata.Name] = c.Id
		}
	}
	for _, e := range w.pods {
		errs = append(errs, w.setContainers(ctx, e, running[e]))
	}
	return errors.Join(errs...)
}

// drop forgets a pod. The caller holds the mutex.
func (w *watcher) drop(id string) {
	e := w.pods[id]
	delete(w.pods, id)
	w.node.cfg.Registry.Remove(e.pod)
	if !e.pod.HostNetwork {
		e.pod.NetNS.Close()
	}
}

// open looks up where a pod is.
func (w *watcher) open(ctx context.Context, s *runtimeapi.PodSandbox) (*entry, error) {
	r, err := w.cri.runtime.PodSandboxStatus(ctx, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: s.Id, Verbose: true})
	if err != nil {
		return nil, err
	}
	p := pods.Pod{
		Cluster: w.node.cfg.Cluster, Node: w.node.cfg.Name, Namespace: s.Metadata.Namespace, Name: s.Metadata.Name, UID: s.Metadata.Uid,
		Labels: w.labelsOf(s), HostNetwork: r.Status.GetLinux().GetNamespaces().GetOptions().GetNetwork() == runtimeapi.NamespaceMode_NODE,
		NetNS: w.node.cfg.NetNS,
	}
	if p.HostNetwork {
		p.IPs = []netip.Addr{w.node.cfg.Addr}
		return &entry{pod: p}, nil
	}
	first, err := netip.ParseAddr(r.Status.GetNetwork().GetIp())
	if err != nil {
		return nil, fmt.Errorf("its address: %w", err)
	}
	p.IPs = []netip.Addr{first}
	for _, more := range r.Status.GetNetwork().GetAdditionalIps() {
		if a, err := netip.ParseAddr(more.Ip); err == nil {
			p.IPs = append(p.IPs, a)
		}
	}
	pid, err := pidOf(r.Info)
	if err != nil {
		return nil, err
	}
	if p.NetNS, err = os.Open(w.node.path("proc", strconv.Itoa(pid), "ns", "net")); err != nil {
		return nil, err
	}
	return &entry{pod: p}, nil
}

// pidOf is the process ID in containerd's verbose answers, as the node counts.
func pidOf(info map[string]string) (int, error) {
	var i struct {
		PID int `json:"pid"`
	}
	if err := json.Unmarshal([]byte(info["info"]), &i); err != nil {
		return 0, fmt.Errorf("containerd's information: %w", err)
	}
	if i.PID == 0 {
		return 0, errors.New("it has no process")
	}
	return i.PID, nil
}

// setContainers records which containers of a pod run. The caller holds the
// mutex.
func (w *watcher) setContainers(ctx context.Context, e *entry, running map[string]string) error {
	var errs []error
	for name, id := range e.containers {
		if running[name] != id {
			w.node.cfg.Registry.SetContainer(e.pod, name, 0)
		}
	}
	known := map[string]string{}
	for name, id := range running {
		if e.containers[name] == id {
			known[name] = id
			continue
		}
		pid, err := w.pidOfContainer(ctx, id)
		if err != nil { // it may have ended since
			errs = append(errs, fmt.Errorf("container %s of pod %s/%s: %w", name, e.pod.Namespace, e.pod.Name, err))
			continue
		}
		w.node.cfg.Registry.SetContainer(e.pod, name, pid)
		known[name] = id
	}
	e.containers = known
	return errors.Join(errs...)
}

func (w *watcher) pidOfContainer(ctx context.Context, id string) (int, error) {
	r, err := w.cri.runtime.ContainerStatus(ctx, &runtimeapi.ContainerStatusRequest{ContainerId: id, Verbose: true})
	if err != nil {
		return 0, err
	}
	pid, err := pidOf(r.Info)
	if err != nil {
		return 0, err
	}
	return w.node.ourPID(pid)
}

// ourPID finds the process of the node that has an ID there in our own count
// (proc_pid_status(5), NSpid).
func (n *node) ourPID(theirs int) (int, error) {
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return 0, err
	}
	for _, dir := range dirs {
		ours, err := strconv.Atoi(filepath.Base(dir))
		if err != nil {
			continue
		}
		if ids := nsPIDs(ours); len(ids) > 1 && ids[1] == strconv.Itoa(theirs) && n.isOurs(ours) {
			return ours, nil
		}
	}
	return 0, fmt.Errorf("process %d of the node is gone", theirs)
}

// nsPIDs are the IDs of a process, in our namespace first.
func nsPIDs(pid int) []string { return strings.Fields(statusField(pid, "NSpid:")) }

func statusField(pid int, key string) string {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return "" // it is gone
	}
	for line := range strings.Lines(string(text)) {
		if value, ok := strings.CutPrefix(line, key); ok {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// isOurs tells whether a process descends from the node's first one.
func (n *node) isOurs(pid int) bool {
	for pid > 1 && pid != n.first.Process.Pid {
		pid, _ = strconv.Atoi(statusField(pid, "PPid:"))
	}
	return pid == n.first.Process.Pid
}

// labelsOf are the labels of a pod: what the API says, or the sandbox as long
// as nobody has heard of it. The caller holds the mutex.
func (w *watcher) labelsOf(s *runtimeapi.PodSandbox) map[string]string {
	if l, ok := w.labels[s.Metadata.Uid]; ok {
		return l
	}
	l := maps.Clone(s.Labels)
	maps.DeleteFunc(l, func(key, _ string) bool { return strings.HasPrefix(key, "io.kubernetes.") })
	return l
}

// followPods keeps the labels of pods current until ctx ends: they change while
// a pod runs, and containerd does not hear of it.
func (w *watcher) followPods(ctx context.Context) {
	changed := func(o any) {
		if p, ok := o.(*corev1.Pod); ok {
			w.mu.Lock()
			w.labels[string(p.UID)] = p.Labels
			w.mu.Unlock()
			w.node.cfg.Registry.SetLabels(pods.Pod{Cluster: w.node.cfg.Cluster, Namespace: p.Namespace, Name: p.Name, UID: string(p.UID)}, p.Labels)
		}
	}
	_, informer := cache.NewInformerWithOptions(cache.InformerOptions{
		ListerWatcher: cache.NewListWatchFromClient(w.node.client.CoreV1().RESTClient(), "pods", metav1.NamespaceAll, fields.OneTermEqualSelector("spec.nodeName", w.node.cfg.Name)),
		ObjectType:    &corev1.Pod{},
		Handler: cache.ResourceEventHandlerFuncs{
			AddFunc: changed, UpdateFunc: func(_, o any) { changed(o) },
			DeleteFunc: func(o any) {
				if p, ok := o.(*corev1.Pod); ok {
					w.mu.Lock()
					delete(w.labels, string(p.UID))
					w.mu.Unlock()
				}
			},
		},
	})
	informer.RunWithContext(ctx)
}

// exec runs a command in a container, by containerd's streams.
func (w *watcher) exec(ctx context.Context, e *entry, req pods.ExecRequest) (int, error) {
	if len(req.Env) > 0 {
		return 0, errors.New("exec: a container of a real kubelet takes no environment; call a shell that sets it")
	}
	w.mu.Lock()
	container := req.Container
	if container == "" {
		for name := range e.containers {
			container = name
		}
	}
	id, several := e.containers[container], len(e.containers) > 1 && req.Container == ""
	w.mu.Unlock()
	switch {
	case several:
		return 0, fmt.Errorf("exec: pod %s/%s has several containers: say which", e.pod.Namespace, e.pod.Name)
	case id == "":
		return 0, fmt.Errorf("exec: pod %s/%s has no running container %s", e.pod.Namespace, e.pod.Name, container)
	}
	r, err := w.cri.runtime.Exec(ctx, &runtimeapi.ExecRequest{
		ContainerId: id, Cmd: req.Argv, Tty: req.TTY, Stdin: req.Stdin != nil, Stdout: req.Stdout != nil, Stderr: req.Stderr != nil && !req.TTY,
	})
	if err != nil {
		return 0, fmt.Errorf("exec: %w", err)
	}
	at, err := url.Parse(r.Url)
	if err != nil {
		return 0, fmt.Errorf("exec: %w", err)
	}
	stream, err := remotecommand.NewSPDYExecutor(&rest.Config{Host: at.Host}, "POST", at)
	if err != nil {
		return 0, fmt.Errorf("exec: %w", err)
	}
	options := remotecommand.StreamOptions{Stdin: req.Stdin, Stdout: req.Stdout, Tty: req.TTY}
	if req.TTY {
		options.TerminalSizeQueue = sizes(req.Resize)
	} else {
		options.Stderr = req.Stderr
	}
	// containerd listens on the loopback of the node.
	err = netns.Do(w.node.cfg.NetNS, func() error { return stream.StreamWithContext(ctx, options) })
	var exit utilexec.ExitError
	if errors.As(err, &exit) {
		return exit.ExitStatus(), nil
	}
	return 0, err
}

// sizes hands on the sizes of a terminal.
type sizes <-chan pods.TerminalSize

// Next implements remotecommand.TerminalSizeQueue.
func (s sizes) Next() *remotecommand.TerminalSize {
	size, ok := <-s
	if !ok {
		return nil
	}
	return &remotecommand.TerminalSize{Width: size.Width, Height: size.Height}
}
