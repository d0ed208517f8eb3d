package apitest

import (
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"

	"github.com/isthmus-net/isthmus/appliance/fieldpath"
)

// badKind is a file of appliance/plan/testdata/bad, as far as an API server has
// a say in it; TestEveryFieldHasABadValue there checks that no field is without
// a case.
type badKind struct {
	Object map[string]any `json:"object"`
	Cases  []struct {
		Field string         `json:"field"`
		Value any            `json:"value"`
		Patch map[string]any `json:"patch"`
		API   string         `json:"api"`
		At    string         `json:"at"`
	} `json:"cases"`
}

// badInput shows that the API server refuses the bad values that it is said to
// refuse, by the field's name, and stores the others, which somebody has to
// report.
func badInput(t *testing.T, a *api) {
	files, err := filepath.Glob("../../../appliance/plan/testdata/bad/*.yaml")
	assert.NilError(t, err)
	assert.Assert(t, len(files) > 0)
	refused, stored := 0, 0
	for _, f := range files {
		b, err := os.ReadFile(f)
		assert.NilError(t, err)
		var k badKind
		assert.NilError(t, yaml.Unmarshal(b, &k), f)
		base := &unstructured.Unstructured{Object: k.Object}
		t.Run(base.GetKind(), func(t *testing.T) {
			assert.NilError(t, a.try(t, base))
			for _, c := range k.Cases {
				u := base.DeepCopy()
				if c.Patch != nil {
					u = merged(t, base, c.Patch)
				} else {
					fieldpath.Put(u.Object, strings.TrimSuffix(c.Field, "{}"), c.Value)
				}
				err := a.try(t, u)
				if c.API == "" {
					assert.Check(t, err, "%s: %v %v", c.Field, c.Value, c.Patch)
					stored++
					continue
				}
				at := c.At
				if at == "" {
					at = strings.ReplaceAll(c.Field, "[]", "[0]")
				}
				if assert.Check(t, apierrors.IsInvalid(err), "%s: %v %v: %v", c.Field, c.Value, c.Patch, err) {
					assert.Check(t, is.Contains(err.Error(), at))
					assert.Check(t, is.Contains(err.Error(), c.API))
					refused++
				}
			}
		})
	}
	t.Logf("%d refused, %d stored", refused, stored)
}

// try asks the API server to create an object, in a namespace that is there,
// and not to keep it.
func (a *api) try(t *testing.T, u *unstructured.Unstructured) error {
	t.Helper()
	u = u.DeepCopy()
	u.SetNamespace("")
	r, err := a.resource(u)
	assert.NilError(t, err)
	u.SetName("bad-input")
	_, err = r.Create(t.Context(), u, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}, FieldValidation: metav1.FieldValidationStrict})
	return err
}

// wrongTypes shows that every field of every kind refuses what is not of its
// type, by its name.
func wrongTypes(t *testing.T, a *api) {
	for _, crd := range a.crds {
		kind, _, _ := unstructured.NestedString(crd.Object, "spec", "names", "kind")
		spec, ok := openAPI(crd)["properties"].(map[string]any)["spec"].(map[string]any)
		if !ok {
			continue // GatewayReport
		}
		t.Run(kind, func(t *testing.T) {
			var base *unstructured.Unstructured
			for _, name := range slices.Sorted(maps.Keys(a.valid)) {
				if u := a.valid[name]; u.GetKind() == kind && base == nil {
					base = u.DeepCopy()
				}
			}
			delete(base.Object, "status")
			n := 0
			for path, wrong := range wrongValues(spec, "spec") {
				u := base.DeepCopy()
				fieldpath.Put(u.Object, path, wrong)
				err := a.try(t, u)
				at := regexp.MustCompile(strings.ReplaceAll(regexp.QuoteMeta(path), `\[\]`, `\[\d+\]`) + `: Invalid value: .* must be of type`)
				if assert.Check(t, apierrors.IsInvalid(err), "%s: %v: %v", path, wrong, err) && assert.Check(t, is.Regexp(at, err.Error())) {
					n++
				}
			}
			t.Logf("%d fields", n)
		})
	}
}

// wrongValues returns a value of another type for every field of our own.
func wrongValues(s map[string]any, path string) map[string]any {
	out := map[string]any{}
	switch s["type"] {
	case "string", "object":
		out[path] = int64(7)
	case "integer", "boolean", "array":
		out[path] = "seven"
	}
	if slices.Contains(foreign, path) {
		return out
	}
	for _, c := range children(s) {
		at := path + "[]"
		if c.name != "" {
			at = join(path, c.name)
		}
		maps.Copy(out, wrongValues(c.schema, at))
	}
	return out
}
