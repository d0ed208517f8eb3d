// Package sysctl gives a new network namespace the settings of a machine on
// which nobody has changed any.
//
// A kernel copies into each new namespace what its own first one has:
// conf/all and conf/default of IPv4, those of IPv6 where
// net.core.devconf_inherit_init_net says so, and a few of TCP. A machine with
// Docker or Podman forwards, one with systemd filters by the reverse path, and
// a tuned one has another congestion control; tests and labs that inherit any
// of it do something else there than elsewhere.
package sysctl

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
)

// root is where the calling thread's namespace has its settings.
const root = "/proc/sys/net"

// A Setting is what a file below /proc/sys/net has in a new namespace.
type Setting struct {
	Path string // "ipv4/ip_default_ttl"
	// Values are those that are right. The first one that the kernel lets a
	// namespace have is written.
	Values []string
	// Optional settings are of modules that may not be there.
	Optional bool
}

// A conf is a setting that IPv4 or IPv6 has for the namespace and for each of
// its links.
type conf struct{ name, all, link string }

// confs4 are the settings in ipv4/conf. The first one changes others when it is
// written. What only multicast daemons write is not among them.
var confs4 = []conf{
	{"forwarding", "0", "0"},
	{"accept_local", "0", "0"},
	{"accept_redirects", "1", "1"},
	{"accept_source_route", "0", "1"},
	{"arp_accept", "0", "0"},
	{"arp_announce", "0", "0"},
	{"arp_evict_nocarrier", "1", "1"},
	{"arp_filter", "0", "0"},
	{"arp_ignore", "0", "0"},
	{"arp_notify", "0", "0"},
	{"bc_forwarding", "0", "0"},
	{"bootp_relay", "0", "0"},
	{"disable_policy", "0", "0"},
	{"disable_xfrm", "0", "0"},
	{"drop_gratuitous_arp", "0", "0"},
	{"drop_unicast_in_l2_multicast", "0", "0"},
	{"force_igmp_version", "0", "0"},
	{"igmpv2_unsolicited_report_interval", "10000", "10000"},
	{"igmpv3_unsolicited_report_interval", "1000", "1000"},
	{"ignore_routes_with_linkdown", "0", "0"},
	{"log_martians", "0", "0"},
	{"medium_id", "0", "0"},
	{"promote_secondaries", "0", "0"},
	{"proxy_arp", "0", "0"},
	{"proxy_arp_pvlan", "0", "0"},
	{"route_localnet", "0", "0"},
	{"rp_filter", "0", "0"},
	{"secure_redirects", "1", "1"},
	{"send_redirects", "1", "1"},
	{"shared_media", "1", "1"},
	{"src_valid_mark", "0", "0"},
	{"tag", "0", "0"},
}

// ofLoopback are settings that the kernel itself makes different for lo.
var ofLoopback = []string{"disable_policy", "disable_xfrm"}

// confs6 are the settings in ipv6/conf on which it depends where packets go and
// which addresses there are.
var confs6 = []conf{
	{"forwarding", "0", "0"},
	{"accept_dad", "0", "1"},
	{"accept_ra", "1", "1"},
	{"accept_redirects", "1", "1"},
	{"accept_source_route", "0", "0"},
	{"autoconf", "1", "1"},
	{"dad_transmits", "1", "1"},
	{"disable_ipv6", "0", "0"},
	{"disable_policy", "0", "0"},
	{"hop_limit", "64", "64"},
	{"keep_addr_on_down", "0", "0"},
	{"max_addresses", "16", "16"},
	{"proxy_ndp", "0", "0"},
	{"use_tempaddr", "0", "0"},
}

// others are settings of a namespace as a whole. Those of TCP's memory and its
// congestion control are inherited; the rest says what tests and labs count on.
var others = []Setting{
	{"ipv4/fwmark_reflect", []string{"0"}, false},
	{"ipv4/icmp_echo_ignore_all", []string{"0"}, false},
	{"ipv4/icmp_errors_use_inbound_ifaddr", []string{"0"}, false},
	{"ipv4/icmp_ratelimit", []string{"1000"}, false},
	{"ipv4/icmp_ratemask", []string{"6168"}, false},
	{"ipv4/ip_default_ttl", []string{"64"}, false},
	{"ipv4/ip_forward_use_pmtu", []string{"0"}, false},
	{"ipv4/ip_local_port_range", []string{"32768 60999"}, false},
	{"ipv4/ip_local_reserved_ports", []string{""}, false},
	{"ipv4/ip_no_pmtu_disc", []string{"0"}, false},
	{"ipv4/ip_nonlocal_bind", []string{"0"}, false},
	{"ipv4/ip_unprivileged_port_start", []string{"1024"}, false},
	// Nobody; in a user namespace the kernel shows groups that it has not so.
	{"ipv4/ping_group_range", []string{"1 0", "65534 65534"}, false},
	// A namespace may have what the machine allows its users; reno always.
	{"ipv4/tcp_congestion_control", []string{"cubic", "reno"}, false},
	{"ipv4/tcp_ecn", []string{"2"}, false},
	{"ipv4/tcp_fwmark_accept", []string{"0"}, false},
	{"ipv4/tcp_mtu_probing", []string{"0"}, false},
	{"ipv4/tcp_rmem", []string{"4096 131072 6291456"}, false},
	{"ipv4/tcp_wmem", []string{"4096 16384 4194304"}, false},
	{"ipv6/ip_nonlocal_bind", []string{"0"}, true},
	// Where br_netfilter is loaded a bridge would translate and drop what it
	// leaves alone on other machines.
	{"bridge/bridge-nf-call-arptables", []string{"0"}, true},
	{"bridge/bridge-nf-call-ip6tables", []string{"0"}, true},
	{"bridge/bridge-nf-call-iptables", []string{"0"}, true},
	{"netfilter/nf_conntrack_acct", []string{"0"}, true},
	{"netfilter/nf_conntrack_checksum", []string{"1"}, true},
	{"netfilter/nf_conntrack_tcp_be_liberal", []string{"0"}, true},
	{"netfilter/nf_conntrack_tcp_loose", []string{"1"}, true},
	{"netfilter/nf_conntrack_timestamp", []string{"0"}, true},
}

// Settings are those of a new namespace with these links, in the order in which
// they can be written.
func Settings(links ...string) []Setting {
	var out []Setting
	for _, c := range confs4 {
		add := func(where, value string) {
			out = append(out, Setting{Path: path.Join("ipv4/conf", where, c.name), Values: []string{value}, Optional: newer(c.name)})
		}
		add("all", c.all)
		add("default", c.link)
		for _, l := range links {
			if l != "lo" || !slices.Contains(ofLoopback, c.name) {
				add(l, c.link)
			}
		}
	}
	for _, c := range confs6 {
		out = append(out,
			Setting{Path: path.Join("ipv6/conf/all", c.name), Values: []string{c.all}, Optional: true},
			Setting{Path: path.Join("ipv6/conf/default", c.name), Values: []string{c.link}, Optional: true})
	}
	return append(out, others...)
}

// newer tells whether a setting came with a kernel later than Linux 5.4.
func newer(name string) bool { return name == "arp_evict_nocarrier" }

// Reset gives the network namespace of the calling thread, which must be new,
// the settings that it would have on a machine where nobody has changed any. It
// writes only what is different.
func Reset() error {
	links, err := linksHere()
	if err != nil {
		return err
	}
	var errs []error
	for _, s := range Settings(links...) {
		errs = append(errs, s.apply())
	}
	return errors.Join(errs...)
}

// linksHere are the links of the calling thread's namespace. A new one has lo,
// and what tunnels' modules give to every namespace.
func linksHere() ([]string, error) {
	entries, err := os.ReadDir(path.Join(root, "ipv4/conf"))
	if err != nil {
		return nil, fmt.Errorf("settings of a network namespace: %w", err)
	}
	var links []string
	for _, e := range entries {
		if name := e.Name(); name != "all" && name != "default" {
			links = append(links, name)
		}
	}
	return links, nil
}

func (s Setting) apply() error {
	file := path.Join(root, s.Path)
	b, err := os.ReadFile(file)
	switch {
	case errors.Is(err, fs.ErrNotExist) && s.Optional:
		return nil
	case err != nil:
		return fmt.Errorf("setting of a network namespace: %w", err)
	}
	now := strings.Join(strings.Fields(string(b)), " ")
	for _, v := range s.Values {
		if v == now {
			return nil
		}
		if err = os.WriteFile(file, []byte(v+"\n"), 0); err == nil {
			return nil
		}
	}
	return fmt.Errorf("setting of a network namespace: %q does not become %q: %w", now, strings.Join(s.Values, " or "), err)
}
