package nettest_test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"

	"github.com/isthmus-net/isthmus/appliance/nettest"
)

// inner marks the process in which the tests of TestSkips do what it looks at.
const inner = "NETTEST_TEST_INNER"

// TestSkips runs each way to skip in a process of its own, with and without
// CI: only what is said to be missing there may be skipped in CI.
func TestSkips(t *testing.T) {
	ways := map[string]func(t *testing.T){
		"feature": func(t *testing.T) { nettest.SkipOrFail(t, "geneve", errors.New("operation not supported")) },
		"program": func(t *testing.T) { nettest.Need(t, "no-such-program") },
		"root":    func(t *testing.T) { nettest.NeedRoot(t) },
		"built": func(t *testing.T) {
			t.Run("isthmus", func(t *testing.T) { nettest.Built(t, "isthmus") })
			t.Run("kubernetes", func(t *testing.T) { nettest.Built(t, "kubernetes") })
			t.Run("kube-proxy", func(t *testing.T) { nettest.Built(t, "kube-proxy") })
			nettest.Built(t, "cni/bridge")
		},
		"slow":  func(t *testing.T) { nettest.Slow(t, "boots a virtual machine") },
		"there": func(t *testing.T) { nettest.Need(t, "sh") },
	}
	if way := os.Getenv(inner); way != "" {
		ways[way](t)
		return
	}
	for _, tt := range []struct {
		name, way, ci, accepted string
		verdict                 string
		says                    []string
	}{
		{"a feature", "feature", "", "", "SKIP", []string{"missing feature geneve: operation not supported"}},
		{"a feature in CI", "feature", "1", "", "FAIL", []string{"missing feature geneve: operation not supported"}},
		{"a feature that CI is known to lack", "feature", "1", "wireguard,geneve", "SKIP", nil},
		{"another one that CI is known to lack", "feature", "1", "wireguard", "FAIL", nil},
		{"a program", "program", "", "", "SKIP", []string{"missing feature program no-such-program"}},
		{"a program in CI", "program", "1", "", "FAIL", nil},
		{"what root may", "root", "", "", "SKIP", []string{"missing feature root: user ", "new namespaces: operation not permitted: run the test as root"}},
		{"what root may in CI", "root", "1", "", "FAIL", nil},
		{"a binary", "built", "", "", "SKIP", []string{
			"bin/isthmus: no such file or directory: run `make build`", "bin/kubernetes: no such file or directory: run `make kubernetes`",
			"bin/kube-proxy: no such file or directory: run `make kubernetes`", "missing feature bin/cni/bridge", "no such file or directory: run `make cni`",
		}},
		{"a binary in CI", "built", "1", "", "FAIL", nil},
		{"time", "slow", "", "", "SKIP", []string{"the test boots a virtual machine: run it without -short"}},
		{"time in CI", "slow", "1", "", "FAIL", nil},
		{"nothing", "there", "1", "", "PASS", nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			out := again(t, tt.way == "root", "-test.short", inner+"="+tt.way, "CI="+tt.ci, "ISTHMUS_ACCEPT_SKIPS="+tt.accepted)
			assert.Check(t, is.Contains(out, "--- "+tt.verdict+": TestSkips"))
			for _, s := range tt.says {
				assert.Check(t, is.Contains(out, s))
			}
		})
	}
}

// again runs TestSkips of this binary in another process, with an environment,
// and as nobody where that is asked for. Its directory is that of a repository
// in which nothing has been built.
func again(t *testing.T, nobody bool, flag string, env ...string) string {
	t.Helper()
	self, err := os.Executable()
	assert.NilError(t, err)
	argv := []string{self, "-test.run=^TestSkips$", "-test.v", flag}
	if nobody && os.Geteuid() == 0 {
		nettest.Need(t, "setpriv")
		// It may not look into the build's directory.
		b, err := os.ReadFile(self)
		assert.NilError(t, err)
		dir, err := os.MkdirTemp("", "nettest")
		assert.NilError(t, err)
		t.Cleanup(func() { os.RemoveAll(dir) })
		assert.NilError(t, os.Chmod(dir, 0o755))
		argv[0] = filepath.Join(dir, "test")
		assert.NilError(t, os.WriteFile(argv[0], b, 0o755))
		argv = append([]string{"setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"}, argv...)
	}
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Dir = t.TempDir()
	assert.NilError(t, os.WriteFile(filepath.Join(cmd.Dir, "go.mod"), nil, 0o644))
	cmd.Env = append(os.Environ(), env...)
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if !errors.As(err, &exit) {
		assert.NilError(t, err)
	}
	return string(out)
}

// The path is the same in whatever package a test asks for it.
func TestBuilt(t *testing.T) {
	dir, err := filepath.EvalSymlinks(t.TempDir())
	assert.NilError(t, err)
	deep := filepath.Join(dir, "a", "b")
	for _, d := range []string{deep, filepath.Join(dir, "bin")} {
		assert.NilError(t, os.MkdirAll(d, 0o755))
	}
	for _, f := range []string{"go.mod", "bin/x"} {
		assert.NilError(t, os.WriteFile(filepath.Join(dir, f), nil, 0o644))
	}
	for _, from := range []string{dir, deep} {
		t.Chdir(from)
		assert.Check(t, is.Equal(nettest.Built(t, "x"), filepath.Join(dir, "bin", "x")))
	}
}
