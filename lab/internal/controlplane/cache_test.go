package controlplane

import (
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"testing"
	"time"

	"gotest.tools/v3/assert"
)

// The name of a copy has what a copy depends on, and nothing else.
func TestWarmPath(t *testing.T) {
	program, err := os.Executable()
	assert.NilError(t, err)
	t.Setenv("KUBEBUILDER_ASSETS", "")
	base := Config{
		Name: "milan", Dir: "/a", Binary: program, Address: netip.MustParseAddr("172.18.1.2"), CacheDir: "/cache",
		ServiceCIDR: netip.MustParsePrefix("10.96.0.0/16"), PodCIDR: netip.MustParsePrefix("10.0.0.0/16"), CRDs: [][]byte{[]byte("one"), []byte("two")},
	}
	want, err := base.warmPath()
	assert.NilError(t, err)
	assert.Assert(t, regexp.MustCompile("^/cache/[0-9a-f]{24}$").MatchString(want), want)
	for _, tc := range []struct {
		name   string
		change func(*Config)
		same   bool
	}{
		{"another cluster", func(c *Config) {
			c.Name, c.Dir, c.Address = "rome", "/b", netip.MustParseAddr("172.18.2.2")
			c.ServiceCIDR, c.PodCIDR = netip.MustParsePrefix("fd00::/112"), netip.MustParsePrefix("fd01::/48")
		}, true},
		{"other CRDs", func(c *Config) { c.CRDs = [][]byte{[]byte("one"), []byte("three")} }, false},
		{"the same text in other CRDs", func(c *Config) { c.CRDs = [][]byte{[]byte("onetwo")} }, false},
		{"no CRDs", func(c *Config) { c.CRDs = nil }, false},
		{"another program", func(c *Config) { c.Binary = otherProgram(t, program) }, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := base
			tc.change(&c)
			got, err := c.warmPath()
			assert.NilError(t, err)
			assert.Equal(t, got == want, tc.same, "%s %s", got, want)
		})
	}
	t.Run("programs of others", func(t *testing.T) {
		t.Setenv("KUBEBUILDER_ASSETS", "/assets")
		_, err := base.warmPath()
		assert.ErrorIs(t, err, errNoWarm)
	})
	t.Run("no program", func(t *testing.T) {
		c := base
		c.Binary = filepath.Join(t.TempDir(), "none")
		_, err := c.warmPath()
		assert.ErrorIs(t, err, errNoWarm)
	})
}

// otherProgram is any program of Go but the one given.
func otherProgram(t *testing.T, than string) string {
	t.Helper()
	id, err := buildID(than)
	assert.NilError(t, err)
	b, err := os.ReadFile(than)
	assert.NilError(t, err)
	// The note's section has the ID as it is.
	for i := range b {
		if string(b[i:min(i+len(id), len(b))]) == string(id) {
			b[i+len(id)-4] ^= 1
			break
		}
	}
	path := filepath.Join(t.TempDir(), "other")
	assert.NilError(t, os.WriteFile(path, b, 0o700))
	return path
}

func TestPrune(t *testing.T) {
	dir := t.TempDir()
	now := time.Now()
	for name, age := range map[string]time.Duration{
		"aa": 5 * time.Hour, "bb": 4 * time.Hour, "cc": 3 * time.Hour, "dd": 2 * time.Hour, "ee": time.Hour,
		".tmp-dead": 2 * time.Hour, ".tmp-alive": time.Minute, "other": 9 * time.Hour,
	} {
		path := filepath.Join(dir, name)
		assert.NilError(t, os.Mkdir(path, 0o700))
		assert.NilError(t, os.Chtimes(path, now.Add(-age), now.Add(-age)))
	}
	assert.NilError(t, prune(dir, filepath.Join(dir, "aa")))
	entries, err := os.ReadDir(dir)
	assert.NilError(t, err)
	var left []string
	for _, e := range entries {
		left = append(left, e.Name())
	}
	assert.DeepEqual(t, left, []string{".tmp-alive", "aa", "cc", "dd", "ee", "other"})
}
