package kernel

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"strconv"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	nl "github.com/mdlayher/netlink"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// probeName is the name of things that are never there: a probe asks for
// them in a way that the kernel must refuse.
const probeName = "isthmus-probe"

// Features probes what this kernel can do and what the process may do in it.
// It leaves nothing behind.
func (ns *NetNS) Features(ctx context.Context) []Feature {
	ns.mu.Lock()
	defer ns.mu.Unlock()
	out := []Feature{
		{FeatureVersion, checkVersion()},
		{FeatureGeneve, ns.probeLink(string(netstate.KindGeneve))},
		{FeatureVXLAN, ns.probeLink(string(netstate.KindVXLAN))},
		{FeatureWireGuard, ns.probeLink(string(netstate.KindWireGuard))},
		{FeatureTUN, probeTUN()},
		{FeatureNFTables, ns.nft.probe(netstate.FamilyIPv4, false)},
		{FeatureNAT, ns.nft.probe(netstate.FamilyIPv4, true)},
		{FeatureNFTablesARP, ns.nft.probe(netstate.FamilyARP, false)},
		{FeatureNFTablesBridge, ns.nft.probe(netstate.FamilyBridge, false)},
		{FeatureRules, ns.probeRules()},
	}
	if err := ctx.Err(); err != nil {
		return nil
	}
	return out
}

// ErrNotInKernel says that the kernel lacks a feature for certain: that the process may
// not use it, or could not find out, is another error.
var ErrNotInKernel = errors.New("not in the kernel")

// notInKernel is an error that is ErrNotInKernel, too.
type notInKernel struct{ error }

func (e notInKernel) Is(target error) bool { return target == ErrNotInKernel }
func (e notInKernel) Unwrap() error        { return e.error }

// Missing returns the error of a feature by name, nil if it is there.
func Missing(features []Feature, name string) error {
	for _, f := range features {
		if f.Name == name {
			return f.Err
		}
	}
	return fmt.Errorf("feature %s was not probed", name)
}

// checkVersion refuses kernels that are too old.
func checkVersion() error {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return err
	}
	return checkRelease(unix.ByteSliceToString(u.Release[:]))
}

func checkRelease(release string) error {
	old, err := netstate.KernelTooOld(release)
	if err == nil && old {
		err = fmt.Errorf("%w: kernel %s is too old: %s or newer is needed", ErrUnsupported, release, netstate.LeastKernel)
	}
	return err
}

// probeLink reports whether the kernel can make links of a kind. It asks for
// one with more queues than any link may have: a kernel that does not know
// the kind says so, one that does refuses the queues.
func (ns *NetNS) probeLink(kind string) error {
	a := attrs{linkHeader(0, 0, 0)}
	a.str(unix.IFLA_IFNAME, probeName)
	a.u32(unix.IFLA_NUM_TX_QUEUES, 1<<20)
	a.nest(unix.IFLA_LINKINFO, func(a *attrs) { a.str(unix.IFLA_INFO_KIND, kind) })
	err := ns.rt.do(request{unix.RTM_NEWLINK, nl.Create | nl.Excl, a.b})
	switch {
	case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ERANGE):
		return nil
	case errors.Is(err, unix.EOPNOTSUPP):
		return notInKernel{fmt.Errorf("%w: the kernel has no %s links: load the module %s or build the kernel with it", ErrUnsupported, kind, kind)}
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
		return fmt.Errorf("%w: making links needs CAP_NET_ADMIN: %w", ErrUnsupported, err)
	case err == nil:
		return fmt.Errorf("probe for %s links: the kernel made one with %d queues", kind, 1<<20)
	default:
		return fmt.Errorf("probe for %s links: %w", kind, err)
	}
}

// probeTUN reports whether userspace WireGuard can have a tun device.
func probeTUN() error {
	f, err := os.OpenFile("/dev/net/tun", os.O_RDWR, 0)
	if err != nil {
		return tunError(err)
	}
	return f.Close()
}

// probeRules reports whether routing rules can be set: it deletes one that
// is not there.
func (ns *NetNS) probeRules() error {
	rule := netstate.Rule{Priority: 0x7ffffffe, Table: 0x7ffffffe, IIF: probeName}
	err := ns.rt.do(request{typ: unix.RTM_DELRULE, data: encodeRule(rule)})
	switch {
	case errors.Is(err, unix.ENOENT), err == nil:
		return nil
	case errors.Is(err, unix.EOPNOTSUPP):
		return fmt.Errorf("%w: the kernel has no policy routing: build it with CONFIG_IP_MULTIPLE_TABLES", ErrUnsupported)
	default:
		return fmt.Errorf("%w: policy routing: %w", ErrUnsupported, err)
	}
}

// probe makes a table of a family and deletes it in one transaction, so that nobody ever
// sees it.
func (n *nft) probe(family netstate.Family, nat bool) error {
	b, err := newBatch()
	if err != nil {
		return err
	}
	t := b.AddTable(&nftables.Table{Name: TablePrefix + probeName, Family: families[family]})
	what, _ := partsOf(family)
	if nat {
		what = "NAT in nftables (modules nft_chain_nat, nft_nat, nft_masq, nft_ct)"
		policy := nftables.ChainPolicyAccept
		c := b.AddChain(&nftables.Chain{
			Table: t, Name: "postrouting", Type: nftables.ChainTypeNAT,
			Hooknum: nftables.ChainHookPostrouting, Priority: nftables.ChainPriorityNATSource, Policy: &policy,
		})
		to := netip.MustParsePrefix("192.0.2.0/24")
		for _, a := range []netstate.Action{{Kind: netstate.SNAT, To: to, Prefix: true}, {Kind: netstate.Masquerade}, {Kind: netstate.RestoreCT}} {
			exprs, err := (&compiler{family: family}).rule(netstate.FirewallRule{Action: a})
			if err != nil {
				return err
			}
			b.AddRule(&nftables.Rule{Table: t, Chain: c, Exprs: exprs})
		}
		b.AddRule(&nftables.Rule{Table: t, Chain: c, Exprs: []expr.Any{&expr.Counter{}}})
	}
	b.DelTable(t)
	err = n.commit(b)
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.EPERM), errors.Is(err, os.ErrPermission):
		return fmt.Errorf("%w: nftables needs CAP_NET_ADMIN: %w", ErrUnsupported, err)
	default:
		return fmt.Errorf("%w: the kernel has no %s: %w", ErrUnsupported, what, err)
	}
}

// RouteTo returns the path to dst, as "ip route get" shows it. It is an error
// if there is none, or none that leaves by a link.
func (ns *NetNS) RouteTo(dst netip.Addr) (Path, error) {
	ns.mu.Lock()
	defer ns.mu.Unlock()
	dst = dst.Unmap()
	routes, err := ns.nl.RouteGet(dst.AsSlice())
	if err != nil {
		return Path{}, fmt.Errorf("route to %s: %w", dst, err)
	}
	if len(routes) != 1 {
		return Path{}, fmt.Errorf("route to %s: the kernel names %d ways, one is needed", dst, len(routes))
	}
	r := routes[0]
	src, ok := netip.AddrFromSlice(r.Src)
	if !ok || src.IsUnspecified() {
		return Path{}, fmt.Errorf("route to %s: the kernel names no source address; give the host one of that family", dst)
	}
	l, err := ns.nl.LinkByIndex(r.LinkIndex)
	if err != nil {
		return Path{}, fmt.Errorf("route to %s: link %d: %w", dst, r.LinkIndex, err)
	}
	p := Path{Src: src.Unmap(), Dev: l.Attrs().Name, MTU: l.Attrs().MTU, Ours: l.Attrs().Group == linkGroup || l.Attrs().Group == peerGroup}
	if via, ok := r.Via.(*netlink.Via); ok { // of the other family: RTA_VIA of rtnetlink(7)
		p.Via, _ = netip.AddrFromSlice(via.Addr)
	} else if gw, ok := netip.AddrFromSlice(r.Gw); ok {
		p.Via = gw.Unmap()
	}
	if r.MTU != 0 {
		p.MTU = min(p.MTU, r.MTU)
	}
	return p, nil
}

// LinkMTU returns the MTU of a link, ours or not.
func (ns *NetNS) LinkMTU(name string) (int, error) {
	ns.mu.Lock()
	defer ns.mu.Unlock()
	l, err := ns.nl.LinkByName(name)
	if err != nil {
		var missing netlink.LinkNotFoundError
		if errors.As(err, &missing) {
			return 0, &netstate.NoLinkError{Name: name}
		}
		return 0, fmt.Errorf("link %s: %w", name, err)
	}
	return l.Attrs().MTU, nil
}

// InNoRoutes returns how many packets that came into the namespace could not
// be routed (IpInNoRoutes and Ip6InNoRoutes): unreachable rules count here.
func (ns *NetNS) InNoRoutes() (uint64, error) {
	v4, err := readCounter(ns.counters[0], func(text string) (uint64, error) { return netstatCounter(text, "IpExt:", "InNoRoutes") })
	if err != nil {
		return 0, fmt.Errorf("counter InNoRoutes: %w", err)
	}
	v6, err := readCounter(ns.counters[1], func(text string) (uint64, error) { return snmp6Counter(text, "Ip6InNoRoutes") })
	if err != nil {
		return 0, fmt.Errorf("counter Ip6InNoRoutes: %w", err)
	}
	return v4 + v6, nil
}

// Counted returns how many packets the rules with a counter in a table of ours
// have seen since the table was last replaced.
func (ns *NetNS) Counted(table netstate.TableID) (uint64, error) {
	by, err := ns.CountedBy(table)
	total := uint64(0)
	for _, n := range by {
		total += n
	}
	return total, err
}

// CountedBy is Counted for each name of rules in the table.
func (ns *NetNS) CountedBy(table netstate.TableID) (map[string]uint64, error) {
	ns.mu.Lock()
	defer ns.mu.Unlock()
	return ns.nft.counted(table)
}

func readCounter(f *os.File, parse func(string) (uint64, error)) (uint64, error) {
	if f == nil {
		return 0, nil
	}
	text, err := io.ReadAll(io.NewSectionReader(f, 0, 1<<20))
	if err != nil {
		return 0, err
	}
	return parse(string(text))
}

// netstatCounter reads /proc/net/netstat: a line of names, then one of
// values.
func netstatCounter(text, group, name string) (uint64, error) {
	var names []string
	for s := bufio.NewScanner(strings.NewReader(text)); s.Scan(); {
		words := strings.Fields(s.Text())
		switch {
		case len(words) == 0 || words[0] != group:
		case names == nil:
			names = words
		default:
			for i, n := range names {
				if n == name && i < len(words) {
					return strconv.ParseUint(words[i], 10, 64)
				}
			}
		}
	}
	return 0, fmt.Errorf("not in %s", group)
}

// snmp6Counter reads /proc/net/snmp6: a name and a value a line.
func snmp6Counter(text, name string) (uint64, error) {
	for s := bufio.NewScanner(strings.NewReader(text)); s.Scan(); {
		if words := strings.Fields(s.Text()); len(words) == 2 && words[0] == name {
			return strconv.ParseUint(words[1], 10, 64)
		}
	}
	return 0, errors.New("not in snmp6")
}
