package kind

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/kind/pkg/cluster/nodes"
	"sigs.k8s.io/kind/pkg/cluster/nodeutils"

	"github.com/isthmus-net/isthmus/lab/internal/deploy"
	"github.com/isthmus-net/isthmus/lab/internal/expect"
	"github.com/isthmus-net/isthmus/lab/internal/operand"
	"github.com/isthmus-net/isthmus/lab/internal/pods"
	"github.com/isthmus-net/isthmus/lab/internal/topology"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// Paths in a node.
const (
	pluginDir   = "/opt/cni/bin" // the image has those that are not flannel's
	conflist    = "/etc/cni/net.d/10-lab.conflist"
	ipamDir     = "/var/lib/cni/lab"
	programDir  = "/usr/local/bin" // in the PATH of what runs in a node
	probeOnNode = programDir + "/" + expect.ProbeProgram
)

// multiCall is one program for all of Kubernetes on the lab's own control
// planes: what is to run is its first argument. Here each has its own name.
const (
	multiCall       = "kubernetes"
	multiCallScript = "#!/bin/sh\nexec \"$@\"\n"
)

// registry is what containerd writes before names that have none.
const registry = "docker.io/"

// readyTime bounds what a cluster does by itself once kind has made it: the controller-manager
// gives a Node its podCIDR, and the kubelet says that it is ready. On two cores with another lab
// the former took more than a minute.
const readyTime = 5 * time.Minute

// controlPlaneLabel is on the Nodes of control planes.
const controlPlaneLabel = "node-role.kubernetes.io/control-plane"

// A node is a Node of a cluster that kind has made.
type node struct {
	name      string // of the Node
	container string
	addr      netip.Addr
	podCIDRs  []netip.Prefix
	// kubeconfig is an administrator's, from within the engine's network.
	kubeconfig string
	near
}

// setUp makes a cluster that kind has made what the topology says: its control
// plane is no node, every node has the profile's network, the images and the
// probe. spec learns the addresses.
func (l *Lab) setUp(ctx context.Context, s Spec, c topology.Cluster, spec *world.ClusterSpec) error {
	all, err := l.waitNodes(ctx, c, "has no podCIDR", func(n corev1.Node) bool { return len(n.Spec.PodCIDRs) > 0 })
	if err != nil {
		return err
	}
	controlPlane, workers, err := l.handles(c, all)
	if err != nil {
		return err
	}
	l.enter(spec, controlPlane, workers)
	for _, n := range append([]node{controlPlane}, workers...) {
		if err := keepInside(ctx, n); err != nil {
			return err
		}
	}
	if err := l.withoutControlPlane(ctx, c, controlPlane); err != nil {
		return err
	}
	files := []sent{{to: programDir + "/" + multiCall, mode: 0o755, text: multiCallScript}}
	programs, err := given(s.BinDir)
	if err != nil {
		return err
	}
	for _, p := range programs { // beside the API server
		files = append(files, program(filepath.Join(s.BinDir, p), programDir+"/"+p))
	}
	if installs(s.Topology) {
		of, err := chart(s.ChartDir)
		if err != nil {
			return err
		}
		files = append(files, of...)
	}
	if err := send(ctx, controlPlane, files...); err != nil {
		return err
	}
	// Between the API server and pods, as for "kubectl port-forward" by way
	// of a Service; nothing else keeps these routes there.
	if err := addRoutes(ctx, controlPlane, workers); err != nil {
		return err
	}
	var admin bytes.Buffer
	if err := controlPlane.CommandContext(ctx, "cat", adminKubeconfig).SetStdout(&admin).Run(); err != nil {
		return fmt.Errorf("%s of the control plane: %w", adminKubeconfig, err)
	}
	l.mu.Lock()
	l.admin[c.Name] = admin.String()
	l.mu.Unlock()
	g, gctx := errgroup.WithContext(ctx)
	for _, n := range workers {
		n.kubeconfig = admin.String()
		g.Go(func() error {
			if err := prepare(gctx, n, c, s.BinDir); err != nil {
				return fmt.Errorf("node %s: %w", n.name, err)
			}
			set := network
			if c.CNI == topology.CNIFlannel {
				set = flannel
			}
			if err := set(gctx, n, workers, c, s.BinDir); err != nil {
				return fmt.Errorf("network of node %s: %w", n.name, err)
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	_, err = l.waitNodes(ctx, c, "is not ready", ready)
	return err
}

// kubeconfigs is the directory of control planes that world.KubeconfigsVariable names.
const kubeconfigs = "/kind/kubeconfigs"

// shareKubeconfigs gives every control plane the kubeconfigs of all clusters, by which
// the nodes' network reaches them.
func (l *Lab) shareKubeconfigs(ctx context.Context) error {
	var files []sent
	for cluster, text := range l.admin {
		files = append(files, sent{to: path.Join(kubeconfigs, cluster, "admin.kubeconfig"), mode: 0o600, text: text})
	}
	for _, to := range l.record.Clusters {
		n, err := l.node(to.Name, world.ControlPlaneHost)
		if err == nil {
			err = send(ctx, n, files...)
		}
		if err != nil {
			return fmt.Errorf("kubeconfigs for %s: %w", to.Name, err)
		}
	}
	return nil
}

// waitNodes waits readyTime at most until all nodes of a cluster are as they should be, and
// returns them, the control plane's among them when it is one.
func (l *Lab) waitNodes(ctx context.Context, c topology.Cluster, otherwise string, is func(corev1.Node) bool) ([]corev1.Node, error) {
	client, err := l.Client(c.Name)
	if err != nil {
		return nil, err
	}
	var all []corev1.Node
	err = deploy.Poll(ctx, readyTime, func(ctx context.Context) (reason string, err error) {
		list, err := client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
		if err != nil {
			return err.Error(), nil
		}
		all = list.Items
		have := map[string]bool{}
		for _, n := range all {
			have[n.Name] = true
			if !is(n) {
				reason = "node " + n.Name + " " + otherwise
			}
		}
		for n := range c.Nodes {
			if name := operand.NodeName(n + 1); !have[name] {
				reason = "there is no node " + name
			}
		}
		return reason, nil
	})
	return all, err
}

func ready(n corev1.Node) bool {
	for _, c := range n.Status.Conditions {
		if c.Type == corev1.NodeReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}

// handles finds the containers of Nodes, and remembers them for node.
func (l *Lab) handles(c topology.Cluster, all []corev1.Node) (controlPlane node, workers []node, err error) {
	rec, _ := l.cluster(c.Name)
	for _, api := range all {
		n := node{name: api.Name, container: containerOf(api.Spec.ProviderID)}
		for _, a := range api.Status.Addresses {
			if a.Type == corev1.NodeInternalIP && !n.addr.IsValid() {
				if n.addr, err = netip.ParseAddr(a.Address); err != nil {
					return node{}, nil, fmt.Errorf("node %s: address: %w", api.Name, err)
				}
			}
		}
		for _, cidr := range api.Spec.PodCIDRs {
			p, err := netip.ParsePrefix(cidr)
			if err != nil {
				return node{}, nil, fmt.Errorf("node %s: podCIDR: %w", api.Name, err)
			}
			n.podCIDRs = append(n.podCIDRs, p)
		}
		key := api.Name
		_, isControlPlane := api.Labels[controlPlaneLabel]
		if isControlPlane {
			key = world.ControlPlaneHost
		}
		rec.Containers[key] = n.container
		if n.near, err = l.node(c.Name, key); err != nil {
			return node{}, nil, err
		}
		if isControlPlane {
			controlPlane = n
		} else {
			workers = append(workers, n)
		}
	}
	if controlPlane.Node == nil {
		return node{}, nil, errors.New("no Node has the label " + controlPlaneLabel)
	}
	return controlPlane, workers, nil
}

// enter writes the addresses of the engine's network into a plan that has those
// of other worlds. There are no routers.
func (l *Lab) enter(spec *world.ClusterSpec, controlPlane node, workers []node) {
	spec.LAN, spec.Router, spec.RouterWAN = netip.Prefix{}, netip.Addr{}, netip.Addr{}
	spec.ControlPlane = controlPlane.addr
	for i := range spec.Nodes {
		for _, w := range workers {
			if w.name == spec.Nodes[i].Name {
				spec.Nodes[i].Addr = w.addr
			}
		}
	}
}

// withoutControlPlane deletes the Node of the control plane: in a topology it is
// no node, and daemons of every node would be one too many. The kubelet goes on
// with its static pods, which are the control plane. The pods that the API has of
// that node go at once; else the garbage collector would delete them later, in the
// middle of a scenario.
func (l *Lab) withoutControlPlane(ctx context.Context, c topology.Cluster, n node) error {
	client, err := l.Client(c.Name)
	if err != nil {
		return err
	}
	// A busy API server may lose a connection.
	return deploy.Poll(ctx, readyTime, func(ctx context.Context) (reason string, err error) {
		err = client.CoreV1().Nodes().Delete(ctx, n.name, metav1.DeleteOptions{})
		if err != nil && !apierrors.IsNotFound(err) {
			return fmt.Sprintf("delete Node %s of the control plane: %v", n.name, err), nil
		}
		left, err := client.CoreV1().Pods(metav1.NamespaceAll).List(ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=" + n.name})
		if err != nil {
			return fmt.Sprintf("list pods of the control plane: %v", err), nil
		}
		for _, p := range left.Items {
			err := client.CoreV1().Pods(p.Namespace).Delete(ctx, p.Name, *metav1.NewDeleteOptions(0))
			if err != nil && !apierrors.IsNotFound(err) {
				return fmt.Sprintf("delete pod %s of the control plane: %v", p.Name, err), nil
			}
		}
		return "", nil
	})
}

// prepare brings the probe and the images onto a node, and gives its links the topology's
// reverse-path filter.
func prepare(ctx context.Context, n node, c topology.Cluster, binDir string) error {
	if err := runOn(ctx, n, nil, "sh", "-c", filterSources, "sh", strconv.Itoa(c.RPFilter)); err != nil {
		return err
	}
	if err := send(ctx, n, program(filepath.Join(binDir, "probe"), probeOnNode)); err != nil {
		return err
	}
	for _, image := range []struct{ program, name string }{
		{"isthmus", registry + "library/" + deploy.Image},
		{"probe", registry + deploy.ProbeImage},
	} {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := loadImage(n, archive(binDir, image.program), image.name); err != nil {
			return fmt.Errorf("image %s: %w", image.name, err)
		}
	}
	return nil
}

// filterSources gives all links of a node, and those that it will have, the reverse-path
// filter that its argument is. "all" is 0, as in other worlds: the kernel takes the larger
// of the two (ip-sysctl: rp_filter), and the image has 1 there.
const filterSources = `for link in /proc/sys/net/ipv4/conf/*/rp_filter; do echo "$1" >"$link"; done
echo 0 >/proc/sys/net/ipv4/conf/all/rp_filter`

// loadImage does what "kind load image-archive" does, and gives the image the
// name by which pods of all worlds ask for it.
func loadImage(n nodes.Node, file, name string) error {
	has, err := imageName(file)
	if err != nil {
		return err
	}
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := nodeutils.LoadImageArchive(n, f); err != nil {
		return fmt.Errorf("load %s: %w", file, err)
	}
	if has == name {
		return nil
	}
	if err := nodeutils.ReTagImage(n, has, name); err != nil {
		return fmt.Errorf("tag %s: %w", has, err)
	}
	return nil
}

// network gives a node what the profile of other worlds has: the same plug-ins
// with the same configuration, routes to the other nodes' pods, and a rule that
// masquerades what leaves the cluster. Where the topology has none, the router
// of other worlds masquerades; here nobody else could.
func network(ctx context.Context, n node, workers []node, c topology.Cluster, binDir string) error {
	if err := addRoutes(ctx, n, workers); err != nil {
		return err
	}
	how := c.Masquerade
	if how == "" {
		how = topology.MasqueradeNFTables
	}
	for _, own := range n.podCIDRs {
		argv, input := pods.Masquerade(how, own, c.PodCIDR)
		if err := runOn(ctx, n, strings.NewReader(input), argv...); err != nil {
			return err
		}
	}
	// Last: with it the kubelet says that the node is ready.
	conf, err := pods.Conflist(c.CNI, ipamDir, 0, n.podCIDRs)
	if err != nil {
		return err
	}
	return send(ctx, n, text(conflist, string(conf)))
}

// Files of flannel on a node.
const (
	flannelDir        = "/etc/kube-flannel"
	flannelKubeconfig = flannelDir + "/kubeconfig"
	flannelConfig     = flannelDir + "/net-conf.json"
	flannelSubnet     = "/run/flannel/subnet.env"
)

// adminKubeconfig is kubeadm's, on the control plane.
const adminKubeconfig = "/etc/kubernetes/admin.conf"

// flannel gives a node flanneld as a service of systemd, and its plug-in: routes
// and masquerade are flannel's own.
func flannel(ctx context.Context, n node, _ []node, c topology.Cluster, binDir string) error {
	if err := send(ctx, n,
		program(filepath.Join(binDir, "flanneld"), programDir+"/flanneld"), program(filepath.Join(binDir, "cni/flannel"), pluginDir+"/flannel"),
		sent{to: flannelKubeconfig, mode: 0o600, text: n.kubeconfig}, text(flannelConfig, string(pods.FlannelConfig(c.PodCIDR, string(c.KubeProxy)))),
	); err != nil {
		return err
	}
	service := append([]string{"systemd-run", "--unit=flanneld", "--property=Restart=always", "--setenv=NODE_NAME=" + n.name, programDir + "/flanneld"},
		pods.FlannelArguments(flannelKubeconfig, flannelConfig, flannelSubnet)...)
	if err := runOn(ctx, n, nil, service...); err != nil {
		return err
	}
	conf, err := pods.FlannelConflist(flannelSubnet, "/var/lib/cni/flannel", ipamDir)
	if err != nil {
		return err
	}
	return send(ctx, n, text(conflist, string(conf)))
}

// operatorPrograms are what the administrator of a cluster works with.
var operatorPrograms = []string{deploy.ByIsthmusctl, deploy.ByHelm}

// installs tells whether administrators install on a topology's control planes, or
// connect what is not connected from the start.
func installs(t *topology.Topology) bool {
	return t.Install != topology.InstallChart || slices.ContainsFunc(t.Peerings, func(p topology.Peering) bool { return p.Absent })
}

// given are the programs of bin that administrators have on control planes: those
// that scenarios require, too, as far as they were built.
func given(binDir string) ([]string, error) {
	out := slices.Clone(operatorPrograms)
	for _, p := range world.Programs() {
		if p == world.PublicProgram {
			continue // see CannotRun
		}
		switch _, err := os.Stat(filepath.Join(binDir, p)); {
		case err == nil:
			out = append(out, p)
		case !errors.Is(err, fs.ErrNotExist):
			return nil, err
		}
	}
	return out, nil
}

// addRoutes leads to the pods of other nodes by way of those.
func addRoutes(ctx context.Context, n node, workers []node) error {
	for _, w := range workers {
		if w.name == n.name {
			continue
		}
		for _, cidr := range w.podCIDRs {
			if err := runOn(ctx, n, nil, "ip", "route", "replace", cidr.String(), "via", w.addr.String()); err != nil {
				return err
			}
		}
	}
	return nil
}

// runOn runs a command on a node to its end. What it printed is in the error.
func runOn(ctx context.Context, n nodes.Node, stdin io.Reader, argv ...string) error {
	cmd := n.CommandContext(ctx, argv[0], argv[1:]...)
	if stdin != nil {
		cmd.SetStdin(stdin)
	}
	var out bytes.Buffer
	if err := cmd.SetStdout(&out).SetStderr(&out).Run(); err != nil {
		return fmt.Errorf("%s on %s: %w: %s", strings.Join(argv, " "), n, err, strings.TrimSpace(out.String()))
	}
	return nil
}
