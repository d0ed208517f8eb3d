package kubelet

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/lab/internal/cgroup"
)

// Argument is the hidden command of the lab's program that becomes the first
// process of a node. It calls Boot and nothing else.
const Argument = "boot-node"

// Descriptors that the first process of a node inherits.
const (
	bootFD   = 3 // JSON of a bootSpec
	statusFD = 4 // closed when the node has booted; takes the error otherwise
)

// A bootSpec is what the first process of a node makes: its root directory. It
// is in new mount, PID, IPC and UTS namespaces, and in the node's network.
type bootSpec struct {
	Hostname string `json:"hostname"`
	// Disk has what outlives a reboot: upper and work of the overlay that the
	// node's root is, and a directory for each of disks.
	Disk string `json:"disk"`
	Logs string `json:"logs"` // becomes podLogs
	// Programs becomes programs.
	Programs string `json:"programs"`
	// Plugins becomes cniPlugins.
	Plugins string `json:"plugins"`
	BootID  string `json:"bootID"` // by which a kubelet knows that it was started again with its machine
}

// Places in a node's root.
const (
	programs   = "/opt/isthmus-lab"
	cniPlugins = "/opt/cni/bin"
	podLogs    = "/var/log/pods"
)

// cniConfigs is where containerd looks for the network of pods.
const cniConfigs = "/etc/cni/net.d"

// disks are directories that a node has for itself, whatever this machine has in
// them. In the first two containerd stacks the layers of images, which no overlay can
// have below it; in the last one this machine may have a network of its own, as
// Debian's podman brings one, and pods would be in that until flanneld is ready.
var disks = []string{"/var/lib/containerd", "/var/lib/kubelet", cniConfigs}

// tunables are what a kubelet wants of the whole machine
// (pkg/kubelet/cm/container_manager_linux.go, setupKernelTunables). It finds
// them as it wants them and writes none: this machine is not its own.
var tunables = map[string]string{
	"vm/overcommit_memory":      "1",
	"vm/panic_on_oom":           "0",
	"kernel/panic":              "10",
	"kernel/panic_on_oops":      "1",
	"kernel/keys/root_maxkeys":  "1000000",
	"kernel/keys/root_maxbytes": "25000000",
}

// Boot makes this process the first one of a node: it builds the root
// directory, says so, and buries what dies, of which it hears by children, until
// it is told to end. The kernel ends the rest of the node with it. It returns
// the exit code.
func Boot(end, children <-chan os.Signal) int {
	status := os.NewFile(statusFD, "status")
	unix.CloseOnExec(statusFD)
	if err := boot(); err != nil {
		fmt.Fprint(status, err)
		return 1
	}
	status.Close()
	for {
		select {
		case <-end:
			return 0
		case <-children:
			bury()
		}
	}
}

// bury waits for all children that are dead.
func bury() {
	for {
		pid, err := unix.Wait4(-1, nil, unix.WNOHANG, nil)
		if pid <= 0 && !errors.Is(err, unix.EINTR) {
			return
		}
	}
}

func boot() error {
	f := os.NewFile(bootFD, "spec")
	text, err := io.ReadAll(f)
	f.Close()
	if err != nil {
		return err
	}
	var s bootSpec
	if err := json.Unmarshal(text, &s); err != nil {
		return err
	}
	if err := unix.Sethostname([]byte(s.Hostname)); err != nil {
		return fmt.Errorf("hostname: %w", err)
	}
	return s.makeRoot()
}

// makeRoot makes the root directory of the node and enters it. What is written
// there stays with the node: below is this machine's root, to read only.
func (s bootSpec) makeRoot() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	root := filepath.Join(s.Disk, "root")
	upper, work := filepath.Join(s.Disk, "upper"), filepath.Join(s.Disk, "work")
	for _, dir := range append([]string{root, upper, work}, s.diskDirs()...) {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	if err := unix.Mount("overlay", root, "overlay", 0, "lowerdir=/,upperdir="+upper+",workdir="+work); err != nil {
		return fmt.Errorf("overlay on this machine's root directory: %w; does the kernel have overlayfs", err)
	}
	in := func(path string) string { return filepath.Join(root, path) }
	mount := func(source, target, kind string, flags uintptr, data string) func() error {
		return func() error {
			if err := os.MkdirAll(in(target), 0o755); err != nil {
				return err
			}
			if err := unix.Mount(source, in(target), kind, flags, data); err != nil {
				return fmt.Errorf("mount %s on the node's %s: %w", source, target, err)
			}
			return nil
		}
	}
	steps := []func() error{
		mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""),
		mount("/sys", "/sys", "", unix.MS_BIND|unix.MS_REC, ""),
		mount("/dev", "/dev", "", unix.MS_BIND|unix.MS_REC, ""),
		mount("tmpfs", "/run", "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=755"),
		mount("tmpfs", "/tmp", "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=1777"),
		mount(s.Logs, podLogs, "", unix.MS_BIND, ""),
		mount(s.Programs, programs, "", unix.MS_BIND, ""),
		mount(s.Plugins, cniPlugins, "", unix.MS_BIND, ""),
	}
	for i, dir := range disks {
		steps = append(steps, mount(s.diskDirs()[i], dir, "", unix.MS_BIND, ""))
	}
	for _, step := range steps {
		if err := step(); err != nil {
			return err
		}
	}
	if err := s.pretend(root); err != nil {
		return err
	}
	if err := cgroup.Protect(root); err != nil {
		return err
	}
	if err := unix.Chdir(root); err != nil {
		return err
	}
	// The old root goes on top of the new one, and from there (pivot_root(2)).
	if err := unix.PivotRoot(".", "."); err != nil {
		return fmt.Errorf("enter the node's root: %w", err)
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("leave this machine's root: %w", err)
	}
	// What containers mount is seen by others, as on any machine with systemd.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SHARED, ""); err != nil {
		return fmt.Errorf("share the node's mounts: %w", err)
	}
	return unix.Chdir("/")
}

func (s bootSpec) diskDirs() []string {
	var out []string
	for _, dir := range disks {
		out = append(out, filepath.Join(s.Disk, strings.ReplaceAll(strings.Trim(dir, "/"), "/", "-")))
	}
	return out
}

// pretend puts files in the place of what belongs to this machine and not to
// the node.
func (s bootSpec) pretend(root string) error {
	files := map[string]string{"kernel/random/boot_id": s.BootID}
	for name, value := range tunables {
		files[name] = value
	}
	dir := filepath.Join(root, "run", "boot-node")
	for name, value := range files {
		file := filepath.Join(dir, strings.ReplaceAll(name, "/", "-"))
		err := os.MkdirAll(dir, 0o755)
		if err == nil {
			err = os.WriteFile(file, []byte(value+"\n"), 0o644)
		}
		if err == nil {
			err = unix.Mount(file, filepath.Join(root, "proc", "sys", name), "", unix.MS_BIND, "")
		}
		if err != nil && !errors.Is(err, unix.ENOENT) { // a kernel without it has nothing to protect
			return fmt.Errorf("the node's own %s: %w", name, err)
		}
	}
	return nil
}
