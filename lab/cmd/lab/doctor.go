package main

import (
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

// lacking are the probes that failed and that a world can't be without.
func lacking(probes []world.Probe, name string) []world.Probe {
	var out []world.Probe
	for _, p := range probes {
		if !p.OK && slices.Contains(p.Needed, name) {
			out = append(out, p)
		}
	}
	return out
}

func probeNames(probes []world.Probe) string {
	var names []string
	for _, p := range probes {
		names = append(names, p.Name)
	}
	return strings.Join(names, ", ")
}

// estimate tells whether a probe's bound is rounded up: a small lab, or one
// that is up already, does with less. Whoever names a world has decided.
func estimate(p world.Probe) bool { return p.Name == "memory" || p.Name == "disk space" }

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

// chooseWorld decides between native and vm, by what the probes found. What
// users run is Geneve and the kernel's WireGuard: where this kernel has both,
// native will do. A world that can't run here is refused before anything of it
// is built, with what to do for each thing that it lacks.
func chooseWorld(wanted string, probes []world.Probe) (name, why string, err error) {
	if !slices.Contains([]string{scenario.WorldAuto, supervisor.Native, supervisor.VM}, wanted) {
		return "", "", usageError("--world %q: auto, native or vm", wanted)
	}
	for _, p := range probes {
		if p.Name == "root" && !p.OK { // what the others found says nothing then
			return "", "", exitError{report.ExitInfra, fmt.Sprintf("lab: %s: %s", p.Detail, p.Fix)}
		}
	}
	if wanted != scenario.WorldAuto {
		missing := slices.DeleteFunc(lacking(probes, wanted), estimate)
		if len(missing) > 0 {
			return "", "", cannotRun(wanted, "", missing)
		}
		return wanted, "", nil
	}
	without := missingFeatures(scenario.Features(), nativeFeatures(probes))
	if missing := lacking(probes, supervisor.Native); without == "" && len(missing) > 0 {
		without = "the native world lacks " + probeNames(missing)
	}
	if without == "" {
		return supervisor.Native, "", nil
	}
	if missing := lacking(probes, supervisor.VM); len(missing) > 0 {
		return "", "", cannotRun(supervisor.VM, without+", and ", missing)
	}
	return supervisor.VM, " (" + without + ")", nil
}

// missingFeatures says which of the wanted features this kernel has not, or
// nothing.
func missingFeatures(wanted, has []string) string {
	var without []string
	for _, f := range wanted {
		if !slices.Contains(has, f) {
			without = append(without, "no "+f)
		}
	}
	if len(without) == 0 {
		return ""
	}
	return "this kernel has " + strings.Join(without, " and ")
}

// cannotRun is the error for a world that lacks something.
func cannotRun(name, because string, missing []world.Probe) error {
	var b strings.Builder
	fmt.Fprintf(&b, "lab: %sthe %s world can't run here:", because, name)
	for _, p := range missing {
		fmt.Fprintf(&b, "\n  %s: %s\n    → %s", p.Name, p.Detail, p.Fix)
	}
	return exitError{report.ExitInfra, b.String()}
}
