package expect

import (
	"context"
	"fmt"
	"strings"

	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// Log expects a line in the log of a pod, written since the row began.
type Log struct {
	Of   Ref    `lab:"of,required" doc:"milan/gateway, milan/node-1.daemon, milan/controller or a pod"`
	Line string `lab:"line,required" doc:"regular expression that a line matches"`
}

// Lint resolves the pod.
func (e *Log) Lint(l *Linter) {
	l.Resolve(&e.Of)
	l.Pattern(&e.Line)
}

// Check reads the log.
func (e *Log) Check(ctx context.Context, row *Row) (Result, error) {
	want, err := row.Pattern(ctx, e.Line)
	if err != nil {
		return missing(e.Line, err)
	}
	pod, err := row.Directory.PodTarget(ctx, e.Of.Operand)
	res := Result{Want: fmt.Sprintf("a line of %s's log matches %q", e.Of, e.Line)}
	if err != nil {
		return missing(res.Want, err)
	}
	logs, err := row.World.PodLogs(ctx, pod, row.LogMarks)
	if err != nil {
		return Result{}, err
	}
	fresh, gap := 0, ""
	var tail []string
	for _, l := range logs {
		if c, ok := ContainerOf(l.Name); !ok || c.Target() != pod {
			continue
		}
		if l.Gap {
			gap = "the log was begun anew since the row began: what was written before is gone\n"
		}
		for line := range strings.Lines(l.Text) {
			fresh++
			line = strings.TrimSpace(line)
			if want.MatchString(line) {
				res.OK, res.Got = true, line
				return res, nil
			}
			tail = append(tail[max(0, len(tail)-2):], line)
		}
	}
	res.Got = fmt.Sprintf("none of the %d lines since the row began", fresh)
	res.Why = gap + "the last ones are:\n" + strings.Join(tail, "\n")
	return res, nil
}

// String is the expectation on one line.
func (e *Log) String() string { return fmt.Sprintf("log of %s has %q", e.Of, e.Line) }

// A Container is whose log a log is.
type Container struct{ Cluster, Namespace, Pod, Name string }

// Target is the pod's name for exec and kill.
func (c Container) Target() string { return c.Cluster + "/" + c.Namespace + "/" + c.Pod }

// ContainerOf reads the name of a log as the lab's kubelets write it:
// "milan/node-1/log/liqo_isthmus-node-abcde_<uid>/node/0". Every run of a
// container has a log of its own.
func ContainerOf(name string) (Container, bool) {
	parts := strings.Split(name, "/")
	if len(parts) != 6 || parts[2] != "log" {
		return Container{}, false
	}
	pod := strings.Split(parts[3], "_")
	if len(pod) != 3 {
		return Container{}, false
	}
	return Container{parts[0], pod[0], pod[1], parts[4]}, true
}

// Marks are the places where logs end.
func Marks(logs []world.Log) map[string]world.LogMark {
	marks := make(map[string]world.LogMark, len(logs))
	for _, l := range logs {
		marks[l.Name] = l.End()
	}
	return marks
}
