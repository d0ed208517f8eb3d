// Package yamlfile reads the lab's YAML files strictly: an unknown key, a value
// of the wrong kind or a name that does not exist is a [Problem] with its
// place, the line it is on and, where there is one, a suggestion. All problems
// of a file are found in one pass.
package yamlfile

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/parser"
	"github.com/goccy/go-yaml/token"
)

// A Pos is a place in a file, from 1. The zero Pos is the file as a whole.
type Pos struct{ Line, Col int }

// A Problem is one thing that is wrong with a file.
type Problem struct {
	File    string
	Pos     Pos
	Line    string // the text of the line
	Message string
	Hint    string // what to write instead; may be empty
}

// String is the problem with the line it is on and a caret below the place.
func (p Problem) String() string {
	var b strings.Builder
	if p.Pos.Line == 0 {
		fmt.Fprintf(&b, "%s: %s", p.File, p.Message)
	} else {
		fmt.Fprintf(&b, "%s:%d:%d: %s\n    %s\n    %s^", p.File, p.Pos.Line, p.Pos.Col, p.Message,
			strings.ReplaceAll(p.Line, "\t", " "), strings.Repeat(" ", max(p.Pos.Col-1, 0)))
	}
	if p.Hint != "" {
		fmt.Fprintf(&b, "\n  %s", p.Hint)
	}
	return b.String()
}

// An Error is everything that is wrong with one file.
type Error struct{ Problems []Problem }

// Error is every problem with its line, in the order of the file.
func (e *Error) Error() string {
	parts := make([]string, len(e.Problems))
	for i, p := range e.Problems {
		parts[i] = p.String()
	}
	return strings.Join(parts, "\n")
}

// A File is a file being read. Its methods collect problems; Err returns them.
type File struct {
	Path     string
	Root     ast.Node // nil when the file is empty, no YAML, or has anchors and the like
	Comment  string   // at the top of the file, without the marks
	lines    []string
	problems []Problem
	where    map[any]Pos
}

// Read reads a file from disk.
func Read(path string) (*File, error) {
	src, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	return Parse(path, src), nil
}

// Parse reads a file from memory.
func Parse(path string, src []byte) *File {
	f := &File{Path: path, lines: strings.Split(string(src), "\n"), where: map[any]Pos{}}
	f.Comment = leadingComment(f.lines)
	parsed, err := parser.ParseBytes(src, 0)
	if err != nil {
		var syntax interface {
			GetToken() *token.Token
			GetMessage() string
		}
		if errors.As(err, &syntax) {
			f.Problem(position(syntax.GetToken()), "", "%s", syntax.GetMessage())
		} else {
			f.Problem(Pos{}, "", "%v", err)
		}
		return f
	}
	switch {
	case len(parsed.Docs) == 0 || parsed.Docs[0].Body == nil:
		f.Problem(Pos{}, "", "the file is empty")
	case len(parsed.Docs) > 1:
		f.Problem(position(parsed.Docs[1].Start), "", "one document per file, this one has %d", len(parsed.Docs))
	default:
		ast.Walk((*unsupported)(f), parsed.Docs[0].Body)
		if len(f.problems) == 0 {
			f.Root = parsed.Docs[0].Body
		}
	}
	return f
}

// unsupported reports what YAML has and files of the lab don't: who reads one
// finds everything where it is used.
type unsupported File

// Visit looks at one node.
func (u *unsupported) Visit(n ast.Node) ast.Visitor {
	what, hint := "", ""
	var below ast.Visitor = u
	if pair, ok := n.(*ast.MappingValueNode); ok {
		n = pair.Key
	}
	switch n := n.(type) {
	case *ast.AnchorNode:
		what, hint = "anchors (&"+n.Name.String()+")", "remove it, and write the value wherever it is meant"
	case *ast.AliasNode:
		what, hint = "aliases (*"+n.Value.String()+")", "write what it stands for in its place"
	case *ast.MergeKeyNode:
		what, hint = "merge keys (<<)", "write the keys that it stands for in its place"
		below = nil // the alias beside it is the same mistake
	case *ast.TagNode:
		what, hint = "tags ("+n.Start.Value+")", "remove it"
	default:
		return u
	}
	(*File)(u).Problem(position(n.GetToken()), hint, "%s are not supported", what)
	return below
}

// Problem records that something is wrong at a place.
func (f *File) Problem(at Pos, hint, format string, args ...any) {
	p := Problem{File: f.Path, Pos: at, Message: fmt.Sprintf(format, args...), Hint: hint}
	if at.Line > 0 && at.Line <= len(f.lines) {
		p.Line = f.lines[at.Line-1]
	}
	if !slices.Contains(f.problems, p) {
		f.problems = append(f.problems, p)
	}
}

// Err is nil or an [*Error] with all problems in the order of the file.
func (f *File) Err() error {
	if len(f.problems) == 0 {
		return nil
	}
	sorted := slices.Clone(f.problems)
	slices.SortStableFunc(sorted, func(a, b Problem) int {
		return cmp.Or(cmp.Compare(a.Pos.Line, b.Pos.Line), cmp.Compare(a.Pos.Col, b.Pos.Col))
	})
	return &Error{Problems: sorted}
}

// At returns where the value was written that was decoded into *field.
func (f *File) At(field any) Pos { return f.where[field] }

// PosOf returns where a node starts.
func PosOf(n ast.Node) Pos {
	if n == nil {
		return Pos{}
	}
	switch n := n.(type) {
	case *ast.MappingNode:
		if !n.IsFlowStyle && len(n.Values) > 0 {
			return PosOf(n.Values[0].Key)
		}
	case *ast.MappingValueNode:
		return PosOf(n.Key)
	}
	return position(n.GetToken())
}

func position(t *token.Token) Pos {
	if t == nil || t.Position == nil {
		return Pos{}
	}
	return Pos{t.Position.Line, t.Position.Column}
}

func leadingComment(lines []string) string {
	var out []string
	for _, l := range lines {
		if !strings.HasPrefix(l, "#") {
			break
		}
		out = append(out, strings.TrimPrefix(strings.TrimPrefix(l, "#"), " "))
	}
	return strings.Join(out, "\n")
}

// DidYouMean is a hint that names the closest candidate, or, when none is
// close, all of them.
func DidYouMean(word string, candidates []string) string {
	if best := Closest(word, candidates); best != "" {
		return fmt.Sprintf("did you mean %q?", best)
	}
	if len(candidates) == 0 {
		return ""
	}
	return "possible here: " + strings.Join(candidates, ", ")
}

// Closest returns the candidate that is at most a third of the word (or two
// letters) away from it, or "".
func Closest(word string, candidates []string) string {
	best, distance := "", max(2, len(word)/3)+1
	for _, c := range candidates {
		if d := levenshtein(strings.ToLower(word), strings.ToLower(c)); d < distance {
			best, distance = c, d
		}
	}
	return best
}

func levenshtein(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := 1
			if a[i] == b[j] {
				cost = 0
			}
			diagonal, row[j+1] = row[j+1], min(row[j+1]+1, row[j]+1, diagonal+cost)
		}
	}
	return row[len(b)]
}
