package kernel

import (
	"encoding/binary"
	"fmt"
	"net"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/appliance/netstate"
)

const (
	reg1, reg2 = 1, 2 // NFT_REG_1, NFT_REG_2

	ipv4SourceOffset, ipv4DestinationOffset, ipv4ChecksumOffset = 12, 16, 10
	ipv6SourceOffset, ipv6DestinationOffset                     = 8, 24
	// Behind the header of an ICMP error (RFC 792) is that of the packet that it quotes.
	quotedOffset                     = 8
	arpSourceOffset, arpTargetOffset = 14, 24 // of IPv4 addresses, on links with MAC addresses (RFC 826)

	tcpFlagsOffset     = 13
	tcpSYN, tcpRST     = 0x02, 0x04
	tcpOptionMSS       = 2
	tcpOptionMSSOffset = 2 // of the value in the option
)

// l4protos are protocol numbers (RFC 5237).
var l4protos = map[string]byte{
	"tcp": unix.IPPROTO_TCP, "udp": unix.IPPROTO_UDP, "sctp": unix.IPPROTO_SCTP,
	"icmp": unix.IPPROTO_ICMP, "icmpv6": unix.IPPROTO_ICMPV6,
}

// Types of messages that report an error about another packet.
var (
	icmpErrors   = []byte{3, 11, 12}  // RFC 792
	icmpv6Errors = []byte{1, 2, 3, 4} // RFC 4443 §2.1
)

// Types of messages that tell a host of a better next hop.
const (
	icmpRedirect   = 5   // RFC 792
	icmpv6Redirect = 137 // RFC 4861 §4.5
)

// Directions of a connection (enum ip_conntrack_dir of the kernel).
const ctOriginal, ctReply = 0, 1

// A compiler turns a rule into expressions of nftables. Each step has the
// line of nft(8) that it stands for beside it.
type compiler struct {
	family netstate.Family
	// addSet makes an anonymous set in the same transaction.
	addSet func(set nftables.Set, elements []nftables.SetElement) (*nftables.Set, error)

	out     []expr.Any
	l4proto string // that the expressions so far have checked
	nfproto byte   // the same for the IP family, in tables of both
}

func (c *compiler) emit(es ...expr.Any) { c.out = append(c.out, es...) }

func (c *compiler) rule(r netstate.FirewallRule) ([]expr.Any, error) {
	c.out, c.l4proto, c.nfproto = nil, "", 0
	// The protocol first: ports and ICMP types are read from behind a header
	// of a known kind.
	if p := r.L4Proto(); p != "" {
		c.proto(p)
	}
	for _, m := range r.Matches {
		if err := c.match(r, m); err != nil {
			return nil, err
		}
	}
	if r.Action.Kind == netstate.ClampMSS {
		c.proto("tcp")
		c.emit( // tcp flags & (syn | rst) == syn
			&expr.Payload{DestRegister: reg1, Base: expr.PayloadBaseTransportHeader, Offset: tcpFlagsOffset, Len: 1},
			&expr.Bitwise{SourceRegister: reg1, DestRegister: reg1, Len: 1, Mask: []byte{tcpSYN | tcpRST}, Xor: []byte{0}},
			&expr.Cmp{Op: expr.CmpOpEq, Register: reg1, Data: []byte{tcpSYN}})
	}
	if to := r.Action.To; to.IsValid() {
		c.ip(to.Addr().Is6())
	}
	if len(r.Action.Map.Entries) > 0 {
		return c.out, c.mapped(r.Action)
	}
	if r.Counter {
		c.emit(&expr.Counter{})
	}
	if err := c.action(r.Action); err != nil {
		return nil, err
	}
	return c.out, nil
}

// proto is "meta l4proto NAME".
func (c *compiler) proto(name string) {
	if c.l4proto == name {
		return
	}
	c.l4proto = name
	c.emit(
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: reg1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: reg1, Data: []byte{l4protos[name]}})
}

// ip is "meta nfproto ipv4", where the table's family does not say so.
func (c *compiler) ip(is6 bool) {
	proto := byte(unix.NFPROTO_IPV4)
	if is6 {
		proto = unix.NFPROTO_IPV6
	}
	if c.nfproto == proto {
		return
	}
	switch c.family {
	case netstate.FamilyINET:
		c.emit(
			&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: reg1},
			&expr.Cmp{Op: expr.CmpOpEq, Register: reg1, Data: []byte{proto}})
	case netstate.FamilyBridge: // meta protocol ip
		etherType := uint16(unix.ETH_P_IP)
		if is6 {
			etherType = unix.ETH_P_IPV6
		}
		c.emit(
			&expr.Meta{Key: expr.MetaKeyPROTOCOL, Register: reg1},
			&expr.Cmp{Op: expr.CmpOpEq, Register: reg1, Data: be16(etherType)})
	}
	c.nfproto = proto
}

func (c *compiler) match(r netstate.FirewallRule, m netstate.Match) error {
	switch {
	case m.Of == netstate.OfQuoted: // @th,160,32 & 0xffff0000 == 0x0a000000
		c.emit(quotedPayload(m.Dir == "src"))
		c.addresses(m)
	case m.Of == netstate.OfConnection: // ct original ip saddr 10.0.0.0-10.255.255.255
		ct := &expr.Ct{Key: expr.CtKeySRC, Register: reg1, Direction: ctOriginal}
		if m.Dir == "dst" {
			ct.Key = expr.CtKeyDST
		}
		c.emit(ct)
		c.between(m.Negate, m.Addr.From.AsSlice(), m.Addr.To.AsSlice())
	case m.Addr.From.IsValid() && c.family == netstate.FamilyARP: // arp saddr ip 10.0.0.0/8
		p := &expr.Payload{DestRegister: reg1, Base: expr.PayloadBaseNetworkHeader, Offset: arpSourceOffset, Len: 4}
		if m.Dir == "dst" {
			p.Offset = arpTargetOffset
		}
		c.emit(p)
		c.addresses(m)
	case m.Addr.From.IsValid(): // ip saddr 10.0.0.0/8
		is6 := m.Addr.From.Is6()
		c.ip(is6)
		c.emit(addressPayload(is6, m.Dir == "src"))
		c.addresses(m)
	case m.Ports != netstate.PortRange{}: // tcp dport 80
		if c.l4proto == "" { // meta l4proto { tcp, udp, sctp } th dport 80
			if err := c.oneOf(nftables.TypeInetProto, &expr.Meta{Key: expr.MetaKeyL4PROTO, Register: reg1}, false,
				[]byte{unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_SCTP}); err != nil {
				return err
			}
		}
		offset := uint32(0)
		if m.Dir == "dst" {
			offset = 2
		}
		c.emit(&expr.Payload{DestRegister: reg1, Base: expr.PayloadBaseTransportHeader, Offset: offset, Len: 2})
		c.between(m.Negate, be16(m.Ports.From), be16(m.Ports.To))
	case m.L4Proto != "": // meta l4proto tcp
		if !m.Negate && m.L4Proto == c.l4proto {
			break // said already
		}
		c.emit(&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: reg1})
		proto := []byte{l4protos[m.L4Proto]}
		c.between(m.Negate, proto, proto)
	case m.Dev == netstate.AnyDev: // iif != 0
		key := expr.MetaKeyIIF
		if m.Dir == "out" {
			key = expr.MetaKeyOIF
		}
		none := make([]byte, 4)
		c.emit(&expr.Meta{Key: key, Register: reg1})
		c.between(!m.Negate, none, none)
	case m.Dev != "": // iifname "eth0"
		key := expr.MetaKeyIIFNAME
		if m.Dir == "out" {
			key = expr.MetaKeyOIFNAME
		}
		c.emit(&expr.Meta{Key: key, Register: reg1})
		name := linkName(m.Dev)
		if prefix, ok := strings.CutSuffix(m.Dev, "*"); ok {
			name = []byte(prefix)
		}
		c.between(m.Negate, name, name)
	case m.ICMPError: // icmp type { destination-unreachable, … }
		is6, _ := r.Is6(c.family)
		proto, key, types := "icmp", nftables.TypeICMPType, icmpErrors
		if is6 {
			proto, key, types = "icmpv6", nftables.TypeICMP6Type, icmpv6Errors
		}
		c.ip(is6)
		c.proto(proto)
		return c.oneOf(key, icmpType(), m.Negate, types)
	case m.ICMPRedirect: // icmp type redirect
		is6, _ := r.Is6(c.family)
		proto, typ := "icmp", []byte{icmpRedirect}
		if is6 {
			proto, typ = "icmpv6", []byte{icmpv6Redirect}
		}
		c.ip(is6)
		c.proto(proto)
		c.emit(icmpType())
		c.between(m.Negate, typ, typ)
	case m.CTDir != "": // ct direction original
		dir := []byte{ctOriginal}
		if m.CTDir == "reply" {
			dir[0] = ctReply
		}
		c.emit(&expr.Ct{Key: expr.CtKeyDIRECTION, Register: reg1})
		c.between(m.Negate, dir, dir)
	case m.CTMark != 0: // ct mark & 0x1 != 0
		c.emit(&expr.Ct{Key: expr.CtKeyMARK, Register: reg1}, bits32(m.CTMark, 0),
			&expr.Cmp{Op: equal(!m.Negate), Register: reg1, Data: make([]byte, 4)})
	case m.ToHost: // fib daddr type != unicast
		c.emit(&expr.Fib{Register: reg1, FlagDADDR: true, ResultADDRTYPE: true},
			&expr.Cmp{Op: equal(!m.Negate), Register: reg1, Data: binaryutil.NativeEndian.PutUint32(unix.RTN_UNICAST)})
	}
	return nil
}

// bits32 keeps some bits of the number in register 1 and sets others.
func bits32(keep, set uint32) *expr.Bitwise {
	return &expr.Bitwise{
		SourceRegister: reg1, DestRegister: reg1, Len: 4,
		Mask: binaryutil.NativeEndian.PutUint32(keep &^ set), Xor: binaryutil.NativeEndian.PutUint32(set),
	}
}

// icmpType loads the type of an ICMP or ICMPv6 message.
func icmpType() *expr.Payload {
	return &expr.Payload{DestRegister: reg1, Base: expr.PayloadBaseTransportHeader, Offset: 0, Len: 1}
}

func addressPayload(is6, source bool) *expr.Payload {
	p := &expr.Payload{DestRegister: reg1, Base: expr.PayloadBaseNetworkHeader, Offset: ipv4DestinationOffset, Len: 4}
	switch {
	case is6 && source:
		p.Offset, p.Len = ipv6SourceOffset, 16
	case is6:
		p.Offset, p.Len = ipv6DestinationOffset, 16
	case source:
		p.Offset = ipv4SourceOffset
	}
	return p
}

// quotedPayload loads an address of the packet that an ICMP error quotes.
func quotedPayload(source bool) *expr.Payload {
	p := addressPayload(false, source)
	p.Base, p.Offset = expr.PayloadBaseTransportHeader, quotedOffset+p.Offset
	return p
}

// addresses compares the address in register 1.
func (c *compiler) addresses(m netstate.Match) {
	p, ok := m.Addr.AsPrefix()
	if !ok || p.IsSingleIP() {
		c.between(m.Negate, m.Addr.From.AsSlice(), m.Addr.To.AsSlice())
		return
	}
	mask := net.CIDRMask(p.Bits(), p.Addr().BitLen())
	c.emit(
		&expr.Bitwise{SourceRegister: reg1, DestRegister: reg1, Len: uint32(len(mask)), Mask: mask, Xor: make([]byte, len(mask))},
		&expr.Cmp{Op: equal(m.Negate), Register: reg1, Data: p.Masked().Addr().AsSlice()})
}

// between compares register 1 with a range, or with one value.
func (c *compiler) between(negate bool, from, to []byte) {
	if string(from) == string(to) {
		c.emit(&expr.Cmp{Op: equal(negate), Register: reg1, Data: from})
		return
	}
	c.emit(&expr.Range{Op: equal(negate), Register: reg1, FromData: from, ToData: to})
}

func equal(negate bool) expr.CmpOp {
	if negate {
		return expr.CmpOpNeq
	}
	return expr.CmpOpEq
}

// oneOf looks up the byte that load puts into register 1.
func (c *compiler) oneOf(key nftables.SetDatatype, load expr.Any, negate bool, values []byte) error {
	elements := make([]nftables.SetElement, len(values))
	for i, v := range values {
		elements[i].Key = []byte{v}
	}
	set, err := c.addSet(nftables.Set{KeyType: key}, elements)
	if err != nil {
		return err
	}
	c.emit(load, &expr.Lookup{SourceRegister: reg1, SetName: set.Name, SetID: set.ID, Invert: negate})
	return nil
}

func (c *compiler) action(a netstate.Action) error {
	switch a.Kind {
	case netstate.Accept:
		c.emit(&expr.Verdict{Kind: expr.VerdictAccept})
	case netstate.Drop:
		c.emit(&expr.Verdict{Kind: expr.VerdictDrop})
	case netstate.Reject: // port unreachable, in the packet's own protocol
		switch c.family {
		case netstate.FamilyIPv4:
			c.emit(&expr.Reject{Type: unix.NFT_REJECT_ICMP_UNREACH, Code: 3})
		case netstate.FamilyIPv6:
			c.emit(&expr.Reject{Type: unix.NFT_REJECT_ICMP_UNREACH, Code: 4})
		default:
			c.emit(&expr.Reject{Type: unix.NFT_REJECT_ICMPX_UNREACH, Code: unix.NFT_REJECT_ICMPX_PORT_UNREACH})
		}
	case netstate.NoTrack:
		c.emit(&expr.Notrack{})
	case netstate.SetCTMark: // ct mark set 0x1, ct mark set ct mark & 0xfffffffe | 0x1
		if a.Mask != 0 {
			c.emit(&expr.Ct{Key: expr.CtKeyMARK, Register: reg1}, bits32(^a.Mask, a.Mark))
		} else {
			c.emit(&expr.Immediate{Register: reg1, Data: binaryutil.NativeEndian.PutUint32(a.Mark)})
		}
		c.emit(&expr.Ct{Key: expr.CtKeyMARK, Register: reg1, SourceRegister: true})
	case netstate.RestoreCT: // meta mark set ct mark, meta mark set ct mark & 0x1
		c.emit(&expr.Ct{Key: expr.CtKeyMARK, Register: reg1})
		if a.Mask != 0 {
			c.emit(bits32(a.Mask, 0))
		}
		c.emit(&expr.Meta{Key: expr.MetaKeyMARK, Register: reg1, SourceRegister: true})
	case netstate.SetMark: // meta mark set 0x1
		c.emit(
			&expr.Immediate{Register: reg1, Data: binaryutil.NativeEndian.PutUint32(a.Mark)},
			&expr.Meta{Key: expr.MetaKeyMARK, Register: reg1, SourceRegister: true})
	case netstate.ClampMSS: // tcp option maxseg size set rt mtu; the kernel only lowers it
		if a.MSS != 0 {
			c.emit(&expr.Immediate{Register: reg1, Data: be16(a.MSS)})
		} else {
			c.emit(
				&expr.Rt{Register: reg1, Key: expr.RtTCPMSS},
				&expr.Byteorder{SourceRegister: reg1, DestRegister: reg1, Op: expr.ByteorderHton, Len: 2, Size: 2})
		}
		c.emit(&expr.Exthdr{SourceRegister: reg1, Type: tcpOptionMSS, Offset: tcpOptionMSSOffset, Len: 2, Op: expr.ExthdrOpTcpopt})
	case netstate.SNAT, netstate.DNAT: // snat to 10.0.0.1, snat prefix to 10.0.0.0/16
		c.nat(a)
	case netstate.Masquerade:
		c.emit(&expr.Masq{})
	case netstate.SetSource: // ip saddr set 10.0.0.1
		addr := a.To.Addr()
		p := addressPayload(addr.Is6(), true)
		p.DestRegister, p.SourceRegister, p.OperationType = 0, reg1, expr.PayloadWrite
		p.CsumType, p.CsumOffset, p.CsumFlags = expr.CsumTypeInet, ipv4ChecksumOffset, unix.NFT_PAYLOAD_L4CSUM_PSEUDOHDR
		if addr.Is6() {
			p.CsumOffset = noHeaderChecksum
		}
		c.emit(&expr.Immediate{Register: reg1, Data: addr.AsSlice()}, p)
	case netstate.SetPrefix: // ip saddr set ip saddr & 0.0.255.255 | 10.0.0.0 accept
		c.setPrefix(a)
	default:
		return fmt.Errorf("action %q: unknown", a.Kind)
	}
	return nil
}

// setPrefix replaces the prefix of an address, corrects the checksums, and ends the
// chain. The checksum of an ICMP error covers the packet that it quotes, but no
// change of that packet's header together with the header's own checksum: one's
// complement sums of the two cancel out (RFC 1624).
func (c *compiler) setPrefix(a netstate.Action) {
	load := addressPayload(false, a.Dir == "src")
	checksum, flags := uint32(ipv4ChecksumOffset), uint32(unix.NFT_PAYLOAD_L4CSUM_PSEUDOHDR)
	if a.Of == netstate.OfQuoted {
		load = quotedPayload(a.Dir == "src")
		checksum, flags = quotedOffset+ipv4ChecksumOffset, 0
	}
	to := a.To.Masked()
	host := net.CIDRMask(to.Bits(), to.Addr().BitLen())
	for i := range host {
		host[i] = ^host[i]
	}
	c.emit(load,
		&expr.Bitwise{SourceRegister: reg1, DestRegister: reg1, Len: load.Len, Mask: host, Xor: to.Addr().AsSlice()},
		&expr.Payload{
			OperationType: expr.PayloadWrite, SourceRegister: reg1, Base: load.Base, Offset: load.Offset, Len: load.Len,
			CsumType: expr.CsumTypeInet, CsumOffset: checksum, CsumFlags: flags,
		},
		&expr.Verdict{Kind: expr.VerdictAccept})
}

// natOf is NAT to the address in register 1.
func natOf(kind netstate.ActionKind, is6 bool) *expr.NAT {
	n := &expr.NAT{Type: expr.NATTypeSourceNAT, Family: unix.NFPROTO_IPV4, RegAddrMin: reg1}
	if kind == netstate.DNAT {
		n.Type = expr.NATTypeDestNAT
	}
	if is6 {
		n.Family = unix.NFPROTO_IPV6
	}
	return n
}

func (c *compiler) nat(a netstate.Action) {
	n := natOf(a.Kind, a.To.Addr().Is6())
	if !a.Prefix || a.To.IsSingleIP() {
		c.emit(&expr.Immediate{Register: reg1, Data: a.To.Addr().AsSlice()}, n)
		return
	}
	to := netstate.RangeOf(a.To)
	n.RegAddrMax, n.Prefix = reg2, true
	c.emit(
		&expr.Immediate{Register: reg1, Data: to.From.AsSlice()},
		&expr.Immediate{Register: reg2, Data: to.To.AsSlice()},
		n)
}

// linkName is a link's name as the kernel compares it.
func linkName(name string) []byte {
	return append([]byte(name), make([]byte, unix.IFNAMSIZ-len(name))...)
}

func be16(v uint16) []byte { return binary.BigEndian.AppendUint16(nil, v) }
