package daemon

import (
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// A node tells of a peer whose packets were dropped since it began to look, for as long
// as that is news.
func TestRefusedPeers(t *testing.T) {
	begin := time.Date(2026, 3, 14, 12, 0, 0, 0, time.UTC)
	var w refusedWatch
	for _, tt := range []struct {
		what   string
		after  time.Duration
		counts map[string]uint64
		want   []string
	}{
		{"what was before this process is no news", 0, map[string]uint64{"rome": 7}, nil},
		{"nothing new", time.Second, map[string]uint64{"rome": 7}, nil},
		{"a packet", 2 * time.Second, map[string]uint64{"rome": 8}, []string{"rome"}},
		{"another peer joins, and counters begin anew", 3 * time.Second, map[string]uint64{"rome": 0, "oslo": 0}, []string{"rome"}},
		{"of that peer", 4 * time.Second, map[string]uint64{"rome": 0, "oslo": 1}, []string{"oslo", "rome"}},
		{"a peer leaves", 5 * time.Second, map[string]uint64{"rome": 0}, []string{"oslo", "rome"}},
		{"the first is no news any more", 2*time.Second + refusedNews, map[string]uint64{"rome": 0}, []string{"oslo"}},
		{"nor is the other", 4*time.Second + refusedNews, map[string]uint64{"rome": 0}, nil},
		{"again", 5*time.Second + refusedNews, map[string]uint64{"rome": 3}, []string{"rome"}},
	} {
		got := w.peers(begin.Add(tt.after), tt.counts)
		assert.Equal(t, strings.Join(got, " "), strings.Join(tt.want, " "), tt.what)
		c := peersRefusedCondition(got)
		assert.Equal(t, c.OK, len(tt.want) == 0, tt.what)
		assert.Assert(t, strings.Contains(c.Message, strings.Join(got, ", ")), c.Message)
	}
}

func TestRefusedCounter(t *testing.T) {
	c := newRefusedCounter(func(id netstate.TableID) (map[string]uint64, error) {
		assert.Equal(t, id.String(), "inet peers-refused")
		return map[string]uint64{"rome": 3, "oslo": 0}, nil
	})
	registry := prometheus.NewRegistry()
	assert.NilError(t, registry.Register(c))
	families, err := registry.Gather()
	assert.NilError(t, err)
	assert.Equal(t, len(families), 1)
	assert.Equal(t, families[0].GetName(), "isthmus_node_denied_packets_total")
	got := map[string]float64{}
	for _, m := range families[0].GetMetric() {
		assert.Equal(t, m.GetLabel()[0].GetName(), "cluster_id")
		got[m.GetLabel()[0].GetValue()] = m.GetCounter().GetValue()
	}
	assert.DeepEqual(t, got, map[string]float64{"rome": 3, "oslo": 0})
}
