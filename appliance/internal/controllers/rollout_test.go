package controllers

import (
	"slices"
	"strings"
	"time"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
	"gotest.tools/v3/poll"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/plan"
)

// testRollout changes the image in a template, and does what a kubelet does with the
// pod that pulls it.
func (w *world) testRollout() {
	gateway, deployment := &v1beta1.GatewayServer{ObjectMeta: peerMeta("rome")}, &appsv1.Deployment{ObjectMeta: peerMeta("gw-rome")}
	connection := &v1beta1.Connection{ObjectMeta: peerMeta("gw-rome")}
	template := &v1beta1.WgGatewayServerTemplate{ObjectMeta: metav1.ObjectMeta{Namespace: "liqo", Name: "wireguard-server"}}
	report := func() {
		w.t.Helper()
		assert.Assert(w.t, w.get(connection))
		connection.Status.Value, connection.Status.Latency = v1beta1.Connected, v1beta1.ConnectionLatency{Value: "1ms", Timestamp: metav1.NewTime(time.Now().Add(2 * time.Second))}
		assert.NilError(w.t, w.c.Status().Update(w.t.Context(), connection))
	}
	rolled := func() string {
		if w.get(gateway) {
			if c := meta.FindStatusCondition(gateway.Status.Conditions, plan.ConditionRolledOut); c != nil {
				return c.Reason
			}
		}
		return ""
	}
	pulls := func() []corev1.Pod {
		var list corev1.PodList
		assert.NilError(w.t, w.c.List(w.t.Context(), &list, client.InNamespace(tenant), client.MatchingLabels{v1beta1.LabelComponent: v1beta1.ComponentGatewayPull}))
		return list.Items
	}
	image := func() string {
		assert.Assert(w.t, w.get(deployment))
		return deployment.Spec.Template.Spec.Containers[0].Image
	}
	report()
	w.until("the controller knows that it is Connected", func() bool {
		return w.plans.sees(func(s cluster.Snapshot) bool {
			return slices.ContainsFunc(s.Connections, func(c cluster.Connection) bool { return c.Name == "gw-rome" && c.Value == string(v1beta1.Connected) })
		})
	})
	w.settle()
	assert.Equal(w.t, rolled(), plan.ReasonRolledOut)

	w.patch(template, `{"spec":{"template":{"spec":{"deployment":{"spec":{"template":{"spec":{"containers":[{"name":"gateway","image":"isthmus:next","args":["gateway","--mode=server"]}]}}}}}}}}`)
	w.until("a pod pulls the image", func() bool { return len(pulls()) == 1 && rolled() == plan.ReasonPullingImage })
	pod := pulls()[0]
	assert.Equal(w.t, pod.Spec.NodeName, "node-1")
	assert.Equal(w.t, pod.Spec.Containers[0].Image, "isthmus:next")
	w.kubeletSays(&pod, corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "ErrImagePull", Message: "not found"}})
	w.until("its condition says that it can't be pulled", func() bool { return rolled() == plan.ReasonImagePullFailed })
	w.until("an event says why", func() bool {
		var events eventsv1.EventList
		assert.NilError(w.t, w.c.List(w.t.Context(), &events, client.InNamespace(tenant)))
		return slices.ContainsFunc(events.Items, func(e eventsv1.Event) bool {
			return e.Regarding.UID == gateway.UID && e.Reason == plan.ReasonImagePullFailed && e.Type == "Warning" &&
				strings.Contains(e.Note, "image isthmus:next can't be pulled on node node-1 (pod "+pod.Name+"): not found")
		})
	})
	assert.Equal(w.t, image(), "isthmus:dev")

	w.kubeletSays(&pod, corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{Reason: "Completed"}})
	w.until("the gateway has the image", func() bool { return image() == "isthmus:next" })
	w.until("the pod that pulled is gone", func() bool { return len(pulls()) == 0 })
	assert.Check(w.t, deployment.Annotations[v1beta1.AnnotationRolled] != "")
	assert.Check(w.t, is.Equal(deployment.Annotations[v1beta1.AnnotationPinned], "node-1"))
	w.until("it waits for the gateway to be Connected", func() bool { return rolled() == plan.ReasonWaitingForConnect })

	// The Deployment controller is through, and the gateway reports once more.
	deployment.Status = appsv1.DeploymentStatus{ObservedGeneration: deployment.Generation, Replicas: 1, UpdatedReplicas: 1, ReadyReplicas: 1}
	assert.NilError(w.t, w.c.Status().Update(w.t.Context(), deployment))
	before := deployment.Spec.Template.DeepCopy()
	report()
	w.until("it is Connected again", func() bool { return rolled() == plan.ReasonRolledOut })
	assert.Assert(w.t, w.get(deployment))
	assert.Check(w.t, is.Equal(deployment.Annotations[v1beta1.AnnotationRolled], ""))
	assert.Check(w.t, is.DeepEqual(deployment.Spec.Template, *before)) // or the end of a rollout would cost another pod
}

// kubeletSays writes the state of a pod's only container, and that the pod is over
// if it has ended.
func (w *world) kubeletSays(pod *corev1.Pod, state corev1.ContainerState) {
	w.t.Helper()
	pod.Status.Phase = corev1.PodPending
	if state.Terminated != nil {
		pod.Status.Phase = corev1.PodSucceeded
	}
	c := pod.Spec.Containers[0]
	pod.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: c.Name, Image: c.Image, State: state}}
	assert.NilError(w.t, w.c.Status().Update(w.t.Context(), pod))
}

// testPullsOnly tries, as the controller, to make and delete pods that do something.
func (w *world) testPullsOnly(own client.Client) {
	pod := func(name string, change func(*corev1.Pod)) *corev1.Pod {
		o := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "liqo", Name: name, Labels: map[string]string{
			v1beta1.LabelManagedBy: v1beta1.ManagedBy, v1beta1.LabelComponent: v1beta1.ComponentGatewayPull,
		}}}
		yes, no := true, false
		o.Spec = corev1.PodSpec{AutomountServiceAccountToken: &no, Containers: []corev1.Container{{
			Name: "pull", Image: "isthmus:next", SecurityContext: &corev1.SecurityContext{RunAsNonRoot: &yes},
		}}}
		change(o)
		return o
	}
	refused := func(err error, what string) {
		w.t.Helper()
		assert.Check(w.t, apierrors.IsForbidden(err) && strings.Contains(err.Error(), "images of"), "%s: %v", what, err)
	}
	w.create(pod("others", func(o *corev1.Pod) { o.Labels = nil }))
	others := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "liqo", Name: "others"}}
	poll.WaitOn(w.t, func(poll.LogT) poll.Result { // a policy is in force a moment later
		if err := own.Delete(w.t.Context(), others, client.DryRunAll); err == nil {
			return poll.Continue("it may delete the pods of others")
		}
		return poll.Success()
	}, poll.WithTimeout(waitTime), poll.WithDelay(50*time.Millisecond))
	refused(own.Delete(w.t.Context(), others), "the pod of somebody else")
	for what, change := range map[string]func(*corev1.Pod){
		"no label":     func(o *corev1.Pod) { o.Labels = nil },
		"host network": func(o *corev1.Pod) { o.Spec.HostNetwork = true },
		"a token":      func(o *corev1.Pod) { o.Spec.AutomountServiceAccountToken = nil },
		"a directory of the host": func(o *corev1.Pod) {
			o.Spec.Volumes = []corev1.Volume{{Name: "root", VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/"}}}}
		},
		// This API server refuses privileged containers itself.
		"a capability": func(o *corev1.Pod) {
			o.Spec.Containers[0].SecurityContext.Capabilities = &corev1.Capabilities{Add: []corev1.Capability{"NET_ADMIN"}}
		},
		"maybe root": func(o *corev1.Pod) { o.Spec.Containers[0].SecurityContext.RunAsNonRoot = nil },
		"no context": func(o *corev1.Pod) { o.Spec.Containers[0].SecurityContext = nil },
	} {
		refused(own.Create(w.t.Context(), pod("bad", change)), what)
	}
	w.delete(others)
}
