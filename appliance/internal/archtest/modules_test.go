package archtest

import (
	"cmp"
	"encoding/json"
	"os/exec"
	"path/filepath"
	"testing"

	"gotest.tools/v3/assert"
)

// TestModulesShareVersions has the modules of programs of others require the versions of the main
// module. A package is compiled once for all modules if it and everything it imports are of one
// version: with others of golang.org/x/net, Kubernetes' libraries were compiled three times, which
// took four minutes of a machine on which all programs take nineteen from empty caches.
// lab/public is left out: the daemons of the public system are as they were released.
func TestModulesShareVersions(t *testing.T) {
	t.Parallel()
	main := requirements(t, ".")
	for _, dir := range []string{"lab/kubernetes", "lab/tools"} {
		shared := 0
		for path, version := range requirements(t, dir) {
			want, both := main[path]
			if !both {
				continue
			}
			shared++
			assert.Check(t, version == want, "%s/go.mod requires %s of %s, and go.mod that of %s. One of them is updated by: go get %s@VERSION && go mod tidy", dir, path, version, want, path)
		}
		assert.Check(t, shared > 100, "%s/go.mod and go.mod require %d modules in common", dir, shared)
	}
}

// requirements are the modules that the go.mod file of a directory of the repository requires,
// with the versions that its replacements have.
func requirements(t *testing.T, dir string) map[string]string {
	t.Helper()
	file := filepath.Join(root, dir, "go.mod")
	out, err := exec.Command("go", "mod", "edit", "-json", file).Output()
	assert.NilError(t, err, file)
	type module struct{ Path, Version string }
	var mod struct {
		Require []module
		Replace []struct{ Old, New module }
	}
	assert.NilError(t, json.Unmarshal(out, &mod), file)
	replaced := map[module]string{}
	for _, r := range mod.Replace {
		if r.Old.Path == r.New.Path {
			replaced[r.Old] = r.New.Version
		}
	}
	versions := map[string]string{}
	for _, m := range mod.Require {
		versions[m.Path] = cmp.Or(replaced[m], replaced[module{Path: m.Path}], m.Version)
	}
	return versions
}
