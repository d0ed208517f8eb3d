package kernel

import (
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// reg1Second is the second 32-bit word of register 1, NFT_REG32_01: where a
// lookup that fills register 1 leaves the upper of two IPv4 addresses. Of two
// IPv6 addresses it is register 2.
const reg1Second = 9

// mapped is an action with a map:
//
//	dnat ip to ip daddr map { 10.70.0.7 : 192.168.40.10, … }
//	dnat ip prefix to ip daddr map { 10.71.1.0/24 : 10.1.1.0/24, … }
//	ip daddr { 192.168.40.10, … } masquerade
//	ct mark set iifname . ip saddr map { "liqo.node-1" . 10.80.0.2 : 0x2, … }
func (c *compiler) mapped(a netstate.Action) error {
	m := a.Map
	if m.Dir == "" {
		return c.mappedByLink(a)
	}
	is6 := m.Entries[0].Addr.From.Is6()
	c.ip(is6)
	address := nftables.TypeIPAddr
	if is6 {
		address = nftables.TypeIP6Addr
	}
	set := nftables.Set{KeyType: address, Interval: a.Prefix || m.Intervals()}
	switch a.Kind {
	case netstate.Masquerade:
	case netstate.SetCTMark:
		set.IsMap, set.DataType = true, nftables.TypeMark
	default:
		set.IsMap, set.DataType = true, address
	}
	if m.ByLink {
		var err error
		if set.KeyType, err = nftables.ConcatSetType(nftables.TypeIFName, address); err != nil {
			return err
		}
	}
	if a.Prefix { // the value is the first address and the last
		set.DataType.Bytes *= 2
	}
	s, err := c.addSet(set, mapElements(a, set.Interval))
	if err != nil {
		return err
	}
	lookup := &expr.Lookup{SourceRegister: reg1, SetName: s.Name, SetID: s.ID}
	load := addressPayload(is6, m.Dir == "src")
	if m.ByLink {
		load.DestRegister = reg2 // behind the name, which takes all of register 1
		c.emit(&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: reg1})
	}
	c.emit(load, lookup)
	if a.Kind == netstate.Masquerade {
		c.emit(&expr.Masq{})
		return nil
	}
	lookup.IsDestRegSet, lookup.DestRegister = true, reg1
	if a.Kind == netstate.SetCTMark {
		c.emit(&expr.Ct{Key: expr.CtKeyMARK, Register: reg1, SourceRegister: true})
		return nil
	}
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

// mappedByLink is an action whose map knows links alone:
//
//	ct mark set iifname . meta protocol map { "liqo.node-1" . ip : 0x2, … }
//
// The family is a part of the key because nft(8) prints no name for one that is a link's
// name alone: the library says of all anonymous sets that their keys are in network order.
func (c *compiler) mappedByLink(a netstate.Action) error {
	c.ip(a.Map.IPv6)
	key, err := nftables.ConcatSetType(nftables.TypeIFName, nftables.TypeEtherType)
	if err != nil {
		return err
	}
	set := nftables.Set{KeyType: key, IsMap: true, DataType: nftables.TypeMark}
	family := be16(unix.ETH_P_IP)
	if a.Map.IPv6 {
		family = be16(unix.ETH_P_IPV6)
	}
	elements := make([]nftables.SetElement, len(a.Map.Entries))
	for i, e := range a.Map.Entries {
		elements[i] = nftables.SetElement{
			Key: slices.Concat(linkName(e.Link), family, []byte{0, 0}), Val: binaryutil.NativeEndian.PutUint32(e.Mark), Comment: e.Name,
		}
	}
	s, err := c.addSet(set, elements)
	if err != nil {
		return err
	}
	c.emit(
		&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: reg1},
		&expr.Meta{Key: expr.MetaKeyPROTOCOL, Register: reg2}, // behind the name, which takes all of register 1
		&expr.Lookup{SourceRegister: reg1, SetName: s.Name, SetID: s.ID, IsDestRegSet: true, DestRegister: reg1},
		&expr.Ct{Key: expr.CtKeyMARK, Register: reg1, SourceRegister: true})
	return nil
}

// mapElements returns the elements of a map. Where they are intervals, each
// begins with an element that has the value, and ends where the next one
// begins, or with an element that has none; nft(8) lets the first of these be
// at zero.
func mapElements(a netstate.Action, intervals bool) []nftables.SetElement {
	m := a.Map
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
		if m.ByLink {
			element.Key = append(linkName(e.Link), element.Key...)
		}
		switch {
		case a.Kind == netstate.SetCTMark:
			element.Val = binaryutil.NativeEndian.PutUint32(e.Mark)
		case !e.To.IsValid():
		case a.Prefix:
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
