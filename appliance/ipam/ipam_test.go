package ipam_test

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"gotest.tools/v3/assert"
	"gotest.tools/v3/assert/cmp"

	"github.com/isthmus-net/isthmus/appliance/ipam"
)

func prefixes(list ...string) []netip.Prefix {
	var out []netip.Prefix
	for _, s := range list {
		out = append(out, netip.MustParsePrefix(s))
	}
	return out
}

func TestRemap(t *testing.T) {
	pools := append(ipam.DefaultPools(), netip.MustParsePrefix("fd00:1::/48"))
	for _, test := range []struct {
		name  string
		want  string
		taken []netip.Prefix
		pools []netip.Prefix
		get   string // empty: full
	}{
		{name: "free", want: "10.1.0.0/16", taken: prefixes("10.0.0.0/16", "10.2.0.0/16"), get: "10.1.0.0/16"},
		{name: "free and outside the pools", want: "100.64.0.0/10", get: "100.64.0.0/10"},
		{name: "host bits", want: "10.1.2.3/16", get: "10.1.0.0/16"},
		{name: "taken", want: "10.0.0.0/16", taken: prefixes("10.0.0.0/16"), get: "10.1.0.0/16"},
		{name: "taken in part", want: "10.0.0.0/16", taken: prefixes("10.0.200.0/24"), get: "10.1.0.0/16"},
		{name: "inside a taken one", want: "10.3.0.0/24", taken: prefixes("10.0.0.0/14"), get: "10.4.0.0/24"},
		{name: "outside the pools and taken", want: "100.64.0.0/16", taken: prefixes("100.64.0.0/10"), get: "10.0.0.0/16"},
		{name: "a hole too small is passed over", want: "10.0.0.0/16", taken: prefixes("10.0.0.0/17", "10.1.128.0/17"), get: "10.2.0.0/16"},
		{name: "a single address", want: "10.0.0.0/32", taken: prefixes("10.0.0.0/31"), get: "10.0.0.2/32"},
		{name: "next pool", want: "10.0.0.0/16", taken: prefixes("10.0.0.0/8"), get: "192.168.0.0/16"},
		{name: "third pool", want: "10.0.0.0/16", taken: prefixes("10.0.0.0/8", "192.168.7.0/24"), get: "172.16.0.0/16"},
		{name: "last hole", want: "10.0.0.0/16", taken: prefixes("10.0.0.0/9", "10.128.0.0/10", "10.192.0.0/11", "10.224.0.0/12", "10.240.0.0/13", "10.248.0.0/14", "10.252.0.0/15", "10.254.0.0/16"), get: "10.255.0.0/16"},
		{name: "full", want: "10.0.0.0/16", taken: prefixes("10.0.0.0/8", "192.168.0.0/16", "172.16.0.0/12"), get: ""},
		{name: "larger than every pool", want: "10.0.0.0/7", taken: prefixes("10.0.0.0/8"), get: ""},
		{name: "no pools", want: "10.0.0.0/8", taken: prefixes("10.0.0.0/8"), pools: prefixes(), get: ""},
		{name: "end of the address space", want: "255.255.255.0/24", taken: prefixes("255.255.255.0/24"), pools: prefixes("255.255.255.0/24"), get: ""},
		{name: "IPv6", want: "2001:db8::/64", taken: prefixes("2001:db8::/32", "10.0.0.0/8"), get: "fd00:1::/64"},
		{name: "IPv6, second", want: "fd00:1::/64", taken: prefixes("fd00:1::/64"), get: "fd00:1:0:1::/64"},
		{name: "IPv6 in an IPv4 pool", want: "2001:db8::/64", taken: prefixes("2001:db8::/64"), pools: prefixes("10.0.0.0/8"), get: ""},
		{name: "IPv4 in an IPv6 pool", want: "10.0.0.0/16", taken: prefixes("10.0.0.0/16"), pools: prefixes("fd00::/8"), get: ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			p := pools
			if test.pools != nil {
				p = test.pools
			}
			got, ok := ipam.Remap(netip.MustParsePrefix(test.want), ipam.NewSet(test.taken...), p)
			assert.Equal(t, ok, test.get != "")
			if ok {
				assert.Equal(t, got.String(), test.get)
			}
		})
	}
}

// randomPrefix returns a network in the pools or outside of them.
func randomPrefix(r *rand.Rand) netip.Prefix {
	if r.IntN(4) == 0 {
		a := [16]byte{0xfd, 0, 0, 1}
		binary.BigEndian.PutUint32(a[6:], r.Uint32()&0x0003ffff)
		return netip.PrefixFrom(netip.AddrFrom16(a), 48+r.IntN(40)).Masked()
	}
	var a [4]byte
	binary.BigEndian.PutUint32(a[:], 0x0a000000|r.Uint32()&0x00ffffff)
	if r.IntN(5) == 0 {
		a[0] = 100
	}
	return netip.PrefixFrom(netip.AddrFrom4(a), 12+r.IntN(21)).Masked()
}

// What is given never overlaps anything that was there, is the same when asked
// again, does not depend on the order of what is taken, and is as large as
// what was wanted.
func TestRemapRandomWalk(t *testing.T) {
	pools := append(ipam.DefaultPools(), netip.MustParsePrefix("fd00:1::/48"))
	for seed := range uint64(60) {
		r := rand.New(rand.NewPCG(seed, 1))
		var taken []netip.Prefix
		var set ipam.Set
		for range 60 {
			switch {
			case len(taken) > 0 && r.IntN(4) == 0: // one is given back
				taken = slices.Delete(taken, 0, 1)
				set = ipam.NewSet(taken...)
			default:
				want := randomPrefix(r)
				got, ok := ipam.Remap(want, set, pools)
				shuffled := slices.Clone(taken)
				r.Shuffle(len(shuffled), func(i, j int) { shuffled[i], shuffled[j] = shuffled[j], shuffled[i] })
				again, okAgain := ipam.Remap(want, ipam.NewSet(shuffled...), pools)
				assert.Equal(t, ok, okAgain, "seed %d want %v", seed, want)
				assert.Equal(t, got, again, "seed %d want %v", seed, want)
				if !ok {
					continue
				}
				assert.Equal(t, got.Bits(), want.Bits())
				for _, p := range taken {
					assert.Assert(t, !p.Overlaps(got), "seed %d: %v given for %v overlaps %v", seed, got, want, p)
				}
				if got != want {
					assert.Assert(t, set.Overlaps(want), "seed %d: %v remapped to %v without need", seed, want, got)
				}
				taken = append(taken, got)
				set.Add(got)
				assert.DeepEqual(t, fmt.Sprint(set), fmt.Sprint(ipam.NewSet(taken...)))
			}
		}
	}
}

// A Set says of every address what a list of prefixes says.
func TestSetAgainstList(t *testing.T) {
	for seed := range uint64(200) {
		r := rand.New(rand.NewPCG(seed, 2))
		var list []netip.Prefix
		var set ipam.Set
		for range 1 + r.IntN(12) {
			p := netip.PrefixFrom(netip.AddrFrom4([4]byte{0, 0, 0, byte(r.IntN(256))}), 24+r.IntN(9)).Masked()
			list = append(list, p)
			set.Add(p)
		}
		for i := range 256 {
			a := netip.AddrFrom4([4]byte{0, 0, 0, byte(i)})
			in := slices.ContainsFunc(list, func(p netip.Prefix) bool { return p.Contains(a) })
			assert.Equal(t, set.Contains(a), in, "seed %d: %v in %v", seed, a, list)
			for bits := 24; bits <= 32; bits++ {
				p := netip.PrefixFrom(a, bits)
				over := slices.ContainsFunc(list, func(q netip.Prefix) bool { return q.Overlaps(p) })
				assert.Equal(t, set.Overlaps(p), over, "seed %d: %v, %v", seed, p, list)
			}
		}
	}
}

// First is the lowest free network there is.
func TestFirstIsLowest(t *testing.T) {
	pool := netip.MustParsePrefix("10.0.0.0/24")
	for seed := range uint64(200) {
		r := rand.New(rand.NewPCG(seed, 3))
		var list []netip.Prefix
		for range r.IntN(20) {
			list = append(list, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(r.IntN(256))}), 26+r.IntN(7)).Masked())
		}
		bits := 25 + r.IntN(8)
		var want netip.Prefix
		for i := 0; i < 256; i += 1 << (32 - bits) {
			p := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}), bits)
			if !slices.ContainsFunc(list, p.Overlaps) {
				want = p
				break
			}
		}
		got, ok := ipam.NewSet(list...).First(pool, bits)
		assert.Equal(t, ok, want.IsValid(), "seed %d", seed)
		assert.Equal(t, got, want, "seed %d: %v", seed, list)
	}
}

func TestAddresses(t *testing.T) {
	taken := func(list ...string) map[netip.Addr]bool {
		m := map[netip.Addr]bool{}
		for _, s := range list {
			m[netip.MustParseAddr(s)] = true
		}
		return m
	}
	for _, test := range []struct {
		name, prefix string
		n, skip      int
		taken        map[netip.Addr]bool
		want         string
	}{
		{"not the first", "10.80.0.0/16", 2, 0, nil, "[10.80.0.1 10.80.0.2]"},
		{"not the last", "10.80.0.0/30", 9, 0, nil, "[10.80.0.1 10.80.0.2]"},
		{"holes first", "10.80.0.0/29", 3, 0, taken("10.80.0.1", "10.80.0.3"), "[10.80.0.2 10.80.0.4 10.80.0.5]"},
		{"full", "10.80.0.0/30", 1, 0, taken("10.80.0.1", "10.80.0.2"), "[]"},
		{"too small", "10.80.0.0/31", 1, 0, nil, "[]"},
		{"end of the address space", "255.255.255.252/30", 9, 0, nil, "[255.255.255.253 255.255.255.254]"},
		{"IPv6", "fd00::/112", 1, 0, taken("fd00::1"), "[fd00::2]"},
		{"not those that are skipped", "10.80.0.0/16", 2, 300, taken("10.80.1.44"), "[10.80.1.45 10.80.1.46]"},
		{"the first is among those that are skipped", "10.80.0.0/16", 1, 1, nil, "[10.80.0.1]"},
		{"nearly all skipped", "10.80.0.0/29", 9, 6, nil, "[10.80.0.6]"},
		{"all skipped", "10.80.0.0/29", 9, 8, nil, "[]"},
		{"more skipped than there are", "255.255.255.0/24", 9, 1<<31 - 1, nil, "[]"},
		{"millions skipped", "10.0.0.0/8", 1, 1<<24 - 3, nil, "[10.255.255.253]"},
		{"millions of IPv6 skipped", "fd00::/64", 1, 1<<31 - 1, nil, "[fd00::7fff:ffff]"},
		{"end of IPv6", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ff00/120", 1, 1 << 20, nil, "[]"},
		{"none wanted", "10.80.0.0/16", 0, 0, nil, "[]"},
	} {
		t.Run(test.name, func(t *testing.T) {
			got := ipam.Addresses(test.n, netip.MustParsePrefix(test.prefix), test.skip, test.taken)
			assert.Equal(t, fmt.Sprint(got), test.want)
			for _, a := range got {
				assert.Assert(t, ipam.Usable(netip.MustParsePrefix(test.prefix), a))
			}
		})
	}
	p := netip.MustParsePrefix("10.80.0.0/16")
	for _, a := range []string{"10.80.0.0", "10.80.255.255", "10.81.0.1"} {
		assert.Assert(t, !ipam.Usable(p, netip.MustParseAddr(a)), a)
	}
}

func TestNumbers(t *testing.T) {
	assert.DeepEqual(t, ipam.Numbers(3, 1, 100, map[uint32]bool{1: true, 3: true}), []uint32{2, 4, 5})
	assert.DeepEqual(t, ipam.Numbers(3, 1, 2, nil), []uint32{1, 2})
	assert.DeepEqual(t, ipam.Numbers(3, 1<<32-2, 1<<32-1, nil), []uint32{1<<32 - 2, 1<<32 - 1})
	assert.Assert(t, cmp.Len(ipam.Numbers(0, 1, 2, nil), 0))
}

func TestTranslate(t *testing.T) {
	for _, test := range []struct{ addr, from, to, want string }{
		{"10.0.0.6", "10.0.0.0/16", "11.0.0.0/16", "11.0.0.6"},
		{"10.127.70.9", "10.127.64.0/18", "10.127.128.0/18", "10.127.134.9"},
		{"10.0.0.5", "10.0.0.4/31", "10.0.0.8/31", "10.0.0.9"},
		{"10.0.0.5", "10.0.0.5/32", "1.2.3.4/32", "1.2.3.4"},
		{"10.0.0.5", "0.0.0.0/0", "0.0.0.0/0", "10.0.0.5"},
		{"fd00::1:2:3", "fd00::/60", "fd00:1:2:30::/60", "fd00:1:2:30:0:1:2:3"},
		{"10.1.0.6", "10.0.0.0/16", "11.0.0.0/16", ""},
		{"10.0.0.6", "10.0.0.0/16", "11.0.0.0/17", ""},
		{"10.0.0.6", "10.0.0.0/16", "fd00::/16", ""},
	} {
		got, ok := ipam.Translate(netip.MustParseAddr(test.addr), netip.MustParsePrefix(test.from), netip.MustParsePrefix(test.to))
		assert.Equal(t, ok, test.want != "", "%v", test)
		if ok {
			assert.Equal(t, got.String(), test.want)
		}
	}
}

// There and back is the identity, and no two addresses become one.
func FuzzTranslate(f *testing.F) {
	f.Add(uint32(0x0a000006), uint32(0x0a000000), uint32(0x0b000000), uint8(16))
	f.Add(uint32(0x0a000006), uint32(0x0a000001), uint32(0xffffffff), uint8(31))
	f.Fuzz(func(t *testing.T, addr, from, to uint32, bits uint8) {
		four := func(n uint32) netip.Addr {
			return netip.AddrFrom4([4]byte{byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)})
		}
		b := int(bits) % 33
		p, q := netip.PrefixFrom(four(from), b), netip.PrefixFrom(four(to), b)
		a, ok := ipam.Translate(four(addr), p, q)
		assert.Equal(t, ok, p.Contains(four(addr)))
		if !ok {
			return
		}
		assert.Assert(t, q.Contains(a))
		back, ok := ipam.Translate(a, q, p)
		assert.Assert(t, ok)
		assert.Equal(t, back, four(addr))
	})
}

func TestULA(t *testing.T) {
	milan, rome := ipam.ULA("milan"), ipam.ULA("rome")
	assert.Equal(t, milan.Bits(), 48)
	assert.Assert(t, netip.MustParsePrefix("fd00::/8").Overlaps(milan))
	assert.Assert(t, milan != rome)
	assert.Equal(t, milan, milan.Masked())
	assert.Equal(t, milan, ipam.ULA("milan"))
}

func BenchmarkRemap(b *testing.B) {
	r := rand.New(rand.NewPCG(1, 4))
	var list []netip.Prefix
	for range 5000 {
		a := [4]byte{10, byte(r.IntN(256)), byte(r.IntN(256)), 0}
		list = append(list, netip.PrefixFrom(netip.AddrFrom4(a), 24))
	}
	set := ipam.NewSet(list...)
	want := netip.MustParsePrefix("10.0.0.0/18")
	b.ReportAllocs()
	for b.Loop() {
		ipam.Remap(want, set, ipam.DefaultPools())
	}
}
