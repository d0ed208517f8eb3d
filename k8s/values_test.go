package k8s

import (
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	"sigs.k8s.io/yaml"
)

// valuePaths returns the keys below a value, joined by dots.
func valuePaths(path string, v any, out map[string]bool) {
	m, ok := v.(map[string]any)
	if !ok || len(m) == 0 {
		out[path] = true
		return
	}
	for k, v := range m {
		valuePaths(strings.TrimPrefix(path+"."+k, "."), v, out)
	}
}

// schemaPaths returns the keys that a schema knows, and those of them that it
// says are without effect.
func schemaPaths(path string, s, root map[string]any, out, ignored map[string]bool) {
	if ref, ok := s["$ref"].(string); ok {
		s = root
		for key := range strings.SplitSeq(strings.TrimPrefix(ref, "#/"), "/") {
			s = s[key].(map[string]any)
		}
		schemaPaths(path, s, root, out, ignored)
		return
	}
	if text, _ := s["description"].(string); strings.HasPrefix(text, "Understood, without effect") {
		ignored[path] = true
		return
	}
	properties, _ := s["properties"].(map[string]any)
	if len(properties) == 0 {
		out[path] = true
		return
	}
	for k, v := range properties {
		schemaPaths(strings.TrimPrefix(path+"."+k, "."), v.(map[string]any), root, out, ignored)
	}
}

// values.yaml has every key of the schema, with a default and, at it or above
// it, a comment; the schema has every key of values.yaml; and what is understood
// without effect is in the notes of an installation that sets it.
func TestValuesAndSchema(t *testing.T) {
	text, err := os.ReadFile("chart/values.yaml")
	assert.NilError(t, err)
	var values, schema map[string]any
	assert.NilError(t, yaml.Unmarshal(text, &values))
	raw, err := os.ReadFile("chart/values.schema.json")
	assert.NilError(t, err)
	assert.NilError(t, yaml.Unmarshal(raw, &schema))

	have, known, ignored := map[string]bool{}, map[string]bool{"": true}, map[string]bool{}
	valuePaths("", values, have)
	schemaPaths("", schema, schema, known, ignored)
	delete(known, "")
	delete(known, "global") // Helm's own
	// Maps that users fill, with a default of their own.
	delete(have, "metrics.dashboard.labels.grafana_dashboard")
	have["metrics.dashboard.labels"] = true
	const resources = "networking.gatewayTemplates.container.gateway.resources"
	delete(have, resources+".requests.cpu")
	delete(have, resources+".requests.memory")
	have[resources] = true
	for path := range known { // of a pod not everything is offered everywhere
		if !have[path] && strings.HasSuffix(path, ".pod.resources") {
			delete(known, path)
		}
	}
	assert.DeepEqual(t, slices.Sorted(maps.Keys(have)), slices.Sorted(maps.Keys(known)))

	for path := range ignored {
		v := minimal()
		node, steps := v, strings.Split(path, ".")
		for _, s := range steps[:len(steps)-1] {
			if node[s] == nil {
				node[s] = map[string]any{}
			}
			node = node[s].(map[string]any)
		}
		last := steps[len(steps)-1]
		for _, candidate := range []any{true, map[string]any{"enabled": false}, []any{}} {
			node[last] = candidate
			if notes, err := notes(t, v); err == nil {
				assert.Check(t, is.Contains(notes, "\n  "+path+"\n"), "the notes do not say that %s has no effect", path)
				break
			} else if _, list := candidate.([]any); list {
				t.Errorf("%s: %v", path, err)
			}
		}
	}
	assert.Assert(t, len(ignored) > 10)
}

// notes renders the notes of an installation.
func notes(t *testing.T, values map[string]any) (string, error) {
	t.Helper()
	chart, err := loader.Load("chart")
	assert.NilError(t, err)
	top, err := chartutil.ToRenderValues(chart, values, chartutil.ReleaseOptions{Name: "isthmus", Namespace: "liqo", IsInstall: true}, nil)
	if err != nil {
		return "", err
	}
	files, err := engine.Render(chart, top)
	return files["isthmus/templates/NOTES.txt"] + "\n", err
}
