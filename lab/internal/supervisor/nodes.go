package supervisor

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/lab/internal/topology"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// nodesTimeout is how long nodes may take to be ready once they have been
// started: a second natively, a few in an emulated machine.
const nodesTimeout = 5 * time.Minute

// serveNode lets a node join or leave its cluster.
func (l *lab) serveNode(w http.ResponseWriter, r *http.Request) {
	l.mu.Lock()
	c := l.clusters[r.PathValue("cluster")]
	l.mu.Unlock()
	node := r.PathValue("node")
	if c == nil {
		world.WriteError(w, fmt.Errorf("%w: there is no cluster %q", world.ErrNoTarget, r.PathValue("cluster")))
		return
	}
	if _, _, ok := c.spec.Node(node); !ok {
		world.WriteError(w, fmt.Errorf("%w: cluster %s has no node %q", world.ErrNoTarget, c.spec.Name, node))
		return
	}
	a := l.currentAgent()
	if a == nil {
		world.WriteError(w, errNoWorld)
		return
	}
	var err error
	switch r.PathValue("action") {
	case "join":
		err = l.joinNode(r.Context(), a, c, node)
	case "leave":
		err = l.leaveNode(r.Context(), a, c, node)
	case "lose":
		err = l.loseNode(r.Context(), a, c, node)
	case "reboot":
		err = l.rebootNode(r.Context(), a, c, node)
	default:
		err = fmt.Errorf("action %q: use join, leave, lose or reboot", r.PathValue("action"))
	}
	if err != nil {
		world.WriteError(w, fmt.Errorf("node %s/%s: %w", c.spec.Name, node, err))
		return
	}
	world.WriteJSON(w, struct{}{})
}

// joinNode starts a node and waits until it is ready.
func (l *lab) joinNode(ctx context.Context, a *agent, c *cluster, node string) error {
	req := world.NodeRequest{Cluster: c.spec.Name, Node: node}
	if c.cp != nil {
		cred, err := c.cp.NodeCredentials(node)
		if err != nil {
			return err
		}
		req.Credentials = &cred
	}
	if err := a.client.JoinHost(ctx, req); err != nil {
		return err
	}
	l.setPresent(c, node, true)
	if c.cp == nil {
		return nil
	}
	return l.waitNodes(ctx, c)
}

// leaveNode takes a node away. Its Node object goes last, as when a cloud's
// controller finds that the machine is gone.
func (l *lab) leaveNode(ctx context.Context, a *agent, c *cluster, node string) error {
	if err := l.loseNode(ctx, a, c, node); err != nil || c.cp == nil {
		return err
	}
	err := c.cp.Client().CoreV1().Nodes().Delete(ctx, node, metav1.DeleteOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// loseNode takes a node's host away. Its Node object stays.
func (l *lab) loseNode(ctx context.Context, a *agent, c *cluster, node string) error {
	if err := a.client.LeaveHost(ctx, world.NodeRequest{Cluster: c.spec.Name, Node: node}); err != nil {
		return err
	}
	l.setPresent(c, node, false)
	return nil
}

// rebootNode cuts a node's power and gives it back, and waits until its kubelet
// says that it has booted: the API server does not notice that it was away. Its
// disk and its Node object stay.
func (l *lab) rebootNode(ctx context.Context, a *agent, c *cluster, node string) error {
	if c.spec.Runtime != topology.RuntimeContainerd || c.cp == nil {
		return errors.New("only a node with containerd can be started again: write runtime: containerd into the topology")
	}
	cred, err := c.cp.NodeCredentials(node)
	if err != nil {
		return err
	}
	nodes := c.cp.Client().CoreV1().Nodes()
	before, err := nodes.Get(ctx, node, metav1.GetOptions{})
	if err != nil {
		return err
	}
	req := world.NodeRequest{Cluster: c.spec.Name, Node: node}
	// Who asked may lose patience, but not between the two: nobody would switch
	// it on again.
	whole := context.WithoutCancel(ctx)
	if err := a.client.LeaveHost(whole, req); err != nil {
		return err
	}
	l.setPresent(c, node, false)
	req.Credentials = &cred
	if err := a.client.JoinHost(whole, req); err != nil {
		return err
	}
	l.setPresent(c, node, true)
	return poll(ctx, nodesTimeout, 100*time.Millisecond, func(ctx context.Context) (string, error) {
		now, err := nodes.Get(ctx, node, metav1.GetOptions{})
		if err != nil {
			return "", err
		}
		if now.Status.NodeInfo.BootID == before.Status.NodeInfo.BootID {
			return fmt.Sprintf("the kubelet of %s/%s has not come back", c.spec.Name, node), nil
		}
		return notReady(ctx, c, []string{node})
	})
}

func (l *lab) setPresent(c *cluster, node string, is bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	c.present[node] = is
}

// presentNodes are the nodes of a cluster that have not left, in their order.
// The caller holds the mutex.
func (c *cluster) presentNodes() []string {
	var out []string
	for _, n := range c.spec.Nodes {
		if c.present[n.Name] {
			out = append(out, n.Name)
		}
	}
	return out
}

// waitNodes waits until every node that is present in the clusters is ready.
func (l *lab) waitNodes(ctx context.Context, clusters ...*cluster) error {
	return poll(ctx, nodesTimeout, 100*time.Millisecond, func(ctx context.Context) (string, error) {
		for _, c := range clusters {
			l.mu.Lock()
			want := c.presentNodes()
			l.mu.Unlock()
			if missing, err := notReady(ctx, c, want); missing != "" || err != nil {
				return missing, err
			}
		}
		return "", nil
	})
}

// notReady says which of a cluster's nodes is not ready, or nothing.
func notReady(ctx context.Context, c *cluster, want []string) (string, error) {
	list, err := c.cp.Client().CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return "", fmt.Errorf("nodes of %s: %w", c.spec.Name, err)
	}
	var ready []string
	for _, n := range list.Items {
		for _, cond := range n.Status.Conditions {
			if cond.Type == corev1.NodeReady && cond.Status == corev1.ConditionTrue && len(n.Spec.PodCIDRs) > 0 {
				ready = append(ready, n.Name)
			}
		}
	}
	for _, name := range want {
		if !slices.Contains(ready, name) {
			return fmt.Sprintf("node %s/%s is not ready", c.spec.Name, name), nil
		}
	}
	return "", nil
}
