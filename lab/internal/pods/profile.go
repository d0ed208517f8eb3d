package pods

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/containernetworking/cni/libcni"
	"k8s.io/apimachinery/pkg/types"

	"github.com/isthmus-net/isthmus/lab/internal/netns"
)

// newNetwork writes the node's CNI configuration and does what the profile's
// daemon would do first.
func (n *node) newNetwork(ctx context.Context, podCIDRs []netip.Prefix) (*network, error) {
	dir := filepath.Join(n.cfg.Dir, "cni")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	if n.cfg.CNI == CNIFlannel {
		if err := n.waitSubnet(ctx); err != nil {
			return nil, err
		}
	}
	if block, ok := n.cfg.Blocks[n.cfg.Name]; ok {
		podCIDRs = []netip.Prefix{block}
		if err := n.input(workloadRules, "nft", "-f", "-"); err != nil {
			return nil, fmt.Errorf("rules for the links of pods: %w", err)
		}
	}
	if n.cfg.CNI == CNIVPC {
		if err := n.vpcRouting(); err != nil {
			return nil, fmt.Errorf("routes of pods: %w", err)
		}
	}
	if err := n.masquerade(podCIDRs); err != nil {
		return nil, fmt.Errorf("masquerade: %w", err)
	}
	conf, err := n.conflist(dir, podCIDRs)
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(dir, "10-lab.conflist"), conf, 0o644); err != nil {
		return nil, err
	}
	list, err := libcni.NetworkConfFromBytes(conf)
	if err != nil {
		return nil, err
	}
	plugins := filepath.Join(n.cfg.BinDir, "cni")
	for _, p := range list.Plugins {
		if _, err := os.Stat(filepath.Join(plugins, p.Network.Type)); err != nil {
			return nil, fmt.Errorf("CNI plugin %s is missing: %w; build it with `make cni`, and flannel with `make flannel`", p.Network.Type, err)
		}
	}
	return &network{
		node: n.cfg.NetNS,
		cni:  libcni.NewCNIConfigWithCacheDir([]string{plugins}, filepath.Join(dir, "cache"), nil),
		list: list, addrs: map[types.UID][]netip.Addr{},
		bare: n.cfg.CNI == CNIIPPool || n.cfg.CNI == CNIVPC,
		vpc:  n.cfg.CNI == CNIVPC,
	}, nil
}

// conflist is the node's CNI configuration. For flannel it is what flannel's
// manifest installs.
func (n *node) conflist(dir string, podCIDRs []netip.Prefix) ([]byte, error) {
	if n.cfg.CNI != CNIFlannel {
		return Conflist(n.cfg.CNI, filepath.Join(dir, "ipam"), n.cfg.MTU, podCIDRs)
	}
	return FlannelConflist(n.subnetFile(), filepath.Join(dir, "flannel"), filepath.Join(dir, "ipam"))
}

// FlannelConflist is the CNI configuration that flannel's manifest installs.
// flanneld writes subnetFile; the directories are the plug-in's own.
func FlannelConflist(subnetFile, dir, ipamDir string) ([]byte, error) {
	// The plug-in of that release speaks this version; it gives the
	// delegate's own configuration (the subnet, the MTU) itself.
	return pluginList("0.3.1", map[string]any{
		"type": "flannel", "subnetFile": subnetFile, "dataDir": dir,
		"ipam":     map[string]any{"dataDir": ipamDir},
		"delegate": map[string]any{"hairpinMode": true, "isDefaultGateway": true},
	})
}

// Conflist is what a distribution with the reference plugins installs on a node:
// CNIBridge, or ptp for other profiles, with addresses of the node's podCIDRs kept
// in ipamDir. An MTU of 0 leaves links as the kernel makes them. There is no
// masquerade: the plug-ins would masquerade between pods of a cluster, too.
func Conflist(cni, ipamDir string, mtu int, podCIDRs []netip.Prefix) ([]byte, error) {
	var ranges [][]map[string]string
	var routes []map[string]string
	for _, p := range podCIDRs {
		ranges = append(ranges, []map[string]string{{"subnet": p.String()}})
		all := "0.0.0.0/0"
		if p.Addr().Is6() {
			all = "::/0"
		}
		routes = append(routes, map[string]string{"dst": all})
	}
	ipam := map[string]any{"type": "host-local", "ranges": ranges, "dataDir": ipamDir}
	plugin := map[string]any{"type": "bridge", "bridge": "cni0", "isDefaultGateway": true, "ipMasq": false, "hairpinMode": true, "ipam": ipam}
	if cni != CNIBridge {
		ipam["routes"] = routes
		plugin = map[string]any{"type": "ptp", "ipMasq": false, "ipam": ipam}
	}
	if mtu > 0 {
		plugin["mtu"] = mtu
	}
	return pluginList("1.0.0", plugin)
}

// pluginList is a CNI configuration with one plug-in for the link of a pod, and
// one for ports of the host.
func pluginList(version string, plugin map[string]any) ([]byte, error) {
	return json.MarshalIndent(map[string]any{
		"cniVersion": version,
		"name":       "lab",
		"plugins":    []map[string]any{plugin, {"type": "portmap", "capabilities": map[string]bool{"portMappings": true}, "snat": true}},
	}, "", "  ")
}

// masquerade installs the rule by which pods leave the cluster with their
// node's address.
func (n *node) masquerade(podCIDRs []netip.Prefix) error {
	for _, own := range podCIDRs {
		if own.Addr().Is4() != n.cfg.ClusterCIDR.Addr().Is4() {
			continue
		}
		argv, input := Masquerade(n.cfg.Masquerade, own, n.cfg.ClusterCIDR)
		if argv == nil {
			continue
		}
		if err := n.input(input, argv...); err != nil {
			return err
		}
	}
	return nil
}

// input runs a command in the node's namespace, and gives it this to read.
func (n *node) input(text string, argv ...string) error {
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Stdin = strings.NewReader(text)
	var out strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := netns.Do(n.cfg.NetNS, cmd.Run); err != nil {
		return fmt.Errorf("%s: %w: %s", cmd, err, strings.TrimSpace(out.String()))
	}
	return nil
}

// Masquerade is the command, and its input, by which a node installs the rule
// for its pods' packets that leave the cluster; nil: there is none. Running it
// again changes nothing.
func Masquerade(how string, own, cluster netip.Prefix) (argv []string, input string) {
	family, iptables := "ip", "iptables"
	if own.Addr().Is6() {
		family, iptables = "ip6", "ip6tables"
	}
	nft := func(ruleset string) ([]string, string) {
		return []string{"nft", "-f", "-"}, strings.NewReplacer("FAMILY", family, "OWN", own.String(), "CLUSTER", cluster.String()).Replace(ruleset)
	}
	switch how {
	case MasqueradeIPTables:
		rule := fmt.Sprintf("POSTROUTING -s %s ! -d %s -m comment --comment lab-cni -j MASQUERADE", own, cluster)
		return []string{"sh", "-c", fmt.Sprintf("%[1]s -w -t nat -C %[2]s 2>/dev/null || %[1]s -w -t nat -A %[2]s", iptables, rule)}, ""
	case MasqueradeNFTables:
		return nft(`table FAMILY lab-cni
delete table FAMILY lab-cni
table FAMILY lab-cni {
	chain postrouting {
		type nat hook postrouting priority srcnat; policy accept;
		FAMILY saddr OWN FAMILY daddr != CLUSTER masquerade
	}
}
`)
	case MasqueradeKindnet:
		return nft(`table inet kindnet-ipmasq
delete table inet kindnet-ipmasq
table inet kindnet-ipmasq {
	chain postrouting {
		type nat hook postrouting priority srcnat - 10; policy accept;
		ct state established,related accept
		fib saddr type local accept
		FAMILY daddr CLUSTER accept
		masquerade
	}
}
`)
	}
	return nil, ""
}

// subnetFile is where flanneld writes what its plug-in needs.
func (n *node) subnetFile() string { return filepath.Join(n.cfg.Dir, "flannel", "subnet.env") }

// waitSubnet waits until flanneld has its subnet.
func (n *node) waitSubnet(ctx context.Context) error {
	for {
		_, err := os.Stat(n.subnetFile())
		if !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		if !pause(ctx, 50*time.Millisecond) {
			return fmt.Errorf("flanneld has not written %s: %w; its log is %s", n.subnetFile(), ctx.Err(), n.logFile("flanneld"))
		}
	}
}

// keepFlannel runs flanneld in the node's namespace, with the arguments of its
// manifest.
func (n *node) keepFlannel(ctx context.Context) {
	// Without a podCIDR it would end, and start again a second later.
	select {
	case <-n.hasPodCIDR:
	case <-ctx.Done():
		return
	}
	kubeconfig, config := filepath.Join(n.cfg.Dir, "flannel", "kubeconfig"), filepath.Join(n.cfg.Dir, "flannel", "net-conf.json")
	err := errors.Join(
		os.MkdirAll(filepath.Dir(config), 0o755),
		os.WriteFile(kubeconfig, n.cfg.FlannelKubeconfig, 0o600),
		os.WriteFile(config, FlannelConfig(n.cfg.ClusterCIDR, n.cfg.KubeProxy), 0o644),
	)
	if err != nil {
		n.log.Error("flanneld", "err", err)
		return
	}
	n.keepProgram(ctx, "flanneld", func() (*exec.Cmd, error) {
		cmd := exec.Command(filepath.Join(n.cfg.BinDir, "flanneld"), FlannelArguments(kubeconfig, config, n.subnetFile())...)
		cmd.Env = append(os.Environ(), "NODE_NAME="+n.cfg.Name)
		return cmd, nil
	})
}

// FlannelArguments are those of flanneld in its manifest, with the files of a
// node. NODE_NAME is in its environment.
func FlannelArguments(kubeconfig, config, subnetFile string) []string {
	return []string{
		"--kube-subnet-mgr", "--kubeconfig-file=" + kubeconfig, "--net-config-path=" + config, "--subnet-file=" + subnetFile,
		"--iface=eth0", "--ip-masq",
	}
}

// FlannelConfig is the net-conf.json of flannel's manifest. Its rules are of
// the kind that the node's kube-proxy writes.
func FlannelConfig(cluster netip.Prefix, proxyMode string) []byte {
	return fmt.Appendf(nil, `{"Network": %q, "EnableNFTables": %t, "Backend": {"Type": "vxlan"}}`, cluster, proxyMode == ModeNFTables)
}
