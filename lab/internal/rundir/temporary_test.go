package rundir_test

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sync/errgroup"
	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"

	"github.com/isthmus-net/isthmus/lab/internal/rundir"
)

// A temporary directory stays as long as its process lives. What a killed process has left goes
// with the next one, or when dead labs are removed.
func TestTemporary(t *testing.T) {
	const child = "RUNDIR_TEST_TEMPORARY"
	if os.Getenv(child) != "" { // the process that is killed
		dir, _, err := rundir.Temporary()
		assert.NilError(t, err)
		fmt.Println(dir)
		_, _ = io.Copy(io.Discard, os.Stdin)
		return
	}
	tmp := t.TempDir()
	t.Setenv("TMPDIR", tmp)
	base := filepath.Join(tmp, "isthmus-lab-"+strconv.Itoa(os.Getuid()))
	for name, next := range map[string]func(t *testing.T){
		"a lab or command": func(t *testing.T) {
			_, remove, err := rundir.Temporary()
			assert.NilError(t, err)
			assert.NilError(t, remove())
		},
		"dead labs are removed": func(t *testing.T) { assert.NilError(t, rundir.RemoveUnfinished(t.TempDir())) },
	} {
		t.Run(name, func(t *testing.T) {
			cmd := exec.Command(os.Args[0], "-test.run=^TestTemporary$")
			cmd.Env = append(os.Environ(), child+"=1")
			stdin, err := cmd.StdinPipe()
			assert.NilError(t, err)
			defer stdin.Close()
			stdout, err := cmd.StdoutPipe()
			assert.NilError(t, err)
			assert.NilError(t, cmd.Start())
			line, err := bufio.NewReader(stdout).ReadString('\n')
			assert.NilError(t, err)
			dir := strings.TrimSpace(line)
			assert.Equal(t, filepath.Dir(dir), base)
			assert.NilError(t, os.WriteFile(filepath.Join(dir, "key"), nil, 0o600))

			next(t)
			_, err = os.Stat(filepath.Join(dir, "key"))
			assert.NilError(t, err, "its process lives")
			assert.NilError(t, cmd.Process.Kill())
			assert.Check(t, is.ErrorContains(cmd.Wait(), "killed"))
			_, err = os.Stat(filepath.Join(dir, "key"))
			assert.NilError(t, err, "nobody has removed it yet")
			next(t)
			gone(t, base)
		})
	}
}

// A directory of that name that others can write to, or that is a link, is not used.
func TestTemporaryIsPrivate(t *testing.T) {
	for name, plant := range map[string]func(base string) error{
		"open":   func(base string) error { return errors.Join(os.Mkdir(base, 0o700), os.Chmod(base, 0o755)) },
		"a link": func(base string) error { return os.Symlink(filepath.Dir(base), base) },
	} {
		t.Run(name, func(t *testing.T) {
			tmp := t.TempDir()
			t.Setenv("TMPDIR", tmp)
			base := filepath.Join(tmp, "isthmus-lab-"+strconv.Itoa(os.Getuid()))
			assert.NilError(t, plant(base))
			left := filepath.Join(base, ".isthmus-lab-1")
			assert.NilError(t, os.Mkdir(left, 0o700))
			_, _, err := rundir.Temporary()
			assert.ErrorContains(t, err, base+" is not a directory that only this user can open")
			assert.NilError(t, rundir.RemoveUnfinished(t.TempDir()))
			_, err = os.Stat(left)
			assert.NilError(t, err)
		})
	}
}

// Many at a time get in nobody's way: each has its directory until it removes it.
func TestTemporaryBesideOthers(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	var all errgroup.Group
	for range 8 {
		all.Go(func() error {
			for range 40 {
				dir, remove, err := rundir.Temporary()
				if err != nil {
					return err
				}
				if err := os.WriteFile(filepath.Join(dir, "key"), nil, 0o600); err != nil {
					return err
				}
				if err := rundir.RemoveUnfinished(t.TempDir()); err != nil {
					return err
				}
				if _, err := os.Stat(filepath.Join(dir, "key")); err != nil {
					return err
				}
				if err := remove(); err != nil {
					return err
				}
			}
			return nil
		})
	}
	assert.NilError(t, all.Wait())
}
