package world

import (
	"context"
	"net"
	"net/netip"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/isthmus-net/isthmus/lab/internal/netns"
)

// followPodCIDRs keeps the router's routes to the podCIDRs of its cluster's
// nodes, as the network of a real cluster's machines would have been told. It
// reads the Nodes as kube-proxy does (a kubelet may read only its own), from the
// router.
func (a *agent) followPodCIDRs(ctx context.Context, router *Namespace, c ClusterSpec, kubeconfig []byte) {
	log := a.cfg.Logger.With("cluster", c.Name)
	cfg, err := clientcmd.RESTConfigFromKubeConfig(kubeconfig)
	if err != nil {
		log.Error("no routes to pods: kubeconfig", "err", err)
		return
	}
	cfg.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
		return netns.DialContext(ctx, router.File, network, address)
	}
	client, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		log.Error("no routes to pods: client", "err", err)
		return
	}
	routes := map[netip.Prefix]netip.Addr{}
	said := ""
	for ctx.Err() == nil {
		if err := watchPodCIDRs(ctx, client, router, routes); err != nil && ctx.Err() == nil {
			// Once: an API server may be away for as long as a scenario wants.
			if err.Error() != said {
				said = err.Error()
				log.Warn("the router does not learn the nodes' podCIDRs", "err", err)
			}
			select {
			case <-ctx.Done():
			case <-time.After(500 * time.Millisecond):
			}
		}
	}
}

// watchPodCIDRs lists and watches until the watch ends.
func watchPodCIDRs(ctx context.Context, client kubernetes.Interface, router *Namespace, routes map[netip.Prefix]netip.Addr) error {
	list, err := client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	nodes := map[string]*corev1.Node{}
	for i := range list.Items {
		nodes[list.Items[i].Name] = &list.Items[i]
	}
	w, err := client.CoreV1().Nodes().Watch(ctx, metav1.ListOptions{ResourceVersion: list.ResourceVersion})
	if err != nil {
		return err
	}
	defer w.Stop()
	for {
		if err := applyPodCIDRs(router, routes, nodes); err != nil {
			return err
		}
		e, ok := <-w.ResultChan()
		if !ok {
			return nil
		}
		node, isNode := e.Object.(*corev1.Node)
		if !isNode { // the version is too old: list again
			return nil
		}
		nodes[node.Name] = node
		if e.Type == "DELETED" {
			delete(nodes, node.Name)
		}
	}
}

// applyPodCIDRs changes the routes from what they were to what the nodes say.
func applyPodCIDRs(router *Namespace, routes map[netip.Prefix]netip.Addr, nodes map[string]*corev1.Node) error {
	want := map[netip.Prefix]netip.Addr{}
	for _, n := range nodes {
		var via netip.Addr
		for _, a := range n.Status.Addresses {
			if addr, err := netip.ParseAddr(a.Address); err == nil && a.Type == corev1.NodeInternalIP {
				via = addr
				break
			}
		}
		for _, cidr := range n.Spec.PodCIDRs {
			if p, err := netip.ParsePrefix(cidr); err == nil && via.Is4() == p.Addr().Is4() && via.IsValid() {
				want[p] = via
			}
		}
	}
	for p, via := range want {
		if routes[p] == via {
			continue
		}
		if err := router.AddRoute(p, via); err != nil {
			return err
		}
		routes[p] = via
	}
	for p, via := range routes {
		if _, ok := want[p]; ok {
			continue
		}
		if err := router.deleteRoute(p, via); err != nil {
			return err
		}
		delete(routes, p)
	}
	return nil
}
