package supervisor_test

import (
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"

	"github.com/isthmus-net/isthmus/appliance/nettest/sysctl"
)

// Every namespace of a lab has the settings of package sysctl, all of them, but
// for what its role is: none has this machine's.
func TestNoSettingIsInherited(t *testing.T) {
	c := native(t)
	// What forwards takes no redirects; the kernel sees to that.
	forwards := func(links []string) map[string]string {
		out := map[string]string{"ipv4/conf/all/accept_redirects": "0"}
		for _, where := range append([]string{"all", "default"}, links...) {
			out["ipv4/conf/"+where+"/forwarding"] = "1"
		}
		return out
	}
	host := func(links []string) map[string]string {
		out := map[string]string{"ipv4/conf/default/rp_filter": "2"}
		for _, l := range links {
			if l != "lo" {
				out["ipv4/conf/"+l+"/rp_filter"] = "2"
			}
		}
		return out
	}
	router := func(links []string) map[string]string {
		out := host(links)
		maps.Copy(out, forwards(links))
		return out
	}
	plain := func([]string) map[string]string { return nil }
	for _, tt := range []struct {
		target string
		role   func(links []string) map[string]string
		links  []string
	}{
		{"milan/node-1", router, []string{"eth0", "lo"}},
		{"milan/router", router, []string{"eth0", "eth1", "lo"}},
		{"rome/control-plane", plain, []string{"eth0", "lo"}},
		{"user", host, []string{"eth0", "lo"}},
		{"wan", plain, []string{
			"cp1", "cp2", "l1-node1", "l1-node2", "l1-router", "l2-node1", "l2-router", "lan1", "lan2", "lo", "w-out1", "w-router1", "w-router2", "wan",
		}},
	} {
		t.Run(tt.target, func(t *testing.T) {
			assert.DeepEqual(t, strings.Fields(sh(t, c, tt.target, "cd /proc/sys/net/ipv4/conf && ls -d [!ad]* | sort")), tt.links)
			want := map[string][]string{}
			for _, s := range sysctl.Settings(tt.links...) {
				if strings.HasPrefix(s.Path, "ipv4/") {
					want[s.Path] = s.Values
				}
			}
			for name, value := range tt.role(tt.links) {
				want[name] = []string{value}
			}
			names := slices.Sorted(maps.Keys(want))
			out := sh(t, c, tt.target, fmt.Sprintf("cd /proc/sys/net && for f in %s; do echo $f $(cat $f); done", strings.Join(names, " ")))
			seen := 0
			for line := range strings.Lines(out) {
				name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
				assert.Check(t, is.Contains(want[name], value), path.Join(tt.target, name))
				seen++
			}
			assert.Equal(t, seen, len(want))
		})
	}
}
