// Package pods is the lab's kubelet: it makes a network namespace a node of a
// Kubernetes cluster whose containers are processes of local binaries.
//
// RunNode registers the Node with the node's own credentials, renews its lease
// and runs the pods that the scheduler binds to it: a network namespace wired
// by real CNI plugins, a mount namespace with the image's binary and the
// volumes, a PID namespace, and the securityContext as containerd and runc
// would apply it. Probes, restarts, logs, exec, bound service account tokens,
// events and deletion with a grace period behave as users know them. A real
// kube-proxy runs beside it.
//
// An image is a binary of this machine (Image). There is no registry, no
// resource limit (cgroups are not touched), no seccomp and no AppArmor.
//
// The containers are started through a program of their own (package
// containerinit).
package pods

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/isthmus-net/isthmus/lab/internal/containerinit"
)

// Image is what stands behind the image name of a container.
type Image struct {
	// Binary is the file on this machine; it appears in the container at
	// Path. It should be static; Binds can add what a dynamic one needs.
	Binary string
	// Path is where the binary appears; default /bin/<base name of Binary>.
	Path string
	// Entrypoint is the image's ENTRYPOINT; default {Path}.
	Entrypoint []string
	// Env is the image's ENV, "NAME=value".
	Env []string
	// UID and GID are the image's USER.
	UID, GID uint32
	// Binds are further read-only files and directories: path in the
	// container → path on this machine.
	Binds map[string]string
}

// CNI profiles.
const (
	// CNIBridge is bridge, host-local and portmap, without masquerade, and
	// a route to every other node's podCIDR via that node's address.
	CNIBridge = "bridge"
	// CNIPtP is the same with a link per pod instead of a bridge.
	CNIPtP = "ptp"
	// CNIIPPool is ptp and host-local with an IPAM and rules as Calico has them:
	// addresses of the node's block of a pool, and links of pods that only
	// carry what has the pod's own address.
	CNIIPPool = "ippool"
	// CNIVPC is ptp and host-local with a second interface of the node for its
	// pods, and rules by their addresses, as AWS's VPC CNI has them. No routes
	// lead to other nodes' pods: the network knows the way.
	CNIVPC = "vpc"
	// CNIFlannel is flanneld with its plug-in: VXLAN between the nodes, and
	// its own masquerade.
	CNIFlannel = "flannel"
)

// Who masquerades pods that leave the cluster, where the profile does not.
const (
	// MasqueradeIPTables is what the plug-ins' ipMasq does, but between the
	// pods of a cluster nothing is masqueraded.
	MasqueradeIPTables = "iptables"
	MasqueradeNFTables = "nftables"
	// MasqueradeKindnet is kindnet's: before kube-proxy's, and of everything
	// that is forwarded out of the cluster.
	MasqueradeKindnet = "kindnet"
)

// NodeConfig is everything that RunNode needs. All fields without "default"
// or "optional" are required.
type NodeConfig struct {
	Cluster string // name of the cluster, for the registry and logs
	Name    string // of the Node object
	Addr    netip.Addr
	// NetNS is the node's network namespace, with its address and default
	// route in place; it stays open for as long as RunNode runs.
	NetNS *os.File

	Kubeconfig              []byte // of system:node:Name
	ServingCert, ServingKey []byte // PEM, for port 10250
	ClientCA                []byte // PEM, of the API server's client certificate

	Images map[string]Image // by image name as it stands in a pod
	BinDir string           // holds probe, kube-proxy and cni/
	Dir    string           // state, volumes and logs of this node; created, and emptied of old pods

	CNI        string // profile; default CNIBridge
	Masquerade string // of pods that leave the cluster; empty: none
	MTU        int    // of pods; 0: the plug-ins' default
	// FlannelKubeconfig is for flanneld; required by CNIFlannel.
	FlannelKubeconfig []byte
	// PodLink is the link by which pods' packets leave the node, and Router who
	// takes them there; required by CNIVPC.
	PodLink string
	Router  netip.Addr
	// Blocks are where the pods of each node have their addresses, by the name of
	// the node; required by CNIIPPool, empty otherwise.
	Blocks      map[string]netip.Prefix
	ServiceCIDR netip.Prefix
	ClusterCIDR netip.Prefix // pods of the whole cluster

	KubeProxy string // ModeNFTables, ModeIPTables or ModeIPVS; empty: no kube-proxy
	// KubeProxyKubeconfig is also what the routes to the other nodes are
	// computed with: a kubelet may read no Node but its own.
	KubeProxyKubeconfig []byte

	// Nice is added to the niceness of this process for containers and
	// kube-proxy; commands that are executed in containers have its own.
	Nice int
	// ReadyPeriod is how far apart readiness probes of a container are at least
	// that was ready at the last one. 0: as its spec says.
	ReadyPeriod time.Duration
	// LivenessFactor multiplies the failureThreshold of liveness probes. 0: as the spec
	// says.
	LivenessFactor int32

	Labels   map[string]string // further labels of the Node, optional
	Registry *Registry         // optional
	Logger   *slog.Logger      // optional
	// Init is the command that becomes a container; default the probe
	// program in BinDir.
	Init []string
}

// Complete fills in defaults and reports what is missing.
func (c *NodeConfig) Complete() error {
	var errs []error
	need := func(name string, missing bool) {
		if missing {
			errs = append(errs, fmt.Errorf("node %s/%s: %s is missing", c.Cluster, c.Name, name))
		}
	}
	need("Cluster", c.Cluster == "")
	need("Name", c.Name == "")
	need("Addr", !c.Addr.IsValid())
	need("NetNS", c.NetNS == nil)
	need("Kubeconfig", len(c.Kubeconfig) == 0)
	need("ServingCert", len(c.ServingCert) == 0)
	need("ServingKey", len(c.ServingKey) == 0)
	need("ClientCA", len(c.ClientCA) == 0)
	need("BinDir", c.BinDir == "")
	need("Dir", c.Dir == "")
	need("ServiceCIDR", !c.ServiceCIDR.IsValid())
	need("ClusterCIDR", !c.ClusterCIDR.IsValid())
	need("KubeProxyKubeconfig", len(c.KubeProxyKubeconfig) == 0)
	if c.KubeProxy != "" && c.KubeProxy != ModeNFTables && c.KubeProxy != ModeIPTables && c.KubeProxy != ModeIPVS {
		errs = append(errs, fmt.Errorf("node %s/%s: kube-proxy mode %q: use nftables, iptables or ipvs", c.Cluster, c.Name, c.KubeProxy))
	}
	if c.CNI == "" {
		c.CNI = CNIBridge
	}
	switch c.CNI {
	case CNIBridge, CNIPtP:
	case CNIIPPool:
		need("Blocks", len(c.Blocks) == 0)
	case CNIVPC:
		need("PodLink", c.PodLink == "")
		need("Router", !c.Router.IsValid())
	case CNIFlannel:
		need("FlannelKubeconfig", len(c.FlannelKubeconfig) == 0)
	default:
		errs = append(errs, fmt.Errorf("node %s/%s: CNI profile %q is not known; use %s, %s, %s, %s or %s", c.Cluster, c.Name, c.CNI, CNIBridge, CNIPtP, CNIIPPool, CNIVPC, CNIFlannel))
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if c.Registry == nil {
		c.Registry = NewRegistry()
	}
	if len(c.Init) == 0 {
		c.Init = []string{filepath.Join(c.BinDir, "probe"), containerinit.Argument}
	}
	return errors.Join(errs...)
}

func (i Image) path() string {
	if i.Path != "" {
		return i.Path
	}
	return "/bin/" + strings.TrimSuffix(filepath.Base(i.Binary), ".test")
}

func (i Image) entrypoint() []string {
	if len(i.Entrypoint) > 0 {
		return i.Entrypoint
	}
	return []string{i.path()}
}

// RunNode runs the kubelet and the kube-proxy of one node until ctx ends; then
// it stops the containers, removes their namespaces and returns. The Node
// object stays. Failures that a retry may cure (the API server is away) are
// logged and retried; an error means the node could not be started.
func RunNode(ctx context.Context, cfg NodeConfig) error {
	if err := cfg.Complete(); err != nil {
		return err
	}
	n, err := newNode(cfg)
	if err != nil {
		return fmt.Errorf("node %s/%s: %w", cfg.Cluster, cfg.Name, err)
	}
	return n.run(ctx)
}

// Timings of the kubelet. The lab wants failures to show quickly, and its
// machines stall when they are emulated.
const (
	restartFirst  = 200 * time.Millisecond // first restart; doubles
	restartMax    = 10 * time.Second
	restartForget = 30 * time.Second // running this long resets the backoff
	leaseInterval = 10 * time.Second
	leaseDuration = 3600 // seconds; a stalled VM must not lose its node
	kubeletPort   = 10250
	statusRetry   = 500 * time.Millisecond
	defaultGrace  = 30 * time.Second
)
