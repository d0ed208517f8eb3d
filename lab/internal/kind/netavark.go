package kind

import (
	"context"
	"fmt"
	"strings"
)

// netavarkScript takes away the chains that Podman's netavark makes with the first network and
// leaves behind when the last one is gone, and the rules that lead to them. They are in two
// tables (netavark, src/firewall/iptables.rs), and of both families. A netavark that writes
// nftables itself makes no such chains, and the script then changes nothing.
const netavarkScript = `set -e
for program in iptables ip6tables; do
	[ "$program" = iptables ] || [ -e /proc/net/if_inet6 ] || continue
	for table in filter nat; do
		rules=$("$program" -w -t "$table" -S)
		printf '%s\n' "$rules" | sed -n 's/^-A \(.* -j NETAVARK[-_A-Z0-9]*\)$/\1/p' | xargs -r -L 1 "$program" -w -t "$table" -D
		chains=$(printf '%s\n' "$rules" | sed -n 's/^-N \(NETAVARK[-_A-Z0-9]*\)$/\1/p')
		for chain in $chains; do "$program" -w -t "$table" -F "$chain"; done
		for chain in $chains; do "$program" -w -t "$table" -X "$chain"; done
	done
done
`

// netavarkMissing tells whether this machine has no chains of netavark's, so that those to
// come are a lab's. Where iptables-save fails nobody knows, and the lab takes no chains away.
func netavarkMissing(ctx context.Context) bool {
	text, err := run(ctx, "iptables-save")
	return err == nil && !strings.Contains(text, ":NETAVARK")
}

// removeNetavark takes netavark's chains away.
func removeNetavark(ctx context.Context) error {
	if _, err := run(ctx, "sh", "-c", netavarkScript); err != nil {
		return fmt.Errorf("iptables chains of netavark: %w", err)
	}
	return nil
}
