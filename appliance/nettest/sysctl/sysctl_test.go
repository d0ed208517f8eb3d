package sysctl_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"

	"github.com/isthmus-net/isthmus/appliance/nettest"
	"github.com/isthmus-net/isthmus/appliance/nettest/sysctl"
)

func TestMain(m *testing.M) { os.Exit(nettest.Main(m)) }

const root = "/proc/sys/net/"

func read(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(root + path)
	assert.NilError(t, err)
	return strings.Join(strings.Fields(string(b)), " ")
}

// differences are the settings of the thread's namespace that are not those of
// the table.
func differences(t *testing.T, links ...string) []string {
	t.Helper()
	var out []string
	for _, s := range sysctl.Settings(links...) {
		if _, err := os.Stat(root + s.Path); err != nil {
			assert.Assert(t, os.IsNotExist(err) && s.Optional, "%s: %v", s.Path, err)
			continue
		}
		if got := read(t, s.Path); !slices.Contains(s.Values, got) {
			out = append(out, s.Path+"="+got)
		}
	}
	return out
}

// What a host may have, and what every namespace that is made on it would have
// too. It is written in a namespace that is then made new again, as the host's
// own is nobody's to change.
var hosts = map[string]map[string]string{
	"nobody has changed anything": {},
	"Docker":                      {"ipv4/ip_forward": "1", "ipv4/conf/default/forwarding": "1", "ipv4/conf/all/route_localnet": "1", "bridge/bridge-nf-call-iptables": "1"},
	"systemd":                     {"ipv4/conf/all/rp_filter": "2", "ipv4/conf/default/rp_filter": "2", "ipv4/conf/lo/rp_filter": "2", "ipv4/conf/default/promote_secondaries": "1"},
	"strict": {
		"ipv4/conf/all/rp_filter": "1", "ipv4/conf/default/rp_filter": "1", "ipv4/conf/all/accept_redirects": "0", "ipv4/conf/default/accept_redirects": "0",
		"ipv4/conf/all/send_redirects": "0", "ipv4/conf/default/send_redirects": "0", "ipv4/conf/default/accept_source_route": "0", "ipv4/conf/all/log_martians": "1",
		"ipv6/conf/all/disable_ipv6": "1", "ipv6/conf/default/accept_ra": "0",
	},
	"a load balancer": {
		"ipv4/conf/all/arp_ignore": "1", "ipv4/conf/all/arp_announce": "2", "ipv4/conf/default/accept_local": "1", "ipv4/conf/lo/arp_ignore": "1",
		"ipv4/ip_nonlocal_bind": "1", "ipv4/ip_local_port_range": "1024 65535", "ipv4/conf/all/src_valid_mark": "1", "ipv6/conf/all/forwarding": "1",
	},
	"tuned": {"ipv4/tcp_rmem": "4096 65536 16777216", "ipv4/tcp_wmem": "4096 65536 16777216", "ipv4/tcp_congestion_control": "reno", "ipv4/tcp_mtu_probing": "1"},
}

func TestReset(t *testing.T) {
	for name, host := range hosts {
		t.Run(name, func(t *testing.T) {
			runtime.LockOSThread() // never unlocked: the namespace goes with the thread
			assert.NilError(t, unix.Unshare(unix.CLONE_NEWNET))
			for path, value := range host {
				err := os.WriteFile(root+path, []byte(value), 0)
				if os.IsNotExist(err) && !strings.HasPrefix(path, "ipv4") { // of a module that is not there
					continue
				}
				assert.NilError(t, err)
			}
			assert.NilError(t, sysctl.Reset())
			assert.DeepEqual(t, differences(t, "lo"), []string(nil))
			for _, name := range []string{"rp_filter", "arp_ignore"} {
				assert.Check(t, is.Equal(read(t, "ipv4/conf/lo/"+name), "0"), name)
			}
		})
	}
}

// A namespace of a test has the settings of the table, and a link that is made
// in it has them too.
func TestANamespaceOfATest(t *testing.T) {
	nettest.Need(t, "ip")
	here := nettest.NewNS(t)
	for _, ns := range []*nettest.NS{here, nettest.Another(t)} {
		ns.Run("ip", "link", "add", "v0", "type", "veth", "peer", "name", "v1")
		ns.Do(func() { assert.Check(t, is.DeepEqual(differences(t, "lo", "v0", "v1"), []string(nil))) })
	}
}

// A setting of IPv4 that this kernel has and the table has not would be
// inherited: it belongs into the table.
func TestEverySettingOfThisKernelIsInTheTable(t *testing.T) {
	nettest.NewNS(t)
	var table []string
	for _, s := range sysctl.Settings() {
		table = append(table, s.Path)
	}
	for _, where := range []string{"all", "default"} {
		files, err := filepath.Glob(root + "ipv4/conf/" + where + "/*")
		assert.NilError(t, err)
		assert.Check(t, len(files) > 25, "%d settings", len(files))
		for _, f := range files {
			info, err := os.Stat(f)
			assert.NilError(t, err)
			path := strings.TrimPrefix(f, root)
			if info.Mode()&fs.FileMode(0o200) != 0 && !slices.Contains(table, path) {
				t.Errorf("%s is not in the table: a namespace has this machine's", path)
			}
		}
	}
}

// What cannot be set is named, with what it is and what it should be.
func TestASettingThatTheKernelRefuses(t *testing.T) {
	runtime.LockOSThread()
	assert.NilError(t, unix.Unshare(unix.CLONE_NEWNET|unix.CLONE_NEWNS))
	assert.NilError(t, unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""))
	assert.NilError(t, os.WriteFile(root+"ipv4/ip_nonlocal_bind", []byte("1"), 0))
	assert.NilError(t, unix.Mount("/proc/sys", "/proc/sys", "", unix.MS_BIND|unix.MS_REC, ""))
	assert.NilError(t, unix.Mount("", "/proc/sys", "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""))
	err := sysctl.Reset()
	assert.ErrorContains(t, err, `"1" does not become "0": open /proc/sys/net/ipv4/ip_nonlocal_bind: read-only file system`)
}
