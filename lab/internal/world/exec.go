package world

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/lab/internal/pods"
)

// Streams are the ends of a command. Stdin may be nil.
type Streams struct {
	Stdin          io.Reader
	Stdout, Stderr io.Writer
	Resize         <-chan Resize
}

// An ExecFunc runs a command and returns its exit code.
type ExecFunc func(ctx context.Context, req ExecRequest, s Streams) (int, error)

// OwnTemp gives a command a directory of the lab for what it keeps in files,
// TMPDIR: what is below /tmp is the machine's, and other labs' too. dir is the
// lab's, and goes with it.
func OwnTemp(req *ExecRequest, dir string) error {
	dir = filepath.Join(dir, "tmp")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	req.Env = append([]string{"TMPDIR=" + dir}, req.Env...)
	return nil
}

// RunIn runs a command in a network namespace, with this process' files and
// tools, until it or ctx ends.
func RunIn(ctx context.Context, ns *Namespace, req ExecRequest, s Streams) (int, error) {
	if len(req.Argv) == 0 {
		return 0, errors.New("exec: there is no command")
	}
	cmd := exec.Command(req.Argv[0], req.Argv[1:]...)
	cmd.Env = append(os.Environ(), req.Env...)
	if req.TTY {
		return runOnTerminal(ctx, ns, cmd, req, s)
	}
	cmd.Stdout, cmd.Stderr = s.Stdout, s.Stderr
	// A group of its own, so that all of it can be ended.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.WaitDelay = 5 * time.Second // children may keep the pipes open
	if s.Stdin != nil {
		stdin, err := cmd.StdinPipe()
		if err != nil {
			return 0, err
		}
		go func() {
			io.Copy(stdin, s.Stdin)
			stdin.Close()
		}()
	}
	if err := ns.Start(cmd); err != nil {
		return 0, fmt.Errorf("exec %s: %w", req.Argv[0], err)
	}
	return wait(ctx, cmd)
}

// wait waits for a started command, and kills its process group when ctx ends
// first.
func wait(ctx context.Context, cmd *exec.Cmd) (int, error) {
	stop := context.AfterFunc(ctx, func() { syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) })
	defer stop()
	err := cmd.Wait()
	if ctx.Err() != nil {
		return 0, ctx.Err()
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

// runOnTerminal runs a command on a terminal of its own.
func runOnTerminal(ctx context.Context, ns *Namespace, cmd *exec.Cmd, req ExecRequest, s Streams) (int, error) {
	master, slave, err := openTerminal()
	if err != nil {
		return 0, fmt.Errorf("exec %s: terminal: %w", req.Argv[0], err)
	}
	defer master.Close()
	resizeTerminal(master, Resize{req.Rows, req.Cols})
	cmd.Stdin, cmd.Stdout, cmd.Stderr = slave, slave, slave
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	err = ns.Start(cmd)
	slave.Close()
	if err != nil {
		return 0, fmt.Errorf("exec %s: %w", req.Argv[0], err)
	}
	if s.Stdin != nil {
		go io.Copy(master, s.Stdin)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		for {
			select {
			case <-ctx.Done():
				return
			case r, ok := <-s.Resize:
				if !ok {
					return
				}
				resizeTerminal(master, r)
			}
		}
	}()
	copied := make(chan struct{})
	go func() {
		io.Copy(s.Stdout, master) // ends with EIO when the last process has closed it
		close(copied)
	}()
	code, err := wait(ctx, cmd)
	select {
	case <-copied:
	case <-time.After(time.Second): // something in the background keeps the terminal
	}
	return code, err
}

func openTerminal() (master, slave *os.File, err error) {
	master, err = os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, nil, err
	}
	conn, err := master.SyscallConn()
	if err != nil {
		master.Close()
		return nil, nil, err
	}
	var n int
	var ierr error
	if err := conn.Control(func(fd uintptr) {
		if ierr = unix.IoctlSetPointerInt(int(fd), unix.TIOCSPTLCK, 0); ierr == nil {
			n, ierr = unix.IoctlGetInt(int(fd), unix.TIOCGPTN)
		}
	}); err != nil || ierr != nil {
		master.Close()
		return nil, nil, errors.Join(err, ierr)
	}
	slave, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		master.Close()
		return nil, nil, err
	}
	return master, slave, nil
}

func resizeTerminal(master *os.File, r Resize) {
	if r.Rows == 0 || r.Cols == 0 {
		return
	}
	if conn, err := master.SyscallConn(); err == nil {
		conn.Control(func(fd uintptr) {
			unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, &unix.Winsize{Row: r.Rows, Col: r.Cols})
		})
	}
}

var errNotBuilt = errors.New("the world has not been built yet")

// exec runs a command in any target of the world.
func (a *agent) exec(ctx context.Context, req ExecRequest, s Streams) (int, error) {
	a.mu.Lock()
	n := a.network
	a.mu.Unlock()
	if n == nil {
		return 0, errNotBuilt
	}
	if h, ok := n.host(req.Target); ok {
		if err := a.asLab(&req); err != nil {
			return 0, err
		}
		return RunIn(ctx, h.ns, req, s)
	}
	pod, err := findPod(a.registry.Pods(), req.Target)
	if err != nil {
		return 0, fmt.Errorf("%w; hosts: %s", err, n.hostNames())
	}
	if req.Host {
		if err := a.asLab(&req); err != nil {
			return 0, err
		}
		ns := pod.Own()
		if ns == nil {
			ns = pod.NetNS
		}
		return RunIn(ctx, &Namespace{File: ns}, req, s)
	}
	var resize chan pods.TerminalSize
	if s.Resize != nil {
		resize = make(chan pods.TerminalSize, 1)
		if req.Rows > 0 && req.Cols > 0 {
			resize <- pods.TerminalSize{Width: req.Cols, Height: req.Rows}
		}
		go func() {
			defer close(resize)
			for r := range s.Resize {
				select {
				case resize <- pods.TerminalSize{Width: r.Cols, Height: r.Rows}:
				case <-ctx.Done():
					return
				}
			}
		}()
	}
	return a.registry.Exec(ctx, pods.ExecRequest{
		Cluster: pod.Cluster, Namespace: pod.Namespace, Pod: pod.Name, Container: req.Container,
		Argv: req.Argv, Env: req.Env, Stdin: s.Stdin, Stdout: s.Stdout, Stderr: s.Stderr, TTY: req.TTY, Resize: resize,
	})
}

// asLab gives a command that runs with this machine's files the lab's own tools
// and its directory for files.
func (a *agent) asLab(req *ExecRequest) error {
	a.findTool(req)
	return OwnTemp(req, a.cfg.Dir)
}

// findTool lets a command of the lab's own binaries be called by its name, as
// in a virtual machine, where they are in PATH.
func (a *agent) findTool(req *ExecRequest) {
	if len(req.Argv) == 0 || strings.Contains(req.Argv[0], "/") {
		return
	}
	own := filepath.Join(a.cfg.BinDir, req.Argv[0])
	if _, err := os.Stat(own); err == nil {
		req.Argv = slices.Concat([]string{own}, req.Argv[1:])
	}
}

// killContainer kills the first process of a container.
func (a *agent) killContainer(target, container string) error {
	pod, err := findPod(a.registry.Pods(), target)
	if err != nil {
		return err
	}
	if container == "" && len(pod.Containers) > 1 {
		return fmt.Errorf("pod %s has %d containers: say which", target, len(pod.Containers))
	}
	for _, c := range pod.Containers {
		if (container == "" || c.Name == container) && c.PID > 1 {
			return syscall.Kill(c.PID, syscall.SIGKILL)
		}
	}
	return fmt.Errorf("pod %s has no running container %s", target, container)
}
