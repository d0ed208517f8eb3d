package kind

import (
	"context"
	"errors"
	"fmt"
	"io"
	osexec "os/exec"
	"path/filepath"
	"slices"
	"strings"

	"sigs.k8s.io/kind/pkg/exec"

	"github.com/isthmus-net/isthmus/lab/internal/clusters"
	"github.com/isthmus-net/isthmus/lab/internal/deploy"
	"github.com/isthmus-net/isthmus/lab/internal/expect"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// Exec runs a command to its end. A command that ran has no error, whatever its
// exit code.
func (l *Lab) Exec(ctx context.Context, req world.ExecRequest) (world.ExecResult, error) {
	return clusters.Run(ctx, req, l.exec)
}

// ExecStream runs a command with its input and output connected, and returns its
// exit code. Terminals are for commands in containers only: kind's library gives
// nodes none.
func (l *Lab) ExecStream(ctx context.Context, req world.ExecRequest, stdin io.Reader, stdout, stderr io.Writer, resize <-chan world.Resize) (int, error) {
	return clusters.Stream(ctx, req, clusters.Streams{Stdin: stdin, Stdout: stdout, Stderr: stderr, Resize: resize}, l.exec)
}

// exec runs a command where its target says: on a node; in a container of a pod,
// by the API server; or with a node's tools in the network namespace of a pod.
func (l *Lab) exec(ctx context.Context, req world.ExecRequest, s clusters.Streams) (int, error) {
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
	p, err := l.Find(ctx, req.Target)
	if err != nil {
		return 0, err
	}
	isProbe := len(p.Spec.Containers) > 0 && p.Spec.Containers[0].Image == deploy.ProbeImage && req.Argv[0] == expect.ProbeProgram
	switch {
	case !req.Host || isProbe:
		return l.InContainer(ctx, cluster, p, req, s)
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

// sharedOnNode is the directory for files of commands on nodes, which all hosts of the lab
// have as those of other worlds do. Where the engine is on another machine each has its own.
const sharedOnNode = "/kind/shared"

// shared is that directory on this machine. It is empty where each host has its own.
func (l *Lab) shared() string {
	if !l.record.Shared {
		return ""
	}
	return filepath.Join(l.dir, sharedDir)
}

// sharedDir is in the run directory.
const sharedDir = "shared"

// temp is the variable that tells commands where to have files.
func (l *Lab) temp() string {
	if !l.record.Shared {
		return "TMPDIR=/tmp"
	}
	return "TMPDIR=" + sharedOnNode
}

// onNode runs a command in the container that is a node.
func (l *Lab) onNode(ctx context.Context, cluster, name string, req world.ExecRequest, s clusters.Streams) (int, error) {
	n, err := l.node(cluster, name)
	if err != nil {
		return 0, err
	}
	if name == world.ControlPlaneHost {
		req.Env = append([]string{world.KubeconfigsVariable + "=" + kubeconfigs}, req.Env...)
	}
	if req.TTY {
		return 0, fmt.Errorf("exec on %s: kind gives nodes no terminal; run: %s exec -it %s %s", req.Target, l.record.Engine, n, strings.Join(req.Argv, " "))
	}
	if direct := l.direct(ctx, n.String(), req.Argv); direct != nil {
		direct.Env = slices.Concat(direct.Env, []string{l.temp()}, req.Env)
		direct.Stdin, direct.Stdout, direct.Stderr = s.Stdin, s.Stdout, s.Stderr
		err = direct.Run()
	} else {
		cmd := n.Node.CommandContext(ctx, req.Argv[0], req.Argv[1:]...).SetEnv(slices.Concat([]string{l.temp()}, req.Env)...)
		if s.Stdin != nil {
			cmd = cmd.SetStdin(s.Stdin)
		}
		err = cmd.SetStdout(s.Stdout).SetStderr(s.Stderr).Run()
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

// exitCode is that of the command, which the engine's client ends with, too. An
// error is for a command that did not run.
func exitCode(err error) (int, error) {
	if errors.Is(err, osexec.ErrWaitDelay) { // it has ended well, and left something behind
		return 0, nil
	}
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
	p, err := l.Find(ctx, target)
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
