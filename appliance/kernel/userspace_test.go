package kernel

import (
	"fmt"
	"net"
	"os"
	"testing"
	"time"

	"golang.zx2c4.com/wireguard/conn"
	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/appliance/nettest"
)

// TestSendSingly: what is too long for what the kernel knows of the path arrives,
// also where several datagrams are handed over at once; the kernel refuses
// those.
func TestSendSingly(t *testing.T) {
	here := nettest.NewNS(t)
	there := nettest.Another(t)
	here.Run("ip", "link", "add", "here", "type", "veth", "peer", "name", "there")
	here.Run("ip", "link", "set", "there", "netns", fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), there.FD()))
	here.Run("ip", "address", "add", "192.0.2.1/24", "dev", "here")
	there.Run("ip", "address", "add", "192.0.2.2/24", "dev", "there")
	there.Run("ip", "link", "set", "there", "up")
	here.Run("ip", "link", "set", "here", "up")
	here.Run("ip", "route", "change", "192.0.2.0/24", "dev", "here", "src", "192.0.2.1", "mtu", "1300")

	var server *net.UDPConn
	there.Do(func() {
		var err error
		server, err = net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(192, 0, 2, 2)})
		assert.NilError(t, err)
	})
	defer server.Close()
	std := conn.NewStdNetBind()
	here.Do(func() {
		_, _, err := std.Open(0)
		assert.NilError(t, err)
	})
	defer std.Close()
	to, err := std.ParseEndpoint(server.LocalAddr().String())
	assert.NilError(t, err)

	const count, length = 8, 1400
	batch := func() [][]byte {
		var out [][]byte
		for n := range count {
			b := make([]byte, length, 65535) // WireGuard's have room for more, too
			b[0] = byte(n)
			out = append(out, b)
		}
		return out
	}
	if err := std.Send(batch(), to); !tooLong(err) { // it has no UDP_SEGMENT, or it has learned
		assert.NilError(t, err)
	}
	assert.NilError(t, singlyBind{std}.Send(batch(), to))
	seen := map[byte]bool{}
	assert.NilError(t, server.SetReadDeadline(time.Now().Add(10*time.Second)))
	for buf := make([]byte, 2*length); len(seen) < count; {
		n, err := server.Read(buf)
		assert.NilError(t, err, "%d of %d", len(seen), count)
		assert.Equal(t, n, length)
		seen[buf[0]] = true
	}
}
