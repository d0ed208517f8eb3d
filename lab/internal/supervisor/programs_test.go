package supervisor_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/lab/internal/supervisor"
)

// TestProgramsThatPodsCannotRun: they are found before anything is started.
func TestProgramsThatPodsCannotRun(t *testing.T) {
	static := filepath.Join(t.TempDir(), "static")
	source := filepath.Join(t.TempDir(), "main.go")
	assert.NilError(t, os.WriteFile(source, []byte("package main\n\nfunc main() {}\n"), 0o644))
	build := exec.Command("go", "build", "-o", static, source)
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	out, err := build.CombinedOutput()
	assert.NilError(t, err, "%s", out)
	text, short := filepath.Join(t.TempDir(), "text"), filepath.Join(t.TempDir(), "short")
	assert.NilError(t, os.WriteFile(text, []byte("#!/bin/sh\nexec /usr/bin/probe\n"), 0o755))
	assert.NilError(t, os.WriteFile(short, []byte("\x7fELF"), 0o755))

	programs := []string{"isthmus", "lab", "probe", "kubernetes", "kube-proxy", "cni/bridge", "cni/host-local", "cni/portmap"}
	const dynamic = "/bin/ls"
	const loader = "was built with cgo and is linked dynamically, which nothing in a pod can load: remove it and run "
	for _, tt := range []struct {
		name    string
		replace map[string]string // program → what is there instead; "" is nothing
		want    map[string]string // program → what is said of it
	}{
		{"all as they should be", nil, nil},
		{"cgo", map[string]string{"probe": dynamic, "isthmus": dynamic, "lab": dynamic}, map[string]string{
			"probe": loader + "`make build`, or go build with CGO_ENABLED=0", "isthmus": loader + "`make build`", "lab": loader + "`make build`",
		}},
		{"the control plane with cgo", map[string]string{"kubernetes": dynamic}, map[string]string{"kubernetes": loader + "`make kubernetes`"}},
		{"a CNI plugin with cgo", map[string]string{"cni/portmap": dynamic}, map[string]string{"cni/portmap": loader + "`make cni`"}},
		{"a script", map[string]string{"probe": text}, map[string]string{"probe": "is no program (bad magic number"}},
		{"half of a file", map[string]string{"cni/bridge": short}, map[string]string{"cni/bridge": "is no program (EOF): remove it and run `make cni`"}},
		{"a directory", map[string]string{"probe": filepath.Dir(text)}, map[string]string{"probe": "is a directory"}},
		{"nothing", map[string]string{"cni/bridge": ""}, map[string]string{"cni/bridge": "run `make cni`"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bin := t.TempDir()
			assert.NilError(t, os.Mkdir(filepath.Join(bin, "cni"), 0o755))
			for _, p := range programs {
				to, replaced := tt.replace[p]
				switch {
				case !replaced:
					to = static
				case to == "":
					continue
				}
				assert.NilError(t, os.Symlink(to, filepath.Join(bin, p)))
			}
			// A name that no lab may have: nothing is started.
			_, err := supervisor.Start(t.Context(), supervisor.Config{Name: "../x", World: supervisor.Native, BinDir: bin})
			assert.ErrorContains(t, err, "lab name")
			for _, line := range strings.Split(err.Error(), "\n")[1:] {
				p, _, _ := strings.Cut(line, " ")
				want, ok := tt.want[p]
				assert.Check(t, ok && strings.Contains(line, want), "want %q of %s, got: %s", want, p, line)
				delete(tt.want, p)
			}
			assert.Check(t, len(tt.want) == 0, "nothing was said of %v in: %v", tt.want, err)
		})
	}
}
