package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/lab/internal/kind"
	"github.com/isthmus-net/isthmus/lab/internal/report"
	"github.com/isthmus-net/isthmus/lab/internal/rundir"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// removeDead removes what the caller's labs have left that were killed, says so
// on a line each, and returns their names.
func removeDead(ctx context.Context, out io.Writer, base, kept string) ([]string, error) {
	if err := rundir.RemoveUnfinished(base); err != nil {
		return nil, infraError(err)
	}
	dead, err := rundir.FindDead(base)
	if err != nil {
		return nil, infraError(err)
	}
	var names []string
	for _, d := range dead {
		ctx, cancel := context.WithTimeout(ctx, endingTime)
		err := rundir.Remove(ctx, d.Dir)
		cancel()
		if errors.Is(err, rundir.ErrInUse) {
			continue // another one of that name has just come up
		}
		if err != nil {
			return names, infraError(fmt.Errorf("lab %s was killed and has left %s: %w", d.Name, d, err))
		}
		fmt.Fprintf(out, "lab %s was killed: removed %s\n", d.Name, d)
		names = append(names, d.Name)
	}
	lost, err := kind.Recover(base, kept)
	if err != nil { // the others can do without these
		fmt.Fprintf(out, "labs from before the machine was started again: %v\n", err)
	}
	clusters, err := kind.Dead(base)
	if err != nil {
		return names, infraError(err)
	}
	for _, name := range lost {
		if !slices.Contains(clusters, name) && rundir.Mine(filepath.Join(base, name)) {
			fmt.Fprintf(out, "lab %s %v: lab down %[1]s removes its clusters of kind\n", name, kind.ErrLost)
		}
	}
	for _, name := range clusters {
		why := "was killed"
		if slices.Contains(lost, name) {
			why = kind.ErrLost.Error()
		}
		fmt.Fprintf(out, "lab %s %s: removing its clusters of kind\n", name, why)
		if err := kind.RemoveDead(ctx, base, name); errors.Is(err, rundir.ErrInUse) {
			continue
		} else if err != nil { // its engine may be away, which is nothing to other labs
			fmt.Fprintf(out, "not all clusters of kind of lab %s are removed: %v\n", name, err)
			continue
		}
		names = append(names, name)
	}
	return names, nil
}

// endingTime is how long a lab that has just been killed may take to end.
const endingTime = 10 * time.Second

func newDownCommand(a *app) *cobra.Command {
	var all, force bool
	cmd := &cobra.Command{
		Use:   "down [LAB]",
		Short: "take a lab down; nothing of it stays",
		Long: `down takes a lab down: nothing of it stays. It also removes what labs have left
that were killed. The lab of another user stays, unless it is named in full with
--force.`,
		Example: "  lab down\n  lab down two-clusters            # the only one whose name starts so\n  lab down --all",
		Args:    cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			removed, err := removeDead(cmd.Context(), a.stdout, rundir.Base(), kind.Kept())
			if err != nil {
				return err
			}
			running, err := listLabs()
			if err != nil {
				return infraError(err)
			}
			d := downRequest{all: all, force: force, removed: removed}
			if len(args) == 1 {
				d.name = args[0]
			}
			names, left, err := d.labs(running, func(lab string) (string, bool) { return ownerOf(rundir.Path(lab)) })
			if err != nil {
				return err
			}
			for _, line := range left {
				fmt.Fprintln(a.stdout, line)
			}
			if len(names) == 0 && len(removed) == 0 {
				fmt.Fprintln(a.stdout, "no lab is running")
			}
			var failed []error // one does not keep the others up
			for _, name := range names {
				c, err := findLab(name)
				if errors.Is(err, world.ErrNotRunning) {
					continue // it went down in between
				}
				start := time.Now()
				if err == nil {
					err = c.Down(cmd.Context())
				}
				if err != nil {
					failed = append(failed, fmt.Errorf("lab %s: %w", name, err))
					continue
				}
				fmt.Fprintf(a.stdout, "%s is gone (%s)\n", name, report.Duration(time.Since(start)))
			}
			return infraError(errors.Join(failed...))
		},
	}
	cmd.Flags().BoolVar(&all, "all", false, "all labs of yours")
	cmd.Flags().BoolVar(&force, "force", false, "also the lab of another user, when its whole name is given")
	return cmd
}

// ownerOf is the name of the user whose lab has this run directory, and whether
// the caller is that user.
func ownerOf(dir string) (name string, mine bool) {
	uid, err := rundir.Owner(dir)
	if err != nil { // it went away
		return "", true
	}
	return rundir.UserName(uid), rundir.Mine(dir)
}

// A downRequest says which labs shall go down.
type downRequest struct {
	name       string // or how it starts; empty: the only one
	all, force bool
	removed    []string // dead labs that are gone already
}

// labs are those of the running labs that are meant, and a line for each lab
// of somebody else that stays. owner tells whose a lab is, and whether it is the
// caller's.
func (d downRequest) labs(running []string, owner func(lab string) (name string, mine bool)) (names, left []string, err error) {
	var own []string
	for _, lab := range running {
		if who, mine := owner(lab); mine {
			own = append(own, lab)
		} else if d.name == "" {
			left = append(left, fmt.Sprintf("lab %s is %s's and stays: lab down %[1]s --force takes it down", lab, who))
		}
	}
	switch {
	case d.force && (d.all || d.name == ""):
		return nil, nil, usageError("--force: give the whole name of the lab: lab ls lists them")
	case d.all && d.name != "":
		return nil, nil, usageError("--all: %q is one of them: give the name or --all", d.name)
	case d.all:
		return own, left, nil
	case slices.Contains(running, d.name):
		if who, mine := owner(d.name); !mine && !d.force {
			return nil, nil, exitError{report.ExitInfra, fmt.Sprintf("lab: lab %s is %s's: ask, or take it down with lab down %[1]s --force", d.name, who)}
		}
		return []string{d.name}, nil, nil
	case d.force:
		return nil, nil, notRunning(d.name)
	case len(own) == 0 && d.name == "":
		return nil, left, nil
	case slices.ContainsFunc(d.removed, func(dead string) bool { return d.name != "" && strings.HasPrefix(dead, d.name) }) &&
		!slices.ContainsFunc(own, func(lab string) bool { return strings.HasPrefix(lab, d.name) }):
		return nil, nil, nil // it was dead, and is gone
	}
	if d.name == "" && len(own) > 1 {
		return nil, nil, usageError("several labs are up: lab down NAME takes one down, lab down --all all of them: %s", strings.Join(own, ", "))
	}
	name, err := pick(own, d.name)
	if err != nil {
		return nil, nil, err
	}
	return []string{name}, left, nil
}

func newLsCommand(a *app) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:     "ls",
		Short:   "list the labs that run",
		Example: "  lab ls\n  lab ls --json",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if _, err := removeDead(cmd.Context(), a.stderr, rundir.Base(), kind.Kept()); err != nil {
				return err
			}
			names, err := listLabs()
			if err != nil {
				return infraError(err)
			}
			all := []world.Status{}
			for _, name := range names {
				c, err := findLab(name)
				if errors.Is(err, world.ErrNotRunning) {
					continue // it went down in between
				} else if err != nil {
					return infraError(err)
				}
				s, err := c.Status(cmd.Context())
				if err != nil && s.Phase != world.PhaseFailed { // one that failed says why
					return infraError(err)
				}
				all = append(all, s)
			}
			if asJSON {
				return writeJSON(a.stdout, all)
			}
			for _, s := range all {
				var clusters []string
				for _, c := range s.Clusters {
					clusters = append(clusters, fmt.Sprintf("%s (%d nodes)", c.Name, len(c.Nodes)))
				}
				whose := ""
				if who, mine := ownerOf(rundir.Path(s.Name)); !mine {
					whose = "   of " + who
				}
				if s.Error != "" {
					whose += "   " + s.Error
				}
				fmt.Fprintf(a.stdout, "%-32s %-7s %-9s %s   up %s%s\n", s.Name, s.World, s.Phase, strings.Join(clusters, ", "), report.Duration(time.Since(s.Started)), whose)
			}
			return nil
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "as JSON")
	return cmd
}
