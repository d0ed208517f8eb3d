package desired_test

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/desired"
	"github.com/isthmus-net/isthmus/appliance/netstate"
)

var epoch = time.Date(2026, 3, 14, 12, 0, 0, 0, time.UTC)

func addr(s string) netip.Addr     { return netip.MustParseAddr(s) }
func prefix(s string) netip.Prefix { return netip.MustParsePrefix(s) }

func prefixes(texts ...string) []netip.Prefix {
	var out []netip.Prefix
	for _, s := range texts {
		out = append(out, prefix(s))
	}
	return out
}

// meta returns the Meta of an object; labels are pairs of key and value.
func meta(kind, namespace, name string, labels ...string) cluster.Meta {
	m := cluster.Meta{
		Ref:        cluster.Ref{Kind: kind, Namespace: namespace, Name: name},
		Generation: 1,
		Labels:     map[string]string{},
		Created:    epoch,
	}
	for i := 0; i+1 < len(labels); i += 2 {
		m.Labels[labels[i]] = labels[i+1]
	}
	return m
}

const (
	routeCategory    = "networking.liqo.io/route-category"
	routeSubcategory = "networking.liqo.io/route-subcategory"
	routeUnique      = "networking.liqo.io/route-unique"
	fwCategory       = "networking.liqo.io/firewall-category"
	fwSubcategory    = "networking.liqo.io/firewall-subcategory"
	fwUnique         = "networking.liqo.io/firewall-unique"
)

func internalNode(name, iface, ip, local, remote string) cluster.InternalNode {
	n := cluster.InternalNode{Meta: meta("InternalNode", "", name), GatewayInterface: iface, InternalIP: addr(ip)}
	if local != "" {
		n.Local = addr(local)
	}
	if remote != "" {
		n.Remote = addr(remote)
	}
	return n
}

// withPods returns the node with the networks of its pods.
func withPods(n cluster.InternalNode, cidrs ...string) cluster.InternalNode {
	n.PodCIDRs = prefixes(cidrs...)
	return n
}

func fabric(remoteID, iface, gatewayIP, internalIP string, cidrs ...string) cluster.InternalFabric {
	return cluster.InternalFabric{
		Meta: meta("InternalFabric", "liqo-tenant-"+remoteID, remoteID), RemoteID: remoteID,
		RemoteCIDRs: prefixes(cidrs...), NodeInterface: iface,
		GatewayIP: addr(gatewayIP), InternalIP: addr(internalIP),
	}
}

func tunnel(fabric, node string, vni uint32) cluster.GeneveTunnel {
	ns := "liqo-tenant-" + fabric
	return cluster.GeneveTunnel{
		Meta: meta("GeneveTunnel", ns, fabric+"-"+node), VNI: vni, Node: node,
		Fabric: cluster.Ref{Kind: "InternalFabric", Namespace: ns, Name: fabric},
	}
}

// nodeGW is what the controller plans for the nodes of a peering.
func nodeGW(f cluster.InternalFabric) cluster.RouteConfiguration {
	rc := cluster.RouteConfiguration{
		Meta:  meta("RouteConfiguration", f.Namespace, f.Name+"-node-gw", routeCategory, "fabric"),
		Table: f.Name + "-node-gw",
	}
	host := netip.PrefixFrom(f.InternalIP, f.InternalIP.BitLen())
	rc.Rules = append(rc.Rules, cluster.RouteRule{
		Dst: host, Routes: []cluster.TableRoute{{Dst: host, Dev: f.NodeInterface, Scope: "link"}},
	})
	for _, p := range f.RemoteCIDRs {
		rc.Rules = append(rc.Rules, cluster.RouteRule{
			Dst: p, Routes: []cluster.TableRoute{{Dst: p, Via: f.InternalIP, Dev: f.NodeInterface, OnLink: true}},
		})
	}
	return rc
}

// gwNode is what the controller plans for gateways about a node.
func gwNode(n cluster.InternalNode, pods ...string) cluster.RouteConfiguration {
	name := "milan-" + n.Name + "-gw-node"
	rc := cluster.RouteConfiguration{
		Meta:  meta("RouteConfiguration", "liqo", name, routeCategory, "gateway", routeSubcategory, "fabric"),
		Table: name,
	}
	host := netip.PrefixFrom(n.InternalIP, n.InternalIP.BitLen())
	in := cluster.RouteRule{IIF: desired.TunnelInterface}
	for _, p := range prefixes(pods...) {
		in.Routes = append(in.Routes, cluster.TableRoute{Dst: p, Via: n.InternalIP, Dev: n.GatewayInterface, OnLink: true})
	}
	rc.Rules = []cluster.RouteRule{
		{Dst: host, Routes: []cluster.TableRoute{{Dst: host, Dev: n.GatewayInterface, Scope: "link"}}}, in,
	}
	return rc
}

// gwExt is what the controller plans for a gateway about its peer.
func gwExt(remoteID string, via string, nodes []cluster.InternalNode, cidrs ...string) cluster.RouteConfiguration {
	rc := cluster.RouteConfiguration{
		Meta:  meta("RouteConfiguration", "liqo-tenant-"+remoteID, remoteID+"-gw-ext", routeCategory, "gateway", routeUnique, remoteID),
		Table: remoteID + "-gw-ext",
	}
	for _, n := range nodes {
		r := cluster.RouteRule{IIF: n.GatewayInterface}
		for _, p := range prefixes(cidrs...) {
			r.Routes = append(r.Routes, cluster.TableRoute{Dst: p, Via: addr(via), Dev: desired.TunnelInterface})
		}
		rc.Rules = append(rc.Rules, r)
	}
	return rc
}

// milanNode is a node of cluster milan with the peers rome and oslo.
func milanNode() desired.NodeInput {
	rome := fabric("rome", "liqo.rome", "10.127.65.9", "10.80.0.5", "10.127.128.0/18", "10.71.0.0/16")
	oslo := fabric("oslo", "liqo.oslo", "10.127.66.3", "10.80.0.6", "10.1.0.0/16")
	oslo.MTU = 1500
	return desired.NodeInput{
		Name:     "node-1",
		Underlay: desired.Underlay{MTU: 1500, Paths: map[netip.Addr]int{addr("10.127.65.9"): 1450}},
		Fabrics:  []cluster.InternalFabric{rome, oslo},
		Tunnels:  []cluster.GeneveTunnel{tunnel("rome", "node-1", 1), tunnel("rome", "node-2", 2), tunnel("oslo", "node-1", 3)},
		Nodes:    []cluster.InternalNode{withPods(internalNode("node-1", "liqo.node-1", "10.80.0.2", "10.127.65.1", "172.18.1.11"), "10.127.65.0/24", "10.127.66.200/32")},
		Routes:   []cluster.RouteConfiguration{nodeGW(rome), nodeGW(oslo)},
		Firewalls: []cluster.FirewallConfiguration{{
			Meta:  meta("FirewallConfiguration", "liqo", "fabric-notrack", fwCategory, "fabric", fwSubcategory, "all-nodes"),
			Table: "liqo-notrack-geneve", Family: "IPV4",
			Chains: []cluster.Chain{{
				Name: "prerouting", Type: "filter", Hook: "prerouting", Policy: "accept", Priority: -300,
				Filter: []cluster.FilterRule{{
					Name: "geneve", Action: "notrack", Counter: true,
					Match: []cluster.Match{{Proto: "udp"}, {Ports: cluster.PortRange{From: 6091, To: 6091}, Position: "dst"}},
				}},
			}},
		}},
	}
}

func key(b byte) (k netstate.Key) {
	for i := range k {
		k[i] = b
	}
	return k
}

// romeGateway is the gateway of cluster milan to rome, which overlaps with
// milan, on node-1 of three nodes. Node-3 has not said where it is.
func romeGateway() desired.GatewayInput {
	nodes := []cluster.InternalNode{
		internalNode("node-1", "liqo.node-1", "10.80.0.2", "10.127.65.1", "172.18.1.11"),
		internalNode("node-2", "liqo.node-2", "10.80.0.3", "", "172.18.1.12"),
		internalNode("node-3", "liqo.node-3", "10.80.0.4", "", ""),
	}
	peer := key(2)
	return desired.GatewayInput{
		Name: "rome", Namespace: "liqo-tenant-rome", RemoteID: "rome", Mode: cluster.Server, NodeName: "node-1",
		PodIP: addr("10.127.65.9"), PublicKey: key(1), Underlay: desired.Underlay{MTU: 1500},
		Configurations: []cluster.Configuration{{
			Meta: meta("Configuration", "liqo-tenant-rome", "rome"), RemoteID: "rome", Configured: true,
			Local:    cluster.CIDRs{Pod: prefixes("10.127.64.0/18"), External: prefixes("10.70.0.0/16")},
			Remote:   cluster.CIDRs{Pod: prefixes("10.127.64.0/18"), External: prefixes("10.70.0.0/16")},
			Remapped: cluster.CIDRs{Pod: prefixes("10.127.128.0/18"), External: prefixes("10.71.0.0/16")},
		}},
		PublicKeys: []cluster.PublicKey{{Meta: meta("PublicKey", "liqo-tenant-rome", "rome"), RemoteID: "rome", Key: peer[:]}},
		Fabrics:    []cluster.InternalFabric{fabric("rome", "liqo.rome", "10.127.65.9", "10.80.0.5", "10.127.128.0/18", "10.71.0.0/16")},
		Tunnels:    []cluster.GeneveTunnel{tunnel("rome", "node-1", 1), tunnel("rome", "node-2", 2), tunnel("rome", "node-3", 3)},
		Nodes:      nodes,
		Routes: []cluster.RouteConfiguration{
			gwExt("rome", "169.254.18.2", nodes, "10.127.128.0/18", "10.71.0.0/16"),
			gwNode(nodes[0], "10.127.65.0/24", "10.127.66.200/32"),
			gwNode(nodes[1], "10.127.66.0/24"),
			gwNode(nodes[2], "10.127.67.0/24"),
		},
		Firewalls: []cluster.FirewallConfiguration{{
			Meta:  meta("FirewallConfiguration", "liqo-tenant-rome", "rome-remap-podcidr", fwCategory, "gateway", fwUnique, "rome", desired.LabelPrefixTranslation, "true"),
			Table: "remap-podcidr", Family: "IPV4",
			Chains: []cluster.Chain{
				{
					Name: "outgoing", Type: "nat", Hook: "prerouting", Policy: "accept", Priority: -100,
					NAT: []cluster.NATRule{{
						Name: "out", Type: "dnat", To: prefix("10.127.64.0/18"), ToIsPrefix: true,
						Match: []cluster.Match{
							{IP: cluster.AddrRange{From: addr("10.127.128.0"), To: addr("10.127.191.255")}, Position: "dst"},
							{Negate: true, Dev: "liqo-tunnel", Position: "in"},
						},
					}},
				},
				{
					Name: "incoming", Type: "nat", Hook: "postrouting", Policy: "accept", Priority: 100,
					NAT: []cluster.NATRule{{
						Name: "in", Type: "snat", To: prefix("10.127.128.0/18"), ToIsPrefix: true,
						Match: []cluster.Match{
							{IP: cluster.AddrRange{From: addr("10.127.64.0"), To: addr("10.127.127.255")}, Position: "src"},
							{Dev: "liqo-tunnel", Position: "in"},
						},
					}},
				},
			},
		}},
	}
}

// sixGateway is a client whose networks, above and below, are IPv6.
func sixGateway() desired.GatewayInput {
	nodes := []cluster.InternalNode{internalNode("node-1", "liqo.node-1", "fd80::2", "fd00:65::1", "fd00:18::11")}
	peer := key(2)
	rc := gwExt("rome", "169.254.18.1", nil)
	rc.Rules = []cluster.RouteRule{{
		IIF:    "liqo.node-1",
		Routes: []cluster.TableRoute{{Dst: prefix("fd01::/48"), Dev: desired.TunnelInterface}},
	}}
	return desired.GatewayInput{
		Name: "rome", Namespace: "liqo-tenant-rome", RemoteID: "rome", Mode: cluster.Client, NodeName: "node-2",
		PodIP: addr("fd00:66::9"), PublicKey: key(1), PeerEndpoint: netip.MustParseAddrPort("[2001:db8::7]:30840"),
		Configurations: []cluster.Configuration{{
			Meta: meta("Configuration", "liqo-tenant-rome", "rome"), RemoteID: "rome", Configured: true,
			Local:  cluster.CIDRs{Pod: prefixes("fd00::/48"), External: prefixes("fd70::/64")},
			Remote: cluster.CIDRs{Pod: prefixes("fd01::/48"), External: prefixes("fd71::/64")},
		}},
		PublicKeys: []cluster.PublicKey{{Meta: meta("PublicKey", "liqo-tenant-rome", "rome"), RemoteID: "rome", Key: peer[:]}},
		Fabrics:    []cluster.InternalFabric{fabric("rome", "liqo.rome", "fd00:66::9", "fd80::5", "fd01::/48")},
		Tunnels:    []cluster.GeneveTunnel{tunnel("rome", "node-1", 1)},
		Nodes:      nodes,
		Routes:     []cluster.RouteConfiguration{rc, gwNode(nodes[0], "fd00:0:0:65::/64")},
	}
}

// text prints a state and the results, as goldens have them.
func text(s netstate.State, results []desired.Result) string {
	out := s.String() + "\n"
	for _, r := range results {
		verdict := "ok"
		if !r.OK {
			verdict = "not in force"
		}
		out += fmt.Sprintf("# %s: %s", r.Object, verdict)
		if r.Message != "" {
			out += ": " + r.Message
		}
		out += "\n"
	}
	return out
}
