package load_test

import (
	"context"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/appliance/nettest"
	"github.com/isthmus-net/isthmus/lab/internal/load"
)

func TestMain(m *testing.M) { os.Exit(nettest.Main(m)) }

// inner marks the process that is as a whole in a namespace of its own: both
// ends open sockets on threads that the runtime picks.
const inner = "LOAD_TEST_INNER"

// TestLoopback measures over the loopback of an empty namespace.
func TestLoopback(t *testing.T) {
	if os.Getenv(inner) == "" {
		ns := nettest.NewNS(t)
		ns.Run("ip", "link", "set", "lo", "up")
		t.Setenv(inner, "1")
		t.Log(ns.Run("/proc/self/exe", "-test.run=^TestLoopback$", "-test.v"))
		return
	}
	for _, host := range []string{"127.0.0.1", "::1"} {
		t.Run(host, func(t *testing.T) {
			to := serve(t, host)
			for _, tt := range []struct {
				name string
				m    load.Measurement
				want func(load.Result) bool
			}{
				{"one stream", load.Measurement{Kind: load.Throughput}, func(r load.Result) bool { return r.Bytes > 0 && r.Streams == 1 }},
				{"after long packets", load.Measurement{Kind: load.Throughput, LongFirst: true}, func(r load.Result) bool { return r.Bytes > 0 && r.LongFirst }},
				{"four streams", load.Measurement{Kind: load.Throughput, Streams: 4}, func(r load.Result) bool { return r.Bytes > 0 && r.Streams == 4 }},
				{"small packets", load.Measurement{Kind: load.Packets}, func(r load.Result) bool { return r.Packets > 0 && r.Packets < r.Sent }},
				{"connections", load.Measurement{Kind: load.Connections}, func(r load.Result) bool { return r.Count > 0 && r.Streams == 4 }},
				{"connections that take longer than the time", load.Measurement{Kind: load.Connections, Duration: 1}, func(r load.Result) bool { return r.Count == 4 && r.Elapsed > 1 }},
				{"latency", load.Measurement{Kind: load.Latency}, func(r load.Result) bool { return r.Count > 0 && r.Median > 0 && r.P99 >= r.Median }},
			} {
				t.Run(tt.name, func(t *testing.T) {
					tt.m.To = to
					if tt.m.Duration == 0 {
						tt.m.Duration = 30 * time.Millisecond
					}
					got, err := load.Measure(t.Context(), tt.m)
					assert.NilError(t, err)
					assert.Equal(t, got.Kind, tt.m.Kind)
					assert.Assert(t, got.Elapsed > 0 && tt.want(got), "%+v", got)
				})
			}
		})
	}
}

// serve starts a server on a free port of an address.
func serve(t *testing.T, host string) netip.AddrPort {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ready := make(chan netip.AddrPort, 1)
	done := make(chan error, 1)
	go func() {
		done <- load.Serve(ctx, net.JoinHostPort(host, "0"), slog.New(slog.DiscardHandler), func(a netip.AddrPort) { ready <- a })
	}()
	select {
	case a := <-ready:
		t.Cleanup(func() {
			cancel()
			assert.NilError(t, <-done)
		})
		return a
	case err := <-done:
		cancel()
		if host == "::1" {
			nettest.SkipOrFail(t, "IPv6", err)
		}
		t.Fatal(err)
		return netip.AddrPort{}
	}
}

// TestMeasureRefuses: what can't be measured is an error that says whose.
func TestMeasureRefuses(t *testing.T) {
	silent := netip.MustParseAddrPort("127.0.0.1:1")
	for _, tt := range []struct {
		name string
		m    load.Measurement
		want string
	}{
		{"no address", load.Measurement{Kind: load.Latency}, "the address to measure to is missing"},
		{"no kind", load.Measurement{To: silent}, `unknown kind "": one of [throughput packets connections latency]`},
		{"packets in streams", load.Measurement{Kind: load.Packets, To: silent, Streams: 4}, "packets is measured with one stream, not 4"},
		{"time that runs backwards", load.Measurement{Kind: load.Latency, To: silent, Duration: -1}, "neither can be negative"},
		{"nobody there", load.Measurement{Kind: load.Throughput, To: silent}, "load: throughput to 127.0.0.1:1: dial tcp 127.0.0.1:1: connect: connection refused"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := load.Measure(t.Context(), tt.m)
			assert.ErrorContains(t, err, tt.want)
		})
	}
}

func TestServePortInUse(t *testing.T) {
	to := serve(t, "127.0.0.1")
	err := load.Serve(t.Context(), to.String(), slog.New(slog.DiscardHandler), func(netip.AddrPort) {})
	assert.ErrorContains(t, err, "is in use; stop what listens there")
}
