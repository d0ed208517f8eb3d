package yamlfile

import (
	"reflect"
	"strings"
)

// A Schemer describes itself where the decoder leaves decoding to it.
type Schemer interface{ LabSchema() map[string]any }

// Schema returns the JSON schema of what [File.Decode] reads into a value of
// this type, so that editors complete and check the files.
func Schema(v any, title string) map[string]any {
	s := schemaOf(reflect.TypeOf(v), field{})
	s["$schema"] = "https://json-schema.org/draft/2020-12/schema"
	s["title"] = title
	return s
}

// SchemaOf is the part of a schema that describes values of the type of v.
func SchemaOf(v any) map[string]any { return schemaOf(reflect.TypeOf(v), field{}) }

func schemaOf(t reflect.Type, fl field) map[string]any {
	if s, ok := reflect.New(t).Interface().(Schemer); ok {
		return s.LabSchema()
	}
	switch t {
	case typeNode:
		return map[string]any{}
	case typePrefix, typeAddr:
		return map[string]any{"type": "string"}
	case typeDuration:
		return map[string]any{"type": "string", "pattern": durationPattern}
	}
	switch t.Kind() {
	case reflect.Pointer:
		return schemaOf(t.Elem(), fl)
	case reflect.Struct:
		return structSchema(t)
	case reflect.Slice:
		elem := schemaOf(t.Elem(), fl.element())
		if fl.keyField != "" {
			return map[string]any{"type": "object", "additionalProperties": elem}
		}
		list := map[string]any{"type": "array", "items": elem}
		if fl.one {
			return map[string]any{"anyOf": []any{elem, list}}
		}
		return list
	case reflect.Map:
		return map[string]any{"type": "object", "additionalProperties": schemaOf(t.Elem(), field{})}
	case reflect.Int:
		return fl.bounds.numberSchema()
	case reflect.Bool:
		return map[string]any{"type": []any{"boolean", "string"}}
	}
	if len(fl.enum) > 0 {
		// A value of a matrix may stand for it.
		return map[string]any{"anyOf": []any{
			map[string]any{"enum": fl.enum},
			map[string]any{"type": "string", "pattern": `^\{.*\}$`},
		}}
	}
	return map[string]any{"type": []any{"string", "number", "boolean"}}
}

func structSchema(t reflect.Type) map[string]any {
	properties, required := map[string]any{}, []any{}
	for i := range t.NumField() {
		fl, ok := parseTag(t.Field(i))
		if !ok {
			continue
		}
		s := schemaOf(t.Field(i).Type, fl)
		if fl.inline {
			return s
		}
		doc := fl.doc
		if t.Field(i).Type == typeDuration { // JSON schema can't compare two
			doc += fl.bounds.text()
		}
		if doc != "" {
			s["description"] = strings.TrimSpace(doc)
		}
		properties[fl.key] = s
		if fl.required {
			required = append(required, fl.key)
		}
	}
	s := map[string]any{"type": "object", "additionalProperties": false, "properties": properties}
	if len(required) > 0 {
		s["required"] = required
	}
	return s
}
