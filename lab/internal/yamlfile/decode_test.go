package yamlfile_test

import (
	"testing"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/lab/internal/yamlfile"
)

type small struct {
	Name  string   `lab:"name,required"`
	Part  part     `lab:"part"`
	Parts []part   `lab:"parts"`
	Words []string `lab:"words,one"`
}

type part struct {
	Size string `lab:"size,required"`
}

// TestUnsupported: anchors, aliases, merge keys and tags are refused by their
// name, each once, at their place.
func TestUnsupported(t *testing.T) {
	for src, want := range map[string]string{
		"name: &n some":                            "f.yaml:1:7: anchors (&n) are not supported\n    name: &n some\n          ^\n  remove it, and write the value wherever it is meant",
		"name: *n":                                 "f.yaml:1:7: aliases (*n) are not supported\n    name: *n\n          ^\n  write what it stands for in its place",
		"name: !!str 5":                            "f.yaml:1:7: tags (!!str) are not supported\n    name: !!str 5\n          ^\n  remove it",
		"name: a\npart: &p { size: 1 }":            "f.yaml:2:7: anchors (&p) are not supported\n    part: &p { size: 1 }\n          ^\n  remove it, and write the value wherever it is meant",
		"name: a\npart: *p":                        "f.yaml:2:7: aliases (*p) are not supported\n    part: *p\n          ^\n  write what it stands for in its place",
		"name: a\npart: { <<: *p }":                "f.yaml:2:9: merge keys (<<) are not supported\n    part: { <<: *p }\n            ^\n  write the keys that it stands for in its place",
		"name: a\nparts:\n  - <<: *p\n    sise: 1": "f.yaml:3:5: merge keys (<<) are not supported\n      - <<: *p\n        ^\n  write the keys that it stands for in its place",
		"name: a\nparts: *p":                       "f.yaml:2:8: aliases (*p) are not supported\n    parts: *p\n           ^\n  write what it stands for in its place",
		"name: a\nwords: [b, *w]":                  "f.yaml:2:12: aliases (*w) are not supported\n    words: [b, *w]\n               ^\n  write what it stands for in its place",
	} {
		f := yamlfile.Parse("f.yaml", []byte(src))
		var in small
		if f.Root != nil {
			f.Decode(f.Root, &in, nil)
		}
		assert.Error(t, f.Err(), want)
	}
}
