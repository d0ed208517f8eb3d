package operand_test

import (
	"testing"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/lab/internal/operand"
	"github.com/isthmus-net/isthmus/lab/internal/topology"
)

func two(t *testing.T) *topology.Topology {
	t.Helper()
	topo, err := topology.Load("../../../topologies/two-clusters.yaml")
	assert.NilError(t, err)
	return topo
}

func TestParse(t *testing.T) {
	topo := two(t)
	for _, tc := range []struct {
		text, kind, host string
		attr             operand.Attr
	}{
		{"milan/web", "pod", "milan/web", ""},
		{"milan/web.ip", "pod", "milan/web", "ip"},
		{"milan/web.node", "node", "milan/node-1", ""},
		{"milan/probe.node.internal", "node", "milan/node-2", "internal"},
		{"milan/hostprobe", "pod", "milan/node-1", ""},
		{"rome/node-2.internal", "node", "rome/node-2", "internal"},
		{"rome/node-2.daemon", "daemon", "rome/node-2", ""},
		{"rome/gateway", "gateway", "rome/gateway", ""},
		{"rome/gateway.milan.internal", "gateway", "rome/gateway", "internal"},
		{"rome/gateway.internal", "gateway", "rome/gateway", "internal"},
		{"rome/gateway.node", "gateway-node", "", ""},
		{"rome/gateway.othernode.nodename", "gateway-node", "", "nodename"},
		{"rome/router", "router", "rome/router", ""},
		{"rome/controller", "controller", "rome/controller", ""},
		{"user", "outside", "user", ""},
		{"wan", "wan", "wan", ""},
		{"remapped(milan/web, rome)", "pod", "milan/web", ""},
		{"unknown(milan, rome)", "unknown", "", ""},
		{"external(user, milan)", "external", "user", ""},
		{"remapped(external(user, milan), rome)", "external", "user", ""},
		{"ingress(milan, web)", "ingress", "", ""},
		{"clusterip(rome, web)", "clusterip", "", ""},
	} {
		got, err := operand.Parse(tc.text, topo)
		assert.NilError(t, err, tc.text)
		assert.Equal(t, string(got.Kind), tc.kind, tc.text)
		assert.Equal(t, got.HostName(topo), tc.host, tc.text)
		assert.Equal(t, got.Attr, tc.attr, tc.text)
		assert.Equal(t, got.String(), tc.text)
	}
}

func TestParseMistakes(t *testing.T) {
	topo := two(t)
	for text, want := range map[string]string{
		"milano/web":                  `there is no cluster "milano" (did you mean "milan"?)`,
		"milan/wep":                   `cluster milan has no "wep" (did you mean "web"?)`,
		"milan/node-3":                `cluster milan has node-1 to node-2, not "node-3"`,
		"milan":                       `"milan" is a whole cluster (write milan/web or milan/node-1)`,
		"usr":                         `there is no host "usr" outside the clusters (did you mean "user"?)`,
		"milan/gateway.paris":         `milan does not peer with "paris" (possible here: rome, ip, internal, node, othernode)`,
		"milan/web.internal":          `"milan/web.internal": a pod has no address of the internal CIDR (only nodes and gateways have one)`,
		"milan/web.ipp":               `"milan/web.ipp": no such part of a pod (did you mean "ip"?)`,
		"remapped(milan/web)":         `"remapped(milan/web)": remapped takes two names (write remapped(milan/web, rome))`,
		"ingress(milan/web)":          `"ingress(milan/web)": ingress takes two names (write ingress(milan, web))`,
		"remaped(milan/web, rome)":    `"remaped(milan/web, rome)": there is no remaped(…) (did you mean "remapped"?)`,
		"unknown(milano, rome)":       `there is no cluster "milano" (did you mean "milan"?)`,
		"remapped(milan/web, naples)": `there is no cluster "naples" (possible here: milan, rome)`,
	} {
		_, err := operand.Parse(text, topo)
		assert.Error(t, err, want)
	}
}
