package pods

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	networkingv1beta1 "github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/lab/internal/netns"
	corev1 "k8s.io/api/core/v1"
)

// pod is one pod of this node, from when the scheduler bound it until nothing
// of it is left.
type pod struct {
	node    *node
	uid     string
	dir     string
	volumes *volumes
	dirty   chan struct{} // has an element when the status may have changed

	life     context.Context // ends when the pod must end
	end      context.CancelFunc
	patience context.Context // ends when the pod's grace period is over
	impat    context.CancelFunc
	gone     chan struct{} // closed when nothing is left of the pod

	mu       sync.Mutex
	api      *corev1.Pod // as last seen
	ns       *os.File    // network namespace: its own or the node's
	ips      []netip.Addr
	start    time.Time
	init     []*container
	main     []*container
	initDone bool
	rejected *failure // the pod never runs
	refresh  chan struct{}
}

func newPod(ctx context.Context, n *node, api *corev1.Pod) *pod {
	p := &pod{
		node: n, uid: string(api.UID), dir: filepath.Join(n.cfg.Dir, "pods", string(api.UID)), api: api, start: time.Now(),
		dirty: make(chan struct{}, 1), refresh: make(chan struct{}, 1), gone: make(chan struct{}),
	}
	p.life, p.end = context.WithCancel(ctx)
	p.patience, p.impat = context.WithCancel(ctx)
	p.volumes = newVolumes(n.client, filepath.Join(p.dir, "volumes"), n.hostRoot(), p.withAddresses)
	for i := range api.Spec.InitContainers {
		p.init = append(p.init, &container{pod: p, spec: api.Spec.InitContainers[i], init: true})
	}
	for i := range api.Spec.Containers {
		p.main = append(p.main, &container{pod: p, spec: api.Spec.Containers[i]})
	}
	return p
}

// update takes a newer version of the object.
func (p *pod) update(api *corev1.Pod) {
	p.mu.Lock()
	p.api = api
	p.mu.Unlock()
	p.node.cfg.Registry.SetLabels(p.registered(), api.Labels)
	if api.DeletionTimestamp != nil {
		grace := time.Duration(0)
		if api.DeletionGracePeriodSeconds != nil {
			grace = time.Duration(*api.DeletionGracePeriodSeconds) * time.Second
		}
		p.terminate(grace)
	}
	p.changed()
	select {
	case p.refresh <- struct{}{}: // labels in downwardAPI volumes
	default:
	}
}

// terminate ends the pod. It may be called again with a shorter grace period.
func (p *pod) terminate(grace time.Duration) {
	if grace <= 0 {
		p.impat()
	} else {
		time.AfterFunc(grace, p.impat)
	}
	p.end()
}

func (p *pod) current() *corev1.Pod {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.api
}

// withAddresses returns the pod with the addresses it has, whether or not the
// API server knows them yet.
func (p *pod) withAddresses() *corev1.Pod {
	p.mu.Lock()
	defer p.mu.Unlock()
	out := p.api.DeepCopy()
	p.setAddresses(&out.Status)
	return out
}

func (p *pod) changed() {
	select {
	case p.dirty <- struct{}{}:
	default:
	}
}

func (p *pod) event(kind, reason, format string, args ...any) {
	p.node.events.Eventf(p.current(), kind, reason, format, args...)
	p.node.log.Info(reason, "pod", p.current().Namespace+"/"+p.current().Name, "message", fmt.Sprintf(format, args...))
}

// grace is the pod's own grace period, for restarts.
func (p *pod) grace() time.Duration {
	if g := p.current().Spec.TerminationGracePeriodSeconds; g != nil {
		return time.Duration(*g) * time.Second
	}
	return defaultGrace
}

// registered is how the registry knows this pod.
func (p *pod) registered() Pod {
	p.mu.Lock()
	defer p.mu.Unlock()
	r := Pod{
		Cluster: p.node.cfg.Cluster, Node: p.node.cfg.Name, Namespace: p.api.Namespace, Name: p.api.Name, UID: p.uid,
		Labels: p.api.Labels, HostNetwork: p.api.Spec.HostNetwork, IPs: slices.Clone(p.ips), NetNS: p.ns,
	}
	if len(p.api.Spec.Containers) > 0 {
		r.Image = p.api.Spec.Containers[0].Image
	}
	return r
}

// run takes the pod through its whole life.
func (p *pod) run(ctx context.Context) {
	defer close(p.gone)
	var background sync.WaitGroup
	status, stopStatus := context.WithCancel(ctx)
	background.Go(func() { p.writeStatus(status) })
	p.changed()
	if p.admit() && p.prepare() {
		p.runContainers()
	}
	<-p.lifeOrFinished()
	p.teardown(ctx)
	// A finished pod stays until it is deleted.
	if ctx.Err() == nil && p.life.Err() == nil {
		p.changed()
		<-p.life.Done()
	}
	stopStatus()
	background.Wait()
	if ctx.Err() == nil {
		p.node.finalize(ctx, p)
	}
	p.node.log.Debug("pod is gone", "pod", p.current().Namespace+"/"+p.current().Name)
	_ = os.RemoveAll(p.dir)
}

// lifeOrFinished closes when there is nothing left to run. runContainers
// returns only then, so it is closed already unless the pod was rejected.
func (p *pod) lifeOrFinished() <-chan struct{} {
	p.mu.Lock()
	rejected := p.rejected != nil
	p.mu.Unlock()
	if !rejected {
		return closedChannel()
	}
	return p.life.Done()
}

func closedChannel() <-chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}

// admit says what of the pod is refused or ignored here.
func (p *pod) admit() bool {
	spec := p.current().Spec
	if s := unsafeSysctl(p.current()); s != "" {
		p.reject("SysctlForbidden", fmt.Errorf("forbidden sysctl: %q is not among those that a pod may set without the node's permission", s))
		return false
	}
	for _, what := range []struct {
		used bool
		name string
	}{{spec.HostPID, "hostPID"}, {spec.HostIPC, "hostIPC"}, {spec.ShareProcessNamespace != nil && *spec.ShareProcessNamespace, "shareProcessNamespace"}} {
		if what.used {
			p.event(corev1.EventTypeWarning, "Ignored", "the lab's kubelet ignores %s: every container has a PID namespace of its own", what.name)
		}
	}
	return true
}

func (p *pod) reject(reason string, err error) {
	p.mu.Lock()
	p.rejected = &failure{reason, err}
	p.mu.Unlock()
	p.event(corev1.EventTypeWarning, reason, "%s", err)
	p.changed()
}

// prepare makes the namespace and the volumes, as often as it takes.
func (p *pod) prepare() bool {
	for backoff := restartFirst; ; backoff = min(2*backoff, 2*time.Second) {
		err := p.sandbox()
		if err == nil {
			break
		}
		p.event(corev1.EventTypeWarning, "FailedCreatePodSandBox", "network of the pod: %s", err)
		if !pause(p.life, backoff) {
			return false
		}
	}
	p.changed()
	for backoff := restartFirst; ; backoff = min(2*backoff, 2*time.Second) {
		err := p.volumes.sync(p.life)
		if err == nil {
			break
		}
		if p.life.Err() == nil {
			p.event(corev1.EventTypeWarning, "FailedMount", "%s", err)
		}
		if !pause(p.life, backoff) {
			return false
		}
	}
	return p.life.Err() == nil
}

// sandbox makes what the containers of the pod share.
func (p *pod) sandbox() error {
	api := p.current()
	ns, ips := p.node.cfg.NetNS, []netip.Addr{p.node.cfg.Addr}
	if !api.Spec.HostNetwork {
		network, err := p.node.network(p.life)
		if err != nil {
			return err
		}
		if ns, err = netns.New(); err != nil {
			return err
		}
		ips, err = network.add(p.life, api, ns)
		if err != nil {
			_ = network.del(context.WithoutCancel(p.life), api, ns)
			ns.Close()
			return err
		}
		for _, s := range podSysctls {
			if err := writeSysctl(ns, s.path, s.value); err != nil {
				p.node.log.Warn("default sysctl of a pod", "err", err)
			}
		}
		if api.Spec.SecurityContext != nil {
			for _, s := range api.Spec.SecurityContext.Sysctls {
				if err := writeSysctl(ns, strings.ReplaceAll(s.Name, ".", "/"), s.Value); err != nil {
					_ = network.del(context.WithoutCancel(p.life), api, ns)
					ns.Close()
					return err
				}
			}
		}
	}
	p.mu.Lock()
	p.ns, p.ips = ns, ips
	p.mu.Unlock()
	p.node.cfg.Registry.Add(p.registered(), p.exec)
	if name := api.Annotations[networkingv1beta1.AnnotationNetNS]; api.Spec.HostNetwork && name != "" {
		go p.followInner(filepath.Join(p.node.hostRoot(), "run/netns", filepath.Base(name)))
	}
	return p.writeEtc()
}

// writeEtc writes the files of /etc that a kubelet manages. The lab has no
// DNS server; without a nameserver a lookup fails at once, not after a timeout.
func (p *pod) writeEtc() error {
	pod := p.withAddresses()
	etc := filepath.Join(p.dir, "etc")
	if err := os.MkdirAll(etc, 0o755); err != nil {
		return err
	}
	resolv := "# no cluster DNS in the lab\n"
	if d := pod.Spec.DNSConfig; d != nil {
		for _, s := range d.Nameservers {
			resolv += "nameserver " + s + "\n"
		}
		if len(d.Searches) > 0 {
			resolv += "search " + strings.Join(d.Searches, " ") + "\n"
		}
	}
	hosts := "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost\n"
	for _, ip := range pod.Status.PodIPs {
		hosts += ip.IP + "\t" + hostname(pod) + "\n"
	}
	for _, a := range pod.Spec.HostAliases {
		hosts += a.IP + "\t" + strings.Join(a.Hostnames, "\t") + "\n"
	}
	for name, content := range map[string]string{"resolv.conf": resolv, "hosts": hosts, "hostname": hostname(pod) + "\n"} {
		if err := os.WriteFile(filepath.Join(etc, name), []byte(content), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// runContainers runs the init containers one after the other, then the others,
// and returns when all of them have finished or the pod has ended.
func (p *pod) runContainers() {
	var wg sync.WaitGroup
	// Sidecars, and what keeps the volumes current, live as long as the main
	// containers.
	beside, endBeside := context.WithCancel(p.life)
	wg.Go(func() { p.keepVolumes(beside) })
	ready := true
	for _, c := range p.init {
		if c.sidecar() {
			wg.Go(func() { c.run(beside, p.patience) })
			ready = p.waitStarted(c)
		} else {
			c.run(p.life, p.patience)
			p.mu.Lock()
			ready = c.finished && c.state.Terminated != nil && c.state.Terminated.ExitCode == 0
			p.mu.Unlock()
		}
		if !ready {
			break
		}
	}
	if ready && p.life.Err() == nil {
		p.mu.Lock()
		p.initDone = true
		p.mu.Unlock()
		p.changed()
		var main sync.WaitGroup
		for _, c := range p.main {
			main.Go(func() { c.run(p.life, p.patience) })
		}
		main.Wait()
	}
	endBeside()
	wg.Wait()
}

// waitStarted waits until a sidecar has started.
func (p *pod) waitStarted(c *container) bool {
	for {
		p.mu.Lock()
		started := c.started
		p.mu.Unlock()
		if started {
			return true
		}
		if !pause(p.life, 20*time.Millisecond) {
			return false
		}
	}
}

// teardown removes the pod's network. Volumes stay until it is deleted, so that
// their content can be looked at.
func (p *pod) teardown(ctx context.Context) {
	r := p.registered()
	p.node.cfg.Registry.Remove(r)
	p.mu.Lock()
	ns := p.ns
	p.ns = nil
	p.mu.Unlock()
	if ns == nil || ns == p.node.cfg.NetNS {
		return
	}
	if ctx.Err() == nil {
		if network, err := p.node.network(ctx); err == nil {
			if err := network.del(ctx, p.current(), ns); err != nil {
				p.node.log.Warn("release the network of a pod", "pod", r.Namespace+"/"+r.Name, "err", err)
			}
		}
	}
	// The namespace and its link end here; the address too when the whole
	// node ends, because the next start forgets all of them.
	ns.Close()
}

// exec runs a command in a container of the pod.
func (p *pod) exec(ctx context.Context, req ExecRequest) (int, error) {
	p.mu.Lock()
	c := p.find(req.Container)
	var proc *process
	if c != nil {
		proc = c.proc
	}
	p.mu.Unlock()
	api := p.current()
	if c == nil {
		return 0, fmt.Errorf("pod %s/%s has no container %q", api.Namespace, api.Name, req.Container)
	}
	if proc == nil {
		return 0, fmt.Errorf("container %s of pod %s/%s does not run", c.spec.Name, api.Namespace, api.Name)
	}
	return proc.exec(ctx, req)
}

// find returns a container by name, the first one for none. The caller holds
// the mutex.
func (p *pod) find(name string) *container {
	if name == "" {
		return p.main[0]
	}
	for _, c := range slices.Concat(p.init, p.main) {
		if c.spec.Name == name {
			return c
		}
	}
	return nil
}
