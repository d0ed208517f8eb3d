package netstate

import (
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"net/netip"
	"strings"
)

// String returns the link in the notation of ip-link(8).
func (l Link) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "dev %s", l.Name)
	if l.MTU != 0 {
		fmt.Fprintf(&b, " mtu %d", l.MTU)
	}
	if l.MAC != (MAC{}) {
		fmt.Fprintf(&b, " address %s", l.MAC)
	}
	if l.Description != "" {
		fmt.Fprintf(&b, " alias %q", l.Description)
	}
	fmt.Fprintf(&b, " type %s", l.Kind)
	switch l.Kind {
	case KindGeneve:
		fmt.Fprintf(&b, " id %d remote %s dstport %d", l.Geneve.VNI, l.Geneve.Remote, l.Geneve.Port)
	case KindVXLAN:
		fmt.Fprintf(&b, " id %d local %s dstport %d nolearning", l.VXLAN.VNI, l.VXLAN.Local, l.VXLAN.Port)
	case KindVeth:
		fmt.Fprintf(&b, " peer name %s", l.Peer)
	}
	if l.Forwarding {
		b.WriteString(" forwarding")
	}
	if l.RPFilter != 0 {
		fmt.Fprintf(&b, " rp_filter %d", l.RPFilter)
	}
	if l.AcceptLocal {
		b.WriteString(" accept_local")
	}
	if l.Down {
		b.WriteString(" down")
	}
	return b.String()
}

// String returns the address as six bytes with colons.
func (m MAC) String() string {
	return fmt.Sprintf("%02x:%02x:%02x:%02x:%02x:%02x", m[0], m[1], m[2], m[3], m[4], m[5])
}

// String returns the address in the notation of ip-address(8).
func (a Address) String() string { return a.Prefix.String() + " dev " + a.Dev }

// String returns the route in the notation of ip-route(8).
func (r Route) String() string {
	var b strings.Builder
	if r.Type != Unicast {
		b.WriteString(string(r.Type) + " ")
	}
	switch {
	case r.Dst.IsValid() && r.Dst.Bits() == 0:
		b.WriteString("default")
	case r.Dst.IsSingleIP():
		b.WriteString(r.Dst.Addr().String())
	default:
		b.WriteString(r.Dst.String())
	}
	if r.Via.IsValid() {
		fmt.Fprintf(&b, " via %s", r.Via)
	}
	if r.Dev != "" {
		fmt.Fprintf(&b, " dev %s", r.Dev)
	}
	fmt.Fprintf(&b, " table %d", r.Table)
	if r.Src.IsValid() {
		fmt.Fprintf(&b, " src %s", r.Src)
	}
	if r.Scope != ScopeGlobal {
		fmt.Fprintf(&b, " scope %s", r.Scope)
	}
	if r.Metric != 0 {
		fmt.Fprintf(&b, " metric %d", r.Metric)
	}
	if r.MTU != 0 {
		fmt.Fprintf(&b, " mtu %d", r.MTU)
	}
	if r.OnLink {
		b.WriteString(" onlink")
	}
	if r.Other != "" {
		b.WriteString(" " + r.Other)
	}
	return b.String()
}

// String returns the rule in the notation of ip-rule(8).
func (r Rule) String() string {
	var b strings.Builder
	if r.Is6() {
		b.WriteString("-6 ")
	}
	fmt.Fprintf(&b, "%d: ", r.Priority)
	if r.Not {
		b.WriteString("not ")
	}
	fmt.Fprintf(&b, "from %s", prefixOr(r.Src, "all"))
	if r.Dst.IsValid() {
		fmt.Fprintf(&b, " to %s", prefixOr(r.Dst, ""))
	}
	if r.Mark != 0 || r.Mask != 0 {
		fmt.Fprintf(&b, " fwmark 0x%x", r.Mark)
		if r.Mask != 0 {
			fmt.Fprintf(&b, "/0x%x", r.Mask)
		}
	}
	if r.IIF != "" {
		fmt.Fprintf(&b, " iif %s", r.IIF)
	}
	if r.OIF != "" {
		fmt.Fprintf(&b, " oif %s", r.OIF)
	}
	if r.Other != "" {
		b.WriteString(" " + r.Other)
	}
	switch {
	case r.Unreachable:
		b.WriteString(" unreachable")
	case r.Goto != 0:
		fmt.Fprintf(&b, " goto %d", r.Goto)
	case r.Nop:
		b.WriteString(" nop")
	case r.Table == 254:
		b.WriteString(" lookup main")
	default:
		fmt.Fprintf(&b, " lookup %d", r.Table)
	}
	return b.String()
}

func prefixOr(p netip.Prefix, none string) string {
	switch {
	case !p.IsValid():
		return none
	case p.IsSingleIP():
		return p.Addr().String()
	default:
		return p.String()
	}
}

// String returns the key in base64, as wg(8) does.
func (k Key) String() string { return base64.StdEncoding.EncodeToString(k[:]) }

// String returns the fingerprint in hexadecimal digits.
func (f Fingerprint) String() string { return hex.EncodeToString(f[:]) }

// String returns the configuration in the notation of wg(8) "showconf",
// with the public key where that has the private one.
func (w WireGuard) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "[Interface] # %s\n", w.Dev)
	if w.ListenPort != 0 {
		fmt.Fprintf(&b, "ListenPort = %d\n", w.ListenPort)
	}
	fmt.Fprintf(&b, "# PublicKey = %s\n", w.PublicKey)
	for _, p := range w.Peers {
		b.WriteString(p.String())
	}
	return b.String()
}

// String returns the peer in the notation of wg(8) "showconf".
func (p WireGuardPeer) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "[Peer]\nPublicKey = %s\n", p.PublicKey)
	if p.PresharedKey != (Fingerprint{}) {
		fmt.Fprintf(&b, "# PresharedKey has the fingerprint %s\n", p.PresharedKey)
	}
	if len(p.AllowedIPs) > 0 {
		ips := make([]string, len(p.AllowedIPs))
		for i, a := range p.AllowedIPs {
			ips[i] = a.String()
		}
		fmt.Fprintf(&b, "AllowedIPs = %s\n", strings.Join(ips, ", "))
	}
	if p.Endpoint.IsValid() {
		fmt.Fprintf(&b, "Endpoint = %s\n", p.Endpoint)
	}
	if p.Keepalive != 0 {
		fmt.Fprintf(&b, "PersistentKeepalive = %d\n", p.Keepalive)
	}
	return b.String()
}

// String returns the identity of a table as nft(8) wants it.
func (id TableID) String() string { return string(id.Family) + " " + id.Name }

// String returns the whole state, one thing a line, sorted.
func (s State) String() string {
	s = s.Normalized()
	var b strings.Builder
	lines(&b, "link ", s.Links)
	lines(&b, "netconf ", s.Settings)
	lines(&b, "addr ", s.Addresses)
	lines(&b, "neigh ", s.Neighbors)
	lines(&b, "fdb ", s.FDB)
	lines(&b, "route ", s.Routes)
	lines(&b, "rule ", s.Rules)
	lines(&b, "", s.WireGuard)
	lines(&b, "", s.Tables)
	return b.String()
}

// String returns the changes, one a line, in the order in which they are
// carried out; "+" adds, "~" changes, "-" removes.
func (c Changes) String() string {
	var b strings.Builder
	lines(&b, "+ link ", c.AddLinks)
	lines(&b, "~ link ", c.ChangeLinks)
	lines(&b, "± link ", c.RecreateLinks)
	lines(&b, "~ wg ", c.SetWireGuard)
	lines(&b, "~ netconf ", c.SetSettings)
	lines(&b, "+ addr ", c.AddAddresses)
	lines(&b, "~ neigh ", c.SetNeighbors)
	lines(&b, "~ fdb ", c.SetFDB)
	lines(&b, "+ rule ", c.AddPassRules)
	lines(&b, "+ route ", c.AddRoutes)
	lines(&b, "~ route ", c.ReplaceRoutes)
	lines(&b, "+ rule ", c.AddRules)
	lines(&b, "~ ", c.SetTables)
	lines(&b, "- table ", c.DeleteTables)
	lines(&b, "- ", c.Evict)
	lines(&b, "- rule ", c.DeleteRules)
	lines(&b, "- route ", c.DeleteRoutes)
	lines(&b, "- rule ", c.DeletePassRules)
	lines(&b, "- fdb ", c.DeleteFDB)
	lines(&b, "- neigh ", c.DeleteNeighbors)
	lines(&b, "- addr ", c.DeleteAddresses)
	lines(&b, "- link ", c.DeleteLinks)
	return b.String()
}

func lines[T fmt.Stringer](b *strings.Builder, prefix string, s []T) {
	for _, v := range s {
		b.WriteString(prefix + strings.TrimSuffix(v.String(), "\n") + "\n")
	}
}
