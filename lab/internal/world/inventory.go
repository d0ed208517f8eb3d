package world

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	nsfd "github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// An Inventory is what only somebody's doing changes in the kernel of a host:
// links and their settings, addresses, rules, routes, nftables' tables and
// chains, one a line. It has no counters, no ages, no caches and nothing that
// has a random name.
//
// It is read by netlink and from /proc/sys: the tools' output says more
// (HostState), and takes many processes for each host.
type Inventory struct {
	Host  string   `json:"host"`
	Lines []string `json:"lines"` // sorted
}

func (a *agent) inventory() ([]Inventory, error) { return inventories(a.namespaces) }

// inventories takes the inventory of the namespaces that there are, and leaves out
// one whose pod ends meanwhile.
func inventories(present func() []namedNamespace) ([]Inventory, error) {
	var out []Inventory
	for _, n := range present() {
		lines, err := inventoryOf(n.ns)
		if err != nil {
			if !slices.ContainsFunc(present(), func(p namedNamespace) bool { return p.ns.File == n.ns.File }) {
				continue
			}
			return nil, fmt.Errorf("inventory of %s: %w", n.name, err)
		}
		out = append(out, Inventory{Host: n.name, Lines: lines})
	}
	slices.SortFunc(out, func(a, b Inventory) int { return strings.Compare(a.Host, b.Host) })
	return out, nil
}

func inventoryOf(ns *Namespace) ([]string, error) {
	h, err := netlink.NewHandleAt(nsfd.NsHandle(ns.File.Fd()), unix.NETLINK_ROUTE)
	if err != nil {
		return nil, err
	}
	defer h.Close()
	i := inventory{handle: h, names: map[int]string{}}
	for _, add := range []func() error{i.links, i.addresses, i.rules, i.routes, func() error { return i.chains(ns) }, func() error { return ns.Do(i.settings) }} {
		if err := add(); err != nil {
			return nil, err
		}
	}
	slices.Sort(i.lines)
	return i.lines, nil
}

// An inventory collects lines.
type inventory struct {
	handle *netlink.Handle
	names  map[int]string // of links
	lines  []string
}

func (i *inventory) add(format string, args ...any) {
	i.lines = append(i.lines, strings.Join(strings.Fields(fmt.Sprintf(format, args...)), " "))
}

// IsPodLink tells whether a link is a pod's: the names of those are random.
func IsPodLink(name string) bool { return strings.HasPrefix(name, "veth") }

func (i *inventory) links() error {
	links, err := i.handle.LinkList()
	if err != nil {
		return fmt.Errorf("links: %w", err)
	}
	for _, l := range links {
		name := l.Attrs().Name
		i.names[l.Attrs().Index] = name
		if !IsPodLink(name) {
			i.add("link %s", name)
		}
	}
	return nil
}

// linkSettings are what is asked of links in /proc/sys/net/FAMILY/conf: what
// appliances write, and what decides where packets go.
var linkSettings = []struct {
	family, dir string
	keys        []string
}{
	{"IPv4", "/proc/sys/net/ipv4/conf", []string{"forwarding", "rp_filter", "promote_secondaries", "accept_local", "proxy_arp"}},
	{"IPv6", "/proc/sys/net/ipv6/conf", []string{"forwarding", "proxy_ndp", "accept_ra"}},
}

// settings are those of all links, in the words of ip netconf; all and default
// are among them, and all's forwarding is the host's. The calling thread is in
// the namespace.
func (i *inventory) settings() error {
	names := []string{"all", "default"}
	for _, name := range i.names {
		if !IsPodLink(name) {
			names = append(names, name)
		}
	}
	for _, of := range linkSettings {
		for _, name := range names {
			var values []string
			for _, key := range of.keys {
				text, err := os.ReadFile(filepath.Join(of.dir, name, key))
				if errors.Is(err, fs.ErrNotExist) { // without that family, or gone since
					continue
				}
				if err != nil {
					return fmt.Errorf("settings: %w", err)
				}
				values = append(values, key, strings.TrimSpace(string(text)))
			}
			if len(values) > 0 {
				i.add("%s netconf dev %s %s", of.family, name, strings.Join(values, " "))
			}
		}
	}
	return nil
}

func (i *inventory) addresses() error {
	addrs, err := i.handle.AddrList(nil, netlink.FAMILY_ALL)
	if err != nil {
		return fmt.Errorf("addresses: %w", err)
	}
	for _, a := range addrs {
		if !a.IP.IsLinkLocalUnicast() && !IsPodLink(i.names[a.LinkIndex]) { // ptp gives the node's end one
			i.add("address %s dev %s", a.IPNet, i.names[a.LinkIndex])
		}
	}
	return nil
}

func (i *inventory) rules() error {
	rules, err := i.handle.RuleList(netlink.FAMILY_ALL)
	if err != nil {
		return fmt.Errorf("rules: %w", err)
	}
	for _, r := range rules {
		mark := ""
		if r.Mark != 0 {
			mark = fmt.Sprintf("fwmark %#x", r.Mark)
			if r.Mask != nil {
				mark += fmt.Sprintf("/%#x", *r.Mask)
			}
		}
		i.add("%s rule %d: from %v to %v %s %s %s table %d", family(r.Family), r.Priority, r.Src, r.Dst,
			option("iif", r.IifName), option("oif", r.OifName), mark, r.Table)
	}
	return nil
}

func family(f int) string {
	if f == unix.AF_INET6 {
		return "IPv6"
	}
	return "IPv4"
}

func option(key, value string) string {
	if value == "" {
		return ""
	}
	return key + " " + value
}

func (i *inventory) routes() error {
	for _, f := range []int{unix.AF_INET, unix.AF_INET6} {
		routes, err := i.handle.RouteListFiltered(f, &netlink.Route{Table: unix.RT_TABLE_UNSPEC}, netlink.RT_FILTER_TABLE)
		if err != nil {
			return fmt.Errorf("routes: %w", err)
		}
		for _, r := range routes {
			dev := i.names[r.LinkIndex]
			if r.Flags&unix.RTM_F_CLONED != 0 || IsPodLink(dev) || r.Dst != nil && r.Dst.IP.IsLinkLocalUnicast() {
				continue
			}
			src := ""
			if r.Src != nil && r.Priority == 0 {
				src = "src " + r.Src.String()
			}
			via := ""
			if r.Gw != nil {
				via = "via " + r.Gw.String()
			}
			i.add("%s route %v %s %s %s table %d scope %s type %d mtu %d", family(f), r.Dst, via, option("dev", dev), src, r.Table, r.Scope, r.Type, r.MTU)
		}
	}
	return nil
}

// others are the chains of kube-proxy and of CNI plugins: they follow the API
// objects and the pods.
var others = regexp.MustCompile(`kube-proxy|KUBE-|CNI-`)

// OfOthers tells whether a chain, with its table before it, is one of those that
// an Inventory leaves out.
func OfOthers(chain string) bool { return others.MatchString(chain) }

func (i *inventory) chains(ns *Namespace) error {
	conn, err := nftables.New(nftables.WithNetNSFd(int(ns.File.Fd())))
	if err != nil {
		return fmt.Errorf("nftables: %w", err)
	}
	tables, err := conn.ListTables()
	if err != nil {
		return fmt.Errorf("nftables: tables: %w", err)
	}
	for _, t := range tables {
		i.add("table %s %s", tableFamily(t.Family), t.Name)
	}
	chains, err := conn.ListChains()
	if err != nil {
		return fmt.Errorf("nftables: chains: %w", err)
	}
	for _, c := range chains {
		if !OfOthers(c.Table.Name + " " + c.Name) {
			i.add("chain %s %s %s", tableFamily(c.Table.Family), c.Table.Name, c.Name)
		}
	}
	return nil
}

func tableFamily(f nftables.TableFamily) string {
	switch f {
	case nftables.TableFamilyIPv4:
		return "ip"
	case nftables.TableFamilyIPv6:
		return "ip6"
	case nftables.TableFamilyINet:
		return "inet"
	case nftables.TableFamilyARP:
		return "arp"
	case nftables.TableFamilyBridge:
		return "bridge"
	case nftables.TableFamilyNetdev:
		return "netdev"
	}
	return fmt.Sprint(f)
}
