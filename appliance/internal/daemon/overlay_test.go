package daemon

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/desired"
	"github.com/isthmus-net/isthmus/appliance/internal/kube"
	"github.com/isthmus-net/isthmus/appliance/nettest"
)

// TestNodesOfTheOverlay runs two node daemons as they are, in namespaces that
// are joined by a cable, and lets each find the other by what it reports.
func TestNodesOfTheOverlay(t *testing.T) {
	nettest.Need(t, "ip", "bridge", "busybox")
	a, b := nettest.Another(t), nettest.Another(t)
	wire(t, a, b, netip.MustParseAddr("172.18.1.11"), netip.MustParseAddr("172.18.1.12"))
	inode := func(name, ip string) cluster.InternalNode {
		return cluster.InternalNode{
			Meta:    cluster.Meta{Ref: cluster.Ref{Kind: "InternalNode", Name: name}},
			Overlay: cluster.OverlayVXLAN, InternalIP: netip.MustParseAddr(ip),
		}
	}
	both := []cluster.InternalNode{inode("n1", "10.80.0.1"), inode("n2", "10.80.0.2")}
	// Every node has the address of the other one in a route, as its
	// symmetric routes have.
	to := func(other cluster.InternalNode) []cluster.RouteConfiguration {
		rc := routeTo("there", other.InternalIP.String()+"/32", "liqo.vxlan")
		rc.Table, rc.Rules[0].Routes[0].Scope, rc.Rules[0].Routes[0].Via, rc.Rules[0].Routes[0].OnLink = "18952", "", other.InternalIP, true
		return []cluster.RouteConfiguration{rc}
	}
	var status [2]latest[NodeStatus]
	var apis [2]*memoryAPI[kube.NodeView]
	for i, ns := range []*nettest.NS{a, b} {
		name := both[i].Name
		apis[i] = newMemoryAPI(kube.NodeView{Input: desired.NodeInput{Name: name, Nodes: []cluster.InternalNode{both[0], both[1]}, Routes: to(both[1-i])}})
		log, _ := newLog(t, name)
		cfg := NodeConfig{NodeName: name, API: apis[i], WriteStatus: status[i].write, Logger: log}
		inNS(t, ns, func(ctx context.Context) error { return RunNode(ctx, cfg) })
	}
	within(t, 5*time.Second, func() error {
		if status[0].get().Kernel == "" {
			return errors.New("no status yet")
		}
		return nil
	})
	if !slices.Contains(status[0].get().Overlays, cluster.OverlayVXLAN) {
		nettest.SkipOrFail(t, "vxlan", errors.New(find(t, status[0].get().Conditions, "OverlaySupported").Message))
	}
	for i, want := range []string{"172.18.1.11", "172.18.1.12"} { // the source of the default route
		within(t, 5*time.Second, func() error {
			st := status[i].get()
			if st.VTEP.IP != netip.MustParseAddr(want) || st.VTEP.MAC[0]&3 != 2 {
				return fmt.Errorf("%+v", st)
			}
			return nil
		})
		assert.Assert(t, find(t, status[i].get().Conditions, "OverlaySupported").OK)
	}
	ping := func() error {
		out, err := a.Try("busybox", "ping", "-c1", "-W1", "-I", "liqo.vxlan", "10.80.0.2")
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	}
	assert.Assert(t, ping() != nil, "nobody knows anybody yet")
	for i := range apis {
		apis[i].set(func(v *kube.NodeView) { v.Input.Nodes[1-i].VTEP = status[1-i].get().VTEP })
	}
	within(t, 5*time.Second, ping)

	// Somebody takes away the entry that leads to the other node, or the link.
	mac := status[1].get().VTEP.MAC
	for _, damage := range [][]string{
		{"ip", "neighbour", "delete", "10.80.0.2", "dev", "liqo.vxlan"},
		{"bridge", "fdb", "delete", net.HardwareAddr(mac[:]).String(), "dev", "liqo.vxlan", "dst", "172.18.1.12"},
		{"ip", "link", "delete", "liqo.vxlan"},
	} {
		a.Run(damage...)
		took := within(t, 5*time.Second, ping)
		t.Logf("%s: mended after %v", strings.Join(damage, " "), took.Round(time.Millisecond))
	}

	// The other node goes: nothing leads to it any more.
	apis[0].set(func(v *kube.NodeView) { v.Input.Nodes, v.Input.Routes = v.Input.Nodes[:1], nil })
	within(t, 5*time.Second, func() error {
		if out := a.Run("sh", "-c", "ip neighbour show nud permanent dev liqo.vxlan; bridge fdb show dev liqo.vxlan; ip route show table 18952"); out != "" {
			return errors.New(out)
		}
		return nil
	})

	// Another overlay: the link goes.
	apis[0].set(func(v *kube.NodeView) { v.Input.Nodes[0].Overlay = cluster.OverlayGeneve })
	within(t, 5*time.Second, func() error {
		if st := status[0].get(); st.VTEP.IP.IsValid() {
			return fmt.Errorf("%+v", st)
		}
		return nil
	})
	_, err := a.Try("ip", "link", "show", "liqo.vxlan")
	assert.Assert(t, err != nil, "the link is still there")
}
