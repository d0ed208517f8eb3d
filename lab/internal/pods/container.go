package pods

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/lab/internal/containerinit"
)

// container is one container of a pod through all its runs. Its fields below
// spec are guarded by the pod's mutex.
type container struct {
	pod  *pod
	spec corev1.Container
	init bool

	proc     *process
	state    corev1.ContainerState
	last     corev1.ContainerState
	restarts int32
	started  bool // the startup probe, or what stands for it, succeeded
	ready    bool
	finished bool // will not run again
	id       string
	log      *logFile // of this or the latest run
	previous *logFile // of the one before
	kill     context.CancelCauseFunc
}

// failure is why a container could not be started, with the reason that
// Kubernetes shows.
type failure struct {
	reason string
	err    error
}

func (f *failure) Error() string { return f.err.Error() }

// sidecar tells whether this is an init container that stays.
func (c *container) sidecar() bool {
	return c.init && c.spec.RestartPolicy != nil && *c.spec.RestartPolicy == corev1.ContainerRestartPolicyAlways
}

// restart tells whether a container that ended with code runs again.
func (c *container) restart(code int) bool {
	policy := c.pod.current().Spec.RestartPolicy
	switch {
	case c.sidecar():
		return true
	case c.init:
		return code != 0 && policy != corev1.RestartPolicyNever
	case policy == corev1.RestartPolicyNever:
		return false
	case policy == corev1.RestartPolicyOnFailure:
		return code != 0
	}
	return true
}

// run keeps the container running until it has finished or life ends; then it
// stops it. patience ends when the grace period of the pod is over.
func (c *container) run(life, patience context.Context) {
	backoff := restartFirst
	for {
		began := time.Now()
		code, err := c.once(life, patience)
		if life.Err() != nil {
			return
		}
		var f *failure
		switch {
		case errors.As(err, &f):
			c.pod.event(corev1.EventTypeWarning, "Failed", "Container %s: %s", c.spec.Name, f.err)
			c.waiting(f.reason, f.err.Error())
		case !c.restart(code):
			c.set(func() { c.finished = true })
			return
		default:
			if time.Since(began) > restartForget {
				backoff = restartFirst
			}
			c.pod.event(corev1.EventTypeWarning, "BackOff", "Container %s ended with %d and starts again in %v", c.spec.Name, code, backoff)
			c.set(func() {
				c.last, c.restarts = c.state, c.restarts+1
				c.state = corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{
					Reason: "CrashLoopBackOff", Message: fmt.Sprintf("back-off %v restarting container %s", backoff, c.spec.Name),
				}}
			})
		}
		if !pause(life, backoff) {
			return
		}
		backoff = min(backoff*2, restartMax)
	}
}

// once runs the container once and returns its exit code.
func (c *container) once(life, patience context.Context) (int, error) {
	proc, log, err := c.start(life)
	if err != nil {
		return 0, err
	}
	run, kill := context.WithCancelCause(life)
	defer kill(nil)
	now := metav1.NewTime(proc.started)
	c.set(func() {
		c.proc, c.kill = proc, kill
		c.log, c.previous = log, c.log
		c.id = fmt.Sprintf("lab://%s-%s-%d", c.pod.uid, c.spec.Name, c.restarts)
		c.state = corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: now}}
		c.started = c.spec.StartupProbe == nil
		c.ready = c.started && c.spec.ReadinessProbe == nil && (!c.init || c.sidecar())
	})
	c.pod.node.cfg.Registry.SetContainer(c.pod.registered(), c.spec.Name, proc.pid())
	c.pod.event(corev1.EventTypeNormal, "Started", "Container %s started with process %d", c.spec.Name, proc.pid())
	probes := c.startProbes(run)
	select {
	case <-proc.done:
	case <-run.Done():
		c.end(life, patience, proc, context.Cause(run))
	}
	kill(nil)
	probes.Wait()
	c.pod.node.cfg.Registry.SetContainer(c.pod.registered(), c.spec.Name, 0)
	reason := "Completed"
	if proc.exit != 0 {
		reason = "Error"
	}
	terminated := &corev1.ContainerStateTerminated{
		ExitCode: int32(proc.exit), Reason: reason, StartedAt: now, FinishedAt: metav1.NewTime(proc.finished), ContainerID: c.id,
	}
	if proc.exit > 128 {
		terminated.Signal = int32(proc.exit - 128)
	}
	if c.spec.TerminationMessagePolicy == corev1.TerminationMessageFallbackToLogsOnError && proc.exit != 0 {
		terminated.Message = c.log.tail(2048)
	}
	c.set(func() {
		c.proc, c.kill, c.started, c.ready = nil, nil, false, false
		c.state = corev1.ContainerState{Terminated: terminated}
	})
	return proc.exit, nil
}

// end stops a running container: because its pod ends, or because a probe
// failed, which leaves it the pod's whole grace period.
func (c *container) end(life, patience context.Context, proc *process, why error) {
	if life.Err() == nil {
		c.pod.event(corev1.EventTypeNormal, "Killing", "Container %s: %s, will be restarted", c.spec.Name, why)
		var cancel context.CancelFunc
		patience, cancel = context.WithTimeout(patience, c.pod.grace())
		defer cancel()
	}
	if h := c.spec.Lifecycle; h != nil && h.PreStop != nil && h.PreStop.Exec != nil {
		if _, err := proc.exec(patience, ExecRequest{Argv: h.PreStop.Exec.Command}); err != nil {
			c.pod.event(corev1.EventTypeWarning, "FailedPreStopHook", "Container %s: %s", c.spec.Name, err)
		}
	}
	proc.stop(patience)
}

func (c *container) start(ctx context.Context) (*process, *logFile, error) {
	pod := c.pod.withAddresses()
	image, err := c.pod.node.image(c.spec.Image)
	if err != nil {
		return nil, nil, &failure{"ErrImageNeverPull", err}
	}
	spec, err := c.initSpec(ctx, pod, image)
	if err != nil {
		return nil, nil, &failure{"CreateContainerConfigError", err}
	}
	log, err := c.newLog(pod)
	if err != nil {
		return nil, nil, &failure{"RunContainerError", err}
	}
	proc, err := startProcess(c.pod.node.cfg.Init, c.pod.ns, c.pod.node.cfg.Nice, *spec, log)
	if err != nil {
		return nil, nil, &failure{"RunContainerError", err}
	}
	return proc, log, nil
}

// newLog opens the log of the next run.
func (c *container) newLog(pod *corev1.Pod) (*logFile, error) {
	dir := filepath.Join(c.pod.node.cfg.Dir, "log", pod.Namespace+"_"+pod.Name+"_"+c.pod.uid, c.spec.Name)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	c.pod.mu.Lock()
	defer c.pod.mu.Unlock()
	return createLog(filepath.Join(dir, fmt.Sprintf("%d.log", c.restarts)))
}

// initSpec describes the container to container-init.
func (c *container) initSpec(ctx context.Context, pod *corev1.Pod, image Image) (*containerinit.Spec, error) {
	sec, err := containerSecurity(pod, &c.spec, image)
	if err != nil {
		return nil, err
	}
	env, err := environment{
		pod: pod, image: image, service: c.pod.node.cfg.ServiceCIDR.Masked().Addr().Next().String(),
		objects: reader{ctx, c.pod.node.client, pod.Namespace},
	}.of(&c.spec)
	if err != nil {
		return nil, err
	}
	argv := image.entrypoint()
	if len(c.spec.Command) > 0 {
		argv = expandAll(c.spec.Command, env)
	}
	argv = slices.Concat(argv, expandAll(c.spec.Args, env))
	spec := &containerinit.Spec{
		Root:         filepath.Join(c.pod.dir, "root", c.spec.Name),
		Hostname:     hostname(pod),
		Privileged:   privileged(&c.spec),
		ReadOnlyRoot: c.spec.SecurityContext != nil && c.spec.SecurityContext.ReadOnlyRootFilesystem != nil && *c.spec.SecurityContext.ReadOnlyRootFilesystem,
		Argv:         argv,
		Env:          environ(env),
		Dir:          "/",
		Security:     sec,
		Mounts: []containerinit.Mount{
			{Source: image.Binary, Target: image.path(), ReadOnly: true},
			{Source: filepath.Join(c.pod.dir, "etc", "resolv.conf"), Target: "/etc/resolv.conf"},
			{Source: filepath.Join(c.pod.dir, "etc", "hosts"), Target: "/etc/hosts"},
			{Source: filepath.Join(c.pod.dir, "etc", "hostname"), Target: "/etc/hostname"},
		},
	}
	if c.spec.WorkingDir != "" {
		spec.Dir = c.spec.WorkingDir
	}
	if err := os.MkdirAll(spec.Root, 0o755); err != nil {
		return nil, err
	}
	for _, target := range slices.Sorted(maps.Keys(image.Binds)) {
		spec.Mounts = append(spec.Mounts, containerinit.Mount{Source: image.Binds[target], Target: target, ReadOnly: true})
	}
	mounts, err := c.volumeMounts(pod, env)
	spec.Mounts = append(spec.Mounts, mounts...)
	return spec, err
}

// volumeMounts returns the mounts of a container's volumes, the outer ones
// before those within them.
func (c *container) volumeMounts(pod *corev1.Pod, env map[string]string) ([]containerinit.Mount, error) {
	var out []containerinit.Mount
	for _, m := range c.spec.VolumeMounts {
		i := slices.IndexFunc(pod.Spec.Volumes, func(v corev1.Volume) bool { return v.Name == m.Name })
		if i < 0 {
			return nil, fmt.Errorf("volume %s is not in the pod", m.Name)
		}
		vol := &pod.Spec.Volumes[i]
		source, err := c.pod.volumes.path(vol)
		if err != nil {
			return nil, fmt.Errorf("volume %s: %w", m.Name, err)
		}
		sub := m.SubPath
		if m.SubPathExpr != "" {
			sub = expand(m.SubPathExpr, env)
		}
		if sub != "" {
			if !filepath.IsLocal(sub) {
				return nil, fmt.Errorf("volume %s: subPath %q leads out of it", m.Name, sub)
			}
			source = filepath.Join(source, sub)
			if _, err := os.Stat(source); errors.Is(err, os.ErrNotExist) && vol.EmptyDir != nil {
				err = os.MkdirAll(source, 0o755)
				if err != nil {
					return nil, fmt.Errorf("volume %s: %w", m.Name, err)
				}
			}
			if source, err = filepath.EvalSymlinks(source); err != nil {
				return nil, fmt.Errorf("volume %s: subPath: %w", m.Name, err)
			}
		}
		content := vol.Secret != nil || vol.ConfigMap != nil || vol.Projected != nil || vol.DownwardAPI != nil
		propagation := ""
		if p := m.MountPropagation; p != nil && *p != corev1.MountPropagationNone {
			propagation = string(*p)
			if *p == corev1.MountPropagationBidirectional && !privileged(&c.spec) {
				return nil, fmt.Errorf("volume %s: only a privileged container may have Bidirectional mounts", m.Name)
			}
			if vol.HostPath == nil || m.ReadOnly {
				return nil, fmt.Errorf("volume %s: the lab's kubelet propagates mounts of hostPath volumes that can be written, and no others", m.Name)
			}
		}
		out = append(out, containerinit.Mount{Source: source, Target: m.MountPath, ReadOnly: m.ReadOnly || content, Propagation: propagation})
	}
	slices.SortStableFunc(out, func(a, b containerinit.Mount) int { return strings.Count(a.Target, "/") - strings.Count(b.Target, "/") })
	return out, nil
}

// set changes the container and has the status written.
func (c *container) set(change func()) {
	c.pod.mu.Lock()
	change()
	c.pod.mu.Unlock()
	c.pod.changed()
}

func (c *container) waiting(reason, message string) {
	c.set(func() {
		c.state = corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: reason, Message: message}}
	})
}
