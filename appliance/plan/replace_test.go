package plan_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/internal/kube"
	"github.com/isthmus-net/isthmus/appliance/plan"
)

// connected returns a cluster with three clients that are Connected: to oslo and
// paris on node-1, to rome on node-2.
func connected(t testing.TB) *world {
	w := twoNodes(t, "milan", "10.10.0.0/16")
	for i, remote := range []string{"oslo", "paris", "rome"} {
		w.namespace(remote)
		w.configure(remote, fmt.Sprintf("10.%d.0.0/16", 20+i), fmt.Sprintf("10.%d.0.0/16", 90+i))
		w.client(remote).Spec.Endpoint.Addresses = []string{fmt.Sprintf("203.0.113.%d", 21+i)}
	}
	w.settle()
	for _, remote := range []string{"oslo", "paris", "rome"} {
		node := "node-1"
		if remote == "rome" {
			node = "node-2"
		}
		w.replacePod(remote, node)
		w.tunnel(remote, v1beta1.Connected)
	}
	w.settle()
	return w
}

func clientDeployment(w *world, remote string) *appsv1.Deployment {
	w.t.Helper()
	return get[*appsv1.Deployment](w, "liqo-tenant-"+remote, "gw-"+remote)
}

// replacePod does what Kubernetes does with a Deployment that has changed.
func (w *world) replacePod(remote, node string) {
	w.t.Helper()
	d := clientDeployment(w, remote)
	pod := &corev1.Pod{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"}}
	pod.Namespace, pod.Name, pod.Labels = d.Namespace, d.Name+"-0", d.Spec.Template.Labels
	if w.objects[keyOf(pod)] != nil {
		w.remove("Pod", pod.Namespace, pod.Name)
	}
	pod.Spec.NodeName = node
	ip := address(get[*corev1.Node](w, "", node).Spec.PodCIDR, 10+len(remote)+int(remote[0]))
	pod.Status = corev1.PodStatus{Phase: corev1.PodRunning, PodIP: ip, PodIPs: []corev1.PodIP{{IP: ip}}}
	w.create(pod)
	d.Status = appsv1.DeploymentStatus{ObservedGeneration: d.Generation, Replicas: 1, UpdatedReplicas: 1, ReadyReplicas: 1}
}

// tunnel does what a gateway does: it says how its tunnel is.
func (w *world) tunnel(remote string, value v1beta1.ConnectionStatusValue) {
	w.t.Helper()
	w.clock = w.clock.Add(time.Second)
	c := get[*v1beta1.Connection](w, "liqo-tenant-"+remote, "gw-"+remote)
	c.Status.Value, c.Status.Latency.Timestamp = value, metav1.NewTime(w.clock)
}

// change replaces text in the template of clients, as an upgrade does.
func (w *world) change(from, to string) {
	w.t.Helper()
	o := get[*v1beta1.WgGatewayClientTemplate](w, "liqo", "wireguard-client")
	text := strings.ReplaceAll(string(o.Spec.Template.Raw), from, to)
	assert.Assert(w.t, text != string(o.Spec.Template.Raw), "%s is not in the template", from)
	o.Spec.Template.Raw = []byte(text)
	o.Generation++
}

// rollouts says what has become of the clients: the reason of each condition.
func (w *world) rollouts() string {
	w.t.Helper()
	var out []string
	for _, remote := range []string{"oslo", "paris", "rome"} {
		o := get[*v1beta1.GatewayClient](w, "liqo-tenant-"+remote, remote)
		out = append(out, condition(w.t, o.Status.Conditions, plan.ConditionRolledOut).Reason)
	}
	return strings.Join(out, " ")
}

func (w *world) pulls() []*corev1.Pod {
	var out []*corev1.Pod
	for _, k := range slices.Sorted(maps.Keys(w.objects)) {
		if o, is := w.objects[k].(*corev1.Pod); is && kube.IsPull(o) {
			out = append(out, o)
		}
	}
	return out
}

// images are those that the Deployments of the clients have.
func (w *world) images() string {
	var out []string
	for _, remote := range []string{"oslo", "paris", "rome"} {
		out = append(out, clientDeployment(w, remote).Spec.Template.Spec.Containers[0].Image)
	}
	return strings.Join(out, " ")
}

// preferred is the node that the pods of a Deployment are pinned to.
func preferred(d *appsv1.Deployment) string {
	a := d.Spec.Template.Spec.Affinity
	if a == nil || a.NodeAffinity == nil {
		return ""
	}
	return a.NodeAffinity.PreferredDuringSchedulingIgnoredDuringExecution[0].Preference.MatchFields[0].Values[0]
}

// An upgrade replaces one gateway after the other, each when its image is there and
// the one before is Connected again.
func TestUpgradeIsStaged(t *testing.T) {
	w := connected(t)
	assert.Equal(t, w.rollouts(), "RolledOut RolledOut RolledOut")
	w.change("isthmus:dev", "isthmus:next")
	r := w.settle()
	assert.Equal(t, w.images(), "isthmus:dev isthmus:dev isthmus:dev")
	assert.Equal(t, w.rollouts(), "PullingImage WaitingForTurn WaitingForTurn")
	assert.Assert(t, r.Due.After(w.clock), "nobody looks whether the image comes")
	for _, remote := range []string{"oslo", "paris", "rome"} {
		w.pullEnds(remote, map[string]string{"oslo": "node-1", "paris": "node-1", "rome": "node-2"}[remote])
		w.settle()
		d := clientDeployment(w, remote)
		assert.Equal(t, d.Spec.Template.Spec.Containers[0].Image, "isthmus:next")
		assert.Equal(t, len(w.pulls()), 0, "the pod that pulled is still there")
		assert.Equal(t, preferred(d), map[string]string{"oslo": "node-1", "paris": "node-1", "rome": "node-2"}[remote])
		template := d.Spec.Template.DeepCopy()

		// The old pod reports once more, then the new one is there and has not yet.
		w.tunnel(remote, v1beta1.Connected)
		w.settle()
		assert.Assert(t, is.Contains(w.rollouts(), "WaitingForConnection"))
		w.replacePod(remote, "node-1")
		r := w.settle()
		assert.Assert(t, is.Contains(w.rollouts(), "WaitingForConnection"), "what the old pod has said counts for the new one")
		assert.Assert(t, r.Due.After(w.clock) && r.Due.Sub(w.clock) <= 2*time.Second, "a report that says the same is not noticed")
		w.tunnel(remote, v1beta1.Connected)
		w.settle()
		assert.DeepEqual(t, clientDeployment(w, remote).Spec.Template, *template) // or it would cost another pod
	}
	assert.Equal(t, w.images(), "isthmus:next isthmus:next isthmus:next")
	assert.Equal(t, w.rollouts(), "RolledOut RolledOut RolledOut")
	assert.Assert(t, plan.Cluster(w.snapshot()).Due.IsZero())
}

// pullEnds checks the pod that pulls the image of a gateway, and lets it end.
func (w *world) pullEnds(remote, node string) {
	w.t.Helper()
	assert.Equal(w.t, len(w.pulls()), 1)
	p := w.pulls()[0]
	assert.Equal(w.t, p.Namespace, "liqo-tenant-"+remote)
	assert.Equal(w.t, p.Spec.NodeName, node)
	assert.Equal(w.t, p.Spec.Containers[0].Image, "isthmus:next")
	assert.Equal(w.t, p.OwnerReferences[0].UID, clientDeployment(w, remote).UID)
	p.Status.Phase = corev1.PodSucceeded
	p.Status.ContainerStatuses = []corev1.ContainerStatus{{Image: "isthmus:next", ImageID: "x", State: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 1}}}}
}

// An image that can't be pulled costs no pod, and is said by name.
func TestImageThatCannotBePulled(t *testing.T) {
	w := connected(t)
	w.change("isthmus:dev", "isthmus:nxet")
	w.settle()
	fails := func(reason, message string) {
		w.pulls()[0].Status.ContainerStatuses = []corev1.ContainerStatus{{Image: "isthmus:nxet", State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: reason, Message: message}}}}
	}
	fails("ErrImagePull", "failed to pull and unpack image: not found")
	r := w.settle()
	assert.Equal(t, w.images(), "isthmus:dev isthmus:dev isthmus:dev")
	assert.Equal(t, w.rollouts(), "ImagePullFailed RolloutStopped RolloutStopped")
	said := warnings(r, "GatewayClient", "liqo-tenant-oslo", "oslo")
	assert.Equal(t, len(said), 1)
	for _, want := range []string{"ImagePullFailed: image isthmus:nxet can't be pulled on node node-1", "failed to pull and unpack image: not found", "image.version"} {
		assert.Check(t, is.Contains(said[0], want))
	}
	assert.Equal(t, len(warnings(r, "GatewayClient", "liqo-tenant-rome", "rome")), 0) // one who stops it is enough
	held := get[*v1beta1.GatewayClient](w, "liqo-tenant-rome", "rome").Status.Conditions
	assert.Check(t, is.Contains(condition(t, held, plan.ConditionRolledOut).Message, "stopped at GatewayClient liqo-tenant-oslo/oslo: image isthmus:nxet"))
	fails("ImagePullBackOff", `Back-off pulling image "isthmus:nxet": ErrImagePull: failed to pull and unpack image: not found`)
	assert.DeepEqual(t, warnings(w.settle(), "GatewayClient", "liqo-tenant-oslo", "oslo"), said) // or it would be told with every try

	// Another pod tries it after a while, and as long as that has not failed, all wait.
	first := w.pulls()[0].UID
	w.clock = w.clock.Add(6*time.Minute + time.Second)
	w.apply(plan.Cluster(w.snapshot()))
	w.settle()
	assert.Assert(t, w.pulls()[0].UID != first)

	// The template is corrected.
	w.change("isthmus:nxet", "isthmus:dev")
	w.settle()
	assert.Equal(t, w.rollouts(), "RolledOut RolledOut RolledOut")
	assert.Equal(t, len(w.pulls()), 0)
}

// A peering that does not come back stops the rollout, until it does.
func TestPeeringThatDoesNotComeBack(t *testing.T) {
	w := connected(t)
	w.change("--mode=client", "--mode=clinet")
	w.settle() // the same image: nothing to pull
	assert.Equal(t, len(w.pulls()), 0)
	assert.Equal(t, w.rollouts(), "WaitingForConnection WaitingForTurn WaitingForTurn")
	w.replacePod("oslo", "node-1")
	w.tunnel("oslo", v1beta1.Connecting)
	w.clock = w.clock.Add(50 * time.Second)
	w.settle()
	assert.Equal(t, w.rollouts(), "WaitingForConnection WaitingForTurn WaitingForTurn")
	w.clock = w.clock.Add(10 * time.Second)
	r := w.settle()
	assert.Equal(t, w.rollouts(), "RolloutStopped RolloutStopped RolloutStopped")
	said := warnings(r, "GatewayClient", "liqo-tenant-oslo", "oslo")
	assert.Equal(t, len(said), 1)
	assert.Check(t, is.Contains(said[0], "kubectl annotate deployment -n liqo-tenant-oslo gw-oslo networking.liqo.io/rolled-while-connected-"))
	w.clock = w.clock.Add(10 * time.Second)
	assert.DeepEqual(t, warnings(w.settle(), "GatewayClient", "liqo-tenant-oslo", "oslo"), said)

	// Its user changes where another one dials: that is done at once, if that is all.
	// With the template of before that could not be, so it waits, since it works.
	rome := get[*v1beta1.GatewayClient](w, "liqo-tenant-rome", "rome")
	rome.Spec.Endpoint.Addresses, rome.Generation = []string{"203.0.113.9"}, rome.Generation+1
	w.settle()
	assert.Check(t, !strings.Contains(fmt.Sprint(clientDeployment(w, "rome").Spec.Template.Spec.Containers[0].Args), "203.0.113.9"))
	w.tunnel("rome", v1beta1.ConnectionError)
	w.settle()
	assert.Check(t, is.Contains(fmt.Sprint(clientDeployment(w, "rome").Spec.Template.Spec.Containers[0].Args), "203.0.113.9"))

	// The user says that it is to go on without oslo, or oslo comes back.
	for _, goOn := range []func(){
		func() { delete(clientDeployment(w, "oslo").Annotations, v1beta1.AnnotationRolled) },
		func() { w.tunnel("oslo", v1beta1.Connected) },
	} {
		before := maps.Clone(w.objects)
		for k, o := range before {
			before[k] = o.DeepCopyObject().(plan.Object)
		}
		goOn()
		w.settle()
		assert.Equal(t, w.rollouts(), "RolledOut WaitingForConnection RolledOut")
		w.objects = before
	}

	// The template is corrected: first goes who was made worse.
	w.change("--mode=clinet", "--mode=client")
	w.settle()
	assert.Assert(t, is.Contains(clientDeployment(w, "oslo").Spec.Template.Spec.Containers[0].Args, "--mode=client"))
	assert.Assert(t, strings.HasPrefix(w.rollouts(), "WaitingForConnection "), w.rollouts())
}

// What a user changes in a gateway's own object is done at once, and costs nobody
// else a pod.
func TestUsersChangesAreNotStaged(t *testing.T) {
	w := connected(t)
	for _, remote := range []string{"oslo", "rome"} {
		o := get[*v1beta1.GatewayClient](w, "liqo-tenant-"+remote, remote)
		o.Spec.Endpoint.Addresses, o.Generation = []string{"203.0.113.9"}, o.Generation+1
	}
	w.settle()
	for _, remote := range []string{"oslo", "rome"} {
		assert.Check(t, is.Contains(fmt.Sprint(clientDeployment(w, remote).Spec.Template.Spec.Containers[0].Args), "203.0.113.9"))
	}
	assert.Equal(t, w.rollouts(), "RolledOut RolledOut RolledOut")
}

// So is another template that the user names, whatever becomes of the chart's.
func TestAnotherTemplateIsTheUsersChange(t *testing.T) {
	w := connected(t)
	other := get[*v1beta1.WgGatewayClientTemplate](w, "liqo", "wireguard-client").DeepCopy()
	other.Name = "special"
	other.Spec.Template.Raw = []byte(strings.ReplaceAll(string(other.Spec.Template.Raw), "isthmus:dev", "isthmus:special"))
	w.create(other)
	for _, remote := range []string{"oslo", "rome"} {
		o := get[*v1beta1.GatewayClient](w, "liqo-tenant-"+remote, remote)
		o.Spec.ClientTemplateRef.Name, o.Generation = "special", o.Generation+1
	}
	w.settle()
	assert.Equal(t, w.images(), "isthmus:special isthmus:dev isthmus:special")
	w.change("isthmus:dev", "isthmus:next")
	w.settle()
	assert.Equal(t, w.rollouts(), "RolledOut PullingImage RolledOut")
}

// Another controller and another version of the template that make the same of it
// cost no pod, and wait for nobody.
func TestSamePodsAreNotStaged(t *testing.T) {
	w := connected(t)
	was := clientDeployment(w, "rome").Spec.DeepCopy()
	w.options.Revision = "next"
	get[*v1beta1.WgGatewayClientTemplate](w, "liqo", "wireguard-client").Generation++
	w.settle()
	for _, remote := range []string{"oslo", "paris", "rome"} {
		d := clientDeployment(w, remote)
		assert.Equal(t, d.Annotations[v1beta1.AnnotationController], "next")
		assert.Check(t, strings.HasSuffix(d.Annotations[v1beta1.AnnotationTemplate], ".2"))
	}
	assert.DeepEqual(t, clientDeployment(w, "rome").Spec, *was)
}

// Deployments of a controller that did not say what it made them from are taken over
// as they are.
func TestDeploymentsOfTheVersionBefore(t *testing.T) {
	w := connected(t)
	was := clientDeployment(w, "rome").Spec.DeepCopy()
	for _, remote := range []string{"oslo", "paris", "rome"} {
		for _, a := range []string{v1beta1.AnnotationPodTemplate, v1beta1.AnnotationGeneration} {
			delete(clientDeployment(w, remote).Annotations, a)
		}
	}
	w.options.Revision = "next"
	w.settle()
	assert.Equal(t, w.rollouts(), "RolledOut RolledOut RolledOut")
	assert.DeepEqual(t, clientDeployment(w, "rome").Spec, *was)
}

// Where a pod is replaced that runs on a node which takes no pods, or is lost: it is
// pinned to none, and one of a lost node is not waited for.
func TestNodeThatTakesNoPods(t *testing.T) {
	for _, tc := range []struct {
		name     string
		spoil    func(*corev1.Node)
		pinned   string
		strategy appsv1.DeploymentStrategyType
		reason   string
	}{
		{"ready", func(n *corev1.Node) {
			n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
		}, "node-1", appsv1.RecreateDeploymentStrategyType, "WaitingForConnection"},
		{"cordoned", func(n *corev1.Node) { n.Spec.Unschedulable = true }, "", appsv1.RecreateDeploymentStrategyType, "WaitingForConnection"},
		// What its gateway has said last may be long ago.
		{"lost", func(n *corev1.Node) {
			n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionUnknown}}
		}, "", appsv1.RollingUpdateDeploymentStrategyType, "RolledOut"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := connected(t)
			w.change(`"replicas":1`, `"replicas":1,"strategy":{"type":"Recreate"}`)
			w.settle()
			assert.Equal(t, clientDeployment(w, "oslo").Spec.Strategy.Type, appsv1.RecreateDeploymentStrategyType)
			tc.spoil(get[*corev1.Node](w, "", "node-1"))
			w.change("isthmus:dev", "isthmus:next")
			w.settle()
			assert.Equal(t, w.pulls()[0].Spec.NodeName, tc.pinned)
			w.pulls()[0].Status.Phase = corev1.PodFailed // the kubelet wants no more pods
			w.apply(plan.Cluster(w.snapshot()))
			d := clientDeployment(w, "oslo")
			assert.Equal(t, d.Spec.Template.Spec.Containers[0].Image, "isthmus:next")
			assert.Equal(t, preferred(d), tc.pinned)
			assert.Equal(t, d.Spec.Strategy.Type, tc.strategy)
			w.apply(plan.Cluster(w.snapshot()))
			assert.Equal(t, strings.Fields(w.rollouts())[0], tc.reason)
			assert.Equal(t, clientDeployment(w, "oslo").Spec.Strategy.Type, tc.strategy, "the Deployment controller has not seen it yet")

			w.replacePod("oslo", "node-2")
			old := clientDeployment(w, "oslo").Spec.Template.DeepCopy()
			for range 4 { // the pod of before is still there, as far as anybody knows
				w.apply(plan.Cluster(w.snapshot()))
				assert.Equal(t, clientDeployment(w, "oslo").Spec.Strategy.Type, appsv1.RecreateDeploymentStrategyType)
				clientDeployment(w, "oslo").Status.ObservedGeneration = clientDeployment(w, "oslo").Generation
			}
			assert.DeepEqual(t, clientDeployment(w, "oslo").Spec.Template, *old)
		})
	}
}
