package nettest

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// SkipOrFail skips the test because a feature is missing. With CI set in the
// environment it fails, unless the environment variable ISTHMUS_ACCEPT_SKIPS
// has the feature in its list (by commas): for worlds that are known to lack
// it. Whoever calls it has tried the feature; why is what came of that, and
// says what to do where that is not plain.
func SkipOrFail(t testing.TB, feature string, why error) {
	t.Helper()
	accepted := strings.Split(os.Getenv("ISTHMUS_ACCEPT_SKIPS"), ",")
	if os.Getenv("CI") != "" && !slices.Contains(accepted, feature) {
		t.Fatalf("missing feature %s: %v", feature, why)
	}
	t.Skipf("missing feature %s: %v", feature, why)
}

// Need skips the test when a program is not installed; in CI it fails.
func Need(t testing.TB, programs ...string) {
	t.Helper()
	for _, p := range programs {
		if _, err := exec.LookPath(p); err != nil {
			SkipOrFail(t, "program "+p, err)
		}
	}
}

// NeedRoot skips the test when it may not make namespaces and mount file
// systems on this machine; in CI it fails. A test that wants nothing but a
// network namespace uses [Main] and [NewNS], and runs for anybody.
func NeedRoot(t testing.TB) {
	t.Helper()
	if err := tryRoot(); err != nil {
		SkipOrFail(t, "root", fmt.Errorf("user %d: %w: run the test as root", os.Geteuid(), err))
	}
}

// tryRoot makes the namespaces that go with the thread it makes them on.
func tryRoot() error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the namespaces die with the thread
		done <- unix.Unshare(unix.CLONE_NEWNET | unix.CLONE_NEWNS)
	}()
	if err := <-done; err != nil {
		return fmt.Errorf("new namespaces: %w", err)
	}
	return nil
}

// Built returns the absolute path of a file in the repository's bin, such as
// kubernetes or cni/bridge. It skips the test when nobody has built it; in CI
// it fails.
func Built(t testing.TB, file string) string {
	t.Helper()
	root, err := repository()
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(root, "bin", file)
	if _, err := os.Stat(path); err != nil {
		target := "build"
		switch top, _, _ := strings.Cut(file, "/"); top {
		case "kubernetes", "kube-proxy":
			target = "kubernetes"
		case "cni":
			target = "cni"
		}
		SkipOrFail(t, "bin/"+file, fmt.Errorf("%w: run `make %s`", err, target))
	}
	return path
}

// repository is the directory of the go.mod that the test's package belongs
// to: tests run where their package is.
func repository() (string, error) {
	start, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for dir := start; ; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir, nil
		}
		if dir == filepath.Dir(dir) {
			return "", fmt.Errorf("there is no go.mod in %s or above: run the test in its package's directory", start)
		}
	}
}

// Slow skips a test that takes long, and what takes so long, when -short asks
// for it. CI may not ask: there it fails.
func Slow(t testing.TB, what string) {
	t.Helper()
	if testing.Short() {
		SkipOrFail(t, "time", fmt.Errorf("the test %s: run it without -short", what))
	}
}
