package vm

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"github.com/isthmus-net/isthmus/lab/internal/rundir"
	"github.com/isthmus-net/isthmus/lab/internal/snapshot"
)

// RunConfig is what Run does in a machine.
type RunConfig struct {
	Argv           []string          // the first may be a path on the host: it is copied in
	Files          map[string]string // path in the guest, below the working directory → path on the host
	Env            []string          // "NAME=value"
	Modules        []string          // kernel modules to load first
	Stdout, Stderr io.Writer
	Console        io.Writer // gets the console when the machine failed; optional
	Accelerator    string    // default TCG
	// Snapshots has machines that have booted already; optional. Progress
	// hears how the machine came up; optional too.
	Snapshots *snapshot.Store
	Progress  func(string)
}

// Run boots a machine, runs one command in it, and returns its exit code. A
// kernel that was in trouble is an error whatever the command said.
func Run(ctx context.Context, img Image, cfg RunConfig) (int, error) {
	if len(cfg.Argv) == 0 {
		return 0, errors.New("virtual machine: there is no command")
	}
	dir, remove, err := rundir.Temporary()
	if err != nil {
		return 0, err
	}
	defer remove()
	payload := filepath.Join(dir, "payload.tar")
	if err := writePayload(payload, cfg); err != nil {
		return 0, noSpace(dir, err)
	}

	var code strings.Builder
	sinks := []io.Writer{orDiscard(cfg.Stdout), orDiscard(cfg.Stderr), &code}
	var ports []Port
	var copies sync.WaitGroup
	for i, sink := range sinks {
		r, w, err := os.Pipe()
		if err != nil {
			return 0, err
		}
		defer r.Close()
		defer w.Close()
		ports = append(ports, Port{Name: [...]string{"lab.out", "lab.err", "lab.exit"}[i], To: w})
		copies.Go(func() { io.Copy(sink, r) })
	}
	// The machine must not outlive a runner that is killed. The signal comes
	// when the thread ends that started QEMU, so this one is kept until then.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	start := func(cmd *exec.Cmd) error {
		cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
		return cmd.Start()
	}
	m, how, err := Start(ctx, Config{Start: start, Image: img, Ports: ports, Payload: payload, CommandLine: []string{"lab.mode=run"}, Dir: dir, Accelerator: cfg.Accelerator}, cfg.Snapshots)
	if err != nil {
		return 0, err
	}
	if cfg.Progress != nil {
		cfg.Progress(how.String())
	}
	select {
	case <-m.Done():
	case <-ctx.Done():
		m.Kill()
	}
	for _, p := range ports { // QEMU's copies are gone: the pipes end
		p.To.Close()
	}
	copies.Wait()
	if ctx.Err() != nil {
		return 0, fmt.Errorf("virtual machine: %w", context.Cause(ctx))
	}
	failed := func(err error) (int, error) {
		if cfg.Console != nil {
			io.WriteString(cfg.Console, m.Console())
		}
		return 0, err
	}
	if alarms := m.Alarms(); len(alarms) > 0 {
		return failed(fmt.Errorf("the guest's kernel is in trouble: %s", strings.Join(alarms, "; ")))
	}
	n, err := strconv.Atoi(strings.TrimSpace(code.String()))
	if err != nil {
		return failed(fmt.Errorf("the command did not say how it ended: %w", m.Ended()))
	}
	return n, nil
}

// writePayload writes the command and its files as a tar archive.
func writePayload(dst string, cfg RunConfig) (err error) {
	f, err := os.Create(dst)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	w := tar.NewWriter(f)
	add := func(name, src string) error {
		in, err := os.Open(src)
		if err != nil {
			return err
		}
		defer in.Close()
		st, err := in.Stat()
		if err != nil {
			return err
		}
		if err := w.WriteHeader(&tar.Header{Name: name, Mode: int64(st.Mode().Perm()), Size: st.Size(), ModTime: st.ModTime()}); err != nil {
			return err
		}
		_, err = io.Copy(w, in)
		return err
	}
	argv := slices.Clone(cfg.Argv)
	if st, err := os.Stat(argv[0]); err == nil && st.Mode().IsRegular() && strings.Contains(argv[0], "/") {
		name := filepath.Base(argv[0])
		if err := add(name, argv[0]); err != nil {
			return err
		}
		argv[0] = "/run/payload/" + name
	}
	for _, name := range slices.Sorted(maps.Keys(cfg.Files)) {
		if err := add(strings.TrimPrefix(path.Clean("/"+name), "/"), cfg.Files[name]); err != nil {
			return err
		}
	}
	script := "cd /run/payload\n"
	for _, e := range cfg.Env {
		name, value, _ := strings.Cut(e, "=")
		script += "export " + name + "=" + quote(value) + "\n"
	}
	for _, m := range cfg.Modules {
		script += "modprobe " + quote(m) + " || exit 1\n"
	}
	script += "exec"
	for _, a := range argv {
		script += " " + quote(a)
	}
	script += "\n"
	if err := w.WriteHeader(&tar.Header{Name: "run.sh", Mode: 0o755, Size: int64(len(script))}); err != nil {
		return err
	}
	if _, err := io.WriteString(w, script); err != nil {
		return err
	}
	return w.Close()
}

// quote makes one word of a shell's command line.
func quote(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }

func orDiscard(w io.Writer) io.Writer {
	if w == nil {
		return io.Discard
	}
	return w
}
