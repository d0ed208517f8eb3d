package cgroup

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"

	"github.com/isthmus-net/isthmus/appliance/nettest"
)

// A cgroup is there in all hierarchies with what a kubelet needs, and gone with
// all that was made below it and above it.
func TestThisMachine(t *testing.T) {
	nettest.NeedRoot(t)
	f, err := Open()
	assert.NilError(t, err)
	assert.NilError(t, f.Check())
	before, err := f.Missing()
	assert.NilError(t, err)
	assert.NilError(t, f.Give(before))
	defer func() { assert.NilError(t, f.TakeBack(before)) }()
	const top = "isthmus-lab-test"
	path := top + "/" + filepath.Base(t.TempDir()) + "/node"
	assert.NilError(t, f.Make(path))
	assert.NilError(t, f.Make(path), "once more")
	for _, h := range f.hierarchies {
		below := filepath.Join(h, path, "kubepods", "besteffort")
		assert.NilError(t, os.MkdirAll(below, 0o755))
		if cpus, err := os.ReadFile(filepath.Join(h, path, "cpuset.cpus")); err == nil && f.version == 1 {
			mine, err := os.ReadFile(filepath.Join(h, "cpuset.cpus"))
			assert.NilError(t, err)
			assert.Check(t, is.Equal(string(cpus), string(mine)), h)
		}
	}
	raised := 0
	for _, h := range f.hierarchies {
		for name, want := range map[string]string{"cpu.shares": cpuShares, "cpu.weight": cpuWeight} {
			if got, err := os.ReadFile(filepath.Join(h, top, name)); err == nil {
				assert.Equal(t, strings.TrimSpace(string(got)), want)
				raised++
			}
		}
	}
	assert.Equal(t, raised, 1, "processor time")
	assert.NilError(t, f.Remove(path))
	assert.NilError(t, f.Remove(path), "once more")
	for _, h := range f.hierarchies {
		_, err := os.Stat(filepath.Join(h, top))
		assert.Check(t, errors.Is(err, fs.ErrNotExist), "%s: %v", h, err)
	}
}

// tree makes files in a directory that stands for a hierarchy of version 2.
func tree(t *testing.T, files map[string]string) FS {
	t.Helper()
	dir := t.TempDir()
	for name, content := range files {
		file := filepath.Join(dir, name)
		assert.NilError(t, os.MkdirAll(filepath.Dir(file), 0o755))
		assert.NilError(t, os.WriteFile(file, []byte(content), 0o644))
	}
	return FS{2, []string{dir}}
}

func (f FS) read(t *testing.T, name string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(f.hierarchies[0], name))
	assert.NilError(t, err)
	return string(b)
}

func TestMissing(t *testing.T) {
	for _, tt := range []struct {
		name, have, given string
		want              []string
	}{
		{"a machine with systemd", "cpuset cpu io memory hugetlb pids rdma misc\n", "cpuset cpu io memory hugetlb pids\n", nil},
		{"systemd that delegates less", "cpuset cpu io memory hugetlb pids\n", "cpu memory pids\n", []string{"cpuset", "hugetlb"}},
		{"nobody has given any", "cpuset cpu io memory pids\n", "\n", []string{"cpu", "cpuset", "memory", "pids"}},
		{"a kernel without", "cpu memory pids\n", "cpu memory pids\n", nil},
		{"cpu is not cpuset", "cpu cpuset\n", "cpuset\n", []string{"cpu"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := tree(t, map[string]string{controllersFile: tt.have, subtreeFile: tt.given})
			got, err := f.Missing()
			assert.NilError(t, err)
			assert.DeepEqual(t, got, tt.want)
			got, err = FS{1, f.hierarchies}.Missing()
			assert.NilError(t, err)
			assert.Equal(t, len(got), 0, "version 1 has no such thing: %q", got)
		})
	}
}

// The machine's own cgroup is written only by Give and TakeBack, and not at all
// where nothing is missing.
func TestTheFirstCgroup(t *testing.T) {
	const have = "cpuset cpu io memory pids\n"
	files := map[string]string{
		controllersFile: have, subtreeFile: "cpu memory\n",
		Top + "/" + controllersFile: "cpu memory\n", Top + "/" + subtreeFile: "\n", Top + "/cpuset.cpus": "\n", Top + "/cpu.weight": "100\n",
		Top + "/x/" + controllersFile: "cpu memory\n", Top + "/x/" + subtreeFile: "cpu memory\n",
	}
	f := tree(t, files)
	assert.NilError(t, f.Check())
	assert.NilError(t, f.Make(Top+"/x"))
	assert.Equal(t, f.read(t, subtreeFile), "cpu memory\n")
	assert.Equal(t, f.read(t, Top+"/"+subtreeFile), "+cpu +memory")
	assert.Equal(t, f.read(t, Top+"/x/"+subtreeFile), "cpu memory\n")
	assert.Equal(t, f.read(t, Top+"/cpuset.cpus"), "\n", "all processors")
	assert.Equal(t, f.read(t, Top+"/cpu.weight"), cpuWeight)
	assert.NilError(t, f.Give(nil))
	assert.Equal(t, f.read(t, subtreeFile), "cpu memory\n")
	assert.NilError(t, f.Give([]string{"cpuset", "pids"}))
	assert.Equal(t, f.read(t, subtreeFile), "+cpuset +pids")
	assert.NilError(t, f.TakeBack([]string{"pids"}))
	assert.Equal(t, f.read(t, subtreeFile), "-pids")
}

func TestCheckLooksOnly(t *testing.T) {
	nettest.NeedRoot(t)
	missing := map[string]string{controllersFile: "cpu memory\n", subtreeFile: "memory\n"}
	with := func(name, content string) map[string]string {
		return map[string]string{controllersFile: missing[controllersFile], subtreeFile: missing[subtreeFile], name: content}
	}
	for _, tt := range []struct {
		name  string
		files map[string]string
		want  string
	}{
		{"the machine's first cgroup, with processes", with("cgroup.procs", "1\n2\n"), ""},
		{"the first cgroup of a container, with none", with("cgroup.type", "domain\n"), ""},
		{"no version 2 at all", nil, "cgroup.controllers: no such file or directory"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := tree(t, tt.files)
			err := f.Check()
			if tt.want == "" {
				assert.NilError(t, err)
				assert.Equal(t, f.read(t, subtreeFile), missing[subtreeFile])
			} else {
				assert.ErrorContains(t, err, tt.want)
			}
			entries, err := os.ReadDir(f.hierarchies[0])
			assert.NilError(t, err)
			assert.Equal(t, len(entries), len(tt.files))
		})
	}
	t.Run("the first cgroup of a container, with processes", func(t *testing.T) {
		files := with("cgroup.type", "domain\n")
		files["cgroup.procs"] = "1\n"
		assert.ErrorContains(t, tree(t, files).Check(), "can't be given the controllers cpu: processes are in it")
		files[subtreeFile] = "cpu memory\n"
		assert.NilError(t, tree(t, files).Check(), "nothing has to be given")
	})
	t.Run("a file system to read only", func(t *testing.T) {
		dir := t.TempDir()
		assert.NilError(t, unix.Mount("full", dir, "tmpfs", unix.MS_RDONLY, ""))
		t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
		assert.ErrorContains(t, FS{1, []string{dir}}.Check(), "cgroups can't be made in "+dir+": read-only file system")
	})
}

func TestProtect(t *testing.T) {
	nettest.NeedRoot(t)
	dir := t.TempDir()
	assert.NilError(t, Protect(dir), "version 1 has nothing to protect")
	file := filepath.Join(dir, root, subtreeFile)
	assert.NilError(t, os.MkdirAll(filepath.Dir(file), 0o755))
	assert.NilError(t, os.WriteFile(file, []byte("cpu\n"), 0o644))
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // never unlocked: the mounts go with the thread
		assert.Check(t, unix.Unshare(unix.CLONE_NEWNS|unix.CLONE_FS))
		assert.Check(t, unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""))
		assert.Check(t, Protect(dir))
		assert.Check(t, is.ErrorIs(os.WriteFile(file, []byte("+pids"), 0), unix.EROFS))
		assert.Check(t, os.WriteFile(filepath.Join(dir, root, "other"), nil, 0o644), "the rest can be written")
	}()
	<-done
	assert.NilError(t, os.WriteFile(file, []byte("+pids"), 0), "elsewhere it can be written")
}
