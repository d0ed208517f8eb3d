// Package expect has what a scenario can expect, one file each: how it is
// written, how it is checked, and how a difference is explained, with every
// address resolved to the name of who has it.
//
// A check looks once. Whoever calls it decides how often; see package runner.
package expect

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/goccy/go-yaml/ast"

	"github.com/isthmus-net/isthmus/lab/internal/operand"
	"github.com/isthmus-net/isthmus/lab/internal/topology"
	"github.com/isthmus-net/isthmus/lab/internal/yamlfile"
)

// An Expectation is something that must hold. Its fields are the keys of the
// file, read by package yamlfile.
type Expectation interface {
	// Lint resolves names and reports what can't be meant.
	Lint(l *Linter)
	// Check looks whether it holds now. An error is for what has nothing to
	// do with the product: the lab does not answer.
	Check(ctx context.Context, row *Row) (Result, error)
	// String is the expectation on one line, for plans and reports.
	String() string
}

// A Result is what a check saw.
type Result struct {
	OK        bool
	Want, Got string
	Why       string   // what Got means, with names
	Path      []string // hosts that saw the request
	Reply     []string // hosts that saw the reply
	Notes     []string // measured values worth printing
	// Excused is which bound was exceeded, but by less than is allowed on a slow machine; empty: none.
	Excused string
	// Impostor says that somebody else has answered: a later look that has no answer says less.
	Impostor bool
	// Final says that looking again can't change it.
	Final bool
	// Pending says that it has not been watched for long enough: this is neither
	// a success nor a failure yet.
	Pending bool
}

// kinds are all expectations by their key.
func kinds() map[string]func() Expectation {
	return map[string]func() Expectation{
		"reach":       func() Expectation { return &Reach{} },
		"unreachable": func() Expectation { return &Unreachable{} },
		"source":      func() Expectation { return &Source{} },
		"conntrack":   func() Expectation { return &Conntrack{} },
		"mss":         func() Expectation { return &MSS{} },
		"mtu":         func() Expectation { return &MTU{} },
		"rate":        func() Expectation { return &Rate{} },
		"path":        func() Expectation { return &Path{} },
		"never":       func() Expectation { return &Never{} },
		"kubectl":     func() Expectation { return &Kubectl{} },
		"event":       func() Expectation { return &Event{} },
		"log":         func() Expectation { return &Log{} },
		"flow":        func() Expectation { return &Flow{} },
		"output":      func() Expectation { return &Output{} },
		"gone":        func() Expectation { return &Gone{} },
		"same":        func() Expectation { return &Same{} },
	}
}

// Names returns the keys of all expectations.
func Names() []string { return slices.Sorted(maps.Keys(kinds())) }

// A Checked is an expectation with its place in the file.
type Checked struct {
	Name string
	Pos  yamlfile.Pos
	Expectation
}

// A List is the expectations of a step: a mapping, or a list of mappings when
// one kind is needed twice.
type List []Checked

// UnmarshalLab reads the list.
func (l *List) UnmarshalLab(f *yamlfile.File, n ast.Node, subst yamlfile.Subst) {
	if seq, ok := n.(*ast.SequenceNode); ok {
		for _, e := range seq.Values {
			l.add(f, e, subst)
		}
		return
	}
	l.add(f, n, subst)
}

func (l *List) add(f *yamlfile.File, n ast.Node, subst yamlfile.Subst) {
	pairs, ok := f.Mapping(n, "expect")
	if !ok {
		return
	}
	all := kinds()
	for _, p := range pairs {
		make, ok := all[p.Key]
		if !ok {
			f.Problem(p.Pos, yamlfile.DidYouMean(p.Key, Names()), "unknown expectation %q", p.Key)
			continue
		}
		e := make()
		if _, null := p.Value.(*ast.NullNode); !null {
			f.Decode(p.Value, e, subst)
		}
		*l = append(*l, Checked{p.Key, p.Pos, e})
	}
}

// LabSchema describes the list to editors.
func (*List) LabSchema() map[string]any {
	properties := map[string]any{}
	for name, make := range kinds() {
		properties[name] = yamlfile.SchemaOf(make())
	}
	one := map[string]any{"type": "object", "additionalProperties": false, "properties": properties}
	return map[string]any{"anyOf": []any{one, map[string]any{"type": "array", "items": one}}}
}

// A Linter is what expectations are checked against before anything runs.
type Linter struct {
	File     *yamlfile.File
	Topology *topology.Topology
	// Flows, Execs and Remembered are the names that actions up to this step
	// have given.
	Flows, Execs, Remembered map[string]bool
	// Unnamed are the flows to addresses that lead to somebody else.
	Unnamed map[string]bool
	// Reached are the operands that an expectation up to here has reached.
	Reached map[string]bool
}

// Problem reports a mistake at a field.
func (l *Linter) Problem(field any, hint, format string, args ...any) {
	l.File.Problem(l.File.At(field), hint, format, args...)
}

// Resolve parses the name in a Ref. Without a name it reports that key is
// missing, unless it is optional.
func (l *Linter) Resolve(r *Ref) {
	if r.Text == "" {
		return
	}
	o, err := operand.Parse(r.Text, l.Topology)
	var bad *operand.Error
	if errors.As(err, &bad) {
		l.Problem(r, bad.Hint, "%s", bad.Message)
		return
	}
	r.Operand = o
}

// Cluster reports a name that is no cluster.
func (l *Linter) Cluster(field *string) {
	if *field == "" {
		return
	}
	if _, ok := l.Topology.Cluster(*field); ok {
		return
	}
	var names []string
	for _, c := range l.Topology.Clusters {
		names = append(names, c.Name)
	}
	l.Problem(field, yamlfile.DidYouMean(*field, names), "there is no cluster %q", *field)
}

// Pattern reports what is no regular expression, and names in it that will mean nothing
// when the row runs.
func (l *Linter) Pattern(field *string) {
	if _, err := regexp.Compile(*field); err != nil {
		l.Problem(field, "Go's syntax: https://pkg.go.dev/regexp/syntax", "%v", err)
	}
	l.Text(field)
}

// Text reports names in braces that will mean nothing when the row runs.
func (l *Linter) Text(field *string) {
	for _, m := range inBraces.FindAllStringSubmatch(*field, -1) {
		if !looksLikeOperand(m[1]) {
			continue
		}
		_, err := operand.Parse(m[1], l.Topology)
		var bad *operand.Error
		if errors.As(err, &bad) {
			l.Problem(field, bad.Hint, "{%s}: %s", m[1], bad.Message)
		}
	}
}

// inBraces finds {milan/web.ip} in texts. Jsonpath's {.spec} and Go's {{.X}}
// are not names.
var inBraces = regexp.MustCompile(`\{([a-z0-9(][^{}\s"]*(?:, [a-z0-9-]+\)*)*)\}`)

// looksLikeOperand tells a name from other text in braces: it has a cluster,
// or an attribute.
func looksLikeOperand(s string) bool {
	return strings.Contains(s, "/") || strings.HasSuffix(s, ".ip") || operand.IsFunction(s)
}

// Operands are the names in braces of a text. What will mean nothing is not
// among them; see Linter.Text.
func Operands(text string, t *topology.Topology) []operand.Operand {
	var out []operand.Operand
	for _, m := range inBraces.FindAllStringSubmatch(text, -1) {
		if o, err := operand.Parse(m[1], t); err == nil && looksLikeOperand(m[1]) {
			out = append(out, o)
		}
	}
	return out
}

// Expand replaces {milan/web.ip} and the like by addresses.
func (row *Row) Expand(ctx context.Context, text string) (string, error) {
	return row.expand(ctx, text, func(value string) string { return value })
}

// Pattern compiles a regular expression in which {milan/web.ip} and the like stand for
// addresses. An address matches itself letter for letter, and no longer word: 10.0.0.1 neither
// 10.0.0.12 nor 10.0.051.
func (row *Row) Pattern(ctx context.Context, text string) (*regexp.Regexp, error) {
	text, err := row.expand(ctx, text, wholeWord)
	if err != nil {
		return nil, err
	}
	return regexp.Compile(text)
}

// wholeWord is a regular expression for a text that no further letter or digit precedes or
// follows. \b is nowhere beside a colon, which IPv6 addresses may begin and end with.
func wholeWord(text string) string {
	out := regexp.QuoteMeta(text)
	if wordAtStart.MatchString(text) {
		out = `\b` + out
	}
	if wordAtEnd.MatchString(text) {
		out += `\b`
	}
	return "(?:" + out + ")"
}

var wordAtStart, wordAtEnd = regexp.MustCompile(`^\w`), regexp.MustCompile(`\w$`)

func (row *Row) expand(ctx context.Context, text string, quote func(string) string) (string, error) {
	var errs []error
	out := inBraces.ReplaceAllStringFunc(text, func(m string) string {
		name := m[1 : len(m)-1]
		if !looksLikeOperand(name) {
			return m
		}
		o, err := operand.Parse(name, row.Topology)
		if err != nil {
			errs = append(errs, err)
			return m
		}
		value, err := row.Directory.text(ctx, o)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", m, err))
			return m
		}
		return quote(value)
	})
	return out, errors.Join(errs...)
}

// A Ref is an operand in a file.
type Ref struct {
	Text string
	operand.Operand
}

// UnmarshalLab reads the name; Linter.Resolve finds out what it names.
func (r *Ref) UnmarshalLab(f *yamlfile.File, n ast.Node, subst yamlfile.Subst) {
	r.Text, _ = f.Scalar(n, subst, "a name")
	if inner, ok := strings.CutPrefix(r.Text, "{"); ok {
		r.Text = strings.TrimSuffix(inner, "}")
	}
}

// LabSchema describes a name to editors.
func (*Ref) LabSchema() map[string]any {
	return map[string]any{"type": "string", "description": "milan/web, milan/node-1, milan/gateway, milan/router, user, wan, or a matrix key in braces"}
}

// String is the name as written.
func (r Ref) String() string { return r.Text }
