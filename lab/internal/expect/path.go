package expect

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/isthmus-net/isthmus/lab/internal/operand"
	"github.com/isthmus-net/isthmus/lab/internal/prober"
	"github.com/isthmus-net/isthmus/lab/internal/topology"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// Path expects that the last probe passed hosts in an order, as captures on
// all interfaces saw it. Hosts that only carried it inside a tunnel (the node
// of the gateway, a router) need not be named.
type Path struct {
	Via       []Ref `lab:"via,required" doc:"hosts in order, both ends included; routers are left out in worlds that have none"`
	Symmetric bool  `lab:"symmetric" doc:"the reply passed the same hosts, tunnels included, in reverse"`
	// Inside is about the networks of nodes, not about the wide area network.
	Inside string `lab:"inside" enum:"geneve|vxlan" doc:"between nodes it was inside this encapsulation, there and back"`

	tried int
}

// Lint resolves the hosts; the ends must have been probed.
func (e *Path) Lint(l *Linter) {
	for i := range e.Via {
		l.Resolve(&e.Via[i])
	}
	if len(e.Via) < 2 {
		l.Problem(&e.Via, "", "a path has at least two hosts")
		return
	}
	if to := e.Via[len(e.Via)-1]; to.Kind != "" && !l.Reached[to.HostName(l.Topology)] {
		l.Problem(&e.Via[len(e.Via)-1], "put a reach to it into this step or an earlier one", "nothing has reached %s up to here", to)
	}
}

// Check compares. When it does not match it sends another probe before the
// next look: the first one may have met a route that was on its way.
func (e *Path) Check(ctx context.Context, row *Row) (Result, error) {
	var via []operand.Operand
	for _, v := range e.Via {
		if v.Kind == operand.Router && !row.Directory.HasRouter(v.Cluster) {
			continue
		}
		o, err := row.Directory.Settle(ctx, v.Operand)
		if err != nil {
			return missing(v.Text, err)
		}
		via = append(via, o)
	}
	from, to := e.Via[0].Operand, e.Via[len(e.Via)-1].Operand
	p, ok := row.lastProbe(func(p Probe) bool { return same(p.From, from) && same(p.To, to) })
	if !ok {
		return Result{Want: fmt.Sprintf("an answered probe from %s to %s", from, to), Got: "none", Final: true}, nil
	}
	if e.tried++; e.tried > 2 {
		again, err := row.SendBy(ctx, p.From, p.Dst, p.To, p.Proto, p.Port)
		if err != nil {
			return Result{}, err
		}
		if again.Result.OK {
			p = again
		}
	}
	seen, err := row.sightings(ctx, p)
	if err != nil {
		return Result{}, err
	}
	res := e.compare(newTrail(seen), via, row.Topology)
	if outside := e.outside(seen, row.Topology); res.OK && outside != "" {
		res.OK, res.Want, res.Why = false, res.Want+", inside "+e.Inside+" between nodes", outside
	}
	if res.OK && e.Inside != "" {
		unseen, err := e.unseen(ctx, row, seen, via)
		if err != nil {
			return missing(res.Want, err)
		}
		if unseen != "" {
			res.OK, res.Want, res.Why = false, res.Want+", inside "+e.Inside+" between nodes", unseen
		}
	}
	return res, nil
}

// unseen says between which nodes of the path nothing was seen inside the
// encapsulation, although it leads from one to the other: that of a gateway is
// one of them, named or not.
func (e *Path) unseen(ctx context.Context, row *Row, seen []world.Sighting, via []operand.Operand) (string, error) {
	nodes := map[string][]string{} // by cluster
	for _, o := range via {
		node := ""
		switch o.Kind {
		case operand.Node:
			node = operand.NodeName(o.Node)
		case operand.Gateway:
			p, err := row.Directory.Pod(ctx, o)
			if err != nil {
				return "", err
			}
			node = p.Node
		}
		if node != "" && !slices.Contains(nodes[o.Cluster], node) {
			nodes[o.Cluster] = append(nodes[o.Cluster], node)
		}
	}
	for _, cluster := range slices.Sorted(maps.Keys(nodes)) {
		all := nodes[cluster]
		if len(all) > 1 && !slices.ContainsFunc(seen, func(s world.Sighting) bool {
			on, name, _ := strings.Cut(s.Host, "/")
			return on == cluster && slices.Contains(all, name) && s.Interface == world.NodeInterface && s.Outer == e.Inside
		}) {
			return fmt.Sprintf("nothing inside %s was seen between %s of %s", e.Inside, strings.Join(all, " and "), cluster), nil
		}
	}
	return "", nil
}

// outside says where a node sent or got the packet on the network of the nodes
// outside of the encapsulation that was expected.
func (e *Path) outside(seen []world.Sighting, topo *topology.Topology) string {
	if e.Inside == "" {
		return ""
	}
	for _, s := range seen {
		cluster, name, _ := strings.Cut(s.Host, "/")
		c, _ := topo.Cluster(cluster)
		if s.Interface != world.NodeInterface || s.Outer == e.Inside || !isNode(c, name) {
			continue
		}
		how := "by itself"
		if s.Outer != world.OuterNone {
			how = "inside " + s.Outer
		}
		return fmt.Sprintf("%s saw it on %s, going %s, %s", s.Host, s.Interface, s.Direction, how)
	}
	return ""
}

func isNode(c topology.Cluster, name string) bool {
	for n := range c.Nodes {
		if name == operand.NodeName(n+1) {
			return true
		}
	}
	return false
}

// compare compares with hosts of which two in a row may be the same: the node
// of a pod may be the gateway's.
func (e *Path) compare(t trail, via []operand.Operand, topo *topology.Topology) Result {
	var want []string
	for _, v := range via {
		want = appendHost(want, v.HostName(topo))
	}
	res := Result{Want: arrows(want), Got: arrows(t.request), Path: t.request, Reply: t.reply}
	switch {
	case !slices.Equal(want, t.request):
		res.Why = firstDifference(want, t.request)
	case e.Symmetric && len(t.reply) == 0:
		res.Want += ", and back"
		res.Why = "no host saw the reply"
	case e.Symmetric && !slices.Equal(reversed(t.requestAll), t.replyAll):
		res.Want += ", and back"
		res.Got = arrows(t.requestAll) + ", and back " + arrows(t.replyAll)
		res.Why = "the reply " + firstDifference(reversed(t.requestAll), t.replyAll)
	default:
		res.OK = true
	}
	return res
}

// String is the expectation on one line.
func (e *Path) String() string {
	var names []string
	for _, v := range e.Via {
		names = append(names, v.Text)
	}
	s := "path " + strings.Join(slices.Compact(names), " → ")
	if e.Symmetric {
		s += ", and back"
	}
	if e.Inside != "" {
		s += ", inside " + e.Inside
	}
	return s
}

// A trail is the hosts that saw a probe, in the order of time.
type trail struct {
	request, reply       []string // outside of tunnels
	requestAll, replyAll []string // tunnels included
}

// newTrail orders sightings. Hosts between the clusters' networks carry
// frames without being a hop of what is inside, so they are left out.
func newTrail(seen []world.Sighting) trail {
	var t trail
	seen = slices.Clone(seen)
	slices.SortStableFunc(seen, func(a, b world.Sighting) int { return a.Time.Compare(b.Time) })
	for _, s := range seen {
		if s.Host == "wan" {
			continue
		}
		isReply := s.Marker == string(prober.MarkReply)
		plain := s.Outer == world.OuterNone
		if isReply {
			t.replyAll = appendHost(t.replyAll, s.Host)
			if plain {
				t.reply = appendHost(t.reply, s.Host)
			}
			continue
		}
		t.requestAll = appendHost(t.requestAll, s.Host)
		if plain {
			t.request = appendHost(t.request, s.Host)
		}
	}
	t.request, t.reply = once(t.request), once(t.reply)
	t.requestAll, t.replyAll = once(t.requestAll), once(t.replyAll)
	return t
}

// once takes repetitions of the whole path for one: a retransmission, or the
// second attempt of a datagram.
func once(hosts []string) []string {
	for n := 2; n <= len(hosts)/2; n++ {
		if len(hosts)%n != 0 {
			continue
		}
		repeated := true
		for i := n; i < len(hosts) && repeated; i++ {
			repeated = hosts[i] == hosts[i-n]
		}
		if repeated {
			return hosts[:n]
		}
	}
	return hosts
}

func appendHost(hosts []string, h string) []string {
	if len(hosts) > 0 && hosts[len(hosts)-1] == h {
		return hosts
	}
	return append(hosts, h)
}

func reversed(s []string) []string {
	out := slices.Clone(s)
	slices.Reverse(out)
	return out
}

func arrows(hosts []string) string {
	if len(hosts) == 0 {
		return "seen by no host"
	}
	return strings.Join(hosts, " → ")
}

func firstDifference(want, got []string) string {
	for i := range max(len(want), len(got)) {
		switch {
		case i >= len(got):
			return "ended at " + orNowhere(last(got)) + " instead of going on to " + want[i]
		case i >= len(want):
			return "went on to " + got[i]
		case want[i] != got[i] && i == 0:
			return "began at " + got[i]
		case want[i] != got[i]:
			return fmt.Sprintf("went from %s to %s instead of %s", got[i-1], got[i], want[i])
		}
	}
	return ""
}

func orNowhere(s string) string {
	if s == "" {
		return "nowhere"
	}
	return s
}

// lastSighting describes the last packet with a marker ("" for any).
func lastSighting(seen []world.Sighting, marker string) string {
	for i := len(seen) - 1; i >= 0; i-- {
		if s := seen[i]; marker == "" || s.Marker == marker {
			way := map[world.Direction]string{world.In: "coming in by", world.Out: "going out by"}[s.Direction]
			inside := ""
			if s.Outer != world.OuterNone {
				inside = fmt.Sprintf(" inside %s to %s", s.Outer, s.OuterDst)
			}
			return fmt.Sprintf("%s, %s %s%s", s.Host, way, s.Interface, inside)
		}
	}
	return "no host"
}
