// Package containerinit turns a process into a container: it builds the root
// directory, limits what the process may do, and executes the program of the
// image. It is the lab's counterpart of runc's init, and depends on nothing
// big: it runs once for every container, in machines that may be emulated.
package containerinit

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Argument is the first argument with which the program is started to become a
// container. main must then call Init and nothing else.
const Argument = "container-init"

// Descriptors that a container-init inherits.
const (
	SpecFD   = 3 // JSON of an Spec
	StatusFD = 4 // takes an error; closed by a successful exec
)

// A Spec is what the kubelet tells a container-init. It is already in its
// network namespace and in new mount, PID, IPC and UTS namespaces.
type Spec struct {
	Root         string  // an empty directory, the mount point of the root
	Mounts       []Mount // in order
	ReadOnlyRoot bool
	Hostname     string
	Privileged   bool // /proc/sys and /sys writable
	Argv         []string
	Env          []string
	Dir          string
	Security     Security
}

// A Mount puts something of the machine into the container.
type Mount struct {
	Source   string
	Target   string
	ReadOnly bool
	// Propagation of what is mounted below it later, as in a pod: empty for
	// none, HostToContainer or Bidirectional. The source must be on a shared
	// mount.
	Propagation string

	tree int // the source as it was on the machine, where it propagates
}

// Values of Mount.Propagation.
const (
	HostToContainer = "HostToContainer"
	Bidirectional   = "Bidirectional"
)

// Devices that every container has, and those that a privileged one has too.
var (
	defaultDevices    = []string{"null", "zero", "full", "random", "urandom", "tty"}
	privilegedDevices = []string{"net/tun", "kmsg"}
)

// readOnlyProc is what runc makes read-only below /proc for a container that
// is not privileged.
var readOnlyProc = []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"}

// Init turns this process, which the kubelet started in new
// namespaces, into a container. It returns only when that failed, with the
// exit code for os.Exit.
func Init() int {
	// Capabilities, IDs and no_new_privs are set for this thread only; the
	// exec at the end happens on it and ends all others.
	runtime.LockOSThread()
	status := os.NewFile(StatusFD, "status")
	unix.CloseOnExec(StatusFD)
	err := initialise(os.NewFile(SpecFD, "spec"))
	if status == nil {
		fmt.Fprintln(os.Stderr, Argument+" is started by the lab's kubelet, not by hand")
		return 2
	}
	fmt.Fprint(status, err)
	return 127
}

func initialise(r *os.File) error {
	if r == nil {
		return fmt.Errorf("no specification on descriptor %d", SpecFD)
	}
	b, err := io.ReadAll(r)
	if err != nil {
		return fmt.Errorf("read specification: %w", err)
	}
	r.Close()
	var spec Spec
	if err := json.Unmarshal(b, &spec); err != nil {
		return fmt.Errorf("read specification: %w", err)
	}
	if err := spec.mountAll(); err != nil {
		return err
	}
	if err := unix.Sethostname([]byte(spec.Hostname)); err != nil {
		return fmt.Errorf("set host name %q: %w", spec.Hostname, err)
	}
	unix.Umask(0o022)
	path, err := LookPath(spec.Argv[0], spec.Env, spec.Dir)
	if err != nil {
		return err
	}
	if err := unix.Chdir(spec.Dir); err != nil {
		return fmt.Errorf("working directory %s: %w", spec.Dir, err)
	}
	if err := spec.Security.Apply(); err != nil {
		return err
	}
	if err := unix.Exec(path, spec.Argv, spec.Env); err != nil {
		return fmt.Errorf("exec %s: %w", path, err)
	}
	return nil
}

// mountAll builds the root of the container and moves into it.
func (s *Spec) mountAll() error {
	for i := range s.Mounts {
		m := &s.Mounts[i]
		if m.Propagation != Bidirectional {
			continue
		}
		// A copy of the mount while it still is a peer of the machine's.
		var err error
		if m.tree, err = unix.OpenTree(unix.AT_FDCWD, m.Source, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_RECURSIVE); err != nil {
			return fmt.Errorf("open %s: %w", m.Source, err)
		}
	}
	// What the machine mounts from here on is seen, and what this process
	// mounts is not.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		return fmt.Errorf("make mounts the machine's slaves: %w", err)
	}
	if err := unix.Mount("tmpfs", s.Root, "tmpfs", unix.MS_NODEV|unix.MS_NOSUID, "mode=755"); err != nil {
		return fmt.Errorf("mount root at %s: %w", s.Root, err)
	}
	for _, d := range []string{"proc", "sys", "dev", "tmp", "run", "var", "etc", "bin", "root"} {
		if err := os.MkdirAll(filepath.Join(s.Root, d), 0o755); err != nil {
			return err
		}
	}
	if err := os.Chmod(filepath.Join(s.Root, "tmp"), 0o1777); err != nil {
		return err
	}
	if err := s.system(); err != nil {
		return err
	}
	for _, m := range s.Mounts {
		if err := s.bind(m); err != nil {
			return fmt.Errorf("mount %s at %s: %w", m.Source, m.Target, err)
		}
	}
	return s.enter()
}

// system mounts /proc, /sys and /dev. Both file systems belong to the
// namespaces that this process is in.
func (s *Spec) system() error {
	at := func(path string) string { return filepath.Join(s.Root, path) }
	const plain = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	sysFlags := uintptr(plain)
	if !s.Privileged {
		sysFlags |= unix.MS_RDONLY
	}
	for _, m := range []struct {
		kind, target string
		flags        uintptr
		options      string
	}{
		{"proc", "/proc", plain, ""},
		{"sysfs", "/sys", sysFlags, ""},
		{"tmpfs", "/dev", unix.MS_NOSUID, "mode=755"},
		{"devpts", "/dev/pts", unix.MS_NOSUID | unix.MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620"},
		{"tmpfs", "/dev/shm", plain, "mode=1777"},
	} {
		if err := os.MkdirAll(at(m.target), 0o755); err != nil {
			return err
		}
		if err := unix.Mount(m.kind, at(m.target), m.kind, m.flags, m.options); err != nil {
			return fmt.Errorf("mount %s: %w", m.target, err)
		}
	}
	if !s.Privileged {
		for _, path := range readOnlyProc {
			if _, err := os.Stat(at(path)); err != nil {
				continue // this kernel has no such file
			}
			if err := bindReadOnly(at(path), at(path)); err != nil {
				return fmt.Errorf("make %s read-only: %w", path, err)
			}
		}
	}
	devices := defaultDevices
	if s.Privileged {
		devices = slices.Concat(devices, privilegedDevices)
	}
	for _, d := range devices {
		if _, err := os.Stat("/dev/" + d); err != nil {
			continue // net/tun, kmsg: not on every machine
		}
		if err := s.bind(Mount{Source: "/dev/" + d, Target: "/dev/" + d}); err != nil {
			return fmt.Errorf("device /dev/%s: %w", d, err)
		}
	}
	for link, target := range map[string]string{
		"/dev/ptmx": "pts/ptmx", "/dev/fd": "/proc/self/fd", "/dev/stdin": "/proc/self/fd/0",
		"/dev/stdout": "/proc/self/fd/1", "/dev/stderr": "/proc/self/fd/2",
	} {
		if err := os.Symlink(target, at(link)); err != nil {
			return err
		}
	}
	return nil
}

// bind mounts a file or directory of the machine, creating the place for it.
func (s *Spec) bind(m Mount) error {
	st, err := os.Stat(m.Source)
	if err != nil {
		return err
	}
	target, err := s.resolve(m.Target)
	if err != nil {
		return err
	}
	if st.IsDir() {
		err = os.MkdirAll(target, 0o755)
	} else if err = os.MkdirAll(filepath.Dir(target), 0o755); err == nil {
		var f *os.File
		if f, err = os.OpenFile(target, os.O_CREATE|os.O_RDONLY, 0o644); err == nil {
			f.Close()
		} else if _, statErr := os.Stat(target); statErr == nil {
			err = nil // a device or a read-only file that is already there
		}
	}
	if err != nil {
		return err
	}
	switch {
	case m.Propagation == Bidirectional:
		return unix.MoveMount(m.tree, "", unix.AT_FDCWD, target, unix.MOVE_MOUNT_F_EMPTY_PATH)
	case m.ReadOnly:
		err = bindReadOnly(m.Source, target)
	default:
		err = unix.Mount(m.Source, target, "", unix.MS_BIND|unix.MS_REC, "")
	}
	if err != nil || m.Propagation == HostToContainer {
		return err
	}
	return unix.Mount("", target, "", unix.MS_REC|unix.MS_PRIVATE, "")
}

// resolve returns where a path of the container is now. A symbolic link on the
// way (made by a volume) would lead out of the root, so it is refused.
func (s *Spec) resolve(target string) (string, error) {
	if !filepath.IsAbs(target) {
		return "", fmt.Errorf("%q is not an absolute path", target)
	}
	path := s.Root
	for part := range strings.SplitSeq(filepath.Clean(target), "/") {
		path = filepath.Join(path, part)
		if st, err := os.Lstat(path); err == nil && st.Mode()&os.ModeSymlink != 0 {
			return "", fmt.Errorf("%s is a symbolic link", strings.TrimPrefix(path, s.Root))
		}
	}
	return path, nil
}

func bindReadOnly(source, target string) error {
	if err := unix.Mount(source, target, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return err
	}
	var st unix.Statfs_t
	if err := unix.Statfs(target, &st); err != nil {
		return err
	}
	// The flags that the original mount has must be repeated.
	flags := uintptr(st.Flags) & (unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC | unix.MS_NOATIME | unix.MS_RELATIME)
	return unix.Mount("", target, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY|flags, "")
}

// enter makes the new root the root and lets go of the old one.
func (s *Spec) enter() error {
	if err := unix.Chdir(s.Root); err != nil {
		return err
	}
	// With the same directory twice the old root ends up on top of the new
	// one, so that no directory for it is needed: pivot_root(2).
	if err := unix.PivotRoot(".", "."); err != nil {
		return fmt.Errorf("pivot_root to %s: %w", s.Root, err)
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("unmount the old root: %w", err)
	}
	if err := unix.Chdir("/"); err != nil {
		return err
	}
	if s.ReadOnlyRoot {
		if err := unix.Mount("", "/", "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NODEV, ""); err != nil {
			return fmt.Errorf("make the root read-only: %w", err)
		}
	}
	return nil
}

// LookPath finds a program by the PATH of env, in the current root.
func LookPath(name string, env []string, dir string) (string, error) {
	if strings.Contains(name, "/") {
		if !filepath.IsAbs(name) {
			name = filepath.Join(dir, name)
		}
		if _, err := os.Stat(name); err != nil {
			return "", fmt.Errorf("%q: no such file in the image", name)
		}
		return name, nil
	}
	path := DefaultPath
	for _, e := range env {
		if v, ok := strings.CutPrefix(e, "PATH="); ok {
			path = v
		}
	}
	for _, d := range filepath.SplitList(path) {
		p := filepath.Join(d, name)
		if st, err := os.Stat(p); err == nil && !st.IsDir() && st.Mode()&0o111 != 0 {
			return p, nil
		}
	}
	return "", fmt.Errorf("%q: executable file not found in PATH %s of the image", name, path)
}

// DefaultPath is the PATH of a container whose image and pod set none; it is
// that of containerd.
const DefaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
