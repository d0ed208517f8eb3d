package runner

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/lab/internal/deploy"
	"github.com/isthmus-net/isthmus/lab/internal/expect"
	"github.com/isthmus-net/isthmus/lab/internal/operand"
	"github.com/isthmus-net/isthmus/lab/internal/report"
	"github.com/isthmus-net/isthmus/lab/internal/scenario"
)

// movePod puts a pod on another node. At the end of the row it is where it was
// before.
func (r *Runner) movePod(ctx context.Context, row *expect.Row, a *scenario.PodMoves, undo *undoList) (*report.Fault, error) {
	to, err := row.Directory.Settle(ctx, a.To.Operand)
	if err != nil {
		return nil, err
	}
	pod := a.Pod.Operand
	old, err := r.api.Find(ctx, pod.Cluster, "pod/"+pod.Name, deploy.PodNamespace)
	if err != nil {
		return nil, err
	}
	if old == nil {
		return nil, fmt.Errorf("there is no pod %s in %s", pod.Name, pod.Cluster)
	}
	was, _, _ := unstructured.NestedString(old.Object, "spec", "nodeName")
	node := operand.NodeName(to.Node)
	if was == node {
		return nil, nil
	}
	undo.add(func(ctx context.Context) error {
		fault, err := r.placePod(ctx, pod, was)
		if fault != nil {
			err = errors.Join(err, fmt.Errorf("move %s back to %s: %s", a.Pod, was, fault.Got))
		}
		return err
	})
	return r.placePod(ctx, pod, node)
}

// podTime is how long a pod may take until it is ready on another node: its
// readiness is looked at every 5 s.
const podTime = 30 * time.Second

// hostnameLabel is the label by which the pods of the topology choose their
// node.
const hostnameLabel = "kubernetes.io/hostname"

// placePod replaces a pod by one on a node and waits until it is ready.
func (r *Runner) placePod(ctx context.Context, pod operand.Operand, node string) (*report.Fault, error) {
	old, err := r.api.Find(ctx, pod.Cluster, "pod/"+pod.Name, deploy.PodNamespace)
	if err != nil {
		return nil, err
	}
	if old == nil {
		return nil, fmt.Errorf("there is no pod %s in %s", pod.Name, pod.Cluster)
	}
	m, err := r.api.MappingOf(ctx, pod.Cluster, old.GroupVersionKind())
	if err != nil {
		return nil, err
	}
	res, err := r.api.Resource(ctx, pod.Cluster, m, old.GetNamespace())
	if err != nil {
		return nil, err
	}
	again := unscheduled(old)
	// The node is said outright: the scheduler would wait for one that takes no
	// pods at present, as all do but the one that a gateway was moved to.
	if err := unstructured.SetNestedField(again.Object, node, "spec", "nodeName"); err != nil {
		return nil, err
	}
	if err := unstructured.SetNestedStringMap(again.Object, map[string]string{hostnameLabel: node}, "spec", "nodeSelector"); err != nil {
		return nil, err
	}
	if err := r.remove(ctx, pod.Cluster, m, old.GetNamespace(), old.GetName()); err != nil {
		return nil, err
	}
	if _, err := res.Create(ctx, again, metav1.CreateOptions{FieldManager: fieldOwner}); err != nil {
		return nil, err
	}
	return await(ctx, r.allowAction(podTime), report.Fault{
		Expectation: fmt.Sprintf("%s moves", pod), Want: fmt.Sprintf("ready on %s within %v", node, podTime),
	}, func(ctx context.Context) (string, bool, error) {
		now, err := res.Get(ctx, again.GetName(), metav1.GetOptions{})
		if err != nil {
			return "", false, err
		}
		phase, _, _ := unstructured.NestedString(now.Object, "status", "phase")
		return cmp.Or(phase, "no status") + ", not ready", podReady(now), nil
	})
}
