package main

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/lab/internal/report"
	"github.com/isthmus-net/isthmus/lab/internal/scenario"
	"github.com/isthmus-net/isthmus/lab/internal/supervisor"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

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
			probes := world.Doctor(cmd.Context(), p.bin())
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
			for _, w := range []string{supervisor.Native, supervisor.VM} {
				missing := lacking(probes, w)
				if len(missing) == 0 {
					can = true
					fmt.Fprintf(a.stdout, "the %s world can run here\n", w)
				} else {
					fmt.Fprintf(a.stdout, "the %s world can't run here: %s\n", w, strings.Join(missing, ", "))
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

// lacking are the probes that failed and that a world can't be without.
func lacking(probes []world.Probe, name string) []string {
	var out []string
	for _, p := range probes {
		if !p.OK && slices.Contains(p.Needed, name) {
			out = append(out, p.Name)
		}
	}
	return out
}

// nativeFeatures are the features of this kernel that scenarios can require.
func nativeFeatures(probes []world.Probe) []string {
	var out []string
	for _, f := range scenario.Features() {
		for _, p := range probes {
			if p.OK && strings.EqualFold(p.Name, f) {
				out = append(out, f)
			}
		}
	}
	return out
}

// chooseWorld decides between native and vm. What users run is Geneve and the
// kernel's WireGuard: where this kernel has both, native will do.
func chooseWorld(ctx context.Context, p place, wanted string) (name, why string, err error) {
	switch wanted {
	case supervisor.Native, supervisor.VM:
		return wanted, "", nil
	case scenario.WorldAuto:
	default:
		return "", "", usageError("--world %q: auto, native or vm", wanted)
	}
	probes := world.Doctor(ctx, p.bin())
	has := nativeFeatures(probes)
	var without []string
	for _, f := range scenario.Features() {
		if !slices.Contains(has, f) {
			without = append(without, f)
		}
	}
	if len(without) == 0 && len(lacking(probes, supervisor.Native)) == 0 {
		return supervisor.Native, "", nil
	}
	if missing := lacking(probes, supervisor.VM); len(missing) > 0 {
		return "", "", exitError{report.ExitInfra, fmt.Sprintf("lab: this kernel has no %s and the vm world lacks %s: lab doctor says what to do",
			strings.Join(without, " and no "), strings.Join(missing, ", "))}
	}
	return supervisor.VM, " (this kernel has no " + strings.Join(without, " and no ") + ")", nil
}
