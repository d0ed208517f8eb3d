package expect

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/openapi3"
	"k8s.io/client-go/util/jsonpath"
	"sigs.k8s.io/yaml"

	"github.com/isthmus-net/isthmus/k8s"
	"github.com/isthmus-net/isthmus/lab/internal/yamlfile"
)

// A fieldSchema is what an object of a kind can have: a schema in OpenAPI's
// form, and the schemas that it refers to.
type fieldSchema struct {
	kind    string
	root    map[string]any
	schemas map[string]any // by name, for "#/components/schemas/NAME"
}

// UnknownField is a field in a path that no object of a kind can have.
type UnknownField struct {
	Kind, Name string
	In         string // the fields that lead to it, such as status.nodeIP
	Known      []string
}

// Error names the field.
func (e *UnknownField) Error() string {
	in := e.Kind
	if e.In != "" {
		in = e.In + " of " + e.Kind
	}
	return fmt.Sprintf("there is no field %q in %s", e.Name, in)
}

// Hint says which field may be meant.
func (e *UnknownField) Hint() string { return yamlfile.DidYouMean(e.Name, e.Known) }

// check returns an *UnknownField when a jsonpath has one. What a schema leaves
// open may be anything.
func (s fieldSchema) check(path string) error {
	p, err := jsonpath.Parse("field", path)
	if err != nil {
		return err
	}
	for _, n := range p.Root.Nodes { // each begins at the object
		if list, ok := n.(*jsonpath.ListNode); ok {
			if len(list.Nodes) > 0 && list.Nodes[0].Type() == jsonpath.NodeIdentifier {
				return nil // a range: what follows begins elsewhere
			}
			if err := s.walk(list, s.root, nil); err != nil {
				return err
			}
		}
	}
	return nil
}

// walk follows a path from one schema. It ends where the schema says no more.
func (s fieldSchema) walk(path *jsonpath.ListNode, from map[string]any, in []string) error {
	for _, n := range path.Nodes {
		from = s.resolved(from)
		if from == nil {
			return nil
		}
		items, _ := from["items"].(map[string]any)
		other, _ := from["additionalProperties"].(map[string]any)
		switch n := n.(type) {
		case *jsonpath.FieldNode:
			if n.Value == "" { // the object itself
				continue
			}
			properties, closed := from["properties"].(map[string]any)
			open, _ := from["x-kubernetes-preserve-unknown-fields"].(bool)
			next, ok := properties[n.Value].(map[string]any)
			if !ok && closed && !open && other == nil {
				return &UnknownField{s.kind, n.Value, strings.Join(in, "."), slices.Sorted(maps.Keys(properties))}
			}
			if from = next; !ok {
				from = other
			}
			in = append(slices.Clone(in), n.Value)
		case *jsonpath.FilterNode:
			if err := s.walk(n.Left, items, in); err != nil {
				return err
			}
			from = items
		case *jsonpath.ArrayNode:
			from = items
		case *jsonpath.WildcardNode:
			if from = items; items == nil {
				from = other
			}
		default: // unions, ranges and the like
			return nil
		}
	}
	return nil
}

// resolved is a schema, or the one that it refers to.
func (s fieldSchema) resolved(one map[string]any) map[string]any {
	for range 8 { // references are not nested deeper
		if all, ok := one["allOf"].([]any); ok && len(all) == 1 {
			one, _ = all[0].(map[string]any)
		}
		ref, ok := one["$ref"].(string)
		if !ok {
			return one
		}
		one, _ = s.schemas[strings.TrimPrefix(ref, "#/components/schemas/")].(map[string]any)
	}
	return nil
}

// schemaOf asks an API server for the schema of a kind. No schema, as of kinds
// of extension servers, is no error.
func (a *API) schemaOf(ctx context.Context, cluster string, gvk schema.GroupVersionKind) (*fieldSchema, error) {
	c, err := a.cluster(ctx, cluster)
	if err != nil {
		return nil, err
	}
	document, err := openapi3.NewRoot(c.discovery.OpenAPIV3()).GVSpecAsMap(gvk.GroupVersion())
	if err != nil {
		return nil, fmt.Errorf("cluster %s: schema of %s: %w", cluster, gvk.Kind, err)
	}
	components, _ := document["components"].(map[string]any)
	schemas, _ := components["schemas"].(map[string]any)
	for _, one := range schemas {
		s, _ := one.(map[string]any)
		kinds, _ := s["x-kubernetes-group-version-kind"].([]any)
		for _, k := range kinds {
			k, _ := k.(map[string]any)
			if k["group"] == gvk.Group && k["version"] == gvk.Version && k["kind"] == gvk.Kind {
				return &fieldSchema{gvk.Kind, s, schemas}, nil
			}
		}
	}
	return nil, nil
}

// crdSchemas are the schemas of the kinds that the chart defines, by all names
// that users may give a kind, with and without the group.
var crdSchemas = sync.OnceValues(func() (map[string]fieldSchema, error) {
	files, err := k8s.Chart()
	if err != nil {
		return nil, err
	}
	out := map[string]fieldSchema{}
	for name, text := range files {
		if !strings.HasPrefix(name, "crds/") {
			continue
		}
		var crd struct {
			Spec struct {
				Group string
				Names struct {
					Kind, Plural, Singular string
					ShortNames             []string
				}
				Versions []struct {
					Storage bool
					Schema  struct{ OpenAPIV3Schema map[string]any }
				}
			}
		}
		if err := yaml.Unmarshal(text, &crd); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		names := crd.Spec.Names
		for _, v := range crd.Spec.Versions {
			if !v.Storage {
				continue
			}
			for _, n := range append(names.ShortNames, names.Plural, names.Singular, strings.ToLower(names.Kind)) {
				s := fieldSchema{kind: names.Kind, root: v.Schema.OpenAPIV3Schema}
				out[n], out[n+"."+crd.Spec.Group] = s, s
			}
		}
	}
	return out, nil
})
