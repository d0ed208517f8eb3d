package vm

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/appliance/nettest"
	"github.com/isthmus-net/isthmus/lab/internal/snapshot"
)

func TestTheKeyHasWhatASnapshotDependsOn(t *testing.T) {
	nettest.Need(t, "qemu-system-x86_64")
	dir := t.TempDir()
	file := func(name string) string {
		path := filepath.Join(dir, name)
		assert.NilError(t, os.WriteFile(path, []byte(name), 0o644))
		return path
	}
	base := Config{
		Image: Image{Kernel: Kernel{Image: file("vmlinux")}, Disk: file("disk"), Initrd: file("initrd"), Binaries: file("binaries")},
		NICs:  []NIC{{MAC: []byte{2, 0, 0, 0, 0, 1}}}, Payload: file("payload"), Dir: dir, CommandLine: []string{"lab.mode=run"}, Memory: 512, CPUs: 1,
	}
	key := func(change func(*Config)) string {
		c := base
		change(&c)
		k, err := c.Key(t.Context())
		assert.NilError(t, err)
		return k
	}
	same := key(func(*Config) {})
	for _, tt := range []struct {
		name    string
		change  func(*Config)
		differs bool
	}{
		{"memory", func(c *Config) { c.Memory = 1024 }, true},
		{"processors", func(c *Config) { c.CPUs = 2 }, true},
		{"accelerator", func(c *Config) { c.Accelerator = KVM }, true},
		{"another card", func(c *Config) { c.NICs = append(slices.Clone(c.NICs), c.NICs[0]) }, true},
		{"a card's address", func(c *Config) { c.NICs = []NIC{{MAC: []byte{2, 0, 0, 0, 0, 2}}} }, true},
		{"a port", func(c *Config) { c.Ports = []Port{{Name: "x"}} }, true},
		{"command line", func(c *Config) { c.CommandLine = []string{"lab.mode=agent"} }, true},
		{"kernel", func(c *Config) { c.Image.Kernel.Image = file("vmlinux-2") }, true},
		{"initramfs", func(c *Config) { c.Image.Initrd = file("initrd-2") }, true},
		{"disk with the tools", func(c *Config) { c.Image.Disk = file("disk-2") }, true},
		{"no binaries", func(c *Config) { c.Image.Binaries = "" }, true},
		{"other binaries", func(c *Config) { c.Image.Binaries = file("binaries-2") }, false},
		{"another payload", func(c *Config) { c.Payload = file("payload-2") }, false},
		{"another place", func(c *Config) { c.Dir = t.TempDir() }, false},
	} {
		t.Run(tt.name, func(t *testing.T) { assert.Equal(t, key(tt.change) != same, tt.differs) })
	}
	// The same content made again may be elsewhere on the disk.
	later := time.Now().Add(time.Minute)
	assert.NilError(t, os.Chtimes(base.Image.Disk, later, later))
	assert.Assert(t, key(func(*Config) {}) != same)
}

// Each machine of a snapshot has its own randomness, the right time, and the
// payload that it was started with.
func TestMachinesAreRestored(t *testing.T) {
	img := testImage(t)
	store := snapshot.Open(t.TempDir())
	run := func(greeting string) (random, how string) {
		t.Helper()
		file := filepath.Join(t.TempDir(), "greeting")
		assert.NilError(t, os.WriteFile(file, []byte(greeting), 0o644))
		var stdout, stderr bytes.Buffer
		start := time.Now()
		code, err := Run(t.Context(), img, RunConfig{
			Argv:   []string{"sh", "-c", `date +%s; perl -e 'open(R, "</dev/urandom"); sysread(R, $r, 16); print unpack("H*", $r), "\n"'; cat greeting; echo; cat /sys/block/vda/ro`},
			Files:  map[string]string{"greeting": file},
			Stdout: &stdout, Stderr: &stderr, Console: os.Stderr, Snapshots: store, Progress: func(s string) { how = s },
		})
		assert.NilError(t, err)
		t.Logf("%s; in all %s", how, time.Since(start).Round(time.Millisecond))
		assert.Equal(t, code, 0, "%s", stderr.String())
		lines := strings.Split(stdout.String(), "\n")
		var clock int64
		_, err = fmt.Sscan(lines[0], &clock)
		assert.NilError(t, err)
		off := time.Unix(clock, 0).Sub(time.Now())
		assert.Assert(t, off < 2*time.Second && time.Unix(clock+1, 0).After(start), "the guest's clock is off by %s", off)
		assert.DeepEqual(t, lines[2:], []string{greeting, "1", ""})
		assert.Equal(t, len(lines[1]), 32)
		return lines[1], how
	}
	seen := map[string]bool{}
	for i, want := range []string{"booted in", "restored from a snapshot", "restored from a snapshot"} {
		random, how := run(strings.Repeat(fmt.Sprint(i), 10+100000*i)) // disks of other sizes
		assert.Assert(t, strings.Contains(how, want), how)
		assert.Assert(t, !seen[random], "the same random bytes twice: %s", random)
		seen[random] = true
	}
	all, err := store.List()
	assert.NilError(t, err)
	assert.Equal(t, len(all), 1)

	assert.NilError(t, os.Truncate(filepath.Join(all[0].Dir, "memory"), all[0].Memory/2))
	_, how := run("again")
	assert.Assert(t, strings.Contains(how, "booted in") && strings.Contains(how, "its snapshot could not be used") && strings.Contains(how, "snapshot saved"), how)
	_, how = run("and again")
	assert.Assert(t, strings.Contains(how, "restored"), how)
}
