package kube_test

import (
	"testing"

	"gotest.tools/v3/assert"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v1beta1 "github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/internal/kube"
)

// TestPull: what a pod that pulls two images says of them.
func TestPull(t *testing.T) {
	waiting := func(reason, message string) corev1.ContainerStatus {
		return corev1.ContainerStatus{Image: "b:2", State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: reason, Message: message}}}
	}
	has := func(s corev1.ContainerStatus) corev1.ContainerStatus { s.ImageID = "sha256:1"; return s }
	ended := corev1.ContainerStatus{Image: "a:1", ImageID: "sha256:2", State: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 2, Reason: "Error"}}}
	running := corev1.ContainerStatus{Image: "a:1", State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}}
	for _, tc := range []struct {
		name       string
		phase      corev1.PodPhase
		reason     string
		statuses   []corev1.ContainerStatus
		pulled     bool
		image, why string
	}{
		{name: "nobody has looked at it", phase: corev1.PodPending},
		{name: "being made", phase: corev1.PodPending, statuses: []corev1.ContainerStatus{waiting("ContainerCreating", ""), waiting("ContainerCreating", "")}},
		{name: "one of two", phase: corev1.PodPending, statuses: []corev1.ContainerStatus{ended, waiting("ContainerCreating", "")}},
		{name: "both, however they end", phase: corev1.PodFailed, statuses: []corev1.ContainerStatus{ended, ended}, pulled: true},
		{name: "one goes on", phase: corev1.PodRunning, statuses: []corev1.ContainerStatus{ended, running}, pulled: true},
		{name: "one can't be started", phase: corev1.PodPending, statuses: []corev1.ContainerStatus{ended, has(waiting("CreateContainerError", "no command"))}, pulled: true},
		{name: "one can't be pulled", phase: corev1.PodPending, statuses: []corev1.ContainerStatus{ended, waiting("ErrImagePull", "rpc error: code = NotFound: not there")}, image: "b:2", why: "code = NotFound: not there"},
		{name: "the same later", phase: corev1.PodPending, statuses: []corev1.ContainerStatus{ended, waiting("ImagePullBackOff", `Back-off pulling image "b:2": ErrImagePull: rpc error: code = NotFound: not there`)}, image: "b:2", why: "code = NotFound: not there"},
		{name: "an older kubelet", phase: corev1.PodPending, statuses: []corev1.ContainerStatus{waiting("ImagePullBackOff", `Back-off pulling image "b:2"`)}, image: "b:2", why: `Back-off pulling image "b:2"`},
		{name: "no image", phase: corev1.PodPending, statuses: []corev1.ContainerStatus{waiting("InvalidImageName", "")}, image: "b:2", why: "InvalidImageName"},
		{name: "too late", phase: corev1.PodFailed, reason: "DeadlineExceeded", image: "a:1", why: "it was not there in time"},
		{name: "no more pods there", phase: corev1.PodFailed, reason: "OutOfpods", pulled: true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			o := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "t", Name: "p", Labels: map[string]string{
				v1beta1.LabelManagedBy: v1beta1.ManagedBy, v1beta1.LabelComponent: v1beta1.ComponentGatewayPull,
			}}}
			o.Spec = corev1.PodSpec{NodeName: "node-1", Containers: []corev1.Container{{Name: "pull-0", Image: "a:1"}, {Name: "pull-1", Image: "b:2"}}}
			o.Status = corev1.PodStatus{Phase: tc.phase, Reason: tc.reason, ContainerStatuses: tc.statuses, PodIP: "10.0.0.1"}
			// What informers keep says the same.
			for _, o := range []*corev1.Pod{o, kube.BarePod(o)} {
				s := kube.Snapshot(kube.Objects{Pods: []corev1.Pod{*o}, Nodes: []corev1.Node{{ObjectMeta: metav1.ObjectMeta{Name: "node-1"}}}})
				assert.Equal(t, len(s.Pods), 0, "it is no pod to route to")
				assert.Equal(t, len(s.Pulls), 1)
				p := s.Pulls[0]
				assert.Equal(t, p.Pulled, tc.pulled)
				assert.Equal(t, p.Image, tc.image)
				assert.Equal(t, p.Why, tc.why)
				assert.Equal(t, p.Over, tc.phase == corev1.PodFailed)
				assert.Equal(t, p.Node, "node-1")
			}
		})
	}
}
