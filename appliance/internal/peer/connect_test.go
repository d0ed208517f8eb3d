package peer

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
)

// two are clusters with nothing of a peering.
func two() *Both {
	side := func(id, pods, external string) Facts {
		f := Facts{Cluster: Cluster{Name: id + " cluster", Kubectl: "kubectl --context " + id, Isthmusctl: "isthmusctl --context " + id, System: "liqo"}}
		f.ID, f.UID = id, types.UID(id)
		f.Pod, f.External = []v1beta1.CIDR{v1beta1.CIDR(pods)}, []v1beta1.CIDR{v1beta1.CIDR(external)}
		f.Template = &unstructured.Unstructured{Object: map[string]any{"spec": map[string]any{"template": map[string]any{"spec": map[string]any{"service": map[string]any{"spec": map[string]any{
			"ports": []any{map[string]any{"?nodePort": ""}}, "?loadBalancerIP": "",
		}}}}}}}
		return f
	}
	b := &Both{side("milan", "10.0.0.0/16", "10.70.0.0/16"), side("rome", "10.1.0.0/16", "10.71.0.0/16")}
	b[Local].Namespace.Name, b[Remote].Namespace.Name = "liqo-tenant-rome", "liqo-tenant-milan"
	return b
}

// defaults are the options of a command line without flags but those given.
func defaults(given ...string) *Options {
	o := &Options{
		Server:      Template{APIVersion: "networking.liqo.io/v1beta1", Kind: "WgGatewayServerTemplate", Name: DefaultServerTemplate},
		Client:      Template{APIVersion: "networking.liqo.io/v1beta1", Kind: "WgGatewayClientTemplate", Name: DefaultClientTemplate},
		ServiceType: DefaultServiceType, Port: DefaultPort, MTU: DefaultMTU, Given: map[string]bool{}, Wait: true,
	}
	for _, f := range given {
		o.Given[f] = true
	}
	return o
}

// settle does what the controller and the gateways of a side do.
func (b *Both) settle(on Side) {
	f, other := &b[on], &b[on.other()]
	for i := range f.Configurations {
		c := &f.Configurations[i]
		c.Status.Remote = &c.Spec.Remote
		c.Status.Conditions = []metav1.Condition{{Type: v1beta1.ConditionNetworkCIDRsConfigured, Status: metav1.ConditionTrue, ObservedGeneration: c.Generation}}
	}
	port := int32(30000)
	for i := range f.Servers {
		f.Servers[i].Status.Endpoint = &v1beta1.EndpointStatus{Addresses: []string{"203.0.113.7"}, Port: &port}
	}
	if len(f.Servers)+len(f.Clients) > 0 {
		f.PublicKey = []byte("key of " + f.ID)
		connection := v1beta1.Connection{ObjectMeta: metav1.ObjectMeta{Namespace: f.Namespace.Name, Name: "gw-" + other.ID}}
		if len(f.Keys) > 0 && len(other.Keys) > 0 {
			connection.Status.Value = v1beta1.Connected
		}
		f.Connections = []v1beta1.Connection{connection}
	}
}

// apply makes changes as an API server would.
func (b *Both) apply(t *testing.T, changes []Change) {
	t.Helper()
	for _, c := range changes {
		f := &b[c.On]
		o := c.Object.DeepCopyObject().(client.Object)
		if c.Deed == Create {
			o.SetUID(types.UID(fmt.Sprintf("%s %T %s", f.ID, o, o.GetName())))
			o.SetManagedFields([]metav1.ManagedFieldsEntry{{Manager: string(FieldOwner), Operation: metav1.ManagedFieldsOperationUpdate, FieldsV1: metav1.NewFieldsV1(`{"f:spec":{}}`)}})
		}
		switch o := o.(type) {
		case *corev1.Namespace:
			f.Namespace = *o
		case *v1beta1.Configuration:
			f.Configurations = []v1beta1.Configuration{*o}
		case *v1beta1.GatewayServer:
			f.Servers = []v1beta1.GatewayServer{*o}
		case *v1beta1.GatewayClient:
			f.Clients = []v1beta1.GatewayClient{*o}
		case *v1beta1.PublicKey:
			f.Keys = []v1beta1.PublicKey{*o}
		}
	}
}

// done plans and applies until nothing is left, and returns what was done.
func (b *Both) done(t *testing.T, action Action, o *Options) []string {
	t.Helper()
	var out []string
	for range 20 {
		s := connect(b, action, o)
		assert.Equal(t, len(s.Problems), 0, "%v", s.Problems)
		if !s.busy() {
			return out
		}
		for _, c := range s.Changes {
			out = append(out, fmt.Sprintf("%s %s", c.Deed, b.ref(c.On, c.Object)))
		}
		b.apply(t, s.Changes)
		b.settle(Local)
		b.settle(Remote)
	}
	t.Fatalf("it does not end: %v", out)
	return nil
}

func TestConnect(t *testing.T) {
	namespaces := []string{"created Namespace liqo-tenant-rome in milan", "created Namespace liqo-tenant-milan in rome"}
	configurations := []string{"created Configuration liqo-tenant-rome/rome in milan", "created Configuration liqo-tenant-milan/milan in rome"}
	for _, tt := range []struct {
		name   string
		action Action
		o      *Options
		there  func(*Both)
		want   []string
	}{
		{"networks only", Init, defaults(), func(*Both) {}, slices.Concat(namespaces, configurations)},
		{"all of it", Connect, defaults(), func(*Both) {}, slices.Concat(namespaces, configurations, []string{
			"created GatewayServer liqo-tenant-milan/milan in rome", "created GatewayClient liqo-tenant-rome/rome in milan",
			"created PublicKey liqo-tenant-rome/rome in milan", "created PublicKey liqo-tenant-milan/milan in rome",
		})},
		{"without keys", Connect, func() *Options { o := defaults(); o.KeepKeys, o.Wait = true, false; return o }(), func(*Both) {}, slices.Concat(namespaces, configurations, []string{
			"created GatewayServer liqo-tenant-milan/milan in rome", "created GatewayClient liqo-tenant-rome/rome in milan",
		})},
		{"the other way round, because a server is there", Connect, defaults(), func(b *Both) {
			b[Local].Servers = []v1beta1.GatewayServer{{ObjectMeta: metav1.ObjectMeta{Namespace: "liqo-tenant-rome", Name: "to-rome"}}}
		}, slices.Concat(namespaces, configurations, []string{
			"created GatewayClient liqo-tenant-milan/milan in rome",
			"created PublicKey liqo-tenant-milan/milan in rome", "created PublicKey liqo-tenant-rome/rome in milan",
		})},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := two()
			tt.there(b)
			assert.DeepEqual(t, b.done(t, tt.action, tt.o), tt.want)
			assert.Equal(t, len(b.done(t, tt.action, tt.o)), 0)
		})
	}
}

// What was made is what the public CLI makes.
func TestObjects(t *testing.T) {
	b := two()
	o := defaults()
	o.Labels = map[string]string{"team": "a"}
	b.done(t, Connect, o)
	labels := map[string]string{"liqo.io/remote-cluster-id": "milan", "team": "a"}
	server, dialler := b[Remote].Servers[0], b[Local].Clients[0]
	assert.DeepEqual(t, server.Labels, labels)
	assert.Equal(t, server.Spec.MTU, 1340)
	assert.Equal(t, server.Spec.Endpoint.ServiceType, corev1.ServiceTypeLoadBalancer)
	assert.Equal(t, *server.Spec.Endpoint.Port, int32(51840))
	assert.Equal(t, server.Spec.ServerTemplateRef, corev1.ObjectReference{APIVersion: "networking.liqo.io/v1beta1", Kind: "WgGatewayServerTemplate", Namespace: "liqo", Name: "wireguard-server"})
	assert.DeepEqual(t, dialler.Spec.Endpoint.Addresses, []string{"203.0.113.7"})
	assert.Equal(t, *dialler.Spec.Endpoint.Port, int32(30000))
	assert.Equal(t, *dialler.Spec.Endpoint.Protocol, corev1.ProtocolUDP)
	assert.Equal(t, string(b[Remote].Keys[0].Spec.PublicKey), "key of milan")
	assert.Equal(t, b[Remote].Keys[0].OwnerReferences[0].UID, server.UID)
	assert.Equal(t, b[Remote].Keys[0].Labels["networking.liqo.io/gateway-resource"], "true")
	assert.DeepEqual(t, b[Remote].Configurations[0].Spec.Remote.CIDR, v1beta1.ClusterConfigCIDR{Pod: []v1beta1.CIDR{"10.0.0.0/16"}, External: []v1beta1.CIDR{"10.70.0.0/16"}})
	assert.Equal(t, b[Remote].Namespace.Labels["liqo.io/tenant-namespace"], "true")
	assert.Equal(t, b[Remote].Namespace.Labels["pod-security.kubernetes.io/enforce"], "privileged")
}

// by is an object's managed fields, with one manager of these fields.
func by(manager, fields string) []metav1.ManagedFieldsEntry {
	return []metav1.ManagedFieldsEntry{{Manager: manager, Operation: metav1.ManagedFieldsOperationUpdate, FieldsV1: metav1.NewFieldsV1(fields)}}
}

func TestChanges(t *testing.T) {
	const mtu = `{"f:spec":{"f:mtu":{}}}`
	for _, tt := range []struct {
		name  string
		there func(*Both)
		o     *Options
		want  []string // changes, problems and notes
	}{
		{"nothing", func(*Both) {}, defaults(), nil},
		{"a flag that is not given asks for nothing", func(b *Both) { b[Remote].Servers[0].Spec.MTU = 1400 }, defaults(), nil},
		{"a flag that is given changes what we wrote", func(b *Both) { b[Remote].Servers[0].ManagedFields = by("isthmusctl", mtu) }, func() *Options {
			o := defaults(FlagMTU)
			o.MTU = 1400
			return o
		}(), []string{"GatewayServer liqo-tenant-milan/milan in rome: spec.mtu: 1340 → 1400", "GatewayClient liqo-tenant-rome/rome in milan: spec.mtu: 1340 → 1400"}},
		{"and not what somebody else did", func(b *Both) { b[Remote].Servers[0].ManagedFields = by("liqoctl", mtu) }, func() *Options {
			o := defaults(FlagMTU)
			o.MTU = 1400
			return o
		}(), []string{"GatewayServer liqo-tenant-milan/milan in rome: spec.mtu is 1340, written by liqoctl, and --mtu asks for 1400"}},
		{"a port in a list is a port", func(b *Both) {
			b[Remote].Servers[0].Spec.Endpoint.Port, b[Remote].Servers[0].Spec.Endpoint.Ports = nil, []int32{51840}
		}, defaults(FlagServicePort), nil},
		{"a key that is another one", func(b *Both) { b[Local].PublicKey = []byte("new") }, defaults(),
			[]string{"PublicKey liqo-tenant-milan/milan in rome: spec.publicKey: another key → that of the gateway of milan"}},
		{"a key that the gateways have agreed on", func(b *Both) {
			b[Local].PublicKey = []byte("new")
			b[Remote].Keys[0].Status.Learned = &v1beta1.LearnedKey{ObservedGeneration: b[Remote].Keys[0].Generation, PublicKey: []byte("new")}
		}, defaults(), nil},
		{"a key that somebody else wrote", func(b *Both) {
			b[Local].PublicKey, b[Remote].Keys[0].ManagedFields = []byte("new"), by("kubectl", `{"f:spec":{"f:publicKey":{}}}`)
		}, defaults(), []string{"PublicKey liqo-tenant-milan/milan in rome: spec.publicKey is another key, written by kubectl, and the other cluster says that of the gateway of milan"}},
		{"networks that are another's", func(b *Both) {
			b[Local].Configurations[0].Spec.Remote.CIDR.Pod = []v1beta1.CIDR{"10.9.0.0/16"}
			b[Local].Configurations[0].ManagedFields = by("kubectl", `{"f:spec":{"f:remote":{"f:cidr":{"f:pod":{}}}}}`)
		}, defaults(), []string{"Configuration liqo-tenant-rome/rome in milan: spec.remote.cidr.pod is 10.9.0.0/16, written by kubectl, and the other cluster says 10.1.0.0/16"}},
		{"the server has moved and nobody hears it", func(b *Both) { moved(b, v1beta1.ConnectionError) }, defaults(),
			[]string{"GatewayClient liqo-tenant-rome/rome in milan: spec.endpoint.addresses: 203.0.113.7 → 203.0.113.8, spec.endpoint.port: 30000 → 31000"}},
		{"an endpoint that works stays", func(b *Both) { moved(b, v1beta1.Connected) }, defaults(), nil},
		{"and one that somebody else wrote", func(b *Both) {
			moved(b, v1beta1.ConnectionError)
			b[Local].Clients[0].ManagedFields = by("kubectl", `{"f:spec":{"f:endpoint":{"f:addresses":{},"f:port":{}}}}`)
		}, defaults(), []string{"GatewayClient liqo-tenant-rome/rome in milan, written by kubectl, dials 203.0.113.7 port 30000, and the server is at 203.0.113.8 port 31000: it stays"}},
		{"the same cluster", func(b *Both) { b[Remote].UID = b[Local].UID }, defaults(), []string{"milan cluster and rome cluster: they are the same cluster, milan"}},
		{"the same ID", func(b *Both) { b[Remote].ID = "milan" }, defaults(), []string{"milan cluster and rome cluster: they are two clusters with the same ID, milan"}},
		{"no template", func(b *Both) { b[Remote].Template, b[Remote].Templates = nil, []string{"liqo/slow", "liqo/fast"} }, defaults(),
			[]string{"WgGatewayServerTemplate liqo/wireguard-server in rome: it does not exist; there are liqo/slow, liqo/fast"}},
		{"a TunnelEndpoint", func(b *Both) {
			b[Local].Clients[0].Labels = map[string]string{v1beta1.LabelManagedBy: v1beta1.ManagedBy}
		}, defaults(), []string{"GatewayClient liqo-tenant-rome/rome in milan: the controller made it of a TunnelEndpoint, by which this peering is written"}},
		{"two servers", func(b *Both) {
			b[Local].Clients, b[Local].Servers = nil, b[Remote].Servers
		}, defaults(), []string{"GatewayServer in milan and in rome: both sides have one, and a peering has a server on one side and a client on the other"}},
		{"both of one side", func(b *Both) {
			b[Local].Servers = []v1beta1.GatewayServer{{ObjectMeta: metav1.ObjectMeta{Name: "x"}}}
			b[Remote].Servers = nil
		}, defaults(), []string{"GatewayServer or GatewayClient in namespace liqo-tenant-rome of milan: there are 2 for one peering, GatewayServer x, GatewayClient rome"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := two()
			b.done(t, Connect, defaults())
			tt.there(b)
			s := connect(b, Connect, tt.o)
			var got []string
			for _, c := range s.Changes {
				got = append(got, fmt.Sprintf("%s: %s", b.ref(c.On, c.Object), c.Why))
			}
			for _, p := range s.Problems {
				assert.Check(t, p.Fix != "" && p.Check != "", "%v", p)
				got = append(got, p.Object+": "+p.Message)
			}
			assert.DeepEqual(t, append(got, s.Notes...), tt.want)
			assert.Check(t, len(s.Problems) == 0 || len(s.Changes) == 0, "something is changed although it is refused")
			if len(s.Problems) > 0 {
				return
			}
			// Who may not change it is told before anything is done.
			for on := range b {
				var may, need []string
				for _, r := range rights(b, Side(on), Connect, tt.o) {
					if r.Verb == "patch" {
						may = append(may, r.Resource)
					}
				}
				for _, c := range s.Changes {
					if c.On == Side(on) {
						_, kind := kindOf(c.Object)
						need = append(need, resourceOf(kind))
					}
				}
				assert.DeepEqual(t, may, need)
			}
		})
	}
}

// TestRightsOfLater: what a connect changes only after something else has come is asked for
// before it begins, too.
func TestRightsOfLater(t *testing.T) {
	b := two()
	b.done(t, Connect, defaults())
	moved(b, v1beta1.ConnectionError) // the client is to dial another place
	b[Local].PublicKey, b[Remote].PublicKey = []byte("new"), []byte("new, too")
	patched := func(on Side) (out []string) {
		for _, r := range rights(b, on, Connect, defaults()) {
			if r.Verb == "patch" {
				out = append(out, r.Resource)
			}
		}
		return out
	}
	assert.DeepEqual(t, patched(Local), []string{"gatewayclients", "publickeies"})
	assert.DeepEqual(t, patched(Remote), []string{"publickeies"})
}

func moved(b *Both, value v1beta1.ConnectionStatusValue) {
	port := int32(31000)
	b[Remote].Servers[0].Status.Endpoint = &v1beta1.EndpointStatus{Addresses: []string{"203.0.113.8"}, Port: &port}
	for on := range b {
		b[on].Connections[0].Status.Value = value
	}
}

// A side that has not come so far is said to be waited for.
func TestWaits(t *testing.T) {
	for _, tt := range []struct {
		there   func(*Both)
		want    string
		refused bool
	}{
		{func(b *Both) { b[Remote].Pending = "Network liqo/pod-cidr" }, "Network liqo/pod-cidr of rome to have a network", false},
		{func(b *Both) { b[Local].Configurations[0].Generation = 2 }, "Configuration liqo-tenant-rome/rome in milan to be looked at by the controller of milan", false},
		{func(b *Both) {
			b[Local].Configurations[0].Status.Conditions[0] = metav1.Condition{Type: v1beta1.ConditionNetworkCIDRsConfigured, Status: metav1.ConditionFalse, Reason: "PoolsExhausted", Message: "add a pool"}
		}, "Configuration liqo-tenant-rome/rome in milan has no networks yet: add a pool", true},
		{func(b *Both) { b[Remote].Servers[0].Status.Endpoint = nil }, "GatewayServer liqo-tenant-milan/milan in rome to have an endpoint: no load balancer has given Service gw-milan an address", false},
		{func(b *Both) { b[Remote].PublicKey = nil }, "GatewayServer liqo-tenant-milan/milan in rome to have keys", false},
		{func(b *Both) { b[Remote].Starting = "Deployment gw-milan: 0 of 1 pods are new, 0 available" }, "the gateway of rome to run: Deployment gw-milan: 0 of 1 pods are new, 0 available", false},
		{func(b *Both) {
			b[Remote].Connections[0].Status = v1beta1.ConnectionStatus{Value: v1beta1.Connecting, Conditions: []metav1.Condition{{Type: v1beta1.ConditionConnected, Message: "nobody has dialled"}}}
		}, "the tunnel: Connection liqo-tenant-milan/gw-milan in rome is Connecting: nobody has dialled", false},
	} {
		b := two()
		b.done(t, Connect, defaults())
		tt.there(b)
		s := connect(b, Connect, defaults())
		assert.Assert(t, is.Len(s.Waits, 1), tt.want)
		assert.Equal(t, s.Waits[0].Text, tt.want)
		assert.Equal(t, s.Waits[0].Refused, tt.refused)
		assert.Equal(t, len(s.Changes)+len(s.Problems), 0)
	}
}

func TestRemove(t *testing.T) {
	names := func(b *Both, s Step) string {
		var out []string
		for _, c := range s.Changes {
			out = append(out, fmt.Sprintf("%s %s", c.Deed, b.ref(c.On, c.Object)))
		}
		for _, w := range s.Waits {
			out = append(out, "waits for "+w.Text)
		}
		return strings.Join(out, "\n")
	}
	b := two()
	b.done(t, Connect, defaults())
	assert.Equal(t, names(b, remove(b, Disconnect, defaults())), `deleted GatewayClient liqo-tenant-rome/rome in milan
deleted GatewayServer liqo-tenant-milan/milan in rome
deleted PublicKey liqo-tenant-rome/rome in milan
deleted PublicKey liqo-tenant-milan/milan in rome`)
	b[Local].Clients, b[Remote].Servers, b[Local].Keys, b[Remote].Keys = nil, nil, nil, nil
	b[Local].Made = []string{"Connection gw-rome"}
	assert.Equal(t, names(b, remove(b, Reset, defaults())), "waits for the controller of milan to take back Connection gw-rome in namespace liqo-tenant-rome")
	b[Local].Made = nil
	assert.Equal(t, names(b, remove(b, Disconnect, defaults())), "")
	assert.Equal(t, names(b, remove(b, Reset, defaults())), "deleted Configuration liqo-tenant-rome/rome in milan\ndeleted Configuration liqo-tenant-milan/milan in rome")
	b[Local].Configurations, b[Remote].Configurations = nil, nil
	b[Remote].Namespace.Labels = nil // somebody's own, given by --remote-namespace
	s := remove(b, Reset, defaults())
	assert.Equal(t, names(b, s), "deleted Namespace liqo-tenant-rome in milan")
	assert.Assert(t, s.Changes[0].Emptied)
	assert.DeepEqual(t, s.Notes, []string{"Namespace liqo-tenant-milan in rome stays: it is no tenant namespace, for it lacks the labels liqo.io/tenant-namespace=true and liqo.io/remote-cluster-id=milan"})
	b[Local].Namespace = corev1.Namespace{}
	assert.Equal(t, names(b, remove(b, Reset, defaults())), "")
}

func TestBelongs(t *testing.T) {
	owned := []metav1.OwnerReference{{}}
	for _, tt := range []struct {
		kind string
		meta metav1.ObjectMeta
		want bool
	}{
		{"ConfigMap", metav1.ObjectMeta{Name: "kube-root-ca.crt"}, true},
		{"ConfigMap", metav1.ObjectMeta{Name: "mine"}, false},
		{"ServiceAccount", metav1.ObjectMeta{Name: "default"}, true},
		{"ServiceAccount", metav1.ObjectMeta{Name: "mine"}, false},
		{"Pod", metav1.ObjectMeta{Name: "gw", OwnerReferences: owned}, true},
		{"Pod", metav1.ObjectMeta{Name: "mine"}, false},
		{"Secret", metav1.ObjectMeta{Name: "gw", Labels: map[string]string{v1beta1.LabelGatewayResource: "true"}}, true},
		{"RoleBinding", metav1.ObjectMeta{Name: "gw", Labels: map[string]string{v1beta1.LabelManagedBy: v1beta1.ManagedBy}}, true},
		{"Secret", metav1.ObjectMeta{Name: "mine", Labels: map[string]string{v1beta1.LabelManagedBy: "Helm"}}, false},
	} {
		assert.Equal(t, belongs(tt.kind, &tt.meta), tt.want, "%s %s", tt.kind, tt.meta.Name)
	}
}

func TestCheckOptions(t *testing.T) {
	for flag, change := range map[string]func(*Options){
		FlagServiceType:    func(o *Options) { o.ServiceType = "ExternalName" },
		FlagServicePort:    func(o *Options) { o.Port = 0 },
		FlagNodePort:       func(o *Options) { o.NodePort, o.ServiceType = 30000, corev1.ServiceTypeClusterIP },
		FlagLoadBalancerIP: func(o *Options) { o.LoadBalancerIP, o.ServiceType = "203.0.113.1", corev1.ServiceTypeNodePort },
		FlagClientPort:     func(o *Options) { o.DialPort = 70000 },
		FlagMTU:            func(o *Options) { o.MTU = 100 },
	} {
		o := defaults()
		assert.Equal(t, len(o.Check()), 0)
		change(o)
		problems := o.Check()
		assert.Assert(t, is.Len(problems, 1), flag)
		assert.Equal(t, problems[0].Object, "--"+flag)
	}
}
