// Package cgroup makes the cgroups of labs, in version 1 and in version 2
// (cgroups(7)), and removes them.
//
// Of the first cgroup, which is the machine's, a lab changes one thing, in
// version 2 only and only where it is missing: which controllers its children
// have. Who gives them (Give) writes down which (Missing), and takes them back
// when no lab needs them any more (TakeBack).
package cgroup

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// root is where systems mount cgroups: version 2, or a directory with a mount
// for each hierarchy of version 1.
const root = "/sys/fs/cgroup"

// Top is the cgroup that has those of all labs.
const Top = "isthmus-lab"

// A FS is this machine's cgroups. Paths of cgroups are relative, and the same in
// all hierarchies: "isthmus-lab/two-clusters-native-vxlan-1f2e3d4c".
type FS struct {
	version     int      // 1 or 2
	hierarchies []string // directories; one in version 2
}

// Open finds this machine's cgroups.
func Open() (FS, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(root, &st); err != nil {
		return FS{}, fmt.Errorf("cgroups: %s: %w", root, err)
	}
	if st.Type == unix.CGROUP2_SUPER_MAGIC {
		return FS{2, []string{root}}, nil
	}
	entries, err := os.ReadDir(root)
	if err != nil {
		return FS{}, fmt.Errorf("cgroups: %w", err)
	}
	f := FS{version: 1}
	for _, e := range entries {
		// Controllers that are mounted together have links to the mount.
		if e.IsDir() {
			f.hierarchies = append(f.hierarchies, filepath.Join(root, e.Name()))
		}
	}
	if len(f.hierarchies) == 0 {
		return FS{}, fmt.Errorf("cgroups: nothing is mounted below %s", root)
	}
	return f, nil
}

// Check says why no cgroups can be made for labs. It looks only.
func (f FS) Check() error {
	for _, h := range f.hierarchies {
		if err := unix.Access(h, unix.W_OK); err != nil {
			return fmt.Errorf("cgroups can't be made in %s: %w", h, err)
		}
	}
	missing, err := f.Missing()
	if err != nil || len(missing) == 0 {
		return err
	}
	if err := unix.Access(filepath.Join(f.hierarchies[0], subtreeFile), unix.W_OK); err != nil {
		return fmt.Errorf("children of %s do not have the controllers %s, and can't be given them: %w", f.hierarchies[0], strings.Join(missing, ", "), err)
	}
	// Only the machine's first cgroup may have processes and children with
	// controllers; the first one of a container is none, and has a type.
	_, err = os.Stat(filepath.Join(f.hierarchies[0], "cgroup.type"))
	procs, err2 := os.ReadFile(filepath.Join(f.hierarchies[0], "cgroup.procs"))
	if err == nil && err2 == nil && len(bytes.TrimSpace(procs)) > 0 {
		return fmt.Errorf("children of %s can't be given the controllers %s: processes are in it, as in a container with cgroups of its own; move them into a cgroup below, or use the host's (docker run --cgroupns=host)",
			f.hierarchies[0], strings.Join(missing, ", "))
	}
	return nil
}

// Files of version 2.
const (
	controllersFile = "cgroup.controllers"
	subtreeFile     = "cgroup.subtree_control"
)

// controllers are those that a kubelet wants of all that a machine of version 2
// has (pkg/kubelet/cm/cgroup_v2_manager_linux.go, getSupportedUnifiedControllers).
var controllers = []string{"cpu", "cpuset", "hugetlb", "memory", "pids"}

// Missing are the controllers that a kubelet needs and that the first cgroup
// does not give to its children; none in version 1.
func (f FS) Missing() ([]string, error) {
	if f.version != 2 {
		return nil, nil
	}
	return missing(f.hierarchies[0])
}

// Protect makes what the children of the first cgroup have a file to read only,
// for the calling process's mount namespace and below the directory of a root
// file system. A kubelet and runc write all controllers there, and carry on
// where they can't (github.com/opencontainers/cgroups, fs2.CreateCgroupPath).
func Protect(rootFS string) error {
	file := filepath.Join(rootFS, root, subtreeFile)
	err := unix.Mount(file, file, "", unix.MS_BIND, "")
	if errors.Is(err, unix.ENOENT) { // version 1
		return nil
	}
	if err == nil {
		err = unix.Mount("", file, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, "")
	}
	if err != nil {
		return fmt.Errorf("make %s read-only: %w", file, err)
	}
	return nil
}

// missing are the controllers that a kubelet needs, and that a cgroup has and
// does not give to its children.
func missing(dir string) ([]string, error) {
	have, err := os.ReadFile(filepath.Join(dir, controllersFile))
	if err != nil {
		return nil, fmt.Errorf("cgroup: %w", err)
	}
	given, err := os.ReadFile(filepath.Join(dir, subtreeFile))
	if err != nil {
		return nil, fmt.Errorf("cgroup: %w", err)
	}
	var out []string
	for _, c := range controllers {
		if slices.Contains(strings.Fields(string(have)), c) && !slices.Contains(strings.Fields(string(given)), c) {
			out = append(out, c)
		}
	}
	return out, nil
}

// Give gives controllers to the children of the first cgroup.
func (f FS) Give(controllers []string) error {
	if f.version != 2 {
		return nil
	}
	return give(f.hierarchies[0], controllers)
}

func give(dir string, controllers []string) error {
	if len(controllers) == 0 {
		return nil
	}
	if err := os.WriteFile(filepath.Join(dir, subtreeFile), []byte("+"+strings.Join(controllers, " +")), 0); err != nil {
		return fmt.Errorf("cgroup: controllers %s for children of %s: %w", strings.Join(controllers, ", "), dir, err)
	}
	return nil
}

// TakeBack takes controllers from the children of the first cgroup. One that
// somebody else's children have come to use stays.
func (f FS) TakeBack(controllers []string) error {
	if f.version != 2 {
		return nil
	}
	var errs []error
	for _, c := range controllers {
		err := os.WriteFile(filepath.Join(f.hierarchies[0], subtreeFile), []byte("-"+c), 0)
		if err != nil && !errors.Is(err, unix.EBUSY) {
			errs = append(errs, fmt.Errorf("cgroup: controller %s of children of %s: %w", c, f.hierarchies[0], err))
		}
	}
	return errors.Join(errs...)
}

// Make makes a cgroup in all hierarchies, ready for what a kubelet makes below
// it. One that is there is no error.
func (f FS) Make(path string) error {
	for _, h := range f.hierarchies {
		err := f.makeIn(h, path)
		// Another lab may just have removed what is above, empty as it was.
		for again := 0; errors.Is(err, fs.ErrNotExist) && again < 10; again++ {
			err = f.makeIn(h, path)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (f FS) makeIn(hierarchy, path string) error {
	at := hierarchy
	for part := range strings.SplitSeq(path, "/") {
		parent := at
		at = filepath.Join(at, part)
		if err := os.Mkdir(at, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return fmt.Errorf("cgroup: %w", err)
		}
		if err := inheritCPUs(parent, at); err != nil {
			return err
		}
		if err := raiseCPU(at); err != nil {
			return err
		}
		if f.version != 2 {
			continue
		}
		controllers, err := missing(at)
		if err != nil {
			return err
		}
		if err := give(at, controllers); err != nil {
			return err
		}
	}
	return nil
}

// Weights of processor time: to the scheduler a cgroup beside the processes of
// the one above is one of them, so all pods of a lab would have the part of a
// single API server. These are four times the kernel's own, 1024 shares
// (version 1) or a weight of 100 (version 2). With sixteen times the kernel's own
// nothing was left to another lab that ran at the same time.
const (
	cpuShares = "4096"
	cpuWeight = "400"
)

// raiseCPU gives a cgroup processor time for what many processes do.
func raiseCPU(dir string) error {
	for name, value := range map[string]string{"cpu.shares": cpuShares, "cpu.weight": cpuWeight} {
		path := filepath.Join(dir, name)
		if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
			continue // of another version, or controller
		}
		if err := os.WriteFile(path, []byte(value), 0); err != nil {
			return fmt.Errorf("cgroup: %w", err)
		}
	}
	return nil
}

// inheritCPUs fills in what a cpuset of version 1 has not by itself, and
// without which nothing runs in it.
func inheritCPUs(parent, child string) error {
	for _, name := range []string{"cpuset.cpus", "cpuset.mems"} {
		file := filepath.Join(child, name)
		text, err := os.ReadFile(file)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err == nil && len(bytes.TrimSpace(text)) == 0 {
			if text, err = os.ReadFile(filepath.Join(parent, name)); err == nil && len(bytes.TrimSpace(text)) > 0 {
				err = os.WriteFile(file, text, 0)
			}
		}
		// The first cgroup of version 2 has no such files: what is below has all.
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("cgroup: %w", err)
		}
	}
	return nil
}

// patience is how long the kernel may take to let go of cgroups whose processes
// have ended.
const patience = 5 * time.Second

// Remove removes a cgroup, all below it, and those above it that are empty then.
// Nothing runs in it any more. One that is not there is no error.
func (f FS) Remove(path string) error {
	over := time.After(patience)
	var err error
	for waiting := true; waiting; {
		var errs []error
		for _, h := range f.hierarchies {
			errs = append(errs, removeTree(filepath.Join(h, path)))
		}
		if err = errors.Join(errs...); err == nil {
			break
		}
		select {
		case <-over:
			waiting = false
		case <-time.After(20 * time.Millisecond):
		}
	}
	for _, h := range f.hierarchies {
		for up := filepath.Dir(path); up != "."; up = filepath.Dir(up) {
			if os.Remove(filepath.Join(h, up)) != nil { // another node's are there, or another lab's
				break
			}
		}
	}
	return err
}

// removeTree removes directories only: the files of a cgroup go with it.
func removeTree(dir string) error {
	var dirs []string
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err == nil && d.IsDir() {
			dirs = append(dirs, path)
		}
		return err
	})
	errs := []error{err}
	for _, d := range slices.Backward(dirs) {
		if err := os.Remove(d); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
