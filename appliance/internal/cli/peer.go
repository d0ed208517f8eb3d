package cli

import (
	"bytes"
	"cmp"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"

	"github.com/isthmus-net/isthmus/appliance/internal/peers"
)

func (p *program) peerCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "peer",
		Short: "Invite other clusters, look at peerings, write them to files, change their keys, cut peers off, and follow what they tell",
	}
	cmd.AddCommand(p.peerListCommand(), p.peerInviteCommand(), p.peerAcceptCommand(), p.peerRemoveCommand(), p.peerManifestsCommand(),
		p.peerBlockCommand(), p.peerUnblockCommand(), p.peerRotateCommand(), p.peerRepairCommand(), p.peerFollowCommand())
	return cmd
}

func (p *program) peerListCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "list",
		Short: "Show every peering, by whom it was made, and what is missing",
		Long: `list shows the peerings of the cluster, whoever made them: isthmusctl, kubectl,
liqoctl, Helm, Argo CD or Flux. Below each it says what is missing, in the words of the
objects' own conditions. The networks are those of the peer; where this cluster
calls one by another range, that follows it. Keys that are blocked are below all.`,
		Example: example("isthmusctl peer list", "isthmusctl peer list --json | jq '.[] | select(.missing)'"),
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := p.connect()
			if err != nil {
				return err
			}
			objects, err := peers.Read(cmd.Context(), c.client)
			if meta.IsNoMatchError(err) {
				return fmt.Errorf("Isthmus is not installed in the cluster at %s: isthmusctl install", c.config.Host)
			}
			if err != nil {
				return fmt.Errorf("read the peerings: %w", err)
			}
			list := peers.List(objects)
			if p.json {
				if list == nil {
					list = []peers.Peer{}
				}
				return p.print(list)
			}
			if err := printPeers(p.out, list); err != nil {
				return err
			}
			switch keys, err := c.blockedKeys(cmd.Context()); {
			case apierrors.IsForbidden(err):
				_, err := fmt.Fprintf(p.err, "You may not read which keys are blocked: %v\n", err)
				return err
			case err != nil:
				return err
			case len(keys) > 0:
				fmt.Fprintln(p.out)
				return printBlockedKeys(p.out, keys)
			}
			return nil
		},
	}
}

// printPeers prints a line for each peering, and below it what is missing.
func printPeers(out io.Writer, list []peers.Peer) error {
	if len(list) == 0 {
		_, err := fmt.Fprintln(out, "There are no peerings.")
		return err
	}
	var table bytes.Buffer
	w := tabwriter.NewWriter(&table, 0, 0, 3, ' ', 0)
	fmt.Fprintln(w, "PEER\tROLE\tCONNECTION\tRTT\tENDPOINT\tNETWORKS\tMADE BY")
	for _, peer := range list {
		var networks []string
		for _, n := range peer.Networks {
			networks = append(networks, n.String())
		}
		connection := peer.Connection
		if peer.Blocked {
			connection = "blocked"
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\t%s\n", peer.ID, orDash(peer.Role), orDash(connection), orDash(peer.RTT), orDash(peer.Endpoint),
			orDash(strings.Join(networks, ", ")), orDash(strings.Join(peer.MadeBy, ", ")))
	}
	if err := w.Flush(); err != nil {
		return err
	}
	for i, line := range strings.Split(strings.TrimSpace(table.String()), "\n") {
		fmt.Fprintln(out, strings.TrimRight(line, " "))
		if i > 0 { // the first line is the head
			for _, m := range list[i-1].Missing {
				fmt.Fprintf(out, "  ✗ %s\n", m)
			}
		}
	}
	return nil
}

func orDash(s string) string { return cmp.Or(s, "-") }
