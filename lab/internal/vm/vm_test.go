package vm

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
	"time"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/appliance/nettest"
)

// testImage is the image without the lab's binaries, which is enough here.
func testImage(t *testing.T) Image {
	t.Helper()
	nettest.Need(t, "qemu-system-x86_64")
	nettest.Slow(t, "boots a virtual machine")
	ctx := t.Context()
	k, err := FindKernel(ctx, "", "", func(s string) { t.Log(s) })
	assert.NilError(t, err)
	img, err := BuildImage(ctx, k, ImageConfig{Progress: func(s string) { t.Log(s) }})
	assert.NilError(t, err)
	return img
}

func TestCommandsRunInTheMachine(t *testing.T) {
	img := testImage(t)
	start := time.Now()
	var stdout, stderr bytes.Buffer
	script := `uname -r
ip link add g0 type geneve id 5 remote 192.0.2.1 dstport 6091 && echo geneve
ip link add w0 type wireguard && echo wireguard
ip link add b0 type bridge && ip link add v0 type veth peer name v1 && ip link add d0 type dummy && echo links
ip tuntap add t0 mode tun && echo tun
tc qdisc add dev v0 root netem delay 10ms && echo netem
nft add table ip t && nft 'add chain ip t c { type nat hook postrouting priority srcnat; }' && nft add rule ip t c masquerade && nft list ruleset | grep -c masquerade
iptables -t nat -A POSTROUTING -s 10.0.0.0/8 -j MASQUERADE && echo iptables
iptables -t filter -A FORWARD -m conntrack --ctstate INVALID -m comment --comment x -j DROP && echo matches
conntrack -L >/dev/null 2>&1 && echo conntrack
[ -d /proc/sys/net/bridge ] && echo br_netfilter is loaded
echo "$GREETING it's $(cat greeting)" >&2
exit 7`
	greeting := filepath.Join(t.TempDir(), "greeting")
	assert.NilError(t, os.WriteFile(greeting, []byte("me"), 0o644))
	code, err := Run(t.Context(), img, RunConfig{
		Argv: []string{"sh", "-c", script}, Env: []string{"GREETING=hello 'you'"}, Files: map[string]string{"greeting": greeting},
		Stdout: &stdout, Stderr: &stderr, Console: os.Stderr,
	})
	assert.NilError(t, err)
	t.Logf("boot, run and power off: %s", time.Since(start).Round(time.Millisecond))
	assert.Equal(t, stdout.String(), img.Kernel.Release+"\ngeneve\nwireguard\nlinks\ntun\nnetem\n1\niptables\nmatches\nconntrack\n", "stderr: %s", stderr.String())
	assert.Equal(t, stderr.String(), "hello 'you' it's me\n")
	assert.Equal(t, code, 7)
}
