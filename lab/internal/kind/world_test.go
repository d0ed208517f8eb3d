package kind

import (
	"errors"
	"os/exec"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kinderrors "sigs.k8s.io/kind/pkg/errors"
	kindexec "sigs.k8s.io/kind/pkg/exec"

	netv1beta1 "github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

func pod(namespace, name string, labels ...string) corev1.Pod {
	p := corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: map[string]string{}}}
	for _, l := range labels {
		key, value, _ := strings.Cut(l, "=")
		p.Labels[key] = value
	}
	return p
}

func gateway(name, peer string, labels ...string) corev1.Pod {
	return pod("liqo-tenant-"+peer, name, append(labels, netv1beta1.LabelComponent+"="+netv1beta1.ComponentGateway, netv1beta1.LabelRemoteClusterID+"="+peer)...)
}

// Pods have the names that scenarios and users have for them.
func TestFindPod(t *testing.T) {
	one := []corev1.Pod{pod("default", "web"), pod("kube-system", "coredns"), gateway("gw-rome-1", "rome"), gateway("gw-rome-2", "rome", netv1beta1.LabelActive+"=true")}
	two := append(one, gateway("gw-naples-1", "naples"))
	for _, tt := range []struct {
		pods   []corev1.Pod
		target string
		want   string // or a part of the error
	}{
		{one, "milan/web", "web"},
		{one, "milan/kube-system/coredns", "coredns"},
		{one, "milan/coredns", "no such target"},
		{one, "milan/gateway", "gw-rome-2"}, // the active one
		{one, "milan/gateway.rome", "gw-rome-2"},
		{one, "milan/gateway.naples", "no such target"},
		{two, "milan/gateway", "several gateways"},
		{two, "milan/gateway.naples", "gw-naples-1"},
		{one, "milan/router", "there are nodes, control planes and pods"},
	} {
		p, err := findPod(tt.pods, tt.target)
		if err != nil {
			assert.Check(t, errors.Is(err, world.ErrNoTarget))
			assert.Check(t, is.Contains(err.Error(), tt.want), tt.target)
			continue
		}
		assert.Equal(t, p.Name, tt.want, tt.target)
	}
}

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
