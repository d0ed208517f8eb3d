package kind

import (
	"context"
	"fmt"
	"io"
	"os"
	osexec "os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"sigs.k8s.io/kind/pkg/cluster/nodes"
	"sigs.k8s.io/kind/pkg/exec"
)

// A near node is one of kind's, whose commands do without the engine where they can: its client
// takes a third of a second of a processor for each command, and a lab needs dozens of commands.
type near struct {
	nodes.Node // by the engine
	lab        *Lab
}

// Command is CommandContext with a context that does not end.
func (n near) Command(command string, args ...string) exec.Cmd {
	return n.CommandContext(context.Background(), command, args...)
}

// CommandContext is a command on the node.
func (n near) CommandContext(ctx context.Context, command string, args ...string) exec.Cmd {
	if direct := n.lab.direct(ctx, n.String(), append([]string{command}, args...)); direct != nil {
		return &nearCmd{exec.LocalCmd{Cmd: direct}}
	}
	return n.Node.CommandContext(ctx, command, args...)
}

// A nearCmd is a command of this machine that adds to its environment, as one of an engine does.
type nearCmd struct{ exec.LocalCmd }

func (c *nearCmd) SetEnv(env ...string) exec.Cmd {
	c.Env = append(c.Env, env...)
	return c
}

func (c *nearCmd) SetStdin(r io.Reader) exec.Cmd {
	c.Stdin = r
	return c
}

func (c *nearCmd) SetStdout(w io.Writer) exec.Cmd {
	c.Stdout = w
	return c
}

func (c *nearCmd) SetStderr(w io.Writer) exec.Cmd {
	c.Stderr = w
	return c
}

// direct is a command that enters the namespaces of a container by itself, where
// its processes are this machine's and this user is root; nil: it has to go by the
// engine. The environment is that of the container's first process, as with the engine.
func (l *Lab) direct(ctx context.Context, container string, argv []string) *osexec.Cmd {
	if !l.record.Shared { // the engine is on another machine
		return nil
	}
	if _, err := osexec.LookPath("nsenter"); err != nil {
		return nil
	}
	pid, err := l.processOf(ctx, container)
	if err != nil {
		return nil
	}
	environ, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
	if err != nil {
		return nil
	}
	// The working directory is that of the first process, which is / for nodes and hosts outside.
	cmd := osexec.CommandContext(ctx, "nsenter", slices.Concat([]string{
		"--target", strconv.Itoa(pid), "--mount", "--uts", "--ipc", "--net", "--pid", "--root", "--wd", "--",
	}, argv)...)
	cmd.Env = strings.Split(strings.Trim(string(environ), "\x00"), "\x00")
	// nsenter forks to be in the namespace of processes: both are to end.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	// A process that the command has left behind may hold its output open. What is in the pipe by
	// then is read at once, except where the machine stands still for seconds.
	cmd.WaitDelay = 10 * time.Second
	return cmd
}
