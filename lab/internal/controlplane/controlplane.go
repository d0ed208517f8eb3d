// Package controlplane runs a real Kubernetes control plane as processes of
// this machine: etcd, kube-apiserver, kube-controller-manager and
// kube-scheduler out of one binary (lab/kubernetes), with real RBAC, the Node
// authorizer and the default admission plugins.
//
// It makes the keys, starts the four programs in a network namespace, waits
// until they work, and stops what it started; nothing else. It neither
// creates namespaces nor addresses, and it runs no nodes (see package pods).
//
// The children belong to the PID namespace of the caller. The lab's
// supervisor is PID 1 of one, so the kernel ends them with it; Close ends
// them in order.
package controlplane

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"sync"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// Names of the components, as StopComponent and StartComponent take them.
const (
	Etcd              = "etcd"
	APIServer         = "kube-apiserver"
	ControllerManager = "kube-controller-manager"
	Scheduler         = "kube-scheduler"
)

// Components returns the names of the components in the order in which they
// are started.
func Components() []string { return []string{Etcd, APIServer, ControllerManager, Scheduler} }

// Node is a machine that will join the cluster: it gets a client certificate
// as system:node:NAME and a serving certificate for its kubelet port.
type Node struct {
	Name string
	Addr netip.Addr
}

// Ports are the TCP ports of the components. API server: on Config.Address;
// all others: on loopback.
type Ports struct {
	APIServer, EtcdClient, EtcdPeer, ControllerManager, Scheduler uint16
}

// DefaultPorts returns the usual ports, for a control plane that has a network
// namespace of its own.
func DefaultPorts() Ports {
	return Ports{APIServer: 6443, EtcdClient: 2379, EtcdPeer: 2380, ControllerManager: 10257, Scheduler: 10259}
}

// Config is what a control plane needs. Name, Dir, Binary, Address,
// ServiceCIDR and PodCIDR are required.
type Config struct {
	Name        string     // of the cluster; appears in errors and kubeconfigs
	Dir         string     // data, keys and logs; created when absent
	Binary      string     // bin/kubernetes
	Address     netip.Addr // on which the API server listens and which it advertises
	Ports       Ports      // default DefaultPorts
	ServiceCIDR netip.Prefix
	PodCIDR     netip.Prefix // the cluster's; each node gets a /24, or a /64 of IPv6
	Nodes       []Node
	// NodeGracePeriod is how long a node may be silent before it is not ready;
	// default 10 minutes, for nodes that are objects without a kubelet.
	NodeGracePeriod time.Duration

	// CRDs are CustomResourceDefinitions as YAML or JSON, one in each, that
	// are there and served when Start returns.
	CRDs [][]byte
	// CacheDir has copies of the data of control planes that have just come
	// up. Start starts on the one for this configuration, or makes it when
	// there is none. Empty: neither.
	CacheDir string
	// EtcdData is a directory that SaveEtcd made. Start starts on a copy of
	// it, with all that is in it, and neither adds CRDs nor uses CacheDir.
	EtcdData string
	// Keys is a directory that SaveKeys made, of a control plane of the same
	// name, address and nodes. Start takes its keys; else it makes new ones.
	Keys string

	// NetNS is the network namespace of the processes and of all connections
	// this package makes; nil means the caller's own.
	NetNS *os.File
	// Serving is called when the API server answers, while the controller
	// manager and the scheduler start. Optional.
	Serving func()
	// Progress is told what is being waited for. Optional.
	Progress func(format string, args ...any)
	Logger   *slog.Logger  // optional
	Timeout  time.Duration // until everything works; default 5 min
}

func (c *Config) complete() error {
	var errs []error
	for _, f := range []struct{ name, value string }{{"Name", c.Name}, {"Dir", c.Dir}, {"Binary", c.Binary}} {
		if f.value == "" {
			errs = append(errs, fmt.Errorf("control plane: %s is empty", f.name))
		}
	}
	if !c.Address.IsValid() {
		errs = append(errs, fmt.Errorf("control plane %s: Address is not set", c.Name))
	}
	for _, p := range []struct {
		name string
		cidr netip.Prefix
	}{{"ServiceCIDR", c.ServiceCIDR}, {"PodCIDR", c.PodCIDR}} {
		if !p.cidr.IsValid() || p.cidr.Masked() != p.cidr {
			instead := "10.0.0.0/16"
			if p.cidr.IsValid() {
				instead = p.cidr.Masked().String()
			}
			errs = append(errs, fmt.Errorf("control plane %s: %s %q is not the address of a network, such as %s", c.Name, p.name, p.cidr, instead))
		}
	}
	if c.Ports == (Ports{}) {
		c.Ports = DefaultPorts()
	}
	if c.Progress == nil {
		c.Progress = func(string, ...any) {}
	}
	if c.Serving == nil {
		c.Serving = func() {}
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if c.Timeout == 0 {
		c.Timeout = 5 * time.Minute
	}
	if c.NodeGracePeriod == 0 {
		c.NodeGracePeriod = 10 * time.Minute
	}
	return errors.Join(errs...)
}

// ControlPlane is a running control plane.
type ControlPlane struct {
	cfg    Config
	pki    *pki
	client kubernetes.Interface

	warm bool   // it started on a copy
	cold string // why not

	mu    sync.Mutex
	procs map[string]*process
	took  map[string]time.Duration
}

// Warm tells whether the control plane started on a copy from Config.CacheDir,
// or else why it did not; "" when there is no such directory.
func (c *ControlPlane) Warm() (warm bool, why string) { return c.warm, c.cold }

// Took returns how long each component, and the step CRDs, took to be ready
// when it was started last.
func (c *ControlPlane) Took() map[string]time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return maps.Clone(c.took)
}

// NodeCredentials are what the kubelet and the kube-proxy of one node need.
type NodeCredentials struct {
	Node                string
	Kubeconfig          []byte // system:node:NAME, group system:nodes
	KubeProxyKubeconfig []byte // system:kube-proxy
	FlannelKubeconfig   []byte // FlannelUser
	ServingCert         []byte // PEM, for the kubelet's port
	ServingKey          []byte // PEM
	ClientCA            []byte // PEM, signs the API server's client certificate
}

// FlannelUser is who flanneld is; it may do nothing until somebody grants it
// what flannel's manifest does.
const FlannelUser = "flannel"

// Address returns host:port of the API server.
func (c *ControlPlane) Address() netip.AddrPort {
	return netip.AddrPortFrom(c.cfg.Address, c.cfg.Ports.APIServer)
}

// LogFile returns the path of the log of a component.
func (c *ControlPlane) LogFile(component string) string { return c.cfg.logFile(component) }

// RESTConfig returns the administrator's access, with a dialer that enters the
// control plane's network namespace.
func (c *ControlPlane) RESTConfig() *rest.Config {
	cfg := c.pki.admin(c.Address())
	cfg.Dial = c.cfg.dial
	return cfg
}

// Client returns an administrator's client.
func (c *ControlPlane) Client() kubernetes.Interface { return c.client }

// Kubeconfig returns the kubeconfig of a user: "admin" or the name of a
// component.
func (c *ControlPlane) Kubeconfig(user string) ([]byte, error) {
	k, ok := c.pki.kubeconfigs[user]
	if !ok {
		return nil, fmt.Errorf("control plane %s: there is no kubeconfig for %q", c.cfg.Name, user)
	}
	return k, nil
}

// NodeCredentials returns the credentials of a node of Config.Nodes.
func (c *ControlPlane) NodeCredentials(node string) (NodeCredentials, error) {
	n, ok := c.pki.nodes[node]
	if !ok {
		return NodeCredentials{}, fmt.Errorf("control plane %s: node %q was not in Config.Nodes", c.cfg.Name, node)
	}
	return n, nil
}

// Start makes keys, starts the components and returns when the API answers,
// the CRDs are served, the controller manager works (the service account
// default/default exists, and the ConfigMap with the cluster's certificate
// authority beside it) and the scheduler is healthy.
func Start(ctx context.Context, cfg Config) (*ControlPlane, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	return start(ctx, cfg)
}
