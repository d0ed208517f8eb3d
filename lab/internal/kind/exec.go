package kind

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	osexec "os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/httpstream"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/remotecommand"
	utilexec "k8s.io/client-go/util/exec"
	"sigs.k8s.io/kind/pkg/exec"

	"github.com/isthmus-net/isthmus/lab/internal/deploy"
	"github.com/isthmus-net/isthmus/lab/internal/expect"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// streams are the ends of a command. stdin may be nil.
type streams struct {
	stdin          io.Reader
	stdout, stderr io.Writer
	resize         <-chan world.Resize
}

// Exec runs a command to its end. A command that ran has no error, whatever its
// exit code.
func (l *Lab) Exec(ctx context.Context, req world.ExecRequest) (world.ExecResult, error) {
	var out, problem bytes.Buffer
	s := streams{stdout: &out, stderr: &problem}
	if len(req.Stdin) > 0 {
		s.stdin = bytes.NewReader(req.Stdin)
	}
	code, err := l.exec(ctx, req, s)
	return world.ExecResult{Stdout: out.Bytes(), Stderr: problem.Bytes(), Code: code}, err
}

// untilEOF makes the probe end with its standard input: nobody kills what runs
// in a container when the connection to it ends, but its input ends then.
const untilEOF = "--until-eof"

// endTime is how long a probe may take to end when its input has: a message that
// is under way has a timeout of its own.
const endTime = 2 * time.Second

// ExecStream runs a command with its input and output connected, and returns its
// exit code. Terminals are for commands in containers only: kind's library gives
// nodes none.
func (l *Lab) ExecStream(ctx context.Context, req world.ExecRequest, stdin io.Reader, stdout, stderr io.Writer, resize <-chan world.Resize) (int, error) {
	s := streams{stdin, stdout, stderr, resize}
	if stdin != nil || len(req.Argv) == 0 || req.Argv[0] != expect.ProbeProgram {
		return l.exec(ctx, req, s)
	}
	// A file: no goroutine of os/exec waits for what is read from it.
	r, w, err := os.Pipe()
	if err != nil {
		return 0, err
	}
	defer r.Close()
	defer w.Close()
	req.Argv = slices.Insert(slices.Clone(req.Argv), 1, untilEOF)
	s.stdin = r
	running, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	stop := context.AfterFunc(ctx, func() {
		w.Close()
		time.AfterFunc(endTime, cancel)
	})
	defer stop()
	code, err := l.exec(running, req, s)
	if ctx.Err() != nil {
		return 0, ctx.Err()
	}
	return code, err
}

// exec runs a command where its target says: on a node; in a container of a pod,
// by the API server; or with a node's tools in the network namespace of a pod.
func (l *Lab) exec(ctx context.Context, req world.ExecRequest, s streams) (int, error) {
	if len(req.Argv) == 0 {
		return 0, errors.New("exec: there is no command")
	}
	if container, ok := l.outside(req.Target); ok {
		return l.onOutside(ctx, container, req, s)
	}
	cluster, name, _ := strings.Cut(req.Target, "/")
	c, ok := l.cluster(cluster)
	if !ok {
		return 0, fmt.Errorf("%w: %q", world.ErrNoTarget, req.Target)
	}
	if _, ok := c.Containers[name]; ok {
		return l.onNode(ctx, cluster, name, req, s)
	}
	all, err := l.pods(ctx, cluster)
	if err != nil {
		return 0, err
	}
	p, err := findPod(all, req.Target)
	if err != nil {
		return 0, err
	}
	isProbe := len(p.Spec.Containers) > 0 && p.Spec.Containers[0].Image == deploy.ProbeImage && req.Argv[0] == expect.ProbeProgram
	switch {
	case !req.Host || isProbe:
		return l.inContainer(ctx, cluster, p, req, s)
	case p.Spec.HostNetwork:
		return l.onNode(ctx, cluster, p.Spec.NodeName, req, s)
	}
	req.Argv = slices.Concat([]string{"sh", "-c", inPod, "sh", p.Namespace, p.Name}, req.Argv)
	return l.onNode(ctx, cluster, p.Spec.NodeName, req, s)
}

// inPod runs its arguments from the third on in the network namespace of the pod
// that the first two name. containerd's CRI knows the path of the namespace.
const inPod = `set -e
pod=$(crictl pods --quiet --state ready --namespace "$1" --name "^$2\$")
[ -n "$pod" ] || { echo "containerd runs no pod $1/$2" >&2; exit 125; }
ns=$(crictl inspectp "$pod" | jq -r '.info.runtimeSpec.linux.namespaces[] | select(.type == "network") | .path')
shift 2
exec nsenter --net="$ns" -- "$@"`

// nodeTemp is the directory for files of commands on nodes: each is a container
// of the lab's own.
const nodeTemp = "TMPDIR=/tmp"

// onNode runs a command in the container that is a node, by kind's library.
func (l *Lab) onNode(ctx context.Context, cluster, name string, req world.ExecRequest, s streams) (int, error) {
	n, err := l.node(cluster, name)
	if err != nil {
		return 0, err
	}
	if req.TTY {
		return 0, fmt.Errorf("exec on %s: kind gives nodes no terminal; run: %s exec -it %s %s", req.Target, l.record.Engine, n, strings.Join(req.Argv, " "))
	}
	if direct := l.direct(ctx, n.String(), req); direct != nil {
		direct.Stdin, direct.Stdout, direct.Stderr = s.stdin, s.stdout, s.stderr
		err = direct.Run()
	} else {
		cmd := n.CommandContext(ctx, req.Argv[0], req.Argv[1:]...).SetEnv(slices.Concat([]string{nodeTemp}, req.Env)...)
		if s.stdin != nil {
			cmd = cmd.SetStdin(s.stdin)
		}
		err = cmd.SetStdout(s.stdout).SetStderr(s.stderr).Run()
	}
	if ctx.Err() != nil {
		return 0, ctx.Err()
	}
	code, err := exitCode(err)
	if err != nil {
		return 0, fmt.Errorf("exec on %s: %w", req.Target, err)
	}
	return code, nil
}

// direct is a command that enters the namespaces of a container by itself, where
// its processes are this machine's and this user is root; nil: it has to go by the
// engine, whose client takes a third of a second of a processor for each command.
// The environment is that of the container's first process, as with the engine.
func (l *Lab) direct(ctx context.Context, container string, req world.ExecRequest) *osexec.Cmd {
	pid, err := l.processOf(ctx, container)
	if err != nil {
		return nil
	}
	environ, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
	if err != nil {
		return nil
	}
	cmd := osexec.CommandContext(ctx, "nsenter", slices.Concat([]string{
		"--target", strconv.Itoa(pid), "--mount", "--uts", "--ipc", "--net", "--pid", "--root", "--wdns=/", "--",
	}, req.Argv)...)
	cmd.Env = slices.Concat(strings.Split(strings.Trim(string(environ), "\x00"), "\x00"), []string{nodeTemp}, req.Env)
	// nsenter forks to be in the namespace of processes: both are to end.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	return cmd
}

// exitCode is that of the command, which the engine's client ends with, too. An
// error is for a command that did not run.
func exitCode(err error) (int, error) {
	var run *exec.RunError // of kind's library
	inner := err
	if errors.As(err, &run) {
		inner = run.Inner
	}
	var exit *osexec.ExitError
	if !errors.As(inner, &exit) || exit.ExitCode() < 0 {
		return 0, err
	}
	return exit.ExitCode(), nil
}

// inContainer runs a command in a container of a pod, as kubectl exec does. The
// API has no way to set variables: req.Env has none for it.
func (l *Lab) inContainer(ctx context.Context, cluster string, p corev1.Pod, req world.ExecRequest, s streams) (int, error) {
	cfg, err := l.RESTConfig(ctx, cluster)
	if err != nil {
		return 0, err
	}
	client, err := l.client(cluster)
	if err != nil {
		return 0, err
	}
	url := client.CoreV1().RESTClient().Post().Namespace(p.Namespace).Resource("pods").Name(p.Name).SubResource("exec").
		VersionedParams(&corev1.PodExecOptions{
			Container: req.Container, Command: req.Argv,
			Stdin: s.stdin != nil, Stdout: true, Stderr: !req.TTY, TTY: req.TTY,
		}, scheme.ParameterCodec).URL()
	// As kubectl: websockets, and SPDY where a proxy or an old API server
	// does not know them.
	socket, err := remotecommand.NewWebSocketExecutor(cfg, "GET", url.String())
	if err != nil {
		return 0, err
	}
	spdy, err := remotecommand.NewSPDYExecutor(cfg, "POST", url)
	if err != nil {
		return 0, err
	}
	executor, err := remotecommand.NewFallbackExecutor(socket, spdy, func(err error) bool {
		return httpstream.IsUpgradeFailure(err) || httpstream.IsHTTPSProxyError(err)
	})
	if err != nil {
		return 0, err
	}
	options := remotecommand.StreamOptions{Stdin: s.stdin, Stdout: s.stdout, Tty: req.TTY}
	if !req.TTY {
		options.Stderr = s.stderr
	} else if s.resize != nil {
		options.TerminalSizeQueue = sizes{ctx, s.resize, &remotecommand.TerminalSize{Width: req.Cols, Height: req.Rows}}
	}
	err = executor.StreamWithContext(ctx, options)
	var exit utilexec.ExitError
	if errors.As(err, &exit) && exit.Exited() {
		return exit.ExitStatus(), nil
	}
	if err != nil {
		return 0, fmt.Errorf("exec in pod %s/%s/%s: %w", cluster, p.Namespace, p.Name, err)
	}
	return 0, nil
}

// sizes are the sizes of a terminal, the first one at once.
type sizes struct {
	ctx    context.Context
	resize <-chan world.Resize
	first  *remotecommand.TerminalSize
}

// Next waits for the next size; nil: there is none any more.
func (s sizes) Next() *remotecommand.TerminalSize {
	if s.first.Width > 0 {
		first := *s.first
		s.first.Width = 0
		return &first
	}
	select {
	case r, ok := <-s.resize:
		if ok {
			return &remotecommand.TerminalSize{Width: r.Cols, Height: r.Rows}
		}
	case <-s.ctx.Done():
	}
	return nil
}

// killScript kills the processes of the containers of the pod that its arguments
// name with SIGKILL; the third argument is a container, or nothing for all.
// Where none runs nothing is killed, which is an error.
const killScript = `set -e
pod=$(crictl pods --quiet --state ready --namespace "$1" --name "^$2\$")
[ -n "$pod" ] || { echo "containerd runs no pod $1/$2" >&2; exit 1; }
ids=$(crictl ps --quiet --pod "$pod" ${3:+--name "^$3\$"})
[ -n "$ids" ] || { echo "pod $1/$2 has no running container${3:+ $3}" >&2; exit 1; }
for id in $ids; do
	kill -KILL "$(crictl inspect "$id" | jq .info.pid)"
done`

// KillContainer kills a container's process with SIGKILL. The kubelet starts it
// again. The empty container name means the pod's only one.
func (l *Lab) KillContainer(ctx context.Context, target, container string) error {
	cluster, _, _ := strings.Cut(target, "/")
	all, err := l.pods(ctx, cluster)
	if err != nil {
		return err
	}
	p, err := findPod(all, target)
	if err != nil {
		return err
	}
	if container == "" && len(p.Spec.Containers) != 1 {
		return fmt.Errorf("kill in %s: it has %d containers: say which", target, len(p.Spec.Containers))
	}
	n, err := l.node(cluster, p.Spec.NodeName)
	if err != nil {
		return err
	}
	return runOn(ctx, n, nil, "sh", "-c", killScript, "sh", p.Namespace, p.Name, container)
}
