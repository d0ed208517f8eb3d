package kind

import (
	"bytes"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"gotest.tools/v3/assert"
)

// TestPack: tar(1) makes the files that a node gets, with their directories and modes. A program
// that is missing is named.
func TestPack(t *testing.T) {
	dir, from := t.TempDir(), filepath.Join(t.TempDir(), "some")
	assert.NilError(t, os.WriteFile(from, []byte("a program"), 0o600))
	var archive bytes.Buffer
	assert.NilError(t, pack(&archive, []sent{program(from, "/usr/local/bin/other"), text("/etc/a/b.conf", "a text"), {to: "/etc/secret", mode: 0o600, text: "a key"}}))
	tar := exec.Command("tar", "-x", "--no-same-owner", "-C", dir)
	tar.Stdin = &archive
	out, err := tar.CombinedOutput()
	assert.NilError(t, err, "%s", out)
	for _, want := range []struct {
		path, text string
		mode       fs.FileMode
	}{{"usr/local/bin/other", "a program", 0o755}, {"etc/a/b.conf", "a text", 0o644}, {"etc/secret", "a key", 0o600}} {
		b, err := os.ReadFile(filepath.Join(dir, want.path))
		assert.NilError(t, err)
		assert.Equal(t, string(b), want.text)
		info, err := os.Stat(filepath.Join(dir, want.path))
		assert.NilError(t, err)
		assert.Equal(t, info.Mode(), want.mode, want.path)
	}
	err = pack(io.Discard, []sent{program(from+"-that-is-not-there", "/x")})
	assert.ErrorIs(t, err, fs.ErrNotExist)
	assert.ErrorContains(t, err, from+"-that-is-not-there")
}
