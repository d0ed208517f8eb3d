package k8s

import (
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
)

var (
	metricInSource = regexp.MustCompile(`"((?:liqo|isthmus)_[a-z0-9_]+)"`)
	metricInQuery  = regexp.MustCompile(`\b(?:liqo|isthmus)_[a-z0-9_]+`)
)

// The dashboard shows metrics that the programs have, and all of them.
func TestDashboardMetrics(t *testing.T) {
	have := map[string]bool{}
	assert.NilError(t, filepath.WalkDir("../appliance", func(path string, _ fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		text, err := os.ReadFile(path)
		for _, m := range metricInSource.FindAllStringSubmatch(string(text), -1) {
			have[m[1]] = true
		}
		return err
	}))
	text, err := os.ReadFile("chart/dashboards/isthmus.json")
	assert.NilError(t, err)
	shown := map[string]bool{}
	for _, m := range metricInQuery.FindAllString(string(text), -1) {
		shown[strings.TrimSuffix(m, "_bucket")] = true
	}
	assert.DeepEqual(t, slices.Sorted(maps.Keys(shown)), slices.Sorted(maps.Keys(have)))
}
