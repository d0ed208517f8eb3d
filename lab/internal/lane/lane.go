// Package lane sends load along one way through a lab: it starts the server of
// package load at one end and measures from the other.
package lane

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/netip"
	"strconv"
	"strings"
	"sync"

	"github.com/isthmus-net/isthmus/lab/internal/load"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// program is the lab's program for test traffic (lab/cmd/probe), as the agent
// starts it in the network namespace of a host or a pod.
const program = "probe"

// A World is what is needed of a lab; *world.Client is one.
type World interface {
	Exec(ctx context.Context, req world.ExecRequest) (world.ExecResult, error)
	ExecStream(ctx context.Context, req world.ExecRequest, stdin io.Reader, stdout, stderr io.Writer, resize <-chan world.Resize) (int, error)
}

// A Lane is where load begins and ends: two targets of exec, and the address by
// which the first calls the second. Nice is the niceness of the load generator.
type Lane struct {
	From, To string
	Addr     netip.Addr
	Nice     int
}

// String is the lane for people.
func (l Lane) String() string { return fmt.Sprintf("%s → %s (%s)", l.From, l.To, l.Addr) }

// Serve starts a server at the lane's end, and returns when it listens. It runs
// until stop is called or ctx ends; when stop returns, its port is free again.
func (l Lane) Serve(ctx context.Context, w World) (stop func(), err error) {
	stdin, toServer := io.Pipe()
	fromServer, stdout := io.Pipe()
	var stderr bytes.Buffer
	var running sync.WaitGroup
	stop = func() {
		toServer.Close() // which ends the server
		running.Wait()
	}
	ended := make(chan error, 1)
	running.Go(func() {
		code, err := w.ExecStream(ctx, world.ExecRequest{Target: l.To, Host: true, Argv: l.argv("serve", "--until-eof")}, stdin, stdout, &stderr, nil)
		if err == nil {
			err = fmt.Errorf("exit code %d: %s", code, strings.TrimSpace(stderr.String()))
		}
		ended <- err
		stdout.CloseWithError(err)
	})
	// The first line says that it listens; then it is silent.
	if _, err := io.ReadFull(fromServer, make([]byte, 1)); err != nil {
		stop()
		return nil, fmt.Errorf("load server on %s: %w", l.To, <-ended)
	}
	running.Go(func() { _, _ = io.Copy(io.Discard, fromServer) })
	return stop, nil
}

// Measure measures one thing. An error of the load generator is an [ExitError].
func (l Lane) Measure(ctx context.Context, w World, m load.Measurement) (r load.Result, err error) {
	res, err := w.Exec(ctx, world.ExecRequest{Target: l.From, Host: true, Argv: l.argv("measure", "--kind", string(m.Kind),
		"--streams", strconv.Itoa(m.Streams), "--to", l.Addr.String(), "--duration", m.Duration.String(), fmt.Sprintf("--long-first=%t", m.LongFirst))})
	if err != nil {
		return r, fmt.Errorf("measure from %s: %w", l.From, err)
	}
	if res.Code != 0 {
		return r, &ExitError{l.From, res.Code, strings.TrimSpace(string(res.Stderr))}
	}
	return r, json.Unmarshal(res.Stdout, &r)
}

// argv is a command of the load generator.
func (l Lane) argv(args ...string) []string {
	return append([]string{program, "load", "--nice", strconv.Itoa(l.Nice)}, args...)
}

// An ExitError is why the load generator has measured nothing: nobody answered,
// say.
type ExitError struct {
	From    string
	Code    int
	Message string // its own
}

// Error says from where nothing was measured, and what the load generator said.
func (e *ExitError) Error() string {
	return fmt.Sprintf("measure from %s: exit code %d: %s", e.From, e.Code, e.Message)
}
