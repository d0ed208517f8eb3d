package kernel

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"testing"

	"gotest.tools/v3/assert"
	"gotest.tools/v3/poll"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/desired"
	"github.com/isthmus-net/isthmus/appliance/netstate"
	"github.com/isthmus-net/isthmus/appliance/nettest"
)

var peersRefused = netstate.TableID{Family: netstate.FamilyINET, Name: desired.PeersRefusedTable}

// refusing is what keeps peers away from a node with these networks of a peer.
func refusing(remote ...netip.Prefix) netstate.State {
	s, _ := desired.Node(desired.NodeInput{
		Name: "node-1",
		Nodes: []cluster.InternalNode{{
			Meta:       cluster.Meta{Ref: cluster.Ref{Kind: "InternalNode", Name: "node-1"}},
			InternalIP: addr("10.80.0.1"), OpenToPeers: []netip.Prefix{prefix("10.10.0.9/32")},
		}},
		Fabrics: []cluster.InternalFabric{{
			Meta:     cluster.Meta{Ref: cluster.Ref{Kind: "InternalFabric", Namespace: "liqo-tenant-rome", Name: "rome"}},
			RemoteID: "rome", RemoteCIDRs: remote, EndpointPorts: []uint16{30840},
		}},
	})
	return netstate.State{Tables: s.Tables}
}

// TestPeersAtANode sends packets of a peer to a node: what is for its pods passes, and
// so do answers to the node, WireGuard's own packets and what an IP stands for; what is
// for the node itself does not, nor for all hosts of its network.
func TestPeersAtANode(t *testing.T) {
	t.Parallel()
	ns, node := openWith(t, "eth0")
	need(t, ns, FeatureNFTables)
	nettest.Need(t, "ip")
	pod, peer := nettest.Another(t), nettest.Another(t)
	for dev, far := range map[string]*nettest.NS{"cni0": pod, "liqo.rome": peer} {
		node.Run("ip", "link", "add", dev, "type", "veth", "peer", "name", "gw", "netns", fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), far.FD()))
		node.Run("ip", "link", "set", dev, "up")
		far.Run("ip", "link", "set", "gw", "up")
		far.Run("ip", "link", "set", "lo", "up")
	}
	node.Run("ip", "link", "set", "lo", "up")
	for _, a := range []string{"10.10.0.1/24", "10.10.0.9/24"} {
		node.Run("ip", "addr", "add", a, "brd", "+", "dev", "cni0")
	}
	node.Run("ip", "-6", "addr", "add", "fd00:10::1/64", "dev", "cni0", "nodad")
	node.Run("ip", "addr", "add", "10.20.0.1/16", "dev", "liqo.rome")
	node.Run("ip", "-6", "addr", "add", "fd00:20::1/64", "dev", "liqo.rome", "nodad")
	pod.Run("ip", "addr", "add", "10.10.0.5/24", "dev", "gw")
	pod.Run("ip", "route", "add", "default", "via", "10.10.0.1")
	peer.Run("ip", "addr", "add", "10.20.0.5/16", "dev", "gw")
	peer.Run("ip", "route", "add", "default", "via", "10.20.0.1")
	peer.Run("ip", "-6", "addr", "add", "fd00:20::5/64", "dev", "gw", "nodad")
	peer.Run("ip", "-6", "route", "add", "default", "via", "fd00:20::1")
	node.Do(func() { writeSysctl(t, "net/ipv4/ip_forward", "1") })

	at := func(a string, port uint16) netip.AddrPort { return netip.AddrPortFrom(addr(a), port) }
	inPod, remote := listen(t, pod, at("10.10.0.5", 4000)), listen(t, peer, at("10.20.0.5", 4000))
	remote6 := listen(t, peer, at("fd00:20::5", 4000))
	door, mapped, door6 := listen(t, node, at("10.10.0.1", 4000)), listen(t, node, at("10.10.0.9", 4000)), listen(t, node, at("fd00:10::1", 4000))
	all, wireguard := listen(t, node, at("0.0.0.0", 4001)), listen(t, node, at("0.0.0.0", 30840))

	// Without the table, all of this arrives: it is what has to be kept away.
	assert.Equal(t, deliver(t, remote, door, at("10.10.0.1", 4000)), at("10.20.0.5", 4000))
	deliver(t, remote, all, at("10.10.0.255", 4001))
	assert.Equal(t, deliver(t, remote6, door6, at("fd00:10::1", 4000)), at("fd00:20::5", 4000))

	converge(t, ns, refusing(prefix("10.20.0.0/16"), prefix("fd00:20::/64")))
	counts, err := ns.CountedBy(peersRefused)
	assert.NilError(t, err)
	assert.DeepEqual(t, counts, map[string]uint64{"rome": 0})
	assert.Equal(t, deliver(t, remote, inPod, at("10.10.0.5", 4000)), at("10.20.0.5", 4000))
	assert.Equal(t, deliver(t, remote, mapped, at("10.10.0.9", 4000)), at("10.20.0.5", 4000))
	deliver(t, remote, wireguard, at("10.10.0.1", 30840))
	for i, knock := range []struct {
		from *net.UDPConn
		to   netip.AddrPort
	}{{remote, at("10.10.0.1", 4000)}, {remote, at("10.10.0.1", 4001)}, {remote, at("10.10.0.255", 4001)}, {remote6, at("fd00:10::1", 4000)}} {
		send(t, knock.from, knock.to)
		poll.WaitOn(t, func(poll.LogT) poll.Result { // mostly the packet is dropped before send returns, and sometimes after that
			if counts, err = ns.CountedBy(peersRefused); err != nil || counts["rome"] <= uint64(i) {
				return poll.Continue("%v %v", counts, err)
			}
			return poll.Success()
		})
		assert.DeepEqual(t, counts, map[string]uint64{"rome": uint64(i + 1)})
	}
	// What the node has asked for comes back.
	client := listen(t, node, at("10.10.0.1", 4002))
	assert.Equal(t, deliver(t, client, remote, at("10.20.0.5", 4000)), at("10.10.0.1", 4002))
	assert.Equal(t, deliver(t, remote, client, at("10.10.0.1", 4002)), at("10.20.0.5", 4000))
}
