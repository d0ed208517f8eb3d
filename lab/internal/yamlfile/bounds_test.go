package yamlfile_test

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/lab/internal/yamlfile"
)

type bounded struct {
	Port   int           `lab:"port" min:"1" max:"65535" doc:"default 8080"`
	Lost   *int          `lab:"lost" min:"0" max:"10"`
	Nodes  []int         `lab:"nodes" min:"1" max:"3"`
	Within time.Duration `lab:"within" min:"100ms" max:"10m" doc:"default 10s"`
}

// TestBounds: what is out of bounds is a mistake with its place, and is not
// read as another value.
func TestBounds(t *testing.T) {
	for src, want := range map[string]string{
		"port: 1":          "",
		"port: 65535":      "",
		"lost: 0":          "",
		"nodes: [1, 3]":    "",
		"within: 100ms":    "",
		"within: 10m":      "",
		"port: 73616":      "f.yaml:1:7: port: 73616 is more than 65535\n    port: 73616\n          ^\n  write a whole number from 1 to 65535 (default 8080)",
		"port: 0":          "f.yaml:1:7: port: 0 is less than 1\n    port: 0\n          ^\n  write a whole number from 1 to 65535 (default 8080)",
		"port: -1":         "f.yaml:1:7: port: -1 is less than 1\n    port: -1\n          ^\n  write a whole number from 1 to 65535 (default 8080)",
		"port: http":       "f.yaml:1:7: port: \"http\" is not a whole number\n    port: http\n          ^\n  write a whole number from 1 to 65535 (default 8080)",
		"lost: -1":         "f.yaml:1:7: lost: -1 is less than 0\n    lost: -1\n          ^\n  write a whole number from 0 to 10",
		"nodes: [1, 2, 4]": "f.yaml:1:15: nodes: 4 is more than 3\n    nodes: [1, 2, 4]\n                  ^\n  write a whole number from 1 to 3",
		"within: -1s":      "f.yaml:1:9: within: -1s is less than 100ms\n    within: -1s\n            ^\n  write a duration from 100ms to 10m (default 10s)",
		"within: 0s":       "f.yaml:1:9: within: 0s is less than 100ms\n    within: 0s\n            ^\n  write a duration from 100ms to 10m (default 10s)",
		"within: 11m":      "f.yaml:1:9: within: 11m is more than 10m\n    within: 11m\n            ^\n  write a duration from 100ms to 10m (default 10s)",
	} {
		f := yamlfile.Parse("f.yaml", []byte(src))
		var in bounded
		f.Decode(f.Root, &in, nil)
		if want == "" {
			assert.NilError(t, f.Err(), src)
			continue
		}
		assert.Error(t, f.Err(), want)
		assert.Equal(t, in.Port, 0, src)
		assert.Equal(t, in.Within, time.Duration(0), src)
	}
}

// TestSchemaBounds: editors hear of the bounds.
func TestSchemaBounds(t *testing.T) {
	b, err := json.Marshal(yamlfile.Schema(bounded{}, "some"))
	assert.NilError(t, err)
	for _, want := range []string{
		`"port":{"description":"default 8080","maximum":65535,"minimum":1,"type":["integer","string"]}`,
		`"nodes":{"items":{"maximum":3,"minimum":1,"type":["integer","string"]},"type":"array"}`,
		`"within":{"description":"default 10s from 100ms to 10m",`,
	} {
		assert.Assert(t, strings.Contains(string(b), want), "%s in %s", want, b)
	}
}
