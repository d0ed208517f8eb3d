package world

import (
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"
)

// TestNetwork: of a network that all hosts are on those packets are seen that go
// from one side to the other, or to nobody that is known, each once, and neither those between
// the hosts of a side nor what a host has on its other interfaces.
func TestNetwork(t *testing.T) {
	side := map[netip.Addr]string{
		netip.MustParseAddr("10.89.0.2"): "milan", netip.MustParseAddr("10.89.0.3"): "milan", netip.MustParseAddr("10.89.0.9"): "rome",
	}
	network := &Network{
		Name: WANHost, Hosts: []string{"milan/node-1", "milan/node-2", "rome/node-1"}, Link: "eth0",
		Between: func(src, dst netip.Addr) bool { return side[src] != "" && side[dst] != "" && side[src] != side[dst] },
		Leaves:  func(_ string, dst netip.Addr) bool { return side[dst] == "" && dst != netip.MustParseAddr("10.0.2.5") },
	}
	cs := &Captures{}
	hosts := map[string]*capture{}
	for _, host := range append(network.Hosts, "user") {
		c := &capture{ring: newRing(1 << 20)}
		c.links.Store(int32(1), "eth0")
		c.links.Store(int32(2), "cni0")
		hosts[host] = c
		cs.all = append(cs.all, &namespaceCapture{capture: c, id: host, name: func() string { return host }})
	}
	pass := func(host string, link int32, direction Direction, src, dst, text string) {
		mac := net.HardwareAddr{2, 0, 0, 0, 0, 1}
		data := frame(t, &layers.Ethernet{SrcMAC: mac, DstMAC: mac, EthernetType: layers.EthernetTypeIPv4},
			&layers.IPv4{Version: 4, TTL: 64, Protocol: layers.IPProtocolUDP, SrcIP: netip.MustParseAddr(src).AsSlice(), DstIP: netip.MustParseAddr(dst).AsSlice()},
			&layers.UDP{SrcPort: 999, DstPort: 8080}, gopacket.Payload(text))
		hosts[host].ring.add(packet{time: time.Unix(1000, 0), ifindex: link, hatype: unix.ARPHRD_ETHER, protocol: unix.ETH_P_IP, direction: direction, data: data, length: len(data)})
	}
	pass("milan/node-1", 1, Out, "10.89.0.2", "10.89.0.9", "there") // where it came from
	pass("rome/node-1", 1, In, "10.89.0.2", "10.89.0.9", "there")   // where it came to
	pass("rome/node-1", 2, In, "10.89.0.2", "10.89.0.9", "there")   // on to a pod
	pass("milan/node-2", 1, In, "10.89.0.2", "10.89.0.3", "within milan")
	pass("milan/node-1", 1, In, "10.89.0.9", "10.89.0.2", "back")
	pass("milan/node-1", 1, Out, "10.0.1.5", "203.0.113.7", "elsewhere")
	pass("milan/node-2", 2, Out, "10.0.1.5", "203.0.113.7", "elsewhere") // not by the link
	pass("milan/node-1", 1, Out, "10.0.1.5", "10.0.2.5", "within milan, to a pod")
	pass("user", 1, In, "10.89.0.9", "10.89.0.2", "on a host that is not on it")

	report, err := cs.Wire(WireQuery{On: WANHost, Contains: []string{"there", "back", "elsewhere", "within", "not on it"}}, nil, network)
	assert.NilError(t, err)
	assert.Equal(t, report.Packets, 3)
	assert.DeepEqual(t, report.Found, []int{1, 1, 1, 0, 0})

	_, err = cs.Wire(WireQuery{On: WANHost}, nil)
	assert.ErrorIs(t, err, ErrNoTarget)
	report, err = cs.Wire(WireQuery{On: "user"}, nil, network)
	assert.NilError(t, err)
	assert.Equal(t, report.Packets, 1)
}
