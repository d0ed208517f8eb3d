package kind

import (
	"errors"
	"fmt"
	"net"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"
	"gotest.tools/v3/poll"

	"github.com/isthmus-net/isthmus/appliance/nettest"
)

// TestInside: what a node sends to other networks reaches nobody who could answer, and
// those on its own network it reaches as before.
func TestInside(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.Need(t, "ip", "sysctl")
	engine, node, other := nettest.NewNS(t), nettest.Another(t), nettest.Another(t)
	engine.Run("ip", "link", "add", "bridge", "type", "bridge")
	for i, ns := range []*nettest.NS{node, other} {
		name := []string{"node", "other"}[i]
		ns.Run("ip", "link", "add", nodeLink, "type", "veth", "peer", "name", name)
		ns.Run("ip", "link", "set", name, "netns", fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), engine.FD()))
		engine.Run("ip", "link", "set", name, "master", "bridge", "up")
		ns.Run("ip", "link", "set", nodeLink, "up")
	}
	engine.Run("ip", "address", "add", "10.89.0.1/24", "dev", "bridge")
	engine.Run("ip", "-6", "address", "add", "fc00::1/64", "dev", "bridge", "nodad")
	engine.Run("ip", "link", "set", "bridge", "up")
	engine.Run("sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1")
	for _, beyond := range []string{"198.51.100.0/24", "2001:db8::/32"} { // "administratively prohibited"
		engine.Run("ip", "route", "add", "prohibit", beyond)
	}
	node.Run("ip", "address", "add", "10.89.0.2/24", "dev", nodeLink)
	node.Run("ip", "-6", "address", "add", "fc00::2/64", "dev", nodeLink, "nodad")
	node.Run("ip", "route", "add", "default", "via", "10.89.0.1", "metric", "100")
	node.Run("ip", "-6", "route", "add", "default", "via", "fc00::1", "metric", "100")
	other.Run("ip", "address", "add", "10.89.0.3/24", "dev", nodeLink)
	other.Run("ip", "-6", "address", "add", "fc00::3/64", "dev", nodeLink, "nodad")

	// said is what a socket hears of what it has sent: an error of ICMP, or nothing.
	said := func(to string) (err error) {
		node.Do(func() {
			c, dialErr := net.Dial("udp", net.JoinHostPort(to, "9"))
			if err = dialErr; err != nil {
				return
			}
			defer c.Close()
			_ = c.SetDeadline(time.Now().Add(time.Second))
			if _, err = c.Write([]byte("?")); err == nil {
				_, err = c.Read(make([]byte, 1))
			}
		})
		return err
	}
	beyond, near := []string{"198.51.100.1", "2001:db8::1"}, []string{"10.89.0.3", "fc00::3"}
	for _, to := range beyond {
		poll.WaitOn(t, func(poll.LogT) poll.Result { // links take a moment
			if err := said(to); !errors.Is(err, unix.EACCES) && !errors.Is(err, unix.EHOSTUNREACH) {
				return poll.Continue("%s: nobody answers, so this shows nothing: %v", to, err)
			}
			return poll.Success()
		}, poll.WithTimeout(time.Minute))
	}
	nearAnswers := func() {
		t.Helper()
		for _, to := range near {
			poll.WaitOn(t, func(poll.LogT) poll.Result {
				if err := said(to); !errors.Is(err, unix.ECONNREFUSED) {
					return poll.Continue("%s: %v", to, err)
				}
				return poll.Success()
			}, poll.WithTimeout(time.Minute))
		}
	}
	nearAnswers()
	// The second time makes it the same, where the engine's bridge sends frames back as well.
	for _, hairpin := range []string{"off", "on"} {
		engine.Run("ip", "link", "set", "node", "type", "bridge_slave", "hairpin", hairpin)
		node.Run("sh", "-c", insideScript)
		for _, to := range beyond {
			err := said(to)
			assert.Check(t, errors.Is(err, os.ErrDeadlineExceeded), "%s: %v", to, err)
		}
		nearAnswers()
	}
}
