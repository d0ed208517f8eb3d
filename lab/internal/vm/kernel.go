package vm

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/pierrec/lz4/v4"

	"github.com/isthmus-net/isthmus/lab/internal/rundir"
)

// KernelEnv names an environment variable with the path of a kernel package to
// use in place of Debian's newest.
const KernelEnv = "LAB_KERNEL_DEB"

// kernelPackage has the kernel of cloud machines: small, with every module we
// need.
const kernelPackage = "linux-image-cloud-amd64"

// FindKernel returns the newest kernel in the cache, or prepares the one in a
// Debian package: deb, what KernelEnv says, or the newest one by apt-get
// download.
func FindKernel(ctx context.Context, cacheDir, deb string, progress func(string)) (Kernel, error) {
	if progress == nil {
		progress = func(string) {}
	}
	if cacheDir == "" {
		var err error
		if cacheDir, err = DefaultCacheDir(); err != nil {
			return Kernel{}, err
		}
	}
	dir := filepath.Join(cacheDir, "kernel")
	if deb == "" {
		deb = os.Getenv(KernelEnv)
	}
	if deb == "" {
		if k, ok := newestKernel(dir); ok {
			return k, nil
		}
		tmp, remove, err := rundir.Temporary()
		if err != nil {
			return Kernel{}, err
		}
		defer remove()
		progress("downloading Debian's " + kernelPackage)
		if deb, err = download(ctx, tmp); err != nil {
			return Kernel{}, err
		}
	}
	name := strings.TrimSuffix(filepath.Base(deb), ".deb")
	path, err := cached(ctx, dir, name, func(tmp string) error {
		progress("unpacking " + filepath.Base(deb))
		return unpack(ctx, deb, tmp)
	})
	if err != nil {
		return Kernel{}, fmt.Errorf("kernel from %s: %w", deb, err)
	}
	return openKernel(path)
}

// newestKernel is the one with the highest name in the cache.
func newestKernel(dir string) (Kernel, bool) {
	paths, err := filepath.Glob(filepath.Join(dir, "linux-image-*"))
	if err != nil {
		return Kernel{}, false
	}
	slices.SortFunc(paths, compareVersions)
	for _, p := range slices.Backward(paths) {
		if k, err := openKernel(p); err == nil {
			return k, true
		}
	}
	return Kernel{}, false
}

var digits = regexp.MustCompile(`\d+|\D+`)

// compareVersions compares names with numbers in them as people do.
func compareVersions(a, b string) int {
	as, bs := digits.FindAllString(a, -1), digits.FindAllString(b, -1)
	return slices.CompareFunc(as, bs, func(x, y string) int {
		if len(x) != len(y) && x[0] >= '0' && x[0] <= '9' && y[0] >= '0' && y[0] <= '9' {
			return len(x) - len(y)
		}
		return strings.Compare(x, y)
	})
}

func openKernel(dir string) (Kernel, error) {
	releases, err := os.ReadDir(filepath.Join(dir, "lib/modules"))
	if err != nil {
		return Kernel{}, err
	}
	if len(releases) != 1 {
		return Kernel{}, fmt.Errorf("%s/lib/modules has %d kernels, want one; remove the directory and try again", dir, len(releases))
	}
	return Kernel{Release: releases[0].Name(), Image: filepath.Join(dir, "vmlinux"), Modules: dir}, nil
}

// download gets the package that kernelPackage depends on. Package lists that
// are missing, or older than what the mirror has, are fetched anew once.
func download(ctx context.Context, dir string) (string, error) {
	path, err := downloadListed(ctx, dir)
	if err == nil || ctx.Err() != nil {
		return path, err
	}
	if run(ctx, "apt-get", "update", "-q") != nil {
		return "", err
	}
	return downloadListed(ctx, dir)
}

// downloadListed gets the package by the package lists that are here.
func downloadListed(ctx context.Context, dir string) (string, error) {
	out, err := exec.CommandContext(ctx, "apt-cache", "depends", "--important", kernelPackage).Output()
	if err != nil {
		return "", fmt.Errorf("which kernel does %s stand for: %w: on a machine without Debian's package lists set %s to a linux-image-*-cloud-amd64_*.deb", kernelPackage, err, KernelEnv)
	}
	name := regexp.MustCompile(`Depends: (linux-image-\S+)`).FindStringSubmatch(string(out))
	if name == nil {
		return "", fmt.Errorf("%s depends on no kernel: run apt-get update, or set %s to a package file", kernelPackage, KernelEnv)
	}
	cmd := exec.CommandContext(ctx, "apt-get", "download", name[1])
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("apt-get download %s: %w: %s: run apt-get update, or set %s to a package file", name[1], err, lastLine(out), KernelEnv)
	}
	files, err := filepath.Glob(filepath.Join(dir, "*.deb"))
	if err != nil || len(files) != 1 {
		return "", fmt.Errorf("apt-get download %s left %d packages", name[1], len(files))
	}
	return files[0], nil
}

// unpack makes a kernel directory of a package: vmlinux and lib/modules.
func unpack(ctx context.Context, deb, dir string) error {
	if _, err := os.Stat(deb); err != nil {
		return err
	}
	if err := run(ctx, "dpkg-deb", "-x", deb, dir); err != nil {
		return err
	}
	images, err := filepath.Glob(filepath.Join(dir, "boot/vmlinuz-*"))
	if err != nil || len(images) != 1 {
		return fmt.Errorf("the package has %d kernels, want one: take a linux-image-*-cloud-amd64 package", len(images))
	}
	release := strings.TrimPrefix(filepath.Base(images[0]), "vmlinuz-")
	vmlinuz, err := os.ReadFile(images[0])
	if err != nil {
		return err
	}
	vmlinux, err := decompress(vmlinuz)
	if err != nil {
		return fmt.Errorf("%s: %w", filepath.Base(images[0]), err)
	}
	if err := os.WriteFile(filepath.Join(dir, "vmlinux"), vmlinux, 0o644); err != nil {
		return err
	}
	if _, err := os.Stat(filepath.Join(dir, "lib")); err != nil { // merged /usr, from Debian 13 on
		if err := os.Rename(filepath.Join(dir, "usr/lib"), filepath.Join(dir, "lib")); err != nil {
			return err
		}
	}
	for _, unused := range []string{"boot", "usr", "etc"} {
		if err := os.RemoveAll(filepath.Join(dir, unused)); err != nil {
			return err
		}
	}
	// The package leaves modules.dep to its installation.
	return run(ctx, "depmod", "-b", dir, release)
}

// decompress takes the ELF file out of a bzImage: QEMU starts that directly
// (PVH), which saves the emulated machine the decompression.
func decompress(bz []byte) ([]byte, error) {
	const setupSectors, headerMagic, payloadOffset, payloadLength = 0x1f1, 0x202, 0x248, 0x24c // Documentation/arch/x86/boot.rst
	if len(bz) < 0x260 || !bytes.Equal(bz[headerMagic:headerMagic+4], []byte("HdrS")) {
		return nil, errors.New("this is no x86 kernel image")
	}
	sectors := int(bz[setupSectors])
	if sectors == 0 {
		sectors = 4
	}
	start := (sectors+1)*512 + int(binary.LittleEndian.Uint32(bz[payloadOffset:]))
	end := start + int(binary.LittleEndian.Uint32(bz[payloadLength:]))
	if start > end-8 || end > len(bz) {
		return nil, errors.New("the kernel image is truncated")
	}
	payload := bz[start:end]
	var r io.Reader
	switch {
	case bytes.HasPrefix(payload, []byte{0x02, 0x21, 0x4c, 0x18}):
		r = lz4.NewReader(bytes.NewReader(payload[:len(payload)-4])) // the last four bytes are the size
	case bytes.HasPrefix(payload, []byte{0x1f, 0x8b}):
		zr, err := gzip.NewReader(bytes.NewReader(payload))
		if err != nil {
			return nil, err
		}
		zr.Multistream(false)
		r = zr
	case bytes.HasPrefix(payload, []byte("\x7fELF")):
		return payload, nil
	default:
		return nil, fmt.Errorf("the kernel is compressed in a way that the lab cannot read (it begins with %x; LZ4 and gzip are known)", payload[:4])
	}
	elf, err := io.ReadAll(r)
	if err != nil {
		return nil, fmt.Errorf("decompress: %w", err)
	}
	if !bytes.HasPrefix(elf, []byte("\x7fELF")) {
		return nil, errors.New("there is no ELF file in the kernel image")
	}
	return elf, nil
}

// packages has the Debian package of each program that is run.
var packages = map[string]string{
	"qemu-system-x86_64": "qemu-system-x86", "mkfs.ext4": "e2fsprogs", "depmod": "kmod", "modprobe": "kmod", "dpkg-deb": "dpkg", "ldd": "libc-bin",
	"busybox": "busybox-static", "nft": "nftables", "iptables": "iptables", "ip": "iproute2", "conntrack": "conntrack", "ipset": "ipset", "wg": "wireguard-tools", "tcpdump": "tcpdump", "perl": "perl-base",
}

// look finds a program, also where root's are.
func look(name string) (string, error) {
	if path, err := exec.LookPath(name); err == nil {
		return path, nil
	}
	for _, dir := range []string{"/usr/sbin", "/sbin", "/usr/local/sbin"} {
		path := filepath.Join(dir, name)
		if st, err := os.Stat(path); err == nil && st.Mode()&0o111 != 0 {
			return path, nil
		}
	}
	pkg := packages[name]
	if pkg == "" {
		pkg = name
	}
	return "", fmt.Errorf("%s is %w: apt-get install %s, or run `make deps`", name, ErrMissing, pkg)
}

// run runs a program of this machine.
func run(ctx context.Context, name string, args ...string) error {
	path, err := look(name)
	if err != nil {
		return err
	}
	out, err := exec.CommandContext(ctx, path, args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s: %w: %s", name, err, lastLine(out))
	}
	return nil
}

func lastLine(b []byte) string {
	s := strings.TrimSpace(string(b))
	return s[strings.LastIndexByte(s, '\n')+1:]
}
