package desired_test

import (
	"strings"
	"testing"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/desired"
)

// clamping is the chart's gw-mss-clamping.
func clamping(family, value string) cluster.FirewallConfiguration {
	rule := func(name, position string) cluster.FilterRule {
		return cluster.FilterRule{Name: name, Action: "tcpmssclamp", Value: value, Match: []cluster.Match{
			{Proto: "tcp"}, {Dev: desired.TunnelInterface, Position: position},
		}}
	}
	return cluster.FirewallConfiguration{
		Meta:  meta("FirewallConfiguration", "liqo", "gw-mss-clamping", fwCategory, "gateway", fwSubcategory, "all-gateways"),
		Table: "mss-clamping", Family: family,
		Chains: []cluster.Chain{{
			Name: "mss-clamping", Type: "filter", Hook: "forward", Policy: "accept",
			Filter: []cluster.FilterRule{rule("to-peer", "out"), rule("from-peer", "in")},
		}},
	}
}

// TestClampToTunnel: an MSS that is to be what the way allows is, both ways,
// what the tunnel allows; a number stays what it is.
func TestClampToTunnel(t *testing.T) {
	const syn = "tcp flags & (syn | rst) == syn tcp option maxseg size set "
	// The tunnel of romeGateway has 1440 bytes: 1500 without IPv4, UDP and
	// the header of WireGuard.
	for _, tt := range []struct {
		name, family, value string
		mtu                 int // as written
		want                []string
	}{
		{"automatic", "INET", "0", 0, []string{
			`meta l4proto tcp ip saddr 0.0.0.0/0 DEV ` + syn + "1400", `meta l4proto tcp ip6 saddr ::/0 DEV ` + syn + "1380", `meta l4proto tcp DEV ` + syn + "rt mtu"}},
		{"automatic, MTU written", "INET", "0", 1340, []string{
			`meta l4proto tcp ip saddr 0.0.0.0/0 DEV ` + syn + "1300", `meta l4proto tcp ip6 saddr ::/0 DEV ` + syn + "1280", `meta l4proto tcp DEV ` + syn + "rt mtu"}},
		{"IPv4", "IPV4", "0", 0, []string{`meta l4proto tcp DEV ` + syn + "1400", `meta l4proto tcp DEV ` + syn + "rt mtu"}},
		{"IPv6", "IPV6", "", 0, []string{`meta l4proto tcp DEV ` + syn + "1380", `meta l4proto tcp DEV ` + syn + "rt mtu"}},
		{"fixed", "INET", "1200", 0, []string{`meta l4proto tcp DEV ` + syn + "1200"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			in := romeGateway()
			in.MTU, in.Firewalls = tt.mtu, []cluster.FirewallConfiguration{clamping(tt.family, tt.value)}
			s, results := desired.Gateway(in)
			assert.Equal(t, resultOf(t, results, in.Firewalls[0].Ref).Message, "")
			var want []string
			for _, r := range []struct{ dev, name string }{{`oifname "liqo-tunnel"`, "to-peer"}, {`iifname "liqo-tunnel"`, "from-peer"}} {
				for _, line := range tt.want {
					want = append(want, strings.Replace(line, "DEV", r.dev, 1)+` comment "`+r.name+`"`)
				}
			}
			var got []string
			for line := range strings.Lines(tableOf(s, "mss-clamping").String()) {
				if strings.Contains(line, "maxseg") {
					got = append(got, strings.TrimSpace(line))
				}
			}
			assert.DeepEqual(t, got, want)
		})
	}
}
