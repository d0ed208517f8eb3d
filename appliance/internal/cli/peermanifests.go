package cli

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/internal/invitation"
	"github.com/isthmus-net/isthmus/appliance/internal/kube"
	"github.com/isthmus-net/isthmus/appliance/internal/peer"
)

// Files of a side.
const (
	peeringFile = "peering.yaml"
	keysFile    = "secret.yaml" // after peeringFile, which has the namespace: kubectl applies a directory in this order
)

// manifests is one run of isthmusctl peer manifests.
type manifests struct {
	*program
	ends        [2]endFlags // by peer.Side: the client is local, the server remote
	options     peer.Options
	serviceType string
	port        int32
	portGiven   bool
	followMax   int
	dir         string
}

// endFlags are the flags about one side.
type endFlags struct {
	name                string // server or client
	id                  string
	pod, external       []string
	kubeconfig, context string
	system              string
	follow              []string
}

func (p *program) peerManifestsCommand() *cobra.Command {
	m := &manifests{program: p}
	m.ends[peer.Local].name, m.ends[peer.Remote].name = "client", "server"
	cmd := &cobra.Command{
		Use:   "manifests",
		Short: "Write the objects of a peering to files, for Git",
		Long: `Write the objects of both sides of a peering to files, and the key pairs of the
gateways to files of their own. Applied in both clusters, in any order and at any
time, they are all that the peering takes: what either gateway needs of the other is
in them. That is why the server's address has to be known beforehand: that of a load
balancer, a name of the DNS, or an address of a node.

What a side is called and which networks it has is read from its cluster
(--server-kubeconfig, --server-context), or given by flags. Keys that are in the
directory already are used again. Keep ` + keysFile + ` out of a repository that others can
read, or encrypt it (SOPS, Sealed Secrets, External Secrets).`,
		Example: example(
			"# A port of the server's nodes, and the names in your kubeconfig.",
			"isthmusctl peer manifests --server-context milan --client-context rome \\",
			"  --server-service-type NodePort --server-address 203.0.113.10 --server-port 31840 --out peerings/milan-rome",
			"",
			"# Without access to the clusters.",
			"isthmusctl peer manifests --server-id milan --server-pod-cidr 10.0.0.0/16 --server-external-cidr 10.70.0.0/16 \\",
			"  --client-id rome --client-pod-cidr 10.1.0.0/16 --client-external-cidr 10.70.0.0/16 \\",
			"  --server-address vpn.example.com --server-port 51840 --out peerings/milan-rome",
			"",
			"kubectl --context milan apply --server-side -f peerings/milan-rome/milan",
			"kubectl --context rome apply --server-side -f peerings/milan-rome/rome",
		),
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			m.portGiven = cmd.Flags().Changed("server-port")
			return m.run(cmd.Context())
		},
	}
	f := cmd.Flags()
	for side := range m.ends {
		e := &m.ends[side]
		f.StringVar(&e.id, e.name+"-id", "", "cluster `ID` of the "+e.name)
		f.StringSliceVar(&e.pod, e.name+"-pod-cidr", nil, "pod `CIDR` of the "+e.name+", as it calls it itself; several are separated by commas")
		f.StringSliceVar(&e.external, e.name+"-external-cidr", nil, "external `CIDR` of the "+e.name+" (ipam.externalCIDR of its installation)")
		f.StringVar(&e.kubeconfig, e.name+"-kubeconfig", "", "`file` that says where the cluster of the "+e.name+" is, to read its ID and networks there (default that of --kubeconfig)")
		f.StringVar(&e.context, e.name+"-context", "", "`name` of the context of the "+e.name+" in it")
		f.StringSliceVar(&e.follow, e.name+"-"+peer.FlagFollow, nil, "`range` of networks that the other side may add in the cluster of the "+e.name+" by telling them through the tunnel; several are separated by commas (default none)")
		f.StringVar(&e.system, e.name+"-liqo-namespace", v1beta1.DefaultNamespace, "`namespace` of the installation of the "+e.name)
	}
	o := &m.options
	f.StringVar(&o.Address, "server-address", "", "`address` or name that the client dials")
	f.Int32Var(&m.port, "server-port", peer.DefaultPort, "UDP `port` that the client dials; for NodePort there is no default, since the port is one of the nodes'")
	f.StringVar(&m.serviceType, "server-service-type", string(peer.DefaultServiceType), "`type` of the server's Service: LoadBalancer, NodePort or ClusterIP")
	f.Int32Var(&o.NodePort, "server-node-port", 0, "`port` of the server's nodes, for NodePort (default that of --server-port)")
	f.StringVar(&o.LoadBalancerIP, "server-load-balancer-ip", "", "`address` to ask the load balancer for")
	f.StringVar(&o.Server.Name, "server-template-name", peer.DefaultServerTemplate, "`name` of the server's template")
	f.StringVar(&o.Client.Name, "client-template-name", peer.DefaultClientTemplate, "`name` of the client's template")
	f.IntVar(&o.MTU, "mtu", 0, "MTU of the tunnel, in `bytes`; 0: derived from the network underneath")
	f.IntVar(&m.followMax, peer.FlagFollowMax, 0, fmt.Sprintf("`number` of networks that either side may add (default %d)", v1beta1.DefaultFollowMax))
	f.StringVar(&m.dir, "out", "", "`directory` for the files, one below it for each cluster")
	_ = cmd.MarkFlagRequired("out") // it is there
	return cmd
}

func (m *manifests) run(ctx context.Context) error {
	o := m.options
	o.ServiceType, o.DialPort, o.Port = corev1.ServiceType(m.serviceType), m.port, m.port
	if o.ServiceType == corev1.ServiceTypeNodePort {
		o.Port = peer.DefaultPort
		switch {
		case o.NodePort == 0 && !m.portGiven:
			return errors.New("--server-service-type NodePort: say which port of the nodes the client dials, such as --server-port 31840 (30000 to 32767 by default)")
		case o.NodePort == 0:
			o.NodePort = m.port
		case !m.portGiven:
			o.DialPort = o.NodePort
		}
	}
	if o.Address != "" && !invitation.IsHost(o.Address) {
		return fmt.Errorf("--server-address %q: write an address or a name of the DNS, without a port, such as 203.0.113.10 or vpn.example.com", o.Address)
	}
	version := v1beta1.GroupVersion.String()
	o.Server.APIVersion, o.Server.Kind = version, "WgGatewayServerTemplate"
	o.Client.APIVersion, o.Client.Kind = version, "WgGatewayClientTemplate"
	var ends [2]peer.End
	var keys [2]peer.Keys
	var flags []string
	for side := range m.ends {
		e := &m.ends[side]
		if e.context != "" { // of the kubeconfig that all commands have, where none of its own is named
			e.kubeconfig = cmp.Or(e.kubeconfig, *m.cluster.KubeConfig)
		}
		flags = append(flags, e.name+"-"+peer.FlagFollow)
		o.Follow[side] = peer.Follow{Ranges: e.follow}
	}
	if err := peer.CheckMax(m.followMax, peer.FlagFollowMax, flags, o.Follow[:]...); err != nil {
		return err
	}
	for side, e := range m.ends {
		o.Follow[side] = peer.Follow{Ranges: e.follow, Max: m.followMax}
		err := o.Follow[side].Check(e.name+"-"+peer.FlagFollow, peer.FlagFollowMax)
		if err != nil {
			return err
		}
		if ends[side], err = m.ends[side].end(ctx); err != nil {
			return err
		}
		if keys[side], err = m.keys(ends[side].ID); err != nil {
			return err
		}
	}
	both, err := peer.Write(ends, keys, o)
	if err != nil {
		return peerError(err)
	}
	// All of it is made before any of it is written.
	type file struct {
		name string
		text []byte
		mode fs.FileMode
	}
	var files []file
	for _, side := range both {
		var objects []runtime.Object
		for _, object := range side.Objects {
			objects = append(objects, object)
		}
		peering, err := documents(objects...)
		if err != nil {
			return err
		}
		secret, err := documents(side.Secret)
		if err != nil {
			return err
		}
		dir := filepath.Join(m.dir, side.ID)
		files = append(files, file{filepath.Join(dir, peeringFile), peering, 0o644}, file{filepath.Join(dir, keysFile), secret, 0o600})
	}
	var names []string
	for _, f := range files {
		if err := os.MkdirAll(filepath.Dir(f.name), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(f.name, f.text, f.mode); err != nil {
			return err
		}
		names = append(names, f.name)
	}
	if m.json {
		return m.print(struct {
			Files []string `json:"files"`
		}{names})
	}
	server, dialler := both[peer.Remote].ID, both[peer.Local].ID
	_, err = fmt.Fprintf(m.program.out, `Wrote the peering of %[1]s, the server, and %[2]s:
  %[3]s
Apply them, in any order:
  in %[1]s: kubectl apply --server-side -f %[4]s
  in %[2]s: kubectl apply --server-side -f %[5]s
Then: isthmusctl peer list
`, server, dialler, strings.Join(names, "\n  "), filepath.Join(m.dir, server), filepath.Join(m.dir, dialler))
	return err
}

// end returns what a side is, from its cluster where that is named, otherwise from
// flags.
func (e *endFlags) end(ctx context.Context) (peer.End, error) {
	out := peer.End{ID: e.id, System: e.system}
	if e.kubeconfig != "" || e.context != "" {
		own, err := e.identify(ctx)
		if err != nil {
			return out, err
		}
		if own.Pending != "" {
			return out, fmt.Errorf("the %s, cluster %s: %s has no network yet: wait until its status has one", e.name, own.ID, own.Pending)
		}
		if e.id != "" && e.id != own.ID {
			return out, fmt.Errorf("--%s-id %s: the cluster of --%s-kubeconfig and --%[1]s-context has the ID %[4]s", e.name, e.id, e.name, own.ID)
		}
		out.ID, out.Pod, out.External = own.ID, own.Pod, own.External
		return out, nil
	}
	if e.id == "" {
		return out, fmt.Errorf("which cluster is the %s: name it by --%[1]s-context or --%[1]s-kubeconfig, or give --%[1]s-id, --%[1]s-pod-cidr and --%[1]s-external-cidr", e.name)
	}
	if err := invitation.CheckClusterID(e.id); err != nil {
		return out, fmt.Errorf("--%s-id %w", e.name, err)
	}
	for _, list := range []struct {
		flag  string
		texts []string
		to    *[]v1beta1.CIDR
	}{{"pod-cidr", e.pod, &out.Pod}, {"external-cidr", e.external, &out.External}} {
		if len(list.texts) == 0 {
			return out, fmt.Errorf("--%s-%s is missing: isthmusctl reads it from the cluster with --%[1]s-context or --%[1]s-kubeconfig", e.name, list.flag)
		}
		for _, text := range list.texts {
			p, err := netip.ParsePrefix(text)
			if err != nil || p != p.Masked() {
				return out, fmt.Errorf("--%s-%s %q is not a network: write one such as 10.0.0.0/16", e.name, list.flag, text)
			}
			*list.to = append(*list.to, v1beta1.CIDR(text))
		}
	}
	return out, nil
}

// identify reads what a side is from its cluster.
func (e *endFlags) identify(ctx context.Context) (peer.Identity, error) {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = e.kubeconfig
	config, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, &clientcmd.ConfigOverrides{CurrentContext: e.context}).ClientConfig()
	if err != nil {
		return peer.Identity{}, fmt.Errorf("the %s: %w: name its cluster by --%[1]s-kubeconfig or --%[1]s-context", e.name, err)
	}
	c := peer.Cluster{Name: fmt.Sprintf("the %s at %s", e.name, config.Host), System: e.system, SystemFlag: "--" + e.name + "-liqo-namespace", Kubectl: "kubectl", Isthmusctl: "isthmusctl"}
	addFlags(&c, e.kubeconfig, e.context)
	if c.Client, err = client.New(config, client.Options{Scheme: kube.Scheme()}); err != nil {
		return peer.Identity{}, fmt.Errorf("%s: %w", c.Name, err)
	}
	return peer.Identify(ctx, c, peer.Template{})
}

// keys returns the key pair of a side: that of its file, or a new one.
func (m *manifests) keys(id string) (peer.Keys, error) {
	name := filepath.Join(m.dir, id, keysFile)
	text, err := os.ReadFile(name)
	if errors.Is(err, fs.ErrNotExist) {
		return peer.NewKeys(rand.Reader)
	}
	if err != nil {
		return peer.Keys{}, err
	}
	var s corev1.Secret
	if err := yaml.UnmarshalStrict(text, &s); err != nil {
		return peer.Keys{}, fmt.Errorf("%s is there and is no Secret that can be read; move it away to have new keys made: %w", name, err)
	}
	k, err := peer.KeysOf(s.Data[v1beta1.PrivateKeyField])
	if err != nil {
		return peer.Keys{}, fmt.Errorf("%s is there and has no %s that can be used; move it away to have new keys made: %w", name, v1beta1.PrivateKeyField, err)
	}
	return k, nil
}

// documents are objects as YAML, without what only API servers fill in.
func documents(objects ...runtime.Object) ([]byte, error) {
	var out []byte
	for i, o := range objects {
		content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(o)
		if err != nil {
			return nil, err
		}
		delete(content, "status")
		if m, ok := content["metadata"].(map[string]any); ok {
			delete(m, "creationTimestamp")
		}
		text, err := yaml.Marshal(content)
		if err != nil {
			return nil, err
		}
		if i > 0 {
			out = append(out, "---\n"...)
		}
		out = append(out, text...)
	}
	return out, nil
}
