package kube

import (
	"fmt"
	"math"
	"net/netip"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/isthmus-net/isthmus/appliance/cluster"
)

// A reader reads the fields of one object and collects what does not parse.
type reader struct {
	object  cluster.Ref
	invalid []cluster.InvalidError
}

func (r *reader) complain(field, value, format string, args ...any) {
	r.invalid = append(r.invalid, cluster.InvalidError{
		Object: r.object, Field: field, Value: value, Reason: fmt.Sprintf(format, args...),
	})
}

// note says how a value that is used was read.
func (r *reader) note(field, value, format string, args ...any) {
	r.complain(field, value, format, args...)
	r.invalid[len(r.invalid)-1].Note = true
}

// addr reads an address. An empty text is one that is not given.
func (r *reader) addr(field, text string) netip.Addr {
	if text == "" {
		return netip.Addr{}
	}
	a, err := netip.ParseAddr(text)
	switch {
	case err != nil && strings.Contains(text, "/"):
		reason := "is not an address; write one such as 10.0.0.1 or fd00::1"
		if p, err := netip.ParsePrefix(text); err == nil {
			reason = fmt.Sprintf("is a CIDR, not an address; write %s", p.Addr())
		}
		r.complain(field, text, "%s", reason)
		return netip.Addr{}
	case err != nil:
		r.complain(field, text, "is not an address; write one such as 10.0.0.1 or fd00::1")
		return netip.Addr{}
	case a.Zone() != "":
		r.complain(field, text, "has a zone, which only means something on one host; write %s", a.WithZone(""))
		return netip.Addr{}
	}
	return a.Unmap()
}

// dialled reports whether a text is the address or the name of an endpoint
// that can be dialled.
func (r *reader) dialled(field, text string) bool {
	a, err := netip.ParseAddr(text)
	switch {
	case strings.TrimSpace(text) == "":
		r.complain(field, text, "is empty; write the address or the name of the server's endpoint")
	case err == nil && a.Zone() != "":
		r.complain(field, text, "has a zone, which only means something on one host; write an address that gateways reach")
	case err == nil && (a.IsUnspecified() || a.IsLoopback() || a.IsMulticast()):
		r.complain(field, text, "is not the address of another host; write what status.endpoint of the remote cluster's GatewayServer says")
	case err != nil && (len(validation.IsDNS1123Subdomain(strings.ToLower(strings.TrimSuffix(text, ".")))) > 0 || numeric(text)):
		r.complain(field, text, "is neither an address nor a name; write one such as 203.0.113.7 or gateway.example.org")
	default:
		return true
	}
	return false
}

// numeric reports whether a name ends in a number, which no name of the DNS
// does: it is an address with a slip in it.
func numeric(name string) bool {
	last := name[strings.LastIndex(name, ".")+1:]
	return strings.Trim(last, "0123456789") == ""
}

// prefix reads a CIDR. One with host bits is masked. An empty text is one that
// is not given.
func (r *reader) prefix(field, text string) netip.Prefix {
	if text == "" {
		return netip.Prefix{}
	}
	p, err := netip.ParsePrefix(text)
	if err != nil {
		reason := "is not a CIDR; write one such as 10.0.0.0/16 or fd00::/64"
		if a, err := netip.ParseAddr(text); err == nil && a.Zone() == "" {
			reason = fmt.Sprintf("is an address, not a CIDR; write %s/%d", a, a.BitLen())
		}
		r.complain(field, text, "%s", reason)
		return netip.Prefix{}
	}
	if a := p.Addr(); a.Is4In6() {
		if p.Bits() < 96 {
			r.complain(field, text, "is wider than the IPv4-mapped range; write the IPv4 network itself")
			return netip.Prefix{}
		}
		p = netip.PrefixFrom(a.Unmap(), p.Bits()-96)
	}
	if p != p.Masked() {
		r.note(field, text, "has host bits; it is read as %s", p.Masked())
	}
	return p.Masked()
}

// prefixes reads a list of CIDRs; those that do not parse are not in it.
func prefixes[T ~string](r *reader, field string, texts []T) []netip.Prefix {
	var out []netip.Prefix
	for i, text := range texts {
		field := fmt.Sprintf("%s[%d]", field, i)
		if text == "" {
			r.complain(field, "", "is empty; write a CIDR such as 10.0.0.0/16, or leave the item out")
			continue
		}
		if p := r.prefix(field, string(text)); p.IsValid() {
			out = append(out, p)
		}
	}
	return out
}

// need complains of an address or CIDR that is empty.
func (r *reader) need(field, text, example string) {
	if text == "" {
		r.complain(field, text, "is empty; write one such as %s", example)
	}
}

// number reads a number that must be in a range.
func (r *reader) number(field string, n, low, high int) int {
	if n < low || n > high {
		r.complain(field, strconv.Itoa(n), "is out of range; write %d to %d", low, high)
		return 0
	}
	return n
}

// ports reads a list of ports.
func ports(r *reader, field string, list []int32) []uint16 {
	var out []uint16
	for i, n := range list {
		if p := r.number(fmt.Sprintf("%s[%d]", field, i), int(n), 1, math.MaxUint16); p != 0 {
			out = append(out, uint16(p))
		}
	}
	return out
}

// addrRange reads an address, a CIDR, or two addresses with a hyphen between.
func (r *reader) addrRange(field, text string) (cluster.AddrRange, bool) {
	before := len(r.invalid)
	switch {
	case text == "":
		r.need(field, text, "10.0.0.1, 10.0.0.0/16 or 10.0.0.1-10.0.0.9")
	case strings.Contains(text, "/"):
		if p := r.prefix(field, text); p.IsValid() {
			return cluster.AddrRange{From: p.Addr(), To: lastAddr(p)}, true
		}
	case strings.Contains(text, "-"):
		low, high, _ := strings.Cut(text, "-")
		from, err1 := netip.ParseAddr(strings.TrimSpace(low))
		to, err2 := netip.ParseAddr(strings.TrimSpace(high))
		switch {
		case err1 != nil || err2 != nil || from.Zone() != "" || to.Zone() != "":
			r.complain(field, text, "is not a range of addresses; write one such as 10.0.0.1-10.0.0.9")
		case from.Unmap().BitLen() != to.Unmap().BitLen():
			r.complain(field, text, "begins and ends in different families; write two matches")
		case to.Unmap().Less(from.Unmap()):
			r.complain(field, text, "ends before it begins; write %s-%s", to, from)
		default:
			return cluster.AddrRange{From: from.Unmap(), To: to.Unmap()}, true
		}
	default:
		if a := r.addr(field, text); a.IsValid() {
			return cluster.AddrRange{From: a, To: a}, true
		}
	}
	return cluster.AddrRange{}, len(r.invalid) == before
}

// portRange reads a port, or two with a hyphen between.
func (r *reader) portRange(field, text string) (cluster.PortRange, bool) {
	low, high, isRange := strings.Cut(text, "-")
	if !isRange {
		high = low
	}
	from, err1 := strconv.ParseUint(strings.TrimSpace(low), 10, 16)
	to, err2 := strconv.ParseUint(strings.TrimSpace(high), 10, 16)
	switch {
	case err1 != nil || err2 != nil || from == 0 || to == 0:
		r.complain(field, text, "is not a port; write 1 to 65535, or a range such as 8000-8099")
	case to < from:
		r.complain(field, text, "ends before it begins; write %d-%d", to, from)
	default:
		return cluster.PortRange{From: uint16(from), To: uint16(to)}, true
	}
	return cluster.PortRange{}, false
}

func lastAddr(p netip.Prefix) netip.Addr {
	last := p.Masked().Addr().AsSlice()
	for i := p.Bits(); i < len(last)*8; i++ {
		last[i/8] |= 0x80 >> (i % 8)
	}
	a, _ := netip.AddrFromSlice(last)
	return a
}
