package scenario

import (
	"maps"
	"slices"
	"strings"

	"github.com/goccy/go-yaml/ast"

	"github.com/isthmus-net/isthmus/lab/internal/yamlfile"
)

// A Dimension is a key of the matrix.
type Dimension struct {
	Key    string
	Values []string
}

// A Row is one combination of the matrix.
type Row struct {
	Name string // scenario/value/value
	Vars []Var  // in the order of the matrix
	// Overlay is the one that the row is about: the value of the key overlay,
	// or the only one that the requirements name. Empty: any will do.
	Overlay string
	// Requires are the features that the world must have, the overlay's among
	// them, and the programs of world.Programs that must be there.
	Requires []string
}

// A Var is a key of the matrix with the row's value.
type Var struct{ Key, Value string }

// overlayKey is the key of the matrix that says in which overlay a row runs.
const overlayKey = "overlay"

type dimension struct {
	Key    string
	Values []string `lab:",inline"`
}

// A condition is keys of the matrix, each with a value or a list of values. A
// row meets it when all its values are among them.
type condition map[string]oneOrMore

// UnmarshalLab reads the keys.
func (c *condition) UnmarshalLab(f *yamlfile.File, n ast.Node, subst yamlfile.Subst) {
	pairs, ok := f.Mapping(n, "a condition")
	if !ok {
		return
	}
	*c = condition{}
	for _, p := range pairs {
		var values oneOrMore
		f.Decode(p.Value, &values, subst)
		(*c)[p.Key] = values
	}
}

type oneOrMore []string

// UnmarshalLab reads a value or a list.
func (o *oneOrMore) UnmarshalLab(f *yamlfile.File, n ast.Node, subst yamlfile.Subst) {
	nodes := []ast.Node{n}
	if seq, ok := n.(*ast.SequenceNode); ok {
		nodes = seq.Values
	}
	for _, n := range nodes {
		if s, ok := f.Scalar(n, subst, "a value of the matrix"); ok {
			*o = append(*o, s)
		}
	}
}

// LabSchema describes a value or a list to editors.
func (*oneOrMore) LabSchema() map[string]any {
	return map[string]any{"anyOf": []any{map[string]any{"type": "string"}, map[string]any{"type": "array", "items": map[string]any{"type": "string"}}}}
}

// A requirement is a feature or a program, of all rows or of those with some values.
type requirement struct {
	Feature string    `lab:"feature,required" doc:"as in the short form"`
	When    condition `lab:"when" doc:"only rows with these values need it: { overlay: vxlan }"`
}

// UnmarshalLab reads a feature, or a mapping with a condition.
func (q *requirement) UnmarshalLab(f *yamlfile.File, n ast.Node, subst yamlfile.Subst) {
	at := yamlfile.PosOf(n)
	switch n.(type) {
	case *ast.MappingNode, *ast.MappingValueNode:
		type plain requirement
		f.Decode(n, (*plain)(q), subst)
		at = f.At(&q.Feature)
	default:
		q.Feature, _ = f.Scalar(n, subst, "requires")
	}
	if q.Feature != "" && !slices.Contains(requirable(), q.Feature) {
		f.Problem(at, yamlfile.DidYouMean(q.Feature, requirable()), "requires can't be %q", q.Feature)
	}
}

// LabSchema describes both forms to editors.
func (*requirement) LabSchema() map[string]any {
	type plain requirement
	return map[string]any{"anyOf": []any{map[string]any{"enum": requirable()}, yamlfile.SchemaOf(plain{})}}
}

// addMatrix makes the rows, each with what it requires.
func (s *Scenario) addMatrix(f *yamlfile.File, in *file) {
	for i := range in.Matrix {
		d := &in.Matrix[i]
		if len(d.Values) == 0 {
			f.Problem(f.At(&d.Key), "give it values: [a, b]", "%s has no values", d.Key)
		}
		for j := range d.Values {
			if d.Key == overlayKey && !slices.Contains(Overlays(), d.Values[j]) {
				f.Problem(f.At(&d.Values[j]), yamlfile.DidYouMean(d.Values[j], Overlays()), "there is no overlay %q", d.Values[j])
			}
		}
		s.Matrix = append(s.Matrix, Dimension{d.Key, d.Values})
	}
	for i := range in.Exclude {
		s.lintCondition(f, in.Exclude[i], f.At(&in.Exclude[i]), "exclude")
	}
	s.Rows = expand(s.Name, s.Matrix, in.Exclude)
	if len(s.Rows) == 0 {
		f.Problem(yamlfile.PosOf(f.Root), "", "the matrix has no row that is not excluded")
	}
	for i := range in.Requires {
		if q := &in.Requires[i]; len(q.When) > 0 {
			s.lintCondition(f, q.When, f.At(&q.When), "when")
		}
	}
	for i := range s.Rows {
		s.Rows[i].require(in.Requires)
	}
}

// require sets what a row needs. A row without an overlay of its own takes the
// one that it requires, when that is one only.
func (r *Row) require(all []requirement) {
	for _, q := range all {
		if r.meets(q.When) && !slices.Contains(r.Requires, q.Feature) {
			r.Requires = append(r.Requires, q.Feature)
		}
	}
	r.Overlay, _ = r.value(overlayKey)
	if r.Overlay == "" {
		geneve, vxlan := slices.Contains(r.Requires, OverlayGeneve), slices.Contains(r.Requires, OverlayVXLAN)
		switch {
		case geneve && !vxlan:
			r.Overlay = OverlayGeneve
		case vxlan && !geneve:
			r.Overlay = OverlayVXLAN
		}
	}
	if r.Overlay != "" && !slices.Contains(r.Requires, r.Overlay) {
		r.Requires = append(r.Requires, r.Overlay)
	}
}

// lintCondition reports keys and values that the matrix has not.
func (s *Scenario) lintCondition(f *yamlfile.File, c condition, at yamlfile.Pos, what string) (ok bool) {
	var keys []string
	for _, d := range s.Matrix {
		keys = append(keys, d.Key)
	}
	ok = true
	for _, key := range slices.Sorted(maps.Keys(c)) {
		i := slices.Index(keys, key)
		if i < 0 {
			f.Problem(at, yamlfile.DidYouMean(key, keys), "%s: the matrix has no key %q", what, key)
			ok = false
			continue
		}
		for _, v := range c[key] {
			if !slices.Contains(s.Matrix[i].Values, v) {
				f.Problem(at, yamlfile.DidYouMean(v, s.Matrix[i].Values), "%s: %s is never %q", what, key, v)
				ok = false
			}
		}
	}
	return ok
}

// lintWhen reports conditions of steps and sabotages that no row meets. used
// learns which keys they have.
func (s *Scenario) lintWhen(f *yamlfile.File, used map[string]bool) {
	for _, n := range slices.Concat(s.steps, s.sabot) {
		c, at := s.when(n)
		if len(c) == 0 {
			continue
		}
		for key := range c {
			used[key] = true
		}
		if s.lintCondition(f, c, at, "when") && !slices.ContainsFunc(s.Rows, func(r Row) bool { return r.meets(c) }) {
			f.Problem(at, "", "when: no row is like this")
		}
	}
}

// when reads the condition of a step or a sabotage, and nothing else of it:
// what is not for a row need not make sense there.
func (s *Scenario) when(n ast.Node) (condition, yamlfile.Pos) {
	pairs, ok := s.file.Mapping(n, "a step")
	if !ok {
		return nil, yamlfile.Pos{}
	}
	for _, p := range pairs {
		if p.Key == "when" {
			var c condition
			s.file.Decode(p.Value, &c, nil)
			return c, p.Pos
		}
	}
	return nil, yamlfile.Pos{}
}

// holds tells whether a step or a sabotage is for a row.
func (s *Scenario) holds(n ast.Node, r Row) bool {
	c, _ := s.when(n)
	return r.meets(c)
}

// expand makes the rows of the matrix: the last key varies fastest.
func expand(name string, matrix []Dimension, exclude []condition) []Row {
	rows := []Row{{Name: name}}
	for _, d := range matrix {
		var next []Row
		for _, r := range rows {
			for _, v := range d.Values {
				next = append(next, Row{
					Name: r.Name + "/" + strings.ReplaceAll(v, "/", "-"),
					Vars: append(slices.Clone(r.Vars), Var{d.Key, v}),
				})
			}
		}
		rows = next
	}
	return slices.DeleteFunc(rows, func(r Row) bool {
		return slices.ContainsFunc(exclude, func(c condition) bool { return len(c) > 0 && r.meets(c) })
	})
}

// meets tells whether a row has the values of a condition; every row meets an
// empty one.
func (r Row) meets(c condition) bool {
	for key, values := range c {
		v, ok := r.value(key)
		if !ok || !slices.Contains(values, v) {
			return false
		}
	}
	return true
}

func (r Row) value(key string) (string, bool) {
	for _, v := range r.Vars {
		if v.Key == key {
			return v.Value, true
		}
	}
	return "", false
}
