// Package clusters has what a lab's world can do through API servers alone:
// which pods run, their logs, and commands in their containers.
package clusters

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	netv1beta1 "github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/lab/internal/deploy"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// A Set is the clusters of a lab. It is safe for concurrent use. World, Names and
// Load are required.
type Set struct {
	World string                                     // of the lab, for messages
	Names func() []string                            // of the clusters that are there
	Load  func(cluster string) (*rest.Config, error) // is called once for each
	// Namespaces are those whose pods count; nil: all. Counts tells of a pod in them
	// whether it does; nil: it does.
	Namespaces func(cluster string) []string
	Counts     func(*corev1.Pod) bool

	mu      sync.Mutex
	configs map[string]*rest.Config          // by cluster
	clients map[string]*kubernetes.Clientset // by cluster
}

// RESTConfig is the access to a cluster's API server.
func (s *Set) RESTConfig(_ context.Context, cluster string) (*rest.Config, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.restConfig(cluster)
}

func (s *Set) restConfig(cluster string) (*rest.Config, error) {
	cfg, ok := s.configs[cluster]
	if !ok {
		if !slices.Contains(s.Names(), cluster) {
			return nil, fmt.Errorf("%w: there is no cluster %q", world.ErrNoTarget, cluster)
		}
		var err error
		if cfg, err = s.Load(cluster); err != nil {
			return nil, fmt.Errorf("cluster %s: kubeconfig: %w", cluster, err)
		}
		if s.configs == nil {
			s.configs = map[string]*rest.Config{}
		}
		s.configs[cluster] = cfg
	}
	return rest.CopyConfig(cfg), nil
}

// Client returns a client of a cluster's API server.
func (s *Set) Client(cluster string) (*kubernetes.Clientset, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c, ok := s.clients[cluster]; ok {
		return c, nil
	}
	cfg, err := s.restConfig(cluster)
	if err != nil {
		return nil, err
	}
	c, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		return nil, err
	}
	if s.clients == nil {
		s.clients = map[string]*kubernetes.Clientset{}
	}
	s.clients[cluster] = c
	return c, nil
}

// Dial connects to the address of an API server, which this machine reaches.
func (s *Set) Dial(ctx context.Context, _, network, address string) (net.Conn, error) {
	return (&net.Dialer{}).DialContext(ctx, network, address)
}

// Pods are the pods of a cluster that count.
func (s *Set) Pods(ctx context.Context, cluster string) ([]corev1.Pod, error) {
	client, err := s.Client(cluster)
	if err != nil {
		return nil, err
	}
	namespaces := []string{metav1.NamespaceAll}
	if s.Namespaces != nil {
		namespaces = s.Namespaces(cluster)
	}
	var out []corev1.Pod
	for _, n := range namespaces {
		list, err := client.CoreV1().Pods(n).List(ctx, metav1.ListOptions{})
		if err != nil {
			return nil, err
		}
		out = append(out, list.Items...)
	}
	if s.Counts != nil {
		out = slices.DeleteFunc(out, func(p corev1.Pod) bool { return !s.Counts(&p) })
	}
	return out, nil
}

// PodStatus are the pods that run, as the lab's own kubelets tell of theirs.
func (s *Set) PodStatus(ctx context.Context, cluster string) ([]world.PodStatus, error) {
	all, err := s.Pods(ctx, cluster)
	var out []world.PodStatus
	for _, p := range all {
		if p.Status.Phase != corev1.PodRunning || p.DeletionTimestamp != nil {
			continue
		}
		ps := world.PodStatus{Namespace: p.Namespace, Name: p.Name, UID: string(p.UID), Node: p.Spec.NodeName, Labels: p.Labels, HostNet: p.Spec.HostNetwork}
		if a, err := netip.ParseAddr(p.Status.PodIP); err == nil { // it has none yet otherwise
			ps.IP = a
		}
		for _, c := range p.Status.ContainerStatuses {
			ps.Containers = append(ps.Containers, world.ContainerStatus{Name: c.Name, Restarts: int(c.RestartCount)})
		}
		out = append(out, ps)
	}
	return out, err
}

// Find finds a pod by the name that scenarios and users have for it: "milan/web",
// "milan/gateway", "milan/gateway.rome" or "milan/namespace/name".
func (s *Set) Find(ctx context.Context, target string) (corev1.Pod, error) {
	cluster, _, _ := strings.Cut(target, "/")
	all, err := s.Pods(ctx, cluster)
	if err != nil {
		return corev1.Pod{}, err
	}
	return s.find(all, target)
}

func (s *Set) find(all []corev1.Pod, target string) (corev1.Pod, error) {
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
	return corev1.Pod{}, fmt.Errorf("%w: %s; the world %s has no such pod", world.ErrNoTarget, target, s.World)
}
