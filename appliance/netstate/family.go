package netstate

import "slices"

// Where the kernel lets chains be, and rules in them work, is decided here, once
// for each family; package kernel has the numbers of the hooks.
var (
	ipHooks  = []string{"prerouting", "input", "forward", "output", "postrouting"}
	arpHooks = []string{"input", "output"} // linux/netfilter_arp.h knows no other that anybody calls
)

// IsIP reports whether every packet of the family is one of IP.
func (f Family) IsIP() bool { return f == FamilyINET || f == FamilyIPv4 || f == FamilyIPv6 }

// Hooks returns where a chain of a type may be in a table of the family (nft(8),
// "ADDRESS FAMILIES" and "CHAINS"); none: the family has no chains of the type.
func (f Family) Hooks(chainType string) []string {
	switch {
	case chainType == "filter" && f == FamilyARP:
		return arpHooks
	case chainType == "filter" && (f.IsIP() || f == FamilyBridge):
		return ipHooks
	case chainType == "nat" && f.IsIP():
		return []string{"prerouting", "input", "output", "postrouting"}
	case chainType == "route" && f.IsIP():
		return []string{"output"}
	}
	return nil
}

// ActionHooks returns the hooks at which an action works in a table of the family,
// in a chain whose type has it; none: the family has no such action.
//
// Those of bridges are what the kernel says: reject where its
// net/bridge/netfilter/nft_reject_bridge.c allows it, notrack where bridges
// track connections, which is prerouting only (nf_conntrack_bridge.c).
func (f Family) ActionHooks(kind ActionKind) []string {
	switch f {
	case FamilyARP:
		if kind == Accept || kind == Drop {
			return arpHooks
		}
		return nil
	case FamilyBridge:
		switch kind {
		case Accept, Drop, SetCTMark, RestoreCT, ClampMSS:
			return ipHooks
		case Reject:
			return []string{"prerouting", "input"}
		case NoTrack:
			return []string{"prerouting"}
		}
		return nil
	}
	switch kind {
	case Reject:
		return []string{"input", "forward", "output"}
	case NoTrack, DNAT:
		return []string{"prerouting", "output"}
	case SNAT:
		return []string{"postrouting", "input"}
	case Masquerade:
		return []string{"postrouting"}
	case SetPrefix:
		if f != FamilyIPv4 {
			return nil // checksums of IPv6 are elsewhere
		}
	}
	return ipHooks
}

// HasDevice reports whether packets at a hook of the family have a device, "in"
// or "out". What a bridge sends has lost the one that it came in by at
// postrouting (br_forward_finish of net/bridge/br_forward.c).
func (f Family) HasDevice(hook, dir string) bool {
	without := []string{"prerouting", "input"}
	if dir == "in" {
		without = []string{"output"}
		if f == FamilyBridge {
			without = []string{"output", "postrouting"}
		}
	}
	return !slices.Contains(without, hook)
}
