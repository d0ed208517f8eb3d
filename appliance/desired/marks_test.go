package desired_test

import (
	"testing"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/appliance/desired"
	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// TestMarksOfManyNodes: with a map, as without, connections of a node get the node's
// mark, those of nobody get none, and the bits that are the gateway's own stay.
func TestMarksOfManyNodes(t *testing.T) {
	for _, nodes := range []int{3, 9} {
		in := marking(large(nodes))
		state, _ := desired.Gateway(in)
		rules := tableOf(state, "service-nodeport-routing").Chains[0].Rules
		assert.Equal(t, len(rules), map[int]int{3: 3, 9: 4}[nodes])
		for _, own := range []uint32{0, 1 << 29, 1 << 30, desired.ReservedMarks} {
			for i, n := range in.Nodes {
				for _, before := range []uint32{0, 77} {
					assert.Equal(t, markBy(rules, n.GatewayInterface, n.InternalIP.String(), own|before), own|uint32(i+1))
					assert.Equal(t, markBy(rules, desired.TunnelInterface, n.InternalIP.String(), own|before), own|before)
					assert.Equal(t, markBy(rules, n.GatewayInterface, "10.127.64.9", own|before), own|before)
				}
			}
		}
	}
}

// markBy returns a connection's mark after the rules have seen a packet of it.
func markBy(rules []netstate.FirewallRule, in, src string, mark uint32) uint32 {
next:
	for _, r := range rules {
		for _, m := range r.Matches {
			is := mark&m.CTMark != 0
			switch {
			case m.Dev != "":
				is = m.Dev == in
			case m.Addr.From.IsValid():
				is = m.Addr.From == addr(src)
			}
			if is == m.Negate {
				continue next
			}
		}
		keep, set := ^r.Action.Mask, r.Action.Mark
		if len(r.Action.Map.Entries) > 0 {
			e, found := r.Action.Map.Find(addr(src), in)
			if !found {
				continue
			}
			keep, set = 0, e.Mark
		}
		mark = mark&keep | set
	}
	return mark
}
