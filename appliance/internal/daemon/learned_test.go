package daemon

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/internal/kube"
	"github.com/isthmus-net/isthmus/appliance/kernel"
	"github.com/isthmus-net/isthmus/appliance/nettest"
)

// TestWithdrawnEndpoint has the server tell no more the address that the client dials, which
// still works: the client goes to the one that is told in its place. When the server tells one
// that leads nowhere the client comes back, until another one is told.
func TestWithdrawnEndpoint(t *testing.T) {
	nettest.Need(t, "ip", "nft", "sysctl")
	milan, rome, cloud := nettest.Another(t), nettest.Another(t), nettest.Another(t)
	implementation(t, milan)
	// Both are behind a load balancer with an address more, as nodes are.
	const first, other, nowhere = "203.0.113.1", "203.0.113.3", "203.0.113.99"
	cloud.Run("sysctl", "-qw", "net.ipv4.ip_forward=1")
	for name, ns := range map[string]*nettest.NS{"11": milan, "12": rome} {
		ns.Run("ip", "link", "set", "lo", "up")
		ns.Run("ip", "link", "add", "eth0", "type", "veth", "peer", "name", "port"+name, "netns", fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), cloud.FD()))
		ns.Run("ip", "address", "add", "10."+name+".0.1/24", "dev", "eth0")
		ns.Run("ip", "link", "set", "eth0", "up")
		cloud.Run("ip", "address", "add", "10."+name+".0.254/24", "dev", "port"+name)
		cloud.Run("ip", "link", "set", "port"+name, "up")
		ns.Run("ip", "route", "add", "default", "via", "10."+name+".0.254")
	}
	cloud.Run("nft", "add table ip balancer; add chain ip balancer in { type nat hook prerouting priority dstnat; }; "+
		"add rule ip balancer in ip daddr { "+first+", "+other+" } udp dport 51840 dnat to 10.11.0.1")
	for _, ns := range []*nettest.NS{milan, rome} { // through the tunnel or not at all
		ns.Run("ip", "route", "add", "unreachable", "169.254.0.0/16")
	}
	serverSide := child{Mode: cluster.Server, KeysDir: t.TempDir(), StateDir: t.TempDir(), Implementation: kernel.Auto, Ping: 500 * time.Millisecond}
	clientSide := child{Mode: cluster.Client, KeysDir: t.TempDir(), StateDir: t.TempDir(), Implementation: kernel.Auto, Ping: 500 * time.Millisecond, Endpoint: first}
	serverSide.PeerKey = writeKeys(t, clientSide.KeysDir).PublicKey().Bytes()
	clientSide.PeerKey = writeKeys(t, serverSide.KeysDir).PublicKey().Bytes()

	log, _ := newLog(t, "server")
	serverCfg, serverAPI := serverSide.config(log)
	tell := func(addresses ...string) {
		serverAPI.set(func(v *kube.GatewayView) {
			v.Gateway = &cluster.Gateway{Reached: &cluster.Endpoint{Addresses: addresses, Port: 51840}}
		})
	}
	tell(first, other)
	inNS(t, milan, func(ctx context.Context) error { return RunGateway(ctx, serverCfg) })
	log, said := newLog(t, "client")
	cfg, api := clientSide.config(log)
	api.set(func(v *kube.GatewayView) { v.Gateway = &cluster.Gateway{Meta: cluster.Meta{Generation: 3}} })
	conn, rep := &latest[ConnectionStatus]{}, &latest[ReportStatus]{}
	cfg.WriteConnection, cfg.WriteReport = conn.write, rep.write
	inNS(t, rome, func(ctx context.Context) error { return RunGateway(ctx, cfg) })
	at := func(reason, message string) func() error {
		return func() error {
			c := slices.IndexFunc(rep.get().Conditions, func(c Condition) bool { return c.Type == "EndpointConfigured" })
			if c < 0 || rep.get().Conditions[c].Reason != reason || !strings.Contains(rep.get().Conditions[c].Message, message) || conn.get().Value != "Connected" {
				return fmt.Errorf("%+v %+v", rep.get(), conn.get())
			}
			return nil
		}
	}
	told := func(first string) func() error {
		return func() error {
			if p := conn.get().Peer; p == nil || p.Endpoint == nil || p.Endpoint.Addresses[0] != first {
				return fmt.Errorf("%+v", p)
			}
			return nil
		}
	}
	within(t, 20*time.Second, at("AsWritten", ""))
	within(t, 20*time.Second, told(first))

	// The client must not be content with the former place when the other one answers late.
	// The first handshake (WireGuard's message type 1; 176 bytes with UDP and IP) is lost, and whatever else
	// comes before the second one.
	cloud.Run("nft", "add set ip balancer open { type ipv4_addr; flags dynamic; size 8; }; add chain ip balancer late { type filter hook prerouting priority raw; }; "+
		"add rule ip balancer late ip daddr "+other+" @th,64,8 1 quota over 200 bytes add @open { ip daddr }; "+
		"add rule ip balancer late ip daddr "+other+" ip daddr != @open drop")
	tell(other)
	before := len(said.String())
	says := func(text string) func() error {
		return func() error {
			if !strings.Contains(said.String()[before:], text) {
				return fmt.Errorf("the client has not said %s", text)
			}
			return nil
		}
	}
	within(t, 20*time.Second, says("the peer is silent: a new handshake"))
	within(t, 10*time.Second, says("msg=\"the peer answers again\" daemon=client endpoint="+other+":51840 told="+other))
	within(t, 10*time.Second, at("Withdrawn", "no longer dialled at "+first+":51840, and is dialled at "+other+":51840"))
	gap := within(t, 5*time.Second, through(t, rome))
	// It would take 10 s if the client waited until it hears nothing.
	assert.Check(t, gap < 5*time.Second, "it took %v", gap)

	tell(nowhere)
	within(t, 30*time.Second, at("Withdrawn", "no longer dialled at "+other+":51840, but it has answered nowhere else"))
	within(t, 5*time.Second, through(t, rome))
	// It is at a place that is told no more, and goes to one that is told now.
	tell(first)
	within(t, 10*time.Second, at("AsWritten", ""))
	within(t, 5*time.Second, through(t, rome))
}
