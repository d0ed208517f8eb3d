package world

import (
	"os/exec"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	"gotest.tools/v3/poll"

	"github.com/isthmus-net/isthmus/appliance/nettest"
)

// TestInventory: each thing that somebody adds is a line, and gone when it is
// taken away. Links of pods, link-local addresses and kube-proxy's chains are
// not.
func TestInventory(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.Need(t, "ip", "nft")
	ns := newNamespace(t)
	sh := func(script string) {
		t.Helper()
		out, err := ns.Output(exec.Command("sh", "-ec", script))
		assert.NilError(t, err, "%s", out)
	}
	inventory := func() map[string]bool {
		t.Helper()
		lines, err := inventoryOf(ns)
		assert.NilError(t, err)
		out := map[string]bool{}
		for _, l := range lines {
			out[l] = true
		}
		return out
	}
	sh("ip link add one type bridge; ip link set one up; ip address add 192.0.2.1/24 dev one; ip -6 address add 2001:db8::1/64 dev one nodad")
	// The kernel makes the local route of an IPv6 address a little later.
	poll.WaitOn(t, func(poll.LogT) poll.Result {
		if !inventory()["IPv6 route 2001:db8::1/128 dev one table 255 scope universe type 2 mtu 0"] {
			return poll.Continue("no local route of the IPv6 address")
		}
		return poll.Success()
	})
	before := inventory()
	for _, tc := range []struct{ do, undo, line string }{
		{"ip link add two type bridge", "ip link del two", "link two"},
		{"ip address add 192.0.2.7/32 dev one", "ip address del 192.0.2.7/32 dev one", "address 192.0.2.7/32 dev one"},
		{"ip route add 198.51.100.0/24 via 192.0.2.9 table 77 mtu 1400", "ip route del 198.51.100.0/24 table 77",
			"IPv4 route 198.51.100.0/24 via 192.0.2.9 dev one table 77 scope universe type 1 mtu 1400"},
		{"ip -6 route add 2001:db8:1::/64 via 2001:db8::9", "ip -6 route del 2001:db8:1::/64",
			"IPv6 route 2001:db8:1::/64 via 2001:db8::9 dev one table 254 scope universe type 1 mtu 0"},
		{"ip rule add pref 70 iif one fwmark 3/7 to 198.51.100.0/24 lookup 77", "ip rule del pref 70",
			"IPv4 rule 70: from <nil> to 198.51.100.0/24 iif one fwmark 0x3/0x7 table 77"},
		{"ip -6 rule add pref 71 from 2001:db8::/32 lookup 78", "ip -6 rule del pref 71", "IPv6 rule 71: from 2001:db8::/32 to <nil> table 78"},
		{"echo 1 >/proc/sys/net/ipv4/conf/one/accept_local", "echo 0 >/proc/sys/net/ipv4/conf/one/accept_local",
			"IPv4 netconf dev one forwarding 0 rp_filter 0 promote_secondaries 0 accept_local 1 proxy_arp 0"},
		{"ip link add two type bridge; echo 1 >/proc/sys/net/ipv6/conf/two/forwarding", "ip link del two",
			"IPv6 netconf dev two forwarding 1 proxy_ndp 0 accept_ra 1"},
		{"nft add table inet mine; nft add chain inet mine out", "nft delete table inet mine", "chain inet mine out"},
		{"ip link add veth0 type veth peer name veth1; ip address add 192.0.2.9/32 dev veth0; ip address add 192.0.2.8/32 dev one", "ip link del veth0; ip address del 192.0.2.8/32 dev one", "address 192.0.2.8/32 dev one"},
	} {
		sh(tc.do)
		now := inventory()
		assert.Check(t, now[tc.line], "%s: no line %q in\n%s", tc.do, tc.line, added(before, now))
		assert.Check(t, !strings.Contains(added(before, now), "veth"), added(before, now))
		sh(tc.undo)
		assert.Equal(t, added(before, inventory()), "")
		assert.Equal(t, added(inventory(), before), "")
	}
	sh("nft add table ip kube-proxy; nft add chain ip kube-proxy services")
	assert.Equal(t, added(before, inventory()), "table ip kube-proxy\n")
}

func added(before, now map[string]bool) string {
	var out strings.Builder
	for l := range now {
		if !before[l] {
			out.WriteString(l + "\n")
		}
	}
	return out.String()
}

// TestInventoryWhileAPodEnds: a namespace that can't be read fails the inventory,
// unless its pod is gone by then.
func TestInventoryWhileAPodEnds(t *testing.T) {
	nettest.NeedRoot(t)
	stays, ends := newNamespace(t), newNamespace(t)
	ends.Close()
	both := []namedNamespace{{"milan/gateway", ends}, {"milan/web", stays}}
	_, err := inventories(func() []namedNamespace { return both })
	assert.ErrorContains(t, err, "inventory of milan/gateway: ")
	present := [][]namedNamespace{both, both[1:]}
	got, err := inventories(func() []namedNamespace {
		now := present[0]
		present = present[1:]
		return now
	})
	assert.NilError(t, err)
	assert.Equal(t, len(got), 1)
	assert.Equal(t, got[0].Host, "milan/web")
}

func newNamespace(t *testing.T) *Namespace {
	t.Helper()
	ns, err := NewNamespace()
	assert.NilError(t, err)
	t.Cleanup(func() { ns.Close() })
	return ns
}
