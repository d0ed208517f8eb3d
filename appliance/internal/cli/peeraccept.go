package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/internal/invitation"
	"github.com/isthmus-net/isthmus/appliance/internal/kube"
	"github.com/isthmus-net/isthmus/appliance/internal/peer"
)

func (p *program) peerAcceptCommand() *cobra.Command {
	a := &alone{program: p}
	cmd := &cobra.Command{
		Use:   "accept [TEXT]",
		Short: "Accept the invitation of another cluster",
		Long: `Make a gateway that dials the cluster that has invited this one, by the text that
"isthmusctl peer invite" has printed there: all its lines as one argument, a file that has
them, or - for standard input (on a terminal: paste them, and press Ctrl-D). The gateway hands in what the other side has to know
of this one, and gets what this one has to know of it. When it is refused, it is said why,
and all that was made is taken back. One that was killed is gone on with by the same text.

Where somebody on the other side has to say yes first (isthmusctl peer invite --approve), that
does not count for --timeout: it may take until the invitation expires, or --approval-timeout.
What they are asked for is the fingerprint of the gateway here, which is printed meanwhile.`,
		Example: example(
			"isthmusctl peer accept invitation.txt --wait",
			"pbpaste | isthmusctl peer accept - --wait",
			"",
			"# The other side may add networks of this range later.",
			"isthmusctl peer accept invitation.txt --follow 10.64.0.0/10",
		),
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return errors.New("give the invitation: a file that has its text, or - for standard input")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error { return a.accept(cmd.Context(), strings.Join(args, " ")) },
	}
	f, o := cmd.Flags(), &a.options
	a.flags(f)
	a.followFlags(f)
	f.DurationVar(&o.ApprovalTimeout, "approval-timeout", 0, "longest `time` that somebody on the other side may take to say yes; 0: until the invitation expires")
	f.StringVar(&o.Client.Name, peer.FlagClientTemplate, peer.DefaultClientTemplate, "`name` of the gateway's template")
	f.StringVar(&o.Client.Namespace, peer.FlagClientTemplateNamespace, "", "`namespace` of the gateway's template (default that of the installation)")
	return cmd
}

// text returns that of an invitation: the argument, what is in the file of that name, or
// standard input.
func (a *alone) text(ctx context.Context, arg string) (string, error) {
	if arg == "-" {
		return a.pasted(ctx)
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

// pasted returns what comes by standard input, until it ends or ctx is done.
func (a *alone) pasted(ctx context.Context) (string, error) {
	if isTerminal(a.in) {
		fmt.Fprintln(a.err, "Paste the lines of the invitation, then press Ctrl-D:")
	}
	b, err := typed(ctx, func() ([]byte, error) { return io.ReadAll(io.LimitReader(a.in, 1<<16)) })
	return string(b), err
}

func (a *alone) accept(ctx context.Context, arg string) error {
	text, err := a.text(ctx, arg)
	if err != nil {
		return err
	}
	i, err := invitation.Parse(text)
	if err != nil {
		return err
	}
	if err := a.checkFollow(); err != nil {
		return err
	}
	if a.options.ApprovalTimeout < 0 {
		return fmt.Errorf("--approval-timeout %v: write a time that is not negative, such as 10m, or 0", a.options.ApprovalTimeout)
	}
	cfg, err := a.config(ctx, peer.Accept, i.From)
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
	}
	if now := a.now(); now.After(i.Expires) {
		// One that was accepted is gone on with after that.
		fmt.Fprintf(a.err, "The invitation has expired at %s by the clock of this cluster, where it is %s. It is tried all the same: the clock of %s decides.\n",
			i.Expires.UTC().Format(time.RFC3339), now.UTC().Format(time.RFC3339), i.From)
	}
	blocked, err := readBlockedKeys(ctx, cfg.Clusters[peer.Local].Client, cfg.Clusters[peer.Local].System)
	if err != nil {
		return err
	}
	keys, _ := kube.BlockedKeys(blocked)
	if k, is := keys.Of(i.Key[:]); is {
		return fmt.Errorf("refused, nothing was changed: the gateway of %s has %s", i.From, k)
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
