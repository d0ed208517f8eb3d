package desired_test

import (
	"testing"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/desired"
)

// Who writes a rule for the gateway learns which address to write, and nobody is
// bothered who means an address of this cluster.
func TestOriginalAddresses(t *testing.T) {
	from := func(position, first, last string) cluster.Match {
		return cluster.Match{IP: cluster.AddrRange{From: addr(first), To: addr(last)}, Position: position}
	}
	dev := func(position, name string) cluster.Match { return cluster.Match{Dev: name, Position: position} }
	for _, tt := range []struct {
		name     string
		hook     string
		priority int32
		match    []cluster.Match
		want     string // after the field
	}{
		{"a host, by the tunnel", "forward", 0, []cluster.Match{dev("in", "liqo-tunnel"), from("src", "10.127.64.7", "10.127.64.7")},
			"match[1].ip: this gateway sees the remote cluster's 10.127.64.0/18 as 10.127.128.0/18; write 10.127.128.7"},
		{"a part of the network, into the tunnel", "postrouting", 0, []cluster.Match{from("dst", "10.127.65.0", "10.127.65.255"), dev("out", "liqo-tunnel")},
			"match[0].ip: this gateway sees the remote cluster's 10.127.64.0/18 as 10.127.128.0/18; write 10.127.129.0/24"},
		{"this cluster has that address too", "forward", 0, []cluster.Match{from("src", "10.127.64.7", "10.127.64.7")}, ""},
		{"an address of this cluster, into the tunnel", "forward", 0, []cluster.Match{dev("out", "liqo-tunnel"), from("src", "10.127.64.7", "10.127.64.7")}, ""},
		{"as the gateway sees it", "forward", 0, []cluster.Match{dev("in", "liqo-tunnel"), from("src", "10.127.128.7", "10.127.128.7")}, ""},
		{"all", "forward", 0, []cluster.Match{dev("in", "liqo-tunnel"), from("src", "10.0.0.0", "10.255.255.255")}, ""},
		{"before the translation", "prerouting", -310, []cluster.Match{dev("in", "liqo-tunnel"), from("src", "10.127.64.7", "10.127.64.7")}, ""},
		{"after it", "postrouting", 310, []cluster.Match{dev("out", "liqo-tunnel"), from("dst", "10.127.64.7", "10.127.64.7")}, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			in := romeGateway()
			in.Firewalls = append(in.Firewalls, cluster.FirewallConfiguration{
				Meta: meta("FirewallConfiguration", "liqo-tenant-rome", "mine", fwCategory, "gateway", fwUnique, "rome"), Table: "mine", Family: "IPV4",
				Chains: []cluster.Chain{{
					Name: "c", Type: "filter", Hook: tt.hook, Policy: "accept", Priority: tt.priority,
					Filter: []cluster.FilterRule{{Name: "r", Action: "drop", Match: tt.match}},
				}},
			})
			_, results := desired.Gateway(in)
			want := ""
			if tt.want != "" {
				want = "spec.table.chains[0].rules.filterRules[0]." + tt.want
			}
			r := resultOf(t, results, in.Firewalls[len(in.Firewalls)-1].Ref)
			assert.Assert(t, r.OK)
			assert.Equal(t, r.Message, want)
		})
	}
}

// What has the controller's label and does something else is refused as a whole, and
// so is a second name for a network.
func TestOddTranslations(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(*cluster.FirewallConfiguration)
		want   string
	}{
		{"one address", func(fc *cluster.FirewallConfiguration) {
			fc.Chains[0].NAT[0].To, fc.Chains[0].NAT[0].ToIsPrefix = prefix("10.9.0.1/32"), false
		}, "spec.table.chains[0].rules.natRules[0]: does not translate a network of the remote cluster; remove the label networking.liqo.io/prefix-translation, which is for the controller's own objects"},
		{"another length", func(fc *cluster.FirewallConfiguration) { fc.Chains[0].NAT[0].To = prefix("10.127.64.0/19") },
			"spec.table.chains[0].rules.natRules[0]: does not translate a network of the remote cluster; remove the label networking.liqo.io/prefix-translation, which is for the controller's own objects"},
		{"by another link", func(fc *cluster.FirewallConfiguration) { fc.Chains[1].NAT[0].Match[1].Dev = "eth0" },
			"spec.table.chains[1].rules.natRules[0]: does not translate a network of the remote cluster; remove the label networking.liqo.io/prefix-translation, which is for the controller's own objects"},
		{"out and in differ", func(fc *cluster.FirewallConfiguration) { fc.Chains[1].NAT[0].To = prefix("10.127.192.0/18") },
			"spec.table.chains[1].rules.natRules[0]: 10.127.64.0/18 is translated to 10.127.192.0/18, but 10.127.64.0/18 to 10.127.128.0/18 by FirewallConfiguration liqo-tenant-rome/rome-remap-podcidr already; delete one of the two"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			in := romeGateway()
			tt.change(&in.Firewalls[0])
			state, results := desired.Gateway(in)
			r := resultOf(t, results, in.Firewalls[0].Ref)
			assert.Assert(t, !r.OK)
			assert.Equal(t, r.Message, tt.want)
			for _, table := range state.Tables {
				assert.Assert(t, table.Name != desired.PrefixTranslationTable && table.Name != "remap-podcidr", "%v", table)
			}
		})
	}
}
