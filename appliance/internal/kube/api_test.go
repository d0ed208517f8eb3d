package kube_test

import (
	"context"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
	"gotest.tools/v3/poll"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"

	v1beta1 "github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/internal/kube"
	"github.com/isthmus-net/isthmus/appliance/nettest/apiserver"
)

// init silences controller-runtime, which writes a complaint where nobody has said how it logs.
func init() { ctrllog.SetLogger(logr.Discard()) }

// as returns the configuration of a user who may do what the rules say.
func as(t *testing.T, plane *envtest.ControlPlane, admin client.Client, name string, rules map[string][]rbacv1.PolicyRule) *rest.Config {
	ctx := t.Context()
	subject := []rbacv1.Subject{{Kind: "User", APIGroup: rbacv1.GroupName, Name: name}}
	for ns, r := range rules {
		m := metav1.ObjectMeta{Namespace: ns, Name: name}
		if ns == "" {
			assert.NilError(t, admin.Create(ctx, &rbacv1.ClusterRole{ObjectMeta: m, Rules: r}))
			assert.NilError(t, admin.Create(ctx, &rbacv1.ClusterRoleBinding{ObjectMeta: m, Subjects: subject,
				RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: name}}))
			continue
		}
		assert.NilError(t, admin.Create(ctx, &rbacv1.Role{ObjectMeta: m, Rules: r}))
		assert.NilError(t, admin.Create(ctx, &rbacv1.RoleBinding{ObjectMeta: m, Subjects: subject,
			RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: name}}))
	}
	user, err := plane.AddUser(envtest.User{Name: name}, nil)
	assert.NilError(t, err)
	return user.Config()
}

var read = []string{"get", "list", "watch"}

// A line is the only way to the API server, and can be cut.
type line struct {
	mu    sync.Mutex
	cut   bool
	conns []net.Conn
}

func (l *line) dial(ctx context.Context, network, address string) (net.Conn, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cut {
		return nil, syscall.ECONNREFUSED
	}
	c, err := (&net.Dialer{}).DialContext(ctx, network, address)
	if err == nil {
		l.conns = append(l.conns, c)
	}
	return c, err
}

func (l *line) sever() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.cut = true
	for _, c := range l.conns {
		_ = c.Close()
	}
}

func (l *line) restore() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.cut = false
}

// eventually waits for a condition of what a source reads.
func eventually[T any](t *testing.T, src interface {
	Read(context.Context) (T, error)
}, want string, done func(T) bool) T {
	t.Helper()
	var last T
	poll.WaitOn(t, func(poll.LogT) poll.Result {
		v, err := src.Read(t.Context())
		if err != nil {
			return poll.Error(err)
		}
		last = v
		if done(v) {
			return poll.Success()
		}
		return poll.Continue("waiting for %s", want)
	}, poll.WithTimeout(40*time.Second), poll.WithDelay(20*time.Millisecond))
	return last
}

// A daemon with the least rights sees what concerns it and nothing else,
// reports, and goes on with what it knows when the API server is gone.
func TestSources(t *testing.T) {
	plane, config := apiserver.Start(t, "../../../k8s/crds")
	ctx, cancel := context.WithCancel(t.Context())
	admin, err := client.New(config, client.Options{Scheme: kube.Scheme()})
	assert.NilError(t, err)
	const L, T, other = "liqo", "liqo-tenant-rome", "liqo-tenant-oslo"
	for _, ns := range []string{L, T, other} {
		assert.NilError(t, admin.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: ns}}))
	}
	create := func(objects ...client.Object) {
		t.Helper()
		for _, o := range objects {
			assert.NilError(t, admin.Create(ctx, o))
		}
	}
	group := []string{v1beta1.GroupVersion.Group}
	nodeConfig := as(t, plane, admin, "node", map[string][]rbacv1.PolicyRule{"": {
		{APIGroups: []string{""}, Resources: []string{"pods"}, Verbs: read},
		{APIGroups: group, Verbs: read, Resources: []string{"internalfabrics", "genevetunnels", "routeconfigurations", "firewallconfigurations"}},
		// By name: nothing of other nodes is asked for.
		{APIGroups: group, Verbs: read, Resources: []string{"internalnodes"}, ResourceNames: []string{"node-1"}},
		{APIGroups: group, Verbs: []string{"patch"}, Resources: []string{"internalnodes/status"}, ResourceNames: []string{"node-1"}},
	}})
	var wire line
	nodeConfig.Dial = wire.dial
	gatewayConfig := as(t, plane, admin, "gateway", map[string][]rbacv1.PolicyRule{
		"": {{APIGroups: group, Verbs: read, Resources: []string{"internalnodes", "firewallconfigurations"}}},
		L: {
			{APIGroups: group, Verbs: read, Resources: []string{"routeconfigurations"}},
			{APIGroups: []string{""}, Verbs: []string{"list", "watch"}, Resources: []string{"configmaps"}, ResourceNames: []string{v1beta1.BlockedKeysConfigMap}},
		},
		T: {
			{APIGroups: group, Verbs: read, Resources: []string{"configurations", "publickeies", "genevetunnels", "internalfabrics", "routeconfigurations", "firewallconfigurations"}},
			{APIGroups: group, Verbs: read, Resources: []string{"gatewayservers"}, ResourceNames: []string{"rome"}},
			{APIGroups: group, Verbs: read, Resources: []string{"connections", "gatewayreports"}, ResourceNames: []string{"gw-rome"}},
			{APIGroups: group, Verbs: []string{"patch"}, Resources: []string{"connections/status", "gatewayreports/status"}, ResourceNames: []string{"gw-rome"}},
		},
	})

	nodeSource := kube.NodeSourceConfig{Config: nodeConfig, Node: "node-1", StateDir: t.TempDir()}
	node, err := kube.NewNodeSource(nodeSource)
	assert.NilError(t, err)
	gatewaySource := kube.GatewaySourceConfig{
		Config: gatewayConfig, Name: "rome", Namespace: T, System: L, RemoteID: "rome", Mode: cluster.Server, Node: "node-1", StateDir: t.TempDir(),
	}
	gateway, err := kube.NewGatewaySource(gatewaySource)
	assert.NilError(t, err)
	ended := make(chan error, 2)
	go func() { ended <- node.Start(ctx) }()
	go func() { ended <- gateway.Start(ctx) }()
	t.Cleanup(func() {
		cancel()
		assert.NilError(t, <-ended)
		assert.NilError(t, <-ended)
	})
	assert.NilError(t, node.Synced(ctx))
	assert.NilError(t, gateway.Synced(ctx))

	m := func(ns, name string, labels ...string) metav1.ObjectMeta {
		out := metav1.ObjectMeta{Namespace: ns, Name: name, Labels: map[string]string{v1beta1.LabelRemoteClusterID: "rome"}}
		for i := 0; i+1 < len(labels); i += 2 {
			out.Labels[labels[i]] = labels[i+1]
		}
		return out
	}
	route := func(ns, name, category, unique, dst string) *v1beta1.RouteConfiguration {
		to, dev := v1beta1.CIDR(dst), "eth0"
		return &v1beta1.RouteConfiguration{
			ObjectMeta: m(ns, name, v1beta1.LabelRouteCategory, category, v1beta1.LabelRouteUnique, unique),
			Spec: v1beta1.RouteConfigurationSpec{Table: v1beta1.RouteTable{Name: name, Rules: []v1beta1.Rule{{
				Dst: &to, Routes: []v1beta1.Route{{Dst: &to, Dev: &dev}},
			}}}},
		}
	}
	firewall := func(ns, name, category, subcategory string) *v1beta1.FirewallConfiguration {
		return &v1beta1.FirewallConfiguration{
			ObjectMeta: m(ns, name, v1beta1.LabelFirewallCategory, category, v1beta1.LabelFirewallSubcategory, subcategory),
			Spec:       v1beta1.FirewallConfigurationSpec{Table: v1beta1.Table{Name: name, Family: v1beta1.TableFamilyIPv4}},
		}
	}
	inode := func(name, ip string) *v1beta1.InternalNode {
		return &v1beta1.InternalNode{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: v1beta1.InternalNodeSpec{
			Interface: v1beta1.InternalNodeSpecInterface{
				Gateway: v1beta1.InternalNodeGatewayInterface{Name: "liqo." + name},
				Node:    v1beta1.InternalNodeNodeInterface{IP: v1beta1.IP(ip)},
			}}}
	}
	tunnel := func(ns, node string, id uint32) *v1beta1.GeneveTunnel {
		return &v1beta1.GeneveTunnel{ObjectMeta: m(ns, "rome-"+node, v1beta1.LabelNodeName, node), Spec: v1beta1.GeneveTunnelSpec{
			ID:                id,
			InternalNodeRef:   &corev1.ObjectReference{Name: node},
			InternalFabricRef: &corev1.ObjectReference{Name: "rome", Namespace: ns},
		}}
	}
	create(
		inode("node-1", "10.80.0.2"), inode("node-2", "10.80.0.3"),
		&v1beta1.InternalFabric{ObjectMeta: m(T, "rome"), Spec: v1beta1.InternalFabricSpec{
			GatewayNode: "node-1",
			RemoteCIDRs: []v1beta1.CIDR{"10.1.0.0/16"}, GatewayIP: "10.127.65.9",
			Interface: v1beta1.InternalFabricSpecInterface{
				Node:    v1beta1.InternalFabricNodeInterface{Name: "liqo.rome"},
				Gateway: v1beta1.InternalFabricGatewayInterface{IP: "10.80.0.5"},
			},
		}},
		tunnel(T, "node-1", 1), tunnel(T, "node-2", 2), tunnel(other, "node-1", 3),
		route(T, "rome-node-gw", v1beta1.CategoryFabric, "", "10.1.0.7/16"), // with host bits
		route(T, "rome-gw-ext", v1beta1.CategoryGateway, "rome", "10.2.0.0/16"),
		route(L, "everyone", v1beta1.CategoryGateway, "", "10.3.0.0/16"),
		route(other, "oslo-gw-ext", v1beta1.CategoryGateway, "rome", "10.4.0.0/16"),
		firewall(T, "mine", v1beta1.CategoryGateway, v1beta1.SubcategoryAllGateway),
		firewall(L, "system", v1beta1.CategoryGateway, v1beta1.SubcategoryFabric),
		firewall(other, "not-mine", v1beta1.CategoryGateway, v1beta1.SubcategoryAllGateway),
		firewall(T, "a-remap-ipmapping-gw", v1beta1.CategoryGateway, v1beta1.SubcategoryIPMapping),
		firewall(other, "b-remap-ipmapping-gw", v1beta1.CategoryGateway, v1beta1.SubcategoryIPMapping),
		firewall("default", "c-remap-ipmapping-gw", v1beta1.CategoryGateway, v1beta1.SubcategoryIPMapping),
		firewall("default", "c-remap-ipmapping-fabric", v1beta1.CategoryFabric, v1beta1.SubcategoryIPMapping),
		&v1beta1.GatewayServer{ObjectMeta: m(T, "rome"), Spec: v1beta1.GatewayServerSpec{
			MTU: 1400, Endpoint: v1beta1.Endpoint{Ports: []int32{51840}},
		}},
		&v1beta1.PublicKey{ObjectMeta: m(T, "rome", v1beta1.LabelGatewayResource, "true"), Spec: v1beta1.PublicKeySpec{PublicKey: slices.Repeat([]byte{7}, 32)}},
		&v1beta1.Configuration{ObjectMeta: m(T, "rome"), Spec: v1beta1.ConfigurationSpec{
			Remote: v1beta1.ClusterConfig{CIDR: v1beta1.ClusterConfigCIDR{Pod: []v1beta1.CIDR{"10.1.0.0/16"}}},
		}},
		&v1beta1.Connection{ObjectMeta: m(T, "gw-rome"), Spec: v1beta1.ConnectionSpec{Type: v1beta1.ConnectionTypeServer}},
		&v1beta1.GatewayReport{ObjectMeta: m(T, "gw-rome")},
	)

	nodeView := eventually(t, node, "the node's objects", func(v kube.NodeView) bool {
		return len(v.Input.Fabrics) == 1 && len(v.Input.Tunnels) == 2 && len(v.Input.Routes) == 1 && len(v.Input.Nodes) == 1
	})
	assert.Equal(t, nodeView.Input.Nodes[0].InternalIP, netip.MustParseAddr("10.80.0.2"))
	assert.Equal(t, nodeView.Input.Routes[0].Rules[0].Dst, netip.MustParsePrefix("10.1.0.0/16"))
	assert.Equal(t, len(nodeView.Input.Problems), 2) // the host bits of rule and route
	assert.Equal(t, nodeView.Input.Fabrics[0].GatewayNode, "node-1")

	gatewayView := eventually(t, gateway, "the gateway's objects", func(v kube.GatewayView) bool {
		return v.Gateway != nil && v.Connection != nil && len(v.Input.Tunnels) == 2 && len(v.Input.Nodes) == 2 &&
			len(v.Input.Routes) == 2 && len(v.Input.Firewalls) == 5 && len(v.Input.Configurations) == 1 && len(v.Input.PublicKeys) == 1 && len(v.Input.Fabrics) == 1
	})
	// The gateway is woken when its report is made. That must be over before "status of the gateway" counts wakes.
	first := kube.ReportStatus{Applied: []cluster.Applied{{Object: gatewayView.Input.Routes[0].Ref, ObservedGeneration: 1, Message: "not yet"}}}
	assert.NilError(t, gateway.WriteReport(ctx, first))
	eventually(t, gateway, "its first report", func(v kube.GatewayView) bool { return len(v.Applied) == 1 })
	assert.Equal(t, gatewayView.Gateway.MTU, 1400)
	var firewalls []string
	for _, f := range gatewayView.Input.Firewalls {
		firewalls = append(firewalls, f.Namespace+"/"+f.Name)
	}
	slices.Sort(firewalls)
	assert.DeepEqual(t, firewalls, []string{
		"default/c-remap-ipmapping-gw", other + "/b-remap-ipmapping-gw", T + "/a-remap-ipmapping-gw", T + "/mine", L + "/system",
	})
	assert.Equal(t, gatewayView.Gateway.Port, uint16(51840))

	t.Run("status of the node", func(t *testing.T) {
		drain(node.Changed())
		want := kube.NodeStatus{
			Local: netip.MustParseAddr("10.127.65.1"), Kernel: "6.1.0",
			Needs: []cluster.Needed{
				{IP: netip.MustParseAddr("10.127.65.254"), For: "DNSServer"}, {IP: netip.MustParseAddr("10.127.65.254"), For: "Router"},
			},
			Applied: []cluster.Applied{
				{Object: nodeView.Input.Routes[0].Ref, ObservedGeneration: 1, OK: true},
				{Object: nodeView.Input.Tunnels[0].Ref, ObservedGeneration: 1, Message: "no"},
			},
			Conditions: []metav1.Condition{{Type: "Ready", Status: metav1.ConditionTrue, Message: "all is well"}},
		}
		assert.NilError(t, node.WriteStatus(ctx, want))
		have := &v1beta1.InternalNode{}
		key := client.ObjectKey{Name: "node-1"}
		assert.NilError(t, admin.Get(ctx, key, have))
		assert.Equal(t, string(*have.Status.NodeIP.Local), "10.127.65.1")
		assert.Assert(t, have.Status.NodeIP.Remote == nil)
		assert.DeepEqual(t, have.Status.Needs, []v1beta1.NeededAddress{{IP: "10.127.65.254", For: v1beta1.NeededForDNS}, {IP: "10.127.65.254", For: v1beta1.NeededForRouting}})
		assert.Equal(t, len(have.Status.Applied), 2)
		assert.Equal(t, have.Status.Conditions[0].ObservedGeneration, int64(1))
		version := have.ResourceVersion

		// The same again, later, writes nothing.
		eventually(t, node, "its own status", func(v kube.NodeView) bool { return v.Input.Nodes[0].Local.IsValid() })
		assert.NilError(t, node.WriteStatus(ctx, want))
		assert.NilError(t, admin.Get(ctx, key, have))
		assert.Equal(t, have.ResourceVersion, version)

		// What is taken back at once is taken back, whatever the informers have seen of it.
		for range 20 {
			other := want
			other.Kernel = "6.2.0"
			assert.NilError(t, node.WriteStatus(ctx, other))
			assert.NilError(t, node.WriteStatus(ctx, want))
			assert.NilError(t, admin.Get(ctx, key, have))
			assert.Equal(t, have.Status.Kernel, "6.1.0")
		}

		// What is not known any more goes away; a condition of somebody else
		// stays.
		have.Status.Conditions = append(have.Status.Conditions, metav1.Condition{
			Type: "Valid", Status: metav1.ConditionTrue, Reason: "Fine", LastTransitionTime: metav1.Now(),
		})
		assert.NilError(t, admin.Status().Update(ctx, have))
		want.Local, want.Remote = netip.Addr{}, netip.MustParseAddr("fd00::11")
		want.Applied, want.Needs = want.Applied[:1], want.Needs[1:]
		assert.NilError(t, node.WriteStatus(ctx, want))
		assert.NilError(t, admin.Get(ctx, key, have))
		assert.DeepEqual(t, have.Status.Needs, []v1beta1.NeededAddress{{IP: "10.127.65.254", For: v1beta1.NeededForRouting}})
		assert.Assert(t, have.Status.NodeIP.Local == nil)
		assert.Equal(t, string(*have.Status.NodeIP.Remote), "fd00::11")
		assert.Equal(t, len(have.Status.Applied), 1)
		assert.Equal(t, len(have.Status.Conditions), 2)

		// Gateways come, move and go; and the controller, which writes the whole
		// object, does so at any moment.
		local, remote := netip.MustParseAddr("10.127.65.1"), netip.MustParseAddr("10.0.0.11")
		for i, step := range []struct{ local, remote netip.Addr }{
			{}, {local: local}, {}, {remote: remote}, {}, {local, remote}, {remote: remote}, {local: local}, {}, {local, remote}, {}, {},
			{remote: netip.MustParseAddr("fd00::11")},
		} {
			want.Local, want.Remote = step.local, step.remote
			assert.NilError(t, node.WriteStatus(ctx, want), "step %d", i)
			assert.NilError(t, admin.Get(ctx, key, have))
			shown := func(ip *v1beta1.IP, want netip.Addr) {
				t.Helper()
				got := netip.Addr{}
				if ip != nil {
					got = netip.MustParseAddr(string(*ip))
				}
				assert.Equal(t, got, want, "step %d", i)
			}
			shown(have.Status.NodeIP.Local, step.local)
			shown(have.Status.NodeIP.Remote, step.remote)
			eventually(t, node, "its own status", func(v kube.NodeView) bool {
				return v.Input.Nodes[0].Local == step.local && v.Input.Nodes[0].Remote == step.remote
			})
			have.Status.Conditions[len(have.Status.Conditions)-1].Message = fmt.Sprint("step ", i)
			assert.NilError(t, admin.Status().Update(ctx, have))
		}

		gv := eventually(t, gateway, "the node's address", func(v kube.GatewayView) bool {
			for _, n := range v.Input.Nodes {
				if n.Name == "node-1" && n.Remote.IsValid() {
					return true
				}
			}
			return false
		})
		assert.Equal(t, len(gv.Input.Problems), 0)
	})

	// What does not fit into an object of etcd would not be written at all, addresses
	// included (etcd --max-request-bytes, 1.5 MiB).
	t.Run("more objects than a status has room for", func(t *testing.T) {
		drain(gateway.Changed())
		want := kube.NodeStatus{Local: netip.MustParseAddr("10.127.65.7"), Conditions: []metav1.Condition{{Type: "Ready", Status: metav1.ConditionTrue, Reason: "Applied"}}}
		for i := range 6000 {
			want.Applied = append(want.Applied, cluster.Applied{
				Object:             cluster.Ref{Kind: "FirewallConfiguration", Namespace: "liqo-tenant-rome", Name: fmt.Sprintf("some-service-%04d-remap-ipmapping-fabric", i)},
				ObservedGeneration: 1, OK: i%1000 != 999, Message: strings.Repeat("x", i%1000/999*500),
			})
		}
		assert.NilError(t, node.WriteStatus(ctx, want))
		have := &v1beta1.InternalNode{}
		assert.NilError(t, admin.Get(ctx, client.ObjectKey{Name: "node-1"}, have))
		assert.Equal(t, string(*have.Status.NodeIP.Local), "10.127.65.7")
		failed := 0
		for _, a := range have.Status.Applied {
			if !a.OK {
				failed++
			}
		}
		assert.Check(t, is.Equal(failed, 6))
		n := len(have.Status.Applied)
		assert.Check(t, n > 1500 && n < 3000, "%d entries", n)
		i := slices.IndexFunc(have.Status.Conditions, func(c metav1.Condition) bool { return c.Type == "AppliedListed" })
		assert.Assert(t, i >= 0)
		assert.Check(t, is.Contains(have.Status.Conditions[i].Message, "not room for all objects"))

		want.Applied = want.Applied[:2]
		assert.NilError(t, node.WriteStatus(ctx, want))
		assert.NilError(t, admin.Get(ctx, client.ObjectKey{Name: "node-1"}, have))
		assert.Check(t, is.Len(have.Status.Applied, 2))
		assert.Check(t, !slices.ContainsFunc(have.Status.Conditions, func(c metav1.Condition) bool { return c.Type == "AppliedListed" }))
		// An address wakes the gateway. It must not do so while what comes next counts its wakes: it is
		// woken a moment after it knows.
		eventually(t, gateway, "the address beside many objects", func(v kube.GatewayView) bool {
			return slices.ContainsFunc(v.Input.Nodes, func(n cluster.InternalNode) bool { return n.Name == "node-1" && n.Local == want.Local })
		})
		select {
		case <-gateway.Changed():
		case <-time.After(time.Minute):
			t.Fatal("the gateway was not told of the address")
		}
	})

	t.Run("another node's status", func(t *testing.T) {
		s, err := kube.NewNodeSource(kube.NodeSourceConfig{Config: nodeConfig, Node: "node-2"})
		assert.NilError(t, err)
		err = s.Client().Status().Patch(ctx, inode("node-2", "10.80.0.3"), client.RawPatch("application/merge-patch+json", []byte(`{"status":{"kernel":"x"}}`)))
		assert.ErrorContains(t, err, "forbidden")
	})

	t.Run("status of the gateway", func(t *testing.T) {
		drain(gateway.Changed())
		at := time.Date(2026, 3, 14, 12, 0, 0, 0, time.UTC)
		connection := kube.ConnectionStatus{Value: v1beta1.Connected, Latency: "2ms", At: at, Conditions: []metav1.Condition{{Type: v1beta1.ConditionConnected, Status: metav1.ConditionTrue, Reason: "Connected", Message: "it answers"}}}
		connection.Peer = &v1beta1.ConnectionPeer{
			Version: "v0.4.0", Features: []string{"mtu"}, MTU: 1390, ObservedGeneration: 2, Since: metav1.NewTime(at), Networks: &v1beta1.ClusterConfigCIDR{Pod: []v1beta1.CIDR{"10.1.0.0/16"}},
			Endpoint: &v1beta1.ConnectionEndpoint{Addresses: []string{"192.0.2.7"}, Port: 31840},
		}
		assert.NilError(t, gateway.WriteConnection(ctx, connection))
		report := kube.ReportStatus{
			Implementation: "kernel", MTU: 1440, Endpoint: "203.0.113.2:51840", LastHandshake: at,
			Applied: []cluster.Applied{{Object: gatewayView.Input.Routes[0].Ref, ObservedGeneration: 1, OK: true}},
		}
		assert.NilError(t, gateway.WriteReport(ctx, report))

		var conn v1beta1.Connection
		var rep v1beta1.GatewayReport
		key := client.ObjectKey{Namespace: T, Name: "gw-rome"}
		assert.NilError(t, admin.Get(ctx, key, &conn))
		assert.NilError(t, admin.Get(ctx, key, &rep))
		assert.Equal(t, conn.Status.Value, v1beta1.Connected)
		assert.Equal(t, conn.Status.Latency.Value, "2ms")
		assert.DeepEqual(t, conn.Status.Peer, connection.Peer)
		assert.Equal(t, len(conn.Status.Conditions), 1)
		assert.Equal(t, conn.Status.Conditions[0].Message, "it answers")
		assert.Equal(t, rep.Status.MTU, 1440)
		assert.Assert(t, rep.Status.LastHandshake.Time.Equal(at))

		// Its own reports wake nobody, and the next handshake is no news.
		eventually(t, gateway, "its own connection and report", func(v kube.GatewayView) bool {
			peer := v.Connection.Peer
			return v.Connection.Value == "Connected" && peer != nil && peer.Generation == 2 && peer.Endpoint.Port == 31840 && peer.Networks.Pod[0].String() == "10.1.0.0/16" &&
				len(v.Applied) == 1 && v.Applied[0].OK // the GatewayReport has an informer of its own
		})
		report.LastHandshake = at.Add(2 * time.Minute)
		assert.NilError(t, gateway.WriteReport(ctx, report))
		assert.NilError(t, gateway.WriteConnection(ctx, connection))
		version := conn.ResourceVersion
		assert.NilError(t, admin.Get(ctx, key, &conn))
		assert.Equal(t, conn.ResourceVersion, version)
		version = rep.ResourceVersion
		assert.NilError(t, admin.Get(ctx, key, &rep))
		assert.Equal(t, rep.ResourceVersion, version)
		select {
		case <-gateway.Changed():
			t.Error("a status of its own woke the gateway")
		default:
		}
	})

	t.Run("a change wakes", func(t *testing.T) {
		drain(node.Changed())
		rc := &v1beta1.RouteConfiguration{}
		key := client.ObjectKey{Namespace: T, Name: "rome-node-gw"}
		assert.NilError(t, admin.Get(ctx, key, rc))
		rc.Spec.Table.Rules[0].Iif = ptr("eth1")
		assert.NilError(t, admin.Update(ctx, rc))
		select {
		case <-node.Changed():
		case <-time.After(20 * time.Second):
			t.Fatal("nobody was told")
		}
		eventually(t, node, "the change", func(v kube.NodeView) bool { return v.Input.Routes[0].Rules[0].IIF == "eth1" })
	})

	t.Run("in the VXLAN overlay", func(t *testing.T) {
		config := as(t, plane, admin, "overlay", map[string][]rbacv1.PolicyRule{"": {
			{APIGroups: []string{""}, Resources: []string{"pods"}, Verbs: read},
			{APIGroups: group, Verbs: read, Resources: []string{"internalnodes", "internalfabrics", "genevetunnels", "routeconfigurations", "firewallconfigurations"}},
			{APIGroups: group, Verbs: []string{"patch"}, Resources: []string{"internalnodes/status"}},
		}})
		one, two := inode("node-11", "10.80.0.11"), inode("node-12", "10.80.0.12")
		create(one, two)
		sourceConfig := kube.NodeSourceConfig{Config: config, Node: "node-11", StateDir: t.TempDir()}
		src, err := kube.NewNodeSource(sourceConfig)
		assert.NilError(t, err)
		ctx, cancel := context.WithCancel(ctx)
		done := make(chan error, 1)
		go func() { done <- src.Start(ctx) }()
		t.Cleanup(func() { cancel(); assert.NilError(t, <-done) })
		eventually(t, src, "its own InternalNode alone", func(v kube.NodeView) bool { return len(v.Input.Nodes) == 1 })

		one.Spec.Overlay = v1beta1.OverlayVXLAN
		assert.NilError(t, admin.Update(ctx, one))
		eventually(t, src, "all InternalNodes", func(v kube.NodeView) bool { return len(v.Input.Nodes) >= 2 })
		drain(src.Changed())
		vtep := cluster.VTEP{IP: netip.MustParseAddr("172.18.1.12"), MAC: [6]byte{2, 0, 0, 0, 0, 12}}
		other, err := kube.NewNodeSource(kube.NodeSourceConfig{Config: config, Node: "node-12"})
		assert.NilError(t, err)
		go func() { done <- other.Start(ctx) }()
		t.Cleanup(func() { cancel(); assert.NilError(t, <-done) })
		assert.NilError(t, other.Synced(ctx))
		status := kube.NodeStatus{VTEP: vtep, Overlays: []cluster.Overlay{cluster.OverlayGeneve, cluster.OverlayVXLAN}}
		assert.NilError(t, other.WriteStatus(ctx, status))
		select {
		case <-src.Changed():
		case <-time.After(20 * time.Second):
			t.Fatal("nobody was told of the other node's VTEP")
		}
		eventually(t, src, "the other node's VTEP", func(v kube.NodeView) bool {
			return slices.ContainsFunc(v.Input.Nodes, func(n cluster.InternalNode) bool {
				return n.Name == "node-12" && n.VTEP == vtep && len(n.Overlays) == 2
			})
		})
		status.VTEP = cluster.VTEP{}
		eventually(t, other, "its own status", func(v kube.NodeView) bool { return v.Input.Nodes[0].VTEP == vtep })
		assert.NilError(t, other.WriteStatus(ctx, status))
		eventually(t, src, "that the VTEP is gone", func(v kube.NodeView) bool {
			return slices.ContainsFunc(v.Input.Nodes, func(n cluster.InternalNode) bool { return n.Name == "node-12" && n.VTEP == cluster.VTEP{} })
		})

		// The others are remembered, too, and no longer than they are needed.
		now, err := src.Read(ctx)
		assert.NilError(t, err)
		remembered(t, nodeObjects(now), func(ctx context.Context) ([]string, error) {
			v, err := startWithoutAPI(t, sourceConfig).Read(ctx)
			return nodeObjects(v), err
		})
		geneve := sourceConfig
		geneve.Node = "node-12"       // which is not in the VXLAN overlay
		geneve.StateDir = t.TempDir() // src still writes into the other one
		file := filepath.Join(geneve.StateDir, "nodes.json")
		content, err := os.ReadFile(filepath.Join(sourceConfig.StateDir, "nodes.json"))
		assert.NilError(t, err)
		assert.NilError(t, os.WriteFile(file, content, 0o600))
		third, err := kube.NewNodeSource(geneve)
		assert.NilError(t, err)
		go func() { done <- third.Start(ctx) }()
		t.Cleanup(func() { cancel(); assert.NilError(t, <-done) })
		_, err = third.Read(ctx)
		assert.NilError(t, err)
		_, err = os.Stat(file)
		assert.ErrorIs(t, err, fs.ErrNotExist)
	})

	t.Run("without the API server", func(t *testing.T) {
		before, err := node.Read(ctx)
		assert.NilError(t, err)
		wire.sever()
		after, err := node.Read(ctx)
		assert.NilError(t, err)
		assert.Equal(t, len(after.Input.Tunnels), len(before.Input.Tunnels))
		assert.Equal(t, len(after.Input.Fabrics), 1)
		assert.ErrorContains(t, node.WriteStatus(ctx, kube.NodeStatus{Kernel: "new"}), "InternalNode node-1")

		// One that starts in place of an earlier one goes on with what that one knew.
		remembered(t, nodeObjects(after), func(ctx context.Context) ([]string, error) {
			v, err := startWithoutAPI(t, nodeSource).Read(ctx)
			return nodeObjects(v), err
		})
		nodeAgain, err := kube.NewNodeSource(nodeSource)
		assert.NilError(t, err)
		ended := make(chan error, 1)
		go func() { ended <- nodeAgain.Start(ctx) }()
		t.Cleanup(func() { cancel(); assert.NilError(t, <-ended) })
		again, err := nodeAgain.Read(ctx)
		assert.NilError(t, err)
		assert.DeepEqual(t, nodeObjects(again), nodeObjects(after))
		// A block came last: the gateway that starts keeps the peer and the key out.
		conf := &v1beta1.Configuration{}
		assert.NilError(t, admin.Get(ctx, client.ObjectKey{Namespace: T, Name: "rome"}, conf))
		conf.Annotations = map[string]string{v1beta1.AnnotationBlocked: "by anna"}
		assert.NilError(t, admin.Update(ctx, conf))
		leaked := slices.Repeat([]byte{7}, 32)
		create(
			&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: L, Name: v1beta1.BlockedKeysConfigMap}, Data: map[string]string{cluster.FingerprintOf(leaked).String(): "by anna"}},
			&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: L, Name: "other"}, Data: map[string]string{cluster.FingerprintOf([]byte{1}).String(): "by nobody"}},
		)
		blocked := func(v kube.GatewayView) bool {
			_, is := v.Input.BlockedKeys.Of(leaked)
			return is && len(v.Input.BlockedKeys) == 1 && v.Input.Configurations[0].Blocked
		}
		eventually(t, gateway, "what is blocked", blocked)
		gatewayBefore, err := gateway.Read(ctx)
		assert.NilError(t, err)
		var gatewayAfter kube.GatewayView
		facts := func(v kube.GatewayView) []string {
			return append(gatewayObjects(v), fmt.Sprint("blocked: ", blocked(v)))
		}
		remembered(t, facts(gatewayBefore), func(ctx context.Context) (_ []string, err error) {
			gatewayAfter, err = startGatewayWithoutAPI(t, gatewaySource).Read(ctx)
			return facts(gatewayAfter), err
		})
		assert.Check(t, len(gatewayAfter.Input.PublicKeys[0].Key) == 32)

		// What is of another node, or of another boot, is of no use.
		file := filepath.Join(nodeSource.StateDir, "node.json")
		content, err := os.ReadFile(file)
		assert.NilError(t, err)
		for _, spoil := range []struct{ old, new string }{{`"owner":"node-1"`, `"owner":"node-2"`}, {`"boot":"`, `"boot":"before-`}, {`{`, ``}} {
			other := nodeSource
			other.StateDir = t.TempDir()
			text := strings.Replace(string(content), spoil.old, spoil.new, 1)
			assert.Assert(t, text != string(content), spoil.old)
			assert.NilError(t, os.WriteFile(filepath.Join(other.StateDir, "node.json"), []byte(text), 0o600))
			short, stop := context.WithTimeout(ctx, time.Second)
			_, err = startWithoutAPI(t, other).Read(short)
			assert.ErrorIs(t, err, context.DeadlineExceeded, spoil.new)
			stop()
		}

		// A daemon that starts now and knows nothing waits, and applies nothing meanwhile.
		late, err := kube.NewNodeSource(kube.NodeSourceConfig{Config: nodeConfig, Node: "node-1"})
		assert.NilError(t, err)
		short, stop := context.WithTimeout(ctx, 200*time.Millisecond)
		defer stop()
		done := make(chan error, 1)
		go func() { done <- late.Start(short) }()
		_, err = late.Read(short)
		assert.ErrorIs(t, err, context.DeadlineExceeded)
		assert.NilError(t, <-done)

		// What happened meanwhile is there when the API server is back.
		assert.NilError(t, admin.Delete(ctx, tunnel(T, "node-1", 1)))
		wire.restore()
		eventually(t, node, "what happened meanwhile", func(v kube.NodeView) bool { return len(v.Input.Tunnels) == 1 })
		eventually(t, nodeAgain, "what happened meanwhile", func(v kube.NodeView) bool { return len(v.Input.Tunnels) == 1 })
	})
}

func ptr[T any](v T) *T { return &v }

func drain(ch <-chan struct{}) {
	for {
		select {
		case <-ch:
		default:
			return
		}
	}
}

func TestSourceConfig(t *testing.T) {
	for _, tt := range []struct{ name, mode, want string }{
		{"", cluster.Server, "kube: Config, Name, Namespace, System and RemoteID are required"},
		{"rome", "both", `kube: mode "both": write server or client`},
	} {
		_, err := kube.NewGatewaySource(kube.GatewaySourceConfig{
			Config: &rest.Config{Host: "https://127.0.0.1:1"}, Name: tt.name, Namespace: "t", System: "l", RemoteID: "rome", Mode: tt.mode,
		})
		assert.Error(t, err, tt.want)
	}
	_, err := kube.NewNodeSource(kube.NodeSourceConfig{})
	assert.Error(t, err, "kube: Config and Node are required")
}
