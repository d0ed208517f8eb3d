package main

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/lab/internal/report"
	"github.com/isthmus-net/isthmus/lab/internal/snapshot"
	"github.com/isthmus-net/isthmus/lab/internal/vm"
)

func newVMCommand(a *app, root *string) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "vm",
		Short: "the virtual machine of the vm world: its image, its snapshots, and programs run in it",
	}
	cmd.AddCommand(newVMImageCommand(a, root), newVMTestCommand(a, root), newVMSnapshotsCommand(a))
	return cmd
}

// image finds the kernel and builds the image, saying what takes long.
func (a *app) image(ctx context.Context, root string) (vm.Image, error) {
	p, err := findPlace(root)
	if err != nil {
		return vm.Image{}, err
	}
	return buildImage(ctx, p, a.stdout)
}

func buildImage(ctx context.Context, p place, out io.Writer) (vm.Image, error) {
	say := func(s string) { fmt.Fprintln(out, "  ", s) }
	kernel, err := vm.FindKernel(ctx, "", "", say)
	if err != nil {
		return vm.Image{}, infraError(err)
	}
	img, err := vm.BuildImage(ctx, kernel, vm.ImageConfig{BinDir: p.bin(), Progress: say})
	return img, infraError(err)
}

func newVMImageCommand(a *app, root *string) *cobra.Command {
	return &cobra.Command{
		Use:     "image",
		Short:   "fetch the kernel and build the image, unless they are there already",
		Example: "  lab vm image",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			img, err := a.image(cmd.Context(), *root)
			if err != nil {
				return err
			}
			fmt.Fprintf(a.stdout, "kernel %s\nimage  %s\n", img.Kernel.Release, img.Disk)
			return nil
		},
	}
}

func newVMTestCommand(a *app, root *string) *cobra.Command {
	var modules []string
	var snapshots string
	var timeout time.Duration
	cmd := &cobra.Command{
		Use:   "test PROGRAM [-- ARGS...]",
		Short: "run a program, such as a compiled test, on the machine's kernel; its exit code is this one's",
		Example: `  go test -c -o bin/kernel.test ./appliance/kernel && lab vm test bin/kernel.test -- -test.v
  lab vm test uname -- -a`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
			defer cancel()
			warm, err := useSnapshots(snapshots)
			if err != nil {
				return err
			}
			var store *snapshot.Store
			if warm {
				if store, err = openSnapshots(); err != nil {
					return err
				}
			}
			img, err := a.image(ctx, *root)
			if err != nil {
				return err
			}
			accelerator, why := vm.Accelerator(ctx, img, "")
			fmt.Fprintf(a.stdout, "   kernel %s, %s: %s\n", img.Kernel.Release, accelerator, why)
			code, err := vm.Run(ctx, img, vm.RunConfig{
				Argv: args, Modules: modules, Env: []string{"CI=1"}, Accelerator: accelerator,
				Stdout: a.stdout, Stderr: a.stderr, Console: a.stderr,
				Snapshots: store, Progress: func(s string) { fmt.Fprintln(a.stdout, "  ", s) },
			})
			if err != nil {
				return infraError(err)
			}
			if code != 0 {
				return exitError{report.ExitFail, fmt.Sprintf("lab: %s ended with exit code %d in the virtual machine", strings.Join(args, " "), code)}
			}
			return nil
		},
	}
	cmd.Flags().StringSliceVar(&modules, "module", nil, "kernel module to load first; may be repeated")
	cmd.Flags().DurationVar(&timeout, "timeout", 15*time.Minute, "for everything")
	snapshotFlag(cmd, &snapshots)
	return cmd
}
