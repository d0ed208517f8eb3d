// Package kubeconfig is the lab's world of clusters that somebody else has made
// and peered: it learns from their API servers what scenarios need to know, puts
// the topology's pods into them, and takes them out again. It changes nothing else,
// enters no node and captures no packet.
package kubeconfig

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	ipamv1alpha1 "github.com/isthmus-net/isthmus/appliance/api/ipam/v1alpha1"
	netv1beta1 "github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/lab/internal/deploy"
	"github.com/isthmus-net/isthmus/lab/internal/operand"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// World is the name of this world.
const World = "kubeconfig"

// An Access is how a cluster is reached.
type Access struct {
	Name    string // that scenarios have for the cluster
	File    string // a kubeconfig
	Context string // of the file; empty: its current one
}

// ParseAccess reads NAME=FILE or NAME=FILE@CONTEXT. Files and contexts may have an @ in their
// names: the file is the shortest for which there is one, and else what comes before the first @.
func ParseAccess(text string) (Access, error) {
	name, rest, ok := strings.Cut(text, "=")
	file, kubeContext, _ := strings.Cut(rest, "@")
	for i := 0; i <= len(rest); i++ {
		if i < len(rest) && rest[i] != '@' {
			continue
		}
		if info, err := os.Stat(rest[:i]); err == nil && !info.IsDir() {
			file, kubeContext = rest[:i], strings.TrimPrefix(rest[i:], "@")
			break
		}
	}
	if !ok || name == "" || file == "" {
		return Access{}, fmt.Errorf("%q: write the name that scenarios have for the cluster and its kubeconfig: milan=milan.yaml, or milan=config@context", text)
	}
	return Access{name, file, kubeContext}, nil
}

// String is the access as ParseAccess reads it.
func (a Access) String() string {
	if a.Context == "" {
		return a.Name + "=" + a.File
	}
	return a.Name + "=" + a.File + "@" + a.Context
}

func (a Access) restConfig() (*rest.Config, error) {
	rules := &clientcmd.ClientConfigLoadingRules{ExplicitPath: a.File}
	cfg, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, &clientcmd.ConfigOverrides{CurrentContext: a.Context}).ClientConfig()
	if err != nil {
		return nil, err
	}
	cfg.QPS, cfg.Burst = 50, 100 // others work with these clusters
	return cfg, nil
}

// A Cluster is what a cluster says of itself. Its nodes are those that the lab's
// pods can run on: ready, and without a taint that keeps pods away.
type Cluster struct {
	Access
	Spec    world.ClusterSpec
	Overlay netv1beta1.Overlay // empty: no node has said so yet
	Peers   []string           // cluster IDs
	// Gateways are the Nodes that the gateways run on, by the peer's cluster ID. A Node may
	// be one that takes no pods of the lab.
	Gateways map[string]string
}

// Read asks the clusters what they are. A cluster that has no appliance is an
// error, and so are two that are one.
func Read(ctx context.Context, all []Access) ([]Cluster, error) {
	var out []Cluster
	for _, a := range all {
		c, err := read(ctx, a)
		if err != nil {
			return nil, fmt.Errorf("--kubeconfig %s: %w", a, err)
		}
		for _, o := range out {
			switch {
			case o.Name == c.Name:
				return nil, fmt.Errorf("--kubeconfig: %s is given twice", c.Name)
			case o.Spec.ID == c.Spec.ID:
				return nil, fmt.Errorf("--kubeconfig %s and --kubeconfig %s: both clusters have the ID %s: are they one?", o.Access, c.Access, c.Spec.ID)
			}
		}
		out = append(out, c)
	}
	return out, nil
}

func read(ctx context.Context, a Access) (Cluster, error) {
	cfg, err := a.restConfig()
	if err != nil {
		return Cluster{}, err
	}
	cl, err := client.New(cfg, client.Options{Scheme: deploy.Scheme()})
	if err != nil {
		return Cluster{}, err
	}
	c := Cluster{Access: a, Spec: world.ClusterSpec{Name: a.Name}}
	for _, learn := range []func(context.Context, client.Client) error{c.readID, c.readNetworks, c.readNodes, c.readOverlay, c.readPeers, c.readGateways} {
		if err := learn(ctx, cl); err != nil {
			if meta.IsNoMatchError(err) {
				return c, fmt.Errorf("Isthmus is not installed in this cluster: isthmusctl install%s: %w", a.flags(), err)
			}
			return c, err
		}
	}
	return c, nil
}

func (c *Cluster) readID(ctx context.Context, cl client.Client) error {
	var all corev1.ConfigMapList
	if err := cl.List(ctx, &all, client.MatchingLabels{netv1beta1.LabelAppName: netv1beta1.ClusterIDConfigMap}); err != nil {
		return err
	}
	for _, m := range all.Items {
		if c.Spec.ID = m.Data[netv1beta1.ClusterIDKey]; c.Spec.ID != "" {
			return nil
		}
	}
	return fmt.Errorf("Isthmus is not installed in this cluster: it has no ConfigMap with the label %s=%s, which has the cluster's ID: isthmusctl install%s",
		netv1beta1.LabelAppName, netv1beta1.ClusterIDConfigMap, c.flags())
}

// readNetworks reads the cluster's ranges: of several pod CIDRs the first.
func (c *Cluster) readNetworks(ctx context.Context, cl client.Client) error {
	var all ipamv1alpha1.NetworkList
	if err := cl.List(ctx, &all); err != nil {
		return err
	}
	slices.SortFunc(all.Items, func(a, b ipamv1alpha1.Network) int { return strings.Compare(a.Name, b.Name) })
	ranges := map[string]*netip.Prefix{
		netv1beta1.NetworkTypePod: &c.Spec.PodCIDR, netv1beta1.NetworkTypeService: &c.Spec.ServiceCIDR,
		netv1beta1.NetworkTypeExternal: &c.Spec.ExternalCIDR, netv1beta1.NetworkTypeInternal: &c.Spec.InternalCIDR,
	}
	for _, n := range all.Items {
		to := ranges[n.Labels[netv1beta1.LabelNetworkType]]
		if p, err := netip.ParsePrefix(n.Status.CIDR.String()); err == nil && to != nil && !to.IsValid() {
			*to = p
		}
	}
	for kind, p := range ranges {
		if !p.IsValid() {
			return fmt.Errorf("no Network with the label %s=%s has an address range in its status: is the controller running", netv1beta1.LabelNetworkType, kind)
		}
	}
	return nil
}

func (c *Cluster) readNodes(ctx context.Context, cl client.Client) error {
	var all corev1.NodeList
	if err := cl.List(ctx, &all); err != nil {
		return err
	}
	slices.SortFunc(all.Items, func(a, b corev1.Node) int { return strings.Compare(a.Name, b.Name) })
	for _, n := range all.Items {
		if addr := internalIP(&n); takesPods(&n) && addr.IsValid() {
			c.Spec.Nodes = append(c.Spec.Nodes, world.NodeSpec{Name: operand.NodeName(len(c.Spec.Nodes) + 1), Object: n.Name, Addr: addr})
		}
	}
	if len(c.Spec.Nodes) == 0 {
		return errors.New("no node is ready for pods: kubectl get nodes")
	}
	return nil
}

// internalIP is the address of a node: of several the first one of IPv4, which is what
// scenarios' Services have.
func internalIP(n *corev1.Node) netip.Addr {
	var out netip.Addr
	for _, a := range n.Status.Addresses {
		addr, err := netip.ParseAddr(a.Address)
		if a.Type == corev1.NodeInternalIP && err == nil && (!out.IsValid() || addr.Is4() && !out.Is4()) {
			out = addr
		}
	}
	return out
}

// takesPods tells whether a pod of Linux without tolerations can run on a node.
func takesPods(n *corev1.Node) bool {
	ready := slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
	linux := n.Status.NodeInfo.OperatingSystem == "" || n.Status.NodeInfo.OperatingSystem == "linux"
	return ready && linux && !n.Spec.Unschedulable && !slices.ContainsFunc(n.Spec.Taints, func(t corev1.Taint) bool {
		return t.Effect == corev1.TaintEffectNoSchedule || t.Effect == corev1.TaintEffectNoExecute
	})
}

// readOverlay takes the overlay from what nodes report: the vtep of VXLAN, or the
// address that a Geneve link begins at.
func (c *Cluster) readOverlay(ctx context.Context, cl client.Client) error {
	var all netv1beta1.InternalNodeList
	if err := cl.List(ctx, &all); err != nil {
		return err
	}
	for _, n := range all.Items {
		switch {
		case n.Status.VTEP != nil:
			c.Overlay = netv1beta1.OverlayVXLAN
		case n.Status.NodeIP.Local != nil || n.Status.NodeIP.Remote != nil:
			c.Overlay = netv1beta1.OverlayGeneve
		}
	}
	return nil
}

// readPeers reads with whom the cluster has networks in common: a peer has a
// Configuration, or is gone.
func (c *Cluster) readPeers(ctx context.Context, cl client.Client) error {
	var all netv1beta1.ConfigurationList
	if err := cl.List(ctx, &all); err != nil {
		return err
	}
	for _, o := range all.Items {
		if id := o.Labels[netv1beta1.LabelRemoteClusterID]; id != "" && o.DeletionTimestamp == nil && !slices.Contains(c.Peers, id) {
			c.Peers = append(c.Peers, id)
		}
	}
	slices.Sort(c.Peers)
	return nil
}

// readGateways reads where the gateways run. A cluster without one has none yet.
func (c *Cluster) readGateways(ctx context.Context, cl client.Client) error {
	var all netv1beta1.InternalFabricList
	if err := cl.List(ctx, &all); err != nil {
		return err
	}
	c.Gateways = map[string]string{}
	for _, f := range all.Items {
		if id := f.Labels[netv1beta1.LabelRemoteClusterID]; id != "" && f.Spec.GatewayNode != "" {
			c.Gateways[id] = f.Spec.GatewayNode
		}
	}
	return nil
}

// kubectl is kubectl with the flags that lead to the cluster, for messages.
func (a Access) kubectl() string { return "kubectl" + a.flags() }

// flags are those of kubectl and isthmusctl that lead to the cluster.
func (a Access) flags() string {
	out := " --kubeconfig " + a.File
	if a.Context != "" {
		out += " --context " + a.Context
	}
	return out
}
