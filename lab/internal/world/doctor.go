package world

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/lab/internal/kubelet"
	"github.com/isthmus-net/isthmus/lab/internal/topology"
)

// A Probe is one thing that a lab needs and whether it is there.
type Probe struct {
	Name   string   `json:"name"`
	OK     bool     `json:"ok"`
	Detail string   `json:"detail"`        // what was found
	Fix    string   `json:"fix,omitempty"` // what to do when it is not OK
	Needed []string `json:"needed"`        // the worlds that cannot be without it: "native", "vm", "kind"
}

// Names of the worlds in Probe.Needed.
const (
	worldNative = "native"
	worldVM     = "vm"
	worldKind   = "kind"
)

// What a lab of two clusters takes.
const (
	needMemory = 4 << 30
	needDisk   = 3 << 30 // the image of the virtual machine, twice, and a run's files
)

// Doctor probes this machine for what the worlds need. It changes nothing but
// what the kernel changes itself: that is asked in a namespace that goes away at
// once, and may load a module to answer.
func Doctor(ctx context.Context, binDir string) []Probe {
	both, native, vm := []string{worldNative, worldVM}, []string{worldNative}, []string{worldVM}
	probes := []Probe{
		probeRoot(both),
		probeBinaries(binDir, both),
		probeNamespaces(both),
		probeMemory([]string{worldNative, worldVM, worldKind}),
		probeDisk(both),
	}
	for _, t := range []struct{ program, pkg string }{{"ip", "iproute2"}, {"nft", "nftables"}, {"iptables", "iptables"}, {"conntrack", "conntrack"}} {
		probes = append(probes, probeProgram(t.program, t.pkg, both))
	}
	for _, t := range []struct{ program, pkg string }{
		{"qemu-system-x86_64", "qemu-system-x86"}, {"ipset", "ipset"}, {"mkfs.ext4", "e2fsprogs"}, {"depmod", "kmod"}, {"modprobe", "kmod"}, {"busybox", "busybox-static"}, {"dpkg-deb", "dpkg"},
	} {
		probes = append(probes, probeProgram(t.program, t.pkg, vm))
	}
	probes = append(probes, probeArchitecture(vm), probeTun(vm), probeKVM(), probeContainerd(binDir))
	for _, program := range Programs() {
		probes = append(probes, probeBuilt(binDir, program))
	}
	probes = append(probes, probeKernel(native)...)
	return append(probes,
		either(probes, Probe{Name: "overlay", Needed: native, Fix: "use --world vm, or a kernel with one of the modules"}, "geneve", "vxlan"),
		either(probes, Probe{Name: "encryption", Needed: native, Fix: "use --world vm, or a kernel with the module wireguard or tun"}, "wireguard", tunProbe),
	)
}

// either is a probe that is OK when one of others is: it says which.
func either(all []Probe, p Probe, names ...string) Probe {
	var found []string
	for _, o := range all {
		if o.OK && slices.Contains(names, o.Name) {
			found = append(found, o.Name)
		}
	}
	p.OK, p.Detail = len(found) > 0, strings.Join(found, ", ")
	if !p.OK {
		p.Detail = "neither " + strings.Join(names, " nor ")
	}
	return p
}

func probeRoot(needed []string) Probe {
	p := Probe{Name: "root", OK: os.Geteuid() == 0, Detail: fmt.Sprintf("user %d", os.Geteuid()), Needed: needed}
	p.Fix = "run it with sudo: the lab makes network namespaces in which pods run as any user"
	return p
}

func probeBinaries(dir string, needed []string) Probe {
	p := Probe{Name: "binaries", Needed: needed, Fix: "make build kubernetes cni"}
	var missing []string
	for _, b := range []string{"isthmus", "lab", "probe", "kubernetes", "kube-proxy", "cni/bridge", "cni/host-local", "cni/portmap"} {
		if _, err := os.Stat(filepath.Join(dir, b)); err != nil {
			missing = append(missing, b)
		}
	}
	p.OK = len(missing) == 0
	p.Detail = dir
	if !p.OK {
		p.Detail = "not in " + dir + ": " + strings.Join(missing, ", ")
	}
	return p
}

// ContainerdProbe is the name of the probe for nodes with the real kubelet and
// containerd.
const ContainerdProbe = "containerd"

// probeContainerd is needed by the topologies that say so.
func probeContainerd(dir string) Probe {
	p := Probe{Name: ContainerdProbe, OK: true, Detail: "nodes can have the real kubelet and containerd", Fix: "make deps nodes, as root, where cgroups can be written"}
	if err := kubelet.Check(dir, filepath.Join(dir, ImagesDir)); err != nil {
		p.OK, p.Detail = false, strings.ReplaceAll(err.Error(), "\n", "; ")
	}
	return p
}

// Programs are those of bin/ that a scenario can require, and the lab itself does
// without. Each is the name of its probe and of its target of make.
func Programs() []string { return []string{"liqoctl", PublicProgram} }

// probeBuilt is needed by the scenarios that say so.
func probeBuilt(dir, program string) Probe {
	p := Probe{Name: program, OK: true, Detail: filepath.Join(dir, program), Fix: "make " + program}
	if _, err := os.Stat(p.Detail); err != nil {
		p.OK, p.Detail = false, "not in "+dir
	}
	return p
}

func probeNamespaces(needed []string) Probe {
	p := Probe{Name: "network namespaces", Needed: needed, OK: true, Detail: "can be made",
		Fix: "as root, outside of a container that forbids it; see /proc/sys/user/max_net_namespaces"}
	ns, err := NewNamespace()
	if err != nil {
		p.OK, p.Detail = false, err.Error()
		return p
	}
	ns.Close()
	return p
}

func probeMemory(needed []string) Probe {
	p := Probe{Name: "memory", Needed: needed, Fix: "end other programs, or take a machine with 4 GiB free"}
	available, err := memAvailable()
	p.OK = err == nil && available >= needMemory
	p.Detail = fmt.Sprintf("%.1f GiB available, two clusters need %d", float64(available)/(1<<30), needMemory>>30)
	if err != nil {
		p.Detail = err.Error()
	}
	return p
}

func memAvailable() (uint64, error) {
	b, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, err
	}
	lines := bufio.NewScanner(bytes.NewReader(b))
	for lines.Scan() {
		f := strings.Fields(lines.Text())
		if len(f) >= 2 && f[0] == "MemAvailable:" {
			kib, err := strconv.ParseUint(f[1], 10, 64)
			return kib << 10, err
		}
	}
	return 0, errors.New("/proc/meminfo does not say MemAvailable")
}

func probeDisk(needed []string) Probe {
	p := Probe{Name: "disk space", Needed: needed}
	dir, err := os.UserCacheDir()
	if err != nil {
		p.Detail, p.Fix = err.Error(), "set HOME or XDG_CACHE_HOME"
		return p
	}
	p.Fix = "make room, or set XDG_CACHE_HOME to a place that has it"
	free, at, err := freeSpace(dir)
	if err != nil {
		p.Detail = err.Error()
		return p
	}
	p.OK = free >= needDisk
	p.Detail = fmt.Sprintf("%.1f GiB free at %s, images need %d", float64(free)/(1<<30), at, needDisk>>30)
	return p
}

// freeSpace is the space at a directory, or at the nearest one above that
// exists.
func freeSpace(dir string) (free uint64, at string, err error) {
	for {
		var st unix.Statfs_t
		err := unix.Statfs(dir, &st)
		if err == nil {
			return st.Bavail * uint64(st.Bsize), dir, nil
		}
		if parent := filepath.Dir(dir); !errors.Is(err, unix.ENOENT) || parent == dir {
			return 0, dir, fmt.Errorf("%s: %w", dir, err)
		}
		dir = filepath.Dir(dir)
	}
}

func probeProgram(name, pkg string, needed []string) Probe {
	p := Probe{Name: name, Needed: needed, Fix: "make deps, or apt-get install " + pkg}
	path, err := exec.LookPath(name)
	for _, dir := range []string{"/usr/sbin", "/sbin"} {
		if err == nil {
			break
		}
		path, err = exec.LookPath(filepath.Join(dir, name))
	}
	p.OK, p.Detail = err == nil, path
	if err != nil {
		p.Detail = "not installed"
	}
	return p
}

func probeArchitecture(needed []string) Probe {
	return Probe{Name: "amd64", OK: runtime.GOARCH == "amd64", Detail: runtime.GOARCH, Needed: needed, Fix: "use --world native: the virtual machine's kernel is an amd64 one"}
}

// tunProbe is the name of the probe for tun and tap devices. The virtual
// machine's NIC is one, and WireGuard in user space has one.
const tunProbe = "/dev/net/tun"

func probeTun(needed []string) Probe {
	p := Probe{Name: tunProbe, Needed: needed, Fix: "modprobe tun; in a container: --device /dev/net/tun"}
	// In a namespace of its own: a tap device exists as long as its file.
	ns, err := NewNamespace()
	if err == nil {
		defer ns.Close()
		err = ns.Do(func() error {
			f, err := OpenTap("probe")
			if err == nil {
				f.Close()
			}
			return err
		})
	}
	p.OK, p.Detail = err == nil, "tap devices can be made"
	if err != nil {
		p.Detail = err.Error()
	}
	return p
}

// probeKVM is needed by nothing: without it the machine is emulated.
func probeKVM() Probe {
	p := Probe{Name: "KVM", Fix: "nothing: the virtual machine is emulated, which is slower"}
	f, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	if err != nil {
		p.Detail = err.Error()
		return p
	}
	f.Close()
	p.OK = true
	p.Detail = "/dev/kvm opens; the first boot under it will tell whether it works"
	return p
}

// probeKernel asks this kernel for what the daemons use. Only what the native
// world cannot replace is needed.
func probeKernel(native []string) []Probe {
	const module = "use --world vm, or a kernel with that module"
	type feature struct {
		name   string
		make   func(*Namespace) error
		needed []string
		fix    string
	}
	link := func(l netlink.Link) func(*Namespace) error {
		return func(ns *Namespace) error { return ns.nl.LinkAdd(l) }
	}
	attrs := func(name string) netlink.LinkAttrs { return netlink.LinkAttrs{Name: name} }
	table := func(rules string) func(*Namespace) error {
		return func(ns *Namespace) error { return ns.nft(rules) }
	}
	features := []feature{
		{"veth", link(&netlink.Veth{LinkAttrs: attrs("v0"), PeerName: "v1"}), native, "modprobe veth"},
		{"bridge", link(&netlink.Bridge{LinkAttrs: attrs("b0")}), native, "modprobe bridge"},
		{"nftables NAT", table("table ip t { chain c { type nat hook postrouting priority srcnat; masquerade; }\n}\n"), native, module},
		{"nftables conntrack", table("table ip u { chain c { type filter hook forward priority 0; ct state new ct mark set 1; }\n}\n"), native, module},
		{"geneve", link(&netlink.Geneve{LinkAttrs: attrs("g0"), ID: 1, Remote: []byte{192, 0, 2, 1}, Dport: geneveOurs}), nil, module},
		{"wireguard", link(&netlink.Wireguard{LinkAttrs: attrs("w0")}), nil, module + "; the gateway has a userspace implementation too"},
		{"vxlan", link(&netlink.Vxlan{LinkAttrs: attrs("x0"), VxlanId: 1, Port: vxlanOurs}), nil, module},
		{"dummy", link(&netlink.Dummy{LinkAttrs: attrs("d0")}), nil, module},
		{"vrf", link(&netlink.Vrf{LinkAttrs: attrs("r0"), Table: 100}), nil, module},
		{topology.FeatureNetem, probeNetem, nil, module},
		{topology.FeatureIPVS, probeIPVS, nil, "use --world vm, or a kernel with the modules ip_vs, ip_vs_rr, ip_set and dummy"},
		{"flowtable", table("table inet f { flowtable ft { hook ingress priority 0; devices = { lo }; }\nchain c { type filter hook forward priority 0; meta l4proto tcp flow add @ft; }\n}\n"), nil, module},
	}
	var probes []Probe
	for _, f := range features {
		p := Probe{Name: f.name, Needed: f.needed, Fix: f.fix, OK: true, Detail: "this kernel has it"}
		ns, err := NewNamespace()
		if err == nil {
			err = f.make(ns)
			ns.Close()
		}
		if err != nil {
			why, _, _ := strings.Cut(err.Error(), "\n")
			p.OK, p.Detail = false, "this kernel has it not: "+why
		}
		probes = append(probes, p)
	}
	return probes
}

// probeIPVS makes what kube-proxy makes in its mode ipvs: a link for addresses, a
// virtual server that takes its backends in turn, and a set.
func probeIPVS(ns *Namespace) error {
	return ns.Do(func() error {
		family, err := netlink.GenlFamilyGet("IPVS")
		if err != nil {
			return fmt.Errorf("IP virtual servers: %w", err)
		}
		// enum ip_vs_cmd and the attributes of a service, of linux/ip_vs.h.
		const newService, service = 1, 1
		const af, protocol, addr, port, scheduler, flags, timeout, netmask = 1, 2, 3, 4, 6, 7, 8, 9
		req := nl.NewNetlinkRequest(int(family.ID), unix.NLM_F_ACK)
		req.AddData(&nl.Genlmsg{Command: newService, Version: 1})
		vs := nl.NewRtAttr(service|unix.NLA_F_NESTED, nil)
		vs.AddRtAttr(af, nl.Uint16Attr(unix.AF_INET))
		vs.AddRtAttr(protocol, nl.Uint16Attr(unix.IPPROTO_UDP))
		vs.AddRtAttr(addr, append([]byte{192, 0, 2, 1}, make([]byte, 12)...))
		vs.AddRtAttr(port, []byte{0, 80})
		vs.AddRtAttr(scheduler, nl.ZeroTerminated("rr"))
		vs.AddRtAttr(flags, make([]byte, 8))
		vs.AddRtAttr(timeout, nl.Uint32Attr(0))
		vs.AddRtAttr(netmask, nl.Uint32Attr(^uint32(0)))
		req.AddData(vs)
		if _, err := req.Execute(unix.NETLINK_GENERIC, 0); err != nil {
			return fmt.Errorf("IP virtual server: %w", err)
		}
		if err := netlink.IpsetCreate("probe", "hash:ip,port", netlink.IpsetCreateOptions{}); err != nil {
			return fmt.Errorf("ipset: %w", err)
		}
		return ns.nl.LinkAdd(&netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Name: "d0"}})
	})
}

func probeNetem(ns *Namespace) error {
	lo, err := ns.nl.LinkByName("lo")
	if err != nil {
		return err
	}
	q := netlink.NewNetem(netlink.QdiscAttrs{LinkIndex: lo.Attrs().Index, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT}, netlink.NetemQdiscAttrs{Latency: 1000})
	return ns.nl.QdiscAdd(q)
}
