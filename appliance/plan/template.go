package plan

import (
	"encoding"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// templateValues are what the strings of a gateway template can refer to.
type templateValues struct {
	Spec any    // of the GatewayServer or GatewayClient
	Name string // of what belongs to the gateway: gw-<its name>, or a hash if that is too long
	// GatewayName is the name of the GatewayServer or GatewayClient itself.
	GatewayName string
	Namespace   string
	GatewayUID  string
	ClusterID   string // of the remote cluster
	SecretName  string // with the keys

	// For a gateway in a network namespace of its node: the node's end of the
	// pair that leads there, the namespace's name, and the ports of the node
	// that are the gateway's.
	HostInterface, NetNS                string
	ListenPort, HealthPort, MetricsPort uint32
}

// render fills a gateway template in and decodes the result into out, a
// pointer to a struct. Every string is a text/template over values; a key that
// begins with a question mark is left out if its value renders empty; digits
// become a number where out has one. Unknown are the paths of what out has no
// field for: it is left out.
func render(source []byte, values templateValues, out any) (unknown []string, err error) {
	var tree any
	if err := json.Unmarshal(source, &tree); err != nil {
		return nil, fmt.Errorf("spec.template: %w", err)
	}
	f := filler{values: values, budget: newBudget()}
	filled, err := f.fill(tree, reflect.TypeOf(out).Elem(), "spec.template")
	if err != nil {
		return nil, err
	}
	raw, err := json.Marshal(filled)
	if err != nil {
		return nil, fmt.Errorf("spec.template: %w", err)
	}
	if err := json.Unmarshal(raw, out); err != nil {
		return nil, fmt.Errorf("spec.template: %w", err)
	}
	return f.unknown, nil
}

// digits is what becomes a number.
var digits = regexp.MustCompile(`^(0|[1-9][0-9]*)$`)

// A filler fills one template in.
type filler struct {
	values  templateValues
	budget  *budget
	unknown []string // see render
}

// fill renders node, whose place in the result has type t; nil if it is not
// known.
func (f *filler) fill(node any, t reflect.Type, path string) (any, error) {
	t = indirect(t)
	switch node := node.(type) {
	case map[string]any:
		out := make(map[string]any, len(node))
		for _, key := range slices.Sorted(maps.Keys(node)) {
			name, optional := strings.CutPrefix(key, "?")
			of := member(t, name)
			if of == nil && hasFields(t) {
				f.unknown = append(f.unknown, path+"."+name)
			}
			value, err := f.fill(node[key], of, path+"."+name)
			if err != nil {
				return nil, err
			}
			if optional && empty(value) {
				continue
			}
			out[name] = value
		}
		return out, nil
	case []any:
		out := make([]any, 0, len(node))
		for i, item := range node {
			value, err := f.fill(item, element(t), field(path, i))
			if err != nil {
				return nil, err
			}
			out = append(out, value)
		}
		return out, nil
	case string:
		text, err := f.expand(node)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		if digits.MatchString(text) && !isText(t) {
			if n, err := strconv.ParseInt(text, 10, 64); err == nil {
				return n, nil
			}
		}
		if t != nil && t.Kind() == reflect.Bool && (text == "true" || text == "false") {
			return text == "true", nil
		}
		return text, nil
	}
	return node, nil
}

// expand renders one string. A pointer that is nil renders empty.
func (f *filler) expand(text string) (string, error) {
	if !strings.Contains(text, "{{") {
		return text, nil
	}
	var out strings.Builder
	t, err := f.budget.parse(text)
	if err == nil {
		err = t.Execute(limited{&out, f.budget}, f.values)
	}
	if errors.Is(err, errBudget) {
		err = errBudget // where in the string it ran out says nothing
	}
	if err != nil {
		return "", fmt.Errorf("%s: %s", quoted(text), strings.TrimPrefix(err.Error(), "template: "))
	}
	return strings.NewReplacer("<nil>", "", "<no value>", "").Replace(out.String()), nil
}

// quoted returns the beginning of a string of a template, for a message.
func quoted(text string) string {
	const most = 256
	if len(text) > most {
		text = strings.ToValidUTF8(text[:most], "") + "…"
	}
	return strconv.Quote(text)
}

// empty reports whether an optional value is to be left out.
func empty(value any) bool {
	switch value := value.(type) {
	case nil:
		return true
	case string:
		return value == ""
	case map[string]any:
		return len(value) == 0
	case []any:
		return len(value) == 0
	}
	return false
}

// indirect returns what t points to, if it is a pointer.
func indirect(t reflect.Type) reflect.Type {
	for t != nil && t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	return t
}

// member returns the type of the JSON member name of t; nil if t has none.
func member(t reflect.Type, name string) reflect.Type {
	if t == nil {
		return nil
	}
	switch t.Kind() {
	case reflect.Map:
		return t.Elem()
	case reflect.Struct:
		for i := range t.NumField() {
			f := t.Field(i)
			tag, _, _ := strings.Cut(f.Tag.Get("json"), ",")
			if tag == name && tag != "" {
				return f.Type
			}
			if f.Anonymous && tag == "" {
				if found := member(indirect(f.Type), name); found != nil {
					return found
				}
			}
		}
	}
	return nil
}

// hasFields reports whether the members of t are known: it is a struct that does not
// decode itself.
func hasFields(t reflect.Type) bool {
	if t == nil || t.Kind() != reflect.Struct {
		return false
	}
	_, own := reflect.New(t).Interface().(json.Unmarshaler)
	return !own
}

// element returns the type of the items of t.
func element(t reflect.Type) reflect.Type {
	if t == nil || t.Kind() != reflect.Slice {
		return nil
	}
	return t.Elem()
}

// isText reports whether a value of type t is written as a string: a string,
// or something that parses itself from text, such as a quantity.
func isText(t reflect.Type) bool {
	if t == nil {
		return false
	}
	if t.Kind() == reflect.String {
		return true
	}
	_, text := reflect.New(t).Interface().(encoding.TextUnmarshaler)
	return text
}
