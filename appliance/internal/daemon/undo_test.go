package daemon

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/desired"
	"github.com/isthmus-net/isthmus/appliance/internal/kube"
	"github.com/isthmus-net/isthmus/appliance/nettest"
)

// configuration is everything that ip and nft show of a namespace.
func configuration(ns *nettest.NS) string {
	return ns.Run("sh", "-c", "ip -d address show; ip -4 route show table all; ip -6 route show table all; ip -4 rule show; ip -6 rule show; ip neighbour show nud permanent; nft list ruleset")
}

// settled reports whether the kernel has done by itself what it does with a new link: it is
// seen to be up and has its link-local address, whose duplicates were looked for.
func settled(configuration string) bool {
	for _, passing := range []string{"NO-CARRIER", "state DOWN", "LOWERLAYERDOWN", "linkdown", "tentative"} {
		if strings.Contains(configuration, passing) {
			return false
		}
	}
	return strings.Contains(configuration, "inet6 fe80:") || !strings.Contains(configuration, "inet6 ")
}

// TestUndo runs the node daemon, and then takes back what it made: the node is
// as it was before, what others have made included.
func TestUndo(t *testing.T) {
	nettest.Need(t, "ip", "nft")
	host, other := nettest.Another(t), nettest.Another(t)
	wire(t, host, other, netip.MustParseAddr("172.18.1.11"), netip.MustParseAddr("172.18.1.12"))
	// What is not ours, some of it where ours will be.
	host.Run("ip", "rule", "add", "from", "10.0.1.0/24", "lookup", "77", "priority", "301")
	host.Run("ip", "route", "add", "10.0.2.0/24", "via", "172.18.1.12", "table", "77")
	host.Run("nft", "add table ip theirs; add chain ip theirs post { type nat hook postrouting priority srcnat; }; add rule ip theirs post masquerade")
	var before string
	within(t, 10*time.Second, func() error {
		if before = configuration(host); !settled(before) {
			return errors.New(before)
		}
		return nil
	})

	inode := func(name, ip string) cluster.InternalNode {
		return cluster.InternalNode{
			Meta:    cluster.Meta{Ref: cluster.Ref{Kind: "InternalNode", Name: name}},
			Overlay: cluster.OverlayVXLAN, InternalIP: netip.MustParseAddr(ip),
		}
	}
	peer := inode("n2", "10.80.0.2")
	peer.VTEP = cluster.VTEP{IP: netip.MustParseAddr("172.18.1.12"), MAC: [6]byte{2, 0, 0, 0, 0, 2}}
	rc := routeTo("peer", "10.9.0.0/16", "liqo.vxlan")
	rc.Table, rc.Rules[0].Routes[0].Scope, rc.Rules[0].Routes[0].Via, rc.Rules[0].Routes[0].OnLink = "18952", "", peer.InternalIP, true
	api := newMemoryAPI(kube.NodeView{Input: desired.NodeInput{
		Name: "n1", Nodes: []cluster.InternalNode{inode("n1", "10.80.0.1"), peer}, Routes: []cluster.RouteConfiguration{rc},
	}})
	var status latest[NodeStatus]
	log, _ := newLog(t, "n1")
	stop := inNS(t, host, func(ctx context.Context) error {
		return RunNode(ctx, NodeConfig{NodeName: "n1", API: api, WriteStatus: status.write, Logger: log})
	})
	within(t, 10*time.Second, func() error {
		if status.get().Kernel == "" {
			return errors.New("no status yet")
		}
		return nil
	})
	if c := find(t, status.get().Conditions, "OverlaySupported"); !c.OK {
		nettest.SkipOrFail(t, "vxlan", errors.New(c.Message))
	}
	within(t, 10*time.Second, func() error {
		if now := configuration(host); !strings.Contains(now, "liqo.vxlan") || !strings.Contains(now, "10.9.0.0/16") || !strings.Contains(now, "isthmus-") {
			return errors.New(now)
		}
		return nil
	})
	stop()
	assert.Assert(t, configuration(host) != before, "the end of the daemon took everything with it")

	inNS(t, host, func(ctx context.Context) error {
		return UndoNode(ctx, UndoConfig{HealthAddress: "127.0.0.1:8081", Logger: log})
	})
	within(t, 10*time.Second, func() error {
		code, body, err := get(host, "http://127.0.0.1:8081/readyz")
		if err != nil || code != 200 {
			return fmt.Errorf("readyz: %d %q %v", code, body, err)
		}
		return nil
	})
	assert.Equal(t, configuration(host), before)
}
