package runner

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/isthmus-net/isthmus/lab/internal/expect"
	"github.com/isthmus-net/isthmus/lab/internal/report"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// errNotTold: whoever made the Runner did not say how something is done.
var errNotTold = errors.New("the runner was not told how")

// ofLab tells whether an error is of the lab's own machinery: nobody answers
// where the supervisor, the agent or a control plane should, or the run was
// ended. Any other answer is about what was asked for, and so the doing of the
// product or of the scenario. ctx is the row's, without a limit of one action.
func ofLab(ctx context.Context, err error) bool {
	if ctx.Err() != nil {
		return true
	}
	if apierrors.ReasonForError(err) != "" { // an API server's answer, whatever is wrapped in it
		return false
	}
	for _, sentinel := range []error{world.ErrNotRunning, world.ErrNoAnswer, errNotTold, io.EOF, io.ErrUnexpectedEOF} {
		if errors.Is(err, sentinel) {
			return true
		}
	}
	var transport *url.Error
	var connection *net.OpError
	return errors.As(err, &transport) || errors.As(err, &connection)
}

// An exitError is a command of a scenario that ended with another exit code than
// it must.
type exitError struct {
	Code   int
	Output string // both streams
}

// outputLines is how much of a command's output explains its end.
const outputLines = 10

// Error has the exit code and the last lines of the output.
func (e *exitError) Error() string {
	return strings.TrimSpace(fmt.Sprintf("exit code %d: %s", e.Code, e.lastLines()))
}

func (e *exitError) lastLines() string {
	lines := strings.Split(strings.TrimSpace(e.Output), "\n")
	return strings.Join(lines[max(0, len(lines)-outputLines):], "\n")
}

func exitErrorOf(res world.ExecResult) *exitError {
	return &exitError{res.Code, string(res.Stdout) + string(res.Stderr)}
}

// actionFault is the fault that an action was not done.
func actionFault(what string, err error) *report.Fault {
	var exit *exitError
	if errors.As(err, &exit) {
		// What is around it names the command, where the action does not.
		command := strings.TrimSuffix(err.Error(), exit.Error())
		return &report.Fault{Expectation: what, Want: "exit code 0", Got: fmt.Sprintf("%sexit code %d", command, exit.Code), Why: exit.lastLines()}
	}
	want := "it is done"
	if errors.Is(err, expect.ErrNoAddress) || errors.Is(err, expect.ErrChoice) {
		want = "an address for each name"
	}
	return &report.Fault{Expectation: what, Want: want, Got: err.Error()}
}
