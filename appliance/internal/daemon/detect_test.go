package daemon

import (
	"errors"
	"net/netip"
	"strings"
	"testing"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/desired"
	"github.com/isthmus-net/isthmus/appliance/kernel"
)

// ways is a routing table: destination to source and MTU.
type ways map[string]kernel.Path

func (w ways) RouteTo(dst netip.Addr) (kernel.Path, error) {
	p, ok := w[dst.String()]
	if !ok {
		return kernel.Path{}, errors.New("network is unreachable")
	}
	return p, nil
}

func from(src, dev string, mtu int) kernel.Path {
	return kernel.Path{Src: netip.MustParseAddr(src), Dev: dev, MTU: mtu}
}

// fabric is what a node knows of a gateway: where it is, if it is anywhere.
func fabric(ns, name, node, ip string) cluster.InternalFabric {
	f := cluster.InternalFabric{Meta: cluster.Meta{Ref: cluster.Ref{Kind: "InternalFabric", Namespace: ns, Name: name}}, GatewayNode: node}
	if ip != "" {
		f.GatewayIP = netip.MustParseAddr(ip)
	}
	return f
}

func TestDetect(t *testing.T) {
	table := ways{
		"10.0.1.5":    from("10.0.1.1", "cni0", 1500),
		"10.0.2.5":    from("172.18.1.11", "eth0", 1500),
		"10.0.3.5":    from("172.19.1.11", "eth1", 1500),
		"10.0.4.5":    {Dev: "eth0", MTU: 1500},
		"2001:db8::5": from("2001:db8::11", "eth0", 1500),
	}
	gone := fabric("t", "a", "n2", "10.0.3.5")
	gone.GatewayGone = true
	nowhere := fabric("t", "a", "n2", "10.9.9.9")
	nowhere.GatewayGone = true
	deleting := fabric("t", "old", "n1", "10.0.1.5")
	deleting.Deleting = true
	for _, tc := range []struct {
		name          string
		gateways      []cluster.InternalFabric
		local, remote string
		problems      []string // one word of each
	}{
		{"no gateway", nil, "", "", nil},
		{"on this node", []cluster.InternalFabric{fabric("t", "a", "n1", "10.0.1.5")}, "10.0.1.1", "", nil},
		{"elsewhere", []cluster.InternalFabric{fabric("t", "a", "n2", "10.0.2.5")}, "", "172.18.1.11", nil},
		{"both", []cluster.InternalFabric{fabric("t", "a", "n2", "10.0.2.5"), fabric("t", "b", "n1", "10.0.1.5")}, "10.0.1.1", "172.18.1.11", nil},
		{"ipv6", []cluster.InternalFabric{fabric("t", "a", "n2", "2001:db8::5")}, "", "2001:db8::11", nil},
		{"going away", []cluster.InternalFabric{deleting}, "", "", nil},
		{"its pod has ended", []cluster.InternalFabric{gone}, "", "172.19.1.11", nil},
		{"its pod has ended, and there is no way to its address", []cluster.InternalFabric{nowhere}, "", "", nil},
		{"one whose pod has ended, and one that is there", []cluster.InternalFabric{gone, fabric("t", "b", "n2", "10.0.2.5")}, "", "172.18.1.11", nil},
		{"the CRD is older", []cluster.InternalFabric{fabric("t", "a", "", "10.0.2.5")}, "", "", []string{"gatewayNode"}},
		{"no address yet", []cluster.InternalFabric{fabric("t", "a", "n2", "")}, "", "", nil},
		{"no route", []cluster.InternalFabric{fabric("t", "a", "n2", "10.9.9.9")}, "", "", []string{"unreachable"}},
		{"no source", []cluster.InternalFabric{fabric("t", "a", "n2", "10.0.4.5")}, "", "", []string{"give the link eth0 an address"}},
		{"a bad one beside a good one", []cluster.InternalFabric{fabric("t", "a", "n2", "10.9.9.9"), fabric("t", "b", "n2", "10.0.2.5")}, "", "172.18.1.11", []string{"unreachable"}},
		// In any order: the first by name wins, and it is said.
		{"two links", []cluster.InternalFabric{fabric("t", "b", "n3", "10.0.3.5"), fabric("t", "a", "n2", "10.0.2.5")}, "", "172.18.1.11", []string{"172.19.1.11"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			text := func(a netip.Addr) string {
				if a.IsValid() {
					return a.String()
				}
				return ""
			}
			s := detect(table, "n1", tc.gateways)
			assert.Equal(t, text(s.local), tc.local)
			assert.Equal(t, text(s.remote), tc.remote)
			assert.Equal(t, len(s.problems), len(tc.problems), strings.Join(s.problems, "\n"))
			for i, want := range tc.problems {
				assert.Assert(t, strings.Contains(s.problems[i], want), s.problems[i])
			}
		})
	}
}

func TestUnderlay(t *testing.T) {
	table := ways{
		"192.0.2.1": from("10.0.1.5", "eth0", 1450),
		"10.0.2.5":  from("10.0.1.5", "eth0", 9000),
	}
	far, near := netip.MustParseAddr("198.51.100.1"), netip.MustParseAddr("10.0.2.5")
	got := underlay(table, []netip.Addr{far, near})
	assert.Equal(t, got.MTU, 1450)
	assert.Equal(t, got.To(near), 9000)
	assert.Equal(t, got.To(far), 1450)
	assert.Equal(t, underlay(ways{}, nil).MTU, 0)
	assert.Equal(t, underlay(ways{"2001:db8::1": from("2001:db8::2", "eth0", 1400)}, nil).MTU, 1400)

	w := newUnderlayWatch(table)
	was := w.read([]netip.Addr{near})
	assert.Assert(t, equalUnderlay(was, underlay(table, []netip.Addr{near})))
	table["10.0.2.5"] = from("10.0.1.5", "eth0", 1400)
	assert.Assert(t, !equalUnderlay(was, underlay(table, []netip.Addr{near})))
	assert.Assert(t, !equalUnderlay(was, desired.Underlay{}))
}

// A waysAndLinks is ways whose uplinks can, or can't, be read.
type waysAndLinks struct {
	ways
	links []string
	err   error
}

func (w *waysAndLinks) Uplinks(netip.Addr) ([]string, error) { return w.links, w.err }

// Uplinks are read where they are asked for, and the last ones hold where they can't
// be read.
func TestUplinksOfUnderlay(t *testing.T) {
	table := &waysAndLinks{links: []string{"eth0"}}
	w := newUnderlayWatch(table)
	none := w.read(nil)
	assert.Assert(t, none.Uplinks == nil)
	node := netip.MustParseAddr("172.18.1.11")
	was := w.readWith(&node, nil)
	assert.DeepEqual(t, was.Uplinks, []string{"eth0"})
	assert.Assert(t, !equalUnderlay(was, none))
	table.links, table.err = nil, errors.New("no buffer space")
	assert.Assert(t, equalUnderlay(w.readWith(&node, nil), was))
	table.links, table.err = []string{"eth0", "vxlan.calico"}, nil
	assert.Assert(t, !equalUnderlay(w.readWith(&node, nil), was))
}
