package kind

import (
	"strings"
	"testing"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/appliance/nettest"
)

// What netavark of Debian 12 leaves behind, with a rule of somebody else's before and after.
const netavarkLeaves = `*filter
:FORWARD ACCEPT [0:0]
:NETAVARK_FORWARD - [0:0]
-A FORWARD -m comment --comment "of somebody else" -j ACCEPT
-A FORWARD -m comment --comment "netavark firewall plugin rules" -j NETAVARK_FORWARD
COMMIT
*nat
:PREROUTING ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:NETAVARK-1D8721804F16F - [0:0]
:NETAVARK-HOSTPORT-DNAT - [0:0]
:NETAVARK-HOSTPORT-MASQ - [0:0]
:NETAVARK-HOSTPORT-SETMARK - [0:0]
-A PREROUTING -m addrtype --dst-type LOCAL -j NETAVARK-HOSTPORT-DNAT
-A OUTPUT -m addrtype --dst-type LOCAL -j NETAVARK-HOSTPORT-DNAT
-A POSTROUTING -j NETAVARK-HOSTPORT-MASQ
-A POSTROUTING -s 10.89.0.0/24 -j NETAVARK-1D8721804F16F
-A POSTROUTING -s 192.0.2.0/24 -j MASQUERADE
-A NETAVARK-HOSTPORT-MASQ -m comment --comment "netavark portfw masq mark" -m mark --mark 0x2000/0x2000 -j MASQUERADE
-A NETAVARK-HOSTPORT-DNAT -p tcp -m tcp --dport 8080 -j NETAVARK-HOSTPORT-SETMARK
-A NETAVARK-HOSTPORT-SETMARK -j MARK --set-xmark 0x2000/0x2000
COMMIT
`

// TestNetavark: the chains of netavark go, and the rules that lead to them. All else stays. On a
// machine without such chains the script changes nothing.
func TestNetavark(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.Need(t, "iptables-restore", "ip6tables-restore", "xargs")
	ns := nettest.NewNS(t)
	rules := func() string {
		return ns.Run("iptables", "-S") + ns.Run("iptables", "-t", "nat", "-S") + ns.Run("ip6tables", "-S")
	}
	assert.Check(t, netavarkMissing(t.Context()))
	ns.Run("sh", "-c", "iptables-restore <<'END'\n"+netavarkLeaves+"END\n")
	ns.Run("sh", "-c", "ip6tables-restore <<'END'\n"+strings.Split(netavarkLeaves, "*nat")[0]+"END\n")
	assert.Check(t, !netavarkMissing(t.Context()))
	for range 2 {
		assert.NilError(t, removeNetavark(t.Context()))
		assert.Check(t, !strings.Contains(rules(), "NETAVARK"), rules())
		assert.Equal(t, strings.Count(rules(), "of somebody else"), 2)
		assert.Check(t, strings.Contains(rules(), "-A POSTROUTING -s 192.0.2.0/24 -j MASQUERADE"))
	}
}
