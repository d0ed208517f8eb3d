package bench

import (
	"context"
	"fmt"
	"strings"

	networkingv1beta1 "github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/lab/internal/lane"
)

// A gateway drops what its peer sends to it, but for the probe. To measure the bare tunnel
// all the same, what the tunnel brings for the gateway itself makes a loop there: out by
// one end of a veth pair and in by the other, which is no link of the peer's. The table of
// local addresses must be asked later for that than what leads into the loop, and packets
// of known connections must not skip the routes (net.ipv4.ip_early_demux).
const (
	openLoop = `
set -e
ip link add lab-loop type veth peer name lab-loop-in
ip link set lab-loop up
ip link set lab-loop-in up
ip addr add 169.254.19.1/32 dev lab-loop-in # without an address the reverse-path filter lets nothing in
mac=$(ip -br link show dev lab-loop-in | awk '{ print $3 }')
ip neigh replace ADDR lladdr $mac dev lab-loop nud permanent
ip route replace ADDR/32 dev lab-loop table 77
sysctl -qw net.ipv4.conf.lab-loop-in.rp_filter=2 net.ipv4.ip_early_demux=0
ip rule add iif TUNNEL to ADDR lookup 77 priority 1
ip rule add lookup local priority 2
ip rule del lookup local priority 0`
	closeLoop = `
ip rule add lookup local priority 0
ip rule del lookup local priority 2
ip rule del iif TUNNEL to ADDR lookup 77 priority 1
sysctl -qw net.ipv4.ip_early_demux=1
ip link del lab-loop`
)

// loop makes such a loop at the end of a lane; undo takes it back.
func loop(ctx context.Context, w World, l lane.Lane) (undo func() error, err error) {
	script := func(ctx context.Context, text string) error {
		text = strings.NewReplacer("ADDR", l.Addr.String(), "TUNNEL", networkingv1beta1.TunnelInterface).Replace(text)
		_, err := run(ctx, w, l.To, "sh", "-c", text)
		return err
	}
	undo = func() error { return script(context.WithoutCancel(ctx), closeLoop) }
	if err := script(ctx, openLoop); err != nil {
		_ = undo() // of as much as was made
		return nil, fmt.Errorf("open %s to the bare tunnel: %w", l.To, err)
	}
	return undo, nil
}
