package kernel

import (
	"net/netip"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"

	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// reg1Second is the second 32-bit word of register 1, NFT_REG32_01: where a
// lookup that fills register 1 leaves the upper of two IPv4 addresses. Of two
// IPv6 addresses it is register 2.
const reg1Second = 9

// mapped is NAT with a map:
//
//	dnat ip to ip daddr map { 10.70.0.7 : 192.168.40.10, … }
//	dnat ip prefix to ip daddr map { 10.71.1.0/24 : 10.1.1.0/24, … }
//	ip daddr { 192.168.40.10, … } masquerade
func (c *compiler) mapped(a netstate.Action) error {
	m := a.Map
	is6 := m.Entries[0].Addr.From.Is6()
	c.ip(is6)
	address := nftables.TypeIPAddr
	if is6 {
		address = nftables.TypeIP6Addr
	}
	set := nftables.Set{KeyType: address, Interval: a.Prefix || m.Intervals()}
	if a.Kind != netstate.Masquerade {
		set.IsMap, set.DataType = true, address
	}
	if a.Prefix { // the value is the first address and the last
		set.DataType.Bytes *= 2
	}
	s, err := c.addSet(set, mapElements(m, set.Interval, a.Prefix))
	if err != nil {
		return err
	}
	lookup := &expr.Lookup{SourceRegister: reg1, SetName: s.Name, SetID: s.ID}
	c.emit(addressPayload(is6, m.Dir == "src"), lookup)
	if a.Kind == netstate.Masquerade {
		c.emit(&expr.Masq{})
		return nil
	}
	lookup.IsDestRegSet, lookup.DestRegister = true, reg1
	n := natOf(a.Kind, is6)
	if a.Prefix {
		n.Prefix, n.RegAddrMax = true, reg1Second
		if is6 {
			n.RegAddrMax = reg2
		}
	}
	c.emit(n)
	return nil
}

// mapElements returns the elements of a map. Where they are intervals, each
// begins with an element that has the value, and ends where the next one
// begins, or with an element that has none; nft(8) lets the first of these be
// at zero.
func mapElements(m netstate.AddrMap, intervals, prefix bool) []nftables.SetElement {
	out := make([]nftables.SetElement, 0, len(m.Entries))
	next := netip.IPv4Unspecified() // address behind the last interval; invalid: there is none
	if m.Entries[0].Addr.From.Is6() {
		next = netip.IPv6Unspecified()
	}
	end := func() { out = append(out, nftables.SetElement{Key: next.AsSlice(), IntervalEnd: true}) }
	for _, e := range m.Entries {
		if intervals && next != e.Addr.From {
			end()
		}
		element := nftables.SetElement{Key: e.Addr.From.AsSlice(), Comment: e.Name}
		switch {
		case !e.To.IsValid():
		case prefix:
			to := netstate.RangeOf(e.To)
			element.Val = append(to.From.AsSlice(), to.To.AsSlice()...)
		default:
			element.Val = e.To.Addr().AsSlice()
		}
		out = append(out, element)
		next = e.Addr.To.Next()
	}
	if intervals && next.IsValid() {
		end()
	}
	return out
}
