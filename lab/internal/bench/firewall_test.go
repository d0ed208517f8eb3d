package bench

import (
	"strings"
	"testing"
	"time"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/appliance/netstate"
	"github.com/isthmus-net/isthmus/appliance/nettest"
	"github.com/isthmus-net/isthmus/lab/internal/report"
)

// count returns the number of rules with and without a map in all nat chains.
func count(s netstate.State) (maps, linear int) {
	for _, t := range s.Tables {
		for _, c := range t.Chains {
			for _, r := range c.Rules {
				switch {
				case c.Type != "nat":
				case len(r.Action.Map.Entries) > 0:
					maps++
				default:
					linear++
				}
			}
		}
	}
	return maps, linear
}

// TestFirewallCases: what is compared are the same translations, once with a
// map each way and once with a rule for each.
func TestFirewallCases(t *testing.T) {
	for _, c := range FirewallCases([]int{10, 300}, []int{20}) {
		s, err := c.state()
		assert.NilError(t, err)
		for _, table := range s.Tables {
			assert.NilError(t, table.Validate())
		}
		n := c.Addresses + c.Networks
		maps, linear := count(s)
		if c.Linear {
			assert.Equal(t, maps, 0, c)
			assert.Equal(t, linear, 2*n, c)
		} else {
			assert.Equal(t, maps, 2, c)
			assert.Equal(t, linear, 0, c)
		}
		assert.Assert(t, len(s.Routes) >= n, c)
		assert.Assert(t, len(s.Rules) < 10, c)
	}
}

// TestNodeCases: what is compared are gateways with the same nodes, once with rules for
// each of them and once without.
func TestNodeCases(t *testing.T) {
	for _, c := range NodeCases([]int{10, MaxNodes}) {
		s, err := c.state()
		assert.NilError(t, err)
		marks := 0
		for _, table := range s.Tables {
			assert.NilError(t, table.Validate())
			for _, chain := range table.Chains {
				if chain.Name == "mark-to-conntrack" {
					marks += len(chain.Rules)
				}
			}
		}
		if c.Linear {
			assert.Equal(t, marks, c.Nodes, c)
			assert.Assert(t, len(s.Rules) > c.Nodes, c)
		} else {
			assert.Equal(t, marks, 4, c)
			assert.Assert(t, len(s.Rules) < 10, c)
		}
	}
}

func TestSummarizeFirewall(t *testing.T) {
	cases := FirewallCases([]int{10}, []int{20})[:2]
	samples := []FirewallSamples{
		{Applied: time.Second, Connections: [][2]float64{{1, 1}, {10, 20}, {4, 4}}, Packets: [][2]float64{{2, 2}, {2, 2}, {2, 2}}},
		{Applied: 2 * time.Millisecond, Connections: [][2]float64{{10, 9}, {100, 80}, {1, 2}}, Packets: [][2]float64{{4, 2}, {4, 2}, {4, 2}}},
	}
	rows, err := SummarizeFirewall(cases, samples)
	assert.NilError(t, err)
	assert.Equal(t, rows[0].ConnectionsRatio, Spread{1, 1, 2})
	assert.Equal(t, rows[1].ConnectionsRatio, Spread{0.9, 0.8, 2})
	assert.Equal(t, rows[1].Connections, Spread{9, 2, 80})
	assert.Equal(t, rows[1].PacketsRatio, Spread{0.5, 0.5, 0.5})
	var b strings.Builder
	FirewallReport{Pairs: 3, Duration: report.Duration(time.Second), Rows: rows}.Write(&b)
	assert.Equal(t, b.String(), `
3 interleaved pairs of 1.0s each: medians; for ratios, to 10 mapped IPs, maps, median (smallest–largest)
                               applied in   new connections              ratio   packets              ratio
  10 mapped IPs, maps              1.00 s           4.00 /s   1.00 (1.00–2.00)   2.00 /s   1.00 (1.00–1.00)
  20 remapped networks, maps      2.00 ms           9.00 /s   0.90 (0.80–2.00)   2.00 /s   0.50 (0.50–0.50)
New connections are conntrack entries made, to random destinations among all that are translated; packets are those of
1000 connections that arrive. One sender; the gateway's tables, rules and routes, but no tunnel and no Geneve.
`)
	samples[1].Packets[1] = [2]float64{4, 0}
	_, err = SummarizeFirewall(cases, samples)
	assert.ErrorContains(t, err, "20 remapped networks, maps: a measurement saw nothing; measure longer (--duration)")
}

// TestMeasureFirewall: every case makes connections, and their packets arrive:
// each is translated to where the only route leads.
func TestMeasureFirewall(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.Need(t, "ip")
	for _, cases := range [][]FirewallCase{FirewallCases([]int{3, 40}, []int{20}), NodeCases([]int{2, 12})} {
		samples, err := MeasureFirewall(t.Context(), FirewallConfig{Cases: cases, Pairs: 1, Duration: 10 * time.Millisecond})
		assert.NilError(t, err)
		_, err = SummarizeFirewall(cases, samples)
		assert.NilError(t, err)
	}
}
