package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/lab/internal/kind"
	"github.com/isthmus-net/isthmus/lab/internal/report"
	"github.com/isthmus-net/isthmus/lab/internal/rundir"
	"github.com/isthmus-net/isthmus/lab/internal/supervisor"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// probe asks this machine for what worlds need. Container engines, each of which may
// take a minute to answer, are asked for the world kind only, which is never taken by
// itself.
func probe(ctx context.Context, p place, withKind bool) []world.Probe {
	probes := world.Doctor(ctx, p.bin())
	if withKind {
		probes = append(probes, kind.Doctor(ctx, p.bin())...)
	}
	return append(probes, probeDead(rundir.Base(), kind.Kept()))
}

// probeDead looks for what labs have left that were killed. No world is
// hindered by it.
func probeDead(base, kept string) world.Probe {
	p := world.Probe{Name: "dead labs", OK: true, Detail: "none has left anything", Fix: "lab down --all"}
	dead, err := rundir.FindDead(base)
	var left []string
	for _, d := range dead {
		left = append(left, d.Name+" has left "+d.String())
	}
	clusters, err2 := kind.Dead(base)
	for _, name := range clusters {
		left = append(left, name+" has left clusters of kind")
	}
	lost, err3 := kind.Lost(base, kept)
	for _, name := range lost {
		if !slices.Contains(clusters, name) {
			left = append(left, fmt.Sprintf("%s %v, and has left clusters of kind", name, kind.ErrLost))
		}
	}
	if err = errors.Join(err, err2, err3); err != nil {
		left = append(left, err.Error())
	}
	if len(left) > 0 {
		p.OK, p.Detail = false, strings.Join(left, "; ")
	}
	return p
}

func newDoctorCommand(a *app, root *string) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:     "doctor",
		Short:   "say what this machine can run, and how to fix what it can't",
		Example: "  lab doctor\n  lab doctor --json",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			p, err := findPlace(*root)
			if err != nil {
				return err
			}
			probes := probe(cmd.Context(), p, true)
			if asJSON {
				return writeJSON(a.stdout, probes)
			}
			for _, pr := range probes {
				mark := "✓"
				if !pr.OK {
					mark = "✗"
				}
				fmt.Fprintf(a.stdout, " %s %-22s %s\n", mark, pr.Name, pr.Detail)
				if !pr.OK && pr.Fix != "" {
					fmt.Fprintf(a.stdout, "   %-22s → %s\n", "", pr.Fix)
				}
			}
			can := false
			for _, w := range []string{supervisor.Native, supervisor.VM, kind.World} {
				missing := lacking(probes, w)
				if len(missing) == 0 {
					can = true
					fmt.Fprintf(a.stdout, "the %s world can run here\n", w)
				} else {
					fmt.Fprintf(a.stdout, "the %s world can't run here: %s\n", w, probeNames(missing))
				}
			}
			if !can {
				return exitError{report.ExitInfra, "lab: no world can run on this machine"}
			}
			return nil
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "as JSON")
	return cmd
}
