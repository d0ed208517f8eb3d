package main

import (
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/lab/internal/snapshot"
	"github.com/isthmus-net/isthmus/lab/internal/vm"
)

// Values of --snapshot.
const (
	snapshotAuto = "auto"
	snapshotOff  = "off"
)

func snapshotFlag(cmd *cobra.Command, value *string) {
	cmd.Flags().StringVar(value, "snapshot", snapshotAuto, "of virtual machines: auto restores what is in the cache and saves what is not; off boots")
}

// useSnapshots reads the value of --snapshot.
func useSnapshots(value string) (bool, error) {
	if value != snapshotAuto && value != snapshotOff {
		return false, usageError("--snapshot %q: auto or off", value)
	}
	return value == snapshotAuto, nil
}

func openSnapshots() (*snapshot.Store, error) {
	dir, err := vm.DefaultCacheDir()
	if err != nil {
		return nil, infraError(err)
	}
	return snapshot.Open(dir), nil
}

func newVMSnapshotsCommand(a *app) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "snapshots",
		Short: "list the snapshots of machines that booted (L1) and of labs that converged (L2)",
		Long: `snapshots lists what lab up, lab run and lab vm test keep in the cache so as not to
do it again: machines that have booted (L1) and labs that have converged (L2).
Each is used only for exactly what it was made of; of each level the eight that
were used last are kept.`,
		Example: "  lab vm snapshots\n  lab vm snapshots --json\n  lab vm snapshots prune",
		Args:    cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			all, err := listSnapshots()
			if err != nil {
				return err
			}
			if asJSON {
				return writeJSON(a.stdout, all)
			}
			if len(all) == 0 {
				fmt.Fprintln(a.stdout, "there are no snapshots: lab up --world vm makes some")
				return nil
			}
			printSnapshots(a.stdout, all, time.Now())
			return nil
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "as JSON")
	cmd.AddCommand(&cobra.Command{
		Use:     "prune",
		Short:   "remove all snapshots",
		Example: "  lab vm snapshots prune",
		Args:    cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			store, err := openSnapshots()
			if err != nil {
				return err
			}
			gone, err := store.Prune()
			if err != nil {
				return infraError(err)
			}
			size := int64(0)
			for _, s := range gone {
				size += s.Size
			}
			fmt.Fprintf(a.stdout, "%d snapshots are gone (%d MB)\n", len(gone), size/1e6)
			return nil
		},
	})
	return cmd
}

func listSnapshots() ([]snapshot.Snapshot, error) {
	store, err := openSnapshots()
	if err != nil {
		return nil, err
	}
	all, err := store.List()
	if all == nil {
		all = []snapshot.Snapshot{} // in JSON
	}
	return all, infraError(err)
}

func printSnapshots(w io.Writer, all []snapshot.Snapshot, now time.Time) {
	const format = "%-6s %-28s %8s %8s  %-24s  %s\n"
	fmt.Fprintf(w, format, "LEVEL", "TOPOLOGY", "SIZE", "AGE", "KEY", "MACHINE")
	for _, s := range all {
		topology := "-"
		if s.Topology != "" {
			topology = s.Topology + " (" + s.Overlay + ")"
		}
		fmt.Fprintf(w, format, s.Level, topology, fmt.Sprintf("%d MB", s.Size/1e6), age(now.Sub(s.Created)), s.Key, s.Machine)
	}
}

// age is for people, who compare ages and do not add them.
func age(d time.Duration) string {
	const day = 24 * time.Hour
	switch {
	case d >= 2*day:
		return fmt.Sprintf("%dd", d/day)
	case d >= 2*time.Hour:
		return fmt.Sprintf("%dh", d/time.Hour)
	}
	return fmt.Sprintf("%dm", d/time.Minute)
}
