package cli

import "github.com/spf13/cobra"

func (p *program) peerRepairCommand() *cobra.Command {
	var f rotateFlags
	f.Repair = true
	cmd := &cobra.Command{
		Use:   "repair ID",
		Short: "Agree on new keys with a peer that does not take this cluster's key any more",
		Long: `repair is for a cluster whose etcd was restored from before a rotation of its own keys: its
gateway of the peering with the cluster of this ID has a key pair that the peer's gateway does
not take any more. That one knows the key before for 24 hours, for this command only and only
while there is no connection; by it the two agree on new keys, with nothing to do on the other
side.

Whoever has a backup with that key can do the same while this gateway does not answer. So it is
not known any longer after isthmusctl peer rotate --compromised.

Where it is not known, or where the other side has changed its own key since the backup, connect
the two clusters again.`,
		Example: example("isthmusctl peer repair rome --wait", "isthmusctl peer repair rome --compromised --wait --yes"),
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return p.rotate(cmd.Context(), args[0], f)
		},
	}
	f.add(cmd)
	return cmd
}
