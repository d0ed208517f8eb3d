package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"gotest.tools/v3/assert"
	"k8s.io/client-go/rest"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/desired"
	"github.com/isthmus-net/isthmus/appliance/internal/kube"
	"github.com/isthmus-net/isthmus/appliance/netstate"
	"github.com/isthmus-net/isthmus/appliance/nettest"
)

// dropping is a FirewallConfiguration of a user's for all nodes, which drops TCP
// packets of this host that come from some ports.
func dropping(name string, generation int64, ports ...cluster.PortRange) cluster.FirewallConfiguration {
	fc := cluster.FirewallConfiguration{Meta: meta(kindFirewall, name), Table: name, Family: "IPV4"}
	fc.UID, fc.Generation = "uid of "+name, generation
	fc.Labels = map[string]string{"networking.liqo.io/firewall-category": "fabric", "networking.liqo.io/firewall-subcategory": "all-nodes"}
	chain := cluster.Chain{Name: "output", Type: "filter", Hook: "output", Policy: "accept"}
	for i, p := range ports {
		chain.Filter = append(chain.Filter, cluster.FilterRule{Name: fmt.Sprint("drop-", i), Action: "drop", Match: []cluster.Match{{Proto: "tcp"}, {Ports: p, Position: "src"}}})
	}
	fc.Chains = []cluster.Chain{chain}
	return fc
}

// mostPorts are the ports that Linux gives to clients, without the one that packets
// are walked with through a host: nobody sees it coming.
func mostPorts() []cluster.PortRange {
	return []cluster.PortRange{{From: 32768, To: 45677}, {From: 45679, To: 60999}}
}

// A clusterAPI answers as an API server does when it is asked where it is.
type clusterAPI struct {
	ns   *nettest.NS
	addr string
	http *http.Server
	last atomic.Bool // the next answer is the last one
}

func (s *clusterAPI) start(t *testing.T) {
	t.Helper()
	var l net.Listener
	var err error
	s.ns.Do(func() { l, err = net.Listen("tcp", s.addr) })
	assert.NilError(t, err)
	s.http = &http.Server{ReadHeaderTimeout: busyTime, Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if s.last.Swap(false) {
			l.Close() // nobody gets in any more; this request is still answered
			w.Header().Set("Connection", "close")
		}
		fmt.Fprintf(w, `{"serverAddressByClientCIDRs":[{"clientCIDR":"0.0.0.0/0","serverAddress":%q}]}`, s.addr)
	})}
	go s.http.Serve(l)
	t.Cleanup(s.stop)
}

func (s *clusterAPI) stop() { s.http.Close() }

// knockFrom asks an API server from a namespace.
func knockFrom(t *testing.T, ns *nettest.NS, s *clusterAPI) kube.Knock {
	t.Helper()
	knock, err := kube.NewKnock(&rest.Config{
		Host: "http://" + s.addr,
		Dial: func(ctx context.Context, network, address string) (c net.Conn, err error) {
			ns.Do(func() { c, err = new(net.Dialer).DialContext(ctx, network, address) })
			return c, err
		},
	})
	assert.NilError(t, err)
	return knock
}

// TestConfirm does to a node what cuts it off from its API server, by objects and
// otherwise.
func TestConfirm(t *testing.T) {
	nettest.Need(t, "ip", "nft")
	host, other := nettest.Another(t), nettest.Another(t)
	wire(t, host, other, netip.MustParseAddr("172.18.1.11"), netip.MustParseAddr("172.18.1.1"))
	server := &clusterAPI{ns: other, addr: "172.18.1.1:6443"}
	server.start(t)
	api := newMemoryAPI(kube.NodeView{Input: desired.NodeInput{Name: "n1"}})
	var status latest[NodeStatus]
	log, text := newLog(t, "n1")
	cfg := NodeConfig{
		NodeName: "n1", API: api, WriteStatus: status.write, Logger: log,
		Knock: knockFrom(t, host, server), StateDir: t.TempDir(),
	}
	inNS(t, host, func(ctx context.Context) error { return RunNode(ctx, cfg) })

	set := func(routes []cluster.RouteConfiguration, firewalls ...cluster.FirewallConfiguration) {
		api.set(func(v *kube.NodeView) { v.Input.Routes, v.Input.Firewalls = routes, firewalls })
	}
	applied := func(name string, ok bool, message string) func() error {
		return func() error {
			for _, a := range status.get().Applied {
				if a.Object.Name == name && a.OK == ok && strings.Contains(a.Message, message) {
					return nil
				}
			}
			return fmt.Errorf("%+v", status.get().Applied)
		}
	}
	// inKernel reports whether the kernel has exactly these tables.
	inKernel := func(names ...string) func() error {
		return func() error {
			var tables []string
			for _, line := range strings.Split(host.Run("nft", "list", "tables", "ip"), "\n") {
				if name, is := strings.CutPrefix(line, "table ip isthmus-"); is {
					tables = append(tables, name)
				}
			}
			slices.Sort(tables)
			if !slices.Equal(tables, names) {
				return fmt.Errorf("%v", tables)
			}
			return nil
		}
	}
	answers := func() error {
		_, err := cfg.Knock(t.Context())
		return err
	}

	// What would cut the node off is refused by name, the rest goes on.
	harmless := dropping("harmless", 1, cluster.PortRange{From: 9, To: 9})
	set([]cluster.RouteConfiguration{routeTo("astray", "172.18.1.1/32", "lo")}, harmless)
	within(t, 5*time.Second, applied("astray", false, "spec.table.rules[0]: it would cut off the host: connections to the API server (172.18.1.1:6443)"))
	within(t, 5*time.Second, applied("harmless", true, ""))
	within(t, 5*time.Second, inKernel("harmless"))
	assert.NilError(t, answers())
	kept := func() error {
		var c confirmation
		b, err := os.ReadFile(filepath.Join(cfg.StateDir, confirmFile))
		if err == nil {
			err = json.Unmarshal(b, &c)
		}
		if err != nil {
			return err
		}
		if len(c.Trying) > 0 || !slices.Contains(c.Known, version{"uid of harmless", 1}) {
			return fmt.Errorf("%+v", c)
		}
		return nil
	}
	within(t, 3*trialTime, kept)

	// One that nobody saw coming is taken back, and the others stay.
	set(nil, harmless, dropping("cutting", 1, mostPorts()...))
	within(t, 5*time.Second, inKernel("cutting", "harmless"))
	took := within(t, 3*trialSilence, inKernel("harmless"))
	t.Logf("taken back after %v", took.Round(time.Millisecond))
	within(t, 3*trialSilence, applied("cutting", false, "it is taken back: the API server did not answer any more when it was in force, and answered again without it, twice"))
	assert.NilError(t, answers())
	assert.NilError(t, applied("harmless", true, "")())

	// It stays out, whatever else is asked for; a later version of an object leaves the
	// earlier one in force.
	set(nil, dropping("harmless", 2, mostPorts()...), dropping("cutting", 1, mostPorts()...))
	within(t, 12*trialSilence, applied("harmless", false, "it is taken back, and the object is in force as it was before: the API server did not answer"))
	assert.NilError(t, inKernel("harmless")())
	assert.Assert(t, strings.Contains(host.Run("nft", "list", "table", "ip", "isthmus-harmless"), "tcp sport 9 drop"))
	assert.NilError(t, answers())

	// Put right, it is tried again. Just then, when it has answered the question before the change, the
	// API server goes down by itself: the change is in force when it is back.
	takenBack := func() int { return strings.Count(text.String(), "does not answer any more after a change") }
	before := takenBack()
	server.last.Store(true)
	right := dropping("cutting", 2, cluster.PortRange{From: 7, To: 7})
	set(nil, dropping("harmless", 3, cluster.PortRange{From: 9, To: 9}), right)
	within(t, 3*trialSilence, func() error {
		if takenBack() == before {
			return errors.New("it is not taken back")
		}
		return nil
	})
	status.fail(errors.New("connection refused"))
	within(t, trialBack, inKernel("harmless"))
	took = within(t, 2*trialBack, inKernel("cutting", "harmless"))
	t.Logf("in force again after %v", took.Round(time.Millisecond))
	server.start(t)
	status.fail(nil)
	within(t, 10*time.Second, applied("cutting", true, ""))
	assert.NilError(t, inKernel("cutting", "harmless")())
}

// A process that ends in the middle of a trial may have ended because of it, and one that ends
// later must not begin it anew.
func TestConfirmGoesOn(t *testing.T) {
	log := slog.New(slog.DiscardHandler)
	dir := t.TempDir()
	silent := false
	knock := func(context.Context) ([]netip.AddrPort, error) {
		if silent {
			return nil, errors.New("connection refused")
		}
		return []netip.AddrPort{netip.MustParseAddrPort("172.18.1.1:6443")}, nil
	}
	objects := users{firewalls: []cluster.FirewallConfiguration{dropping("a", 1), dropping("b", 3)}}
	pass := func(c *confirmer, changed bool) []desired.LeftOut {
		left, _ := c.choose(t.Context(), objects)
		var o outcome
		if changed {
			o.changes.SetTables = []netstate.Table{{}}
		}
		c.pass(o)
		return left
	}

	first := newConfirmer(knock, dir, log)
	first.inForce(objects, []cluster.Applied{{Object: objects.firewalls[0].Ref, ObservedGeneration: 1, OK: true, Since: time.Now()}})
	assert.Equal(t, len(pass(first, true)), 0)
	assert.Assert(t, !first.trial.trying[version{"uid of a", 1}], "what was in force before is not tried")
	assert.Assert(t, first.trial.trying[version{"uid of b", 3}])

	// It ends. The next one finds the kernel as it is to be, and no API server.
	silent = true
	second := newConfirmer(knock, dir, log)
	assert.DeepEqual(t, second.apiServers(), []netip.AddrPort{netip.MustParseAddrPort("172.18.1.1:6443")}, cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b }))
	assert.Equal(t, len(pass(second, false)), 0)
	assert.Assert(t, second.trial.hear(time.Now().Add(trialSilence), false))
	left := pass(second, true)
	assert.Equal(t, len(left), 1)
	assert.Equal(t, left[0].Object.Name, "b")
	silent = false
	assert.Assert(t, second.hear(true))
	assert.Equal(t, len(pass(second, true)), 0) // it is tried once more
	second = newConfirmer(knock, dir, log)      // and that goes on, too
	assert.Equal(t, len(pass(second, false)), 0)
	assert.Assert(t, second.trial.hear(time.Now().Add(trialSilence), false))
	assert.Equal(t, len(pass(second, true)), 1)
	assert.Assert(t, second.hear(true))

	// It ends, too: what is out stays out, and nothing is tried.
	third := newConfirmer(knock, dir, log)
	left = pass(third, true)
	assert.Equal(t, len(left), 1)
	assert.Equal(t, left[0].Object.Name, "b")
	assert.Assert(t, strings.Contains(left[0].Why, "it is taken back"), left[0].Why)
	assert.Assert(t, !third.running())

	// Without an API server to lose nothing is tried.
	silent = true
	objects.firewalls = append(objects.firewalls, dropping("c", 1))
	assert.Equal(t, len(pass(third, true)), 1)
	assert.Assert(t, !third.running())
}
