package apitest

import (
	"context"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/isthmus-net/isthmus/appliance/fieldpath"
)

func schemaGVR(r metav1.GroupVersionResource) schema.GroupVersionResource {
	return schema.GroupVersionResource{Group: r.Group, Version: r.Version, Resource: r.Resource}
}

// openAPI returns the schema of a CRD's only version.
func openAPI(crd *unstructured.Unstructured) map[string]any {
	versions, _, _ := unstructured.NestedSlice(crd.Object, "spec", "versions")
	s, _, _ := unstructured.NestedMap(versions[0].(map[string]any), "schema", "openAPIV3Schema")
	return s
}

// rules returns the messages of all CEL rules of a schema.
func rules(s map[string]any) []string {
	var out []string
	list, _ := s["x-kubernetes-validations"].([]any)
	for _, r := range list {
		out = append(out, r.(map[string]any)["message"].(string))
	}
	for _, sub := range children(s) {
		out = append(out, rules(sub.schema)...)
	}
	return out
}

type child struct {
	name   string // of a property; empty for the items of a list
	schema map[string]any
}

func children(s map[string]any) []child {
	var out []child
	props, _ := s["properties"].(map[string]any)
	for _, name := range slices.Sorted(maps.Keys(props)) {
		out = append(out, child{name, props[name].(map[string]any)})
	}
	if items, ok := s["items"].(map[string]any); ok {
		out = append(out, child{"", items})
	}
	return out
}

// foreign are parts that belong to Kubernetes and are tested there.
var foreign = []string{"spec.deployment.spec", "spec.service.spec", "spec.metrics.service.spec", "spec.serviceTemplate.spec", "spec.template"}

// violation is one way to break a constraint of a schema.
type violation struct {
	path  string // as in messages, with [] for any element
	what  string // the constraint
	value any    // put there; nil: removed
}

// violations returns one for every constraint on our own fields.
func violations(s map[string]any, path string) []violation {
	if slices.Contains(foreign, path) {
		return nil
	}
	var out []violation
	add := func(what string, value any) { out = append(out, violation{path, what, value}) }
	if _, ok := s["enum"]; ok {
		add("enum", "Nonsense")
	}
	switch s["format"] {
	case "cidr":
		add("format cidr", "10.0.0.300/16")
	case "date-time":
		add("format date-time", "yesterday")
	case "byte":
		add("format byte", "***")
	}
	if _, ok := s["anyOf"]; ok && s["type"] == "string" {
		add("an IPv4 or IPv6 address", "300.1.1.1")
	}
	if _, ok := s["pattern"]; ok {
		add("pattern", "!! ")
	}
	if n, ok := s["maxLength"]; ok {
		add("maxLength", strings.Repeat("1", int(number(n))+1))
	}
	if n, ok := s["minLength"]; ok && number(n) > 0 {
		add("minLength", "")
	}
	if n, ok := s["minimum"]; ok {
		add("minimum", number(n)-1)
	}
	if n, ok := s["maximum"]; ok {
		add("maximum", number(n)+1)
	}
	required, _ := s["required"].([]any)
	for _, r := range required {
		name := r.(string)
		props, _ := s["properties"].(map[string]any)
		if p, _ := props[name].(map[string]any); p != nil && p["default"] != nil {
			continue // its absence is filled in
		}
		out = append(out, violation{join(path, name), "required", nil})
	}
	for _, c := range children(s) {
		if c.name == "" {
			out = append(out, violations(c.schema, path+"[]")...)
			continue
		}
		out = append(out, violations(c.schema, join(path, c.name))...)
	}
	return out
}

func number(v any) int64 {
	switch n := v.(type) {
	case int64:
		return n
	case float64:
		return int64(n)
	}
	return 0
}

func join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}

// schemas breaks every constraint of every CRD once and checks that the message
// names the field.
func schemas(t *testing.T, a *api) {
	for _, crd := range a.crds {
		kind, _, _ := unstructured.NestedString(crd.Object, "spec", "names", "kind")
		t.Run(kind, func(t *testing.T) {
			n := 0
			for _, v := range violations(openAPI(crd), "") {
				if a.breakOne(t, kind, v) {
					n++
				}
			}
			t.Logf("%d constraints", n)
		})
	}
}

// breakOne breaks one constraint in an object of the kind that has the field.
func (a *api) breakOne(t *testing.T, kind string, v violation) bool {
	t.Helper()
	steps := fieldpath.Steps(v.path)
	for _, name := range slices.Sorted(maps.Keys(a.valid)) {
		base := a.valid[name]
		if base.GetKind() != kind {
			continue
		}
		broken := base.DeepCopy()
		if !change(broken.Object, steps, v.value) {
			continue
		}
		r, err := a.resource(base)
		assert.NilError(t, err)
		if steps[0] == "status" {
			stored, err := r.Get(t.Context(), base.GetName(), metav1.GetOptions{})
			if apierrors.IsNotFound(err) {
				stored, err = a.create(t.Context(), base.DeepCopy())
				t.Cleanup(func() { _ = r.Delete(context.Background(), base.GetName(), metav1.DeleteOptions{}) })
			}
			assert.NilError(t, err)
			stored.Object["status"] = broken.Object["status"]
			_, err = r.UpdateStatus(t.Context(), stored, metav1.UpdateOptions{DryRun: []string{metav1.DryRunAll}})
			return check(t, kind, v, err)
		}
		broken.SetName("broken")
		_, err = r.Create(t.Context(), broken, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		return check(t, kind, v, err)
	}
	return assert.Check(t, false, "%s: no object of testdata/valid has %s, which has the constraint %s", kind, v.path, v.what)
}

func check(t *testing.T, kind string, v violation, err error) bool {
	t.Helper()
	if !assert.Check(t, apierrors.IsInvalid(err), "%s: %s: %s: %v was not refused as invalid: %v", kind, v.path, v.what, v.value, err) {
		return false
	}
	at := regexp.MustCompile(strings.ReplaceAll(regexp.QuoteMeta(v.path), `\[\]`, `\[\d+\]`) + `(\W|$)`)
	return assert.Check(t, is.Regexp(at, err.Error()), "%s: the message does not name the field %s", kind, v.path)
}

// change puts value at the first place that the steps lead to, or removes what
// is there. It returns false when there is none.
func change(at any, steps []string, value any) bool {
	last := len(steps) == 1
	switch node := at.(type) {
	case map[string]any:
		next, ok := node[steps[0]]
		if !ok {
			return false
		}
		if !last {
			return change(next, steps[1:], value)
		}
		if value == nil {
			delete(node, steps[0])
		} else {
			node[steps[0]] = value
		}
		return true
	case []any:
		if steps[0] != "[]" {
			panic(fmt.Sprintf("%v leads into a list", steps))
		}
		for i := range node {
			if last {
				node[i] = value
				return true
			}
			if change(node[i], steps[1:], value) {
				return true
			}
		}
	}
	return false
}
