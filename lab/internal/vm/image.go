package vm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/cavaliergopher/cpio"
)

// tools are the programs of this machine that the guest gets, with the
// libraries they need. Those of optional are left out where they are missing.
var (
	tools    = []string{"nft", "ip", "bridge", "tc", "ss", "conntrack", "ipset", "wg", "tcpdump", "modprobe", "perl", "busybox"}
	optional = []string{"bridge", "tc", "ss", "wg", "tcpdump"}
	// xtables are names of one program.
	xtables = []string{"iptables", "iptables-save", "iptables-restore", "ip6tables", "ip6tables-save", "ip6tables-restore"}
	// applets are the programs that busybox is in the guest.
	applets = []string{"cat", "ls", "grep", "head", "tail", "sleep", "mount", "umount", "mkdir", "rm", "cp", "mv", "ln", "ps", "kill", "top", "free", "df",
		"dmesg", "tar", "id", "env", "true", "false", "echo", "date", "sysctl", "lsmod", "nc", "diff", "tee", "ping", "vi", "less", "find", "sed", "awk", "tr", "wc", "sort", "uniq", "uname", "hostname", "insmod", "rmmod", "mknod", "cut", "stat", "readlink", "chmod", "touch", "seq", "stty"}
	// moduleDirs are the parts of the kernel's modules that the guest gets:
	// networks, their cryptography, and what they depend on.
	moduleDirs = []string{"kernel/net", "kernel/drivers/net", "kernel/crypto", "kernel/lib", "kernel/arch/x86/crypto", "kernel/drivers/virtio", "kernel/drivers/block/virtio_blk.ko",
		"kernel/drivers/char/virtio_console.ko", "kernel/drivers/char/hw_random", "kernel/fs/overlayfs", "kernel/fs/fuse"}
	// bootModules bring up the disk, the network cards and the ports.
	bootModules = []string{"virtio_pci", "virtio_blk", "virtio_net", "virtio_console", "virtio_rng"}
)

// BuildImage returns the image of that kernel with those binaries, from the
// cache when none of them has changed.
func BuildImage(ctx context.Context, k Kernel, cfg ImageConfig) (Image, error) {
	if cfg.Progress == nil {
		cfg.Progress = func(string) {}
	}
	if cfg.CacheDir == "" {
		var err error
		if cfg.CacheDir, err = DefaultCacheDir(); err != nil {
			return Image{}, err
		}
	}
	binaries, err := binariesIn(cfg.BinDir)
	if err != nil {
		return Image{}, err
	}
	files, err := toolFiles(ctx)
	if err != nil {
		return Image{}, fmt.Errorf("virtual machine image: %w", err)
	}
	h := newHash()
	h.text(k.Release + k.Image + initScript("") + strings.Join(slices.Concat(applets, xtables, moduleDirs, bootModules), " "))
	for _, name := range slices.Sorted(mapKeys(guestTexts)) {
		h.text(name + guestTexts[name])
	}
	for _, dst := range slices.Sorted(mapKeys(files)) {
		h.text(dst)
		if err := h.file(files[dst]); err != nil {
			return Image{}, err
		}
	}
	base, err := kept(ctx, filepath.Join(cfg.CacheDir, "base"), h, func(tmp string) error {
		cfg.Progress("building the virtual machine's image")
		return buildBase(ctx, tmp, k, files)
	})
	if err != nil {
		return Image{}, err
	}
	img := Image{Kernel: k, Disk: filepath.Join(base, "disk"), Initrd: filepath.Join(base, "initrd")}
	if len(binaries) == 0 {
		return img, nil
	}
	h = newHash()
	for _, b := range binaries {
		h.text(b)
		if err := h.file(filepath.Join(cfg.BinDir, b)); err != nil {
			return Image{}, err
		}
	}
	dir, err := kept(ctx, filepath.Join(cfg.CacheDir, "binaries"), h, func(tmp string) error {
		cfg.Progress("building the virtual machine's disk of binaries")
		return buildBinaries(ctx, tmp, cfg.BinDir, binaries)
	})
	img.Binaries = filepath.Join(dir, "disk")
	return img, err
}

// kept returns the directory of that content below dir, and removes those
// that have not been of use for long.
func kept(ctx context.Context, dir string, h hash, fill func(tmp string) error) (string, error) {
	made, err := cached(ctx, dir, h.String(), fill)
	if err != nil {
		return "", fmt.Errorf("virtual machine image: %w", err)
	}
	prune(dir, made)
	return made, nil
}

// keepImages is how many of each kind are kept: each change of a binary makes
// one.
const keepImages = 3

// prune removes the oldest images but never the one in hand. A machine that
// runs from a removed one still has its files open.
func prune(dir, current string) {
	now, err := filepath.Glob(filepath.Join(dir, "[0-9a-f]*"))
	if err != nil || len(now) <= keepImages {
		return
	}
	age := func(p string) int64 {
		st, err := os.Stat(p)
		if err != nil {
			return 0
		}
		return st.ModTime().UnixNano()
	}
	slices.SortFunc(now, func(a, b string) int { return int((age(a) - age(b)) >> 20) })
	for _, p := range now[:len(now)-keepImages] {
		if p != current {
			os.RemoveAll(p)
		}
	}
}

// binariesIn are the lab's own programs that exist: a machine for kernel tests
// needs none of them.
func binariesIn(dir string) ([]string, error) {
	if dir == "" {
		return nil, nil
	}
	var out []string
	for _, name := range []string{"isthmus", "lab", "probe", "kube-proxy", "flanneld", "liqo"} {
		if _, err := os.Stat(filepath.Join(dir, name)); err == nil {
			out = append(out, name)
		}
	}
	plugins, err := os.ReadDir(filepath.Join(dir, "cni"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	for _, p := range plugins {
		if !strings.HasPrefix(p.Name(), ".") {
			out = append(out, "cni/"+p.Name())
		}
	}
	return out, nil
}

// toolFiles maps paths in the guest to files of this machine: programs,
// libraries and plug-ins.
func toolFiles(ctx context.Context) (map[string]string, error) {
	files := map[string]string{}
	add := func(dst, src string) error {
		files[guestPath(dst)] = src
		libs, err := libraries(ctx, src)
		if err != nil {
			return err
		}
		for _, l := range libs {
			files[guestPath(l)] = l
		}
		return nil
	}
	for _, t := range tools {
		src, err := look(t)
		if err != nil {
			if slices.Contains(optional, t) {
				continue
			}
			return nil, err
		}
		if err := add("/usr/sbin/"+t, src); err != nil {
			return nil, err
		}
	}
	// Not busybox's shell: that prefers its own ip and tc to the real ones.
	src, err := look("sh")
	if err != nil {
		return nil, err
	}
	if err := add("/usr/bin/sh", src); err != nil {
		return nil, err
	}
	if src, err = look("iptables"); err != nil {
		return nil, err
	}
	if src, err = filepath.EvalSymlinks(src); err != nil {
		return nil, err
	}
	if err := add("/usr/sbin/xtables-multi", src); err != nil {
		return nil, err
	}
	plugins, err := filepath.Glob("/usr/lib/*/xtables/*.so")
	if err != nil {
		return nil, err
	}
	for _, p := range plugins {
		files[p] = p
	}
	return files, nil
}

var lddLine = regexp.MustCompile(`(?:=> )?(/\S+) \(0x`)

// libraries are the shared libraries of a program, the loader included; none
// when it is static.
func libraries(ctx context.Context, program string) ([]string, error) {
	ldd, err := look("ldd")
	if err != nil {
		return nil, err
	}
	out, err := exec.CommandContext(ctx, ldd, program).CombinedOutput()
	if err != nil {
		if strings.Contains(string(out), "not a dynamic executable") {
			return nil, nil
		}
		return nil, fmt.Errorf("ldd %s: %w: %s", program, err, lastLine(out))
	}
	var libs []string
	for _, m := range lddLine.FindAllStringSubmatch(string(out), -1) {
		libs = append(libs, m[1])
	}
	return libs, nil
}

// guestPath is a path with /usr merged: the guest's /lib is a link.
func guestPath(p string) string {
	if strings.HasPrefix(p, "/usr/") {
		return p
	}
	return "/usr" + p
}

// guestTexts are the guest's files that are not the host's.
var guestTexts = map[string]string{
	"etc/passwd":        "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n",
	"etc/group":         "root:x:0:\nnogroup:x:65534:\n",
	"etc/protocols":     "icmp 1 ICMP\ntcp 6 TCP\nudp 17 UDP\nsctp 132 SCTP\n", // ipset asks for their names
	"etc/hosts":         "127.0.0.1 localhost\n::1 localhost\n",
	"etc/nsswitch.conf": "hosts: files\nprotocols: files\n",
	"etc/os-release":    "NAME=\"Isthmus lab\"\nID=isthmus-lab\n",
	"opt/lab/init":      guestInit,
}

// buildBase makes the initramfs and the disk with the tools.
func buildBase(ctx context.Context, tmp string, k Kernel, files map[string]string) error {
	root := filepath.Join(tmp, "root")
	for _, d := range []string{"dev", "proc", "sys", "run", "tmp", "var", "root", "etc", "opt/lab/bin", "usr/bin", "usr/sbin", "usr/lib", "usr/lib64"} {
		if err := os.MkdirAll(filepath.Join(root, d), 0o755); err != nil {
			return err
		}
	}
	links := map[string]string{"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64", "etc/mtab": "../proc/mounts"}
	for _, a := range applets {
		if _, real := files["/usr/sbin/"+a]; !real {
			links["usr/bin/"+a] = "../sbin/busybox"
		}
	}
	for _, x := range xtables {
		links["usr/sbin/"+x] = "xtables-multi"
	}
	for from, to := range links {
		if err := os.Symlink(to, filepath.Join(root, from)); err != nil {
			return err
		}
	}
	for name, text := range guestTexts {
		mode := fs.FileMode(0o644)
		if name == "opt/lab/init" {
			mode = 0o755
		}
		if err := os.WriteFile(filepath.Join(root, name), []byte(text), mode); err != nil {
			return err
		}
	}
	for dst, src := range files {
		if err := place(src, filepath.Join(root, dst)); err != nil {
			return err
		}
	}
	if err := placeModules(ctx, k, root); err != nil {
		return err
	}
	if err := writeInitrd(filepath.Join(tmp, "initrd"), k, files["/usr/sbin/busybox"]); err != nil {
		return err
	}
	return makeDisk(ctx, root, filepath.Join(tmp, "disk"))
}

// buildBinaries makes the disk with the lab's binaries.
func buildBinaries(ctx context.Context, tmp, binDir string, binaries []string) error {
	root := filepath.Join(tmp, "root")
	for _, b := range binaries {
		if err := place(filepath.Join(binDir, b), filepath.Join(root, b)); err != nil {
			return err
		}
	}
	return makeDisk(ctx, root, filepath.Join(tmp, "disk"))
}

// makeDisk makes a file system of a tree, and removes the tree.
func makeDisk(ctx context.Context, root, disk string) error {
	size, err := treeSize(root)
	if err != nil {
		return err
	}
	// A file system that is never written needs neither journal nor reserve.
	err = run(ctx, "mkfs.ext4", "-q", "-F", "-d", root, "-O", "^has_journal,^metadata_csum", "-m", "0", "-E", "lazy_itable_init=1,nodiscard", "-L", "lab",
		disk, fmt.Sprintf("%dM", size*11/10>>20+64))
	if err != nil {
		return err
	}
	return os.RemoveAll(root)
}

// place puts a file into the tree: as a link to the same file where the disk is
// the same, else as a copy.
func place(src, dst string) error {
	if err := os.MkdirAll(filepath.Dir(dst), 0o755); err != nil {
		return err
	}
	src, err := filepath.EvalSymlinks(src)
	if err != nil {
		return err
	}
	if os.Link(src, dst) == nil {
		return nil
	}
	in, err := os.Open(src)
	if err != nil {
		return err
	}
	defer in.Close()
	st, err := in.Stat()
	if err != nil {
		return err
	}
	out, err := os.OpenFile(dst, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, st.Mode().Perm())
	if err != nil {
		return err
	}
	if _, err := io.Copy(out, in); err != nil {
		out.Close()
		return err
	}
	return out.Close()
}

// placeModules puts the wanted modules into the tree, with indexes of just
// those, which makes loading quicker.
func placeModules(ctx context.Context, k Kernel, root string) error {
	from := filepath.Join(k.Modules, "lib/modules", k.Release)
	to := filepath.Join(root, "usr/lib/modules", k.Release)
	if err := os.MkdirAll(to, 0o755); err != nil {
		return err
	}
	for _, index := range []string{"modules.builtin", "modules.builtin.modinfo", "modules.order"} {
		if err := place(filepath.Join(from, index), filepath.Join(to, index)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	for _, d := range moduleDirs {
		err := filepath.WalkDir(filepath.Join(from, d), func(p string, e fs.DirEntry, err error) error {
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			if err != nil || e.IsDir() {
				return err
			}
			rel, err := filepath.Rel(from, p)
			if err != nil {
				return err
			}
			return place(p, filepath.Join(to, rel))
		})
		if err != nil {
			return err
		}
	}
	return run(ctx, "depmod", "-b", root, k.Release)
}

// moduleOrder returns the files of modules with what they depend on, in the
// order in which they must be loaded. What is built in has none.
func moduleOrder(k Kernel, names []string) ([]string, error) {
	b, err := os.ReadFile(filepath.Join(k.Modules, "lib/modules", k.Release, "modules.dep"))
	if err != nil {
		return nil, err
	}
	deps := map[string][]string{}
	byName := map[string]string{}
	for line := range strings.Lines(string(b)) {
		file, rest, _ := strings.Cut(strings.TrimSpace(line), ":")
		deps[file] = strings.Fields(rest)
		byName[strings.ReplaceAll(strings.TrimSuffix(path.Base(file), ".ko"), "-", "_")] = file
	}
	var order []string
	var visit func(string)
	visit = func(file string) {
		if slices.Contains(order, file) {
			return
		}
		for _, d := range deps[file] {
			visit(d)
		}
		if !slices.Contains(order, file) {
			order = append(order, file)
		}
	}
	for _, n := range names {
		if file, ok := byName[n]; ok {
			visit(file)
		}
	}
	return order, nil
}

// writeInitrd writes the initramfs: busybox, the modules of the devices, and
// the script that mounts the disk.
func writeInitrd(dst string, k Kernel, busybox string) (err error) {
	order, err := moduleOrder(k, bootModules)
	if err != nil {
		return err
	}
	f, err := os.Create(dst)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	w := cpio.NewWriter(f)
	add := func(name string, mode cpio.FileMode, data []byte) error {
		if err := w.WriteHeader(&cpio.Header{Name: name, Mode: mode, Size: int64(len(data)), Links: 1}); err != nil {
			return err
		}
		_, err := w.Write(data)
		return err
	}
	for _, d := range []string{"bin", "dev", "proc", "sys", "root", "m"} {
		if err := add(d, cpio.TypeDir|0o755, nil); err != nil {
			return err
		}
	}
	b, err := os.ReadFile(busybox)
	if err != nil {
		return err
	}
	if err := add("bin/busybox", cpio.TypeReg|0o755, b); err != nil {
		return err
	}
	var names []string
	for _, m := range order {
		data, err := os.ReadFile(filepath.Join(k.Modules, "lib/modules", k.Release, m))
		if err != nil {
			return err
		}
		names = append(names, path.Base(m))
		if err := add("m/"+path.Base(m), cpio.TypeReg|0o644, data); err != nil {
			return err
		}
	}
	if err := add("init", cpio.TypeReg|0o755, []byte(initScript(strings.Join(names, " ")))); err != nil {
		return err
	}
	return w.Close()
}

func treeSize(dir string) (n int64, err error) {
	err = filepath.WalkDir(dir, func(_ string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		n += info.Size() + 4096
		return nil
	})
	return n, err
}

func mapKeys[V any](m map[string]V) func(func(string) bool) {
	return func(yield func(string) bool) {
		for k := range m {
			if !yield(k) {
				return
			}
		}
	}
}
