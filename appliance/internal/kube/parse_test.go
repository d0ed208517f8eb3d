package kube_test

import (
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	"sigs.k8s.io/yaml"

	corev1 "k8s.io/api/core/v1"

	ipamv1alpha1 "github.com/isthmus-net/isthmus/appliance/api/ipam/v1alpha1"
	v1beta1 "github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/internal/kube"
)

// errors reads an object of a kind and returns what does not parse in it.
func errorsOf[T, V any](parse func(*T) (V, []cluster.InvalidError)) func(t *testing.T, text string) []cluster.InvalidError {
	return func(t *testing.T, text string) []cluster.InvalidError {
		var o T
		assert.NilError(t, yaml.UnmarshalStrict([]byte(text), &o))
		_, invalid := parse(&o)
		return invalid
	}
}

// What a user wrote wrong is told with the field and what to write instead.
func TestMessages(t *testing.T) {
	configuration := errorsOf(kube.Configuration)
	route := errorsOf(kube.RouteConfiguration)
	firewall := errorsOf(kube.FirewallConfiguration)
	endpoint := errorsOf(kube.TunnelEndpoint)
	filter := func(match string) string {
		return `spec: {table: {name: t, family: IPV4, chains: [{name: c, type: filter, hook: input, policy: accept, priority: 0, rules: {filterRules: [{name: r, action: accept, counter: true, match: [` + match + `]}]}}]}}`
	}
	for _, tt := range []struct {
		name   string
		errors func(*testing.T, string) []cluster.InvalidError
		object string
		want   []string
	}{
		{"fine", configuration, `spec: {local: {cidr: {pod: [10.0.0.0/16]}}, remote: {cidr: {pod: [10.1.0.0/16, "fd00::/64"], external: [10.70.0.0/16]}}}`, nil},
		{"not a CIDR", configuration, `spec: {remote: {cidr: {pod: [10.1.0.0/16, 10.2.0.0/33]}}}`,
			[]string{`spec.remote.cidr.pod[1]: "10.2.0.0/33" is not a CIDR; write one such as 10.0.0.0/16 or fd00::/64`}},
		{"an address", configuration, `spec: {local: {cidr: {external: [10.2.0.1]}}}`,
			[]string{`spec.local.cidr.external[0]: "10.2.0.1" is an address, not a CIDR; write 10.2.0.1/32`}},
		{"an IPv6 address", configuration, `spec: {remote: {cidr: {pod: ["fd00::1"]}}}`,
			[]string{`spec.remote.cidr.pod[0]: "fd00::1" is an address, not a CIDR; write fd00::1/128`}},
		{"empty item", configuration, `spec: {remote: {cidr: {pod: [""]}}}`,
			[]string{`spec.remote.cidr.pod[0]: "" is empty; write a CIDR such as 10.0.0.0/16, or leave the item out`}},
		{"host bits", configuration, `spec: {remote: {cidr: {pod: [10.0.0.7/16]}}}`,
			[]string{`spec.remote.cidr.pod[0]: "10.0.0.7/16" has host bits; it is read as 10.0.0.0/16`}},
		{"mapped, too wide", configuration, `spec: {remote: {cidr: {pod: ["::ffff:10.0.0.0/90"]}}}`,
			[]string{`spec.remote.cidr.pod[0]: "::ffff:10.0.0.0/90" is wider than the IPv4-mapped range; write the IPv4 network itself`}},

		{"fabric", errorsOf(kube.InternalFabric), `spec: {gatewayIP: 10.0.0.0/8, mtu: 20, interface: {node: {name: x}, gateway: {ip: "fe80::1%eth0"}}}`,
			[]string{
				`spec.mtu: "20" is not an MTU; write 576 to 65535, or 0 to have it derived`,
				`spec.gatewayIP: "10.0.0.0/8" is a CIDR, not an address; write 10.0.0.0`,
				`spec.interface.gateway.ip: "fe80::1%eth0" has a zone, which only means something on one host; write fe80::1`,
			}},
		{"node", errorsOf(kube.InternalNode), `{spec: {interface: {gateway: {name: x}, node: {ip: here}}}, status: {nodeIP: {local: 300.0.0.1}}}`,
			[]string{
				`spec.interface.node.ip: "here" is not an address; write one such as 10.0.0.1 or fd00::1`,
				`status.nodeIP.local: "300.0.0.1" is not an address; write one such as 10.0.0.1 or fd00::1`,
			}},
		{"tunnel", errorsOf(kube.GeneveTunnel), `spec: {id: 16777216, internalFabricRef: {name: ""}}`,
			[]string{
				`spec.id: "16777216" is not a VNI; write a number below 16777216`,
				`spec.internalNodeRef.name: "" is empty; write the name of an InternalNode`,
				`spec.internalFabricRef.name: "" is empty; write the name of an InternalFabric`,
			}},
		{"key", errorsOf(kube.PublicKey), `spec: {publicKey: AAAA}`,
			[]string{`spec.publicKey: "" has 3 bytes; a WireGuard public key has 32, in base64`}},
		{"server", errorsOf(kube.GatewayServer), `spec: {mtu: -1, endpoint: {ports: [70000], loadBalancerIP: x}}`,
			[]string{
				`spec.mtu: "-1" is not an MTU; write 576 to 65535, or 0 to have it derived`,
				`spec.endpoint.ports[0]: "70000" is out of range; write 0 to 65535`,
				`spec.endpoint.loadBalancerIP: "x" is not an address; write one such as 10.0.0.1 or fd00::1`,
			}},
		{"client", errorsOf(kube.GatewayClient), `spec: {endpoint: {port: 51840, addresses: ["", "10.0.0.0/8"]}}`,
			[]string{
				`spec.endpoint.addresses[0]: "" is empty; write the address or the name of the server's endpoint`,
				`spec.endpoint.addresses[1]: "10.0.0.0/8" is neither an address nor a name; write one such as 203.0.113.7 or gateway.example.org`,
			}},
		{"template", errorsOf(kube.ServerTemplate), `spec: {objectKind: {apiVersion: networking.liqo.io/v1beta1, kind: WgGatewayServer}, template: [1]}`,
			[]string{`spec.template: "" is not an object; write metadata and spec of a WgGatewayServer`}},

		{"route", route, `spec: {table: {name: t, rules: [{dst: x, fwmark: -1, priority: 4294967296, routes: [{dst: "", gw: 10.0.0.0/8}, {dst: 10.0.0.1/8, src: yy}]}]}}`,
			[]string{
				`spec.table.rules[0].dst: "x" is not a CIDR; write one such as 10.0.0.0/16 or fd00::/64`,
				`spec.table.rules[0].fwmark: "-1" is out of range; write 1 to 4294967295`,
				`spec.table.rules[0].priority: "4294967296" is out of range; write 1 to 4294967295`,
				`spec.table.rules[0].routes[0].dst: "" is empty; write a CIDR, 0.0.0.0/0 for all of IPv4`,
				`spec.table.rules[0].routes[0].gw: "10.0.0.0/8" is a CIDR, not an address; write 10.0.0.0`,
				`spec.table.rules[0].routes[1].dst: "10.0.0.1/8" has host bits; it is read as 10.0.0.0/8`,
				`spec.table.rules[0].routes[1].src: "yy" is not an address; write one such as 10.0.0.1 or fd00::1`,
			}},

		{"range backwards", firewall, filter(`{op: eq, ip: {value: 10.0.0.9-10.0.0.1, position: src}}`),
			[]string{`spec.table.chains[0].rules.filterRules[0].match[0].ip.value: "10.0.0.9-10.0.0.1" ends before it begins; write 10.0.0.1-10.0.0.9`}},
		{"range of two families", firewall, filter(`{op: eq, ip: {value: "10.0.0.9-fd00::1", position: src}}`),
			[]string{`spec.table.chains[0].rules.filterRules[0].match[0].ip.value: "10.0.0.9-fd00::1" begins and ends in different families; write two matches`}},
		{"no range", firewall, filter(`{op: eq, ip: {value: a-b, position: src}}`),
			[]string{`spec.table.chains[0].rules.filterRules[0].match[0].ip.value: "a-b" is not a range of addresses; write one such as 10.0.0.1-10.0.0.9`}},
		{"empty address", firewall, filter(`{op: eq, ip: {value: "", position: src}}`),
			[]string{`spec.table.chains[0].rules.filterRules[0].match[0].ip.value: "" is empty; write one such as 10.0.0.1, 10.0.0.0/16 or 10.0.0.1-10.0.0.9`}},
		{"port 0", firewall, filter(`{op: eq, port: {value: "0", position: src}}`),
			[]string{`spec.table.chains[0].rules.filterRules[0].match[0].port.value: "0" is not a port; write 1 to 65535, or a range such as 8000-8099`}},
		{"ports backwards", firewall, filter(`{op: eq, port: {value: 90-80, position: src}}`),
			[]string{`spec.table.chains[0].rules.filterRules[0].match[0].port.value: "90-80" ends before it begins; write 80-90`}},
		{"operator", firewall, filter(`{op: is, proto: {value: tcp}}`),
			[]string{`spec.table.chains[0].rules.filterRules[0].match[0].op: "is" is not an operator; write eq or neq`}},
		{"nothing", firewall, filter(`{op: eq}`),
			[]string{`spec.table.chains[0].rules.filterRules[0].match[0]: "" says nothing; write ip, port, proto or dev`}},
		{"empty dev", firewall, filter(`{op: eq, dev: {value: "", position: in}}`),
			[]string{`spec.table.chains[0].rules.filterRules[0].match[0].dev.value: "" is empty; write the name of a link`}},
		{"nat to", firewall, `spec: {table: {name: t, family: IPV4, chains: [{name: c, type: nat, hook: postrouting, policy: accept, priority: 0, rules: {natRules: [{name: r, natType: snat, to: all, match: []}]}}]}}`,
			[]string{`spec.table.chains[0].rules.natRules[0].to: "all" is not an address; write one such as 10.0.0.1 or fd00::1`}},
		{"route rules", firewall, `spec: {table: {name: t, family: IPV4, chains: [{name: c, type: route, hook: output, policy: accept, priority: 0, rules: {routeRules: [{name: r}]}}]}}`,
			[]string{`spec.table.chains[0].rules.routeRules: "1 rules" do nothing; leave them out`}},

		{"network", errorsOf(kube.Network), `{spec: {cidr: "", preAllocated: -1}, status: {cidr: x}}`,
			[]string{
				`spec.cidr: "" is empty; write one such as 10.0.0.0/16`,
				`status.cidr: "x" is not a CIDR; write one such as 10.0.0.0/16 or fd00::/64`,
				`spec.preAllocated: "-1" is out of range; write 0 to 2147483647`,
			}},
		{"tunnel endpoint", endpoint, `spec: {clusterIdentity: {clusterID: rome}, localPodCIDR: 10.0.0.0/16, localNATPodCIDR: None, localExternalCIDR: 10.70.0.0/16, remotePodCIDR: 10.1.0.0/16, remoteNATPodCIDR: 10.2.0.0/16, remoteExternalCIDR: 10.71.0.0/16, endpointIP: gw.example.org, backendType: wireguard, backend_config: {port: "5871", mtu: "1440", publicKey: DCiF1W92fSBgsgxbJy6fjF2UsdF8wYIjGchNvFhWMTg=}}`, nil},
		{"tunnel endpoint of before v0.6", endpoint, `spec: {clusterID: rome, remotePodCIDR: 10.1.0.0/16}`, nil},
		{"tunnel endpoint, networks", endpoint, `spec: {clusterID: rome, localPodCIDR: x, localNATPodCIDR: none, localExternalCIDR: None, localNATExternalCIDR: 10.0.0.1, remotePodCIDR: 10.1.0.0/33, remoteNATPodCIDR: 10.2.0.0, remoteExternalCIDR: "10.3.0.1/16", remoteNATExternalCIDR: "-"}`,
			[]string{
				`spec.localPodCIDR: "x" is not a CIDR; write one such as 10.0.0.0/16 or fd00::/64`,
				`spec.localNATPodCIDR: "none" is not a CIDR; write one such as 10.0.0.0/16 or fd00::/64, or None`,
				`spec.remotePodCIDR: "10.1.0.0/33" is not a CIDR; write one such as 10.0.0.0/16 or fd00::/64`,
				`spec.remoteNATPodCIDR: "10.2.0.0" is an address, not a CIDR; write 10.2.0.0/32, or None`,
				`spec.localExternalCIDR: "None" is not a CIDR; write one such as 10.0.0.0/16 or fd00::/64`,
				`spec.localNATExternalCIDR: "10.0.0.1" is an address, not a CIDR; write 10.0.0.1/32, or None`,
				`spec.remoteExternalCIDR: "10.3.0.1/16" has host bits; it is read as 10.3.0.0/16`,
				`spec.remoteNATExternalCIDR: "-" is not a CIDR; write one such as 10.0.0.0/16 or fd00::/64, or None`,
			}},
		{"tunnel endpoint, the rest", endpoint, `spec: {clusterID: rome, clusterIdentity: {clusterID: paris}, endpointIP: 203.0.113.0/24, backendType: ipsec, backend_config: {port: "70000", publicKey: c2VjcmV0, serviceType: Ingress}}`,
			[]string{
				`spec.clusterID: "rome" is not what spec.clusterIdentity.clusterID says ("paris"); leave clusterID out`,
				`spec.endpointIP: "203.0.113.0/24" is neither an address nor a name; write one such as 203.0.113.7 or gateway.example.org`,
				`spec.backendType: "ipsec" is not known; write wireguard`,
				`spec.backend_config.port: "70000" is not a port; write 1 to 65535`,
				`spec.backend_config.publicKey: "" is not a WireGuard public key; write its 32 bytes in base64, as wg pubkey prints them`,
				`spec.backend_config.serviceType: "Ingress" is not a type of Service; write one of LoadBalancer, NodePort, ClusterIP`,
			}},
		{"ip", errorsOf(kube.IP), `spec: {ip: ""}`, []string{`spec.ip: "" is empty; write one such as 10.0.0.1`}},
		{"kubernetes node", errorsOf(kube.Node), `{spec: {podCIDRs: [x]}, status: {addresses: [{type: InternalIP, address: yy}, {type: ExternalIP, address: z}]}}`,
			[]string{
				`status.addresses[0].address: "yy" is not an address; write one such as 10.0.0.1 or fd00::1`,
				`spec.podCIDRs[0]: "x" is not a CIDR; write one such as 10.0.0.0/16 or fd00::/64`,
			}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var got []string
			for _, e := range tt.errors(t, tt.object) {
				got = append(got, e.Message())
				assert.Equal(t, e.Note, strings.Contains(e.Reason, "has host bits"))
			}
			assert.DeepEqual(t, got, tt.want)
		})
	}
}

// FuzzParse: no text makes the parsers panic, and none gets through unseen.
func FuzzParse(f *testing.F) {
	for _, s := range []string{"", "10.0.0.1", "10.0.0.0/8", "::ffff:1.2.3.4/100", "fe80::1%x", "1-2", "-", "a/b", "80-90", "fd00::1-fd00::9"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		cidr, addr, to := v1beta1.CIDR(s), v1beta1.IP(s), s
		rc, invalid := kube.RouteConfiguration(&v1beta1.RouteConfiguration{Spec: v1beta1.RouteConfigurationSpec{
			Table: v1beta1.RouteTable{Rules: []v1beta1.Rule{{Dst: &cidr, Routes: []v1beta1.Route{{Dst: &cidr, Gw: &addr}}}}},
		}})
		if len(invalid) == 0 && s != "" {
			assert.Assert(t, rc.Rules[0].Dst.IsValid())
		}
		_, _ = kube.FirewallConfiguration(&v1beta1.FirewallConfiguration{Spec: v1beta1.FirewallConfigurationSpec{Table: v1beta1.Table{Chains: []v1beta1.Chain{{
			Rules: v1beta1.RulesSet{NatRules: []v1beta1.NatRule{{To: &to, Match: []v1beta1.Match{{
				Op: "eq", IP: &v1beta1.MatchIP{Value: s}, Port: &v1beta1.MatchPort{Value: s}, Dev: &v1beta1.MatchDev{Value: s},
			}}}}},
		}}}}})
		_, _ = kube.Network(&ipamv1alpha1.Network{Spec: ipamv1alpha1.NetworkSpec{CIDR: cidr}})
		_, _ = kube.Pod(&corev1.Pod{Status: corev1.PodStatus{PodIP: s}})
	})
}

// A match that names several things at once means all of them.
func TestMatchOfSeveral(t *testing.T) {
	fc, invalid := kube.FirewallConfiguration(&v1beta1.FirewallConfiguration{Spec: v1beta1.FirewallConfigurationSpec{Table: v1beta1.Table{Chains: []v1beta1.Chain{{
		Rules: v1beta1.RulesSet{FilterRules: []v1beta1.FilterRule{{Match: []v1beta1.Match{{
			Op:    v1beta1.MatchOperationNeq,
			IP:    &v1beta1.MatchIP{Value: "10.0.0.0/30", Position: v1beta1.MatchPositionSrc},
			Port:  &v1beta1.MatchPort{Value: "80-90", Position: v1beta1.MatchPositionDst},
			Proto: &v1beta1.MatchProto{Value: v1beta1.L4ProtoTCP},
			Dev:   &v1beta1.MatchDev{Value: "eth0", Position: v1beta1.MatchDevPositionIn},
		}}}}},
	}}}}})
	assert.Equal(t, len(invalid), 0)
	m := fc.Chains[0].Filter[0].Match
	assert.Equal(t, len(m), 4)
	for _, one := range m {
		assert.Assert(t, one.Negate)
	}
	assert.Equal(t, m[0].IP.From.String()+"-"+m[0].IP.To.String(), "10.0.0.0-10.0.0.3")
	assert.Equal(t, m[1].Ports, cluster.PortRange{From: 80, To: 90})
}

// A remapping of which one end is missing is none.
func TestRemapped(t *testing.T) {
	conf := func(spec, status []v1beta1.CIDR) cluster.Configuration {
		c, _ := kube.Configuration(&v1beta1.Configuration{
			Spec:   v1beta1.ConfigurationSpec{Remote: v1beta1.ClusterConfig{CIDR: v1beta1.ClusterConfigCIDR{Pod: spec}}},
			Status: v1beta1.ConfigurationStatus{Remote: &v1beta1.ClusterConfig{CIDR: v1beta1.ClusterConfigCIDR{Pod: status}}},
		})
		return c
	}
	assert.Equal(t, len(conf([]v1beta1.CIDR{"10.0.0.0/16"}, []v1beta1.CIDR{"10.1.0.0/16"}).Remapped.Pod), 1)
	assert.Equal(t, len(conf([]v1beta1.CIDR{"10.0.0.0/16"}, nil).Remapped.Pod), 0)
	assert.Equal(t, len(conf([]v1beta1.CIDR{"x", "10.0.0.0/16"}, []v1beta1.CIDR{"10.1.0.0/16", "y"}).Remapped.Pod), 0)
}
