package main

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/isthmus-net/isthmus/lab/internal/kubeconfig"
)

// checkKubeconfigs checks the flags of the world kubeconfig, and those that it does
// not go with.
func (o runOptions) checkKubeconfigs() error {
	if o.world != kubeconfig.World {
		if len(o.kubeconfigs) > 0 || o.probeImage != "" {
			return usageError("--kubeconfig and --probe-image are for --world kubeconfig")
		}
		return nil
	}
	switch {
	case len(o.kubeconfigs) == 0:
		return usageError("--world kubeconfig: say which clusters: --kubeconfig milan=a.yaml --kubeconfig rome=b.yaml")
	case o.probeImage == "":
		return usageError("--world kubeconfig: say from where nodes pull the lab's probe: --probe-image registry.example.com/isthmus-lab/probe:dev")
	case o.keep:
		return usageError("--keep: with --world kubeconfig the lab's pods go when the run ends")
	case o.fresh:
		return usageError("--fresh: with --world kubeconfig no lab is built; rows run in the clusters that --kubeconfig names")
	case o.snapshot != snapshotAuto:
		return usageError("--snapshot: with --world kubeconfig there is no virtual machine")
	case o.jobs > 1:
		return usageError("--jobs %d: with --world kubeconfig all rows run in the same clusters, one topology after the other", o.jobs)
	}
	return nil
}

// readClusters asks the clusters of the world kubeconfig what they are, and says it.
func readClusters(ctx context.Context, out io.Writer, texts []string) ([]kubeconfig.Cluster, error) {
	var all []kubeconfig.Access
	for _, text := range texts {
		a, err := kubeconfig.ParseAccess(text)
		if err != nil {
			return nil, usageError("--kubeconfig %v", err)
		}
		all = append(all, a)
	}
	have, err := kubeconfig.Read(ctx, all)
	if err != nil {
		return nil, infraError(err)
	}
	for _, c := range have {
		fmt.Fprintf(out, "%s is cluster %s: %d nodes, pods %s, services %s, overlay %s\n", c.Name, c.Spec.ID, len(c.Spec.Nodes), c.Spec.PodCIDR, c.Spec.ServiceCIDR, c.Overlay)
	}
	return have, nil
}

// keptWith are the flags that a row is run with once more, to look at what is left:
// clusters that are there need no --keep.
func (o runOptions) keptWith() string {
	if o.world != kubeconfig.World {
		return "--keep"
	}
	return "--kubeconfig " + strings.Join(o.kubeconfigs, " --kubeconfig ") + " --probe-image " + o.probeImage
}

// leaveForClusters leaves the rows that run in clusters that are there. Those few
// among many are of interest, so without a pattern one line is for all others.
func leaveForClusters(out io.Writer, selected []selection, have []kubeconfig.Cluster, patterns []string, o runOptions) []selection {
	why := out
	if len(patterns) == 0 {
		why = io.Discard
	}
	left := ofClusters(have, o.overlay).leave(why, selected, o.sabotage != "")
	if n := countRows(selected) - countRows(left); n > 0 && len(patterns) == 0 {
		fmt.Fprintf(out, "not selected: %d rows that need more than these clusters have, or would change them; lab run SCENARIO says what\n", n)
	}
	return left
}

func countRows(selected []selection) int {
	n := 0
	for _, sel := range selected {
		n += len(sel.rows)
	}
	return n
}
