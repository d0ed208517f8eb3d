package topology

import (
	"cmp"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/isthmus-net/isthmus/lab/internal/yamlfile"
)

// file is the shape of a topology file.
type file struct {
	Clusters []clusterFile `lab:"clusters,required,key=Name" doc:"what clusters exist, by cluster ID"`
	Peerings []peeringFile `lab:"peerings" doc:"who peers with whom"`
	Outside  []outsideFile `lab:"outside,key=Name" doc:"hosts in no cluster"`
	Pods     []podsFile    `lab:"pods,key=Cluster" doc:"pods that scenarios talk to and from, by cluster and name"`
	Overlay  string        `lab:"overlay" enum:"auto" doc:"the chart's networking.overlay; default: as the run or the scenario says"`
	Install  string        `lab:"install" enum:"chart|isthmusctl|none" doc:"how the appliance comes into the clusters: the objects of the chart, isthmusctl install as users run it, or scenarios do it; default chart"`
}

type clusterFile struct {
	Name            string
	Nodes           int           `lab:"nodes,required" min:"1" max:"200" doc:"how many; they are called node-1, node-2, …"`
	PodCIDR         netip.Prefix  `lab:"podCIDR,required"`
	ServiceCIDR     netip.Prefix  `lab:"serviceCIDR,required"`
	NodeCIDR        netip.Prefix  `lab:"nodeCIDR" doc:"default 172.18.<index from 1>.0/24"`
	ExternalCIDR    netip.Prefix  `lab:"externalCIDR" doc:"default 10.70.0.0/16"`
	InternalCIDR    netip.Prefix  `lab:"internalCIDR" doc:"default 10.80.0.0/16"`
	CNI             string        `lab:"cni" enum:"bridge|ptp|flannel|ippool|vpc" doc:"default bridge; ippool has an IPAM of its own and drops what is not from a pod's own address, as Calico does; with vpc nodes have a second interface for pods, and rules by their addresses, as with AWS's VPC CNI"`
	Masquerade      string        `lab:"masquerade" enum:"iptables|nftables|kindnet" doc:"who masquerades pods that leave the cluster: a rule of iptables, of nftables, or one as early as kindnet's; default: nobody; flannel does it itself"`
	KubeProxy       string        `lab:"kubeProxy" enum:"nftables|iptables|ipvs" doc:"default nftables; ipvs needs a kernel with IP virtual servers"`
	Runtime         string        `lab:"runtime" enum:"process|containerd" doc:"what runs containers: the lab's own kubelet, or the real one with containerd; default process"`
	Controllers     int           `lab:"controllers" min:"1" max:"3" doc:"replicas of the appliance's controller; default 1, the chart's is 2"`
	NodeGracePeriod time.Duration `lab:"nodeGracePeriod" min:"20s" max:"10m" doc:"how long Kubernetes waits for a node that is silent; default 10m, since emulated machines stall; in production it is 50s"`
	Absent          []int         `lab:"absent" min:"1" max:"200" doc:"numbers of nodes that join later, by nodeJoins"`
	RPFilter        *int          `lab:"rpFilter" min:"0" max:"2" doc:"of the nodes' links: 0 off, 1 strict, 2 loose; default 2"`
	LoadBalancer    netip.Prefix  `lab:"loadBalancerCIDR" doc:"of Services of type LoadBalancer; default 198.51.100.<16 × index from 0>/28"`
	MTU             int           `lab:"mtu" min:"1280" max:"9000" doc:"of the links of the cluster's machines; default 1500"`
	WANMTU          int           `lab:"wanMTU" min:"1280" max:"1500" doc:"of the router's link to the wide area network: routers before it send ICMP errors; default 1500"`
	WAN             Impairment    `lab:"wan" doc:"what the router's link to the wide area network does to what is sent into it; needs netem"`
	ICMP            string        `lab:"icmp" enum:"drop" doc:"drop: the router drops all ICMP, what it would send itself included, as firewalls do that know no better; default: it forwards and sends it"`
	NAT             bool          `lab:"nat" doc:"the router hides the nodes behind its own address, so nobody outside reaches them"`
	RoutedServices  bool          `lab:"routedServices" doc:"other clusters' routers have a route to the serviceCIDR"`
	Flat            bool          `lab:"flat" doc:"the nodeCIDR is part of the podCIDR, as in flat networks"`
	SourceCheck     bool          `lab:"sourceCheck" doc:"the underlay drops packets from a node whose source is neither its address nor in its podCIDR, as cloud fabrics do"`
}

type peeringFile struct {
	Server         string   `lab:"server,required" doc:"cluster whose gateway listens"`
	Client         string   `lab:"client,required" doc:"cluster whose gateway dials"`
	Service        string   `lab:"service" enum:"ClusterIP|NodePort|LoadBalancer" doc:"default NodePort"`
	MTU            int      `lab:"mtu" min:"576" max:"65535" doc:"default: derived from the underlay"`
	Implementation string   `lab:"implementation" enum:"auto|kernel|userspace" doc:"of WireGuard; default auto"`
	Objects        string   `lab:"objects" enum:"Configuration|TunnelEndpoint" doc:"what it is written as; default Configuration"`
	Gateways       string   `lab:"gateways" enum:"pod|netns" doc:"where they are: pods, or network namespaces of their nodes; default pod"`
	Forward        *Forward `lab:"forward" doc:"the client dials a port of the server's router, which leads to a node, as with a server behind a home router"`
	Absent         bool     `lab:"absent" doc:"it has no objects from the start: scenarios connect it"`
}

type outsideFile struct {
	Name    string
	Address netip.Addr `lab:"address" doc:"default: one of the wide area network"`
	Via     string     `lab:"via" doc:"cluster whose router leads to the address"`
	WAN     Impairment `lab:"wan" doc:"what its link to the wide area network does to what is sent into it; needs netem"`
}

type podsFile struct {
	Cluster string
	Pods    []podFile `lab:",inline,key=Name"`
}

type podFile struct {
	Name        string
	Node        int  `lab:"node,required" min:"1" max:"200" doc:"number of its node, from 1"`
	HostNetwork bool `lab:"hostNetwork"`
}

// maxClusters is how many fit into 172.18.<index>.0/24 and 203.0.113.<index>,
// with room for hosts outside.
const maxClusters = 100

// reserved are operands of scenarios that no cluster, host or pod may be
// called.
var reserved = []string{"node", "router", "gateway", "control-plane", "wan"}

// Load reads and checks a topology file. All that is wrong with it is in the
// error, each with its place in the file.
func Load(path string) (*Topology, error) {
	f, err := yamlfile.Read(path)
	if err != nil {
		return nil, err
	}
	return load(f)
}

// Parse is Load for a file in memory; path is for the messages and the name.
func Parse(path string, src []byte) (*Topology, error) { return load(yamlfile.Parse(path, src)) }

// Schema returns the JSON schema of topology files.
func Schema() map[string]any {
	return yamlfile.Schema(file{}, "topologies/NAME.yaml: what exists in a lab")
}

func load(f *yamlfile.File) (*Topology, error) {
	if f.Root == nil {
		return nil, f.Err()
	}
	var in file
	f.Decode(f.Root, &in, nil)
	if in.Clusters != nil && len(in.Clusters) == 0 {
		f.Problem(f.At(&in.Clusters), "such as milan: { nodes: 2, podCIDR: 10.0.0.0/16, serviceCIDR: 10.96.0.0/16 }", "a lab has at least one cluster")
	}
	if f.Comment == "" {
		f.Problem(yamlfile.Pos{Line: 1, Col: 1}, "draw it in a comment on the first lines: who reads the file sees what exists", "the file starts without a drawing")
	}
	t := &Topology{
		Name:    strings.TrimSuffix(filepath.Base(f.Path), ".yaml"),
		File:    f.Path,
		Drawing: f.Comment,
		Overlay: in.Overlay,
		Install: in.Install,
	}
	orString(&t.Install, InstallChart)
	t.addClusters(f, in.Clusters)
	t.checkRoutes(f, in.Clusters)
	t.addPeerings(f, in.Peerings)
	for i := range in.Outside {
		o := &in.Outside[i]
		checkName(f, &o.Name, "outside host")
		if _, ok := t.Cluster(o.Name); ok {
			f.Problem(f.At(&o.Name), "give it another name", "%q is a cluster already", o.Name)
		}
		t.Outside = append(t.Outside, t.outside(f, o))
	}
	t.addPods(f, in.Pods)
	if err := f.Err(); err != nil {
		return nil, err
	}
	return t, nil
}

func (t *Topology) addClusters(f *yamlfile.File, in []clusterFile) {
	if len(in) > maxClusters {
		f.Problem(f.At(&in[maxClusters].Name), "", "at most %d clusters", maxClusters)
	}
	for i := range in {
		c := &in[i]
		checkName(f, &c.Name, "cluster")
		if len(c.Name) > 51 {
			f.Problem(f.At(&c.Name), "", "a cluster ID has at most 51 characters: liqo-tenant-<id> is a namespace")
		}
		out := Cluster{
			Name: c.Name, Nodes: c.Nodes, Absent: c.Absent,
			PodCIDR: c.PodCIDR, ServiceCIDR: c.ServiceCIDR, NodeCIDR: c.NodeCIDR, ExternalCIDR: c.ExternalCIDR, InternalCIDR: c.InternalCIDR, LoadBalancer: c.LoadBalancer,
			CNI: c.CNI, Masquerade: c.Masquerade, KubeProxy: c.KubeProxy, Runtime: c.Runtime,
			MTU: cmp.Or(c.MTU, DefaultMTU), WANMTU: cmp.Or(c.WANMTU, DefaultMTU), NAT: c.NAT, RoutedServices: c.RoutedServices, Flat: c.Flat,
			Impairment: c.WAN, BlocksICMP: c.ICMP == icmpDrop,
			Controllers: cmp.Or(c.Controllers, 1), NodeGracePeriod: cmp.Or(c.NodeGracePeriod, DefaultNodeGracePeriod),
			RPFilter: RPFilterLoose, SourceCheck: c.SourceCheck || c.CNI == CNIVPC,
		}
		if c.RPFilter != nil {
			out.RPFilter = *c.RPFilter
		}
		if !out.NodeCIDR.IsValid() {
			out.NodeCIDR = DefaultNodeCIDR(i)
		}
		orPrefix(&out.ExternalCIDR, "10.70.0.0/16")
		orPrefix(&out.InternalCIDR, "10.80.0.0/16")
		orPrefix(&out.LoadBalancer, fmt.Sprintf("198.51.%d.%d/28", 100+i/16, 16*(i%16)))
		orString(&out.CNI, CNIBridge)
		orString(&out.KubeProxy, ProxyNFTables)
		orString(&out.Runtime, RuntimeProcess)
		checkCluster(f, c, out)
		t.Clusters = append(t.Clusters, out)
	}
}

// DefaultNodeCIDR is the network of the nodes of the i-th cluster, from 0, that
// does not say one.
func DefaultNodeCIDR(i int) netip.Prefix {
	return netip.MustParsePrefix(fmt.Sprintf("172.18.%d.0/24", i+1))
}

func checkCluster(f *yamlfile.File, in *clusterFile, c Cluster) {
	checkAbsent(f, in, c)
	in.WAN.Lint(f)
	if c.Masquerade != "" && c.CNI == CNIFlannel {
		f.Problem(f.At(&in.Masquerade), "leave it out", "flannel masquerades by itself")
	}
	if c.Masquerade != "" && c.CNI == CNIVPC {
		f.Problem(f.At(&in.Masquerade), "leave it out", "with cni: vpc the network knows the addresses of pods")
	}
	if c.CNI == CNIIPPool && c.PodCIDR.IsValid() {
		if !c.PodCIDR.Addr().Is4() {
			f.Problem(f.At(&in.CNI), "take an IPv4 podCIDR", "the blocks of cni: ippool are of IPv4")
		} else if last := c.Nodes << (32 - blockBits); c.PodCIDR.Bits() > 24 || c.Nodes<<8+last > 1<<(32-c.PodCIDR.Bits()) {
			f.Problem(f.At(&in.PodCIDR), "take a shorter prefix, such as a /16", "podCIDR %s has no room for the /24 and, beside it, the /%d of each node", c.PodCIDR, blockBits)
		}
	}
	if c.Runtime == RuntimeContainerd && c.CNI != CNIFlannel {
		f.Problem(f.At(&in.Runtime), "write cni: flannel", "the nodes of cluster %s have containerd, for which there is no CNI profile but flannel", c.Name)
	}
	if c.Flat && c.NodeCIDR.IsValid() && !(c.PodCIDR.Overlaps(c.NodeCIDR) && c.PodCIDR.Bits() < c.NodeCIDR.Bits()) {
		f.Problem(f.At(&in.Flat), "take a nodeCIDR of its upper half: the nodes' own podCIDRs are the first ones", "the nodeCIDR %s of a flat network must be part of the podCIDR %s", c.NodeCIDR, c.PodCIDR)
	}
	checkNetworks(f, in, c)
}

// outside checks a host of no cluster.
func (t *Topology) outside(f *yamlfile.File, o *outsideFile) Outside {
	switch {
	case o.Address.IsValid() != (o.Via != ""):
		f.Problem(f.At(&o.Name), "such as { address: 192.168.40.10, via: milan }", "a host has both an address and the cluster whose router leads there, or neither")
	case o.Via != "":
		if _, ok := t.Cluster(o.Via); !ok {
			f.Problem(f.At(&o.Via), yamlfile.DidYouMean(o.Via, t.clusterNames()), "there is no cluster %q", o.Via)
		}
	}
	t.checkOutside(f, o, t.Outside)
	o.WAN.Lint(f)
	if o.Via != "" && o.WAN != (Impairment{}) {
		f.Problem(f.At(&o.WAN), "leave it out, or write it at cluster "+o.Via, "%s is behind a router and has no link to the wide area network", o.Name)
	}
	return Outside{o.Name, o.Address, o.Via, o.WAN}
}

func checkAbsent(f *yamlfile.File, in *clusterFile, c Cluster) {
	for i := range in.Absent {
		switch n := in.Absent[i]; {
		case n == 0 || c.Nodes == 0: // reported already
		case n > c.Nodes:
			f.Problem(f.At(&in.Absent[i]), "nodes counts those that join later, too", "cluster %s has nodes 1 to %d, not %d", c.Name, c.Nodes, n)
		case slices.Contains(in.Absent[:i], n):
			f.Problem(f.At(&in.Absent[i]), "", "node %d is absent already", n)
		}
	}
	if c.Nodes > 0 && len(c.Present()) == 0 {
		f.Problem(f.At(&in.Absent), "", "cluster %s has no node at the start", c.Name)
	}
}

func (t *Topology) addPeerings(f *yamlfile.File, in []peeringFile) {
	names := t.clusterNames()
	seen := map[[2]string]yamlfile.Pos{}
	for i := range in {
		p := &in[i]
		for _, side := range []*string{&p.Server, &p.Client} {
			if *side != "" && !slices.Contains(names, *side) {
				f.Problem(f.At(side), yamlfile.DidYouMean(*side, names), "there is no cluster %q", *side)
			}
		}
		if p.Server == p.Client && p.Server != "" {
			f.Problem(f.At(&p.Client), "", "cluster %s can't peer with itself", p.Server)
		}
		pair := [2]string{min(p.Server, p.Client), max(p.Server, p.Client)}
		if first, dup := seen[pair]; dup {
			f.Problem(f.At(p), "two clusters have one peering; remove one of the lines", "%s and %s peer already (line %d)", p.Server, p.Client, first.Line)
		}
		seen[pair] = f.At(p)
		if p.MTU != 0 && p.Objects == ObjectsTunnelEndpoint {
			f.Problem(f.At(&p.MTU), "leave it out", "a TunnelEndpoint has no mtu")
		}
		out := Peering{p.Server, p.Client, p.Service, p.MTU, p.Implementation, p.Objects, p.Gateways, p.Forward, p.Absent}
		orString(&out.Service, ServiceNodePort)
		orString(&out.Implementation, ImplementationAuto)
		orString(&out.Objects, ObjectsConfiguration)
		orString(&out.Gateways, GatewaysPod)
		if t.Install == InstallNone && !p.Absent {
			f.Problem(f.At(p), "write absent: true, and let scenarios connect it", "there is nothing that could make the peering: install is none")
		}
		t.checkEndpoint(f, p, out)
		if out.Gateways == GatewaysNetNS && out.Objects == ObjectsTunnelEndpoint {
			f.Problem(f.At(&p.Gateways), "leave it out", "a TunnelEndpoint does not say where its gateway is")
		}
		t.checkForward(f, p, out)
		t.Peerings = append(t.Peerings, out)
	}
}

func (t *Topology) addPods(f *yamlfile.File, in []podsFile) {
	for i := range in {
		ps := &in[i]
		c, ok := t.Cluster(ps.Cluster)
		if !ok {
			f.Problem(f.At(&ps.Cluster), yamlfile.DidYouMean(ps.Cluster, t.clusterNames()), "there is no cluster %q", ps.Cluster)
			continue
		}
		for j := range ps.Pods {
			p := &ps.Pods[j]
			checkName(f, &p.Name, "pod")
			if slices.Contains(reserved, p.Name) || strings.HasPrefix(p.Name, "node-") {
				f.Problem(f.At(&p.Name), "scenarios call something else "+c.Name+"/"+p.Name+"; give the pod another name", "a pod can't be called %q", p.Name)
			}
			if p.Node > c.Nodes && c.Nodes > 0 {
				f.Problem(f.At(&p.Node), fmt.Sprintf("write a number from 1 to %d, or more nodes into the cluster", c.Nodes), "cluster %s has nodes 1 to %d, not %d", c.Name, c.Nodes, p.Node)
			}
			if other, ok := t.hostPod(c.Name, p.Node); ok && p.HostNetwork {
				f.Problem(f.At(&p.HostNetwork), "put it on another node", "%s is in the network of %s's node %d already, and both would listen on the same ports", other.Name, c.Name, p.Node)
			}
			t.Pods = append(t.Pods, Pod{c.Name, p.Name, p.Node, p.HostNetwork})
		}
	}
}

// hostPod returns the pod that is in the network of a node.
func (t *Topology) hostPod(cluster string, node int) (Pod, bool) {
	i := slices.IndexFunc(t.Pods, func(p Pod) bool { return p.Cluster == cluster && p.Node == node && p.HostNetwork })
	if i < 0 {
		return Pod{}, false
	}
	return t.Pods[i], true
}

func (t *Topology) clusterNames() []string {
	names := make([]string, len(t.Clusters))
	for i, c := range t.Clusters {
		names[i] = c.Name
	}
	return names
}

func checkName(f *yamlfile.File, name *string, what string) {
	valid := len(*name) > 0 && len(*name) <= 63
	for i, r := range *name {
		letter := r >= 'a' && r <= 'z' || r >= '0' && r <= '9'
		valid = valid && (letter || r == '-' && i > 0 && i < len(*name)-1)
	}
	if !valid {
		f.Problem(f.At(name), "lower-case letters, digits and - inside, at most 63", "%q is no name for a%s %s", *name, vowel(what), what)
	} else if what != "pod" && slices.Contains(reserved, *name) {
		f.Problem(f.At(name), "give it another name", "a%s %s can't be called %q: scenarios call something else so", vowel(what), what, *name)
	}
}

func vowel(word string) string {
	if strings.ContainsRune("aeiou", rune(word[0])) {
		return "n"
	}
	return ""
}

func orPrefix(p *netip.Prefix, fallback string) {
	if !p.IsValid() {
		*p = netip.MustParsePrefix(fallback)
	}
}

func orString(s *string, fallback string) {
	if *s == "" {
		*s = fallback
	}
}
