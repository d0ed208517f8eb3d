package pods

import (
	"context"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// callTimeout bounds one request to the API server.
const callTimeout = 10 * time.Second

// writeStatus writes the pod's status whenever it changed, until ctx ends.
func (p *pod) writeStatus(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-p.dirty:
		}
		for {
			err := p.writeStatusOnce(ctx)
			if err == nil || apierrors.IsNotFound(err) || ctx.Err() != nil {
				break
			}
			if !apierrors.IsConflict(err) {
				p.node.log.Warn("write the status of a pod", "pod", p.current().Namespace+"/"+p.current().Name, "err", err)
			}
			if !pause(ctx, statusRetry) {
				return
			}
		}
	}
}

func (p *pod) writeStatusOnce(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	pods := p.node.client.CoreV1().Pods(p.current().Namespace)
	api := p.current().DeepCopy()
	for {
		p.mu.Lock()
		status := p.status(api.Status)
		p.mu.Unlock()
		if equality.Semantic.DeepEqual(status, api.Status) {
			return nil
		}
		api.Status = status
		updated, err := pods.UpdateStatus(ctx, api, metav1.UpdateOptions{})
		if err == nil {
			p.mu.Lock()
			if p.api.UID == updated.UID && p.api.DeletionTimestamp == nil {
				p.api = updated
			}
			p.mu.Unlock()
			return nil
		}
		if !apierrors.IsConflict(err) {
			return err
		}
		if api, err = pods.Get(ctx, api.Name, metav1.GetOptions{}); err != nil {
			return err
		}
		if string(api.UID) != p.uid {
			return nil // a new pod of the same name
		}
	}
}

// status computes the status from the one that the API server has. The caller
// holds the mutex.
func (p *pod) status(old corev1.PodStatus) corev1.PodStatus {
	s := *old.DeepCopy()
	s.ObservedGeneration = p.api.Generation
	if s.StartTime == nil {
		t := metav1.NewTime(p.start).Rfc3339Copy()
		s.StartTime = &t
	}
	p.setAddresses(&s)
	s.InitContainerStatuses = p.containerStatuses(p.init, old.InitContainerStatuses)
	s.ContainerStatuses = p.containerStatuses(p.main, old.ContainerStatuses)
	if p.rejected != nil {
		s.Phase, s.Reason, s.Message = corev1.PodFailed, p.rejected.reason, p.rejected.err.Error()
		s.ContainerStatuses, s.InitContainerStatuses = nil, nil
	} else {
		s.Phase = p.phase()
	}
	p.conditions(&s)
	return s
}

func (p *pod) setAddresses(s *corev1.PodStatus) {
	s.HostIP = p.node.cfg.Addr.String()
	s.HostIPs = []corev1.HostIP{{IP: s.HostIP}}
	if len(p.ips) == 0 {
		return
	}
	s.PodIP = p.ips[0].String()
	s.PodIPs = nil
	for _, ip := range p.ips {
		s.PodIPs = append(s.PodIPs, corev1.PodIP{IP: ip.String()})
	}
}

func (p *pod) containerStatuses(containers []*container, old []corev1.ContainerStatus) []corev1.ContainerStatus {
	var out []corev1.ContainerStatus
	for _, c := range containers {
		cs := corev1.ContainerStatus{
			Name: c.spec.Name, Image: c.spec.Image, ContainerID: c.id,
			State: c.state, LastTerminationState: c.last, RestartCount: c.restarts, Ready: c.ready,
		}
		if c.id != "" { // otherwise nobody has looked for the image
			cs.ImageID = c.spec.Image
		}
		started := c.started
		cs.Started = &started
		if c.init && !c.sidecar() {
			cs.Ready = c.finished && c.state.Terminated != nil && c.state.Terminated.ExitCode == 0
		}
		if cs.State == (corev1.ContainerState{}) {
			reason := "ContainerCreating"
			if len(p.init) > 0 {
				reason = "PodInitializing"
			}
			cs.State.Waiting = &corev1.ContainerStateWaiting{Reason: reason}
		}
		// Times are stored in seconds; keep equal what is equal.
		for _, st := range []*corev1.ContainerState{&cs.State, &cs.LastTerminationState} {
			roundTimes(st)
		}
		if i := slices.IndexFunc(old, func(o corev1.ContainerStatus) bool { return o.Name == c.spec.Name }); i >= 0 {
			// Filled in by the API server or others.
			cs.AllocatedResources, cs.Resources, cs.VolumeMounts, cs.User = old[i].AllocatedResources, old[i].Resources, old[i].VolumeMounts, old[i].User
		}
		out = append(out, cs)
	}
	return out
}

func roundTimes(s *corev1.ContainerState) {
	if s.Running != nil {
		r := *s.Running
		r.StartedAt = r.StartedAt.Rfc3339Copy()
		s.Running = &r
	}
	if s.Terminated != nil {
		t := *s.Terminated
		t.StartedAt, t.FinishedAt = t.StartedAt.Rfc3339Copy(), t.FinishedAt.Rfc3339Copy()
		s.Terminated = &t
	}
}

// phase follows the real kubelet's rules.
func (p *pod) phase() corev1.PodPhase {
	policy := p.api.Spec.RestartPolicy
	if !p.initDone {
		for _, c := range p.init {
			if c.finished && c.state.Terminated != nil && c.state.Terminated.ExitCode != 0 {
				return corev1.PodFailed
			}
		}
		if p.life.Err() != nil && p.ended() {
			return corev1.PodFailed
		}
		return corev1.PodPending
	}
	var running, waiting, succeeded, failed int
	for _, c := range p.main {
		switch {
		case c.state.Running != nil:
			running++
		case c.state.Terminated != nil:
			if c.state.Terminated.ExitCode == 0 {
				succeeded++
			} else {
				failed++
			}
		case c.last.Terminated != nil:
			running++ // between two runs
		default:
			waiting++
		}
	}
	switch {
	case running > 0:
		return corev1.PodRunning
	case waiting > 0:
		return corev1.PodPending
	case p.life.Err() != nil, policy == corev1.RestartPolicyNever:
		if failed > 0 {
			return corev1.PodFailed
		}
		return corev1.PodSucceeded
	case policy == corev1.RestartPolicyOnFailure && failed == 0:
		return corev1.PodSucceeded
	}
	return corev1.PodRunning
}

// ended tells whether no container runs any more.
func (p *pod) ended() bool {
	return !slices.ContainsFunc(slices.Concat(p.init, p.main), func(c *container) bool { return c.proc != nil })
}

func (p *pod) conditions(s *corev1.PodStatus) {
	phase := s.Phase
	allReady := phase == corev1.PodRunning
	for _, c := range p.main {
		allReady = allReady && c.ready
	}
	for _, c := range p.init {
		allReady = allReady && (!c.sidecar() || c.ready)
	}
	gates := true
	for _, g := range p.api.Spec.ReadinessGates {
		gates = gates && slices.ContainsFunc(s.Conditions, func(c corev1.PodCondition) bool {
			return c.Type == g.ConditionType && c.Status == corev1.ConditionTrue
		})
	}
	reason := func(ok bool, why string) string {
		switch {
		case ok:
			return ""
		case phase == corev1.PodSucceeded:
			return "PodCompleted"
		case phase == corev1.PodFailed:
			return "PodFailed"
		}
		return why
	}
	for _, c := range []struct {
		kind corev1.PodConditionType
		ok   bool
		why  string
	}{
		{corev1.PodReadyToStartContainers, p.ns != nil, ""},
		{corev1.PodInitialized, p.initDone, "ContainersNotInitialized"},
		{corev1.ContainersReady, allReady, "ContainersNotReady"},
		{corev1.PodReady, allReady && gates, "ContainersNotReady"},
		{corev1.PodScheduled, true, ""},
	} {
		setCondition(s, c.kind, c.ok, reason(c.ok, c.why), p.api.Generation)
	}
}

func setCondition(s *corev1.PodStatus, kind corev1.PodConditionType, ok bool, reason string, generation int64) {
	status := corev1.ConditionFalse
	if ok {
		status = corev1.ConditionTrue
	}
	i := slices.IndexFunc(s.Conditions, func(c corev1.PodCondition) bool { return c.Type == kind })
	if i < 0 {
		s.Conditions = append(s.Conditions, corev1.PodCondition{Type: kind})
		i = len(s.Conditions) - 1
	}
	c := &s.Conditions[i]
	if c.Status != status {
		c.LastTransitionTime = metav1.Now().Rfc3339Copy()
	}
	c.Status, c.Reason, c.ObservedGeneration = status, reason, generation
}
