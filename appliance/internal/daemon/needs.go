package daemon

import (
	"bufio"
	"cmp"
	"context"
	"maps"
	"net"
	"net/netip"
	"net/url"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
)

const (
	// needsInterval is how often a node looks at what it needs of other hosts. Routers and DNS
	// servers seldom change, and only new peers' networks depend on them.
	needsInterval = 30 * time.Second
	// needsPatience is how many readings in a row may miss what was there before.
	needsPatience = 2
	// needsLookup is how long the name of the API server may take to resolve.
	needsLookup = 2 * time.Second
	// maxNeeds is what InternalNode.status.needs can hold.
	maxNeeds = 64
)

// resolvConf is where a host's DNS servers are named, see resolv.conf(5). The kubelet gives a pod
// in the network of the node the file of the node.
const resolvConf = "/etc/resolv.conf"

// A needsReader finds out which addresses of other hosts a node can't do without.
type needsReader struct {
	router     router
	apiServer  string // host of its URL: an address or a name
	resolvConf string
	lookup     lookup

	resolved []netip.Addr // of the API server, when its name was last resolved
	// missed says of what the node needs, or needed a moment ago, how often in a row it was
	// not found.
	missed map[cluster.Needed]int
}

// newNeedsReader returns a reader that goes on from what the process before it has found.
func newNeedsReader(r router, apiServer string, before []cluster.Needed) *needsReader {
	if !strings.Contains(apiServer, "://") {
		apiServer = "https://" + apiServer // as client-go reads it
	}
	host := ""
	if u, err := url.Parse(apiServer); err == nil {
		host = u.Hostname()
	}
	n := &needsReader{router: r, apiServer: host, resolvConf: resolvConf, lookup: net.DefaultResolver.LookupNetIP, missed: map[cluster.Needed]int{}}
	for _, x := range before {
		n.missed[x] = 0
	}
	return n
}

// read returns the addresses, sorted: those that are found, and those that were found by
// one of the needsPatience readings before. A route that is gone for a moment must
// not give its router's address to a new peer, for good.
func (n *needsReader) read(ctx context.Context) []cluster.Needed {
	for x := range n.missed {
		n.missed[x]++
	}
	for _, x := range n.find(ctx) {
		n.missed[x] = 0
	}
	maps.DeleteFunc(n.missed, func(_ cluster.Needed, times int) bool { return times > needsPatience })
	out := slices.SortedFunc(maps.Keys(n.missed), compareNeeded)
	return out[:min(len(out), maxNeeds)]
}

// find returns what is needed now. A name that does not resolve leaves what it was before.
func (n *needsReader) find(ctx context.Context) []cluster.Needed {
	if a, err := netip.ParseAddr(n.apiServer); err == nil {
		n.resolved = []netip.Addr{a}
	} else if n.apiServer != "" {
		ctx, cancel := context.WithTimeout(ctx, needsLookup)
		defer cancel()
		if list, err := n.lookup(ctx, "ip", n.apiServer); err == nil {
			n.resolved = list
		}
	}
	text, _ := os.ReadFile(n.resolvConf) // without one there are no DNS servers
	return needed(n.router, n.resolved, nameservers(string(text)))
}

// nameservers returns the addresses of the DNS servers in a resolv.conf(5).
func nameservers(text string) []netip.Addr {
	var out []netip.Addr
	for s := bufio.NewScanner(strings.NewReader(text)); s.Scan(); {
		if words := strings.Fields(s.Text()); len(words) >= 2 && words[0] == "nameserver" {
			if a, err := netip.ParseAddr(words[1]); err == nil {
				out = append(out, a)
			}
		}
	}
	return out
}

// needed returns what a host needs: its API servers and DNS servers, and the
// first router on the way to each of them and to everywhere else. Addresses of
// the host itself and those that mean something on one link only are left out:
// no network of a peer has them.
func needed(r router, apiServers, dnsServers []netip.Addr) []cluster.Needed {
	var out []cluster.Needed
	add := func(a netip.Addr, what v1beta1.NeededFor) {
		if a = a.Unmap().WithZone(""); a.IsGlobalUnicast() {
			out = append(out, cluster.Needed{IP: a, For: string(what)})
		}
	}
	// reach adds dst unless it is this host, and the router on the way there. A way through a link
	// of ours leads to a peer, which has taken dst over: its router is a gateway.
	reach := func(dst netip.Addr, what v1beta1.NeededFor) {
		p, err := r.RouteTo(dst)
		if err == nil && p.Dev == "lo" {
			return
		}
		if what != v1beta1.NeededForRouting {
			add(dst, what)
		}
		if err == nil && !p.Ours {
			add(p.Via, v1beta1.NeededForRouting)
		}
	}
	for _, dst := range apiServers {
		reach(dst, v1beta1.NeededForAPIServer)
	}
	for _, dst := range dnsServers {
		reach(dst, v1beta1.NeededForDNS)
	}
	for _, dst := range []netip.Addr{anywhere4, anywhere6} {
		reach(dst, v1beta1.NeededForRouting)
	}
	slices.SortFunc(out, compareNeeded)
	return slices.Compact(out)
}

func compareNeeded(a, b cluster.Needed) int {
	return cmp.Or(a.IP.Compare(b.IP), strings.Compare(a.For, b.For))
}

// watchNeeds keeps what the node needs of other hosts up to date.
func (n *node) watchNeeds(ctx context.Context, r *needsReader) error {
	tick := time.NewTicker(needsInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		if n.setNeeds(r.read(ctx)) {
			n.publish()
		}
	}
}

// setNeeds reports whether the needs are others than before.
func (n *node) setNeeds(needs []cluster.Needed) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if slices.Equal(needs, n.needs) {
		return false
	}
	n.needs = needs
	n.log.Info("addresses of other hosts that this node needs", "needs", needs)
	return true
}
