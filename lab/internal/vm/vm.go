// Package vm boots a virtual machine, or restores it from a snapshot: a Debian
// cloud kernel, a small initramfs, a read-only disk with tools and another one
// with the lab's binaries. It knows QEMU, and nothing of labs.
//
// The kernel comes from Debian's package as it is; the disk holds what of this
// machine the guest needs, libraries included, so nothing is downloaded but
// that package. KVM is used only after a guest has booted under it: that
// /dev/kvm opens proves nothing.
package vm

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"
)

// A Kernel is a Linux kernel on disk, ready to boot.
type Kernel struct {
	Release string // uname -r
	Image   string // path of the uncompressed vmlinux
	Modules string // directory that has lib/modules/<release>, with modules.dep
}

// An Image is the initramfs and the read-only disks that go with a kernel. What
// changes often has a disk of its own: a snapshot of a booted machine does not
// depend on it.
type Image struct {
	Kernel   Kernel
	Disk     string // path of the ext4 file system with the tools
	Initrd   string // path of the cpio archive
	Binaries string // path of the ext4 file system with the lab's binaries; empty without
}

// ImageConfig says what goes into an image.
type ImageConfig struct {
	BinDir   string       // has isthmus, lab, kubernetes and cni/
	CacheDir string       // default DefaultCacheDir
	Progress func(string) // optional: hears what takes long
}

// GuestBinDir is where the binaries are in the guest: the mount point of their
// disk.
const GuestBinDir = "/opt/lab/bin"

// ErrMissing is a program that this machine lacks; the message says which
// package has it.
var ErrMissing = errors.New("not installed")

// DefaultCacheDir is where kernels and images are kept.
func DefaultCacheDir() (string, error) {
	dir, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("cache directory: %w (set XDG_CACHE_HOME)", err)
	}
	return filepath.Join(dir, "isthmus-lab"), nil
}

// cached returns dir/name, which fill makes when it does not exist. Nobody ever
// sees it half done: it is made beside and renamed, under a lock.
func cached(ctx context.Context, dir, name string, fill func(tmp string) error) (string, error) {
	path := filepath.Join(dir, name)
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	lock, err := os.OpenFile(filepath.Join(dir, ".lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return "", err
	}
	defer lock.Close()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return "", fmt.Errorf("lock %s: %w", lock.Name(), err)
	}
	if _, err := os.Stat(path); err == nil { // another one made it
		return path, nil
	}
	if err := ctx.Err(); err != nil {
		return "", err
	}
	left, _ := filepath.Glob(filepath.Join(dir, ".tmp-*")) // of processes that were killed: who works here has the lock
	for _, dir := range left {
		_ = os.RemoveAll(dir)
	}
	tmp, err := os.MkdirTemp(dir, ".tmp-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(tmp)
	if err := os.Chmod(tmp, 0o755); err != nil {
		return "", err
	}
	if err := fill(tmp); err != nil {
		return "", noSpace(dir, err)
	}
	if err := os.Rename(tmp, path); err != nil {
		return "", err
	}
	return path, nil
}

// noSpace adds what to do to an error for want of disk space.
func noSpace(dir string, err error) error {
	if errors.Is(err, syscall.ENOSPC) {
		return fmt.Errorf("%w: no space left below %s: the virtual machine's image needs 1.5 GiB; remove old ones there, or set XDG_CACHE_HOME", err, dir)
	}
	return err
}

// hash names content: of files, and of texts that say how they are used.
type hash struct {
	h interface {
		io.Writer
		Sum([]byte) []byte
	}
}

func newHash() hash { return hash{sha256.New()} }

func (h hash) text(s string) { fmt.Fprintf(h.h, "%d:%s", len(s), s) }

func (h hash) file(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	h.text(path)
	_, err = io.Copy(h.h, f)
	return err
}

func (h hash) String() string { return hex.EncodeToString(h.h.Sum(nil))[:24] }
