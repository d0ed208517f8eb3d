package desired_test

import (
	"testing"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/desired"
)

// The ICMP errors of pods keep their source, those of a range as well that the cluster has
// got since its Configuration was written.
func TestErrorsOfFurtherNetworks(t *testing.T) {
	in := romeGateway()
	for _, c := range []struct {
		own  cluster.CIDRs
		want []string // sources that stay
	}{
		{cluster.CIDRs{}, []string{"10.70.0.0/16", "10.127.64.0/18", "169.254.18.1"}},
		{cluster.CIDRs{Pod: prefixes("10.127.64.0/18", "10.3.0.0/16"), External: prefixes("10.70.0.0/16")},
			[]string{"10.3.0.0/16", "10.70.0.0/16", "10.127.64.0/18", "169.254.18.1"}},
	} {
		in.Configurations[0].Own = c.own
		state, _ := desired.Gateway(in)
		var stay []string
		for _, r := range chain(t, state, desired.ICMPErrorTable, "postrouting") {
			for _, m := range r.Matches {
				if m.Negate && m.Dir == "src" {
					stay = append(stay, m.Addr.String())
				}
			}
		}
		assert.Check(t, is.DeepEqual(stay, c.want))
	}
}
