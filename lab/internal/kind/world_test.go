package kind

import (
	"os/exec"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	kinderrors "sigs.k8s.io/kind/pkg/errors"
	kindexec "sigs.k8s.io/kind/pkg/exec"

	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// A command's exit code is no error; what keeps one from running is.
func TestExitCode(t *testing.T) {
	failed := func(argv ...string) error {
		return kinderrors.WithStack(&kindexec.RunError{Command: argv, Inner: exec.CommandContext(t.Context(), argv[0], argv[1:]...).Run()})
	}
	code, err := exitCode(nil)
	assert.NilError(t, err)
	assert.Equal(t, code, 0)
	code, err = exitCode(failed("sh", "-c", "exit 7"))
	assert.NilError(t, err)
	assert.Equal(t, code, 7)
	_, err = exitCode(failed("/does/not/exist"))
	assert.ErrorContains(t, err, "no such file")
	_, err = exitCode(failed("sh", "-c", "kill -9 $$"))
	assert.ErrorContains(t, err, "killed")
}

// What tools print becomes lines that are the same after a row as before.
func TestInventory(t *testing.T) {
	for _, tt := range []struct{ command, output, want string }{
		{listLinks, `1: lo: <LOOPBACK,UP,LOWER_UP> mtu 65536 qdisc noqueue state UNKNOWN mode DEFAULT group default qlen 1000\    link/loopback 00:00:00:00:00:00 brd 00:00:00:00:00:00
2: eth0@if12: <BROADCAST,MULTICAST,UP,LOWER_UP> mtu 1500 qdisc noqueue state UP mode DEFAULT group default \    link/ether 02:42:ac:12:00:03 brd ff:ff:ff:ff:ff:ff link-netnsid 0
3: veth1a2b@if2: <BROADCAST,MULTICAST,UP,LOWER_UP> mtu 1500 qdisc noqueue master cni0 state UP
`, "link lo|link eth0"},
		{listAddresses, `2: eth0    inet 172.18.0.3/16 brd 172.18.255.255 scope global eth0\       valid_lft forever preferred_lft forever
2: eth0    inet6 fe80::42:acff:fe12:3/64 scope link \       valid_lft forever preferred_lft forever
4: cni0    inet 10.0.1.1/24 brd 10.0.1.255 scope global cni0\       valid_lft forever preferred_lft forever
`, "address 172.18.0.3/16 dev eth0|address 10.0.1.1/24 dev cni0"},
		{listRules, "0:\tfrom all lookup local\n300:\tfrom all to 10.1.0.0/16 lookup 18952 proto 158\n", "0: from all lookup local|300: from all to 10.1.0.0/16 lookup 18952 proto 158"},
		{listRoutes, `default via 172.18.0.1 dev eth0
10.0.1.9 dev veth1a2b scope host
10.1.0.0/16 via 10.80.0.4 dev liqo.vxlan table 18952 proto 158 src 10.80.0.1
10.9.0.0/16 via 172.18.0.9 dev eth0 expires 25sec
`, "route default via 172.18.0.1 dev eth0|route 10.1.0.0/16 via 10.80.0.4 dev liqo.vxlan table 18952 proto 158 src 10.80.0.1|route 10.9.0.0/16 via 172.18.0.9 dev eth0"},
		{listTables, "table ip kube-proxy\ntable ip isthmus-fabric\n", "table ip isthmus-fabric"},
		{listChains, `table ip kube-proxy {
	chain services {
	}
}
table ip nat {
	chain KUBE-SERVICES {
	}
	chain POSTROUTING {
		type nat hook postrouting priority srcnat; policy accept;
	}
}
`, "chain ip nat POSTROUTING"},
	} {
		assert.Equal(t, strings.Join(inventory(tt.command, tt.output), "|"), tt.want, tt.command)
	}
}

// What a world without captures says can be told apart.
func TestNoCaptures(t *testing.T) {
	l := &Lab{}
	_, err := l.Sightings(t.Context(), world.SightingQuery{})
	assert.ErrorIs(t, err, world.ErrNoCaptures)
	assert.ErrorIs(t, l.WritePcap(t.Context(), nil), world.ErrNoCaptures)
}
