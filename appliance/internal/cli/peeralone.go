package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/internal/invitation"
	"github.com/isthmus-net/isthmus/appliance/internal/kube"
	"github.com/isthmus-net/isthmus/appliance/internal/peer"
)

// alone is one run of a command about one side of a peering.
type alone struct {
	*program
	options     peer.Options
	serviceType string
	lifetime    time.Duration
	list        bool
	revoke      bool
	skipConfirm bool
	now         func() time.Time // by the clock of the cluster
}

func (p *program) peerRemoveCommand() *cobra.Command {
	a := &alone{program: p}
	cmd := &cobra.Command{
		Use:   "remove ID",
		Short: "Remove this cluster's side of a peering",
		Long: `Delete the gateway of the peering with the cluster ID, its public key, the
Configuration, an invitation and the tenant namespace, in this cluster. The other
side stays as it is, and is of no use then: remove it there as well. A namespace in which
there is anything else stays, and it is said what that is.`,
		Example: example("isthmusctl peer remove rome", "isthmusctl peer remove rome --wait --json"),
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := a.mayDelete(cmd.Context(), args[0], "Delete this cluster's side of the peering with %s, with its gateway, keys, networks and tenant namespace?"); err != nil {
				return err
			}
			result, err := a.run(cmd.Context(), peer.Remove, args[0])
			if err != nil || a.json {
				return a.end(result, err)
			}
			took := time.Duration(result.Seconds * float64(time.Second)).Round(100 * time.Millisecond)
			if result.Changed == 0 {
				_, err = fmt.Fprintf(a.out, "This cluster has no peering with %s: nothing to do.\n", args[0])
			} else {
				_, err = fmt.Fprintf(a.out, "This cluster has forgotten %s: %d objects deleted in %v. The other side stays until it is removed there.\n", args[0], result.Changed, took)
			}
			return err
		},
	}
	a.flags(cmd.Flags())
	a.confirmFlag(cmd.Flags())
	return cmd
}

// confirmFlag adds the flag of commands that delete something.
func (a *alone) confirmFlag(f *pflag.FlagSet) {
	f.BoolVar(&a.skipConfirm, "skip-confirm", false, "do not ask before something is deleted; without a terminal nobody is asked")
}

// mayDelete asks whether to delete something of the peer id, which question has a place for.
func (a *alone) mayDelete(ctx context.Context, id, question string) error {
	if err := invitation.CheckClusterID(id); err != nil {
		return err
	}
	if !a.confirmed(ctx, a.skipConfirm, fmt.Sprintf(question, id)) {
		return errors.New("nothing was changed")
	}
	return nil
}

// flags adds those of all commands about one side.
func (a *alone) flags(f *pflag.FlagSet) {
	f.DurationVar(&a.options.Timeout, "timeout", peer.DefaultTimeout, "longest `time` that all of it may take")
	f.BoolVar(&a.options.Wait, "wait", false, "wait until the gateways have heard from each other, or are gone")
}

// followFlags add those that say what the peer may add to its networks.
func (a *alone) followFlags(f *pflag.FlagSet) {
	follow := &a.options.Follow[peer.Local]
	f.StringSliceVar(&follow.Ranges, peer.FlagFollow, nil, "`range` of networks that the peer may add by telling them through the tunnel; several are separated by commas (default none)")
	f.IntVar(&follow.Max, peer.FlagFollowMax, 0, fmt.Sprintf("`number` of networks that it may add (default %d)", v1beta1.DefaultFollowMax))
}

// checkFollow says what is wrong with what was given by them.
func (a *alone) checkFollow() error {
	follow := a.options.Follow[peer.Local]
	return cmp.Or(peer.CheckMax(follow.Max, peer.FlagFollowMax, []string{peer.FlagFollow}, follow), follow.Check(peer.FlagFollow, peer.FlagFollowMax))
}

// config returns what a run about one side needs.
func (a *alone) config(ctx context.Context, action peer.Action, id string) (peer.Config, error) {
	o := a.options
	if err := invitation.CheckClusterID(id); err != nil {
		return peer.Config{}, err
	}
	if o.Timeout <= 0 {
		return peer.Config{}, fmt.Errorf("--timeout %v: write a time that is longer than nothing, such as %v", o.Timeout, peer.DefaultTimeout)
	}
	o.Server.APIVersion, o.Server.Kind = v1beta1.GroupVersion.String(), "WgGatewayServerTemplate"
	o.Client.APIVersion, o.Client.Kind = v1beta1.GroupVersion.String(), "WgGatewayClientTemplate"
	cfg := peer.Config{Action: action, Peer: id}
	config, err := a.cluster.ToRESTConfig()
	if err != nil {
		return cfg, fmt.Errorf("which cluster: %w: name one by --kubeconfig or --context", err)
	}
	if a.now == nil {
		a.now = clock(ctx, config)
	}
	o.Now = a.now
	c := peer.Cluster{Name: "cluster at " + config.Host, System: *a.cluster.Namespace, SystemFlag: "--namespace", Kubectl: "kubectl", Isthmusctl: "isthmusctl"}
	addFlags(&c, *a.cluster.KubeConfig, *a.cluster.Context)
	if c.System != v1beta1.DefaultNamespace {
		c.Isthmusctl += " --namespace " + c.System
	}
	if c.Client, err = client.New(config, client.Options{Scheme: kube.Scheme()}); err != nil {
		return cfg, fmt.Errorf("%s: %w", c.Name, err)
	}
	cfg.Clusters[peer.Local], cfg.Options = c, o
	d, err := discovery.NewDiscoveryClientForConfig(config)
	if err != nil {
		return cfg, err
	}
	cfg.Kinds = func(peer.Side) ([]schema.GroupVersionKind, error) {
		lists, err := d.ServerPreferredNamespacedResources()
		if discovery.IsGroupDiscoveryFailedError(err) {
			err = nil // of an aggregated API server that is away
		}
		return peer.NamespacedKinds(lists), err
	}
	return cfg, nil
}

// run does what the action says, and tells how far it is.
func (a *alone) run(ctx context.Context, action peer.Action, id string) (peer.Result, error) {
	cfg, err := a.config(ctx, action, id)
	if err != nil {
		return peer.Result{}, err
	}
	out := newTicker(a.err)
	cfg.Say, cfg.Waiting = out.say, out.waiting
	result, err := peer.Run(ctx, cfg)
	out.end()
	if err != nil {
		return result, &networkError{peerError(err), result}
	}
	return result, nil
}

// end returns an error, or prints the result as JSON.
func (a *alone) end(result peer.Result, err error) error {
	if err != nil || !a.json {
		return err
	}
	return a.print(result)
}
