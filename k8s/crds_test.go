package k8s

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	"gotest.tools/v3/golden"
	"sigs.k8s.io/yaml"
)

type crd struct {
	Metadata struct {
		Name   string            `json:"name"`
		Labels map[string]string `json:"labels"`
	} `json:"metadata"`
	Spec struct {
		Group string `json:"group"`
		Scope string `json:"scope"`
		Names struct {
			Kind       string   `json:"kind"`
			Plural     string   `json:"plural"`
			ShortNames []string `json:"shortNames"`
			Categories []string `json:"categories"`
		} `json:"names"`
		Versions []struct {
			Name    string `json:"name"`
			Columns []struct {
				Name     string `json:"name"`
				JSONPath string `json:"jsonPath"`
				Priority int    `json:"priority"`
			} `json:"additionalPrinterColumns"`
			Subresources map[string]any `json:"subresources"`
			Schema       struct {
				OpenAPI schema `json:"openAPIV3Schema"`
			} `json:"schema"`
		} `json:"versions"`
	} `json:"spec"`
}

type schema struct {
	Type        string            `json:"type"`
	Format      string            `json:"format"`
	AnyOf       []schema          `json:"anyOf"`
	Enum        []any             `json:"enum"`
	Default     any               `json:"default"`
	Required    []string          `json:"required"`
	Properties  map[string]schema `json:"properties"`
	Items       *schema           `json:"items"`
	Additional  *schema           `json:"additionalProperties"`
	MaxItems    int               `json:"maxItems"`
	MinItems    int               `json:"minItems"`
	MaxProps    int               `json:"maxProperties"`
	Minimum     *float64          `json:"minimum"`
	Maximum     *float64          `json:"maximum"`
	MaxLength   int               `json:"maxLength"`
	Pattern     string            `json:"pattern"`
	MapKeys     []string          `json:"x-kubernetes-list-map-keys"`
	Unknown     bool              `json:"x-kubernetes-preserve-unknown-fields"`
	Validations []struct {
		Message string `json:"message"`
	} `json:"x-kubernetes-validations"`
}

// What users and the public CLI rely on, as one page: a change of it is a
// change of the API. -update refreshes it.
func TestCRDOutline(t *testing.T) {
	files, err := filepath.Glob("crds/*.yaml")
	assert.NilError(t, err)
	var out strings.Builder
	for _, f := range files {
		text, err := os.ReadFile(f)
		assert.NilError(t, err)
		var c crd
		assert.NilError(t, yaml.Unmarshal(text, &c), f)
		outline(&out, c)
	}
	golden.Assert(t, out.String(), "crds.txt")
}

func outline(out *strings.Builder, c crd) {
	names := c.Spec.Names
	fmt.Fprintf(out, "%s (%s) %s %v %v", names.Kind, c.Metadata.Name, c.Spec.Scope, names.ShortNames, names.Categories)
	for _, k := range slices.Sorted(maps.Keys(c.Metadata.Labels)) {
		fmt.Fprintf(out, " %s=%s", k, c.Metadata.Labels[k])
	}
	out.WriteByte('\n')
	for _, v := range c.Spec.Versions {
		fmt.Fprintf(out, "  %s subresources %v\n", v.Name, slices.Sorted(maps.Keys(v.Subresources)))
		for _, col := range v.Columns {
			wide := ""
			if col.Priority > 0 {
				wide = " (wide)"
			}
			fmt.Fprintf(out, "  column %s%s: %s\n", col.Name, wide, col.JSONPath)
		}
		for _, part := range []string{"spec", "status"} {
			if s, ok := v.Schema.OpenAPI.Properties[part]; ok {
				fields(out, part, s, false)
			}
		}
	}
	out.WriteByte('\n')
}

func fields(out *strings.Builder, path string, s schema, required bool) {
	fmt.Fprintf(out, "  %s", path)
	if required {
		out.WriteString("*")
	}
	fmt.Fprintf(out, " %s", s.Type)
	for _, f := range append([]schema{{Format: s.Format}}, s.AnyOf...) {
		if f.Format != "" {
			out.WriteString(" " + f.Format)
		}
	}
	facts := map[string]any{}
	for name, v := range map[string]int{"maxItems": s.MaxItems, "minItems": s.MinItems, "maxProperties": s.MaxProps, "maxLength": s.MaxLength} {
		if v != 0 {
			facts[name] = v
		}
	}
	if s.Enum != nil {
		facts["enum"] = s.Enum
	}
	if s.Default != nil {
		facts["default"] = s.Default
	}
	if s.Minimum != nil {
		facts["minimum"] = *s.Minimum
	}
	if s.Maximum != nil {
		facts["maximum"] = *s.Maximum
	}
	if s.Pattern != "" {
		facts["pattern"] = s.Pattern
	}
	if s.MapKeys != nil {
		facts["keys"] = s.MapKeys
	}
	if s.Unknown {
		facts["unknown"] = "kept"
	}
	if len(facts) > 0 {
		text, err := json.Marshal(facts)
		if err != nil {
			panic(err) // it was read from JSON
		}
		out.WriteString(" " + string(text))
	}
	out.WriteByte('\n')
	for _, v := range s.Validations {
		fmt.Fprintf(out, "    rule: %s\n", v.Message)
	}
	if _, workload := s.Properties["progressDeadlineSeconds"]; workload {
		return
	}
	if _, service := s.Properties["clusterIPs"]; service {
		return
	}
	for _, name := range slices.Sorted(maps.Keys(s.Properties)) {
		fields(out, path+"."+name, s.Properties[name], slices.Contains(s.Required, name))
	}
	if s.Items != nil {
		fields(out, path+"[]", *s.Items, false)
	}
	if s.Additional != nil {
		fields(out, path+"{}", *s.Additional, false)
	}
}
