package kind

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	netv1beta1 "github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/lab/internal/deploy"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// Status says what there is. Where a cluster does not answer the error says why,
// and the rest of the status is right.
func (l *Lab) Status(ctx context.Context) (world.Status, error) {
	s := world.Status{Name: l.record.Name, World: World, Phase: world.PhaseReady, Started: l.record.Started, RunDir: l.dir, Spec: l.record.Spec}
	if !l.record.Ready {
		s.Phase = world.PhaseStarting
	}
	var errs []error
	for _, c := range l.record.Clusters {
		cs := world.ClusterStatus{Name: c.Name}
		spec, _ := l.record.Spec.Cluster(c.Name)
		for _, n := range spec.Nodes {
			cs.Nodes = append(cs.Nodes, n.Name)
		}
		if l.record.Ready {
			var err error
			if cs.Pods, err = l.podStatus(ctx, c.Name); err != nil {
				errs = append(errs, fmt.Errorf("cluster %s: %w", c.Name, err))
			}
		}
		if cfg, err := l.RESTConfig(ctx, c.Name); err == nil {
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

func (l *Lab) pods(ctx context.Context, cluster string) ([]corev1.Pod, error) {
	if _, ok := l.cluster(cluster); !ok {
		return nil, fmt.Errorf("%w: there is no cluster %q", world.ErrNoTarget, cluster)
	}
	client, err := l.client(cluster)
	if err != nil {
		return nil, err
	}
	list, err := client.CoreV1().Pods(metav1.NamespaceAll).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	return list.Items, nil
}

// podStatus are the pods that run, as the lab's own kubelets tell of theirs.
func (l *Lab) podStatus(ctx context.Context, cluster string) ([]world.PodStatus, error) {
	all, err := l.pods(ctx, cluster)
	var out []world.PodStatus
	for _, p := range all {
		if p.Status.Phase != corev1.PodRunning || p.DeletionTimestamp != nil {
			continue
		}
		s := world.PodStatus{Namespace: p.Namespace, Name: p.Name, UID: string(p.UID), Node: p.Spec.NodeName, Labels: p.Labels, HostNet: p.Spec.HostNetwork}
		if a, err := netip.ParseAddr(p.Status.PodIP); err == nil { // it has none yet otherwise
			s.IP = a
		}
		for _, c := range p.Status.ContainerStatuses {
			s.Containers = append(s.Containers, world.ContainerStatus{Name: c.Name, Restarts: int(c.RestartCount)})
		}
		out = append(out, s)
	}
	return out, err
}

// findPod finds a pod by the name that scenarios and users have for it:
// "milan/web", "milan/gateway", "milan/gateway.rome" or "milan/namespace/name".
func findPod(all []corev1.Pod, target string) (corev1.Pod, error) {
	_, name, _ := strings.Cut(target, "/")
	namespace, inNamespace, ok := strings.Cut(name, "/")
	if !ok {
		namespace, inNamespace = deploy.PodNamespace, name
	}
	kind, peer, _ := strings.Cut(name, ".")
	var gateways []corev1.Pod
	for _, p := range all {
		if p.Namespace == namespace && p.Name == inNamespace {
			return p, nil
		}
		isGateway := p.Labels[netv1beta1.LabelComponent] == netv1beta1.ComponentGateway && p.DeletionTimestamp == nil
		if kind == world.GatewayHost && isGateway && (peer == "" || p.Labels[netv1beta1.LabelRemoteClusterID] == peer) {
			gateways = append(gateways, p)
		}
	}
	// Of several replicas the active one.
	if i := slices.IndexFunc(gateways, func(p corev1.Pod) bool { return p.Labels[netv1beta1.LabelActive] == "true" }); i > 0 {
		gateways[0], gateways[i] = gateways[i], gateways[0]
	}
	peers := map[string]bool{}
	for _, g := range gateways {
		peers[g.Labels[netv1beta1.LabelRemoteClusterID]] = true
	}
	switch {
	case len(peers) > 1:
		return corev1.Pod{}, fmt.Errorf("%w: %s has several gateways: write %s.<peer>", world.ErrNoTarget, target, target)
	case len(gateways) > 0:
		return gateways[0], nil
	}
	return corev1.Pod{}, fmt.Errorf("%w: %s; in the world %s there are nodes, control planes and pods", world.ErrNoTarget, target, World)
}

// Logs are the logs of all containers of pods that are there, those that ended
// last included, from the marks on; see (*world.Client).Logs.
func (l *Lab) Logs(ctx context.Context, since map[string]world.LogMark) ([]world.Log, error) {
	var out []world.Log
	for _, c := range l.record.Clusters {
		all, err := l.pods(ctx, c.Name)
		if err != nil {
			return nil, fmt.Errorf("cluster %s: %w", c.Name, err)
		}
		for _, p := range all {
			logs, err := l.logsOf(ctx, c.Name, p, since)
			if err != nil {
				return nil, err
			}
			out = append(out, logs...)
		}
	}
	return out, nil
}

// PodLogs are the logs of one pod, given as cluster/namespace/name, from the
// marks on.
func (l *Lab) PodLogs(ctx context.Context, target string, since map[string]world.LogMark) ([]world.Log, error) {
	cluster, _, _ := strings.Cut(target, "/")
	all, err := l.pods(ctx, cluster)
	if err != nil {
		return nil, err
	}
	p, err := findPod(all, target)
	if err != nil {
		return nil, err
	}
	return l.logsOf(ctx, cluster, p, since)
}

// logsOf names each run of a container as the lab's own kubelets do; see
// expect.ContainerOf. What has not begun to write has no log.
func (l *Lab) logsOf(ctx context.Context, cluster string, p corev1.Pod, since map[string]world.LogMark) ([]world.Log, error) {
	client, err := l.client(cluster)
	if err != nil {
		return nil, err
	}
	var out []world.Log
	for _, c := range p.Status.ContainerStatuses {
		type run struct {
			number   int32
			previous bool
		}
		var runs []run
		if c.LastTerminationState.Terminated != nil {
			runs = append(runs, run{c.RestartCount - 1, true})
		}
		if c.State.Waiting == nil {
			runs = append(runs, run{c.RestartCount, false})
		}
		for _, r := range runs {
			text, err := client.CoreV1().Pods(p.Namespace).GetLogs(p.Name, &corev1.PodLogOptions{Container: c.Name, Previous: r.previous}).DoRaw(ctx)
			if ctx.Err() != nil {
				return nil, ctx.Err()
			}
			if err != nil { // it ended, or was made again, in between
				continue
			}
			name := fmt.Sprintf("%s/%s/log/%s_%s_%s/%s/%d", cluster, p.Spec.NodeName, p.Namespace, p.Name, p.UID, c.Name, r.number)
			log := world.Log{Name: name, Text: string(text)}
			if mark, ok := since[name]; ok {
				log = log.Since(mark)
			}
			out = append(out, log)
		}
	}
	return out, nil
}

// Dial connects to the address of an API server, which the engine passes on
// from this machine.
func (l *Lab) Dial(ctx context.Context, _, network, address string) (net.Conn, error) {
	return (&net.Dialer{}).DialContext(ctx, network, address)
}

// StopComponent is what other worlds have: probes go by the API server, which
// is one of the components.
func (l *Lab) StopComponent(_ context.Context, cluster, component string) error {
	return fmt.Errorf("stop %s of %s: the world %s can't", component, cluster, World)
}

// StartComponent is what other worlds have.
func (l *Lab) StartComponent(_ context.Context, cluster, component string) error {
	return fmt.Errorf("start %s of %s: the world %s can't", component, cluster, World)
}

// JoinNode is what other worlds have: kind makes the nodes of a cluster at once.
func (l *Lab) JoinNode(_ context.Context, cluster, node string) error {
	return fmt.Errorf("%s/%s joins: nodes of the world %s can't", cluster, node, World)
}

// RebootNode is what other worlds have: kind's library starts no node again.
func (l *Lab) RebootNode(_ context.Context, cluster, node string) error {
	return fmt.Errorf("%s/%s reboots: nodes of the world %s can't", cluster, node, World)
}

// Impair is what other worlds have: kind has no routers.
func (l *Lab) Impair(_ context.Context, req world.ImpairRequest) error {
	return fmt.Errorf("impair the link of %s: the world %s has no routers", req.Host, World)
}

// LoseNode is what other worlds have: kind's library takes no power from a node.
func (l *Lab) LoseNode(_ context.Context, cluster, node string) error {
	return fmt.Errorf("%s/%s loses its power: nodes of the world %s can't", cluster, node, World)
}

// LeaveNode is what other worlds have.
func (l *Lab) LeaveNode(_ context.Context, cluster, node string) error {
	return fmt.Errorf("%s/%s leaves: nodes of the world %s can't", cluster, node, World)
}
