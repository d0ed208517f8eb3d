package expect_test

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"

	"github.com/isthmus-net/isthmus/k8s"
	"github.com/isthmus-net/isthmus/lab/internal/expect"
	"github.com/isthmus-net/isthmus/lab/internal/yamlfile"
)

// serveNodes is an API server that knows one kind, InternalNode, and has
// objects of it.
func serveNodes(t *testing.T, objects string) *expect.API {
	t.Helper()
	chart, err := k8s.Chart()
	assert.NilError(t, err)
	var crd struct {
		Spec struct {
			Versions []struct {
				Schema struct{ OpenAPIV3Schema map[string]any }
			}
		}
	}
	assert.NilError(t, yaml.Unmarshal(chart["crds/networking.liqo.io_internalnodes.yaml"], &crd))
	const group, version = "networking.liqo.io", "v1beta1"
	// As the API server publishes it: the metadata of all kinds is one schema.
	kind := crd.Spec.Versions[0].Schema.OpenAPIV3Schema
	kind["x-kubernetes-group-version-kind"] = []any{map[string]any{"group": group, "version": version, "kind": "InternalNode"}}
	properties := maps.Clone(kind["properties"].(map[string]any))
	properties["metadata"] = map[string]any{"allOf": []any{map[string]any{"$ref": "#/components/schemas/ObjectMeta"}}}
	kind["properties"] = properties
	var items []any
	assert.NilError(t, yaml.Unmarshal([]byte(objects), &items))

	gv := metav1.GroupVersionForDiscovery{GroupVersion: group + "/" + version, Version: version}
	answers := map[string]any{
		"/api":  metav1.APIVersions{},
		"/apis": metav1.APIGroupList{Groups: []metav1.APIGroup{{Name: group, Versions: []metav1.GroupVersionForDiscovery{gv}, PreferredVersion: gv}}},
		"/apis/" + gv.GroupVersion: metav1.APIResourceList{GroupVersion: gv.GroupVersion, APIResources: []metav1.APIResource{
			{Name: "internalnodes", SingularName: "internalnode", Kind: "InternalNode", Verbs: metav1.Verbs{"get", "list"}},
		}},
		"/apis/" + gv.GroupVersion + "/internalnodes": map[string]any{"kind": "InternalNodeList", "apiVersion": gv.GroupVersion, "items": items},
		"/openapi/v3": map[string]any{"paths": map[string]any{"apis/" + gv.GroupVersion: map[string]any{"serverRelativeURL": "/openapi/v3/nodes"}}},
		"/openapi/v3/nodes": map[string]any{"components": map[string]any{"schemas": map[string]any{
			"InternalNode": kind,
			"ObjectMeta":   map[string]any{"properties": map[string]any{"labels": map[string]any{"additionalProperties": map[string]any{"type": "string"}}}},
		}}},
	}
	return serveAPI(t, func(path string) any { return answers[path] })
}

// serveAPI is an API server that has an answer to some paths; nil: there is nothing.
func serveAPI(t *testing.T, answerTo func(path string) any) *expect.API {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		answer := answerTo(r.URL.Path)
		if answer == nil {
			http.NotFound(w, r)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		assert.Check(t, json.NewEncoder(w).Encode(answer))
	}))
	t.Cleanup(server.Close)
	return expect.NewAPI(func(context.Context, string) (*rest.Config, error) { return &rest.Config{Host: server.URL}, nil })
}

// TestKubectlField: an absence is one of a field that the object, which is
// there, could have.
func TestKubectlField(t *testing.T) {
	const node = `[{kind: InternalNode, apiVersion: networking.liqo.io/v1beta1, metadata: {name: node-1}, status: {nodeIP: {local: 10.0.1.1}}}]`
	for _, tc := range []struct {
		name, objects string
		e             expect.Kubectl
		ok            bool
		got, why      string
	}{
		{"is", node, expect.Kubectl{Field: "{.status.nodeIP.local}", Is: "10.0.1.1"}, true, `{.status.nodeIP.local} = "10.0.1.1"`, ""},
		{"absent", node, expect.Kubectl{Field: "{.status.nodeIP.remote}", Absent: true}, true, `{.status.nodeIP.remote} = ""`, ""},
		{"not absent", node, expect.Kubectl{Field: "{.status.nodeIP.local}", Absent: true}, false, `{.status.nodeIP.local} = "10.0.1.1"`, ""},
		{"no object, no field", "[]", expect.Kubectl{Field: "{.status.nodeIP.remote}", Absent: true}, false, "it does not exist", ""},
		{"no object", "[]", expect.Kubectl{Absent: true}, true, "it does not exist", ""},
		{"mistyped", node, expect.Kubectl{Field: "{.status.nodeIP.remot}", Absent: true}, false,
			`there is no field "remot" in status.nodeIP of InternalNode`, `did you mean "remote"?`},
		{"mistyped in a list", node, expect.Kubectl{Field: "{.status.conditions[0].tipe}", Absent: true}, false,
			`there is no field "tipe" in status.conditions of InternalNode`, `did you mean "type"?`},
		{"mistyped in a filter", node, expect.Kubectl{Field: `{.status.conditions[?(@.tipe=="Applied")].status}`, Absent: true}, false,
			`there is no field "tipe" in status.conditions of InternalNode`, `did you mean "type"?`},
		{"mistyped after the first path", node, expect.Kubectl{Field: "{.status.nodeIP.remote}{.status.nodeIp}", Absent: true}, false,
			`there is no field "nodeIp" in status of InternalNode`, `did you mean "nodeIP"?`},
		{"any key of a map", node, expect.Kubectl{Field: "{.metadata.labels.zone}", Absent: true}, true, `{.metadata.labels.zone} = ""`, ""},
		{"mistyped in what all kinds have", node, expect.Kubectl{Field: "{.metadata.lables.zone}", Absent: true}, false,
			`there is no field "lables" in metadata of InternalNode`, `did you mean "labels"?`},
		{"nothing matches anything", node, expect.Kubectl{Field: "{.status.nodeIP.remote}", Matches: ".*"}, false, `{.status.nodeIP.remote} = ""`, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, row := newFake(t)
			row.API = serveNodes(t, tc.objects)
			tc.e.In, tc.e.Get = "milan", "internalnode/node-1"
			res, err := tc.e.Check(t.Context(), row)
			assert.NilError(t, err)
			assert.Equal(t, res.OK, tc.ok, "%+v", res)
			assert.Equal(t, res.Got, tc.got)
			assert.Equal(t, res.Why, tc.why)
		})
	}
}

// TestLintField: what no object of our kinds can have is found without a
// cluster.
func TestLintField(t *testing.T) {
	_, row := newFake(t)
	for field, problem := range map[string]string{
		"{.status.nodeIP.remote}":                            "",
		"{.metadata.ownerReferences[0].kind}":                "",
		`{.status.conditions[?(@.type=="Accepted")].status}`: "",
		"{.status.nodeIP.remot}":                             `there is no field "remot" in status.nodeIP of InternalNode`,
		`{.status.conditions[?(@.type=="Accepted")].statsu}`: `there is no field "statsu" in status.conditions of InternalNode`,
		"{range .status.conditions[*]}{.nobody.knows}{end}":  "",
	} {
		for _, kind := range []string{"internalnode", "InternalNodes.networking.liqo.io"} {
			f := yamlfile.Parse("s.yaml", fmt.Appendf(nil, "in: milan\nget: %s/node-1\nfield: '%s'\nabsent: true\n", kind, field))
			e := &expect.Kubectl{}
			f.Decode(f.Root, e, nil)
			e.Lint(&expect.Linter{File: f, Topology: row.Topology})
			got := ""
			if err := f.Err(); err != nil {
				got = err.Error()
			}
			if problem == "" {
				assert.Equal(t, got, "", field)
			} else {
				assert.Assert(t, strings.HasPrefix(got, "s.yaml:3:8: "+problem), "%s: %s", field, got)
			}
		}
	}
}
