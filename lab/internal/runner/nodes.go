package runner

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"

	netv1beta1 "github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/lab/internal/expect"
	"github.com/isthmus-net/isthmus/lab/internal/operand"
	"github.com/isthmus-net/isthmus/lab/internal/report"
	"github.com/isthmus-net/isthmus/lab/internal/scenario"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// moveNode takes a node away as goes does, or lets it join where that is nil. At the end
// of the row it is again where it was when the row began.
func (r *Runner) moveNode(ctx context.Context, row *expect.Row, o operand.Operand, goes func(ctx context.Context, cluster, node string) error, undo *undoList) error {
	in := goes == nil
	o, err := row.Directory.Settle(ctx, o)
	if err != nil {
		return err
	}
	node := operand.NodeName(o.Node)
	status, err := r.World.Status(ctx)
	if err != nil {
		return err
	}
	if hasNode(status, o.Cluster, node) == in {
		return fmt.Errorf("%s/%s %s already", o.Cluster, node, map[bool]string{true: "is there", false: "has left"}[in])
	}
	key := o.Cluster + "/" + node
	if !r.moved[key] {
		if r.moved == nil {
			r.moved = map[string]bool{}
		}
		r.moved[key] = true
		undo.add(func(ctx context.Context) error {
			delete(r.moved, key)
			if in {
				return r.nodeLeaves(ctx, o.Cluster, node)
			}
			return r.World.JoinNode(ctx, o.Cluster, node)
		})
	}
	if in {
		return r.World.JoinNode(ctx, o.Cluster, node)
	}
	return goes(ctx, o.Cluster, node)
}

func hasNode(s world.Status, cluster, node string) bool {
	return slices.ContainsFunc(s.Clusters, func(c world.ClusterStatus) bool {
		return c.Name == cluster && slices.Contains(c.Nodes, node)
	})
}

// nodeLeaves takes a node out of its cluster. The pods of the topology that were
// there are made again at once: they wait for it, as pods of a controller would.
// Those that have a controller are left to it.
func (r *Runner) nodeLeaves(ctx context.Context, cluster, node string) error {
	all, err := r.api.List(ctx, cluster, "pods")
	if err != nil {
		return err
	}
	if err := r.World.LeaveNode(ctx, cluster, node); err != nil {
		return err
	}
	for _, p := range all {
		if on, _, _ := unstructured.NestedString(p.Object, "spec", "nodeName"); on != node || len(p.GetOwnerReferences()) > 0 {
			continue
		}
		if err := r.podAgain(ctx, cluster, &p); err != nil {
			return fmt.Errorf("pod %s/%s: %w", p.GetNamespace(), p.GetName(), err)
		}
	}
	return nil
}

// podAgain replaces a pod whose node is gone by one that waits for it.
func (r *Runner) podAgain(ctx context.Context, cluster string, old *unstructured.Unstructured) error {
	res, err := r.resource(ctx, cluster, old)
	if err != nil {
		return err
	}
	now, uid := int64(0), old.GetUID()
	err = res.Delete(ctx, old.GetName(), metav1.DeleteOptions{GracePeriodSeconds: &now, Preconditions: &metav1.Preconditions{UID: &uid}})
	if err != nil {
		return err
	}
	_, err = res.Create(ctx, unscheduled(old), metav1.CreateOptions{FieldManager: fieldOwner})
	return err
}

// unscheduled is a pod like another one that is on no node yet.
func unscheduled(old *unstructured.Unstructured) *unstructured.Unstructured {
	again := &unstructured.Unstructured{Object: map[string]any{"spec": old.DeepCopy().Object["spec"]}}
	again.SetGroupVersionKind(old.GroupVersionKind())
	again.SetNamespace(old.GetNamespace())
	again.SetName(old.GetName())
	again.SetLabels(old.GetLabels())
	unstructured.RemoveNestedField(again.Object, "spec", "nodeName")
	return again
}

// moveGateway moves a gateway to a node. At the end of the row it is moved
// back, and those nodes take pods again that did before.
func (r *Runner) moveGateway(ctx context.Context, row *expect.Row, a *scenario.GatewayMoves, undo *undoList) (*report.Fault, error) {
	gateway, err := operand.Parse(a.Of+"/gateway."+a.Peer, row.Topology)
	if err != nil {
		return nil, err
	}
	pod, err := row.Directory.Pod(ctx, gateway)
	if err != nil {
		return nil, err
	}
	to, err := row.Directory.Settle(ctx, a.To.Operand)
	if err != nil {
		return nil, err
	}
	node := operand.NodeName(to.Node)
	cordoned, err := r.cordonedNodes(ctx, a.Of)
	if err != nil {
		return nil, err
	}
	undo.add(func(ctx context.Context) error {
		err := r.gatewayBack(a.Of, a.Peer, pod.Node)(ctx)
		return errors.Join(err, r.cordon(ctx, a.Of, func(name string) bool { return cordoned[name] }))
	})
	if pod.Node == node {
		return nil, nil // what the row does later may move it all the same
	}
	return r.placeGateway(ctx, a.Of, a.Peer, node)
}

// gatewayBack makes a function that moves a gateway to the node where it was.
func (r *Runner) gatewayBack(cluster, peer, node string) func(context.Context) error {
	return func(ctx context.Context) error {
		fault, err := r.returnGateway(ctx, cluster, peer, node)
		if fault != nil {
			err = errors.Join(err, fmt.Errorf("move the gateway of %s for %s back to %s: %s", cluster, peer, node, fault.Got))
		}
		return err
	}
}

// returnGateway moves a gateway to a node unless it is there.
func (r *Runner) returnGateway(ctx context.Context, cluster, peer, node string) (*report.Fault, error) {
	pods, err := r.gatewayPods(ctx, cluster, peer)
	if err != nil {
		return nil, err
	}
	if _, settled := settledOn(pods, node); settled {
		return nil, nil
	}
	return r.placeGateway(ctx, cluster, peer, node)
}

// gatewayTime is how long a gateway may take until it is ready on another
// node: the old pod's grace period of 5 s is part of it, and a start under
// emulation.
const gatewayTime = 60 * time.Second

// placeGateway cordons all nodes but one, deletes the gateway's pod and waits
// until only the one in its place is left, and ready.
func (r *Runner) placeGateway(ctx context.Context, cluster, peer, node string) (*report.Fault, error) {
	if err := r.cordon(ctx, cluster, func(name string) bool { return name != node }); err != nil {
		return nil, err
	}
	pods, err := r.gatewayPods(ctx, cluster, peer)
	if err != nil {
		return nil, err
	}
	for _, p := range pods {
		if err := r.deletePod(ctx, cluster, &p); err != nil {
			return nil, err
		}
	}
	return await(ctx, r.allowAction(gatewayTime), report.Fault{
		Expectation: fmt.Sprintf("the gateway of %s for %s moves", cluster, peer),
		Want:        fmt.Sprintf("one pod, ready on %s within %v", node, gatewayTime),
	}, func(ctx context.Context) (string, bool, error) {
		pods, err := r.gatewayPods(ctx, cluster, peer)
		if err != nil {
			return "", false, err
		}
		for _, p := range misplaced(pods, node) {
			if err := r.deletePod(ctx, cluster, &p); err != nil {
				return "", false, err
			}
		}
		seen, settled := settledOn(pods, node)
		return seen, settled, nil
	})
}

// misplaced are the pods that were put on another node and stay there: the
// scheduler had not heard yet that the node takes none.
func misplaced(pods []unstructured.Unstructured, node string) []unstructured.Unstructured {
	return slices.DeleteFunc(slices.Clone(pods), func(p unstructured.Unstructured) bool {
		on, _, _ := unstructured.NestedString(p.Object, "spec", "nodeName")
		return on == "" || on == node || p.GetDeletionTimestamp() != nil
	})
}

// deletePod deletes a pod unless somebody else has: its Deployment replaces it,
// say.
func (r *Runner) deletePod(ctx context.Context, cluster string, p *unstructured.Unstructured) error {
	res, err := r.resource(ctx, cluster, p)
	if err != nil {
		return err
	}
	if err := res.Delete(ctx, p.GetName(), metav1.DeleteOptions{}); !apierrors.IsNotFound(err) {
		return err
	}
	return nil
}

// settledOn says how the pods of a gateway are, and whether there is only one,
// ready on that node.
func settledOn(pods []unstructured.Unstructured, node string) (text string, settled bool) {
	var texts []string
	for _, p := range pods {
		on, _, _ := unstructured.NestedString(p.Object, "spec", "nodeName")
		state := "is not ready on " + on
		switch {
		case p.GetDeletionTimestamp() != nil:
			state = "ends on " + on
		case on == "":
			state = "waits for a node"
		case podReady(&p):
			state = "is ready on " + on
			settled = on == node
		}
		texts = append(texts, p.GetName()+" "+state)
	}
	if len(texts) == 0 {
		return "no pod", false
	}
	return strings.Join(texts, ", "), settled && len(pods) == 1
}

func podReady(p *unstructured.Unstructured) bool {
	conditions, _, _ := unstructured.NestedSlice(p.Object, "status", "conditions")
	return slices.ContainsFunc(conditions, func(c any) bool {
		m, ok := c.(map[string]any)
		return ok && m["type"] == "Ready" && m["status"] == "True"
	})
}

func (r *Runner) gatewayPods(ctx context.Context, cluster, peer string) ([]unstructured.Unstructured, error) {
	all, err := r.api.List(ctx, cluster, "pods")
	var out []unstructured.Unstructured
	for _, p := range all {
		if l := p.GetLabels(); l[netv1beta1.LabelComponent] == netv1beta1.ComponentGateway && l[netv1beta1.LabelRemoteClusterID] == peer {
			out = append(out, p)
		}
	}
	return out, err
}

// cordonedNodes are the nodes of a cluster that take no pods.
func (r *Runner) cordonedNodes(ctx context.Context, cluster string) (map[string]bool, error) {
	nodes, err := r.api.List(ctx, cluster, "nodes")
	out := map[string]bool{}
	for _, n := range nodes {
		out[n.GetName()], _, _ = unstructured.NestedBool(n.Object, "spec", "unschedulable")
	}
	return out, err
}

// cordon makes those nodes of a cluster take no pods that are meant, and the
// others take them.
func (r *Runner) cordon(ctx context.Context, cluster string, meant func(name string) bool) error {
	is, err := r.cordonedNodes(ctx, cluster)
	if err != nil {
		return err
	}
	m, err := r.api.Mapping(ctx, cluster, "nodes")
	if err != nil {
		return err
	}
	res, err := r.api.Resource(ctx, cluster, m, "")
	if err != nil {
		return err
	}
	for name, cordoned := range is {
		if cordoned == meant(name) {
			continue
		}
		patch := fmt.Sprintf(`{"spec":{"unschedulable":%v}}`, meant(name))
		if _, err := res.Patch(ctx, name, types.MergePatchType, []byte(patch), metav1.PatchOptions{FieldManager: fieldOwner}); err != nil {
			return err
		}
	}
	return nil
}

// bootTime is how long the pods of a node may take until they run again: its
// kubelet tries again after ten seconds what failed when it had just started.
const bootTime = 60 * time.Second

// reboot reboots a node and waits until its pods run again.
func (r *Runner) reboot(ctx context.Context, row *expect.Row, o operand.Operand) (*report.Fault, error) {
	o, err := row.Directory.Settle(ctx, o)
	if err != nil {
		return nil, err
	}
	node := operand.NodeName(o.Node)
	if err := r.World.RebootNode(ctx, o.Cluster, node); err != nil {
		return nil, err
	}
	return await(ctx, r.allowAction(bootTime), report.Fault{
		Expectation: fmt.Sprintf("%s/%s comes back", o.Cluster, node), Want: fmt.Sprintf("its pods run within %v", bootTime),
	}, func(ctx context.Context) (string, bool, error) {
		waiting, err := r.notRunning(ctx, o.Cluster, node)
		return waiting, waiting == "", err
	})
}

// notRunning names a pod that the API has on a node and that does not run there.
func (r *Runner) notRunning(ctx context.Context, cluster, node string) (string, error) {
	all, err := r.api.List(ctx, cluster, "pods")
	if err != nil {
		return "", err
	}
	status, err := r.World.Status(ctx)
	if err != nil {
		return "", err
	}
	runs := map[string]bool{}
	for _, c := range status.Clusters {
		for _, p := range c.Pods {
			if c.Name == cluster && p.Node == node && len(p.Containers) > 0 {
				runs[p.Namespace+"/"+p.Name] = true
			}
		}
	}
	for _, p := range all {
		name := p.GetNamespace() + "/" + p.GetName()
		if on, _, _ := unstructured.NestedString(p.Object, "spec", "nodeName"); on == node && p.GetDeletionTimestamp() == nil && !runs[name] {
			return "pod " + name + " does not run", nil
		}
	}
	return "", nil
}
