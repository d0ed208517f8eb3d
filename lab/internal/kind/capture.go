package kind

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/isthmus-net/isthmus/lab/internal/netns"
	"github.com/isthmus-net/isthmus/lab/internal/pods"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// CanCapture tells whether packets can be captured in nodes of an engine: its
// containers have to be processes of this machine, and root's.
func CanCapture(e Engine) bool { return e.Local && os.Geteuid() == 0 }

// Times of captures.
const (
	captureEvery = 25 * time.Millisecond // packets are read
	lookEvery    = 50 * time.Millisecond // for network namespaces of new pods
)

// podNamespaces is where, in a node, containerd has the network namespaces of
// pods (pkg/netns of containerd).
const podNamespaces = "run/netns"

// A follower captures on the nodes of a lab and in their pods, as these come and
// go. What a pod sends in the first moments of its life, before its namespace has
// been noticed, it does not see.
type follower struct {
	lab      *Lab
	captures world.Captures
	stop     context.CancelFunc
	done     sync.WaitGroup

	mu    sync.Mutex
	found map[string]*podNamespace // by path
	all   []pods.Pod               // as the API servers said last
}

// A podNamespace is the network namespace of a pod.
type podNamespace struct {
	file    *os.File
	cluster string
	pod     *pods.Pod // nil: nobody knows yet whose it is
	seen    bool      // in the last look
}

// Capture begins to capture packets on all nodes and in all pods, until Close. A
// lab that captures already goes on. Where that can't be, the error is
// world.ErrNoCaptures.
func (l *Lab) Capture(ctx context.Context) error {
	l.capture.Lock()
	defer l.capture.Unlock()
	if l.follower != nil {
		return nil
	}
	f := &follower{lab: l, found: map[string]*podNamespace{}}
	roots := map[string]string{} // root directories of nodes → their clusters
	for _, h := range l.containers() {
		pid, err := l.processOf(ctx, h.container)
		if err == nil {
			err = f.captureOn(fmt.Sprintf("/proc/%d/ns/net", pid), h.name)
		}
		if err != nil {
			return errors.Join(fmt.Errorf("capture on %s: %w", h.name, err), f.close())
		}
		if h.cluster != "" {
			roots[fmt.Sprintf("/proc/%d/root", pid)] = h.cluster
		}
	}
	running, stop := context.WithCancel(context.WithoutCancel(ctx))
	f.stop = stop
	f.look(running, roots)
	f.done.Go(func() { f.captures.Follow(running, captureEvery) })
	f.done.Go(func() {
		wait.UntilWithContext(running, func(ctx context.Context) { f.look(ctx, roots) }, lookEvery)
	})
	l.follower = f
	return nil
}

// A hostContainer is a container that is a host: a node, a control plane, or a
// host outside the clusters.
type hostContainer struct{ name, cluster, container string }

func (l *Lab) containers() []hostContainer {
	var out []hostContainer
	for _, c := range l.record.Clusters {
		for name, container := range c.Containers {
			out = append(out, hostContainer{c.Name + "/" + name, c.Name, container})
		}
	}
	for _, o := range l.record.Outside {
		out = append(out, hostContainer{name: o.Name, container: o.Container})
	}
	return out
}

// processOf is the first process of a container. The engine says it, and the
// process itself has to be in the container: the engine may be that of another
// machine.
func (l *Lab) processOf(ctx context.Context, container string) (int, error) {
	l.mu.Lock()
	pid, known := l.pids[container]
	l.mu.Unlock()
	if known && isContainer(pid, container) {
		return pid, nil
	}
	if os.Geteuid() != 0 {
		return 0, fmt.Errorf("%w: only root enters network namespaces of containers", world.ErrNoCaptures)
	}
	text, err := run(ctx, l.record.Engine, "inspect", "--format", "{{.State.Pid}}", container)
	if err != nil {
		return 0, err
	}
	pid, err = strconv.Atoi(strings.TrimSpace(text))
	if err != nil || pid <= 0 {
		return 0, fmt.Errorf("%s says that the first process of %s is %q", l.record.Engine, container, strings.TrimSpace(text))
	}
	if !isContainer(pid, container) {
		return 0, fmt.Errorf("%w: process %d of this machine is not container %s: the engine is another machine's", world.ErrNoCaptures, pid, container)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.pids[container] = pid
	return pid, nil
}

// isContainer tells whether a process of this machine is in a container of a lab,
// whose hostname is its name. It is asked each time: when a container has ended,
// another process may get the number.
func isContainer(pid int, container string) bool {
	hostname, err := os.ReadFile(fmt.Sprintf("/proc/%d/root/etc/hostname", pid))
	return err == nil && strings.TrimSpace(string(hostname)) == container
}

// captureOn captures on a host that stays.
func (f *follower) captureOn(path, host string) error {
	ns, err := os.Open(path)
	if err != nil {
		return err
	}
	defer ns.Close() // the capture has its socket
	return f.captures.Start(ns, host, func() string { return host }, f.services())
}

// services are the service addresses of API servers.
func (f *follower) services() []netip.AddrPort { return world.APIServices(f.lab.record.Spec) }

// look starts captures in the namespaces of new pods, ends those of pods that are
// gone, and finds out whose the others are.
func (f *follower) look(ctx context.Context, roots map[string]string) {
	if f.lookForNamespaces(roots) {
		f.name(f.podsOfAll(ctx))
	}
}

// lookForNamespaces tells whether there are some of which nobody knows yet whose
// they are.
func (f *follower) lookForNamespaces(roots map[string]string) (nameless bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, n := range f.found {
		n.seen = false
	}
	for root, cluster := range roots {
		entries, err := os.ReadDir(filepath.Join(root, podNamespaces))
		if err != nil { // a node without pods, or one that has gone
			continue
		}
		for _, e := range entries {
			path := filepath.Join(root, podNamespaces, e.Name())
			n := f.found[path]
			if n == nil {
				if n = f.open(path, cluster); n == nil {
					continue
				}
				f.found[path] = n
			}
			n.seen = true
			nameless = nameless || n.pod == nil
		}
	}
	for path, n := range f.found {
		if !n.seen {
			f.captures.End(path)
			n.file.Close()
			delete(f.found, path)
		}
	}
	return nameless
}

// open starts a capture in a pod's namespace. It returns nil when the path has no
// namespace yet: containerd makes an empty file first, and mounts the namespace on
// it then. The next look tries again.
func (f *follower) open(path, cluster string) *podNamespace {
	file, err := os.Open(path)
	if err != nil {
		return nil
	}
	var fs unix.Statfs_t
	if err := unix.Fstatfs(int(file.Fd()), &fs); err != nil || fs.Type != unix.NSFS_MAGIC {
		file.Close()
		return nil
	}
	n := &podNamespace{file: file, cluster: cluster}
	if err := f.captures.Start(file, path, func() string { return f.hostName(n, path) }, f.services()); err != nil {
		file.Close()
		return nil
	}
	return n
}

// hostName is the name that operands have for a pod.
func (f *follower) hostName(n *podNamespace, path string) string {
	f.mu.Lock()
	defer f.mu.Unlock()
	if n.pod == nil {
		return n.cluster + "/" + filepath.Base(path)
	}
	return world.PodHost(*n.pod, f.all)
}

// podsOfAll are the pods of all clusters whose API servers answer.
func (f *follower) podsOfAll(ctx context.Context) []pods.Pod {
	var out []pods.Pod
	for _, c := range f.lab.record.Clusters {
		list, err := f.lab.Pods(ctx, c.Name)
		if err != nil { // the next look asks again
			continue
		}
		for _, p := range list {
			pod := pods.Pod{Cluster: c.Name, Node: p.Spec.NodeName, Namespace: p.Namespace, Name: p.Name, UID: string(p.UID), Labels: p.Labels, HostNetwork: p.Spec.HostNetwork}
			for _, ip := range p.Status.PodIPs {
				if a, err := netip.ParseAddr(ip.IP); err == nil {
					pod.IPs = append(pod.IPs, a)
				}
			}
			out = append(out, pod)
		}
	}
	return out
}

// name finds the pods of namespaces by the addresses that they have.
func (f *follower) name(all []pods.Pod) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.all = all
	for _, n := range f.found {
		if n.pod != nil {
			continue
		}
		addresses, err := netns.Addresses(n.file)
		if err != nil {
			continue
		}
		for _, p := range f.all {
			if p.Cluster == n.cluster && !p.HostNetwork && len(p.IPs) > 0 && slices.Contains(addresses, p.IPs[0]) {
				n.pod = &p
			}
		}
	}
}

func (f *follower) close() error {
	if f.stop != nil {
		f.stop()
	}
	f.done.Wait()
	f.captures.Close()
	var errs []error
	for _, n := range f.found {
		errs = append(errs, n.file.Close())
	}
	return errors.Join(errs...)
}

// capturing are the captures of this lab, or world.ErrNoCaptures: Capture was not
// called, or can't be here.
func (l *Lab) capturing() (*world.Captures, error) {
	l.capture.Lock()
	defer l.capture.Unlock()
	if l.follower == nil {
		return nil, fmt.Errorf("the world %s: %w", World, world.ErrNoCaptures)
	}
	return &l.follower.captures, nil
}

// nodeLink is the interface of a node to the engine's network.
const nodeLink = "eth0"

// between is the network between the clusters: what leaves a cluster over that of the
// engine, which all have in common, or comes to it from a host outside.
func (l *Lab) between() *world.Network {
	n := &world.Network{Name: world.WANHost, Link: nodeLink}
	side := map[netip.Addr]string{} // a cluster, or a host outside
	own := map[string][]netip.Prefix{}
	for _, c := range l.record.Spec.Clusters {
		for _, node := range c.Nodes {
			host := c.Name + "/" + node.Name
			n.Hosts = append(n.Hosts, host)
			side[node.Addr], own[host] = c.Name, []netip.Prefix{c.PodCIDR, c.ServiceCIDR}
		}
	}
	for _, o := range l.record.Spec.Outside {
		n.Hosts = append(n.Hosts, o.Name)
		if o.Addr.IsValid() {
			side[o.Addr] = o.Name
		}
	}
	n.Between = func(src, dst netip.Addr) bool {
		return side[src] != "" && side[dst] != "" && side[src] != side[dst]
	}
	n.Leaves = func(host string, dst netip.Addr) bool {
		return dst.IsValid() && !dst.IsMulticast() && side[dst] == "" &&
			!slices.ContainsFunc(own[host], func(p netip.Prefix) bool { return p.Contains(dst) })
	}
	return n
}

// Sightings are the packets that have a token in their payload.
func (l *Lab) Sightings(_ context.Context, q world.SightingQuery) ([]world.Sighting, error) {
	c, err := l.capturing()
	if err != nil {
		return nil, err
	}
	return c.Sightings(q)
}

// WirePackets counts the packets that passed on a host.
func (l *Lab) WirePackets(_ context.Context, q world.WireQuery) (world.WireReport, error) {
	c, err := l.capturing()
	if err != nil {
		return world.WireReport{}, err
	}
	return c.Wire(q, nil, l.between())
}

// Sealed follows packets through a tunnel past a host.
func (l *Lab) Sealed(_ context.Context, q world.SealedQuery) (world.SealedReport, error) {
	c, err := l.capturing()
	if err != nil {
		return world.SealedReport{}, err
	}
	return c.Sealed(q, nil, l.between())
}

// WritePcap writes all captured packets as a pcapng file.
func (l *Lab) WritePcap(_ context.Context, w io.Writer) error {
	c, err := l.capturing()
	if err != nil {
		return err
	}
	return c.WritePcap(w)
}

// PauseCaptures stops captures until resume is called.
func (l *Lab) PauseCaptures(context.Context) (resume func() error, err error) {
	c, err := l.capturing()
	if errors.Is(err, world.ErrNoCaptures) {
		return func() error { return nil }, nil
	}
	if err != nil {
		return nil, err
	}
	if resume, err = c.Pause(); err != nil {
		return nil, errors.Join(err, resume())
	}
	return resume, nil
}

// endCaptures ends what Capture began.
func (l *Lab) endCaptures() error {
	l.capture.Lock()
	f := l.follower
	l.follower = nil
	l.capture.Unlock()
	if f == nil {
		return nil
	}
	return f.close()
}
