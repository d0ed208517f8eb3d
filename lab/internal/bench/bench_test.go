package bench

import (
	"math"
	"strings"
	"testing"
	"time"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/lab/internal/load"
	"github.com/isthmus-net/isthmus/lab/internal/report"
)

func TestValues(t *testing.T) {
	for _, tt := range []struct {
		name string
		in   load.Result
		want map[Metric]float64
	}{
		{"bits, not bytes", load.Result{Kind: load.Throughput, Streams: 1, Bytes: 1000, Elapsed: 2 * time.Second}, map[Metric]float64{Throughput: 4000}},
		{"four streams are a metric of their own", load.Result{Kind: load.Throughput, Streams: 4, Bytes: 1, Elapsed: time.Second}, map[Metric]float64{Throughput4: 8}},
		{"after a long packet is one, too", load.Result{Kind: load.Throughput, Streams: 1, Bytes: 1, Elapsed: time.Second, LongFirst: true}, map[Metric]float64{ThroughputLong: 8}},
		{"received, not sent", load.Result{Kind: load.Packets, Streams: 1, Packets: 300, Sent: 900, Elapsed: time.Second / 2}, map[Metric]float64{Packets: 600}},
		{"connections", load.Result{Kind: load.Connections, Streams: 4, Count: 50, Elapsed: time.Second / 4}, map[Metric]float64{Connections: 200}},
		{"two of one measurement", load.Result{Kind: load.Latency, Count: 9, Elapsed: time.Second, Median: time.Millisecond, P99: time.Second / 2},
			map[Metric]float64{Latency: 0.001, LatencyP99: 0.5}},
		{"no time", load.Result{Kind: load.Packets, Packets: 3}, map[Metric]float64{Packets: 0}},
	} {
		t.Run(tt.name, func(t *testing.T) { assert.DeepEqual(t, values(tt.in), tt.want) })
	}
}

func TestSpread(t *testing.T) {
	for _, tt := range []struct {
		in   []float64
		want Spread
	}{
		{[]float64{3}, Spread{3, 3, 3}},
		{[]float64{9, 1}, Spread{5, 1, 9}},
		{[]float64{9, 1, 2}, Spread{2, 1, 9}},
		{[]float64{4, 1, 2, 9}, Spread{3, 1, 9}},
		{[]float64{5, 4, 1000, 2, 1}, Spread{4, 1, 1000}}, // one that is far off does not count
	} {
		in := append([]float64(nil), tt.in...)
		assert.Equal(t, spreadOf(in), tt.want)
		assert.DeepEqual(t, in, tt.in) // pairs keep their order
	}
}

// TestSummarize: ratios are of numbers of the same pair. Here the machine gets
// faster all the time, and the ratio stays.
func TestSummarize(t *testing.T) {
	s := Samples{
		Throughput: {PodToPod: {1, 10, 100}, Tunnel: {2, 20, 200}, Underlay: {4, 40, 500}},
		Latency:    {PodToPod: {3, 3, 3}, Tunnel: {2, 1, 3}, Underlay: {1, 1, 1}},
	}
	rows, err := Summarize(s, 3)
	assert.NilError(t, err)
	assert.DeepEqual(t, rows, []Row{
		{Metric: Throughput, Unit: "bit/s", Paths: map[Path]Spread{PodToPod: {10, 1, 100}, Tunnel: {20, 2, 200}, Underlay: {40, 4, 500}},
			ToTunnel: Spread{0.5, 0.5, 0.5}, ToUnderlay: Spread{0.25, 0.2, 0.25}},
		{Metric: Latency, Unit: "s", LowerIsBetter: true, Paths: map[Path]Spread{PodToPod: {3, 3, 3}, Tunnel: {2, 1, 3}, Underlay: {1, 1, 1}},
			ToTunnel: Spread{1.5, 1, 3}, ToUnderlay: Spread{3, 3, 3}},
	})

	_, err = Summarize(s, 4)
	assert.ErrorContains(t, err, "throughput, pod→pod: 3 values of 4 pairs")
	s[Latency][Tunnel][1] = 0
	_, err = Summarize(s, 3)
	assert.ErrorContains(t, err, "latency, median, bare tunnel: pair 2 measured nothing; measure longer (--duration)")
	delete(s[Throughput], Underlay)
	_, err = Summarize(s, 3)
	assert.ErrorContains(t, err, "throughput, underlay: 0 values of 3 pairs")
}

func TestQuantity(t *testing.T) {
	for _, tt := range []struct {
		v    float64
		unit string
		want string
	}{
		{1.234e9, "bit/s", "1.23 Gbit/s"},
		{18.04e9, "bit/s", "18.0 Gbit/s"},
		{170e6, "bit/s", "170 Mbit/s"},
		{999.6e6, "bit/s", "1.00 Gbit/s"},
		{99.96e6, "bit/s", "100 Mbit/s"},
		{9.996e6, "bit/s", "10.0 Mbit/s"},
		{123456, "/s", "123 k/s"},
		{7, "/s", "7.00 /s"},
		{45.6e-6, "s", "45.6 µs"},
		{0.0012, "s", "1.20 ms"},
		{3e-9, "s", "3.00 ns"},
	} {
		assert.Equal(t, quantity(tt.v, tt.unit), tt.want)
	}
	for v, want := range map[float64]string{0.0123: "0.012", 0.5: "0.50", 0.996: "1.00", 1.5: "1.50", 12.34: "12.3", 250: "250", math.Pi: "3.14"} {
		assert.Equal(t, digits(v), want)
	}
}

func TestTable(t *testing.T) {
	r := Result{
		Combination: Combination{"native", "vxlan", "userspace"}, Pairs: 5, Duration: report.Duration(time.Second),
		Ends: map[Path]string{PodToPod: "rome/web → milan/probe (10.0.0.5)", Tunnel: "rome/gateway → milan/gateway (169.254.18.1)", Underlay: "rome/node-2 → milan/node-1 (172.18.1.11)"},
		Rows: []Row{
			{Metric: Throughput, Unit: "bit/s", Paths: map[Path]Spread{PodToPod: {Median: 1.9e9}, Tunnel: {Median: 2e9}, Underlay: {Median: 20e9}},
				ToTunnel: Spread{0.95, 0.91, 1.02}, ToUnderlay: Spread{0.095, 0.09, 0.1}},
			{Metric: LatencyP99, Unit: "s", LowerIsBetter: true, Paths: map[Path]Spread{PodToPod: {Median: 3e-4}, Tunnel: {Median: 2e-4}, Underlay: {Median: 2e-5}},
				ToTunnel: Spread{1.5, 1.4, 1.6}, ToUnderlay: Spread{15, 14, 120}},
		},
	}
	var b strings.Builder
	r.Write(&b)
	Result{Combination: Combination{"vm", "geneve", "kernel"}, Error: "the lab failed"}.Write(&b)
	Report{Results: []Result{r, {Combination: Combination{"native", "geneve", "kernel"}, NotRun: "this kernel has no geneve and no wireguard"}}}.Write(&b)
	assert.Equal(t, b.String(), `
native world, vxlan, WireGuard in user space
  5 interleaved pairs of 1.0s each: medians; for ratios median (smallest–largest)
  pod→pod      rome/web → milan/probe (10.0.0.5)
  bare tunnel  rome/gateway → milan/gateway (169.254.18.1)
  underlay     rome/node-2 → milan/node-1 (172.18.1.11)
                       pod→pod   bare tunnel      underlay     to bare tunnel          to underlay
  throughput       1.90 Gbit/s   2.00 Gbit/s   20.0 Gbit/s   0.95 (0.91–1.02)   0.095 (0.090–0.10)
  latency, p99 ↓        300 µs        200 µs       20.0 µs   1.50 (1.40–1.60)      15.0 (14.0–120)

vm world, geneve, WireGuard in the kernel
  failed: the lab failed

↓: lower is better. Small packets: 64-byte frames, at most 256 on the way, counted where they arrive. Connections: four at a time.
Compare ratios, of one world; the numbers are this machine's. The lab's captures were paused.
not run: native world, geneve, WireGuard in the kernel: this kernel has no geneve and no wireguard
`)
}

// TestTunnelEnd: what ip(8) says of the tunnel's interface.
func TestTunnelEnd(t *testing.T) {
	link := func(kind, addrs string) string {
		return `[{"ifname":"liqo-tunnel","link_type":"none","linkinfo":{"info_kind":"` + kind + `"},"addr_info":[` + addrs + `]}]`
	}
	const own = `{"family":"inet","local":"169.254.18.1","prefixlen":30,"scope":"global"},{"family":"inet6","local":"fe80::1","prefixlen":64}`
	for _, tt := range []struct {
		name, in, implementation, err string
	}{
		{"kernel", link("wireguard", own), "kernel", ""},
		{"user space", link("tun", own), "userspace", ""},
		{"an empty object for each other link", strings.Replace(link("tun", own), "[", "[{},", 1), "userspace", ""},
		{"something else", link("veth", own), "", `it is of kind "veth", neither wireguard nor tun`},
		{"no address", link("tun", ""), "", "no such interface with an IPv4 address"},
		{"nothing", "[]", "", "no such interface with an IPv4 address"},
		{"an error message", "Device does not exist", "", "output of ip"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := parseTunnelEnd([]byte(tt.in))
			if tt.err != "" {
				assert.ErrorContains(t, err, tt.err)
				return
			}
			assert.NilError(t, err)
			assert.Equal(t, got.Implementation, tt.implementation)
			assert.Equal(t, got.Addr.String(), "169.254.18.1")
		})
	}
}
