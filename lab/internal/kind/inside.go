package kind

import (
	"context"

	"sigs.k8s.io/kind/pkg/cluster/nodes"
)

// insideScript gives a container new default routes. What it sends to networks other than the
// engine's then goes to a reserved MAC address, whose frames every bridge drops (IEEE 802.1Q,
// table 8-1; net/bridge/br_input.c, br_handle_frame), and nobody answers. By the engine's own
// gateway it would leave this machine: a provider's router answered "port unreachable" for the
// pods of a cluster that was not connected yet.
const insideScript = `set -e
for family in -4 -6; do
	[ "$family" = -4 ] && nobody=169.254.255.254 || nobody=fe80::ffff
	[ "$(ip "$family" route show exact default)" ] || continue
	ip "$family" route flush exact default
	ip neighbour replace "$nobody" lladdr 01:80:c2:00:00:01 dev ` + nodeLink + ` nud permanent
	ip "$family" route add default via "$nobody" dev ` + nodeLink + ` onlink
done
`

// keepInside has all that a node sends stay on the engine's network.
func keepInside(ctx context.Context, n nodes.Node) error {
	return runOn(ctx, n, nil, "sh", "-c", insideScript)
}
