package main

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/lab/internal/report"
	"github.com/isthmus-net/isthmus/lab/internal/scenario"
	"github.com/isthmus-net/isthmus/lab/internal/topology"
	"github.com/isthmus-net/isthmus/lab/internal/yamlfile"
)

func newLintCommand(a *app, root *string) *cobra.Command {
	return &cobra.Command{
		Use:   "lint [FILE...]",
		Short: "check topologies and scenarios without building anything",
		Long: `lint reads topologies and scenarios and says what is wrong with them, with file,
line and column: unknown keys, names that do not exist, absences without a
positive control, scenarios without sabotage. Without files it reads all.`,
		Example: "  lab lint\n  lab lint scenarios/pod-to-pod.yaml",
		RunE: func(_ *cobra.Command, args []string) error {
			p, err := findPlace(*root)
			if err != nil {
				return err
			}
			if len(args) == 0 {
				for _, dir := range []string{p.topologies(), p.scenarios()} {
					found, err := filepath.Glob(filepath.Join(dir, "*.yaml"))
					if err != nil {
						return infraError(err)
					}
					args = append(args, found...)
				}
			}
			bad, rows := 0, 0
			for _, path := range args {
				n, err := lintFile(p, path)
				rows += n
				var mistakes *yamlfile.Error
				switch {
				case errors.As(err, &mistakes):
					bad += len(mistakes.Problems)
					fmt.Fprintln(a.stdout, err)
				case err != nil:
					return fileError(path, err)
				}
			}
			if bad > 0 {
				return exitError{report.ExitUsage, fmt.Sprintf("lab: %d mistakes in %d files", bad, len(args))}
			}
			fmt.Fprintf(a.stdout, "%d files, %d rows: no mistakes\n", len(args), rows)
			return nil
		},
	}
}

// fileError is the error for a file that the user has named and that can't be
// read.
func fileError(path string, err error) error {
	switch {
	case errors.Is(err, syscall.EISDIR):
		return usageError("%s is a folder: name files in it, such as %s", path, filepath.Join(path, "*.yaml"))
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ENOTDIR), errors.Is(err, fs.ErrPermission):
		return usageError("%v", err)
	}
	return infraError(err)
}

// lintFile reads a file as what its folder says, and returns its rows.
func lintFile(p place, path string) (int, error) {
	if filepath.Base(filepath.Dir(path)) == "topologies" {
		_, err := topology.Load(path)
		return 0, err
	}
	s, err := scenario.Load(path, p.topologies())
	if err != nil {
		return 0, err
	}
	return len(s.Rows), nil
}

func newSchemaCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:       "schema topology|scenario",
		Short:     "print the JSON schema of a kind of file, for editors",
		Example:   "  lab schema scenario > .vscode/scenario.schema.json",
		Args:      cobra.MatchAll(cobra.ExactArgs(1), cobra.OnlyValidArgs),
		ValidArgs: []string{"topology", "scenario"},
		RunE: func(_ *cobra.Command, args []string) error {
			if args[0] == "topology" {
				return writeJSON(a.stdout, topology.Schema())
			}
			return writeJSON(a.stdout, scenario.Schema())
		},
	}
}
