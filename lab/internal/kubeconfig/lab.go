package kubeconfig

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	netv1beta1 "github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/lab/internal/clusters"
	"github.com/isthmus-net/isthmus/lab/internal/deploy"
	"github.com/isthmus-net/isthmus/lab/internal/expect"
	"github.com/isthmus-net/isthmus/lab/internal/topology"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// A Spec is a lab to create. All fields but Progress are required.
type Spec struct {
	Name     string
	Topology *topology.Topology // whose pods are created
	Clusters []Cluster          // as Read returns them
	Image    string             // of the probe, which the nodes can pull
	Progress func(message string, took time.Duration)
}

// A Lab is the topology's pods in clusters that are there. It is safe for
// concurrent use.
type Lab struct {
	*clusters.Set
	spec    Spec
	started time.Time

	mu       sync.Mutex
	hostPods map[string]bool // "milan/node-1": the pod in its network is there
}

// hostPod is the name of the pod in the network of a node from which the node's
// probes are sent.
func hostPod(node string) string { return "isthmus-lab-" + node }

// readyTime is how long the pods may take: their image has to be pulled.
const readyTime = 3 * time.Minute

// Create creates the pods and returns when they are ready. A lab that fails on its
// way takes away what it has created. Where a pod has the name of one of the lab's
// already, nothing is created, and the pod stays as it is.
func Create(ctx context.Context, s Spec) (*Lab, error) {
	l := newLab(s)
	start := time.Now()
	if err := l.refuseOthers(ctx); err != nil {
		return nil, err
	}
	if err := l.create(ctx); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	if s.Progress != nil {
		s.Progress("the topology's pods are ready", time.Since(start))
	}
	return l, nil
}

func newLab(s Spec) *Lab {
	l := &Lab{spec: s, started: time.Now(), hostPods: map[string]bool{}}
	l.Set = &clusters.Set{
		World: World, Names: l.names, Load: l.load, Namespaces: l.namespaces,
		// Whatever else there is in this namespace is others'.
		Counts: func(p *corev1.Pod) bool {
			return p.Namespace != deploy.PodNamespace || p.Labels[deploy.ProbeLabel] != ""
		},
	}
	return l
}

func (l *Lab) names() []string {
	var out []string
	for _, c := range l.spec.Topology.Clusters {
		out = append(out, c.Name)
	}
	return out
}

func (l *Lab) cluster(name string) Cluster {
	i := slices.IndexFunc(l.spec.Clusters, func(c Cluster) bool { return c.Name == name })
	return l.spec.Clusters[i] // CannotRun has seen that it is there
}

func (l *Lab) load(cluster string) (*rest.Config, error) { return l.cluster(cluster).restConfig() }

// namespaces are those where the lab and the appliance have pods, other peerings' left
// out.
func (l *Lab) namespaces(cluster string) []string {
	out := []string{deploy.PodNamespace, deploy.Namespace}
	for _, name := range l.names() {
		if id := l.cluster(name).Spec.ID; slices.Contains(l.cluster(cluster).Peers, id) {
			out = append(out, deploy.TenantNamespace(id))
		}
	}
	return out
}

// placement is the n-th node of a cluster, from 1.
func (l *Lab) placement(c Cluster, n int) deploy.Placement {
	node := c.Spec.Nodes[n-1]
	return deploy.Placement{Object: node.ObjectName(), Node: node.Name, Image: l.spec.Image, ImagePullPolicy: corev1.PullIfNotPresent, Run: l.spec.Name}
}

// labPods are the pods of the topology in a cluster. They end by themselves, in case
// nobody else ends them.
func (l *Lab) labPods(cluster string) []*unstructured.Unstructured {
	var out []*unstructured.Unstructured
	for _, p := range l.spec.Topology.Pods {
		if p.Cluster == cluster {
			out = append(out, mortal(deploy.ProbePod(p, l.placement(l.cluster(cluster), p.Node))))
		}
	}
	return out
}

// longest is how long a pod of the lab lives, in seconds: longer than any run.
const longest = int64(3 * time.Hour / time.Second)

func mortal(p *unstructured.Unstructured) *unstructured.Unstructured {
	p.Object["spec"].(map[string]any)["activeDeadlineSeconds"] = longest
	return p
}

// hostPodOf is the pod in the network of the n-th node of a cluster, from 1.
func (l *Lab) hostPodOf(c Cluster, n int) *unstructured.Unstructured {
	p := deploy.ProbePod(topology.Pod{Cluster: c.Name, Name: hostPod(c.Spec.Nodes[n-1].Name), HostNetwork: true}, l.placement(c, n))
	// It only sends: a port of the node is not its to take.
	container := p.Object["spec"].(map[string]any)["containers"].([]any)[0].(map[string]any)
	container["args"] = []any{"pause"}
	delete(container, "ports")
	delete(container, "readinessProbe")
	return mortal(p)
}

// ensureHostPod creates the pod in the network of a node when the first probe is sent
// from there: a cluster may have hundreds of nodes.
func (l *Lab) ensureHostPod(ctx context.Context, c Cluster, n int) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	key := c.Name + "/" + c.Spec.Nodes[n-1].Name
	if l.hostPods[key] {
		return nil
	}
	cl, err := l.controllerClient(c.Name)
	if err != nil {
		return err
	}
	p := l.hostPodOf(c, n)
	if err := cl.Create(ctx, p); err != nil && !apierrors.IsAlreadyExists(err) { // an earlier probe may have been interrupted
		return fmt.Errorf("cluster %s: create pod %s/%s: %w", c.Name, p.GetNamespace(), p.GetName(), err)
	}
	if err := l.waitReady(ctx, cl, c.Name); err != nil {
		return err
	}
	l.hostPods[key] = true
	return nil
}

// refuseOthers is an error when there are pods of a lab: those of somebody else's
// run, or of one that was killed.
func (l *Lab) refuseOthers(ctx context.Context) error {
	for _, c := range l.names() {
		all, err := l.Pods(ctx, c)
		if err != nil {
			return fmt.Errorf("cluster %s: %w", c, err)
		}
		for _, p := range all {
			if p.Labels[deploy.ProbeLabel] != "" {
				return fmt.Errorf("cluster %s has the pod %s/%s of a lab run already: wait until that run has ended; after one that was killed: %s delete pods -n %[2]s -l %[5]s",
					c, p.Namespace, p.Name, l.cluster(c).kubectl(), deploy.ProbeLabel)
			}
		}
	}
	return nil
}

// create creates all pods at once and waits until they are ready.
func (l *Lab) create(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	for _, c := range l.names() {
		g.Go(func() error {
			cl, err := l.controllerClient(c)
			if err != nil {
				return err
			}
			for _, p := range l.labPods(c) {
				if err := cl.Create(ctx, p); err != nil {
					return fmt.Errorf("cluster %s: create pod %s/%s: %w", c, p.GetNamespace(), p.GetName(), err)
				}
			}
			return l.waitReady(ctx, cl, c)
		})
	}
	return g.Wait()
}

// waitReady waits until all pods of the lab in a cluster are ready.
func (l *Lab) waitReady(ctx context.Context, cl client.Client, cluster string) error {
	return deploy.Poll(ctx, readyTime, func(ctx context.Context) (string, error) {
		var all corev1.PodList
		if err := cl.List(ctx, &all, client.InNamespace(deploy.PodNamespace), client.MatchingLabels{deploy.ProbeLabel: l.spec.Name}); err != nil {
			return err.Error(), nil
		}
		for _, p := range all.Items {
			if why := deploy.PodReady(&p); why != "" {
				return "cluster " + cluster + ": " + why, nil
			}
		}
		return "", nil
	})
}

func (l *Lab) controllerClient(cluster string) (client.Client, error) {
	cfg, err := l.RESTConfig(context.Background(), cluster)
	if err != nil {
		return nil, err
	}
	return client.New(cfg, client.Options{Scheme: deploy.Scheme()})
}

// closeTime is how long clusters may take to end the lab's pods.
const closeTime = time.Minute

// Close deletes the lab's pods and returns when they are gone. Those of other runs
// stay. A cluster that can't be reached does not keep them in another one.
func (l *Lab) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), closeTime)
	defer cancel()
	names := l.names()
	errs := make([]error, len(names))
	var wg sync.WaitGroup
	for n, c := range names {
		wg.Go(func() {
			if err := l.deletePods(ctx, c); err != nil {
				errs[n] = fmt.Errorf("cluster %s: %w; delete what is left: %s delete pods -n %s -l %s", c, err, l.cluster(c).kubectl(), deploy.PodNamespace, deploy.ProbeLabel)
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

func (l *Lab) deletePods(ctx context.Context, cluster string) error {
	c, err := l.Client(cluster)
	if err != nil {
		return err
	}
	ours := metav1.ListOptions{LabelSelector: deploy.ProbeLabel + "=" + l.spec.Name}
	pods := c.CoreV1().Pods(deploy.PodNamespace)
	err = pods.DeleteCollection(ctx, metav1.DeleteOptions{}, ours)
	if err != nil && !apierrors.IsNotFound(err) {
		return err
	}
	return deploy.Poll(ctx, closeTime, func(ctx context.Context) (string, error) {
		list, err := pods.List(ctx, ours)
		if err != nil || len(list.Items) == 0 {
			return "", err
		}
		return fmt.Sprintf("pod %s/%s has not ended", list.Items[0].Namespace, list.Items[0].Name), nil
	})
}

// Down is Close: nothing else is the lab's.
func (l *Lab) Down(context.Context) error { return l.Close() }

// Status says what there is, by the names that scenarios have for clusters and
// nodes.
func (l *Lab) Status(ctx context.Context) (world.Status, error) {
	s := world.Status{Name: l.spec.Name, World: World, Phase: world.PhaseReady, Started: l.started, Spec: world.Spec{Name: l.spec.Topology.Name}}
	for _, name := range l.names() {
		s.Spec.Clusters = append(s.Spec.Clusters, l.cluster(name).Spec)
	}
	var errs []error
	for _, spec := range s.Spec.Clusters {
		cs := world.ClusterStatus{Name: spec.Name}
		for _, n := range spec.Nodes {
			cs.Nodes = append(cs.Nodes, n.Name)
		}
		var err error
		if cs.Pods, err = l.PodStatus(ctx, spec.Name); err != nil {
			errs = append(errs, fmt.Errorf("cluster %s: %w", spec.Name, err))
		}
		for i := range cs.Pods {
			p := &cs.Pods[i]
			p.Node = spec.ObjectNode(p.Node)
			if id, ok := p.Labels[netv1beta1.LabelRemoteClusterID]; ok {
				p.Labels[netv1beta1.LabelRemoteClusterID] = s.Spec.ClusterOf(id)
			}
		}
		if cfg, err := l.RESTConfig(ctx, spec.Name); err == nil {
			cs.Server = cfg.Host
		}
		s.Clusters = append(s.Clusters, cs)
	}
	err := errors.Join(errs...)
	if err != nil {
		s.Phase, s.Error = world.PhaseFailed, err.Error()
	}
	return s, err
}

// convergeTime is how long the appliance may take to apply what a row has changed.
const convergeTime = 2 * time.Minute

// Converged waits until the appliance's pods and those of the lab are ready, and
// every host has applied the present generation of what it says it has.
func (l *Lab) Converged(ctx context.Context) error {
	for _, name := range l.names() {
		cl, err := l.controllerClient(name)
		if err != nil {
			return err
		}
		err = deploy.Poll(ctx, convergeTime, func(ctx context.Context) (string, error) {
			pods, err := l.Pods(ctx, name)
			if err != nil {
				return err.Error(), nil
			}
			spec := l.cluster(name).Spec
			for _, p := range pods {
				// Nodes that take no pods, and pods that have ended, are others' concern.
				_, _, known := spec.Node(spec.ObjectNode(p.Spec.NodeName))
				ended := p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed
				if why := deploy.PodReady(&p); known && !ended && why != "" {
					return why, nil
				}
			}
			return deploy.NotApplied(ctx, cl), nil
		})
		if err != nil {
			return fmt.Errorf("cluster %s: %w", name, err)
		}
	}
	return nil
}

// probeOnly is why a command does not run.
const probeOnly = "in the world " + World + " only probes run, in the lab's own pods"

// target is the pod that a command runs in: a node's are sent from the lab's pod in
// its network.
func (l *Lab) target(ctx context.Context, req world.ExecRequest) (cluster string, p corev1.Pod, err error) {
	if len(req.Argv) == 0 || req.Argv[0] != expect.ProbeProgram {
		return "", p, fmt.Errorf("%w: %s: %s", world.ErrNoTarget, req.Target, probeOnly)
	}
	for _, name := range l.names() {
		c := l.cluster(name)
		for i, n := range c.Spec.Nodes {
			if req.Target != name+"/"+n.Name {
				continue
			}
			if err := l.ensureHostPod(ctx, c, i+1); err != nil {
				return "", p, err
			}
			req.Target = name + "/" + hostPod(n.Name)
			break
		}
	}
	if p, err = l.Find(ctx, req.Target); err != nil {
		return "", p, err
	}
	if p.Labels[deploy.ProbeLabel] == "" {
		return "", p, fmt.Errorf("%w: %s: %s", world.ErrNoTarget, req.Target, probeOnly)
	}
	cluster, _, _ = strings.Cut(req.Target, "/")
	return cluster, p, nil
}
