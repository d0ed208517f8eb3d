package daemon

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"
)

// How often an endpoint that is a name is looked up: often after the start,
// when a load balancer's name may still be new, and while the tunnel is down.
const (
	lookupEarly      = 5 * time.Second
	lookupEarlyFor   = 10 * time.Minute
	lookupLater      = 5 * time.Minute
	lookupLeast      = time.Second // between two, however much they hurry
	lookupTimeout    = 10 * time.Second
	lookupAddressFor = "the endpoint" // names the lookups in logs
)

// A lookup is net.Resolver.LookupNetIP.
type lookup func(ctx context.Context, network, host string) ([]netip.Addr, error)

// A resolver keeps the address of the peer's endpoint. What can't be resolved
// any more stays at its last address.
type resolver struct {
	host    string // address or name; empty: there is no endpoint
	port    uint16
	lookup  lookup
	down    func() bool // whether the tunnel is down
	log     *slog.Logger
	changed chan struct{}
	hurried chan struct{} // yields when the next lookup should be now

	mu   sync.Mutex
	addr netip.Addr
}

func newResolver(host string, port uint16, l lookup, down func() bool, log *slog.Logger) *resolver {
	r := &resolver{
		host: strings.TrimSuffix(strings.TrimPrefix(host, "["), "]"), port: port,
		lookup: l, down: down, log: log, changed: make(chan struct{}, 1), hurried: make(chan struct{}, 1),
	}
	if a, err := netip.ParseAddr(r.host); err == nil {
		r.addr = a.Unmap()
	}
	return r
}

// endpoint returns where the peer is; invalid when that isn't known.
func (r *resolver) endpoint() netip.AddrPort {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.addr.IsValid() {
		return netip.AddrPort{}
	}
	return netip.AddrPortFrom(r.addr, r.port)
}

// run looks the name up again and again. It has nothing to do for an address.
func (r *resolver) run(ctx context.Context) error {
	if _, err := netip.ParseAddr(r.host); err == nil || r.host == "" {
		return nil
	}
	start := time.Now()
	once := newOnce(r.log)
	for ctx.Err() == nil {
		once.report("resolve "+lookupAddressFor, r.refresh(ctx))
		pause(ctx, lookupLeast)
		select {
		case <-ctx.Done():
		case <-r.hurried:
		case <-time.After(r.interval(time.Since(start)) - lookupLeast):
		}
	}
	return nil
}

// hurry has the name looked up soon: the peer does not answer where it was.
func (r *resolver) hurry() { notify(r.hurried) }

func (r *resolver) interval(sinceStart time.Duration) time.Duration {
	if sinceStart < lookupEarlyFor || !r.endpoint().IsValid() || r.down() {
		return lookupEarly
	}
	return lookupLater
}

// refresh looks the name up once. Of several addresses the one in use is kept
// as long as it is among them, so that a name that is answered in turn doesn't
// make the tunnel move.
func (r *resolver) refresh(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, lookupTimeout)
	defer cancel()
	found, err := r.lookup(ctx, "ip", r.host)
	if err != nil {
		return fmt.Errorf("%s, keeping %s: %w", r.host, r.text(), err)
	}
	for i := range found {
		found[i] = found[i].Unmap().WithZone("")
	}
	if len(found) == 0 {
		return fmt.Errorf("%s, keeping %s: the name has no address", r.host, r.text())
	}
	r.mu.Lock()
	was := r.addr
	if !slices.Contains(found, was) {
		r.addr = found[0] // the resolver has sorted them by reachability (RFC 6724)
	}
	is := r.addr
	r.mu.Unlock()
	if is != was {
		r.log.Info("endpoint of the peer", "name", r.host, "address", is, "was", was)
		notify(r.changed)
	}
	return nil
}

func (r *resolver) text() string {
	if e := r.endpoint(); e.IsValid() {
		return e.Addr().String()
	}
	return "nothing"
}
