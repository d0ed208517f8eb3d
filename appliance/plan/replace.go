package plan

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
)

// A rendered gateway is sound, and has what its template made of it.
type rendered struct {
	*cluster.Gateway
	workload
	labels map[string]string   // of its pods
	digest string              // of the template of its pods
	live   *cluster.Deployment // nil: the gateway has no Deployment yet
	node   string              // where its pod is and a new one may be; empty: nowhere
	pulls  *corev1.Pod         // the pod for its new images
}

// rollOut plans what the gateways of list need to run, as far as it is their turn.
func (p *planner) rollOut(list []rendered) {
	turns := make([]turn, len(list))
	for i := range list {
		turns[i] = p.turn(&list[i])
	}
	for i, s := range rollout(turns, p.s.Now) {
		r := &list[i]
		p.rolling[keyOf(r.Ref)] = s
		if s.failed {
			p.event(r.Ref, Warning, s.reason, s.message)
		}
		if !s.due.IsZero() && !p.s.Now.IsZero() {
			p.again(s.due)
		}
		switch s.action {
		case hold, pull:
			p.stays(r.Gateway)
			p.belongings(r.Gateway, r.ownKeys)
			if s.action == pull && r.pulls != nil {
				p.out.Pulls = append(p.out.Pulls, r.pulls)
			}
		default:
			p.workload(r, s)
		}
	}
}

// turn says what the rollout has to know about r.
func (p *planner) turn(r *rendered) turn {
	r.labels = completePod(&r.deployment.Spec, GatewayName(r.Name), podLabels(r.Gateway))
	r.node = p.nodeToStay(r.Gateway)
	t := turn{name: r.Ref.String()}
	i := slices.IndexFunc(p.s.Deployments, func(d cluster.Deployment) bool {
		return d.Namespace == r.Namespace && d.Name == GatewayName(r.Name)
	})
	if i < 0 {
		p.chooseTUN(r, nil)
		return t
	}
	d := &p.s.Deployments[i]
	r.live, t.exists = d, true
	t.back = p.chooseTUN(r, d)
	was, known := d.Annotations[v1beta1.AnnotationPodTemplate]
	sameTemplate := d.Annotations[v1beta1.AnnotationTemplate] == r.version
	sameController := d.Annotations[v1beta1.AnnotationController] == p.s.Options.Revision
	generation, counted := d.Annotations[v1beta1.AnnotationGeneration]
	t.changed = was != r.digest
	t.edited = counted && generation != strconv.FormatInt(r.Generation, 10)
	// A user who names another template means this gateway.
	uid, _, _ := strings.Cut(r.version, ".")
	named := t.edited && !strings.HasPrefix(d.Annotations[v1beta1.AnnotationTemplate], uid+".")
	t.own = sameController && (sameTemplate || named) && !t.back
	if !known && sameTemplate {
		// A controller that did not say made it from this very template, so that what
		// there was to replace it has replaced.
		t.own = true
	}
	// What can't be parsed is of nobody's rollout.
	t.rolled, _ = time.Parse(time.RFC3339, d.Annotations[v1beta1.AnnotationRolled])
	t.override = fmt.Sprintf("kubectl annotate deployment -n %s %s %s-", d.Namespace, d.Name, v1beta1.AnnotationRolled)
	var started time.Time
	if d.Observed && d.Updated {
		if pod := p.newestPod(r.Gateway); pod != nil {
			t.newPod, started = pod.Created, pod.Started
			if started.IsZero() {
				started = pod.Created
			}
		}
	}
	t.connected = p.worksNow(r.Gateway, t.rolled.IsZero(), started)
	if t.changed && !t.own {
		t.pull, t.pullWhat = p.pullState(r)
	}
	return t
}

// worksNow reports whether the peering of g is Connected, by a report of any pod or
// of one that started then. What the pod before the present one has reported last
// does not count once that one was replaced, and nobody knows what goes on at a
// node that is lost. A report has the time of the gateway's node, as a pod's start
// has: clocks that differ do no harm as long as the pod stays on its node.
func (p *planner) worksNow(g *cluster.Gateway, any bool, started time.Time) bool {
	i := slices.IndexFunc(p.s.Connections, func(c cluster.Connection) bool {
		return c.Namespace == g.Namespace && c.Name == GatewayName(g.Name)
	})
	if i < 0 || v1beta1.ConnectionStatusValue(p.s.Connections[i].Value) != v1beta1.Connected {
		return false
	}
	if peer := p.carries[keyOf(g.Ref)]; peer != nil && peer.pod != nil && p.lost(peer.pod.Node) {
		return false
	}
	reported := p.s.Connections[i].Reported
	return any || !started.IsZero() && (reported.IsZero() || reported.After(started))
}

// newestPod returns the newest pod of g; nil: it has none.
func (p *planner) newestPod(g *cluster.Gateway) (newest *cluster.Pod) {
	for i := range p.s.Pods {
		if x := &p.s.Pods[i]; isPodOf(x, g) && (newest == nil || x.Created.After(newest.Created)) {
			newest = x
		}
	}
	return newest
}

func isPodOf(x *cluster.Pod, g *cluster.Gateway) bool {
	return x.Namespace == g.Namespace && x.Labels[v1beta1.LabelAppName] == GatewayName(g.Name) && x.Labels[v1beta1.LabelComponent] == v1beta1.ComponentGateway
}

// lost reports whether a node has not been heard of, or is not ready.
func (p *planner) lost(node string) bool {
	return slices.ContainsFunc(p.s.Nodes, func(n cluster.Node) bool { return n.Name == node && n.Lost })
}

// nodeToStay returns the node of g's pod if a new pod can be there, too.
func (p *planner) nodeToStay(g *cluster.Gateway) string {
	peer := p.carries[keyOf(g.Ref)]
	if peer == nil || peer.pod == nil {
		return ""
	}
	i := slices.IndexFunc(p.s.Nodes, func(n cluster.Node) bool { return n.Name == peer.pod.Node })
	if i < 0 || p.s.Nodes[i].Lost || p.s.Nodes[i].Unschedulable {
		return ""
	}
	return peer.pod.Node
}

// podDigest stands for the template of a gateway's pods.
func podDigest(t corev1.PodTemplateSpec) string {
	text, err := json.Marshal(t)
	if err != nil {
		panic("plan: a template of pods has no JSON: " + err.Error()) // it came out of JSON
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:8])
}

// newDeployment returns the Deployment of r at its step.
func (p *planner) newDeployment(r *rendered, s step) *appsv1.Deployment {
	d := &appsv1.Deployment{TypeMeta: metav1.TypeMeta{APIVersion: "apps/v1", Kind: "Deployment"}, ObjectMeta: owned(GatewayName(r.Name), r.RemoteID, r.Meta)}
	r.deployment.Spec.DeepCopyInto(&d.Spec)
	decorate(&d.ObjectMeta, r.deployment.Metadata, r.labels, v1beta1.LabelGatewayName, v1beta1.LabelGatewayNamespace)
	// Of the Deployment only: its pods stay as they are when the same comes of
	// another version.
	mergeInto(&d.Annotations, map[string]string{
		v1beta1.AnnotationTemplate: r.version, v1beta1.AnnotationPodTemplate: r.digest, v1beta1.AnnotationGeneration: strconv.FormatInt(r.Generation, 10),
	})
	if p.s.Options.Revision != "" {
		mergeInto(&d.Annotations, map[string]string{v1beta1.AnnotationController: p.s.Options.Revision})
	}
	var had map[string]string
	if r.live != nil {
		had = r.live.Annotations
	}
	// What a Deployment has once is written as empty rather than left out: annotations
	// that are not planned stay.
	remember := func(key, value string) {
		if _, has := had[key]; has || value != "" {
			mergeInto(&d.Annotations, map[string]string{key: value})
		}
	}
	pinned := had[v1beta1.AnnotationPinned]
	if s.action == roll {
		pinned = r.node
	}
	remember(v1beta1.AnnotationPinned, pinned)
	preferNode(&d.Spec.Template.Spec, pinned)
	rolled := ""
	if !s.rolled.IsZero() {
		rolled = s.rolled.UTC().Format(time.RFC3339)
	}
	remember(v1beta1.AnnotationRolled, rolled)
	if p.doesNotWait(r, s) {
		one, none := intstr.FromInt32(1), intstr.FromInt32(0)
		d.Spec.Strategy = appsv1.DeploymentStrategy{Type: appsv1.RollingUpdateDeploymentStrategyType, RollingUpdate: &appsv1.RollingUpdateDeployment{MaxUnavailable: &one, MaxSurge: &none}}
	}
	return d
}

// preferNode has a pod go to a node, if there is place. Every change of a
// Deployment's template costs the pod, so what pins it for the rollout is still
// there after it: it must not be in the way then, when that node is drained or
// lost, so it is no more than a preference. The next rollout says anew where.
func preferNode(spec *corev1.PodSpec, node string) {
	if node == "" {
		return
	}
	if spec.Affinity == nil {
		spec.Affinity = &corev1.Affinity{}
	}
	if spec.Affinity.NodeAffinity == nil {
		spec.Affinity.NodeAffinity = &corev1.NodeAffinity{}
	}
	a := spec.Affinity.NodeAffinity
	a.PreferredDuringSchedulingIgnoredDuringExecution = append(a.PreferredDuringSchedulingIgnoredDuringExecution, corev1.PreferredSchedulingTerm{
		Weight: 100, Preference: onNode(node),
	})
}

func onNode(node string) corev1.NodeSelectorTerm {
	return corev1.NodeSelectorTerm{MatchFields: []corev1.NodeSelectorRequirement{{
		Key: metav1.ObjectNameField, Operator: corev1.NodeSelectorOpIn, Values: []string{node},
	}}}
}

// doesNotWait reports whether the new pod of r must not wait for the end of one on
// a node that is lost. Recreate, which gateways have since two pods would have one
// key, waits for all pods to have ended, which nobody can tell of those;
// RollingUpdate does not. It is for as long as the new pod is not there.
func (p *planner) doesNotWait(r *rendered, s step) bool {
	if r.live == nil || r.deployment.Spec.Strategy.Type != appsv1.RecreateDeploymentStrategyType {
		return false
	}
	onLost := slices.ContainsFunc(slices.Concat(p.s.Pods, p.leaving), func(x cluster.Pod) bool { return isPodOf(&x, r.Gateway) && p.lost(x.Node) })
	there := r.live.Observed && r.live.Updated
	switch {
	case s.action == roll || r.live.Annotations[v1beta1.AnnotationPodTemplate] != r.digest:
		return onLost
	case r.live.Strategy == string(appsv1.RollingUpdateDeploymentStrategyType): // by us
		return !there
	}
	return onLost && r.live.Observed && !r.live.Updated
}

// pullState says how far the images of r's new template are, and makes the pod
// that pulls them, unless the pod that runs has them.
func (p *planner) pullState(r *rendered) (pullState, string) {
	images := PodImages(&r.deployment.Spec.Template.Spec)
	if !slices.ContainsFunc(images, func(image string) bool { return !slices.Contains(r.live.Images, image) }) {
		return pulled, ""
	}
	r.pulls = p.pullPod(r, images)
	i := slices.IndexFunc(p.s.Pulls, func(x cluster.Pull) bool { return x.Namespace == r.pulls.Namespace && x.Name == r.pulls.Name })
	if i < 0 {
		return pulling, ""
	}
	x := p.s.Pulls[i]
	on := " (pod " + x.Name + ")"
	if node := cmp.Or(x.Node, r.node); node != "" {
		on = " on node " + node + on
	}
	late := !p.s.Now.IsZero() && p.s.Now.Sub(x.Created) > pullTime
	if !p.s.Now.IsZero() && p.s.Now.Sub(x.Created) > pullTime+pullRest && !x.Pulled {
		r.pulls = nil // it goes, and the next plan has another one
	}
	switch {
	case x.Pulled:
		return pulled, ""
	case x.Image != "":
		return pullFailed, fmt.Sprintf("image %s can't be pulled%s: %s", x.Image, on, x.Why)
	case late || x.Over:
		return pullFailed, fmt.Sprintf("image %s was not pulled within %v%s: %s", strings.Join(images, ", "), pullTime, on, cmp.Or(x.Why, "its node does not say why"))
	}
	return pulling, on
}

// pullPod returns the pod that has the images of r's new template pulled where its
// gateway runs, or where one like it may be. It may do nothing, and ends at once.
func (p *planner) pullPod(r *rendered, images []string) *corev1.Pod {
	from := r.deployment.Spec.Template.Spec
	o := &corev1.Pod{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"}}
	o.Namespace, o.Name = r.Namespace, Label(GatewayName(r.Name)+"-pull-"+hash(strings.Join(append(images, r.node), " ")))
	o.Labels = map[string]string{
		v1beta1.LabelManagedBy: v1beta1.ManagedBy, v1beta1.LabelComponent: v1beta1.ComponentGatewayPull, v1beta1.LabelRemoteClusterID: r.RemoteID,
	}
	// It goes with the Deployment, when all is uninstalled for one.
	o.OwnerReferences = []metav1.OwnerReference{ownerReference(r.live.Ref)}
	o.Spec = corev1.PodSpec{
		NodeName: r.node, // past the scheduler: that node has place for the gateway, and this needs none
		// By its account it gets the pull secrets that somebody gave to that.
		ServiceAccountName: GatewayName(r.Name), AutomountServiceAccountToken: ptr(false), EnableServiceLinks: ptr(false),
		ImagePullSecrets: from.ImagePullSecrets, Tolerations: from.Tolerations,
		RestartPolicy: corev1.RestartPolicyNever, ActiveDeadlineSeconds: ptr(int64(pullTime / time.Second)), TerminationGracePeriodSeconds: ptr(int64(0)),
	}
	if r.node == "" {
		o.Spec.NodeSelector, o.Spec.Affinity = from.NodeSelector, from.Affinity
	}
	for _, c := range slices.Concat(from.InitContainers, from.Containers) {
		if i := slices.Index(images, c.Image); i >= 0 && !slices.ContainsFunc(o.Spec.Containers, func(x corev1.Container) bool { return x.Image == c.Image }) {
			o.Spec.Containers = append(o.Spec.Containers, corev1.Container{
				Name: "pull-" + strconv.Itoa(i), Image: c.Image, ImagePullPolicy: c.ImagePullPolicy, Command: c.Command, Args: []string{"--version"},
				SecurityContext: &corev1.SecurityContext{
					RunAsNonRoot: ptr(true), RunAsUser: ptr(int64(65532)), Privileged: ptr(false), AllowPrivilegeEscalation: ptr(false), ReadOnlyRootFilesystem: ptr(true),
					Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}}, SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
				},
			})
		}
	}
	return o
}

// PodImages returns the images of a pod's containers, each once and sorted.
func PodImages(spec *corev1.PodSpec) []string {
	var out []string
	for _, c := range slices.Concat(spec.InitContainers, spec.Containers) {
		out = append(out, c.Image)
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// rolledOut returns the condition of g, none if nothing of it is planned.
func (p *planner) rolledOut(g *cluster.Gateway) []metav1.Condition {
	s, planned := p.rolling[keyOf(g.Ref)]
	if !planned {
		return nil
	}
	c := metav1.Condition{
		Type: ConditionRolledOut, Status: metav1.ConditionTrue, ObservedGeneration: g.Generation,
		Reason: s.reason, Message: clip(cmp.Or(s.message, "its Deployment is what its template makes of it")),
	}
	if s.reason != ReasonRolledOut {
		c.Status = metav1.ConditionFalse
	}
	return []metav1.Condition{c}
}
