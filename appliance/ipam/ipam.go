// Package ipam decides which addresses and numbers to hand out. It remembers
// nothing: every answer is a function of what is taken, so that what has been
// given is whatever the objects of the API say, and a crash loses nothing.
//
// Free ranges are always given lowest first, therefore the same question has
// the same answer whatever the order in which the taken ranges are listed.
package ipam

import (
	"crypto/sha256"
	"net/netip"
	"slices"
)

// DefaultPools returns the ranges that networks are remapped to: the private
// ones of RFC 1918, in the order in which they are tried.
func DefaultPools() []netip.Prefix {
	return []netip.Prefix{
		netip.MustParsePrefix("10.0.0.0/8"),
		netip.MustParsePrefix("192.168.0.0/16"),
		netip.MustParsePrefix("172.16.0.0/12"),
	}
}

// ULA returns the unique local IPv6 range (RFC 4193) of the cluster with this
// ID: fd00::/8, a global ID of 40 bits that is a hash of the cluster's ID, and
// 16 bits for networks. Two clusters have the same one by an accident of one
// in 10^12.
func ULA(clusterID string) netip.Prefix {
	sum := sha256.Sum256([]byte("isthmus ula/" + clusterID))
	a := [16]byte{0: 0xfd}
	copy(a[1:6], sum[:5])
	return netip.PrefixFrom(netip.AddrFrom16(a), 48)
}

// Remap returns the network by which a cluster may call a network want of
// another one: want itself if it overlaps nothing that is taken, else the
// lowest free network of the same size in the first of pools that has one.
// Pools of the other address family are passed over. It is false when all are
// full.
func Remap(want netip.Prefix, taken Set, pools []netip.Prefix) (netip.Prefix, bool) {
	if !want.IsValid() {
		return netip.Prefix{}, false
	}
	want = canonical(want)
	if !taken.Overlaps(want) {
		return want, true
	}
	for _, pool := range pools {
		if p, ok := taken.First(pool, want.Bits()); ok && p.Addr().Is4() == want.Addr().Is4() {
			return p, true
		}
	}
	return netip.Prefix{}, false
}

// Addresses returns the n lowest addresses of p that are not taken, except its
// first ones, which are skip and at least one, and its last one. There are fewer
// than n when p is full. However many are skipped, it takes a step per address
// that is taken or free.
func Addresses(n int, p netip.Prefix, skip int, taken map[netip.Addr]bool) []netip.Addr {
	if n <= 0 || !p.IsValid() {
		return nil
	}
	p = canonical(p)
	free := make([]netip.Addr, 0, n)
	last := Last(p)
	for a := after(p.Addr(), max(skip, 1)); a.IsValid() && a.Less(last) && len(free) < n; a = a.Next() {
		if !taken[a] {
			free = append(free, a)
		}
	}
	return free
}

// after returns the address that comes n after a, invalid where there is none.
func after(a netip.Addr, n int) netip.Addr {
	b, carry := a.AsSlice(), uint64(n)
	for i := len(b) - 1; i >= 0; i-- {
		carry += uint64(b[i])
		b[i], carry = byte(carry), carry>>8
	}
	if carry > 0 {
		return netip.Addr{}
	}
	sum, _ := netip.AddrFromSlice(b)
	return sum
}

// Usable reports whether [Addresses] could return a for p.
func Usable(p netip.Prefix, a netip.Addr) bool {
	if !p.IsValid() || !a.IsValid() {
		return false
	}
	p = canonical(p)
	return p.Contains(a) && a != p.Addr() && a != Last(p)
}

// Numbers returns the n lowest numbers in [from, to] that are not taken. There
// are fewer than n when the range is full.
func Numbers(n int, from, to uint32, taken map[uint32]bool) []uint32 {
	if n <= 0 {
		return nil
	}
	free := make([]uint32, 0, n)
	for i := uint64(from); i <= uint64(to) && len(free) < n; i++ {
		if !taken[uint32(i)] {
			free = append(free, uint32(i))
		}
	}
	return free
}

// Translate returns the address of to that stands for a, an address of from:
// the bits of the network are replaced, those of the host stay. It is false if
// a is not in from, or the two networks are not of one size and family.
func Translate(a netip.Addr, from, to netip.Prefix) (netip.Addr, bool) {
	if !from.IsValid() || !to.IsValid() || !from.Contains(a) ||
		from.Bits() != to.Bits() || from.Addr().BitLen() != to.Addr().BitLen() {
		return netip.Addr{}, false
	}
	host, network := a.AsSlice(), to.Addr().AsSlice()
	for i := range host {
		keep := byte(0xff) // bits of this byte that belong to the network
		if bits := from.Bits() - 8*i; bits <= 0 {
			keep = 0
		} else if bits < 8 {
			keep = ^byte(0xff >> bits)
		}
		host[i] = network[i]&keep | host[i]&^keep
	}
	t, ok := netip.AddrFromSlice(host)
	return t, ok
}

// Last returns the last address of p.
func Last(p netip.Prefix) netip.Addr {
	a := p.Addr().AsSlice()
	for i := range a {
		if bits := p.Bits() - 8*i; bits <= 0 {
			a[i] = 0xff
		} else if bits < 8 {
			a[i] |= 0xff >> bits
		}
	}
	last, _ := netip.AddrFromSlice(a)
	return last
}

// canonical returns p without host bits, and as IPv4 if it is a range of
// IPv4-mapped IPv6 addresses.
func canonical(p netip.Prefix) netip.Prefix {
	if a := p.Addr(); a.Is4In6() && p.Bits() >= 96 {
		p = netip.PrefixFrom(a.Unmap(), p.Bits()-96)
	}
	return p.Masked()
}

// An interval is an inclusive range of addresses of one family.
type interval struct{ from, to netip.Addr }

// A Set is a set of addresses. The zero value is empty.
type Set struct {
	// sorted, neither overlapping nor touching; IPv4 before IPv6, as
	// netip.Addr compares.
	intervals []interval
}

// NewSet returns the addresses of all prefixes. Invalid ones are passed over.
func NewSet(prefixes ...netip.Prefix) Set {
	all := make([]interval, 0, len(prefixes))
	for _, p := range prefixes {
		if p.IsValid() {
			p = canonical(p)
			all = append(all, interval{p.Addr(), Last(p)})
		}
	}
	slices.SortFunc(all, func(a, b interval) int { return a.from.Compare(b.from) })
	return Set{merge(all)}
}

// merge joins sorted intervals that overlap or touch, in place.
func merge(sorted []interval) []interval {
	out := sorted[:0]
	for _, iv := range sorted {
		if n := len(out); n > 0 && joins(out[n-1], iv) {
			if out[n-1].to.Less(iv.to) {
				out[n-1].to = iv.to
			}
			continue
		}
		out = append(out, iv)
	}
	return out
}

// joins reports whether b, which does not begin before a, overlaps or touches
// a.
func joins(a, b interval) bool {
	if a.to.BitLen() != b.from.BitLen() {
		return false
	}
	return !a.to.Less(b.from) || a.to.Next() == b.from
}

// Add adds the addresses of p to s.
func (s *Set) Add(p netip.Prefix) {
	if !p.IsValid() {
		return
	}
	p = canonical(p)
	iv := interval{p.Addr(), Last(p)}
	i := s.search(iv.from)
	if i > 0 && joins(s.intervals[i-1], iv) {
		i--
	}
	j := i // intervals i to j become one with iv
	for ; j < len(s.intervals); j++ {
		next := s.intervals[j]
		if next.from.Less(iv.from) {
			iv.from = next.from
		} else if !joins(iv, next) {
			break
		}
		if iv.to.Less(next.to) {
			iv.to = next.to
		}
	}
	s.intervals = slices.Replace(s.intervals, i, j, iv)
}

// search returns the index of the first interval that ends at a or later.
func (s Set) search(a netip.Addr) int {
	i, _ := slices.BinarySearchFunc(s.intervals, a, func(iv interval, a netip.Addr) int {
		if iv.to.Less(a) {
			return -1
		}
		return 1
	})
	return i
}

// Overlaps reports whether s has an address of p.
func (s Set) Overlaps(p netip.Prefix) bool {
	if !p.IsValid() {
		return false
	}
	p = canonical(p)
	_, taken := s.overlap(p)
	return taken
}

// overlap returns the first interval of s that has an address of p.
func (s Set) overlap(p netip.Prefix) (interval, bool) {
	i := s.search(p.Addr())
	if i == len(s.intervals) || Last(p).Less(s.intervals[i].from) {
		return interval{}, false
	}
	return s.intervals[i], true
}

// Contains reports whether a is in s.
func (s Set) Contains(a netip.Addr) bool {
	return a.IsValid() && s.Overlaps(netip.PrefixFrom(a, a.BitLen()))
}

// First returns the lowest network of this prefix length in pool of which s
// has no address. It takes a step per interval of s in the pool, not per
// candidate.
func (s Set) First(pool netip.Prefix, bits int) (netip.Prefix, bool) {
	if !pool.IsValid() {
		return netip.Prefix{}, false
	}
	pool = canonical(pool)
	if bits < pool.Bits() || bits > pool.Addr().BitLen() {
		return netip.Prefix{}, false
	}
	p := netip.PrefixFrom(pool.Addr(), bits)
	for {
		taken, overlaps := s.overlap(p)
		if !overlaps {
			return p, true
		}
		// Go on after the network that the interval ends in.
		next := Last(netip.PrefixFrom(taken.to, bits).Masked()).Next()
		if !next.IsValid() || !pool.Contains(next) {
			return netip.Prefix{}, false
		}
		p = netip.PrefixFrom(next, bits)
	}
}
