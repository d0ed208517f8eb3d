package agent

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// prefixes is the input of the tests: a route into table 7 for each.
type prefixes []string

func routes(in prefixes) (netstate.State, []cluster.Applied) {
	var st netstate.State
	for _, p := range in {
		st.Routes = append(st.Routes, netstate.Route{Table: 7, Dst: netip.MustParsePrefix(p), Dev: "liqo.rome"})
	}
	return st, []cluster.Applied{{Object: cluster.Ref{Kind: "RouteConfiguration", Name: "rome-node-gw"}, OK: true}}
}

// memorySource holds the input.
type memorySource struct {
	mu      sync.Mutex
	in      prefixes
	err     error
	changed chan struct{}
}

func (s *memorySource) Changed() <-chan struct{} { return s.changed }

func (s *memorySource) Read(context.Context) (prefixes, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.in), s.err
}

func (s *memorySource) set(in ...string) {
	s.mu.Lock()
	s.in = in
	s.mu.Unlock()
	notify(s.changed)
}

// memoryTarget is a namespace in memory: Apply really changes what Observe
// returns, and tells of it, as the kernel does.
type memoryTarget struct {
	mu      sync.Mutex
	routes  map[netip.Prefix]netstate.Route
	refuse  map[netip.Prefix]error // routes that this kernel can't take
	noisy   bool                   // a failure, too, is an event
	applied int
	changed chan struct{}
}

func (k *memoryTarget) Changed() <-chan struct{} { return k.changed }

func (k *memoryTarget) Observe(context.Context) (netstate.State, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	var st netstate.State
	for _, r := range k.routes {
		st.Routes = append(st.Routes, r)
	}
	return st, nil
}

func (k *memoryTarget) Apply(_ context.Context, c netstate.Changes) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.applied++
	var errs []error
	for _, r := range slices.Concat(c.AddRoutes, c.ReplaceRoutes) {
		if err := k.refuse[r.Dst]; err != nil {
			errs = append(errs, err)
			if k.noisy {
				notify(k.changed)
			}
			continue
		}
		k.routes[r.Dst] = r
		notify(k.changed)
	}
	for _, r := range c.DeleteRoutes {
		delete(k.routes, r.Dst)
		notify(k.changed)
	}
	return errors.Join(errs...)
}

// drift deletes a route by hand.
func (k *memoryTarget) drift(dst string) {
	k.mu.Lock()
	delete(k.routes, netip.MustParsePrefix(dst))
	k.mu.Unlock()
	notify(k.changed)
}

func (k *memoryTarget) setRefuse(dst string, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.refuse[netip.MustParsePrefix(dst)] = err
}

func (k *memoryTarget) has(dst string) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	_, ok := k.routes[netip.MustParsePrefix(dst)]
	return ok
}

func notify(ch chan struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

// bench is a running loop with all that a test looks at.
type bench struct {
	source *memorySource
	target *memoryTarget
	log    bytes.Buffer

	mu      sync.Mutex
	results []Result[prefixes]
	times   []time.Time
}

// start runs a loop in the bubble of the test.
func start(t *testing.T, change func(*Config[prefixes])) *bench {
	b := &bench{
		source: &memorySource{in: prefixes{"10.1.0.0/16"}, changed: make(chan struct{}, 1)},
		target: &memoryTarget{
			routes: map[netip.Prefix]netstate.Route{}, refuse: map[netip.Prefix]error{}, changed: make(chan struct{}, 1),
		},
	}
	cfg := Config[prefixes]{
		Source: b.source, Target: b.target, Desired: routes,
		Logger: slog.New(slog.NewTextHandler(&b.log, nil)),
		Report: func(r Result[prefixes]) {
			b.mu.Lock()
			defer b.mu.Unlock()
			b.results = append(b.results, r)
			b.times = append(b.times, time.Now())
		},
	}
	if change != nil {
		change(&cfg)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- Run(ctx, cfg) }()
	t.Cleanup(func() {
		cancel()
		assert.NilError(t, <-done)
	})
	return b
}

// after lets time pass in the bubble and returns the results since the last
// call.
func (b *bench) after(d time.Duration) []Result[prefixes] {
	<-time.After(d)
	synctest.Wait()
	b.mu.Lock()
	defer b.mu.Unlock()
	out := b.results
	b.results = nil
	return out
}

func TestSecondPassFindsNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := start(t, nil)
		rs := b.after(time.Second)
		// The pass, and the one that our own change led to.
		assert.Equal(t, len(rs), 2)
		assert.Equal(t, rs[0].Changes.Len(), 1)
		assert.Assert(t, rs[1].Changes.Empty())
		assert.Equal(t, rs[0].Objects[0].Object.Name, "rome-node-gw")
		assert.Equal(t, strings.Count(b.log.String(), "\n"), 1, b.log.String())
		assert.Assert(t, strings.Contains(b.log.String(), "10.1.0.0/16"), b.log.String())

		rs = b.after(time.Hour) // resyncs only
		assert.Equal(t, len(rs), 6)
		assert.Equal(t, b.target.applied, 1)
		assert.Equal(t, strings.Count(b.log.String(), "\n"), 1, b.log.String())
	})
}

func TestBurstIsOnePass(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := start(t, nil)
		b.after(time.Second)
		for i := range 8 { // 8 changes within 40 ms
			b.source.set("10.1.0.0/16", netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 2, byte(i), 0}), 24).String())
			<-time.After(5 * time.Millisecond)
		}
		rs := b.after(40 * time.Millisecond)
		assert.Equal(t, len(rs), 1)
		assert.Assert(t, b.target.has("10.2.7.0/24") && !b.target.has("10.2.0.0/24"))
	})
}

// TestSteadyChangesDoNotStarve: changes that never stop don't put a pass off.
func TestSteadyChangesDoNotStarve(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := start(t, nil)
		b.after(time.Second)
		for range 100 {
			notify(b.source.changed)
			<-time.After(10 * time.Millisecond)
		}
		rs := b.after(0)
		assert.Assert(t, len(rs) >= 9 && len(rs) <= 20, "%d passes in a second", len(rs))
	})
}

func TestDriftIsRepaired(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := start(t, nil)
		b.after(time.Second)
		b.target.drift("10.1.0.0/16")
		b.after(2 * time.Second)
		assert.Assert(t, b.target.has("10.1.0.0/16"))
	})
}

func TestRetryBacksOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := start(t, func(c *Config[prefixes]) {
			// A kernel that refuses from the first pass.
			c.Target.(*memoryTarget).setRefuse("10.1.0.0/16", errors.New("no such device liqo.rome"))
		})
		rs := b.after(time.Minute)
		var gaps []time.Duration
		for i := 1; i < len(rs); i++ {
			gaps = append(gaps, b.times[i].Sub(b.times[i-1]))
		}
		ms := time.Millisecond
		assert.DeepEqual(t, gaps[:6], []time.Duration{200 * ms, 400 * ms, 800 * ms, 1600 * ms, 3200 * ms, 5000 * ms})
		assert.Equal(t, slices.Max(gaps), 5*time.Second)
		assert.ErrorContains(t, rs[0].Err, "apply: no such device liqo.rome")
		assert.Equal(t, rs[0].Remaining.Len(), 1)
		assert.Equal(t, strings.Count(b.log.String(), "level=ERROR"), 1, "a failure that stays is logged once a minute:\n"+b.log.String())

		b.target.setRefuse("10.1.0.0/16", nil)
		rs = b.after(5 * time.Second)
		assert.NilError(t, rs[len(rs)-1].Err)
		assert.Assert(t, rs[len(rs)-1].Remaining.Empty())
		assert.Assert(t, b.target.has("10.1.0.0/16"))
		assert.Assert(t, strings.Contains(b.log.String(), "in order again"))
	})
}

// TestLinkThatGoes: a link that is not there any more when a route by it is made is no
// error, unless the next pass misses it, too, or something else failed beside it.
func TestLinkThatGoes(t *testing.T) {
	gone := fmt.Errorf("route 10.1.0.0/16: %w", &netstate.NoLinkError{Name: "veth1"})
	for _, tc := range []struct {
		name  string
		err   error
		stays bool
		logs  string
	}{
		{"it goes once", gone, false, "WARN INFO INFO"},
		{"two at once", errors.Join(gone, gone), false, "WARN INFO INFO"},
		{"it stays away", gone, true, "WARN ERROR"},
		{"beside something else", errors.Join(gone, errors.New("network is unreachable")), false, "ERROR INFO INFO"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := start(t, func(c *Config[prefixes]) { c.Target.(*memoryTarget).setRefuse("10.1.0.0/16", tc.err) })
				b.after(100 * time.Millisecond)
				if !tc.stays {
					b.target.setRefuse("10.1.0.0/16", nil)
				}
				b.after(10 * time.Second)
				var levels []string
				for line := range strings.Lines(b.log.String()) {
					_, level, _ := strings.Cut(line, "level=")
					level, _, _ = strings.Cut(level, " ")
					levels = append(levels, level)
				}
				assert.Equal(t, strings.Join(levels, " "), tc.logs, b.log.String())
			})
		})
	}
}

// TestOneBadRoute: what can be done is done, drift of it is repaired in time
// although other things fail, and the failing passes don't chase each other
// by the events they cause.
func TestOneBadRoute(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := start(t, func(c *Config[prefixes]) {
			c.Source.(*memorySource).in = prefixes{"10.1.0.0/16", "10.9.0.0/16"}
			c.Target.(*memoryTarget).setRefuse("10.9.0.0/16", errors.New("network is unreachable"))
		})
		b.after(time.Minute) // the wait between retries is at its longest
		assert.Assert(t, b.target.has("10.1.0.0/16") && !b.target.has("10.9.0.0/16"))
		for range 10 {
			b.target.drift("10.1.0.0/16")
			rs := b.after(2 * time.Second)
			assert.Assert(t, b.target.has("10.1.0.0/16"))
			assert.Assert(t, len(rs) <= 3, "%d passes in 2 s", len(rs))
		}
		b.source.set("10.1.0.0/16", "10.3.0.0/16", "10.9.0.0/16")
		b.after(60 * time.Millisecond)
		assert.Assert(t, b.target.has("10.3.0.0/16"), "a change at the API waits for no retry")
	})
}

// TestFailureDoesNotChaseItself: a pass that fails and touches something each
// time is not run again for that at once.
func TestFailureDoesNotChaseItself(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := start(t, func(c *Config[prefixes]) {
			c.Target.(*memoryTarget).noisy = true
			c.Target.(*memoryTarget).setRefuse("10.1.0.0/16", errors.New("invalid argument"))
		})
		rs := b.after(time.Minute)
		assert.Assert(t, len(rs) <= 65, "%d passes in a minute", len(rs))
	})
}

func TestPanicKeepsDataPlane(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := start(t, func(c *Config[prefixes]) {
			c.Desired = func(in prefixes) (netstate.State, []cluster.Applied) {
				if slices.Contains(in, "poison") {
					panic("index out of range")
				}
				return routes(in)
			}
		})
		b.after(time.Second)
		b.source.set("poison")
		rs := b.after(time.Second)
		var p *PanicError
		assert.Assert(t, errors.As(rs[0].Err, &p))
		assert.ErrorContains(t, rs[0].Err, "index out of range")
		assert.Assert(t, b.target.has("10.1.0.0/16"))

		b.source.set("10.1.0.0/16", "10.4.0.0/16")
		b.after(time.Second)
		assert.Assert(t, b.target.has("10.4.0.0/16"))
	})
}

// TestSourceGone: with nothing to read, nothing is touched.
func TestSourceGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := start(t, nil)
		b.after(time.Second)
		b.source.mu.Lock()
		b.source.err = errors.New("lost")
		b.source.mu.Unlock()
		b.source.set()
		rs := b.after(time.Second)
		assert.ErrorContains(t, rs[0].Err, "lost")
		assert.Assert(t, b.target.has("10.1.0.0/16"))
	})
}

// blockedSource knows nothing until ctx ends.
type blockedSource struct{ changed chan struct{} }

func (s blockedSource) Changed() <-chan struct{} { return s.changed }
func (s blockedSource) Read(ctx context.Context) (prefixes, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

// TestEndKeepsDataPlane: neither the end of the loop nor an interrupted pass
// touches or reports anything.
func TestEndKeepsDataPlane(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		target := &memoryTarget{routes: map[netip.Prefix]netstate.Route{}, changed: make(chan struct{}, 1)}
		old := netip.MustParsePrefix("10.5.0.0/16")
		target.routes[old] = netstate.Route{Table: 7, Dst: old, Dev: "liqo.rome"}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		err := Run(ctx, Config[prefixes]{
			Source: blockedSource{}, Target: target, Desired: routes,
			Report: func(r Result[prefixes]) { t.Errorf("reported %+v", r) },
		})
		assert.NilError(t, err)
		assert.Assert(t, target.has("10.5.0.0/16"))
		assert.Equal(t, target.applied, 0)
	})
}

func TestLongLog(t *testing.T) {
	var c netstate.Changes
	for i := range 1000 {
		c.AddRoutes = append(c.AddRoutes, netstate.Route{Table: 7, Dst: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), 0}), 24), Dev: "liqo.rome"})
	}
	text := shorten(c)
	assert.Equal(t, strings.Count(text, "\n"), maxLines)
	assert.Assert(t, strings.HasSuffix(text, "… and 960 lines more"), text)
}

func TestConfig(t *testing.T) {
	assert.ErrorContains(t, Run(t.Context(), Config[prefixes]{}), "required")
}
