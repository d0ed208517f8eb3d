package expect

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/util/jsonpath"

	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// Kubectl expects something of what users see with kubectl: a field of an
// object, or what a command prints.
type Kubectl struct {
	In        string `lab:"in,required" doc:"cluster"`
	Get       string `lab:"get" doc:"kind/name of an object"`
	Namespace string `lab:"namespace" doc:"of the object; may be left out when the name is unique in the cluster"`
	Field     string `lab:"field" doc:"jsonpath, such as {.status.nodeIP.remote}; without it the object must exist"`
	Is        string `lab:"is" doc:"the value of the field"`
	Matches   string `lab:"matches" doc:"regular expression for the field, or for what the command prints"`
	Absent    bool   `lab:"absent" doc:"the object, or the field, must not exist"`

	Run    string `lab:"run" doc:"arguments of kubectl"`
	Prints string `lab:"prints" doc:"what the command prints, spaces aside; <ip>, <age>, <name> and <any> stand for one word"`
}

// Lint checks that one thing is asked.
func (e *Kubectl) Lint(l *Linter) {
	l.Cluster(&e.In)
	l.Pattern(&e.Matches)
	for _, text := range []*string{&e.Get, &e.Is, &e.Prints, &e.Run} {
		l.Text(text)
	}
	switch {
	case (e.Get == "") == (e.Run == ""):
		l.Problem(e, "", "write either get: kind/name or run: arguments of kubectl")
	case e.Run != "" && (e.Prints == "") == (e.Matches == ""):
		l.Problem(e, "", "say what the command prints: prints, or matches")
	case readsEvents.MatchString(e.Run):
		l.Problem(&e.Run, "event: { in: "+e.In+", of: kind/name, type: Warning, reason: … }", "what kubectl get events prints may be from before the row, so it proves nothing of it")
	case e.Run != "" && (e.Is != "" || e.Field != "" || e.Absent || e.Namespace != ""):
		l.Problem(e, "", "field, is, absent and namespace belong to get")
	case e.Get != "" && strings.Count(inBraces.ReplaceAllString(e.Get, "x"), "/") != 1:
		l.Problem(&e.Get, "such as internalnode/node-1", "%q is not kind/name", e.Get)
	case e.Field != "" && e.Is == "" && e.Matches == "" && !e.Absent:
		l.Problem(&e.Field, "is, matches or absent", "say what the field must be")
	case e.Field == "" && (e.Is != "" || e.Matches != "") && e.Get != "":
		l.Problem(e, "", "say which field")
	}
	if e.Field != "" {
		if err := jsonpath.New("field").Parse(e.Field); err != nil {
			l.Problem(&e.Field, "such as {.spec.mtu}", "%v", err)
		} else {
			e.lintField(l)
		}
	}
}

// lintField reports a field that no object of one of our kinds can have. Those
// of other kinds are looked up when the row runs.
func (e *Kubectl) lintField(l *Linter) {
	all, err := crdSchemas()
	if err != nil {
		l.Problem(&e.Field, "", "%v", err)
		return
	}
	kind, _, _ := strings.Cut(strings.ToLower(e.Get), "/")
	s, ok := all[kind]
	var unknown *UnknownField
	if ok && errors.As(s.check(e.Field), &unknown) {
		l.Problem(&e.Field, unknown.Hint(), "%v", unknown)
	}
}

// Check reads the object, or runs the command.
func (e *Kubectl) Check(ctx context.Context, row *Row) (Result, error) {
	if e.Run != "" {
		return e.checkCommand(ctx, row)
	}
	get, err := row.Expand(ctx, e.Get)
	if err != nil {
		return missing(e.Get, err)
	}
	want := get
	if e.Absent && e.Field == "" {
		want = "no " + want
	}
	res := Result{Want: want + " in " + e.In}
	o, err := row.API.Find(ctx, e.In, get, e.Namespace)
	switch {
	case err != nil && meta.IsNoMatchError(err):
		res.Got = err.Error()
		return res, nil
	case errors.Is(err, world.ErrNotRunning):
		return Result{}, err
	case err != nil:
		res.Got, res.Why = "no answer", err.Error()
		return res, nil
	case o == nil:
		// An object that is not there has no fields to speak of.
		res.OK, res.Got = e.Absent && e.Field == "", "it does not exist"
		return res, nil
	case e.Field == "":
		res.OK, res.Got = !e.Absent, "it exists"
		return res, nil
	}
	value, err := fieldOf(o.Object, e.Field)
	if err != nil {
		return Result{}, fmt.Errorf("%s %s: %w", e.Get, e.Field, err)
	}
	is, err := row.Expand(ctx, e.Is)
	if err != nil {
		return missing(e.Is, err)
	}
	res.Got = fmt.Sprintf("%s = %q", e.Field, value)
	if value == "" {
		if ok, err := e.canHave(ctx, row, o, &res); err != nil || !ok {
			return res, err
		}
	}
	switch {
	case e.Absent:
		res.OK, res.Want = value == "", get+" without "+e.Field
	case e.Matches != "":
		pattern, err := row.Pattern(ctx, e.Matches)
		if err != nil {
			return missing(e.Matches, err)
		}
		res.OK, res.Want = pattern.MatchString(value) && value != "", fmt.Sprintf("%s %s matches %q", get, e.Field, e.Matches)
	default:
		res.OK, res.Want = value == is, fmt.Sprintf("%s %s = %q", get, e.Field, is)
		if is != e.Is {
			res.Want += " (" + e.Is + ")"
		}
	}
	return res, nil
}

// canHave tells whether the field that an object lacks is one that its kind has.
// One that no object can have is a mistake in the scenario.
func (e *Kubectl) canHave(ctx context.Context, row *Row, o *unstructured.Unstructured, res *Result) (bool, error) {
	s, err := row.API.schemaOf(ctx, e.In, o.GroupVersionKind())
	switch {
	case errors.Is(err, world.ErrNotRunning):
		return false, err
	case err != nil:
		res.Got, res.Why = "no answer", err.Error()
		return false, nil
	case s == nil:
		return true, nil
	}
	var unknown *UnknownField
	if err := s.check(e.Field); errors.As(err, &unknown) {
		res.Got, res.Why, res.Final = unknown.Error(), unknown.Hint(), true
		return false, nil
	} else if err != nil {
		return false, err
	}
	return true, nil
}

func fieldOf(object map[string]any, path string) (string, error) {
	p := jsonpath.New("field").AllowMissingKeys(true)
	if err := p.Parse(path); err != nil {
		return "", err
	}
	var b bytes.Buffer
	if err := p.Execute(&b, object); err != nil {
		return "", err
	}
	return b.String(), nil
}

func (e *Kubectl) checkCommand(ctx context.Context, row *Row) (Result, error) {
	args, err := row.Expand(ctx, e.Run)
	if err != nil {
		return missing(e.Run, err)
	}
	res, err := row.Kubectl(ctx, e.In, strings.Fields(args))
	if err != nil {
		return Result{}, err
	}
	out := Result{Got: string(res.Stdout) + string(res.Stderr)}
	if res.Code != 0 {
		out.Want, out.Why = "kubectl "+args+" succeeds", fmt.Sprintf("exit code %d", res.Code)
		return out, nil
	}
	if e.Matches != "" {
		pattern, err := row.Pattern(ctx, e.Matches)
		if err != nil {
			return missing(e.Matches, err)
		}
		out.OK, out.Want = pattern.Match(res.Stdout), fmt.Sprintf("kubectl %s prints something that matches %q", args, e.Matches)
		return out, nil
	}
	want, err := row.Expand(ctx, e.Prints)
	if err != nil {
		return missing(e.Prints, err)
	}
	out.Want = want
	out.Why = tableDifference(want, string(res.Stdout))
	out.OK = out.Why == ""
	return out, nil
}

// Kubectl runs kubectl as the administrator of a cluster.
func (row *Row) Kubectl(ctx context.Context, cluster string, args []string) (world.ExecResult, error) {
	return row.World.Exec(ctx, world.ExecRequest{
		Target: cluster + "/" + world.ControlPlaneHost,
		Argv:   append([]string{"kubernetes", "kubectl"}, args...),
	})
}

// readsEvents finds commands that print events.
var readsEvents = regexp.MustCompile(`^\s*(events\b|.*\bget\s+([^/]*\s)?(events?|ev)(\s|$))`)

// wildcards are the words of a template that stand for any word of a kind.
func wildcards() map[string]*regexp.Regexp {
	return map[string]*regexp.Regexp{
		"<ip>":   regexp.MustCompile(`^([0-9.]+|[0-9a-f:]*:[0-9a-f:]*)$`),
		"<age>":  regexp.MustCompile(`^([0-9]+[smhdy])+$`),
		"<name>": regexp.MustCompile(`^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$`),
		"<any>":  regexp.MustCompile(`^.+$`),
	}
}

// tableDifference compares printed tables word by word and says where they
// first differ. The number of spaces between words counts only where a column
// is empty: a header word must begin above its value.
func tableDifference(want, got string) string {
	wantLines, gotLines := nonEmpty(want), nonEmpty(got)
	all := wildcards()
	for i := range max(len(wantLines), len(gotLines)) {
		switch {
		case i >= len(gotLines):
			return "line is missing: " + wantLines[i]
		case i >= len(wantLines):
			return "line too many: " + gotLines[i]
		}
		w, g := strings.Fields(wantLines[i]), strings.Fields(gotLines[i])
		if len(w) != len(g) {
			return fmt.Sprintf("line %d has %d words, not %d: %s", i+1, len(g), len(w), gotLines[i])
		}
		for j := range w {
			if re, ok := all[w[j]]; ok && re.MatchString(g[j]) || w[j] == g[j] {
				continue
			}
			return fmt.Sprintf("line %d: %q instead of %q", i+1, g[j], w[j])
		}
	}
	return ""
}

func nonEmpty(s string) []string {
	return slices.DeleteFunc(strings.Split(s, "\n"), func(l string) bool { return strings.TrimSpace(l) == "" })
}

// String is the expectation on one line.
func (e *Kubectl) String() string {
	switch {
	case e.Run != "":
		return "kubectl " + e.Run + " in " + e.In
	case e.Absent && e.Field == "":
		return "no " + e.Get + " in " + e.In
	case e.Field == "":
		return e.Get + " in " + e.In
	case e.Absent:
		return fmt.Sprintf("%s in %s without %s", e.Get, e.In, e.Field)
	case e.Matches != "":
		return fmt.Sprintf("%s in %s: %s matches %s", e.Get, e.In, e.Field, e.Matches)
	}
	return fmt.Sprintf("%s in %s: %s is %s", e.Get, e.In, e.Field, e.Is)
}
