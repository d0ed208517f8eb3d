package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	nl "github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// ipv6Metric is what the kernel writes for an IPv6 route without a metric
// (IP6_RT_PRIO_USER).
const ipv6Metric = 1024

// scopes are the values of rtm_scope (rtnetlink(7)).
var scopes = map[netstate.Scope]uint8{
	netstate.ScopeGlobal:  unix.RT_SCOPE_UNIVERSE,
	netstate.ScopeSite:    unix.RT_SCOPE_SITE,
	netstate.ScopeLink:    unix.RT_SCOPE_LINK,
	netstate.ScopeHost:    unix.RT_SCOPE_HOST,
	netstate.ScopeNowhere: unix.RT_SCOPE_NOWHERE,
}

// listRoutes returns our routes of all tables.
func (ns *NetNS) listRoutes(names map[int]string) ([]netstate.Route, error) {
	var out []netstate.Route
	for _, f := range []uint8{unix.AF_INET, unix.AF_INET6} {
		// The kernel filters by protocol: a host may have routes by the
		// hundred thousand that are not ours.
		h := make([]byte, unix.SizeofRtMsg)
		h[0], h[5] = f, Protocol
		msgs, err := dump(ns.rt.c, unix.RTM_GETROUTE, h)
		if errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP) {
			continue // no IPv6 here
		}
		if err != nil {
			return nil, fmt.Errorf("list routes: %w", err)
		}
		for _, m := range msgs {
			if r, ok := parseRoute(m.Data, names); ok {
				out = append(out, r)
			}
		}
	}
	return out, nil
}

// parseRoute returns the route of a message if it is ours.
func parseRoute(b []byte, names map[int]string) (netstate.Route, bool) {
	if len(b) < unix.SizeofRtMsg || b[5] != Protocol {
		return netstate.Route{}, false
	}
	fam, bits, tos, table, scope, typ := b[0], b[1], b[3], b[4], b[6], b[7]
	flags := binary.NativeEndian.Uint32(b[8:])
	if flags&unix.RTM_F_CLONED != 0 {
		return netstate.Route{}, false
	}
	r := netstate.Route{Table: uint32(table), OnLink: flags&unix.RTNH_F_ONLINK != 0}
	dst := netip.IPv4Unspecified()
	if fam == unix.AF_INET6 {
		dst = netip.IPv6Unspecified()
	}
	var other []string
	if tos != 0 {
		other = append(other, fmt.Sprintf("tos 0x%x", tos))
	}
	eachAttr(b[unix.SizeofRtMsg:], func(t uint16, v []byte) {
		switch t {
		case unix.RTA_DST:
			dst = asAddr(v)
		case unix.RTA_TABLE:
			r.Table = asU32(v)
		case unix.RTA_GATEWAY:
			r.Via = asAddr(v)
		case unix.RTA_OIF:
			r.Dev = names[int(asU32(v))]
			if r.Dev == "" {
				r.Dev = fmt.Sprintf("if%d", asU32(v)) // gone since
			}
		case unix.RTA_PREFSRC:
			r.Src = asAddr(v)
		case unix.RTA_PRIORITY:
			r.Metric = asU32(v)
		case unix.RTA_METRICS:
			var lock uint32
			eachAttr(v, func(t uint16, v []byte) {
				switch {
				case t == unix.RTAX_MTU:
					r.MTU = int(asU32(v))
				case t == unix.RTAX_LOCK:
					lock = asU32(v)
				case asU32(v) != 0:
					other = append(other, fmt.Sprintf("metric#%d %d", t, asU32(v)))
				}
			})
			if lock != 0 {
				other = append(other, fmt.Sprintf("lock %#x", lock))
			}
		case unix.RTA_CACHEINFO, unix.RTA_PREF, unix.RTA_PAD:
			if t == unix.RTA_PREF && len(v) > 0 && v[0] != 0 {
				other = append(other, fmt.Sprintf("pref %d", v[0]))
			}
		default:
			other = append(other, fmt.Sprintf("attribute#%d", t))
		}
	})
	r.Dst = netip.PrefixFrom(dst, int(bits))
	switch typ {
	case unix.RTN_UNICAST:
	case unix.RTN_UNREACHABLE:
		r.Type = netstate.Unreachable
	case unix.RTN_THROW:
		r.Type = netstate.Throw
	default:
		r.Type = netstate.RouteType(fmt.Sprintf("type#%d", typ))
	}
	if r.Type == netstate.Unreachable || r.Type == netstate.Throw {
		r.Dev = "" // IPv6 says lo
	}
	if fam == unix.AF_INET {
		for s, n := range scopes {
			if n == scope {
				r.Scope = s
			}
		}
	} else if r.Metric == ipv6Metric {
		r.Metric = 0
	}
	r.Other = strings.Join(other, " ")
	return r, true
}

// addRoutes adds or, with replace, replaces routes.
func (ns *NetNS) addRoutes(rs []netstate.Route, replace bool, index map[string]int) []error {
	flags := nl.Create | nl.Excl
	if replace {
		// Replacing finds the route by table, destination and metric, and
		// it is ours: it was observed as such.
		flags = nl.Create | nl.Replace
	}
	var errs []error
	reqs := make([]request, 0, len(rs))
	sent := make([]netstate.Route, 0, len(rs))
	for _, r := range rs {
		data, err := encodeRoute(r, index)
		if err != nil {
			errs = append(errs, fmt.Errorf("route %s: %w", r, err))
			continue
		}
		reqs = append(reqs, request{unix.RTM_NEWROUTE, flags, data})
		sent = append(sent, r)
	}
	for i, err := range ns.rt.batch(reqs) {
		switch {
		case err == nil:
		case errors.Is(err, unix.EEXIST):
			errs = append(errs, fmt.Errorf("route %s: there is a route to %s in table %d that is not ours; remove it or use another table", sent[i], sent[i].Dst, sent[i].Table))
		case errors.Is(err, unix.EINVAL) && sent[i].Src.IsValid():
			errs = append(errs, fmt.Errorf("route %s: %w; is %s an address of this host?", sent[i], err, sent[i].Src))
		case errors.Is(err, unix.ENETUNREACH), errors.Is(err, unix.EHOSTUNREACH):
			errs = append(errs, fmt.Errorf("route %s: %w; nothing leads to %s: add a route to it or set onlink", sent[i], err, sent[i].Via))
		default:
			errs = append(errs, fmt.Errorf("route %s: %w", sent[i], err))
		}
	}
	return errs
}

// deleteRoutes deletes routes of ours. One that is gone is no error.
func (ns *NetNS) deleteRoutes(rs []netstate.Route, index map[string]int) []error {
	var errs []error
	reqs := make([]request, 0, len(rs))
	sent := make([]netstate.Route, 0, len(rs))
	for _, r := range rs {
		if r.Dev != "" && index[r.Dev] == 0 {
			continue // went with its link
		}
		// Only what identifies it, so that whatever was changed by hand
		// does not keep it from being found.
		id := netstate.Route{Table: r.Table, Dst: r.Dst, Dev: r.Dev, Via: r.Via, Metric: r.Metric, Scope: r.Scope, Type: r.Type}
		data, err := encodeRoute(id, index)
		if err != nil {
			errs = append(errs, fmt.Errorf("delete route %s: %w", r, err))
			continue
		}
		reqs = append(reqs, request{typ: unix.RTM_DELROUTE, data: data})
		sent = append(sent, r)
	}
	for i, err := range ns.rt.batch(reqs) {
		if err != nil && !errors.Is(err, unix.ESRCH) && !errors.Is(err, unix.ENODEV) {
			errs = append(errs, fmt.Errorf("delete route %s: %w", sent[i], err))
		}
	}
	return errs
}

func encodeRoute(r netstate.Route, index map[string]int) ([]byte, error) {
	table := uint8(unix.RT_TABLE_UNSPEC)
	if r.Table < 256 {
		table = uint8(r.Table)
	}
	typ := uint8(unix.RTN_UNICAST)
	var n int
	switch {
	case r.Type == netstate.Unreachable:
		typ = unix.RTN_UNREACHABLE
	case r.Type == netstate.Throw:
		typ = unix.RTN_THROW
	case strings.HasPrefix(string(r.Type), "type#"):
		if _, err := fmt.Sscanf(string(r.Type), "type#%d", &n); err == nil {
			typ = uint8(n)
		}
	}
	var flags uint32
	if r.OnLink {
		flags = unix.RTNH_F_ONLINK
	}
	dst := r.Dst.Masked().Addr()
	h := []byte{family(dst), uint8(r.Dst.Bits()), 0, 0, table, Protocol, scopes[r.Scope], typ}
	a := attrs{binary.NativeEndian.AppendUint32(h, flags)}
	if r.Dst.Bits() > 0 {
		a.ip(unix.RTA_DST, dst)
	}
	a.u32(unix.RTA_TABLE, r.Table)
	if r.Dev != "" {
		i, ok := index[r.Dev]
		if !ok {
			return nil, &netstate.NoLinkError{Name: r.Dev}
		}
		a.u32(unix.RTA_OIF, uint32(i))
	}
	if r.Via.IsValid() {
		a.ip(unix.RTA_GATEWAY, r.Via)
	}
	if r.Src.IsValid() {
		a.ip(unix.RTA_PREFSRC, r.Src)
	}
	if r.Metric != 0 {
		a.u32(unix.RTA_PRIORITY, r.Metric)
	}
	if r.MTU != 0 {
		a.nest(unix.RTA_METRICS, func(m *attrs) {
			m.u32(unix.RTAX_MTU, uint32(r.MTU))
		})
	}
	return a.b, nil
}

// listRules returns our rules of both families.
func (ns *NetNS) listRules() ([]netstate.Rule, error) {
	var out []netstate.Rule
	for _, f := range []uint8{unix.AF_INET, unix.AF_INET6} {
		h := make([]byte, unix.SizeofRtMsg) // struct fib_rule_hdr is as long
		h[0] = f
		msgs, err := dump(ns.rt.c, unix.RTM_GETRULE, h)
		if errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("list rules: %w", err)
		}
		for _, m := range msgs {
			if r, ok := parseRule(m.Data); ok {
				out = append(out, r)
			}
		}
	}
	return out, nil
}

// parseRule returns the rule of a message if it is ours.
func parseRule(b []byte) (netstate.Rule, bool) {
	if len(b) < unix.SizeofRtMsg {
		return netstate.Rule{}, false
	}
	fam, dstBits, srcBits, tos, table, action := b[0], int(b[1]), int(b[2]), b[3], b[4], b[7]
	flags := binary.NativeEndian.Uint32(b[8:])
	r := netstate.Rule{Table: uint32(table), IPv6: fam == unix.AF_INET6, Not: flags&unix.FIB_RULE_INVERT != 0}
	var other []string
	if tos != 0 {
		other = append(other, fmt.Sprintf("tos 0x%x", tos))
	}
	// The detached flags say that no link of the name is there now, and the
	// unresolved one that there is no rule to go to.
	if flags&^(unix.FIB_RULE_IIF_DETACHED|unix.FIB_RULE_OIF_DETACHED|unix.FIB_RULE_UNRESOLVED|unix.FIB_RULE_INVERT) != 0 {
		other = append(other, fmt.Sprintf("flags 0x%x", flags))
	}
	ours := false
	eachAttr(b[unix.SizeofRtMsg:], func(t uint16, v []byte) {
		switch t {
		case unix.FRA_PROTOCOL:
			ours = len(v) > 0 && v[0] == Protocol
		case unix.FRA_PRIORITY:
			r.Priority = asU32(v)
		case unix.FRA_TABLE:
			r.Table = asU32(v)
		case unix.FRA_GOTO:
			r.Goto = asU32(v)
		case unix.FRA_SRC:
			r.Src = netip.PrefixFrom(asAddr(v), srcBits)
		case unix.FRA_DST:
			r.Dst = netip.PrefixFrom(asAddr(v), dstBits)
		case unix.FRA_IIFNAME:
			r.IIF = asString(v)
		case unix.FRA_OIFNAME:
			r.OIF = asString(v)
		case unix.FRA_FWMARK:
			r.Mark = asU32(v)
		case unix.FRA_FWMASK:
			r.Mask = asU32(v)
		case unix.FRA_SUPPRESS_PREFIXLEN, unix.FRA_SUPPRESS_IFGROUP:
			if asU32(v) != ^uint32(0) {
				other = append(other, fmt.Sprintf("suppress#%d %d", t, asU32(v)))
			}
		case unix.FRA_PAD:
		default:
			// Newer kernels report selectors that are not set as zero.
			if slices.ContainsFunc(v, func(b byte) bool { return b != 0 }) {
				other = append(other, fmt.Sprintf("attribute#%d", t))
			}
		}
	})
	switch action {
	case unix.FR_ACT_TO_TBL:
	case unix.FR_ACT_UNREACHABLE:
		r.Unreachable = true
	case unix.FR_ACT_GOTO:
	case unix.FR_ACT_NOP:
		r.Nop = true
	default:
		other = append(other, fmt.Sprintf("action#%d", action))
	}
	r.Other = strings.Join(other, " ")
	return r, ours
}

func (ns *NetNS) addRules(rs []netstate.Rule) []error {
	reqs := make([]request, len(rs))
	for i, r := range rs {
		// Not exclusively: then the kernel would refuse a rule without
		// selectors where there is one with them.
		reqs[i] = request{unix.RTM_NEWRULE, nl.Create, encodeRule(r)}
	}
	var errs []error
	for i, err := range ns.rt.batch(reqs) {
		errs = appendError(errs, "rule "+rs[i].String(), err)
	}
	return errs
}

// deleteAllRules deletes rules until none of them is left: the first try may
// have deleted another that the caller will put back.
func (ns *NetNS) deleteAllRules(rs []netstate.Rule) []error {
	const tries = 4 // rules of one priority and table, rarely more than one
	left := rs
	for range tries {
		if len(left) == 0 {
			return nil
		}
		if errs := ns.deleteRules(left); len(errs) > 0 {
			return errs
		}
		have, err := ns.listRules()
		if err != nil {
			return []error{err}
		}
		again := netstate.Diff(netstate.State{Rules: have}, netstate.State{Rules: subtract(have, rs)})
		left = slices.Concat(again.DeleteRules, again.DeletePassRules)
	}
	return nil // the next pass will see
}

// deleteRules deletes rules of ours. One that is gone is no error.
//
// The kernel deletes the first rule that has everything that the request
// says, so that a rule without selectors may stand for one with them. The
// caller puts back what went by mistake.
func (ns *NetNS) deleteRules(rs []netstate.Rule) []error {
	reqs := make([]request, len(rs))
	for i, r := range rs {
		reqs[i] = request{typ: unix.RTM_DELRULE, data: encodeRule(r)}
	}
	var errs []error
	for i, err := range ns.rt.batch(reqs) {
		if err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ESRCH) {
			errs = append(errs, fmt.Errorf("delete rule %s: %w", rs[i], err))
		}
	}
	return errs
}

func encodeRule(r netstate.Rule) []byte {
	fam := uint8(unix.AF_INET)
	if r.Is6() {
		fam = unix.AF_INET6
	}
	action, table := uint8(unix.FR_ACT_TO_TBL), uint8(0)
	switch {
	case r.Unreachable:
		action = unix.FR_ACT_UNREACHABLE
	case r.Goto != 0:
		action = unix.FR_ACT_GOTO
	case r.Nop:
		action = unix.FR_ACT_NOP
	case r.Table < 256:
		table = uint8(r.Table)
	}
	var n uint8
	for word := range strings.FieldsSeq(r.Other) {
		if _, err := fmt.Sscanf(word, "action#%d", &n); err == nil {
			action = n
		}
	}
	var srcBits, dstBits uint8
	if r.Src.IsValid() {
		srcBits = uint8(r.Src.Bits())
	}
	if r.Dst.IsValid() {
		dstBits = uint8(r.Dst.Bits())
	}
	var flags uint32
	if r.Not {
		flags = unix.FIB_RULE_INVERT
	}
	a := attrs{binary.NativeEndian.AppendUint32([]byte{fam, dstBits, srcBits, 0, table, 0, 0, action}, flags)}
	if r.Src.IsValid() {
		a.ip(unix.FRA_SRC, r.Src.Masked().Addr())
	}
	if r.Dst.IsValid() {
		a.ip(unix.FRA_DST, r.Dst.Masked().Addr())
	}
	a.u32(unix.FRA_PRIORITY, r.Priority)
	switch action {
	case unix.FR_ACT_TO_TBL:
		a.u32(unix.FRA_TABLE, r.Table)
	case unix.FR_ACT_GOTO:
		a.u32(unix.FRA_GOTO, r.Goto)
	}
	if r.IIF != "" {
		a.str(unix.FRA_IIFNAME, r.IIF)
	}
	if r.OIF != "" {
		a.str(unix.FRA_OIFNAME, r.OIF)
	}
	if r.Mark != 0 || r.Mask != 0 {
		mask := r.Mask
		if mask == 0 {
			mask = ^uint32(0)
		}
		a.u32(unix.FRA_FWMARK, r.Mark)
		a.u32(unix.FRA_FWMASK, mask)
	}
	a.u8(unix.FRA_PROTOCOL, Protocol)
	return a.b
}
