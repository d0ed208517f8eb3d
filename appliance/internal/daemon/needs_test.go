package daemon

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/kernel"
)

func TestNeeded(t *testing.T) {
	a := netip.MustParseAddr
	way := func(dev, via string) kernel.Path {
		p := kernel.Path{Dev: dev}
		if via != "" {
			p.Via = a(via)
		}
		return p
	}
	ours := way("liqo.rome", "10.80.0.9")
	ours.Ours = true
	for _, test := range []struct {
		name     string
		ways     map[netip.Addr]kernel.Path
		api, dns []netip.Addr
		want     []cluster.Needed
	}{{
		name: "a host without a way to anywhere needs nobody",
	}, {
		name: "routers to everywhere, in both families",
		ways: map[netip.Addr]kernel.Path{anywhere4: way("eth0", "172.18.0.1"), anywhere6: way("eth0", "fd00::1")},
		want: []cluster.Needed{need("172.18.0.1", "Router"), need("fd00::1", "Router")},
	}, {
		name: "an API server behind a router of its own, a DNS server on the link",
		ways: map[netip.Addr]kernel.Path{anywhere4: way("eth0", "172.18.0.1"), a("10.2.0.1"): way("eth1", "172.19.0.1"), a("172.18.0.53"): way("eth0", "")},
		api:  []netip.Addr{a("10.2.0.1")}, dns: []netip.Addr{a("172.18.0.53")},
		want: []cluster.Needed{need("10.2.0.1", "APIServer"), need("172.18.0.1", "Router"), need("172.18.0.53", "DNSServer"), need("172.19.0.1", "Router")},
	}, {
		name: "one host for everything is there once for each",
		ways: map[netip.Addr]kernel.Path{anywhere4: way("eth0", "172.18.0.1"), a("172.18.0.1"): way("eth0", "")},
		api:  []netip.Addr{a("172.18.0.1"), a("::ffff:172.18.0.1")}, dns: []netip.Addr{a("172.18.0.1"), a("172.18.0.1")},
		want: []cluster.Needed{need("172.18.0.1", "APIServer"), need("172.18.0.1", "DNSServer"), need("172.18.0.1", "Router")},
	}, {
		name: "a server without a route is needed all the same",
		dns:  []netip.Addr{a("10.0.0.2")},
		want: []cluster.Needed{need("10.0.0.2", "DNSServer")},
	}, {
		name: "the host itself, loopback and addresses of a link are nobody else's",
		ways: map[netip.Addr]kernel.Path{a("172.18.0.7"): way("lo", ""), a("127.0.0.53"): way("lo", ""), anywhere4: way("eth0", "169.254.1.1"), anywhere6: way("eth0", "fe80::1")},
		api:  []netip.Addr{a("172.18.0.7")}, dns: []netip.Addr{a("127.0.0.53"), a("fe80::53%eth0")},
	}, {
		name: "a server that a peer has taken over is needed, its gateway is not",
		ways: map[netip.Addr]kernel.Path{a("10.0.0.2"): ours},
		dns:  []netip.Addr{a("10.0.0.2")},
		want: []cluster.Needed{need("10.0.0.2", "DNSServer")},
	}} {
		t.Run(test.name, func(t *testing.T) {
			assert.Equal(t, fmt.Sprint(needed(byText(test.ways), test.api, test.dns)), fmt.Sprint(test.want))
		})
	}
}

func need(ip, what string) cluster.Needed {
	return cluster.Needed{IP: netip.MustParseAddr(ip), For: what}
}

// byText returns a routing table by the text of destinations.
func byText(in map[netip.Addr]kernel.Path) ways {
	out := ways{}
	for dst, p := range in {
		out[dst.String()] = p
	}
	return out
}

func TestNeedsAreReadFromTheHost(t *testing.T) {
	a := netip.MustParseAddr
	file := filepath.Join(t.TempDir(), "resolv.conf")
	assert.NilError(t, os.WriteFile(file, []byte("# by hand\nsearch example.org\nnameserver 10.0.0.2\n  nameserver\tfd00::2\nnameserver nonsense\n; nameserver 10.9.9.9\n"), 0o644))
	r := newNeedsReader(ways{}, "https://api.example.org:6443", nil)
	r.resolvConf = file
	var err error
	r.lookup = func(_ context.Context, network, host string) ([]netip.Addr, error) {
		assert.Equal(t, network+" "+host, "ip api.example.org")
		return []netip.Addr{a("10.0.0.9")}, err
	}
	want := []cluster.Needed{need("10.0.0.2", "DNSServer"), need("10.0.0.9", "APIServer"), need("fd00::2", "DNSServer")}
	assert.Equal(t, fmt.Sprint(r.read(t.Context())), fmt.Sprint(want))
	err = errors.New("no answer")
	assert.Equal(t, fmt.Sprint(r.read(t.Context())), fmt.Sprint(want))

	r = newNeedsReader(ways{}, "[fd00::9]:6443", nil)
	r.resolvConf = filepath.Join(t.TempDir(), "absent")
	assert.Equal(t, fmt.Sprint(r.read(t.Context())), fmt.Sprint([]cluster.Needed{need("fd00::9", "APIServer")}))
}

// What is gone for a moment is needed all the same, also by the next process; what is
// gone for longer is not.
func TestNeedsThatAreGoneForAMoment(t *testing.T) {
	router := ways{anywhere4.String(): kernel.Path{Dev: "eth0", Via: netip.MustParseAddr("172.18.0.1")}}
	none := func(r *needsReader) *needsReader {
		r.resolvConf = filepath.Join(t.TempDir(), "absent")
		return r
	}
	r := none(newNeedsReader(router, "", nil))
	want := fmt.Sprint([]cluster.Needed{need("172.18.0.1", "Router")})
	before := r.read(t.Context())
	assert.Equal(t, fmt.Sprint(before), want)
	for _, r := range []*needsReader{r, none(newNeedsReader(ways{}, "", before))} {
		r.router = ways{}
		for range needsPatience {
			assert.Equal(t, fmt.Sprint(r.read(t.Context())), want)
		}
		assert.Equal(t, len(r.read(t.Context())), 0)
		r.router = router
		assert.Equal(t, fmt.Sprint(r.read(t.Context())), want)
	}
}
