package kubelet

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

// cgroupRoot is where systems mount cgroups: version 2, or a directory with a
// mount for each hierarchy of version 1 (cgroups(7)).
const cgroupRoot = "/sys/fs/cgroup"

// A cgroup is the path of one in all hierarchies.
type cgroup string

// hierarchies are where cgroups are made on this machine.
func hierarchies() ([]string, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(cgroupRoot, &st); err != nil {
		return nil, fmt.Errorf("cgroups: %s: %w", cgroupRoot, err)
	}
	if st.Type == unix.CGROUP2_SUPER_MAGIC {
		return []string{cgroupRoot}, nil
	}
	entries, err := os.ReadDir(cgroupRoot)
	if err != nil {
		return nil, fmt.Errorf("cgroups: %w", err)
	}
	var out []string
	for _, e := range entries {
		// Controllers that are mounted together have links to the mount.
		if e.IsDir() {
			out = append(out, filepath.Join(cgroupRoot, e.Name()))
		}
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("cgroups: nothing is mounted below %s", cgroupRoot)
	}
	return out, nil
}

// make makes the cgroup in all hierarchies, ready for what a kubelet makes
// below it.
func (c cgroup) make() error {
	all, err := hierarchies()
	if err != nil {
		return err
	}
	for _, h := range all {
		err := c.makeIn(h)
		// Another lab may just have removed what is above, empty as it was.
		for again := 0; errors.Is(err, fs.ErrNotExist) && again < 10; again++ {
			err = c.makeIn(h)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (c cgroup) makeIn(hierarchy string) error {
	at := hierarchy
	for part := range strings.SplitSeq(string(c), "/") {
		if err := delegate(at); err != nil {
			return err
		}
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
	}
	return delegate(at)
}

// Weights of processor time: to the scheduler a cgroup beside the processes of
// the one above is one of them, so all pods of a lab would have the part of a
// single API server. These are sixteen times the kernel's own, 1024 shares
// (version 1) or a weight of 100 (version 2).
const (
	cpuShares = "16384"
	cpuWeight = "1600"
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

// delegate gives the children of a cgroup of version 2 all controllers that it
// has itself.
func delegate(dir string) error {
	have, err := os.ReadFile(filepath.Join(dir, "cgroup.controllers"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil // version 1
	}
	if err != nil {
		return fmt.Errorf("cgroup: %w", err)
	}
	for _, controller := range strings.Fields(string(have)) {
		if err := os.WriteFile(filepath.Join(dir, "cgroup.subtree_control"), []byte("+"+controller), 0); err != nil {
			return fmt.Errorf("cgroup: controller %s for children of %s: %w", controller, dir, err)
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
		if err != nil {
			return fmt.Errorf("cgroup: %w", err)
		}
	}
	return nil
}

// cgroupPatience is how long the kernel may take to let go of cgroups whose
// processes have ended.
const cgroupPatience = 5 * time.Second

// remove removes the cgroup, all below it, and those above it that are empty
// then. Nothing runs in it any more.
func (c cgroup) remove() error {
	all, err := hierarchies()
	if err != nil {
		return err
	}
	over := time.After(cgroupPatience)
	for waiting := true; waiting; {
		var errs []error
		for _, h := range all {
			errs = append(errs, removeTree(filepath.Join(h, string(c))))
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
	for _, h := range all {
		for up := filepath.Dir(string(c)); up != "."; up = filepath.Dir(up) {
			if os.Remove(filepath.Join(h, up)) != nil { // another node's are there
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
