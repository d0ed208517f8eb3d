package plan_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
)

// From one peer to another the way leads by the node of the gateway, and only
// there, and only to peers that another one may reach. Whoever may not is dropped.
func TestTransit(t *testing.T) {
	pair := func(a, b string) [2]string { return [2]string{a, b} }
	for _, overlay := range []cluster.Overlay{cluster.OverlayGeneve, cluster.OverlayVXLAN} {
		for _, tt := range []struct {
			name  string
			peers []string
			all   bool
			pairs [][2]string
			to    []string // peers that a route leads to
			drops []string // "a to b": what comes from a and is meant for b
		}{
			{name: "one peer", peers: []string{"rome"}},
			{name: "off", peers: []string{"oslo", "rome"}, drops: []string{"oslo to rome", "rome to oslo"}},
			{name: "all", peers: []string{"oslo", "rome"}, all: true, to: []string{"oslo", "rome"}},
			{
				name: "a pair", peers: []string{"bonn", "oslo", "rome"}, pairs: [][2]string{pair("rome", "oslo"), pair("rome", "nobody")},
				to: []string{"oslo", "rome"}, drops: []string{"bonn to oslo", "bonn to rome", "oslo to bonn", "rome to bonn"},
			},
			{name: "a pair that is not there", peers: []string{"oslo", "rome"}, pairs: [][2]string{pair("rome", "nobody")}, drops: []string{"oslo to rome", "rome to oslo"}},
			{name: "a peer and itself", peers: []string{"oslo", "rome"}, pairs: [][2]string{pair("rome", "rome")}, drops: []string{"oslo to rome", "rome to oslo"}},
		} {
			t.Run(fmt.Sprint(overlay, " ", tt.name), func(t *testing.T) {
				w := overlapping(t, overlay, tt.peers...)
				w.options.Transit, w.options.TransitPairs = tt.all, tt.pairs
				w.settle()
				networks := map[string][]string{} // as this cluster sees them: pods, external
				for _, id := range tt.peers {
					st := get[*v1beta1.Configuration](w, "liqo-tenant-"+id, id).Status.Remote.CIDR
					networks[id] = []string{string(st.Pod[0]), string(st.External[0])}
				}

				assert.Assert(t, w.objects[key("RouteConfiguration", "liqo", "milan-node-1-extcidr")] == nil)
				var to, want []string
				if o := w.objects[key("RouteConfiguration", "liqo", "milan-node-2-extcidr")]; o != nil {
					r := o.(*v1beta1.RouteConfiguration)
					assert.Equal(t, r.Labels[v1beta1.LabelRouteUnique], "node-2")
					for _, rule := range r.Spec.Table.Rules {
						assert.Equal(t, *rule.Iif, "liqo-tunnel")
						to = append(to, string(*rule.Dst))
					}
				}
				for _, id := range tt.to {
					want = append(want, networks[id][0])
				}
				assert.DeepEqual(t, to, want)
				for i := range to {
					for j := range i {
						assert.Assert(t, !netip.MustParsePrefix(to[i]).Overlaps(netip.MustParsePrefix(to[j])))
					}
				}

				var rules []string
				for _, id := range tt.peers {
					if o := firewallOf(w, "liqo-tenant-"+id, id+"-no-transit"); o != nil {
						assert.Equal(t, o.Labels[v1beta1.LabelFirewallUnique], id)
						for _, r := range natRules(o) {
							rules = append(rules, id+" "+r)
						}
					}
				}
				want = nil
				for _, text := range tt.drops {
					a, b, _ := strings.Cut(text, " to ")
					for _, destination := range networks[b] {
						want = append(want, fmt.Sprintf("%s between-peers in=liqo-tunnel dst=%s drop", a, destination))
					}
				}
				assert.DeepEqual(t, rules, want)
			})
		}
	}
}
