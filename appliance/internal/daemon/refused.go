package daemon

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/isthmus-net/isthmus/appliance/desired"
	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// refusedNews is how long a node says of a peer that it has sent something to the node
// itself. A scan that goes on is one event, and so is each that begins anew.
const refusedNews = 10 * time.Minute

// peersRefused is the table that drops what peers send to a host itself.
var peersRefused = netstate.TableID{Family: netstate.FamilyINET, Name: desired.PeersRefusedTable}

// A refusedWatch remembers when packets of each peer were dropped.
type refusedWatch struct {
	before map[string]uint64
	at     map[string]time.Time
}

// peers takes what the counters of peers say now, and returns the peers that have sent
// something lately, sorted. A counter that is less than before has begun anew. What the
// first reading says was before this process, and is no news.
func (w *refusedWatch) peers(now time.Time, counts map[string]uint64) []string {
	if w.at == nil {
		w.at = map[string]time.Time{}
	}
	for peer, n := range counts {
		if w.before != nil && n != w.before[peer] && n > 0 {
			w.at[peer] = now
		}
	}
	w.before = maps.Clone(counts)
	maps.DeleteFunc(w.at, func(_ string, at time.Time) bool { return now.Sub(at) >= refusedNews })
	return slices.Sorted(maps.Keys(w.at))
}

// peersRefusedCondition tells of peers that have sent something to the node itself.
func peersRefusedCondition(peers []string) Condition {
	if len(peers) == 0 {
		return Condition{"PeersBehave", "Quiet", "no cluster has sent packets to this node itself of late", true}
	}
	return Condition{"PeersBehave", "PeerRefused", shorten(fmt.Sprintf("dropped packets that came from cluster %s for an address of this node itself, or for a NodePort: "+
		"a peer reaches pods, and addresses that an IP stands for. To let it reach this node, create an IP with the node's address", strings.Join(peers, ", "))), false}
}

// A refusedCounter counts, for each peer, what was dropped because it was for the node
// itself.
type refusedCounter struct {
	desc *prometheus.Desc
	read func(netstate.TableID) (map[string]uint64, error)
}

func newRefusedCounter(read func(netstate.TableID) (map[string]uint64, error)) refusedCounter {
	return refusedCounter{prometheus.NewDesc("isthmus_node_denied_packets_total",
		"Packets of a peer to addresses of the node itself, or to NodePorts: they were dropped. Counted anew when a peer joins or leaves.",
		[]string{"cluster_id"}, nil), read}
}

// Describe implements prometheus.Collector.
func (c refusedCounter) Describe(ch chan<- *prometheus.Desc) { ch <- c.desc }

// Collect implements prometheus.Collector. What can't be read is left out.
func (c refusedCounter) Collect(ch chan<- prometheus.Metric) {
	counts, err := c.read(peersRefused)
	if err != nil {
		return
	}
	for peer, n := range counts {
		ch <- prometheus.MustNewConstMetric(c.desc, prometheus.CounterValue, float64(n), peer)
	}
}
