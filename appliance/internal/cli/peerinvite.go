package cli

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
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
	return cmd
}

func (p *program) peerInviteCommand() *cobra.Command {
	a := &alone{program: p}
	cmd := &cobra.Command{
		Use:   "invite ID",
		Short: "Invite the cluster ID, whose administrator has no access to this one",
		Long: `Make a gateway for the cluster ID, and print a few lines of text for the
administrator of that cluster, who pastes them into "isthmusctl peer accept". Nothing comes
back by hand: the gateway there hands in its answer through a temporary tunnel, whose key is
in the text. It leads to one port of the gateway here and nowhere else, and ends when the
invitation is used, revoked or expired. Nothing that lasts is derived from the text.

Send it by a way that others do not read: whoever has it first can answer in the
place of ID. With --approve nothing is made until you have said yes to the fingerprint of the
gateway that answers, which its administrator can tell you.

A gateway here has to be reached from the other cluster, by UDP. Where it can't be, let the
other side invite.`,
		Example: example(
			"isthmusctl peer invite rome",
			"",
			"# No load balancer: at a port of the nodes. Look at who answers.",
			"isthmusctl peer invite rome --gw-server-service-type NodePort --approve",
			"",
			"isthmusctl peer invite --list",
			"isthmusctl peer invite rome --revoke",
		),
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 1 || len(args) == 0 != a.list {
				return errors.New("name the cluster to invite by its ID, or give --list and no ID")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			a.options.Given = map[string]bool{}
			cmd.Flags().Visit(func(f *pflag.Flag) { a.options.Given[f.Name] = true })
			switch {
			case a.list:
				return a.listInvitations(cmd.Context())
			case a.revoke:
				return a.revokeInvitation(cmd.Context(), args[0])
			}
			return a.invite(cmd.Context(), args[0])
		},
	}
	f, o := cmd.Flags(), &a.options
	a.flags(f)
	f.BoolVar(&a.list, "list", false, "show the invitations there are")
	f.BoolVar(&a.revoke, "revoke", false, "end the invitation of ID, and take back what was made for it")
	f.BoolVar(&o.Invitation.Approve, "approve", false, "wait for the answer, and make the peering only when you say yes")
	f.DurationVar(&a.lifetime, "expires", invitation.DefaultLifetime, "`time` for which the invitation can be used, by the clock of this cluster")
	f.StringVar(&a.serviceType, peer.FlagServiceType, string(peer.DefaultServiceType), "`type` of the gateway's Service: LoadBalancer or NodePort")
	f.Int32Var(&o.Port, peer.FlagServicePort, peer.DefaultPort, "`port` of the gateway's Service")
	f.Int32Var(&o.NodePort, peer.FlagNodePort, 0, "`port` of the nodes for it; 0: one is chosen")
	f.StringVar(&o.LoadBalancerIP, peer.FlagLoadBalancerIP, "", "`address` to ask the load balancer for")
	f.StringVar(&o.Server.Name, peer.FlagServerTemplate, peer.DefaultServerTemplate, "`name` of the gateway's template")
	f.StringVar(&o.Server.Namespace, peer.FlagServerTemplateNamespace, "", "`namespace` of the gateway's template (default that of the installation)")
	f.StringVar(&o.Address, peer.FlagClientAddress, "", "`address` that the other side dials, in place of the one that the gateway has")
	f.Int32Var(&o.DialPort, peer.FlagClientPort, 0, "`port` that the other side dials, in place of the one that the gateway has")
	f.IntVar(&o.MTU, peer.FlagMTU, peer.DefaultMTU, "MTU of the tunnel, in `bytes`; 0: derived from the network underneath")
	return cmd
}

func (p *program) peerAcceptCommand() *cobra.Command {
	a := &alone{program: p}
	cmd := &cobra.Command{
		Use:   "accept [TEXT]",
		Short: "Accept the invitation of another cluster",
		Long: `Make a gateway that dials the cluster that has invited this one, by the text that
"isthmusctl peer invite" has printed there: all its lines as one argument, a file that has
them, or - for standard input. The gateway hands in what the other side has to know
of this one, and gets what this one has to know of it. When it is refused, it is said why,
and all that was made is taken back.`,
		Example: example(
			"isthmusctl peer accept invitation.txt --wait",
			"pbpaste | isthmusctl peer accept - --wait",
		),
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error { return a.accept(cmd.Context(), args[0]) },
	}
	f, o := cmd.Flags(), &a.options
	a.flags(f)
	f.StringVar(&o.Client.Name, peer.FlagClientTemplate, peer.DefaultClientTemplate, "`name` of the gateway's template")
	f.StringVar(&o.Client.Namespace, peer.FlagClientTemplateNamespace, "", "`namespace` of the gateway's template (default that of the installation)")
	return cmd
}

// flags adds those of all commands about one side.
func (a *alone) flags(f *pflag.FlagSet) {
	f.DurationVar(&a.options.Timeout, "timeout", peer.DefaultTimeout, "longest `time` that all of it may take")
	f.BoolVar(&a.options.Wait, "wait", false, "wait until the gateways have heard from each other, or are gone")
}

// config returns what a run about one side needs.
func (a *alone) config(action peer.Action, id string) (peer.Config, error) {
	o := a.options
	if o.Timeout <= 0 {
		return peer.Config{}, fmt.Errorf("--timeout %v: write a time that is longer than nothing, such as %v", o.Timeout, peer.DefaultTimeout)
	}
	o.Now = time.Now
	o.Server.APIVersion, o.Server.Kind = v1beta1.GroupVersion.String(), "WgGatewayServerTemplate"
	o.Client.APIVersion, o.Client.Kind = v1beta1.GroupVersion.String(), "WgGatewayClientTemplate"
	cfg := peer.Config{Action: action, Peer: id, Options: o}
	config, err := a.cluster.ToRESTConfig()
	if err != nil {
		return cfg, fmt.Errorf("which cluster: %w: name one by --kubeconfig or --context", err)
	}
	c := peer.Cluster{Name: "cluster at " + config.Host, System: *a.cluster.Namespace, Kubectl: "kubectl", Isthmusctl: "isthmusctl"}
	addFlags(&c, *a.cluster.KubeConfig, *a.cluster.Context)
	if c.Client, err = client.New(config, client.Options{Scheme: kube.Scheme()}); err != nil {
		return cfg, fmt.Errorf("%s: %w", c.Name, err)
	}
	cfg.Clusters[peer.Local] = c
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
	cfg, err := a.config(action, id)
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

func (a *alone) invite(ctx context.Context, id string) error {
	if a.lifetime <= 0 || a.lifetime > invitation.MaxLifetime {
		return fmt.Errorf("--expires %v: write a time up to %v, such as %v", a.lifetime, invitation.MaxLifetime, invitation.DefaultLifetime)
	}
	a.options.ServiceType = corev1.ServiceType(a.serviceType)
	cfg, err := a.config(peer.Invite, id)
	if err != nil {
		return err
	}
	own, err := peer.Identify(ctx, cfg.Clusters[peer.Local], peer.Template{})
	if err != nil {
		return err
	}
	if a.options.Invitation.Approve {
		// Somebody may have stopped waiting.
		if open, err := a.read(ctx, cfg.Clusters[peer.Local].Client, id); err == nil && open != nil && open.record.Approve && open.record.Used == nil {
			return a.approve(ctx, cfg.Clusters[peer.Local].Client, id)
		}
	}
	private, err := invitation.NewKey(rand.Reader)
	if err != nil {
		return err
	}
	rec := &a.options.Invitation
	if rec.Key, err = private.Public(); err != nil {
		return err
	}
	if rec.ID, err = invitation.NewID(rand.Reader); err != nil {
		return err
	}
	rec.From, rec.To, rec.Expires = own.ID, id, time.Now().Add(a.lifetime).UTC().Truncate(time.Second)
	result, err := a.run(ctx, peer.Invite, id)
	if err != nil {
		return err
	}
	if result.Invited == nil || len(result.Invited.PublicKey) != len(invitation.Key{}) {
		return fmt.Errorf("the gateway for %s has no endpoint or no key any more: isthmusctl peer invite %s --revoke, and invite again", id, id)
	}
	i := invitation.Invitation{
		ID: rec.ID, From: rec.From, To: rec.To, Key: invitation.Key(result.Invited.PublicKey), PrivateKey: private,
		Addresses: result.Invited.Endpoint.Addresses, Port: uint16(*result.Invited.Endpoint.Port), MTU: result.Invited.MTU, Expires: rec.Expires,
	}
	text, err := i.Text()
	if err != nil {
		return err
	}
	if a.json {
		if err := a.print(struct {
			Text        string    `json:"text"`
			Expires     time.Time `json:"expires"`
			Fingerprint string    `json:"fingerprint"`
		}{text, i.Expires, invitation.Fingerprint(i.Key)}); err != nil {
			return err
		}
	} else {
		fmt.Fprintf(a.err, "The invitation of %s. It can be used once, until %s. In %s:\n  isthmusctl peer accept - --wait\nand paste these lines. The fingerprint of the gateway here is %s.\n",
			id, i.Expires.Format(time.RFC3339), id, invitation.Fingerprint(i.Key))
		fmt.Fprint(a.out, text)
	}
	if !rec.Approve {
		return nil
	}
	return a.approve(ctx, cfg.Clusters[peer.Local].Client, id)
}

// approve waits for the answer to an invitation, and asks whether to go on.
func (a *alone) approve(ctx context.Context, c client.Client, id string) error {
	out := newTicker(a.err)
	tick := time.NewTicker(patience / 2)
	defer tick.Stop()
	for {
		open, err := a.read(ctx, c, id)
		switch {
		case err != nil:
			out.end()
			return err
		case open == nil:
			out.end()
			return fmt.Errorf("the invitation of %s was revoked", id)
		case open.record.Used != nil:
			out.end()
			_, err := fmt.Fprintf(a.err, "The invitation was used by %s, whose gateway has the fingerprint %s.\n", id, invitation.Fingerprint(open.record.Used.Key))
			return err
		case open.record.State(time.Now()) == "expired":
			out.end()
			return fmt.Errorf("the invitation of %s has expired, and nobody has been let in", id)
		case open.record.Asks != nil && (open.record.Rejected == nil || *open.record.Rejected != open.record.Asks.Key) && open.record.Approved == nil:
			out.end()
			if err := a.ask(ctx, c, open, id); err != nil {
				return err
			}
			continue
		}
		out.waiting("waiting for " + id + " to answer")
		select {
		case <-ctx.Done():
			out.end()
			return fmt.Errorf("interrupted: the invitation stays, and isthmusctl peer invite %s --approve goes on", id)
		case <-tick.C:
		}
	}
}

// ask asks whether the gateway that has answered is the right one.
func (a *alone) ask(ctx context.Context, c client.Client, open *invited, id string) error {
	asks := *open.record.Asks
	var networks []string
	for _, n := range slices.Concat(asks.Pod, asks.External) {
		networks = append(networks, n.String())
	}
	fmt.Fprintf(a.err, "%s has answered. Its gateway has the fingerprint %s, its networks are %s. Connect? [y/N] ", id, invitation.Fingerprint(asks.Key), strings.Join(networks, ", "))
	line, _ := bufio.NewReader(a.in).ReadString('\n')
	yes := slices.Contains([]string{"y", "yes"}, strings.ToLower(strings.TrimSpace(line)))
	if yes {
		open.record.Approved = &asks.Key
	} else {
		open.record.Rejected = &asks.Key
	}
	var err error
	if open.secret.Data, err = open.record.Fields(); err != nil {
		return err
	}
	if err := c.Update(ctx, open.secret, peer.FieldOwner); apierrors.IsConflict(err) {
		return nil // it is looked at again
	} else if err != nil {
		return fmt.Errorf("write Secret %s/%s: %w", open.secret.Namespace, open.secret.Name, err)
	}
	if !yes {
		return fmt.Errorf("%s was not let in. The invitation stays open for another gateway: isthmusctl peer invite %s --revoke ends it", id, id)
	}
	return nil
}

func (a *alone) revokeInvitation(ctx context.Context, id string) error {
	result, err := a.run(ctx, peer.Revoke, id)
	if err != nil || a.json {
		return a.end(result, err)
	}
	_, err = fmt.Fprintf(a.out, "The invitation of %s is revoked: %d objects deleted.\n", id, result.Changed)
	return err
}

// invited is an invitation that a cluster has.
type invited struct {
	secret *corev1.Secret
	record invitation.Record
}

// invitations returns those there are, by the other side's ID.
func invitations(ctx context.Context, c client.Client) ([]invited, error) {
	var list corev1.SecretList
	if err := c.List(ctx, &list, client.MatchingFields{"type": v1beta1.SecretTypeInvitation}); err != nil {
		return nil, fmt.Errorf("read the invitations: %w", err)
	}
	var out []invited
	for i := range list.Items {
		s := &list.Items[i]
		r, err := invitation.ReadRecord(s.Data)
		if err != nil {
			return nil, fmt.Errorf("Secret %s/%s: %w: delete it", s.Namespace, s.Name, err)
		}
		out = append(out, invited{s, r})
	}
	return out, nil
}

// read returns the invitation of a cluster; nil: there is none.
func (a *alone) read(ctx context.Context, c client.Client, id string) (*invited, error) {
	list, err := invitations(ctx, c)
	if err != nil {
		return nil, err
	}
	i := slices.IndexFunc(list, func(x invited) bool { return !x.record.Accepting && x.record.To == id })
	if i < 0 {
		return nil, nil
	}
	return &list[i], nil
}

func (a *alone) listInvitations(ctx context.Context) error {
	c, err := a.connect()
	if err != nil {
		return err
	}
	list, err := invitations(ctx, c.client)
	if err != nil {
		return err
	}
	type line struct {
		Peer        string    `json:"peer"`
		By          string    `json:"by"` // us or them
		State       string    `json:"state"`
		Expires     time.Time `json:"expires"`
		Fingerprint string    `json:"fingerprint,omitempty"` // of the other side's gateway
	}
	lines := []line{}
	for _, x := range list {
		l := line{Peer: x.record.To, By: "us", State: x.record.State(time.Now()), Expires: x.record.Expires}
		switch {
		case x.record.Accepting:
			l.Peer, l.By, l.Fingerprint = x.record.From, "them", invitation.Fingerprint(x.record.Key)
		case x.record.Used != nil:
			l.Fingerprint = invitation.Fingerprint(x.record.Used.Key)
		case x.record.Asks != nil:
			l.Fingerprint = invitation.Fingerprint(x.record.Asks.Key)
		}
		lines = append(lines, l)
	}
	if a.json {
		return a.print(lines)
	}
	if len(lines) == 0 {
		_, err := fmt.Fprintln(a.out, "There are no invitations.")
		return err
	}
	var table bytes.Buffer
	w := tabwriter.NewWriter(&table, 0, 0, 3, ' ', 0)
	fmt.Fprintln(w, "PEER\tINVITED BY\tSTATE\tEXPIRES\tFINGERPRINT")
	for _, l := range lines {
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\n", l.Peer, l.By, l.State, l.Expires.Format(time.RFC3339), orDash(l.Fingerprint))
	}
	if err := w.Flush(); err != nil {
		return err
	}
	_, err = a.out.Write(table.Bytes())
	return err
}

// text returns that of an invitation: the argument, what is in the file of that name, or
// standard input.
func (a *alone) text(arg string) (string, error) {
	if arg == "-" {
		b, err := io.ReadAll(io.LimitReader(a.in, 1<<16))
		return string(b), err
	}
	if !strings.ContainsAny(arg, " \n") {
		b, err := os.ReadFile(arg)
		if err != nil {
			return "", fmt.Errorf("%w: give the text of the invitation as one argument, a file that has it, or - for standard input", err)
		}
		return string(b), nil
	}
	return arg, nil
}

func (a *alone) accept(ctx context.Context, arg string) error {
	text, err := a.text(arg)
	if err != nil {
		return err
	}
	i, err := invitation.Parse(text)
	if err != nil {
		return err
	}
	cfg, err := a.config(peer.Accept, i.From)
	if err != nil {
		return err
	}
	own, err := peer.Identify(ctx, cfg.Clusters[peer.Local], peer.Template{})
	if err != nil {
		return err
	}
	switch {
	case i.From == own.ID:
		return fmt.Errorf("refused, nothing was changed: it is the invitation of this cluster itself, %s: it is for %s, so accept it there", own.ID, i.To)
	case i.To != own.ID:
		return fmt.Errorf("refused, nothing was changed: the invitation is for cluster %s, and this is %s: ask for one that names %s", i.To, own.ID, own.ID)
	case time.Now().After(i.Expires.Add(invitation.Grace)):
		return fmt.Errorf("refused, nothing was changed: the invitation has expired at %s: ask for a new one", i.Expires.UTC().Format(time.RFC3339))
	}
	port, udp := int32(i.Port), corev1.ProtocolUDP
	a.options.Endpoint = &v1beta1.EndpointStatus{Addresses: i.Addresses, Port: &port, Protocol: &udp}
	a.options.MTU, a.options.Atomic = i.MTU, true
	a.options.Invitation = invitation.Record{Accepting: true, ID: i.ID, From: i.From, To: i.To, Key: i.Key, PrivateKey: &i.PrivateKey, Expires: i.Expires}
	result, err := a.run(ctx, peer.Accept, i.From)
	if err != nil || a.json {
		return a.end(result, err)
	}
	connected := "The gateways have yet to hear each other: isthmusctl peer list shows when they do."
	if result.Connected {
		connected = "They are connected."
	}
	if result.Changed == 0 {
		_, err = fmt.Fprintf(a.out, "%s and %s are peers already: nothing to do. %s\n", own.ID, i.From, connected)
		return err
	}
	_, err = fmt.Fprintf(a.out, "%s and %s are peers, in %v. The fingerprint of the gateway of %s is %s. %s\n", own.ID, i.From,
		time.Duration(result.Seconds*float64(time.Second)).Round(100*time.Millisecond), i.From, invitation.Fingerprint(i.Key), connected)
	return err
}
