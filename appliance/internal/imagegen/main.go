// Command imagegen writes a container image without a container engine: one
// static binary on an empty root. Run it by make image, or by make node-images
// for what the lab's own nodes run.
//
//	imagegen -name ghcr.io/isthmus-net/isthmus:0.1.0 -version 0.1.0 -out bin/image amd64=bin/image/amd64/isthmus arm64=…
//
// The directory has then oci/, an OCI image layout with an index of all
// architectures, and isthmus-ARCH.tar for each, an archive as "docker save" writes
// it, for "ctr images import" and "docker load"; with -archives only the latter.
// The same binaries make the same bytes: nothing in the image tells when, where
// or by whom it was made.
package main

import (
	"archive/tar"
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

func main() {
	if err := run(os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "imagegen:", err)
		os.Exit(1)
	}
}

// nobody is the user of a daemon whose pod names none. The chart names one for
// each.
const nobody = "65532:65532"

func run(args []string, stdout io.Writer) error {
	f := flag.NewFlagSet("imagegen", flag.ContinueOnError)
	image := f.String("name", "", "`name:version` of the image (required)")
	version := f.String("version", "", "`version`, for the labels of the image")
	out := f.String("out", "bin/image", "`directory` to write to")
	archives := f.Bool("archives", false, "archives only, no OCI layout")
	var p program
	f.StringVar(&p.path, "path", "/isthmus", "where the binary is in the image; archives are called after it")
	f.StringVar(&p.argument, "argument", "", "the first argument of the binary; default: none")
	f.StringVar(&p.user, "user", nobody, "`UID:GID` of a container whose pod names none")
	if err := f.Parse(args); err != nil {
		return err
	}
	tag, err := name.NewTag(*image, name.StrictValidation)
	if err != nil {
		return fmt.Errorf("-name %q: write a name with a version, such as ghcr.io/isthmus-net/isthmus:0.1.0: %w", *image, err)
	}
	if f.NArg() == 0 {
		return errors.New("no binaries: write ARCH=FILE for each, such as amd64=bin/image/amd64/isthmus")
	}
	var index v1.ImageIndex = mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	for _, arg := range slices.Sorted(slices.Values(f.Args())) {
		arch, file, ok := strings.Cut(arg, "=")
		if !ok {
			return fmt.Errorf("%q: write ARCH=FILE, such as amd64=bin/image/amd64/isthmus", arg)
		}
		binary, err := os.ReadFile(file)
		if err != nil {
			return fmt.Errorf("%s: %w", arch, err)
		}
		img, err := p.build(binary, arch, *version)
		if err != nil {
			return fmt.Errorf("%s: %w", arch, err)
		}
		if err := os.MkdirAll(*out, 0o755); err != nil {
			return err
		}
		if err := tarball.WriteToFile(filepath.Join(*out, path.Base(p.path)+"-"+arch+".tar"), tag, img); err != nil {
			return fmt.Errorf("archive for %s: %w", arch, err)
		}
		index = mutate.AppendManifests(index, mutate.IndexAddendum{
			Add:        img,
			Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: arch}},
		})
	}
	if *archives {
		return nil
	}
	return writeLayout(filepath.Join(*out, "oci"), tag, index, stdout)
}

// A program is how a binary is started in its image.
type program struct{ path, argument, user string }

// build returns the image of a binary.
func (p program) build(binary []byte, arch, version string) (v1.Image, error) {
	text, err := layer(p.path, binary)
	if err != nil {
		return nil, err
	}
	l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(text)), nil },
		tarball.WithMediaType(types.OCILayer))
	if err != nil {
		return nil, err
	}
	img, err := mutate.AppendLayers(mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON), l)
	if err != nil {
		return nil, err
	}
	entrypoint := []string{p.path}
	if p.argument != "" {
		entrypoint = append(entrypoint, p.argument)
	}
	return mutate.ConfigFile(img, &v1.ConfigFile{
		OS: "linux", Architecture: arch,
		Created: v1.Time{Time: time.Unix(0, 0).UTC()},
		Config: v1.Config{
			Entrypoint: entrypoint,
			User:       p.user,
			WorkingDir: "/",
			Labels: map[string]string{
				"org.opencontainers.image.title":   path.Base(p.path),
				"org.opencontainers.image.version": version,
				"org.opencontainers.image.source":  "https://github.com/isthmus-net/isthmus",
			},
		},
		RootFS:  v1.RootFS{Type: "layers", DiffIDs: diffIDs(img)},
		History: []v1.History{{CreatedBy: "make image", Created: v1.Time{Time: time.Unix(0, 0).UTC()}}},
	})
}

// diffIDs are those of the layers that an image has.
func diffIDs(img v1.Image) []v1.Hash {
	c, err := img.ConfigFile()
	if err != nil {
		return nil // the digest of the image will tell
	}
	return c.RootFS.DiffIDs
}

// layer is the root of the image as a tar file.
func layer(name string, binary []byte) ([]byte, error) {
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	if err := w.WriteHeader(&tar.Header{
		Typeflag: tar.TypeReg, Name: strings.TrimPrefix(name, "/"), Mode: 0o755, Size: int64(len(binary)),
		ModTime: time.Unix(0, 0), Format: tar.FormatUSTAR,
	}); err != nil {
		return nil, err
	}
	if _, err := w.Write(binary); err != nil {
		return nil, err
	}
	return out.Bytes(), w.Close()
}

// writeLayout replaces the layout in dir and prints the digest of the index.
func writeLayout(dir string, tag name.Tag, index v1.ImageIndex, stdout io.Writer) error {
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	path, err := layout.Write(dir, empty.Index)
	if err != nil {
		return fmt.Errorf("layout: %w", err)
	}
	// Two tools look for two names: containerd for the full one, others for
	// the version.
	if err := path.AppendIndex(index, layout.WithAnnotations(map[string]string{
		"io.containerd.image.name":          tag.Name(),
		"org.opencontainers.image.ref.name": tag.TagStr(),
	})); err != nil {
		return fmt.Errorf("layout: %w", err)
	}
	digest, err := index.Digest()
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(stdout, "%s@%s\n", tag.Name(), digest)
	return err
}
