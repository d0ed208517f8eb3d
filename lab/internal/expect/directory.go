package expect

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	netv1beta1 "github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/lab/internal/operand"
	"github.com/isthmus-net/isthmus/lab/internal/prober"
	"github.com/isthmus-net/isthmus/lab/internal/topology"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// ErrNoAddress: what a name stands for does not exist, or not yet. Errors of a
// Directory other than this and ErrChoice are the lab's.
var ErrNoAddress = errors.New("has no address")

// A Directory knows which address stands behind a name, and who has an
// address. What it learned from an API server it keeps while that server is
// away.
type Directory struct {
	world    World
	api      *API
	topology *topology.Topology

	mu       sync.Mutex
	status   world.Status
	internal map[string]netip.Addr // "milan/node-1", "milan/gateway.rome" → address of the internal CIDR
	remaps   []remap
	// configured are the clusters that have a Configuration of another one:
	// "milan/rome".
	configured map[string]bool
	chosen     map[string]string // what clusters have chosen, as it was read first
	mayChange  bool              // the row has done something
}

// NewDirectory returns an empty directory; it asks when it is asked.
func NewDirectory(w World, api *API, t *topology.Topology) *Directory {
	return &Directory{
		world: w, api: api, topology: t,
		internal: map[string]netip.Addr{}, configured: map[string]bool{}, chosen: map[string]string{},
	}
}

// Refresh asks for what may have changed: pods, and the objects with
// addresses.
func (d *Directory) Refresh(ctx context.Context) error {
	status, err := d.world.Status(ctx)
	if err != nil {
		return err
	}
	d.mu.Lock()
	d.status = status
	d.mu.Unlock()
	for _, c := range d.topology.Clusters {
		d.learn(ctx, c.Name) // without an API server the old answers hold
	}
	return nil
}

func (d *Directory) learn(ctx context.Context, cluster string) {
	nodes, err := d.api.List(ctx, cluster, "internalnodes.networking.liqo.io")
	if err != nil {
		return
	}
	fabrics, err := d.api.List(ctx, cluster, "internalfabrics.networking.liqo.io")
	if err != nil {
		return
	}
	configurations, err := d.api.List(ctx, cluster, "configurations.networking.liqo.io")
	if err != nil {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	spec, _ := d.status.Spec.Cluster(cluster)
	for _, n := range nodes {
		if a, err := netip.ParseAddr(nested(n, "spec", "interface", "node", "ip")); err == nil {
			d.internal[cluster+"/"+spec.ObjectNode(n.GetName())] = a
		}
	}
	for _, f := range fabrics {
		if a, err := netip.ParseAddr(nested(f, "spec", "interface", "gateway", "ip")); err == nil {
			d.internal[cluster+"/gateway."+d.remoteOf(f)] = a
		}
	}
	d.remaps = slices.DeleteFunc(d.remaps, func(r remap) bool { return r.cluster == cluster })
	maps.DeleteFunc(d.configured, func(name string, _ bool) bool { return strings.HasPrefix(name, cluster+"/") })
	for _, c := range configurations {
		d.remaps = append(d.remaps, remapsOf(cluster, d.remoteOf(c), c)...)
		d.configured[cluster+"/"+d.remoteOf(c)] = true
	}
}

// remoteOf is the name of the cluster that an object of another one is about.
func (d *Directory) remoteOf(o unstructured.Unstructured) string {
	return d.status.Spec.ClusterOf(o.GetLabels()[netv1beta1.LabelRemoteClusterID])
}

func nested(o unstructured.Unstructured, path ...string) string {
	s, _, _ := unstructured.NestedString(o.Object, path...)
	return s
}

// Address is the address of an operand as the cluster viewer calls it. With
// no viewer, and for an operand of viewer's own, it is the one that the
// operand has.
func (d *Directory) Address(ctx context.Context, o operand.Operand, viewer string) (netip.Addr, error) {
	if o.RemappedIn != "" {
		viewer = o.RemappedIn
	}
	o, err := d.Settle(ctx, o)
	if err != nil {
		return netip.Addr{}, err
	}
	a, err := d.address(o)
	if o.Kind == operand.External || o.Kind == operand.Ingress || o.Kind == operand.ClusterIP {
		if a, err = d.ofObject(ctx, o); err != nil {
			return a, err
		}
		if viewer != "" && viewer != o.Cluster {
			err = d.Refresh(ctx)
		}
		if err != nil {
			return a, err
		}
	} else if err != nil || d.stale(o, viewer) {
		if err := d.Refresh(ctx); err != nil {
			return netip.Addr{}, err
		}
		if a, err = d.address(o); err != nil {
			return netip.Addr{}, err
		}
	}
	if viewer == "" || viewer == o.Cluster || o.Cluster == "" || o.Attr == operand.Internal {
		return a, nil
	}
	return d.asCalledBy(viewer, o.Cluster, a)
}

// text is what an operand stands for in a text: an address, or a Node's name.
func (d *Directory) text(ctx context.Context, o operand.Operand) (string, error) {
	if o.Attr == operand.NodeAttr {
		o, err := d.Settle(ctx, o)
		return d.objectName(o), err
	}
	a, err := d.Address(ctx, o, "")
	return a.String(), err
}

// objectName is the name of the Node that an operand stands for.
func (d *Directory) objectName(o operand.Operand) string {
	d.mu.Lock()
	defer d.mu.Unlock()
	c, _ := d.status.Spec.Cluster(o.Cluster)
	if n, _, ok := c.Node(operand.NodeName(o.Node)); ok {
		return n.ObjectName()
	}
	return operand.NodeName(o.Node)
}

// Settle turns the node that a gateway runs on, or another one, into that
// node.
func (d *Directory) Settle(ctx context.Context, o operand.Operand) (operand.Operand, error) {
	if o.Kind != operand.GatewayNode {
		return o, nil
	}
	pod, err := d.Pod(ctx, operand.Operand{Kind: operand.Gateway, Cluster: o.Cluster, Peer: o.Peer})
	if err != nil {
		return o, err
	}
	c, _ := d.topology.Cluster(o.Cluster)
	for n := 1; n <= c.Nodes; n++ {
		if name := operand.NodeName(n); (name == pod.Node) != o.Other && d.present(o.Cluster, name) {
			o.Kind, o.Node = operand.Node, n
			return o, nil
		}
	}
	return o, fmt.Errorf("%s %w: the gateway runs on %s", o, ErrNoAddress, pod.Node)
}

// present tells whether a node has joined its cluster and has not left.
func (d *Directory) present(cluster, node string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, c := range d.status.Clusters {
		if c.Name == cluster {
			return slices.Contains(c.Nodes, node)
		}
	}
	return false
}

// stale tells whether the answer depends on something that changes while a
// scenario runs: pods come and go.
func (d *Directory) stale(o operand.Operand, viewer string) bool {
	return o.Kind == operand.Gateway || o.Kind == operand.Pod && !o.Host || viewer != "" && viewer != o.Cluster
}

// HasRouter tells whether a router leads to a cluster in this world.
func (d *Directory) HasRouter(cluster string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	c, _ := d.status.Spec.Cluster(cluster)
	return c.Router.IsValid()
}

func (d *Directory) address(o operand.Operand) (netip.Addr, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if o.Attr == operand.Internal {
		key := o.Cluster + "/" + operand.NodeName(o.Node)
		if o.Kind == operand.Gateway {
			key = o.Cluster + "/gateway." + o.Peer
		}
		if a, ok := d.internal[key]; ok {
			c, _ := d.status.Spec.Cluster(o.Cluster)
			if err := checkInternal(key, a, c, d.internal); err != nil {
				return netip.Addr{}, err
			}
			return a, d.steady("the internal address of "+key, a.String())
		}
		return netip.Addr{}, fmt.Errorf("%s %w of the internal CIDR yet", key, ErrNoAddress)
	}
	c, _ := d.status.Spec.Cluster(o.Cluster)
	switch o.Kind {
	case operand.Node, operand.Daemon:
		return d.nodeAddress(c, o)
	case operand.Router:
		return valid(c.Router, o)
	case operand.ControlPlane:
		return valid(c.ControlPlane, o)
	case operand.Unknown:
		return valid(c.ExternalCIDR.Masked().Addr(), o)
	case operand.Outside:
		for _, h := range d.status.Spec.Outside {
			if h.Name == o.Name {
				return h.Addr, nil
			}
		}
	case operand.Pod:
		if o.Host {
			return d.nodeAddress(c, o)
		}
	}
	if p, ok := d.pod(o); ok && p.IP.IsValid() {
		return p.IP, nil
	}
	return netip.Addr{}, fmt.Errorf("%s %w", o, ErrNoAddress)
}

// ofObject is an address that stands in an object of a cluster.
func (d *Directory) ofObject(ctx context.Context, o operand.Operand) (netip.Addr, error) {
	if o.Kind == operand.External {
		host, err := d.Address(ctx, *o.Inner, "")
		if err != nil {
			return host, err
		}
		a, ok, err := d.ofIP(ctx, o.Cluster, host)
		if err == nil && !ok {
			err = fmt.Errorf("%s %w yet", o, ErrNoAddress)
		}
		return a, err
	}
	s, err := d.api.Find(ctx, o.Cluster, "services/"+o.Name, podNamespace)
	if err != nil {
		return netip.Addr{}, err
	}
	if s == nil {
		return netip.Addr{}, fmt.Errorf("%s %w: there is no Service %s", o, ErrNoAddress, o.Name)
	}
	text := nested(*s, "spec", "clusterIP")
	if o.Kind == operand.Ingress {
		text = ""
		ingress, _, _ := unstructured.NestedSlice(s.Object, "status", "loadBalancer", "ingress")
		for _, i := range ingress {
			if m, ok := i.(map[string]any); ok {
				text, _ = m["ip"].(string)
			}
		}
	}
	a, err := netip.ParseAddr(text)
	if err != nil {
		return a, fmt.Errorf("%s %w yet", o, ErrNoAddress)
	}
	return a, nil
}

func valid(a netip.Addr, o operand.Operand) (netip.Addr, error) {
	if !a.IsValid() {
		return a, fmt.Errorf("%s %w", o, ErrNoAddress)
	}
	return a, nil
}

func (d *Directory) nodeAddress(c world.ClusterSpec, o operand.Operand) (netip.Addr, error) {
	for _, n := range c.Nodes {
		if n.Name == operand.NodeName(o.Node) {
			return n.Addr, nil
		}
	}
	return netip.Addr{}, fmt.Errorf("%s/%s %w", o.Cluster, operand.NodeName(o.Node), ErrNoAddress)
}

// podNamespace is where deploy puts the pods of a topology.
const podNamespace = "default"

// pod finds the pod behind an operand in the last status.
func (d *Directory) pod(o operand.Operand) (world.PodStatus, bool) {
	var found world.PodStatus
	ok := false
	for _, c := range d.status.Clusters {
		if c.Name != o.Cluster {
			continue
		}
		for _, p := range c.Pods {
			if !isPod(p, o) {
				continue
			}
			// Of several replicas of a gateway, the active one.
			if !ok || p.Labels[netv1beta1.LabelActive] == "true" {
				found, ok = p, true
			}
		}
	}
	return found, ok
}

func isPod(p world.PodStatus, o operand.Operand) bool {
	switch o.Kind {
	case operand.Pod:
		return p.Namespace == podNamespace && p.Name == o.Name
	case operand.Gateway:
		return p.Labels[netv1beta1.LabelComponent] == netv1beta1.ComponentGateway && p.Labels[netv1beta1.LabelRemoteClusterID] == o.Peer
	case operand.Daemon:
		return p.Namespace == netv1beta1.DefaultNamespace && p.Node == operand.NodeName(o.Node) && p.HostNet
	case operand.Controller:
		return p.Namespace == netv1beta1.DefaultNamespace && !p.HostNet
	}
	return false
}

// Pod returns the pod behind an operand.
func (d *Directory) Pod(ctx context.Context, o operand.Operand) (world.PodStatus, error) {
	if err := d.Refresh(ctx); err != nil {
		return world.PodStatus{}, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if p, ok := d.pod(o); ok {
		return p, nil
	}
	return world.PodStatus{}, fmt.Errorf("%s %w: there is no such pod", o, ErrNoAddress)
}

// former tells whether a server is in a pod of the topology that is no more:
// another one may have its name and its address by now.
func (d *Directory) former(ctx context.Context, s prober.Server) (bool, error) {
	if s.UID == "" || d.runs(s) {
		return false, nil
	}
	if err := d.Refresh(ctx); err != nil {
		return false, err
	}
	return !d.runs(s), nil
}

// runs tells whether the last status has the pod of a server.
func (d *Directory) runs(s prober.Server) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	p, ok := d.pod(operand.Operand{Kind: operand.Pod, Cluster: s.Cluster, Name: s.Pod})
	return ok && p.UID == s.UID
}

// PodTarget is the name of the pod behind an operand for exec and kill.
func (d *Directory) PodTarget(ctx context.Context, o operand.Operand) (string, error) {
	p, err := d.Pod(ctx, o)
	if err != nil {
		return "", err
	}
	return o.Cluster + "/" + p.Namespace + "/" + p.Name, nil
}

// Name says who has an address, in as few words as possible.
func (d *Directory) Name(a netip.Addr) string {
	d.mu.Lock()
	defer d.mu.Unlock()
	var names []string
	add := func(format string, args ...any) { names = append(names, fmt.Sprintf(format, args...)) }
	for _, c := range d.status.Spec.Clusters {
		for _, n := range c.Nodes {
			if n.Addr == a {
				add("%s/%s", c.Name, n.Name)
			}
		}
		switch a {
		case c.Router, c.RouterWAN:
			add("%s/router", c.Name)
		case c.ControlPlane:
			add("%s/control-plane", c.Name)
		}
	}
	for _, h := range d.status.Spec.Outside {
		if h.Addr == a {
			add("%s", h.Name)
		}
	}
	for _, c := range d.status.Clusters {
		for _, p := range c.Pods {
			if p.IP == a && !p.HostNet {
				add("%s", podName(c.Name, p))
			}
		}
	}
	for name, i := range d.internal {
		if i == a {
			add("%s.internal", name)
		}
	}
	if len(names) == 0 {
		names = d.networkNames(a)
	}
	if len(names) == 0 {
		return "nobody's address"
	}
	return strings.Join(names, " or ")
}

// networkNames says what networks an address nobody has is part of.
func (d *Directory) networkNames(a netip.Addr) []string {
	var names []string
	for _, r := range d.remaps {
		if r.remapped.Contains(a) && r.remapped != r.original {
			names = append(names, fmt.Sprintf("%s's %s as %s calls it", r.remote, rebase(a, r.original), r.cluster))
		}
	}
	for _, c := range d.status.Spec.Clusters {
		for _, n := range []struct {
			what   string
			prefix netip.Prefix
		}{{"pod", c.PodCIDR}, {"service", c.ServiceCIDR}, {"external", c.ExternalCIDR}, {"internal", c.InternalCIDR}} {
			if n.prefix.Contains(a) {
				names = append(names, fmt.Sprintf("in %s's %s CIDR, but nobody's", c.Name, n.what))
			}
		}
	}
	return names
}

func podName(cluster string, p world.PodStatus) string {
	switch {
	case p.Labels[netv1beta1.LabelComponent] == netv1beta1.ComponentGateway:
		return cluster + "/gateway." + p.Labels[netv1beta1.LabelRemoteClusterID]
	case p.Namespace == podNamespace:
		return cluster + "/" + p.Name
	}
	return cluster + "/" + p.Namespace + "/" + p.Name
}

// rebase keeps the host part of an address and gives it another network.
func rebase(a netip.Addr, to netip.Prefix) netip.Addr {
	b, n := a.AsSlice(), to.Addr().AsSlice()
	if len(b) != len(n) {
		return a
	}
	for bit := range to.Bits() {
		mask := byte(0x80) >> (bit % 8)
		b[bit/8] = b[bit/8]&^mask | n[bit/8]&mask
	}
	out, _ := netip.AddrFromSlice(b)
	return out
}
