package cli

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/client-go/discovery"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/internal/kube"
	"github.com/isthmus-net/isthmus/appliance/internal/peer"
)

// network is one run of a command about two clusters. Its flags are those of the
// public system's CLI.
type network struct {
	*program
	clusters    [2]*genericclioptions.ConfigFlags
	namespaces  [2]string
	system      [2]string
	options     peer.Options
	serviceType string
	serverType  string
	clientType  string
	followMax   int
	skipConfirm bool
}

func (p *program) networkCommand() *cobra.Command {
	n := &network{program: p}
	cmd := &cobra.Command{
		Use:   "network",
		Short: "Connect two clusters, and disconnect them",
		Long: `Connect the cluster of --kubeconfig and --context with the one of
--remote-kubeconfig and --remote-context, and disconnect them.

A peering is a few objects on each side, with the names and labels that liqoctl
gives them, so that either tool goes on where the other has stopped. What is there
already is taken as it is. Where it contradicts what you ask for, nothing is
changed, and the object and its field are named. A run that was interrupted is
made good by the next one.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	n.pairFlags(cmd.PersistentFlags())
	cmd.AddCommand(n.initCommand(), n.connectCommand(), n.disconnectCommand(), n.resetCommand())
	return cmd
}

// pairFlags adds the flags that say which two clusters, and those that all
// commands about them have.
func (n *network) pairFlags(f *pflag.FlagSet) {
	n.clusters[peer.Local] = n.cluster
	remote := genericclioptions.NewConfigFlags(true)
	remote.WrapConfigFn = n.cluster.WrapConfigFn
	n.clusters[peer.Remote] = remote
	for side, prefix := range []string{"", "remote-"} {
		c := n.clusters[side]
		whose := "local"
		if prefix != "" {
			whose = "remote"
			f.StringVar(c.KubeConfig, prefix+"kubeconfig", "", "`file` that says where the remote cluster is (default that of the local one)")
			f.StringVar(c.Context, prefix+"context", "", "`name` of the context of the remote cluster in it (default its current one)")
		}
		f.StringVar(c.ClusterName, prefix+"cluster", "", "`name` of the "+whose+" cluster in its kubeconfig, in place of the context's")
		f.StringVar(c.AuthInfoName, prefix+"user", "", "`name` of the user of the "+whose+" cluster in its kubeconfig, in place of the context's")
		short := ""
		if prefix == "" {
			short = "n"
		}
		f.StringVarP(&n.namespaces[side], prefix+"namespace", short, "", "`namespace` of the peering's objects in the "+whose+" cluster (default liqo-tenant-PEER)")
		f.StringVar(&n.system[side], prefix+"liqo-namespace", v1beta1.DefaultNamespace, "`namespace` of the installation in the "+whose+" cluster")
	}
	f.DurationVar(&n.options.Timeout, "timeout", peer.DefaultTimeout, "longest `time` that all of it may take")
	f.BoolVar(&n.options.Wait, "wait", false, "wait until the gateways have heard from each other, or are gone")
	f.BoolVar(&n.options.SkipValidation, "skip-validation", false, "do not look whether the templates of gateways are there")
	f.BoolVar(&n.skipConfirm, "skip-confirm", false, "do not ask before something is deleted; without a terminal nobody is asked")
	f.StringToStringVar(&n.options.Labels, "global-labels", nil, "labels (`key=value`) of all objects that are made")
	f.StringToStringVar(&n.options.Annotations, "global-annotations", nil, "annotations (`key=value`) of all objects that are made")
}

func (n *network) initCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "init",
		Short: "Exchange the networks of two clusters, without gateways",
		Long: `Make the tenant namespaces and the Configurations, by which each of the two
clusters learns the other's networks, and wait until both know by which networks
they reach each other. "isthmusctl network connect" does that as well.`,
		Example: example("isthmusctl network init --context milan --remote-context rome"),
		Args:    cobra.NoArgs,
		RunE:    n.runs(peer.Init),
	}
	n.atomicFlag(cmd)
	return cmd
}

func (n *network) connectCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "connect",
		Short: "Connect two clusters",
		Long: `Connect two clusters: exchange their networks (Configurations), make a
GatewayServer in the remote cluster and a GatewayClient in the local one, which
dials it, and give each gateway the public key of the other. Where one of the
gateways is there already, it says which cluster is the server.`,
		Example: example(
			"isthmusctl network connect --context milan --remote-context rome --wait",
			"",
			"# No load balancer: the server is reached at a port of its nodes.",
			"isthmusctl network connect --kubeconfig milan.yaml --remote-kubeconfig rome.yaml --gw-server-service-type NodePort --wait",
			"",
			"# Or not at all.",
			"isthmusctl network connect --remote-context rome --wait --timeout 1m --atomic",
		),
		Args: cobra.NoArgs,
		RunE: n.runs(peer.Connect),
	}
	f, o := cmd.Flags(), &n.options
	f.StringVar(&n.serverType, "gw-server-type", peer.DefaultServerResource, "`group/version/resource` of the server's template")
	f.StringVar(&o.Server.Name, peer.FlagServerTemplate, peer.DefaultServerTemplate, "`name` of the server's template")
	f.StringVar(&o.Server.Namespace, peer.FlagServerTemplateNamespace, "", "`namespace` of the server's template (default that of the installation)")
	f.StringVar(&n.serviceType, peer.FlagServiceType, string(peer.DefaultServiceType), "`type` of the server's Service: LoadBalancer, NodePort or ClusterIP")
	f.Int32Var(&o.Port, peer.FlagServicePort, peer.DefaultPort, "`port` of the server's Service")
	f.Int32Var(&o.NodePort, peer.FlagNodePort, 0, "`port` of the nodes for it; 0: one is chosen")
	f.StringVar(&o.LoadBalancerIP, peer.FlagLoadBalancerIP, "", "`address` to ask the load balancer for")
	f.StringVar(&n.clientType, "gw-client-type", peer.DefaultClientResource, "`group/version/resource` of the client's template")
	f.StringVar(&o.Client.Name, peer.FlagClientTemplate, peer.DefaultClientTemplate, "`name` of the client's template")
	f.StringVar(&o.Client.Namespace, peer.FlagClientTemplateNamespace, "", "`namespace` of the client's template (default that of the installation)")
	f.StringVar(&o.Address, peer.FlagClientAddress, "", "`address` that the client dials, in place of the one that the server names")
	f.Int32Var(&o.DialPort, peer.FlagClientPort, 0, "`port` that the client dials, in place of the one that the server names")
	f.IntVar(&o.MTU, peer.FlagMTU, peer.DefaultMTU, "MTU of the tunnel, in `bytes`; 0: derived from the network underneath")
	f.BoolVar(&o.KeepKeys, "disable-sharing-keys", false, "do not give the gateways each other's public key")
	n.followFlags(f)
	n.atomicFlag(cmd)
	return cmd
}

// followFlags say what either side lets the other one add to its networks.
func (n *network) followFlags(f *pflag.FlagSet) {
	follow := &n.options.Follow
	f.StringSliceVar(&follow[peer.Local].Ranges, peer.FlagFollow, nil, "`range` of networks that the remote cluster may add by telling them through the tunnel; several are separated by commas (default none)")
	f.StringSliceVar(&follow[peer.Remote].Ranges, peer.FlagRemoteFollow, nil, "`range` of networks that the local cluster may add in the remote one (default none)")
	f.IntVar(&n.followMax, peer.FlagFollowMax, 0, fmt.Sprintf("`number` of networks that either may add (default %d)", v1beta1.DefaultFollowMax))
}

func (n *network) atomicFlag(cmd *cobra.Command) {
	cmd.Flags().BoolVar(&n.options.Atomic, "atomic", false, "when it can't be done, take back what this run has made, and nothing else")
}

func (n *network) disconnectCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "disconnect",
		Short: "Disconnect two clusters, which keep each other's networks",
		Long: `Delete the gateways of a peering and their public keys on both sides. The
Configurations stay, and with them the networks by which the clusters know each
other, until "isthmusctl network reset".`,
		Example: example("isthmusctl network disconnect --context milan --remote-context rome --wait"),
		Args:    cobra.NoArgs,
		RunE:    n.runs(peer.Disconnect),
	}
}

func (n *network) resetCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "reset",
		Short: "Disconnect two clusters, which forget each other",
		Long: `Delete the gateways of a peering, their public keys, the Configurations and the
tenant namespaces on both sides. A namespace in which there is anything else stays,
and it is said what that is.`,
		Example: example("isthmusctl network reset --context milan --remote-context rome --wait"),
		Args:    cobra.NoArgs,
		RunE:    n.runs(peer.Reset),
	}
}

// runs returns what a command does.
func (n *network) runs(action peer.Action) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, _ []string) error {
		n.options.Given = map[string]bool{}
		cmd.Flags().Visit(func(f *pflag.Flag) { n.options.Given[f.Name] = true })
		return n.run(cmd.Context(), action)
	}
}

func (n *network) run(ctx context.Context, action peer.Action) error {
	if n.options.Timeout <= 0 {
		return fmt.Errorf("--timeout %v: write a time that is longer than nothing, such as %v", n.options.Timeout, peer.DefaultTimeout)
	}
	n.options.ServiceType = corev1.ServiceType(n.serviceType)
	if action == peer.Connect {
		if err := peerError(asRefused(n.options.Check())); err != nil {
			return err
		}
		flags := []string{peer.FlagFollow, peer.FlagRemoteFollow}
		if err := peer.CheckMax(n.followMax, peer.FlagFollowMax, flags, n.options.Follow[:]...); err != nil {
			return err
		}
		for side, flag := range flags {
			n.options.Follow[side].Max = n.followMax
			if err := n.options.Follow[side].Check(flag, peer.FlagFollowMax); err != nil {
				return err
			}
		}
	}
	cfg := peer.Config{Action: action, Options: n.options}
	var discoveries [2]discovery.DiscoveryInterface
	for side := range n.clusters {
		var err error
		if cfg.Clusters[side], discoveries[side], err = n.reach(peer.Side(side)); err != nil {
			return err
		}
	}
	if action == peer.Connect {
		var err error
		if cfg.Options.Server, err = n.template(cfg.Options.Server, "gw-server-type", n.serverType, peer.DefaultServerResource, "WgGatewayServerTemplate", cfg.Clusters[peer.Remote]); err != nil {
			return err
		}
		if cfg.Options.Client, err = n.template(cfg.Options.Client, "gw-client-type", n.clientType, peer.DefaultClientResource, "WgGatewayClientTemplate", cfg.Clusters[peer.Local]); err != nil {
			return err
		}
	}
	cfg.Kinds = func(side peer.Side) ([]schema.GroupVersionKind, error) {
		lists, err := discoveries[side].ServerPreferredNamespacedResources()
		if discovery.IsGroupDiscoveryFailedError(err) {
			err = nil // of an aggregated API server that is away
		}
		return peer.NamespacedKinds(lists), err
	}
	if (action == peer.Disconnect || action == peer.Reset) && !n.confirmed(ctx, n.skipConfirm, question(action, cfg.Clusters)) {
		return errors.New("nothing was changed")
	}
	out := newTicker(n.err)
	cfg.Say, cfg.Waiting = out.say, out.waiting
	result, err := peer.Run(ctx, cfg)
	out.end()
	if err != nil {
		return &networkError{peerError(err), result}
	}
	return n.tell(result)
}

// reach returns a cluster of the flags. It has not been asked anything yet.
func (n *network) reach(side peer.Side) (peer.Cluster, discovery.DiscoveryInterface, error) {
	flags, prefix := n.clusters[side], ""
	if side == peer.Remote {
		prefix = "remote-"
		if *flags.KubeConfig == "" {
			*flags.KubeConfig = *n.clusters[peer.Local].KubeConfig
		}
	}
	config, err := flags.ToRESTConfig()
	if err != nil {
		return peer.Cluster{}, nil, fmt.Errorf("which %s cluster: %w: name one by --%skubeconfig or --%scontext", sideName(side), err, prefix, prefix)
	}
	c := peer.Cluster{System: n.system[side], SystemFlag: "--" + prefix + "liqo-namespace", Namespace: n.namespaces[side], Kubectl: "kubectl", Isthmusctl: "isthmusctl"}
	addFlags(&c, *flags.KubeConfig, *flags.Context)
	for _, f := range []struct{ name, value string }{{"cluster", *flags.ClusterName}, {"user", *flags.AuthInfoName}} {
		if f.value != "" {
			c.Kubectl += " --" + f.name + " " + f.value
		}
	}
	c.Name = fmt.Sprintf("%s cluster at %s", sideName(side), config.Host)
	if c.Client, err = client.New(config, client.Options{Scheme: kube.Scheme()}); err != nil {
		return c, nil, fmt.Errorf("%s: %w", c.Name, err)
	}
	d, err := discovery.NewDiscoveryClientForConfig(config)
	return c, d, err
}

// addFlags adds the flags that lead kubectl and isthmusctl to a cluster to their names
// in messages.
func addFlags(c *peer.Cluster, kubeconfig, context string) {
	for _, f := range []struct{ name, value string }{{"kubeconfig", kubeconfig}, {"context", context}} {
		if f.value != "" {
			c.Kubectl += " --" + f.name + " " + f.value
			c.Isthmusctl += " --" + f.name + " " + f.value
		}
	}
}

func sideName(s peer.Side) string {
	if s == peer.Remote {
		return "remote"
	}
	return "local"
}

// template fills in the kind of a template, which for the default nobody need be
// asked.
func (n *network) template(t peer.Template, flag, resource, known, kind string, c peer.Cluster) (peer.Template, error) {
	parts := strings.Split(resource, "/")
	if len(parts) != 3 || slices.Contains(parts, "") {
		return t, fmt.Errorf("--%s %q: write group/version/resource, such as %s", flag, resource, known)
	}
	t.APIVersion, t.Kind = parts[0]+"/"+parts[1], kind
	if resource == known {
		return t, nil
	}
	gvk, err := c.Client.RESTMapper().KindFor(schema.GroupVersionResource{Group: parts[0], Version: parts[1], Resource: parts[2]})
	if err != nil {
		return t, fmt.Errorf("--%s %s: %s: %w: see %s api-resources", flag, resource, c.Name, err, c.Kubectl)
	}
	t.Kind = gvk.Kind
	return t, nil
}

// question asks for what is about to be deleted.
func question(action peer.Action, clusters [2]peer.Cluster) string {
	local, remote := clusters[peer.Local].Name, clusters[peer.Remote].Name
	if action == peer.Disconnect {
		return fmt.Sprintf("Delete the gateways that connect the %s and the %s?", local, remote)
	}
	return fmt.Sprintf("Delete the peering of the %s and the %s, with its gateways, keys, networks and tenant namespaces?", local, remote)
}

func asRefused(problems []peer.Problem) error {
	if len(problems) == 0 {
		return nil
	}
	return &peer.RefusedError{Problems: problems}
}

// peerError makes problems readable by programs, as those of an installation are.
func peerError(err error) error {
	var refused *peer.RefusedError
	if !errors.As(err, &refused) {
		return err
	}
	out := &RefusedError{text: err.Error()}
	for _, p := range refused.Problems {
		out.Problems = append(out.Problems, Problem(p))
	}
	return out
}

// A networkError is an error after something may have been done.
type networkError struct {
	err    error
	result peer.Result
}

// Error is that of the run.
func (e *networkError) Error() string { return e.err.Error() }

// Unwrap returns it.
func (e *networkError) Unwrap() error { return e.err }

// tell prints the result.
func (n *network) tell(r peer.Result) error {
	if n.json {
		return n.print(r)
	}
	local, remote := r.Clusters[peer.Local], r.Clusters[peer.Remote]
	took := time.Duration(r.Seconds * float64(time.Second)).Round(100 * time.Millisecond)
	text := ""
	switch {
	case r.Changed == 0:
		text = map[peer.Action]string{
			peer.Init: "%s and %s know each other's networks already: nothing to do.", peer.Connect: "%s and %s are connected already: nothing to do.",
			peer.Disconnect: "%s and %s have no gateways for each other: nothing to do.", peer.Reset: "%s and %s do not know each other: nothing to do.",
		}[r.Action]
		if r.Action == peer.Connect && !r.Connected {
			text = "All objects of the peering of %s and %s are there: nothing to do. The gateways do not hear each other (yet): --wait waits for that, and says what to look at."
		}
		text = fmt.Sprintf(text, local.ID, remote.ID)
	case r.Action == peer.Init:
		text = fmt.Sprintf("%s and %s know each other's networks: %d objects in %v. Connect them by isthmusctl network connect.", local.ID, remote.ID, r.Changed, took)
	case r.Action == peer.Connect && r.Connected:
		text = fmt.Sprintf("%s and %s are connected: %d objects in %v.", local.ID, remote.ID, r.Changed, took)
	case r.Action == peer.Connect:
		text = fmt.Sprintf("All objects of the peering of %s and %s are there: %d in %v. The gateways have yet to hear each other: --wait waits for that.", local.ID, remote.ID, r.Changed, took)
	case r.Action == peer.Disconnect:
		text = fmt.Sprintf("%s and %s are disconnected: %d objects deleted in %v. They keep each other's networks, until isthmusctl network reset.", local.ID, remote.ID, r.Changed, took)
	default:
		text = fmt.Sprintf("%s and %s have forgotten each other: %d objects deleted in %v.", local.ID, remote.ID, r.Changed, took)
	}
	_, err := fmt.Fprintln(n.out, text)
	return err
}
