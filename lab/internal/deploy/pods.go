package deploy

import (
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/lab/internal/topology"
)

// NodeName returns the name of the nth node (from 1) of a cluster.
func NodeName(n int) string { return fmt.Sprintf("node-%d", n) }

// createPods creates the topology's pods of one cluster, after what its CNI has
// in its API. They are not waited for here: they start while the appliance does.
func (in *installer) createPods(ctx context.Context, c topology.Cluster, cl client.Client) error {
	objects := flannelObjects(c)
	for _, p := range in.cfg.Topology.Pods {
		if p.Cluster == c.Name {
			objects = append(objects, ProbePod(p, Placement{Object: NodeName(p.Node), Image: ProbeImage, ImagePullPolicy: corev1.PullNever}))
		}
	}
	return apply(ctx, cl, objects)
}

// ProbeLabel is on the pods of the topology.
const ProbeLabel = "isthmus-lab/probe"

// A Placement says where a pod of the topology runs, and from which image.
type Placement struct {
	Object          string // name of the Node
	Node            string // that the pod says it is on; empty: the name of the Node
	Image           string
	ImagePullPolicy corev1.PullPolicy
	// Run is the value of ProbeLabel, "true" when empty. With it the pod has no other
	// label: in a cluster that others work with, "app: web" may be what a Service
	// selects.
	Run string
}

// ProbePod is a pod that answers on TCP and UDP port 8080 and from which
// probes are sent. NET_RAW is for ICMP, SYS_NICE for answers that do not wait
// for a processor.
func ProbePod(p topology.Pod, at Placement) *unstructured.Unstructured {
	node := ofThePod("NODE", "spec.nodeName")
	if at.Node != "" {
		node = map[string]any{"name": "NODE", "value": at.Node}
	}
	o := newUnstructured("v1", "Pod")
	o.SetName(p.Name)
	o.SetNamespace(PodNamespace)
	o.SetLabels(map[string]string{"app": p.Name, ProbeLabel: "true"})
	if at.Run != "" {
		o.SetLabels(map[string]string{ProbeLabel: at.Run, "sidecar.istio.io/inject": "false"})
	}
	o.SetAnnotations(map[string]string{"kubectl.kubernetes.io/default-container": "probe"})
	spec := map[string]any{
		"hostNetwork":                   p.HostNetwork,
		"automountServiceAccountToken":  false,
		"terminationGracePeriodSeconds": int64(1),
		"containers": []any{map[string]any{
			"name":            "probe",
			"image":           at.Image,
			"imagePullPolicy": string(at.ImagePullPolicy),
			"args":            serveArgs(p),
			"env": []any{
				ofThePod("POD", "metadata.name"),
				ofThePod("UID", "metadata.uid"),
				node,
			},
			"ports":          []any{map[string]any{"containerPort": int64(8080)}},
			"readinessProbe": map[string]any{"tcpSocket": map[string]any{"port": int64(8080)}, "periodSeconds": int64(5)},
			"securityContext": map[string]any{
				"allowPrivilegeEscalation": false,
				"capabilities":             map[string]any{"drop": []any{"ALL"}, "add": []any{"NET_RAW", "SYS_NICE"}},
			},
		}},
	}
	// The place is part of the topology; the scheduler is not asked, but the taints of a
	// node that is not ready still are.
	if at.Run == "" {
		spec["nodeSelector"] = map[string]any{corev1.LabelHostname: at.Object}
	} else { // nodes of others may have other labels
		spec["affinity"] = map[string]any{"nodeAffinity": map[string]any{"requiredDuringSchedulingIgnoredDuringExecution": map[string]any{
			"nodeSelectorTerms": []any{map[string]any{"matchFields": []any{map[string]any{"key": "metadata.name", "operator": "In", "values": []any{at.Object}}}}},
		}}}
	}
	o.Object["spec"] = spec
	return o
}

// serveArgs lets the server say who it is. What the pod itself knows better is
// left to it: a copy of the pod under another name, or on another node, must not
// say that it is the first one.
func serveArgs(p topology.Pod) []any {
	args := []any{"serve", "--cluster", p.Cluster, "--pod", "$(POD)", "--uid", "$(UID)", "--node", "$(NODE)"}
	if p.HostNetwork {
		args = append(args, "--host-network")
	}
	return args
}

// ofThePod is a variable of a container that has the value of a field of its pod.
func ofThePod(name, field string) map[string]any {
	return map[string]any{"name": name, "valueFrom": map[string]any{"fieldRef": map[string]any{"apiVersion": "v1", "fieldPath": field}}}
}

// PodReady returns why a pod is not ready; empty: it is.
func PodReady(p *corev1.Pod) string {
	if podReady(p) {
		return ""
	}
	return notReady(p)
}

func podReady(p *corev1.Pod) bool {
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}

// whyNotReady says it in the words of the pod's status.
func whyNotReady(p *corev1.Pod) string {
	why := []string{string(p.Status.Phase)}
	if p.Spec.NodeName == "" {
		why = append(why, "not scheduled")
	}
	for _, s := range p.Status.ContainerStatuses {
		switch {
		case s.State.Waiting != nil:
			why = append(why, s.Name+": "+s.State.Waiting.Reason+" "+s.State.Waiting.Message)
		case s.State.Terminated != nil:
			why = append(why, fmt.Sprintf("%s: exit code %d %s", s.Name, s.State.Terminated.ExitCode, s.State.Terminated.Message))
		case !s.Ready:
			why = append(why, s.Name+": running, its readiness probe fails")
		}
		if s.RestartCount > 0 {
			why = append(why, fmt.Sprintf("%d restarts", s.RestartCount))
		}
	}
	for _, c := range p.Status.Conditions {
		if c.Status != corev1.ConditionTrue && c.Message != "" {
			why = append(why, c.Message)
		}
	}
	return strings.Join(why, ", ")
}

// waitPods waits for the topology's pods of one cluster. Those of nodes that
// join later wait for their node.
func waitPods(ctx context.Context, t *topology.Topology, cluster string, cl client.Client) (string, error) {
	c, _ := t.Cluster(cluster)
	var pods corev1.PodList
	if err := cl.List(ctx, &pods, client.InNamespace(PodNamespace), client.MatchingLabels{ProbeLabel: "true"}); err != nil {
		return err.Error(), nil
	}
	for _, p := range t.Pods {
		if p.Cluster != cluster || !slices.Contains(c.Present(), p.Node) {
			continue
		}
		i := slices.IndexFunc(pods.Items, func(have corev1.Pod) bool { return have.Name == p.Name })
		switch {
		case i < 0:
			return fmt.Sprintf("pod %s/%s does not exist", PodNamespace, p.Name), nil
		case !podReady(&pods.Items[i]):
			return notReady(&pods.Items[i]), nil
		}
	}
	return "", nil
}
