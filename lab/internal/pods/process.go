package pods

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"syscall"
	"time"

	"github.com/isthmus-net/isthmus/lab/internal/containerinit"
	"github.com/isthmus-net/isthmus/lab/internal/netns"
	"github.com/isthmus-net/isthmus/lab/internal/niceness"
	"golang.org/x/sys/unix"
)

// process is one run of a container: PID 1 of its PID namespace.
type process struct {
	cmd      *exec.Cmd
	env      []string
	security containerinit.Security
	dir      string
	started  time.Time
	done     chan struct{} // closed when it has ended
	exit     int           // 128 + signal when a signal ended it; read after done
	finished time.Time
}

// startProcess starts a container in a network namespace and returns when the
// program of the image runs. Its output goes to log.
func startProcess(init []string, ns *os.File, nice int, spec containerinit.Spec, log io.WriteCloser) (*process, error) {
	specR, specW, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	statusR, statusW, err := os.Pipe()
	if err != nil {
		specR.Close()
		specW.Close()
		return nil, err
	}
	defer statusR.Close()
	cmd := exec.Command(init[0], init[1:]...)
	cmd.Env = []string{}
	cmd.ExtraFiles = []*os.File{containerinit.SpecFD - 3: specR, containerinit.StatusFD - 3: statusW}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWNS | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS,
		Setsid:     true,
	}
	logged := make(chan struct{})
	stdout, err := cmd.StdoutPipe()
	if err == nil {
		var stderr io.ReadCloser
		if stderr, err = cmd.StderrPipe(); err == nil {
			err = netns.Do(ns, cmd.Start)
			if err == nil {
				go func() {
					copyLog(log, stdout, stderr)
					close(logged)
				}()
			}
		}
	}
	specR.Close()
	statusW.Close()
	if err != nil {
		specW.Close()
		log.Close()
		return nil, fmt.Errorf("start container-init: %w", err)
	}
	p := &process{cmd: cmd, env: spec.Env, security: spec.Security, dir: spec.Dir, started: time.Now(), done: make(chan struct{})}
	// While it waits for what it is to become.
	niceErr := niceness.SetGroup(p.pid(), nice)
	writeErr := json.NewEncoder(specW).Encode(spec)
	specW.Close()
	// Empty when the exec succeeded: the descriptor closed with it.
	message, readErr := io.ReadAll(statusR)
	go p.wait(logged)
	if err := errors.Join(niceErr, writeErr, readErr); err != nil || len(message) > 0 {
		p.kill(syscall.SIGKILL)
		<-p.done
		if len(message) > 0 {
			return nil, errors.New(string(message))
		}
		return nil, err
	}
	return p, nil
}

func (p *process) wait(logged <-chan struct{}) {
	// Not cmd.Wait: it would close the pipes before the log has read them.
	state, err := p.cmd.Process.Wait()
	p.finished = time.Now()
	p.exit = 255
	if err == nil {
		p.exit = state.ExitCode()
		if ws, ok := state.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
			p.exit = 128 + int(ws.Signal())
		}
	}
	// PID 1 took all that could still write with it, so the log ends now; who
	// sees the container ended must find its last line.
	<-logged
	close(p.done)
}

func (p *process) pid() int { return p.cmd.Process.Pid }

func (p *process) kill(sig syscall.Signal) { _ = p.cmd.Process.Signal(sig) }

// stop asks the process to end, and ends it when patience is over.
func (p *process) stop(patience context.Context) {
	if patience.Err() == nil {
		p.kill(syscall.SIGTERM)
	}
	select {
	case <-p.done:
	case <-patience.Done():
		p.kill(syscall.SIGKILL)
		<-p.done
	}
}

// enterNamespaces are joined by a command in a running container, the mount
// namespace last: after it, /proc is the container's.
var enterNamespaces = []struct {
	name string
	flag int
}{{"net", unix.CLONE_NEWNET}, {"ipc", unix.CLONE_NEWIPC}, {"uts", unix.CLONE_NEWUTS}, {"pid", unix.CLONE_NEWPID}, {"mnt", unix.CLONE_NEWNS}}

// exec runs a command in the container and returns its exit code. It ends with
// ctx or with the container.
//
// A thread of its own enters the namespaces and gives up what the container
// may not do; the command, its child, inherits all of it. The thread is never
// used again.
func (p *process) exec(ctx context.Context, req ExecRequest) (int, error) {
	if len(req.Argv) == 0 {
		return 0, errors.New("exec: no command")
	}
	cmd := exec.Command(req.Argv[0])
	cmd.Args = req.Argv
	cmd.Env = slices.Concat(p.env, req.Env)
	cmd.Stdout, cmd.Stderr = req.Stdout, req.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	// A descendant that keeps the output open must not keep Wait for ever.
	cmd.WaitDelay = 2 * time.Second
	var tty *terminal
	if req.Stdin != nil && !req.TTY {
		// Not cmd.Stdin: Wait would wait for a user who types nothing more.
		stdin, err := cmd.StdinPipe()
		if err != nil {
			return 0, err
		}
		go func() {
			_, _ = io.Copy(stdin, req.Stdin)
			stdin.Close()
		}()
	}
	if req.TTY {
		var err error
		if tty, err = openTerminal(); err != nil {
			return 0, err
		}
		defer tty.close()
		cmd.Stdin, cmd.Stdout, cmd.Stderr = tty.slave, tty.slave, tty.slave
		cmd.SysProcAttr.Setctty = true
	}
	if err := netns.OnSpareThread(func() error { return p.startInside(cmd) }); err != nil {
		return 0, fmt.Errorf("exec %s: %w", req.Argv[0], err)
	}
	waited := make(chan error, 1)
	go func() { waited <- cmd.Wait() }()
	if tty != nil {
		tty.slave.Close()
		tty.copy(req)
	}
	var err error
	select {
	case err = <-waited:
	case <-ctx.Done():
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
		<-waited
		return 0, ctx.Err()
	}
	if tty != nil {
		tty.drain()
	}
	var exit *exec.ExitError
	switch {
	case err == nil, errors.Is(err, exec.ErrWaitDelay):
		return cmd.ProcessState.ExitCode(), nil
	case errors.As(err, &exit):
		if ws, ok := exit.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
			return 128 + int(ws.Signal()), nil
		}
		return exit.ExitCode(), nil
	}
	return 0, err
}

// startInside must be called on a thread that ends afterwards.
func (p *process) startInside(cmd *exec.Cmd) error {
	var files []*os.File
	defer func() {
		for _, f := range files {
			f.Close()
		}
	}()
	for _, ns := range enterNamespaces {
		f, err := os.Open(fmt.Sprintf("/proc/%d/ns/%s", p.pid(), ns.name))
		if err != nil {
			return errors.New("the container has ended")
		}
		files = append(files, f)
	}
	// A thread that shares its working directory and root with others may
	// not change its mount namespace.
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return fmt.Errorf("unshare file system attributes: %w", err)
	}
	for i, ns := range enterNamespaces {
		if err := unix.Setns(int(files[i].Fd()), ns.flag); err != nil {
			return fmt.Errorf("enter %s namespace: %w", ns.name, err)
		}
	}
	path, err := containerinit.LookPath(cmd.Args[0], cmd.Env, p.dir)
	if err != nil {
		return err
	}
	cmd.Path, cmd.Err = path, nil
	cmd.Dir = p.dir
	unix.Umask(0o022)
	if err := p.security.Apply(); err != nil {
		return err
	}
	return cmd.Start()
}
