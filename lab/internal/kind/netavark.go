package kind

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os/exec"
	"strings"
)

// netavarkScript takes away the chains that Podman's netavark makes with the first network and
// leaves behind when the last one is gone, and the rules that lead to them. They are in two
// tables (netavark, src/firewall/iptables.rs), and of both families.
const netavarkScript = `set -e
for program in iptables ip6tables; do
	for table in filter nat; do
		"$program" -w -t "$table" -S | sed -n 's/^-A \(.* -j NETAVARK[-_A-Z0-9]*\)$/\1/p' | xargs -r -L 1 "$program" -w -t "$table" -D
		chains=$("$program" -w -t "$table" -S | sed -n 's/^-N \(NETAVARK[-_A-Z0-9]*\)$/\1/p')
		for chain in $chains; do "$program" -w -t "$table" -F "$chain"; done
		for chain in $chains; do "$program" -w -t "$table" -X "$chain"; done
	done
done
`

// netavarkMissing tells whether this machine has no chains of netavark's, so that those to
// come are a lab's.
func netavarkMissing(ctx context.Context) (bool, error) {
	text, err := exec.CommandContext(ctx, "iptables-save").Output()
	if errors.Is(err, exec.ErrNotFound) || errors.Is(err, fs.ErrNotExist) {
		return false, nil // whatever makes chains then, it can't be asked
	}
	if err != nil {
		return false, fmt.Errorf("iptables-save: %w", err)
	}
	return !strings.Contains(string(text), ":NETAVARK"), nil
}

// removeNetavark takes netavark's chains away.
func removeNetavark(ctx context.Context) error {
	if out, err := exec.CommandContext(ctx, "sh", "-c", netavarkScript).CombinedOutput(); err != nil {
		return fmt.Errorf("iptables chains of netavark: %w: %s", err, strings.TrimSpace(string(out)))
	}
	return nil
}
