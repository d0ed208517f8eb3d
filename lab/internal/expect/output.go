package expect

import (
	"context"
	"fmt"
	"strings"
)

// Output expects something of what the last command of an exec action
// printed.
type Output struct {
	Of       string `lab:"of" doc:"name of the exec action; default the last one"`
	Contains string `lab:"contains" doc:"text that it printed"`
	Lacks    string `lab:"lacks" doc:"text that it did not print"`
	Matches  string `lab:"matches" doc:"regular expression for all it printed"`
	Code     *int   `lab:"code" min:"0" max:"255" doc:"its exit code"`
}

// Lint checks the name and the texts.
func (e *Output) Lint(l *Linter) {
	l.Pattern(&e.Matches)
	l.Text(&e.Contains)
	l.Text(&e.Lacks)
	if !l.Execs[e.Of] {
		l.Problem(e, "run it with do: { exec: … } in this step or an earlier one", "there is no output to look at")
	}
	if e.Contains == "" && e.Lacks == "" && e.Matches == "" && e.Code == nil {
		l.Problem(e, "", "say contains, lacks, matches or code")
	}
}

// Check compares; the runner runs the command again before each further look.
// What was printed proves nothing where the command failed and must not, and
// where nothing was printed, nothing can be missing from it.
func (e *Output) Check(ctx context.Context, row *Row) (Result, error) {
	ran, ok := row.Outputs[e.Of]
	if !ok {
		return Result{Want: "a command's output", Got: "none", Final: true}, nil
	}
	contains, err := row.Expand(ctx, e.Contains)
	if err != nil {
		return missing(e.Contains, err)
	}
	lacks, err := row.Expand(ctx, e.Lacks)
	if err != nil {
		return missing(e.Lacks, err)
	}
	matches, err := row.Pattern(ctx, e.Matches)
	if err != nil {
		return missing(e.Matches, err)
	}
	text := string(ran.Stdout) + string(ran.Stderr)
	res := Result{Want: "`" + ran.Command + "` " + e.want(), Got: strings.TrimSpace(text)}
	if res.Got == "" {
		res.Got = "nothing"
	}
	res.OK = matches.MatchString(text) &&
		strings.Contains(text, contains) &&
		(e.Lacks == "" || !strings.Contains(text, lacks)) &&
		(e.Code == nil || *e.Code == ran.Code)
	if e.Code != nil || ran.Code != 0 {
		res.Got += fmt.Sprintf(" (exit code %d)", ran.Code)
	}
	switch {
	case ran.Code != 0 && !ran.MayFail && e.Code == nil:
		res.OK, res.Why = false, "the command failed, so what it printed proves nothing; write fails: true where it may"
	case res.OK && e.Lacks != "" && text == "":
		res.OK, res.Why = false, "it printed nothing at all, so nothing is missing from it; write matches: '^$' where that is meant"
	}
	return res, nil
}

func (e *Output) want() string {
	var parts []string
	if e.Contains != "" {
		parts = append(parts, fmt.Sprintf("prints %q", e.Contains))
	}
	if e.Lacks != "" {
		parts = append(parts, fmt.Sprintf("does not print %q", e.Lacks))
	}
	if e.Matches != "" {
		parts = append(parts, fmt.Sprintf("prints something that matches %q", e.Matches))
	}
	if e.Code != nil {
		parts = append(parts, fmt.Sprintf("ends with exit code %d", *e.Code))
	}
	return strings.Join(parts, " and ")
}

// String is the expectation on one line.
func (e *Output) String() string {
	if e.Of != "" {
		return e.Of + " " + e.want()
	}
	return "the command " + e.want()
}
