package main

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/validate"
	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
)

const image = "ghcr.io/isthmus-net/isthmus:0.1.0"

// make writes an image of two binaries and returns what was printed.
func generate(t *testing.T, dir string) string {
	t.Helper()
	var args []string
	for _, arch := range []string{"amd64", "arm64"} {
		file := filepath.Join(t.TempDir(), arch)
		assert.NilError(t, os.WriteFile(file, bytes.Repeat([]byte("binary for "+arch), 1000), 0o755))
		args = append(args, arch+"="+file)
	}
	var out bytes.Buffer
	assert.NilError(t, run(append([]string{"-name", image, "-version", "0.1.0", "-out", dir}, args...), &out))
	return out.String()
}

// contents are the files below a directory.
func contents(t *testing.T, dir string) map[string]string {
	t.Helper()
	out := map[string]string{}
	assert.NilError(t, filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		text, err := os.ReadFile(path)
		out[strings.TrimPrefix(path, dir)] = string(text)
		return err
	}))
	return out
}

// Two runs write the same bytes, whatever was there before.
func TestReproducible(t *testing.T) {
	one, two := t.TempDir(), t.TempDir()
	first := generate(t, one)
	assert.NilError(t, os.MkdirAll(filepath.Join(two, "oci", "blobs"), 0o755))
	assert.NilError(t, os.WriteFile(filepath.Join(two, "oci", "blobs", "old"), nil, 0o644))
	assert.Equal(t, generate(t, two), first)
	assert.Check(t, strings.HasPrefix(first, image+"@sha256:"), first)
	a, b := contents(t, one), contents(t, two)
	assert.Assert(t, len(a) > 5)
	assert.Equal(t, len(a), len(b))
	for path, text := range a {
		assert.Check(t, b[path] == text, "%s differs", path)
	}
}

// The layout and the archives are sound, and hold the binary and nothing else.
func TestImage(t *testing.T) {
	dir := t.TempDir()
	generate(t, dir)
	path, err := layout.FromPath(filepath.Join(dir, "oci"))
	assert.NilError(t, err)
	top, err := path.ImageIndex()
	assert.NilError(t, err)
	assert.NilError(t, validate.Index(top))
	m, err := top.IndexManifest()
	assert.NilError(t, err)
	assert.Equal(t, len(m.Manifests), 1)
	assert.Equal(t, m.Manifests[0].Annotations["io.containerd.image.name"], image)
	index, err := top.ImageIndex(m.Manifests[0].Digest)
	assert.NilError(t, err)
	m, err = index.IndexManifest()
	assert.NilError(t, err)
	assert.Equal(t, len(m.Manifests), 2)
	for i, arch := range []string{"amd64", "arm64"} {
		assert.Equal(t, m.Manifests[i].Platform.Architecture, arch)
		img, err := index.Image(m.Manifests[i].Digest)
		assert.NilError(t, err)
		check(t, img, arch)
		archive, err := tarball.ImageFromPath(filepath.Join(dir, "isthmus-"+arch+".tar"), nil)
		assert.NilError(t, err)
		assert.NilError(t, validate.Image(archive))
		check(t, archive, arch)
	}
}

func check(t *testing.T, img v1.Image, arch string) {
	t.Helper()
	c, err := img.ConfigFile()
	assert.NilError(t, err)
	assert.Equal(t, c.Architecture, arch)
	assert.Equal(t, c.OS, "linux")
	assert.DeepEqual(t, c.Config.Entrypoint, []string{"/isthmus"})
	assert.Equal(t, c.Config.User, nobody)
	layers, err := img.Layers()
	assert.NilError(t, err)
	assert.Equal(t, len(layers), 1)
	r, err := layers[0].Uncompressed()
	assert.NilError(t, err)
	defer r.Close()
	text, err := io.ReadAll(r)
	assert.NilError(t, err)
	assert.Check(t, bytes.HasPrefix(text, []byte("isthmus\x00")))
	assert.Check(t, bytes.Contains(text, []byte("binary for "+arch)))
}

// Another program is where it is asked for, and nothing but its archive is
// written.
func TestArchives(t *testing.T) {
	dir, file := t.TempDir(), filepath.Join(t.TempDir(), "probe")
	assert.NilError(t, os.WriteFile(file, []byte("a probe"), 0o755))
	assert.NilError(t, run([]string{"-archives", "-out", dir, "-name", "example.com/pause:1", "-path", "/bin/pause", "-argument", "pause", "-user", "0:0", "amd64=" + file}, io.Discard))
	have := contents(t, dir)
	assert.Equal(t, len(have), 1)
	img, err := tarball.ImageFromPath(filepath.Join(dir, "pause-amd64.tar"), nil)
	assert.NilError(t, err)
	assert.NilError(t, validate.Image(img))
	c, err := img.ConfigFile()
	assert.NilError(t, err)
	assert.DeepEqual(t, c.Config.Entrypoint, []string{"/bin/pause", "pause"})
	assert.Equal(t, c.Config.User, "0:0")
	layers, err := img.Layers()
	assert.NilError(t, err)
	r, err := layers[0].Uncompressed()
	assert.NilError(t, err)
	defer r.Close()
	text, err := io.ReadAll(r)
	assert.NilError(t, err)
	assert.Check(t, bytes.HasPrefix(text, []byte("bin/pause\x00")))
}

func TestRefuses(t *testing.T) {
	for _, tt := range []struct {
		name string
		args []string
		want string
	}{
		{"no name", []string{"amd64=x"}, "-name"},
		{"a name without a version", []string{"-name", "isthmus", "amd64=x"}, "-name \"isthmus\": write a name with a version"},
		{"no binary", []string{"-name", image}, "no binaries"},
		{"a binary without its architecture", []string{"-name", image, "x"}, "write ARCH=FILE"},
		{"a binary that is not there", []string{"-name", image, "-out", t.TempDir(), "amd64=/does/not/exist"}, "amd64: open /does/not/exist"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			assert.Check(t, is.ErrorContains(run(tt.args, io.Discard), tt.want))
		})
	}
}
