package pods

import (
	"context"
	"fmt"
	"io"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
)

// Pod is a running pod as the lab sees it: where it is and which processes it
// has.
type Pod struct {
	Cluster, Node   string
	Namespace, Name string
	UID             string
	Labels          map[string]string
	Image           string // of the first container
	HostNetwork     bool
	IPs             []netip.Addr
	// NetNS is open while the pod exists; for a hostNetwork pod it is the
	// node's. Duplicate it to keep it longer.
	NetNS *os.File
	// Inner is the network namespace of the node that a gateway in the host
	// network works in; nil: it does not, or not yet.
	Inner      *os.File
	Containers []Container
}

// Own is the network namespace that is this pod's and nobody else's; nil: it
// has none.
func (p Pod) Own() *os.File {
	switch {
	case p.Inner != nil:
		return p.Inner
	case p.HostNetwork:
		return nil
	}
	return p.NetNS
}

// Container is a running container of a Pod.
type Container struct {
	Name string
	PID  int // as seen from this process
}

// Event tells a watcher of the Registry what happened to a pod.
type Event struct {
	// Gone is false when the pod's network namespace is ready and nothing
	// runs in it yet, or when a pod of the host network has made one; it is
	// true just before the namespace is closed.
	Gone bool
	Pod  Pod
}

// Registry knows the pods of all nodes that share it.
type Registry struct {
	mu       sync.Mutex
	pods     map[string]*podEntry
	watchers map[int]func(Event)
	next     int
	woken    chan struct{} // closed, and replaced, by Wake
	asleep   bool
	sleeps   int // how often Sleep was called
}

type podEntry struct {
	pod  Pod
	exec func(context.Context, ExecRequest) (int, error)
}

// NewRegistry returns an empty registry.
func NewRegistry() *Registry {
	return &Registry{pods: map[string]*podEntry{}, watchers: map[int]func(Event){}, woken: make(chan struct{})}
}

// Sleep makes all nodes stop probing until Wake: of containers that are frozen
// nobody learns whether they are well.
func (r *Registry) Sleep() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.asleep = true
	r.sleeps++
}

// Wake ends Sleep, and makes all nodes do at once what they would do in a while:
// renew their lease, confirm their status, and look whether tokens have to be
// renewed.
func (r *Registry) Wake() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.asleep = false
	close(r.woken)
	r.woken = make(chan struct{})
}

// awake waits until nobody sleeps, and returns how often somebody has. It is
// false when ctx ends first.
func (r *Registry) awake(ctx context.Context) (sleeps int, ok bool) {
	for {
		r.mu.Lock()
		asleep, woken, sleeps := r.asleep, r.woken, r.sleeps
		r.mu.Unlock()
		if !asleep {
			return sleeps, true
		}
		select {
		case <-ctx.Done():
			return 0, false
		case <-woken:
		}
	}
}

// wake returns what the next Wake closes.
func (r *Registry) wake() <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.woken
}

// Pods returns the pods in the order of cluster, namespace and name.
func (r *Registry) Pods() []Pod {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := make([]Pod, 0, len(r.pods))
	for _, e := range r.pods {
		out = append(out, e.pod.clone())
	}
	slices.SortFunc(out, func(a, b Pod) int {
		return strings.Compare(a.Cluster+"/"+a.Namespace+"/"+a.Name, b.Cluster+"/"+b.Namespace+"/"+b.Name)
	})
	return out
}

// Watch calls f for every pod that is there, then for every change, until stop
// is called. f is called while the kubelet waits, so that a capture is in
// place before the first packet: it must be quick and must not call the
// Registry.
func (r *Registry) Watch(f func(Event)) (stop func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	id := r.next
	r.next++
	for _, e := range r.pods {
		f(Event{Pod: e.pod.clone()})
	}
	r.watchers[id] = f
	return func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		delete(r.watchers, id)
	}
}

// ExecRequest asks for a command in a running container.
type ExecRequest struct {
	Cluster, Namespace, Pod string
	Container               string   // default: the first
	Argv                    []string // found in the container, by its PATH
	Env                     []string // added to the container's
	Stdin                   io.Reader
	Stdout, Stderr          io.Writer
	TTY                     bool
	Resize                  <-chan TerminalSize
}

// TerminalSize is the size of a terminal in characters.
type TerminalSize struct{ Width, Height uint16 }

// Exec runs a command in a container, with the namespaces, user and
// capabilities of the container, and returns its exit code.
func (r *Registry) Exec(ctx context.Context, req ExecRequest) (int, error) {
	r.mu.Lock()
	e, ok := r.pods[registryKey(req.Cluster, req.Namespace, req.Pod)]
	r.mu.Unlock()
	if !ok {
		return 0, fmt.Errorf("exec: pod %s/%s of cluster %s does not run here", req.Namespace, req.Pod, req.Cluster)
	}
	return e.exec(ctx, req)
}

func registryKey(cluster, namespace, name string) string {
	return cluster + "/" + namespace + "/" + name
}

func (p Pod) clone() Pod {
	p.IPs = slices.Clone(p.IPs)
	p.Containers = slices.Clone(p.Containers)
	return p
}

// Add makes a pod known, with what runs commands in its containers, and tells
// the watchers. Its network is there; nothing runs in it yet where the caller
// runs it.
func (r *Registry) Add(p Pod, exec func(context.Context, ExecRequest) (int, error)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.pods[registryKey(p.Cluster, p.Namespace, p.Name)] = &podEntry{pod: p, exec: exec}
	for _, f := range r.watchers {
		f(Event{Pod: p.clone()})
	}
}

// setInner records the namespace that a pod works in, and tells the watchers.
func (r *Registry) setInner(p Pod, ns *os.File) {
	r.mu.Lock()
	defer r.mu.Unlock()
	e, ok := r.pods[registryKey(p.Cluster, p.Namespace, p.Name)]
	if !ok || e.pod.UID != p.UID {
		return
	}
	e.pod.Inner = ns
	for _, f := range r.watchers {
		f(Event{Pod: e.pod.clone()})
	}
}

// Remove tells the watchers that a pod is gone and forgets it. A pod of the same
// name that has another UID stays.
func (r *Registry) Remove(p Pod) {
	r.mu.Lock()
	defer r.mu.Unlock()
	key := registryKey(p.Cluster, p.Namespace, p.Name)
	e, ok := r.pods[key]
	if !ok || e.pod.UID != p.UID {
		return
	}
	delete(r.pods, key)
	for _, f := range r.watchers {
		f(Event{Gone: true, Pod: e.pod.clone()})
	}
}

// SetContainer records that a container runs (pid > 0) or ended (pid 0).
func (r *Registry) SetContainer(p Pod, container string, pid int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	e, ok := r.pods[registryKey(p.Cluster, p.Namespace, p.Name)]
	if !ok || e.pod.UID != p.UID {
		return
	}
	cs := slices.DeleteFunc(slices.Clone(e.pod.Containers), func(c Container) bool { return c.Name == container })
	if pid > 0 {
		cs = append(cs, Container{Name: container, PID: pid})
	}
	e.pod.Containers = cs
}

// SetLabels records a pod's labels.
func (r *Registry) SetLabels(p Pod, labels map[string]string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if e, ok := r.pods[registryKey(p.Cluster, p.Namespace, p.Name)]; ok && e.pod.UID == p.UID {
		e.pod.Labels = labels
	}
}
