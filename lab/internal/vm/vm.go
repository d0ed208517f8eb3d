// Package vm boots a virtual machine: a Debian cloud kernel, a small initramfs
// and a read-only disk with the lab's binaries and the tools they need. It
// knows QEMU, and nothing of labs.
package vm

import (
	"context"
	"errors"
	"io"
)

// A Kernel is a Linux kernel on disk, ready to boot.
type Kernel struct {
	Release string // uname -r
	Image   string // path of the uncompressed vmlinux
	Modules string // directory that has lib/modules/<release>, with modules.dep
}

// An Image is the read-only disk and the initramfs that go with a kernel.
type Image struct {
	Kernel Kernel
	Disk   string // path of the ext4 file system
	Initrd string // path of the cpio archive
}

// ImageConfig says what goes into an image.
type ImageConfig struct {
	BinDir   string       // has isthmus, lab, kubernetes and cni/
	CacheDir string       // default ~/.cache/isthmus-lab
	Progress func(string) // optional: hears what takes long
}

// FindKernel returns the newest kernel in the cache, or prepares the one in a
// Debian package: deb, or the newest linux-image-*-cloud-amd64 that is found
// in the usual places or by apt-get download.
func FindKernel(ctx context.Context, cacheDir, deb string, progress func(string)) (Kernel, error) {
	return Kernel{}, errors.ErrUnsupported
}

// BuildImage returns the image of that kernel with those binaries, from the
// cache when none of them has changed.
func BuildImage(ctx context.Context, k Kernel, cfg ImageConfig) (Image, error) {
	return Image{}, errors.ErrUnsupported
}

// RunConfig is what Run does in a machine.
type RunConfig struct {
	Argv           []string          // the first may be a path on the host: it is copied in
	Files          map[string]string // path in the guest → path on the host
	Env            []string
	Stdout, Stderr io.Writer
	Console        io.Writer // gets the console when the machine failed; optional
}

// Run boots a machine, runs one command in it, and returns its exit code.
func Run(ctx context.Context, img Image, cfg RunConfig) (int, error) {
	return 0, errors.ErrUnsupported
}
