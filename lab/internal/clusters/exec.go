package clusters

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/httpstream"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/remotecommand"
	utilexec "k8s.io/client-go/util/exec"

	"github.com/isthmus-net/isthmus/lab/internal/expect"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// Streams are the ends of a command. Stdin may be nil.
type Streams struct {
	Stdin          io.Reader
	Stdout, Stderr io.Writer
	Resize         <-chan world.Resize
}

// An ExecFunc runs a command in a world and returns its exit code.
type ExecFunc func(ctx context.Context, req world.ExecRequest, s Streams) (int, error)

// Run runs a command to its end. A command that ran has no error, whatever its
// exit code.
func Run(ctx context.Context, req world.ExecRequest, exec ExecFunc) (world.ExecResult, error) {
	var out, problem bytes.Buffer
	s := Streams{Stdout: &out, Stderr: &problem}
	if len(req.Stdin) > 0 {
		s.Stdin = bytes.NewReader(req.Stdin)
	}
	code, err := exec(ctx, req, s)
	return world.ExecResult{Stdout: out.Bytes(), Stderr: problem.Bytes(), Code: code}, err
}

// untilEOF makes the probe end with its standard input: nobody kills what runs
// in a container when the connection to it ends, but its input ends then.
const untilEOF = "--until-eof"

// endTime is how long a probe may take to end when its input has: a message that
// is under way has a timeout of its own.
const endTime = 2 * time.Second

// Stream runs a command with its input and output connected, and returns its exit
// code. A probe ends with the context, wherever it runs.
func Stream(ctx context.Context, req world.ExecRequest, s Streams, exec ExecFunc) (int, error) {
	if s.Stdin != nil || len(req.Argv) == 0 || req.Argv[0] != expect.ProbeProgram {
		return exec(ctx, req, s)
	}
	// A file: no goroutine of os/exec waits for what is read from it.
	r, w, err := os.Pipe()
	if err != nil {
		return 0, err
	}
	defer r.Close()
	defer w.Close()
	req.Argv = slices.Insert(slices.Clone(req.Argv), 1, untilEOF)
	s.Stdin = r
	running, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	stop := context.AfterFunc(ctx, func() {
		w.Close()
		time.AfterFunc(endTime, cancel)
	})
	defer stop()
	code, err := exec(running, req, s)
	if ctx.Err() != nil {
		return 0, ctx.Err()
	}
	return code, err
}

// defaultContainer is the annotation that says in which container of a pod commands run,
// as kubectl heeds it: somebody may add containers to pods.
const defaultContainer = "kubectl.kubernetes.io/default-container"

// InContainer runs a command in a container of a pod, as kubectl exec does. The
// API has no way to set variables: req.Env has none for it.
func (s *Set) InContainer(ctx context.Context, cluster string, p corev1.Pod, req world.ExecRequest, st Streams) (int, error) {
	cfg, err := s.RESTConfig(ctx, cluster)
	if err != nil {
		return 0, err
	}
	client, err := s.Client(cluster)
	if err != nil {
		return 0, err
	}
	url := client.CoreV1().RESTClient().Post().Namespace(p.Namespace).Resource("pods").Name(p.Name).SubResource("exec").
		VersionedParams(&corev1.PodExecOptions{
			Container: cmp.Or(req.Container, p.Annotations[defaultContainer]), Command: req.Argv,
			Stdin: st.Stdin != nil, Stdout: true, Stderr: !req.TTY, TTY: req.TTY,
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
	options := remotecommand.StreamOptions{Stdin: st.Stdin, Stdout: st.Stdout, Tty: req.TTY}
	if !req.TTY {
		options.Stderr = st.Stderr
	} else if st.Resize != nil {
		options.TerminalSizeQueue = sizes{ctx, st.Resize, &remotecommand.TerminalSize{Width: req.Cols, Height: req.Rows}}
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
