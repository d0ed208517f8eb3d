// Command nodeimage writes the image of the containers that are nodes of kind's
// clusters, without a container engine and without a registry. Run it by
// make kind-image:
//
//	nodeimage -base bin/kind/base.tar -firewall bin/kind/firewall.tar -bin bin -kind DIR -version v1.36.3 -out bin/images/kind/node-amd64.tar
//
// The image is what kind's own "kindest/node" is: Debian with systemd, and the
// files of kind's base image, which are part of kind's Go module; containerd, runc
// and the components of Kubernetes. Two things differ. The images of the control
// plane are archives, which a unit of systemd gives to containerd before the
// kubelet starts. And there is no kindnet, whose module the Go module proxy does not serve: what makes a
// cluster of this image has to bring the network of its pods.
//
// The archive is as "docker save" writes it. The tag of the image is made of its
// content: the same files make the same tag.
package main

import (
	"archive/tar"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// Repository is the name of the image without its tag. The registry "localhost"
// is one that no engine asks.
const Repository = "localhost/isthmus-lab/kind-node"

func main() {
	if err := run(os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "nodeimage:", err)
		os.Exit(1)
	}
}

func run(args []string, stdout io.Writer) error {
	f := flag.NewFlagSet("nodeimage", flag.ContinueOnError)
	var b builder
	base := f.String("base", "", "`tar file` of a root directory of Debian with systemd (required)")
	out := f.String("out", "", "`file` to write (required)")
	f.StringVar(&b.firewall, "firewall", "", "`tar file` of a root directory with nft and iptables and no more, for kube-proxy (required)")
	f.StringVar(&b.bin, "bin", "bin", "`directory` of the programs")
	f.StringVar(&b.kind, "kind", "", "`directory` of kind's Go module (required)")
	f.StringVar(&b.version, "version", "", "`version` of Kubernetes, such as v1.36.3 (required)")
	if err := f.Parse(args); err != nil {
		return err
	}
	if *base == "" || *out == "" || b.firewall == "" || b.kind == "" || b.version == "" || f.NArg() > 0 {
		return errors.New("write -base FILE -firewall FILE -kind DIR -version VERSION -out FILE, and no other arguments")
	}
	// Of a run that was killed.
	old, err := filepath.Glob(filepath.Join(filepath.Dir(*out), "nodeimage-*"))
	if err != nil {
		return err
	}
	for _, dir := range old {
		if err := os.RemoveAll(dir); err != nil {
			return err
		}
	}
	if b.temp, err = os.MkdirTemp(filepath.Dir(*out), "nodeimage-"); err != nil {
		return err
	}
	defer os.RemoveAll(b.temp)
	files, err := b.files()
	if err != nil {
		return err
	}
	bottom, err := b.stored(*base)
	if err != nil {
		return fmt.Errorf("%s: %w", *base, err)
	}
	node, err := b.layer("node", files)
	if err != nil {
		return err
	}
	archives, err := b.images()
	if err != nil {
		return err
	}
	tag, err := b.tag() // of all but the archives, in which the order of images is random
	if err != nil {
		return err
	}
	top, err := b.layer("images", archives)
	if err != nil {
		return err
	}
	// What kind's own Dockerfile says.
	img, err := image(v1.Config{
		Env:        []string{"container=docker", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
		Entrypoint: []string{"/usr/local/bin/entrypoint", "/sbin/init"},
		StopSignal: "SIGRTMIN+3",
	}, bottom, node, top)
	if err != nil {
		return err
	}
	if err := write(*out, map[name.Tag]v1.Image{tag: img}); err != nil {
		return err
	}
	_, err = fmt.Fprintln(stdout, tag.Name())
	return err
}

// A builder knows where things come from.
type builder struct {
	firewall, bin, kind, version, temp string

	layers []string // digests of those that were made
}

// tag is the name of the image: it says what the layers are that were made.
func (b *builder) tag() (name.Tag, error) {
	sum := sha256.Sum256([]byte(strings.Join(slices.Sorted(slices.Values(b.layers)), "\n")))
	return name.NewTag(Repository + ":" + hex.EncodeToString(sum[:6]))
}

// Paths in a node.
const (
	imageDir   = "kind/images" // what load-images gives to containerd
	systemBin  = "usr/bin/"
	localBin   = "usr/local/bin/"
	unitDir    = "etc/systemd/system/"
	wantedUnit = unitDir + "multi-user.target.wants/"
	multiCall  = "kubernetes" // the program of the control plane, the kubelet and kubectl
)

// staticPods are the components of a control plane that are one program.
var staticPods = []string{"kube-apiserver", "kube-controller-manager", "kube-scheduler"}

// cniPlugins are those of kind's own base image, and bridge.
var cniPlugins = []string{"bridge", "host-local", "loopback", "portmap", "ptp"}

// files are the layer of a node: kind's own files, and programs.
func (b *builder) files() ([]file, error) {
	out, err := b.kindFiles()
	if err != nil {
		return nil, err
	}
	spec, err := b.runtimeSpec()
	if err != nil {
		return nil, err
	}
	out = append(out,
		file{path: "kind/version", content: []byte(b.version)},
		file{path: "etc/containerd/cri-base.json", content: spec},
		file{path: "etc/kubernetes/manifests/.keep"},
		file{path: localBin + "load-images", content: []byte(loadImages), mode: 0o755},
		file{path: localBin + "fit-machine", content: []byte(fitMachine), mode: 0o755},
		file{path: unitDir + "containerd.service.d/10-machine.conf", content: []byte(fitMachineDropIn)},
		file{path: unitDir + "load-images.service", content: []byte(loadImagesUnit)},
		file{path: unitDir + "kubelet.service.d/12-images.conf", content: []byte(kubeletDropIn)},
		// As kind's Dockerfile: it would write to what all of the machine shares.
		file{path: unitDir + "systemd-binfmt.service", link: "/dev/null"},
		file{path: systemBin + "kubelet", link: multiCall},
		file{path: systemBin + "kubectl", link: multiCall},
	)
	for _, unit := range []string{"kubelet", "containerd", "undo-mount-hacks", "load-images"} {
		out = append(out, file{path: wantedUnit + unit + ".service", link: "/" + unitDir + unit + ".service"})
	}
	for _, p := range []string{multiCall, "kubeadm"} {
		out = append(out, b.executable(p, systemBin+p))
	}
	for _, p := range []string{"containerd", "containerd-shim-runc-v2", "ctr", "crictl"} {
		out = append(out, b.executable(p, localBin+p))
	}
	for _, p := range cniPlugins {
		out = append(out, b.executable("cni/"+p, "opt/cni/bin/"+p))
	}
	return out, nil
}

// executable is a program of the directory of binaries, at a path of the image.
func (b *builder) executable(from, to string) file {
	return file{path: to, from: filepath.Join(b.bin, from), mode: 0o755}
}

// kindFiles are what kind's Dockerfile copies. Scripts can be run, nothing else.
func (b *builder) kindFiles() ([]file, error) {
	root := filepath.Join(b.kind, "images/base/files")
	var out []file
	err := filepath.WalkDir(root, func(p string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		rel, err := filepath.Rel(root, p)
		if err != nil {
			return err
		}
		f := file{path: rel, from: p}
		if dir := path.Dir(rel); dir == "usr/local/bin" || dir == "kind/bin" {
			f.mode = 0o755
		}
		out = append(out, f)
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("files of kind's base image: %w", err)
	}
	return out, nil
}

// runtimeSpec is what containerd makes containers from in kind's nodes: its own
// default with a hook, by which all nodes have a product UUID of their own, and
// without limits, which pods then have from the node.
func (b *builder) runtimeSpec() ([]byte, error) {
	text, err := exec.Command(filepath.Join(b.bin, "ctr"), "oci", "spec").Output()
	if err != nil {
		return nil, fmt.Errorf("ctr oci spec: %w", err)
	}
	var spec map[string]any
	if err := json.Unmarshal(text, &spec); err != nil {
		return nil, fmt.Errorf("ctr oci spec: %w", err)
	}
	spec["hooks"] = map[string]any{"createContainer": []any{map[string]any{"path": "/kind/bin/mount-product-files.sh"}}}
	if process, ok := spec["process"].(map[string]any); ok {
		delete(process, "rlimits")
	}
	return json.Marshal(spec)
}

// A program is an image of a pod.
type program struct {
	name       string // the last part of the image's name
	entrypoint []string
	layers     []v1.Layer
}

// images are archives of the images of pods: those of every node, and those of
// the control plane, whose components are one program.
func (b *builder) images() ([]file, error) {
	names, err := b.imageNames()
	if err != nil {
		return nil, err
	}
	components := []file{b.executable(multiCall, localBin+multiCall)}
	for _, c := range staticPods {
		components = append(components, file{path: localBin + c, link: multiCall})
	}
	proxy := []file{b.executable("kube-proxy", localBin+"kube-proxy")}
	for _, family := range []string{"iptables", "ip6tables"} {
		for _, command := range []string{"", "-save", "-restore"} { // Debian's alternatives, with nft
			proxy = append(proxy, file{path: localBin + family + command, link: "/usr/sbin/" + family + "-nft" + command})
		}
	}
	layers := map[string]v1.Layer{}
	for what, files := range map[string][]file{
		"kube-proxy": proxy,
		"coredns":    {b.executable("coredns", "coredns")},
		"pause":      {b.executable("probe", "pause")},
		"etcd":       {b.executable("kubeadm", localBin+"etcd")},
		multiCall:    components,
	} {
		if layers[what], err = b.layer(what, files); err != nil {
			return nil, err
		}
	}
	if layers["firewall"], err = b.stored(b.firewall); err != nil {
		return nil, fmt.Errorf("%s: %w", b.firewall, err)
	}
	node := []program{
		{"kube-proxy", nil, []v1.Layer{layers["firewall"], layers["kube-proxy"]}},
		{"coredns", []string{"/coredns"}, []v1.Layer{layers["coredns"]}},
		{"pause", []string{"/pause", "pause"}, []v1.Layer{layers["pause"]}},
	}
	controlPlane := []program{{"etcd", nil, []v1.Layer{layers["etcd"]}}}
	for _, c := range staticPods {
		controlPlane = append(controlPlane, program{c, nil, []v1.Layer{layers[multiCall]}})
	}
	var out []file
	for _, a := range []struct {
		name     string
		programs []program
	}{{"node", node}, {"control-plane", controlPlane}} {
		f := file{path: imageDir + "/" + a.name + ".tar", from: filepath.Join(b.temp, a.name+".images")}
		if err := archive(f.from, a.programs, names); err != nil {
			return nil, err
		}
		out = append(out, f)
	}
	return out, nil
}

// archive writes images to a file, under their full names.
func archive(to string, programs []program, names map[string]name.Tag) error {
	tags := map[name.Tag]v1.Image{}
	for _, p := range programs {
		img, err := image(v1.Config{Entrypoint: p.entrypoint, Env: []string{"PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}}, p.layers...)
		if err != nil {
			return err
		}
		tag, ok := names[p.name]
		if !ok {
			return fmt.Errorf("kubeadm config images list names no %s", p.name)
		}
		tags[tag] = img
	}
	return write(to, tags)
}

// sandboxImage is the line of containerd's configuration that names the image of
// a pod's first container.
var sandboxImage = regexp.MustCompile(`(?m)^\s*sandbox_image = "(.*)"$`)

// imageNames are the names by which kubeadm asks for images, and containerd for
// that of pauses, each by the name of its program.
func (b *builder) imageNames() (map[string]name.Tag, error) {
	text, err := exec.Command(filepath.Join(b.bin, "kubeadm"), "config", "images", "list", "--kubernetes-version", b.version).Output()
	if err != nil {
		return nil, fmt.Errorf("kubeadm config images list: %w", err)
	}
	config := filepath.Join(b.kind, "images/base/files/etc/containerd/config.toml")
	toml, err := os.ReadFile(config)
	if err != nil {
		return nil, err
	}
	pause := sandboxImage.FindSubmatch(toml)
	if pause == nil {
		return nil, fmt.Errorf("%s has no sandbox_image", config)
	}
	out := map[string]name.Tag{}
	for _, n := range append(strings.Fields(string(text)), string(pause[1])) {
		tag, err := name.NewTag(n)
		if err != nil {
			return nil, err
		}
		out[path.Base(tag.RepositoryStr())] = tag
	}
	return out, nil
}

// A file is one of a layer: a copy of a file of this machine, a content, or a
// symbolic link.
type file struct {
	path    string // in the image, without a slash in front
	from    string
	content []byte
	link    string
	mode    int64 // 0: 0644
}

// layer writes files into a layer.
func (b *builder) layer(what string, files []file) (v1.Layer, error) {
	tarFile := filepath.Join(b.temp, what+".layer")
	out, err := os.Create(tarFile)
	if err != nil {
		return nil, err
	}
	defer out.Close()
	w := tar.NewWriter(out)
	for _, f := range files {
		if err := f.write(w); err != nil {
			return nil, fmt.Errorf("layer %s: %s: %w", what, f.path, err)
		}
	}
	if err := errors.Join(w.Close(), out.Close()); err != nil {
		return nil, err
	}
	return b.stored(tarFile)
}

func (f file) write(w *tar.Writer) error {
	h := &tar.Header{Typeflag: tar.TypeReg, Name: f.path, Mode: f.mode, ModTime: time.Unix(0, 0), Size: int64(len(f.content))}
	if h.Mode == 0 {
		h.Mode = 0o644
	}
	if f.link != "" {
		h.Typeflag, h.Linkname = tar.TypeSymlink, f.link
		return w.WriteHeader(h)
	}
	if f.from == "" {
		if err := w.WriteHeader(h); err != nil {
			return err
		}
		_, err := w.Write(f.content)
		return err
	}
	in, err := os.Open(f.from)
	if err != nil {
		return err
	}
	defer in.Close()
	info, err := in.Stat()
	if err != nil {
		return err
	}
	h.Size = info.Size()
	if err := w.WriteHeader(h); err != nil {
		return err
	}
	_, err = io.Copy(w, in)
	return err
}

// stored is a layer of a tar file as it is: the engine that loads it is on this
// machine, and need not decompress it.
func (b *builder) stored(tarFile string) (v1.Layer, error) {
	l, err := tarball.LayerFromFile(tarFile, tarball.WithCompressionLevel(gzip.NoCompression))
	if err != nil {
		return nil, err
	}
	id, err := l.DiffID()
	b.layers = append(b.layers, id.String())
	return l, err
}

// image is an image of layers. Nothing in it tells when it was made.
func image(config v1.Config, layers ...v1.Layer) (v1.Image, error) {
	img, err := mutate.AppendLayers(empty.Image, layers...)
	if err != nil {
		return nil, err
	}
	c, err := img.ConfigFile()
	if err != nil {
		return nil, err
	}
	c = c.DeepCopy()
	c.OS, c.Architecture, c.Config = "linux", runtime.GOARCH, config
	c.Created, c.History = v1.Time{Time: time.Unix(0, 0).UTC()}, nil
	return mutate.ConfigFile(img, c)
}

// write writes an archive, or nothing.
func write(to string, images map[name.Tag]v1.Image) error {
	if err := tarball.MultiWriteToFile(to+".part", images); err != nil {
		return errors.Join(fmt.Errorf("%s: %w", to, err), os.Remove(to+".part"))
	}
	return os.Rename(to+".part", to)
}
