package cli

import (
	"errors"
	"strings"
	"testing"
	"time"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	model "github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/plan"
)

// TestLag: a gateway is what its template makes of it when its Deployment says so
// of the template and of the controller that are there, and its pods are new and
// ready.
func TestLag(t *testing.T) {
	template := func(kind, name, uid string, generation int64) model.Template {
		return model.Template{Meta: model.Meta{Ref: model.Ref{Kind: kind, Namespace: "liqo", Name: name, UID: uid}, Generation: generation}}
	}
	templates := []model.Template{
		template("WgGatewayClientTemplate", "wireguard-client", "c", 1),
		template("WgGatewayServerTemplate", "wireguard-server", "a", 3),
	}
	condition := func(kind corev1.PodConditionType, status corev1.ConditionStatus, message string) corev1.PodCondition {
		return corev1.PodCondition{Type: kind, Status: status, Message: message}
	}
	waiting := func(reason, message string) []corev1.ContainerStatus {
		return []corev1.ContainerStatus{{State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: reason, Message: message}}}}
	}
	ptr := func(n int32) *int32 { return &n }
	for _, tc := range []struct {
		name   string
		change func(*gateway)
		want   string // begins so; empty: it is
	}{
		{"as it is to be", func(*gateway) {}, ""},
		{"an older template", func(g *gateway) { g.deployment.Annotations[v1beta1.AnnotationTemplate] = "a.2" }, "Deployment gw-rome is not that of WgGatewayServerTemplate liqo/wireguard-server as it is now"},
		{"a template that was made anew", func(g *gateway) { g.deployment.Annotations[v1beta1.AnnotationTemplate] = "z.3" }, "Deployment gw-rome is not that of WgGatewayServerTemplate liqo/wireguard-server as it is now"},
		{"by a controller that did not say", func(g *gateway) { g.deployment.Annotations = nil }, "Deployment gw-rome is not that of"},
		{"by another controller", func(g *gateway) { g.deployment.Annotations[v1beta1.AnnotationController] = "old" }, "Deployment gw-rome is that of the controller before"},
		{"nothing yet", func(g *gateway) { g.deployment = nil }, "the controller has not made Deployment gw-rome of it yet"},
		{"a template of the user's that is not there", func(g *gateway) {
			g.TemplateRef.Name = "special"
			g.refused = &metav1.Condition{Reason: plan.ReasonNoTemplate, Message: "create it"}
		}, "there is no WgGatewayServerTemplate liqo/special; the controller says: create it"},
		{"a template that can't be filled in", func(g *gateway) {
			g.deployment.Annotations[v1beta1.AnnotationTemplate] = "a.2"
			g.refused = &metav1.Condition{Reason: plan.ReasonBadTemplate, Message: "correct it"}
		}, "Deployment gw-rome is not that of WgGatewayServerTemplate liqo/wireguard-server as it is now; the controller says: correct it"},
		{"a rollout that has stopped", func(g *gateway) {
			g.deployment.Annotations[v1beta1.AnnotationTemplate] = "a.2"
			g.held = &metav1.Condition{Reason: plan.ReasonRolloutStopped, Message: "the rollout has stopped at another"}
		}, "Deployment gw-rome is not that of WgGatewayServerTemplate liqo/wireguard-server as it is now; the controller says: the rollout has stopped at another"},
		{"replaced, and not Connected again", func(g *gateway) { g.held = &metav1.Condition{Reason: plan.ReasonWaitingForConnect} }, ""},
		{"refused, but as the template says", func(g *gateway) { g.refused = &metav1.Condition{Reason: plan.ReasonNoEndpoint} }, ""},
		{"a Deployment that was not looked at", func(g *gateway) { g.deployment.Generation = 8 }, "Deployment gw-rome: 1 of 1 pods are new, 1 available"},
		{"an old pod is left", func(g *gateway) { g.deployment.Status.Replicas = 2 }, "Deployment gw-rome: 1 of 1 pods are new"},
		{"an old pod is ending", func(g *gateway) {
			g.deployment.Status.TerminatingReplicas = ptr(1)
			g.pods = []corev1.Pod{{ObjectMeta: metav1.ObjectMeta{Name: "a", DeletionTimestamp: &metav1.Time{}}}}
		}, "Deployment gw-rome: 1 of 1 pods are new, 1 available: pod a: it is ending"},
		{"several pods", func(g *gateway) { g.deployment.Spec.Replicas = ptr(2) }, "Deployment gw-rome: 1 of 2 pods are new"},
		{"none is wanted", func(g *gateway) {
			g.deployment.Spec.Replicas, g.deployment.Status = ptr(0), appsv1.DeploymentStatus{ObservedGeneration: 7}
		}, ""},
		{"no node for it", func(g *gateway) {
			g.deployment.Status.AvailableReplicas = 0
			g.pods = []corev1.Pod{{ObjectMeta: metav1.ObjectMeta{Name: "a"}, Status: corev1.PodStatus{Phase: corev1.PodPending, Conditions: []corev1.PodCondition{
				condition(corev1.PodScheduled, corev1.ConditionFalse, "0/3 nodes are available"),
			}}}}
		}, "Deployment gw-rome: 1 of 1 pods are new, 0 available: pod a: 0/3 nodes are available"},
		{"no image", func(g *gateway) {
			g.deployment.Status.AvailableReplicas = 0
			g.pods = []corev1.Pod{
				{ObjectMeta: metav1.ObjectMeta{Name: "a"}, Status: corev1.PodStatus{Conditions: []corev1.PodCondition{condition(corev1.PodReady, corev1.ConditionTrue, "")}}},
				{ObjectMeta: metav1.ObjectMeta{Name: "b"}, Status: corev1.PodStatus{
					InitContainerStatuses: waiting("PodInitializing", ""), ContainerStatuses: waiting("ErrImagePull", "not found"),
				}},
			}
		}, "Deployment gw-rome: 1 of 1 pods are new, 0 available: pod b: ErrImagePull not found"},
		{"not ready", func(g *gateway) {
			g.deployment.Status.AvailableReplicas = 0
			g.pods = []corev1.Pod{{ObjectMeta: metav1.ObjectMeta{Name: "a"}, Status: corev1.PodStatus{Phase: corev1.PodRunning}}}
		}, "Deployment gw-rome: 1 of 1 pods are new, 0 available: pod a: it is not ready (Running)"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			g := gateway{
				Gateway: model.Gateway{Meta: model.Meta{Ref: model.Ref{Kind: "GatewayServer", Namespace: "liqo-tenant-rome", Name: "rome"}}, Role: model.Server},
				deployment: &appsv1.Deployment{
					ObjectMeta: metav1.ObjectMeta{Name: "gw-rome", Generation: 7, Annotations: map[string]string{v1beta1.AnnotationTemplate: "a.3", v1beta1.AnnotationController: "new"}},
					Status:     appsv1.DeploymentStatus{ObservedGeneration: 7, Replicas: 1, UpdatedReplicas: 1, AvailableReplicas: 1},
				},
			}
			tc.change(&g)
			got := g.lag("liqo", templates, "new")
			assert.Equal(t, got == "", tc.want == "", got)
			assert.Check(t, strings.HasPrefix(got, tc.want), got)
		})
	}
}

// TestIdle: nobody waits for a gateway for which nothing runs, unless it is for
// want of a template.
func TestIdle(t *testing.T) {
	d := &appsv1.Deployment{}
	for _, tc := range []struct {
		deployment *appsv1.Deployment
		reason     string
		want       bool
	}{
		{nil, "", false}, {d, "", false}, {d, plan.ReasonDuplicate, false},
		{nil, plan.ReasonDuplicate, true}, {nil, plan.ReasonNoEndpoint, true},
		{nil, plan.ReasonNoTemplate, false}, {nil, plan.ReasonBadTemplate, false},
	} {
		g := gateway{deployment: tc.deployment}
		if tc.reason != "" {
			g.refused = &metav1.Condition{Reason: tc.reason}
		}
		assert.Equal(t, g.idle(), tc.want, "%+v", tc)
	}
}

// TestGatewayError: it is named for people and for programs.
func TestGatewayError(t *testing.T) {
	var out, errs strings.Builder
	p := &program{out: &out, err: &errs}
	err := error(&GatewayError{ref{"networking.liqo.io/v1beta1", "GatewayServer", "liqo-tenant-rome", "rome"}, 5 * time.Minute, "no node"})
	p.fail(err)
	for _, want := range []string{"GatewayServer liqo-tenant-rome/rome is not replaced after 5m0s: no node", "kubectl describe pods -n liqo-tenant-rome", "kubectl get gatewayserver rome -n liqo-tenant-rome", "--timeout"} {
		assert.Check(t, is.Contains(errs.String(), want))
	}
	p.json = true
	p.fail(errors.Join(err))
	assert.Check(t, is.Contains(out.String(), `"gateway": {`))
	assert.Check(t, is.Contains(out.String(), `"name": "rome"`))
}
