package cli

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/internal/invitation"
	"github.com/isthmus-net/isthmus/appliance/internal/peer"
)

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
				if err := a.mayDelete(cmd.Context(), args[0], "End the invitation of %s, and delete what was made for it?"); err != nil {
					return err
				}
				return a.revokeInvitation(cmd.Context(), args[0])
			}
			return a.invite(cmd.Context(), args[0])
		},
	}
	f, o := cmd.Flags(), &a.options
	a.flags(f)
	f.Lookup("wait").Usage = "wait until the invitation was used; with --revoke, until the gateway is gone"
	a.confirmFlag(f)
	a.followFlags(f)
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

func (a *alone) invite(ctx context.Context, id string) error {
	if a.lifetime <= 0 || a.lifetime > invitation.MaxLifetime {
		return fmt.Errorf("--expires %v: write a time up to %v, such as %v", a.lifetime, invitation.MaxLifetime, invitation.DefaultLifetime)
	}
	if err := a.checkFollow(); err != nil {
		return err
	}
	a.options.ServiceType = corev1.ServiceType(a.serviceType)
	cfg, err := a.config(ctx, peer.Invite, id)
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
	rec.From, rec.To, rec.Expires = own.ID, id, a.now().Add(a.lifetime).UTC().Truncate(time.Second)
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
		fmt.Fprintf(a.err, "The invitation of %s. It can be used once, until %s. In %s:\n  isthmusctl peer accept - --wait\nand paste these lines, then Ctrl-D. The fingerprint of the gateway here is %s.\n",
			id, i.Expires.Format(time.RFC3339), id, invitation.Fingerprint(i.Key))
		fmt.Fprint(a.out, text)
	}
	if !rec.Approve && !a.options.Wait {
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
		case err != nil && open == nil && ctx.Err() == nil && peer.Transient(err):
			out.waiting(err.Error())
		case err != nil && ctx.Err() == nil:
			out.end()
			return err
		case err != nil: // interrupted
		case open == nil:
			out.end()
			return fmt.Errorf("the invitation of %s was revoked: isthmusctl peer invite %s makes another one", id, id)
		case open.record.Used != nil:
			out.end()
			_, err := fmt.Fprintf(a.err, "The invitation was used by %s, whose gateway has the fingerprint %s.\n", id, invitation.Fingerprint(open.record.Used.Key))
			return err
		case open.record.State(a.now()) == "expired":
			out.end()
			return fmt.Errorf("the invitation of %s has expired, and nobody has been let in: isthmusctl peer invite %s --revoke takes its gateway away; then invite again", id, id)
		case open.record.Undecided():
			out.end()
			if err := a.ask(ctx, c, open, id); err != nil {
				return err
			}
			continue
		default:
			out.waiting("waiting for " + id + " to answer")
		}
		select {
		case <-ctx.Done():
			out.end()
			if !a.options.Invitation.Approve {
				return errors.New("interrupted: the invitation stays, and isthmusctl peer invite --list shows whether it was used")
			}
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
	yes, err := a.confirm(ctx, fmt.Sprintf("%s has answered. Its gateway has the fingerprint %s, its networks are %s. Connect?", id, invitation.Fingerprint(asks.Key), strings.Join(networks, ", ")))
	if err != nil {
		return fmt.Errorf("%w: %s waits until you say yes or no, which isthmusctl peer invite %s --approve asks again", err, id, id)
	}
	if yes {
		open.record.Approved = &asks.Key
	} else {
		open.record.Rejected = &asks.Key
	}
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
	err    error // why it can't be read
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
			err = fmt.Errorf("Secret %s/%s: %w: delete it", s.Namespace, s.Name, err)
		}
		out = append(out, invited{s, r, err})
	}
	return out, nil
}

// read returns the invitation of a cluster, or nil if there is none. If the data of an invitation
// can't be understood, read returns the invitation and an error.
func (a *alone) read(ctx context.Context, c client.Client, id string) (*invited, error) {
	list, err := invitations(ctx, c)
	if err != nil {
		return nil, err
	}
	i := slices.IndexFunc(list, func(x invited) bool {
		return x.err != nil && x.secret.Name == peer.InvitationName(id) || x.err == nil && !x.record.Accepting && x.record.To == id
	})
	if i < 0 {
		return nil, nil
	}
	return &list[i], list[i].err
}

// stateWords say what a state is, where one word is not enough.
var stateWords = map[string]string{"asks": "waits for your yes", "used": "being accepted", "done": "accepted"}

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
	lines, now := []line{}, clock(ctx, c.config)
	var unreadable []error
	for _, x := range list {
		if x.err != nil {
			unreadable = append(unreadable, x.err)
			continue
		}
		l := line{Peer: x.record.To, By: "us", State: x.record.State(now()), Expires: x.record.Expires}
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
		return errors.Join(append(unreadable, a.print(lines))...)
	}
	if len(lines) == 0 {
		_, err := fmt.Fprintln(a.out, "There are no invitations.")
		return errors.Join(append(unreadable, err)...)
	}
	var table bytes.Buffer
	w := tabwriter.NewWriter(&table, 0, 0, 3, ' ', 0)
	fmt.Fprintln(w, "PEER\tINVITED BY\tSTATE\tEXPIRES\tFINGERPRINT")
	for _, l := range lines {
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\n", l.Peer, l.By, cmp.Or(stateWords[l.State], l.State), l.Expires.Format(time.RFC3339), orDash(l.Fingerprint))
	}
	if err := w.Flush(); err != nil {
		return err
	}
	_, err = a.out.Write(table.Bytes())
	return errors.Join(append(unreadable, err)...)
}
