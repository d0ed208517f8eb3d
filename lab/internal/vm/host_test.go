package vm

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/appliance/nettest"
)

func TestMissingProgramsSayWhichPackage(t *testing.T) {
	_, err := look("no-such-program")
	assert.ErrorIs(t, err, ErrMissing)

	t.Setenv("PATH", t.TempDir())
	if path, err := look("qemu-system-x86_64"); err == nil {
		nettest.SkipOrFail(t, "a PATH without QEMU", fmt.Errorf("%s is in a directory that is always searched", path))
	}
	_, err = Boot(Config{Dir: t.TempDir()})
	assert.ErrorIs(t, err, ErrMissing)
	assert.ErrorContains(t, err, "apt-get install qemu-system-x86, or run `make deps`")
}

func fileExists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

func TestNoSpaceInTheCache(t *testing.T) {
	nettest.NeedRoot(t)
	dir := t.TempDir()
	assert.NilError(t, syscall.Mount("full", dir, "tmpfs", 0, "size=64k"))
	t.Cleanup(func() { syscall.Unmount(dir, syscall.MNT_DETACH) })
	_, err := cached(t.Context(), dir, "x", func(tmp string) error {
		return os.WriteFile(filepath.Join(tmp, "big"), make([]byte, 1<<20), 0o644)
	})
	assert.ErrorContains(t, err, "no space left below "+dir)
	assert.ErrorContains(t, err, "set XDG_CACHE_HOME")
	left, err := os.ReadDir(dir)
	assert.NilError(t, err)
	assert.Equal(t, len(left), 1, "only the lock: %v", left)
}

func TestTheCacheFillsOnce(t *testing.T) {
	dir := t.TempDir()
	fills := 0
	fill := func(tmp string) error { fills++; return os.WriteFile(filepath.Join(tmp, "f"), nil, 0o644) }
	_, err := cached(t.Context(), dir, "x", func(string) error { return errors.New("broken") })
	assert.ErrorContains(t, err, "broken")
	for range 2 {
		path, err := cached(t.Context(), dir, "x", fill)
		assert.NilError(t, err)
		assert.Assert(t, fileExists(filepath.Join(path, "f")))
	}
	assert.Equal(t, fills, 1)
}

func TestNewestKernel(t *testing.T) {
	names := []string{"linux-image-6.1.0-9", "linux-image-6.12.1-1", "linux-image-6.1.0-48"}
	slices.SortFunc(names, compareVersions)
	assert.DeepEqual(t, names, []string{"linux-image-6.1.0-9", "linux-image-6.1.0-48", "linux-image-6.12.1-1"})
}

func TestKernelImagesThatAreNone(t *testing.T) {
	header := make([]byte, 0x1000)
	copy(header[0x202:], "HdrS")
	zstd := slices.Clone(header)
	zstd[0x1f1] = 1
	copy(zstd[0x248:], []byte{0, 0, 0, 0, 0x40, 0, 0, 0})
	copy(zstd[1024:], []byte{0x28, 0xb5, 0x2f, 0xfd})
	for _, tt := range []struct {
		name  string
		image []byte
		want  string
	}{
		{"empty", nil, "no x86 kernel image"},
		{"text", []byte(strings.Repeat("x", 4096)), "no x86 kernel image"},
		{"truncated", header, "truncated"},
		{"another compression", zstd, "begins with 28b52ffd; LZ4 and gzip are known"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := decompress(tt.image)
			assert.ErrorContains(t, err, tt.want)
		})
	}
}

func TestAlarmsOnTheConsole(t *testing.T) {
	console := filepath.Join(t.TempDir(), "console.log")
	m := &Machine{console: console, done: make(chan struct{})}
	lines := []string{
		"[    1.0] WARNING: CPU: 0 PID: 1 at net/core/dev.c:1 x+0x1/0x2",
		"[    2.0] BUG: kernel NULL pointer dereference, address: 0",
		"[    3.0] Kernel panic - not syncing: Fatal exception",
	}
	fine := "[    0.5] mtrr: your CPUs had inconsistent fixed MTRR settings\n"
	assert.NilError(t, os.WriteFile(console, []byte(fine+strings.Join(lines, "\r\n")+"\n"), 0o644))
	assert.DeepEqual(t, m.Alarms(), lines)
	assert.NilError(t, os.WriteFile(console, []byte(fine), 0o644))
	assert.Equal(t, len(m.Alarms()), 0)
}

func TestWordsForTheShell(t *testing.T) {
	assert.Equal(t, quote(`it's $HOME`), `'it'\''s $HOME'`)
	assert.Equal(t, fmt.Sprint(cpus(TCG) >= 1, cpus(KVM) >= 1), "true true")
}
