package pods

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/lab/internal/netns"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/record"
)

// node is the kubelet of one node.
type node struct {
	cfg    NodeConfig
	log    *slog.Logger
	client kubernetes.Interface // as the node
	agent  kubernetes.Interface // as kube-proxy
	events record.EventRecorder

	wg   sync.WaitGroup // pods
	mu   sync.Mutex
	pods map[types.UID]*pod

	hasPodCIDR chan struct{} // closed when the Node has one
	netReady   chan struct{} // closed when net is set
	net        *network

	// idle closes connections to the API server: open ones would keep the
	// namespace of a node that is gone.
	idle []func()
}

func newNode(cfg NodeConfig) (*node, error) {
	n := &node{cfg: cfg, pods: map[types.UID]*pod{}, hasPodCIDR: make(chan struct{}), netReady: make(chan struct{})}
	n.log = cfg.Logger.With("cluster", cfg.Cluster, "node", cfg.Name)
	var err error
	if n.client, err = n.clientset(cfg.Kubeconfig); err != nil {
		return nil, fmt.Errorf("kubeconfig: %w", err)
	}
	if n.agent, err = n.clientset(cfg.KubeProxyKubeconfig); err != nil {
		return nil, fmt.Errorf("kubeconfig of kube-proxy: %w", err)
	}
	for name, image := range cfg.Images {
		if _, err := os.Stat(image.Binary); err != nil {
			return nil, fmt.Errorf("image %s: %w", name, err)
		}
	}
	return n, nil
}

// clientset returns a client that connects from the node's namespace.
func (n *node) clientset(kubeconfig []byte) (kubernetes.Interface, error) {
	rc, err := clientcmd.RESTConfigFromKubeConfig(kubeconfig)
	if err != nil {
		return nil, err
	}
	rc.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
		return netns.DialContext(ctx, n.cfg.NetNS, network, address)
	}
	rc.QPS, rc.Burst = 100, 200
	rest.AddUserAgent(rc, "isthmus-lab/"+n.cfg.Name)
	client, err := rest.HTTPClientFor(rc)
	if err != nil {
		return nil, err
	}
	n.idle = append(n.idle, client.CloseIdleConnections)
	return kubernetes.NewForConfigAndClient(rc, client)
}

// hostRoot is the root directory that hostPath volumes of this node see.
func (n *node) hostRoot() string { return filepath.Join(n.cfg.Dir, "host") }

// run is the life of the node.
func (n *node) run(ctx context.Context) error {
	defer n.unmountHost()
	if err := n.prepare(); err != nil {
		return fmt.Errorf("node %s/%s: %w", n.cfg.Cluster, n.cfg.Name, err)
	}
	server, err := n.listen(ctx)
	if err != nil {
		return fmt.Errorf("node %s/%s: %w", n.cfg.Cluster, n.cfg.Name, err)
	}
	broadcaster := record.NewBroadcaster(record.WithContext(ctx))
	defer broadcaster.Shutdown()
	broadcaster.StartRecordingToSink(&typedcorev1.EventSinkImpl{Interface: n.client.CoreV1().Events("")})
	n.events = broadcaster.NewRecorder(scheme.Scheme, corev1.EventSource{Component: "kubelet", Host: n.cfg.Name})

	var wg sync.WaitGroup
	wg.Go(func() { n.serve(ctx, server) })
	if err := n.retry(ctx, "register the node", n.register); err == nil {
		wg.Go(func() { n.keepLease(ctx) })
		wg.Go(func() { n.keepStatus(ctx) })
		switch n.cfg.CNI {
		case CNIFlannel:
			wg.Go(func() { n.keepFlannel(ctx) })
		case CNIVPC: // the network leads to pods
		default:
			wg.Go(func() { n.keepRoutes(ctx) })
		}
		if n.cfg.KubeProxy != "" {
			wg.Go(func() { n.keepKubeProxy(ctx) })
		}
		n.watchPods(ctx)
	}
	n.wg.Wait()
	wg.Wait()
	for _, closeIdle := range n.idle {
		closeIdle()
	}
	return nil
}

// prepare empties what a former run left behind and sets the node's sysctls.
func (n *node) prepare() error {
	for _, dir := range []string{"pods", "cni", "flannel"} {
		if err := os.RemoveAll(filepath.Join(n.cfg.Dir, dir)); err != nil {
			return err
		}
	}
	for _, dir := range []string{"pods", "log", "host/etc", "host/run", "host/tmp", "host/var/lib", "host/var/log", "host/opt"} {
		if err := os.MkdirAll(filepath.Join(n.cfg.Dir, dir), 0o755); err != nil {
			return err
		}
	}
	// What is mounted on a machine propagates: systemd makes all of it shared.
	if err := unix.Mount(n.hostRoot(), n.hostRoot(), "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("mount the root of hostPath volumes: %w", err)
	}
	if err := unix.Mount("", n.hostRoot(), "", unix.MS_SHARED, ""); err != nil {
		return fmt.Errorf("share the root of hostPath volumes: %w", err)
	}
	return SetNodeSysctls(n.cfg.NetNS)
}

// unmountHost takes away the root of hostPath volumes, with what was mounted
// below: a machine that goes down keeps none of it.
func (n *node) unmountHost() {
	if err := unix.Unmount(n.hostRoot(), unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
		n.log.Warn("unmount the root of hostPath volumes", "err", err)
	}
}

// retry calls f until it succeeds or ctx ends.
func (n *node) retry(ctx context.Context, what string, f func(context.Context) error) error {
	for backoff := restartFirst; ; backoff = min(2*backoff, 5*time.Second) {
		call, cancel := context.WithTimeout(ctx, callTimeout)
		err := f(call)
		cancel()
		if err == nil {
			return nil
		}
		if ctx.Err() == nil {
			n.log.Warn(what, "err", err, "again", backoff)
		}
		if !pause(ctx, backoff) {
			return ctx.Err()
		}
	}
}

// image returns what stands behind an image name.
func (n *node) image(name string) (Image, error) {
	if i, ok := n.cfg.Images[name]; ok {
		return i, nil
	}
	known := slices.Sorted(maps.Keys(n.cfg.Images))
	return Image{}, fmt.Errorf("image %q is not known to this lab, which pulls nothing; it has %s", name, strings.Join(known, ", "))
}

// network returns the node's CNI configuration, once there is one.
func (n *node) network(ctx context.Context) (*network, error) {
	select {
	case <-n.netReady:
		return n.net, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// watchPods runs the pods that are bound to this node, until ctx ends.
func (n *node) watchPods(ctx context.Context) {
	source := cache.NewListWatchFromClient(n.client.CoreV1().RESTClient(), "pods", metav1.NamespaceAll, fields.OneTermEqualSelector("spec.nodeName", n.cfg.Name))
	_, informer := cache.NewInformerWithOptions(cache.InformerOptions{
		ListerWatcher: source,
		ObjectType:    &corev1.Pod{},
		Handler: cache.ResourceEventHandlerFuncs{
			AddFunc:    func(o any) { n.podChanged(ctx, o.(*corev1.Pod)) },
			UpdateFunc: func(_, o any) { n.podChanged(ctx, o.(*corev1.Pod)) },
			DeleteFunc: func(o any) {
				if d, ok := o.(cache.DeletedFinalStateUnknown); ok {
					o = d.Obj
				}
				if p, ok := o.(*corev1.Pod); ok {
					n.podGone(p)
				}
			},
		},
	})
	informer.RunWithContext(ctx)
}

func (n *node) podChanged(ctx context.Context, api *corev1.Pod) {
	if ctx.Err() != nil {
		return
	}
	n.mu.Lock()
	p, ok := n.pods[api.UID]
	if !ok {
		if finished := api.Status.Phase == corev1.PodSucceeded || api.Status.Phase == corev1.PodFailed; finished && api.DeletionTimestamp == nil {
			n.mu.Unlock()
			return // of a former life of this node
		}
		p = newPod(ctx, n, api)
		n.pods[api.UID] = p
	}
	n.mu.Unlock()
	p.update(api)
	if !ok {
		n.wg.Go(func() {
			p.run(ctx)
			n.mu.Lock()
			delete(n.pods, api.UID)
			n.mu.Unlock()
		})
	}
}

// podGone ends a pod whose object somebody removed without waiting for us.
func (n *node) podGone(api *corev1.Pod) {
	n.mu.Lock()
	p, ok := n.pods[api.UID]
	n.mu.Unlock()
	if ok {
		p.terminate(0)
	}
}

// finalize tells the API server that nothing is left of a pod.
func (n *node) finalize(ctx context.Context, p *pod) {
	api := p.current()
	_ = n.retry(ctx, "remove pod "+api.Namespace+"/"+api.Name, func(ctx context.Context) error {
		if err := p.writeStatusOnce(ctx); err != nil && !apierrors.IsNotFound(err) {
			return err
		}
		zero, uid := int64(0), api.UID
		err := n.client.CoreV1().Pods(api.Namespace).Delete(ctx, api.Name, metav1.DeleteOptions{
			GracePeriodSeconds: &zero, Preconditions: &metav1.Preconditions{UID: &uid},
		})
		if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
			return nil // somebody was quicker, or a pod of that name is new
		}
		return err
	})
}

// find returns a running pod by name.
func (n *node) find(namespace, name string) (*pod, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	var found *pod
	for _, p := range n.pods {
		if api := p.current(); api.Namespace == namespace && api.Name == name {
			// The newer one, when one of the same name is still ending.
			if found == nil || found.start.Before(p.start) {
				found = p
			}
		}
	}
	if found == nil {
		return nil, fmt.Errorf("pod %s/%s is not on node %s", namespace, name, n.cfg.Name)
	}
	return found, nil
}

// keepRoutes keeps a route to every other node's pods, as the CNI's daemon
// would.
func (n *node) keepRoutes(ctx context.Context) {
	changed := make(chan struct{}, 1)
	notify := func(any) {
		select {
		case changed <- struct{}{}:
		default:
		}
	}
	source := cache.NewListWatchFromClient(n.agent.CoreV1().RESTClient(), "nodes", metav1.NamespaceAll, fields.Everything())
	store, informer := cache.NewInformerWithOptions(cache.InformerOptions{
		ListerWatcher: source,
		ObjectType:    &corev1.Node{},
		Handler: cache.ResourceEventHandlerFuncs{
			AddFunc: notify, UpdateFunc: func(_, o any) { notify(o) }, DeleteFunc: notify,
		},
		// Only what the routes are made of.
		Transform: func(o any) (any, error) {
			if nd, ok := o.(*corev1.Node); ok {
				nd.ManagedFields = nil
			}
			return o, nil
		},
	})
	var wg sync.WaitGroup
	wg.Go(func() { informer.RunWithContext(ctx) })
	r := routes{ns: n.cfg.NetNS, set: map[netip.Prefix]netip.Addr{}}
	for {
		select {
		case <-ctx.Done():
			wg.Wait()
			return
		case <-changed:
		}
		want, err := routesTo(store.List(), n.cfg.Name, n.cfg.Blocks)
		err = errors.Join(err, r.sync(want))
		if err != nil {
			n.log.Warn("routes to the other nodes", "err", err)
			if pause(ctx, statusRetry) {
				notify(nil)
			}
		}
	}
}

// routesTo returns where the pods of all nodes but own are, and the address of
// the node behind each.
func routesTo(nodes []any, own string, blocks map[string]netip.Prefix) (map[netip.Prefix]netip.Addr, error) {
	want := map[netip.Prefix]netip.Addr{}
	var errs []error
	for _, o := range nodes {
		nd, ok := o.(*corev1.Node)
		if !ok || nd.Name == own {
			continue
		}
		networks, err := PodNetworks(nd, blocks)
		errs = append(errs, err)
		for _, p := range networks {
			for _, a := range nd.Status.Addresses {
				via, err := netip.ParseAddr(a.Address)
				if a.Type == corev1.NodeInternalIP && err == nil && via.Is4() == p.Addr().Is4() {
					want[p] = via
				}
			}
		}
	}
	return want, errors.Join(errs...)
}
