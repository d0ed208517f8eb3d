package kernel

import (
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// Indexes of IFLA_INET_CONF: IPV4_DEVCONF_* of <linux/ip.h>.
const (
	confForwarding = 1
	confRPFilter   = 8
	// With promote_secondaries an address keeps its sisters of the same
	// prefix when it goes.
	confPromoteSecondaries = 20
	confAcceptLocal        = 23
)

// inetConf returns the IPv4 settings in a message about a link; nil if it does
// not speak IPv4.
func inetConf(b []byte) settings {
	var values settings
	eachAttr(b[unix.SizeofIfInfomsg:], func(t uint16, v []byte) {
		if t != unix.IFLA_AF_SPEC {
			return
		}
		eachAttr(v, func(t uint16, v []byte) {
			if t != unix.AF_INET {
				return
			}
			eachAttr(v, func(t uint16, v []byte) {
				if t == unix.IFLA_INET_CONF {
					values = v
				}
			})
		})
	})
	return values
}

// settings are the IPv4 settings of a link, as the kernel lists them.
type settings []byte

// get returns the setting of an index.
func (s settings) get(id int) uint32 {
	if len(s) < 4*id {
		return 0
	}
	return asU32(s[4*(id-1):])
}

// foreignSettings returns the settings of all links that are not ours and
// speak IPv4: nothing here knows which of them the desired state will name.
func (t linkTable) foreignSettings() []netstate.Setting {
	var out []netstate.Setting
	for name, l := range t.byName {
		if !l.ours && l.ipv4 {
			out = append(out, netstate.Setting{Dev: name, Forwarding: l.forwarding})
		}
	}
	return out
}

// setSettings changes links that are not ours, where the desired state says so
// and in nothing else.
func (ns *NetNS) setSettings(vs []netstate.Setting, index map[string]int) []error {
	return each(ns.rt, "netconf", vs, func(v netstate.Setting) (request, error) {
		i, err := indexOf(index, v.Dev)
		a := attrs{linkHeader(i, 0, 0)}
		a.inetConf(func(a *attrs) { a.u32(confForwarding, boolToU32(v.Forwarding)) })
		return request{typ: unix.RTM_SETLINK, data: a.b}, err
	})
}

// inetConf adds IPv4 settings to a message about a link. It needs no access
// to /proc/sys, which is read-only in most containers.
func (a *attrs) inetConf(set func(*attrs)) {
	a.nest(unix.IFLA_AF_SPEC, func(a *attrs) {
		a.nest(unix.AF_INET, func(a *attrs) {
			a.nest(unix.IFLA_INET_CONF, set)
		})
	})
}

// parseNetconf reports which setting of which link a message says was changed;
// not ok for one that says all, as for a link that is new.
func parseNetconf(b []byte) (index int, forwarding, ok bool) {
	const ( // of <linux/netconf.h>
		sizeofNetconfmsg   = 4 // with padding
		netconfaIfindex    = 1
		netconfaForwarding = 2
		netconfaRPFilter   = 3
	)
	if len(b) < sizeofNetconfmsg || b[0] != unix.AF_INET {
		return 0, false, false
	}
	rpFilter := false
	eachAttr(b[sizeofNetconfmsg:], func(t uint16, v []byte) {
		switch t {
		case netconfaIfindex:
			index = int(int32(asU32(v))) // negative for "all" and "default"
		case netconfaForwarding:
			forwarding = true
		case netconfaRPFilter:
			rpFilter = true
		}
	})
	return index, forwarding, index > 0 && forwarding != rpFilter
}
