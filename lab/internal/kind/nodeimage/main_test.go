package main

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
)

// tree writes files, those that begin with "#!" executable.
func tree(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		file, mode := filepath.Join(dir, name), os.FileMode(0o644)
		if strings.HasPrefix(text, "#!") {
			mode = 0o755
		}
		assert.NilError(t, os.MkdirAll(filepath.Dir(file), 0o755))
		assert.NilError(t, os.WriteFile(file, []byte(text), mode))
	}
	return dir
}

// root is a root directory as mmdebstrap writes it.
func root(t *testing.T, name string) string {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	assert.NilError(t, w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: "./" + name, Mode: 0o755}))
	assert.NilError(t, w.Close())
	file := filepath.Join(t.TempDir(), "root.tar")
	assert.NilError(t, os.WriteFile(file, b.Bytes(), 0o600))
	return file
}

// contents are the files of an image: their text, or "-> " and where a link leads.
func contents(t *testing.T, r io.Reader) map[string]string {
	t.Helper()
	out := map[string]string{}
	for tr := tar.NewReader(r); ; {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return out
		}
		assert.NilError(t, err)
		text, err := io.ReadAll(tr)
		assert.NilError(t, err)
		if h.Linkname != "" {
			text = []byte("-> " + h.Linkname)
		}
		out[strings.TrimPrefix(h.Name, "./")] = string(text)
	}
}

// TestImage: a node has kind's files and what Kubernetes needs, its archives have
// images by the names that kubeadm asks for, and the tag is made of the content.
func TestImage(t *testing.T) {
	files := map[string]string{
		"kubeadm": "#!/bin/sh\n[ \"$*\" = 'config images list --kubernetes-version v1.36.3' ] || exit 1\n" +
			"for i in kube-apiserver:v1.36.3 kube-controller-manager:v1.36.3 kube-scheduler:v1.36.3 kube-proxy:v1.36.3 coredns/coredns:v1.14.2 pause:3.99 etcd:3.6.8-0; do echo registry.k8s.io/$i; done\n",
		"ctr": "#!/bin/sh\necho '{\"process\": {\"rlimits\": [1], \"cwd\": \"/\"}}'\n",
	}
	for _, p := range []string{"kubernetes", "kube-proxy", "coredns", "probe", "containerd", "containerd-shim-runc-v2", "crictl"} {
		files[p] = "program " + p
	}
	for _, p := range cniPlugins {
		files["cni/"+p] = "plug-in " + p
	}
	bin := tree(t, files)
	kind := tree(t, map[string]string{
		"images/base/files/usr/local/bin/entrypoint":           "#!/bin/bash\n",
		"images/base/files/etc/containerd/config.toml":         "version = 2\n[plugins.x]\n  sandbox_image = \"registry.k8s.io/pause:3.10\"\n",
		"images/base/files/etc/systemd/system/kubelet.service": "[Unit]\n",
	})
	build := func() (file, tag string) {
		file = filepath.Join(t.TempDir(), "node.tar")
		var out bytes.Buffer
		assert.NilError(t, run([]string{"-base", root(t, "sbin/init"), "-firewall", root(t, "usr/sbin/nft"), "-bin", bin, "-kind", kind, "-version", "v1.36.3", "-out", file}, &out))
		return file, strings.TrimSpace(out.String())
	}
	file, tag := build()
	assert.Check(t, strings.HasPrefix(tag, Repository+":"), tag)
	_, again := build()
	assert.Equal(t, again, tag)

	img, err := tarball.ImageFromPath(file, nil)
	assert.NilError(t, err)
	config, err := img.ConfigFile()
	assert.NilError(t, err)
	assert.DeepEqual(t, config.Config.Entrypoint, []string{"/usr/local/bin/entrypoint", "/sbin/init"})
	assert.Equal(t, config.Config.StopSignal, "SIGRTMIN+3")
	got := contents(t, mutate.Extract(img))
	for name, want := range map[string]string{
		"sbin/init": "", "kind/version": "v1.36.3", "usr/bin/kubelet": "-> kubernetes", "usr/bin/kubernetes": "program kubernetes",
		"usr/local/bin/entrypoint": "#!/bin/bash\n", "opt/cni/bin/bridge": "plug-in bridge", "usr/local/bin/crictl": "program crictl",
		"etc/systemd/system/multi-user.target.wants/load-images.service": "-> /etc/systemd/system/load-images.service",
	} {
		text, ok := got[name]
		assert.Check(t, ok, name)
		assert.Equal(t, text, want, name)
	}
	var spec map[string]any
	assert.NilError(t, json.Unmarshal([]byte(got["etc/containerd/cri-base.json"]), &spec))
	assert.DeepEqual(t, spec["process"], map[string]any{"cwd": "/"})
	assert.Check(t, is.Contains(got["etc/containerd/cri-base.json"], "mount-product-files.sh"))

	tags := map[string][]string{}
	for _, archive := range []string{"node", "control-plane"} {
		text := got["kind/images/"+archive+".tar"]
		m, err := tarball.LoadManifest(func() (io.ReadCloser, error) { return io.NopCloser(strings.NewReader(text)), nil })
		assert.NilError(t, err)
		for _, d := range m {
			tags[archive] = append(tags[archive], d.RepoTags...)
		}
	}
	assert.Check(t, is.Len(tags["node"], 3))
	assert.Check(t, is.Contains(tags["node"], "registry.k8s.io/pause:3.10")) // containerd's, not kubeadm's
	assert.Check(t, is.Contains(tags["node"], "registry.k8s.io/coredns/coredns:v1.14.2"))
	assert.Check(t, is.Len(tags["control-plane"], 4))
	assert.Check(t, is.Contains(tags["control-plane"], "registry.k8s.io/etcd:3.6.8-0"))

	assert.NilError(t, os.WriteFile(filepath.Join(bin, "crictl"), []byte("another"), 0o644))
	_, other := build()
	assert.Check(t, other != tag)
	assert.NilError(t, os.Remove(filepath.Join(bin, "coredns")))
	err = run([]string{"-base", root(t, "x"), "-firewall", root(t, "y"), "-bin", bin, "-kind", kind, "-version", "v1.36.3", "-out", file}, io.Discard)
	assert.ErrorContains(t, err, "coredns: no such file")
	assert.ErrorContains(t, run([]string{"-bin", bin}, io.Discard), "write -base FILE")
}
