package yamlfile

import (
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/goccy/go-yaml/ast"
)

// An Unmarshaler decodes itself, and reports what is wrong to the file.
type Unmarshaler interface {
	UnmarshalLab(f *File, n ast.Node, subst Subst)
}

// A Subst replaces {name} in a scalar; nil leaves it alone.
type Subst func(string) (string, error)

// Decode fills *into from a node. Fields of structs say their key by a tag:
//
//	lab:"key"             optional
//	lab:"key,required"    must be there
//	lab:"key,one"         a slice that may be written as its only element
//	lab:"key,key=Name"    a slice of structs written as a mapping; its keys go to the field Name
//	lab:",inline,key=Name"  as above, the struct's only content
//	enum:"a|b"            the only values
//	min:"1" max:"65535"   the bounds of a number, of each of a list of them, or of
//	                      a duration (min:"1s"); they belong together
//	doc:"text"            for editors, and for who wrote what is out of bounds
//
// Fields without the tag are not part of the file. A field of type ast.Node
// takes whatever is there, to be decoded later.
func (f *File) Decode(n ast.Node, into any, subst Subst) {
	f.decode(n, reflect.ValueOf(into).Elem(), field{}, subst, "file")
}

type field struct {
	key, keyField         string
	required, one, inline bool
	enum                  []string
	bounds                bounds
	doc                   string
}

var (
	typeNode     = reflect.TypeFor[ast.Node]()
	typePrefix   = reflect.TypeFor[netip.Prefix]()
	typeAddr     = reflect.TypeFor[netip.Addr]()
	typeDuration = reflect.TypeFor[time.Duration]()
)

func parseTag(sf reflect.StructField) (field, bool) {
	tag, ok := sf.Tag.Lookup("lab")
	if !ok {
		return field{}, false
	}
	parts := strings.Split(tag, ",")
	fl := field{key: parts[0]}
	for _, p := range parts[1:] {
		switch {
		case p == "required":
			fl.required = true
		case p == "one":
			fl.one = true
		case p == "inline":
			fl.inline = true
		case strings.HasPrefix(p, "key="):
			fl.keyField = p[len("key="):]
		}
	}
	if e := sf.Tag.Get("enum"); e != "" {
		fl.enum = strings.Split(e, "|")
	}
	fl.bounds = bounds{sf.Tag.Get("min"), sf.Tag.Get("max")}
	fl.doc = sf.Tag.Get("doc")
	return fl, true
}

// element is what holds for each element of a list.
func (fl field) element() field { return field{enum: fl.enum, bounds: fl.bounds, doc: fl.doc} }

func (f *File) decode(n ast.Node, v reflect.Value, fl field, subst Subst, what string) {
	if v.CanAddr() {
		f.where[v.Addr().Interface()] = PosOf(n)
		if u, ok := v.Addr().Interface().(Unmarshaler); ok {
			u.UnmarshalLab(f, n, subst)
			return
		}
	}
	switch v.Type() {
	case typeNode:
		v.Set(reflect.ValueOf(n))
		return
	case typePrefix, typeAddr, typeDuration:
		f.decodeScalar(n, v, fl, subst, what)
		return
	}
	switch v.Kind() {
	case reflect.Pointer:
		p := reflect.New(v.Type().Elem())
		f.decode(n, p.Elem(), fl, subst, what)
		v.Set(p)
	case reflect.Struct:
		f.decodeStruct(n, v, subst, what)
	case reflect.Slice:
		f.decodeSlice(n, v, fl, subst, what)
	case reflect.Map:
		f.decodeMap(n, v, subst, what)
	default:
		f.decodeScalar(n, v, fl, subst, what)
	}
}

func (f *File) decodeStruct(n ast.Node, v reflect.Value, subst Subst, what string) {
	t := v.Type()
	fields := map[string]int{}
	var keys []string
	for i := range t.NumField() {
		fl, ok := parseTag(t.Field(i))
		switch {
		case !ok:
		case fl.inline:
			f.decode(n, v.Field(i), fl, subst, what)
			return
		default:
			fields[fl.key] = i
			keys = append(keys, fl.key)
		}
	}
	pairs, ok := f.Mapping(n, what)
	if !ok {
		return
	}
	seen := map[string]bool{}
	for _, p := range pairs {
		i, ok := fields[p.Key]
		if !ok {
			f.Problem(p.Pos, DidYouMean(p.Key, keys), "unknown key %q in %s", p.Key, what)
			seen[Closest(p.Key, keys)] = true // one mistake, one message
			continue
		}
		seen[p.Key] = true
		fl, _ := parseTag(t.Field(i))
		if _, null := p.Value.(*ast.NullNode); null && v.Field(i).Type() != typeNode {
			f.Problem(p.Pos, "write a value or remove the key", "%s is empty", p.Key)
			continue
		}
		f.decode(p.Value, v.Field(i), fl, subst, p.Key)
	}
	for i := range t.NumField() {
		if fl, ok := parseTag(t.Field(i)); ok && fl.required && !seen[fl.key] {
			f.Problem(PosOf(n), "", "%s needs the key %q", what, fl.key)
		}
	}
}

func (f *File) decodeSlice(n ast.Node, v reflect.Value, fl field, subst Subst, what string) {
	if fl.keyField != "" {
		pairs, ok := f.Mapping(n, what)
		if !ok {
			return
		}
		out := reflect.MakeSlice(v.Type(), len(pairs), len(pairs))
		for i, p := range pairs {
			elem := out.Index(i)
			if _, null := p.Value.(*ast.NullNode); !null {
				f.decode(p.Value, elem, field{}, subst, what+" "+p.Key)
			}
			elem.FieldByName(fl.keyField).SetString(p.Key)
			f.where[elem.FieldByName(fl.keyField).Addr().Interface()] = p.Pos
			f.where[elem.Addr().Interface()] = p.Pos
		}
		v.Set(out)
		return
	}
	nodes := []ast.Node{n}
	if seq, ok := n.(*ast.SequenceNode); ok {
		nodes = seq.Values
	} else if !fl.one {
		f.Problem(PosOf(n), "", "%s is a list: write [a, b] or lines with -", what)
		return
	}
	out := reflect.MakeSlice(v.Type(), len(nodes), len(nodes))
	for i, e := range nodes {
		f.decode(e, out.Index(i), fl.element(), subst, what)
	}
	v.Set(out)
}

func (f *File) decodeMap(n ast.Node, v reflect.Value, subst Subst, what string) {
	pairs, ok := f.Mapping(n, what)
	if !ok {
		return
	}
	out := reflect.MakeMap(v.Type())
	for _, p := range pairs {
		elem := reflect.New(v.Type().Elem()).Elem()
		f.decode(p.Value, elem, field{}, subst, what+"."+p.Key)
		out.SetMapIndex(reflect.ValueOf(p.Key), elem)
	}
	v.Set(out)
}

func (f *File) decodeScalar(n ast.Node, v reflect.Value, fl field, subst Subst, what string) {
	text, ok := f.Scalar(n, subst, what)
	if !ok {
		return
	}
	fail := func(hint, format string, args ...any) {
		f.Problem(PosOf(n), hint, format, args...)
		if v.CanAddr() {
			delete(f.where, v.Addr().Interface()) // one mistake, one message
		}
	}
	if len(fl.enum) > 0 && !slices.Contains(fl.enum, text) {
		fail(DidYouMean(text, fl.enum), "%s can't be %q", what, text)
		return
	}
	switch v.Type() {
	case typePrefix:
		p, err := netip.ParsePrefix(text)
		switch {
		case err != nil:
			fail("write an address and a length, such as 10.0.0.0/16", "%s: %q is not a CIDR", what, text)
		case p != p.Masked():
			fail(fmt.Sprintf("did you mean %q?", p.Masked()), "%s: %s has bits set behind its length", what, text)
		default:
			v.Set(reflect.ValueOf(p))
		}
		return
	case typeAddr:
		a, err := netip.ParseAddr(text)
		if err != nil {
			fail("write an address such as 10.0.0.1 or fd00::1", "%s: %q is not an IP address", what, text)
			return
		}
		v.Set(reflect.ValueOf(a))
		return
	case typeDuration:
		d, err := time.ParseDuration(text)
		if err != nil {
			fail("write a number and a unit, such as 500ms or 10s", "%s: %q is not a duration", what, text)
			return
		}
		if out := fl.bounds.duration(d); out != "" {
			fail(fl.hint("a duration"), "%s: %s is %s", what, text, out)
			return
		}
		v.SetInt(int64(d))
		return
	}
	switch v.Kind() {
	case reflect.String:
		v.SetString(text)
	case reflect.Int:
		i, err := strconv.Atoi(text)
		if err != nil {
			fail(fl.hint("a whole number"), "%s: %q is not a whole number", what, text)
			return
		}
		if out := fl.bounds.number(i); out != "" {
			fail(fl.hint("a whole number"), "%s: %s is %s", what, text, out)
			return
		}
		v.SetInt(int64(i))
	case reflect.Bool:
		b, err := strconv.ParseBool(text)
		if err != nil {
			fail("write true or false", "%s: %q is neither true nor false", what, text)
			return
		}
		v.SetBool(b)
	default:
		panic("yamlfile: no way to decode a " + v.Type().String())
	}
}

// A Pair is a key of a mapping with its value.
type Pair struct {
	Key   string
	Pos   Pos
	Value ast.Node
}

// Mapping returns the pairs of a mapping, or records that the node is none.
func (f *File) Mapping(n ast.Node, what string) ([]Pair, bool) {
	var values []*ast.MappingValueNode
	switch n := n.(type) {
	case *ast.MappingNode:
		values = n.Values
	case *ast.MappingValueNode:
		values = []*ast.MappingValueNode{n}
	default:
		f.Problem(PosOf(n), "write { key: value } or lines with key: value", "%s is a mapping", what)
		return nil, false
	}
	pairs := make([]Pair, 0, len(values))
	for _, v := range values {
		pairs = append(pairs, Pair{v.Key.GetToken().Value, PosOf(v.Key), v.Value})
	}
	return pairs, true
}

// Scalar returns the text of a scalar with its names replaced, or records what
// is wrong.
func (f *File) Scalar(n ast.Node, subst Subst, what string) (string, bool) {
	var text string
	switch n := n.(type) {
	case *ast.StringNode:
		text = n.Value
	case *ast.LiteralNode:
		text = n.Value.Value
	case *ast.IntegerNode, *ast.FloatNode, *ast.BoolNode:
		text = n.GetToken().Value
	default:
		hint := ""
		if m, ok := n.(*ast.MappingNode); ok && m.IsFlowStyle {
			hint = `a name in braces needs quotes: "{name}"`
		}
		f.Problem(PosOf(n), hint, "%s is a single value", what)
		return "", false
	}
	if subst == nil {
		return text, true
	}
	out, err := subst(text)
	if err != nil {
		f.Problem(PosOf(n), "", "%s: %v", what, err)
		return "", false
	}
	return out, true
}
