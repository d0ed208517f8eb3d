package peers

import (
	"testing"

	"gotest.tools/v3/assert"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	corev1beta1 "github.com/isthmus-net/isthmus/appliance/api/core/v1beta1"
	netv1alpha1 "github.com/isthmus-net/isthmus/appliance/api/net/v1alpha1"
	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
)

// about is the metadata of an object about a peer, written by the managers, and
// given a finalizer by the controller.
func about(id string, managers ...string) metav1.ObjectMeta {
	m := metav1.ObjectMeta{Namespace: "liqo-tenant-" + id, Name: id, Labels: map[string]string{v1beta1.LabelRemoteClusterID: id}}
	for _, by := range append(managers, controller) {
		m.ManagedFields = append(m.ManagedFields, metav1.ManagedFieldsEntry{Manager: by})
	}
	m.ManagedFields = append(m.ManagedFields, metav1.ManagedFieldsEntry{Manager: "somebody", Subresource: "status"},
		metav1.ManagedFieldsEntry{Manager: "who-blocks", FieldsV1: metav1.NewFieldsV1(`{"f:metadata":{"f:annotations":{".":{},"f:networking.liqo.io/blocked":{}}}}`)})
	if len(managers) > 0 {
		m.ManagedFields[0].FieldsV1 = metav1.NewFieldsV1(`{"f:metadata":{"f:labels":{}},"f:spec":{}}`)
	}
	return m
}

func configuration(id string, here *v1beta1.ClusterConfig, conditions []metav1.Condition, managers ...string) v1beta1.Configuration {
	c := v1beta1.Configuration{ObjectMeta: about(id, managers...)}
	c.Spec.Remote.CIDR = v1beta1.ClusterConfigCIDR{Pod: []v1beta1.CIDR{"10.0.0.0/16"}, External: []v1beta1.CIDR{"10.70.0.0/16"}}
	c.Status.Remote, c.Status.Conditions = here, conditions
	return c
}

// foreign is a ForeignCluster with these conditions of its networking module.
func foreign(id string, conditions ...corev1beta1.Condition) corev1beta1.ForeignCluster {
	fc := corev1beta1.ForeignCluster{ObjectMeta: metav1.ObjectMeta{Name: id}}
	fc.Spec.ClusterID = corev1beta1.ClusterID(id)
	fc.Status.Modules.Networking = &corev1beta1.Module{Enabled: true, Conditions: conditions}
	return fc
}

func condition(reason string, status corev1beta1.ConditionStatusType, message string) corev1beta1.Condition {
	return corev1beta1.Condition{Type: corev1beta1.NetworkConnectionStatus, Status: status, Reason: reason, Message: message}
}

func TestList(t *testing.T) {
	port, remapped := int32(31840), &v1beta1.ClusterConfig{CIDR: v1beta1.ClusterConfigCIDR{Pod: []v1beta1.CIDR{"10.1.0.0/16"}, External: []v1beta1.CIDR{"10.70.0.0/16"}}}
	server := v1beta1.GatewayServer{ObjectMeta: about("rome", "kubectl-create")}
	server.Status.Endpoint = &v1beta1.EndpointStatus{Addresses: []string{"192.0.2.1", "192.0.2.2"}, Port: &port}
	dials := v1beta1.GatewayClient{ObjectMeta: about("paris", "argocd-controller")}
	dials.Spec.Endpoint = v1beta1.EndpointStatus{Addresses: []string{"vpn.example.com"}, Ports: []int32{51840, 51841}}
	dials.Status.Conditions = []metav1.Condition{{Type: "TemplateFound", Status: metav1.ConditionFalse, Message: "there is no template x"}}
	connection := v1beta1.Connection{ObjectMeta: about("rome")}
	connection.Status.Value, connection.Status.Latency.Value = v1beta1.Connected, "12ms"
	connection.Status.Peer = &v1beta1.ConnectionPeer{Version: "v0.4.0"}
	connection.Status.Conditions = []metav1.Condition{
		{Type: v1beta1.ConditionNetworksMatch, Status: metav1.ConditionFalse, Message: "its pod networks are 10.9.0.0/16"},
		{Type: v1beta1.ConditionPeerTells, Status: metav1.ConditionFalse, Message: "of another system"},
	}
	late := v1beta1.Connection{ObjectMeta: about("paris")}
	late.Status.Value, late.Status.Latency.Value = v1beta1.Connecting, "N/A"
	old := netv1alpha1.TunnelEndpoint{ObjectMeta: metav1.ObjectMeta{Name: "old", ManagedFields: []metav1.ManagedFieldsEntry{{Manager: "helm"}}}}
	old.Spec.ClusterIdentity = &netv1alpha1.ClusterIdentity{ClusterID: "oslo"}
	off := foreign("quito")
	off.Status.Modules.Networking.Enabled = false

	got := List(Objects{
		Configurations: []v1beta1.Configuration{
			configuration("rome", remapped, nil, "liqoctl", "kubectl-edit"),
			configuration("paris", nil, []metav1.Condition{{Type: v1beta1.ConditionNetworkCIDRsConfigured, Status: metav1.ConditionFalse, Message: "10.0.0.0/16 is too large"}}, "argocd-controller"),
			configuration("lima", remapped, nil, "kubectl-create"),
		},
		GatewayServers: []v1beta1.GatewayServer{server}, GatewayClients: []v1beta1.GatewayClient{dials},
		Connections: []v1beta1.Connection{connection, late}, TunnelEndpoints: []netv1alpha1.TunnelEndpoint{old},
		ForeignClusters: []corev1beta1.ForeignCluster{
			foreign("rome", condition("ConfigurationReady", corev1beta1.ConditionStatusReady, "well"), condition("ConnectionEstablished", corev1beta1.ConditionStatusEstablished, "well")),
			foreign("paris", condition("ConfigurationNotReady", corev1beta1.ConditionStatusNotReady, "see the condition"), condition("ConnectionPending", corev1beta1.ConditionStatusPending, "Connection x is Connecting")),
			foreign("lima", condition("GatewayMissing", corev1beta1.ConditionStatusNotReady, "there is no usable gateway"), condition("ConnectionMissing", corev1beta1.ConditionStatusNotReady, "there is no gateway")),
			foreign("oslo"), off,
		},
	})
	pods, external := Network{Kind: "pod", CIDR: "10.0.0.0/16"}, Network{Kind: "external", CIDR: "10.70.0.0/16"}
	podsHere, externalHere := pods, external
	podsHere.Here, externalHere.Here = "10.1.0.0/16", "10.70.0.0/16"
	assert.DeepEqual(t, got, []Peer{
		{ID: "lima", Networks: []Network{podsHere, externalHere}, MadeBy: []string{"kubectl-create"}, Missing: []string{"there is no usable gateway"}},
		{ID: "oslo", MadeBy: []string{"helm"}},
		{
			ID: "paris", Role: Client, Connection: "Connecting", Endpoint: "vpn.example.com port 51840, 51841", Networks: []Network{pods, external}, MadeBy: []string{"argocd-controller"},
			Missing: []string{
				"Configuration liqo-tenant-paris/paris: 10.0.0.0/16 is too large", "GatewayClient liqo-tenant-paris/paris: there is no template x", "Connection x is Connecting",
			},
		},
		{
			ID: "rome", Role: Server, Connection: "Connected", RTT: "12ms", Version: "v0.4.0", Endpoint: "192.0.2.1, 192.0.2.2 port 31840", Networks: []Network{podsHere, externalHere},
			MadeBy: []string{"kubectl-create", "kubectl-edit", "liqoctl"}, Missing: []string{"Connection liqo-tenant-rome/rome: its pod networks are 10.9.0.0/16"},
		},
	})
	assert.Equal(t, podsHere.String()+"; "+externalHere.String()+"; "+pods.String(), "10.0.0.0/16 as 10.1.0.0/16; 10.70.0.0/16; 10.0.0.0/16")
}

// TestNobodyListens: objects without a controller that looks at them.
func TestNobodyListens(t *testing.T) {
	got := List(Objects{PublicKeys: []v1beta1.PublicKey{{ObjectMeta: about("rome", "kubectl-create")}}})
	assert.DeepEqual(t, got, []Peer{{
		ID: "rome", MadeBy: []string{"kubectl-create"},
		Missing: []string{"the controller has not made a ForeignCluster rome yet: does it run (kubectl get pods -n liqo)"},
	}})
	assert.Equal(t, len(List(Objects{})), 0)
	assert.Equal(t, endpoint(v1beta1.EndpointStatus{Protocol: new(corev1.ProtocolUDP)}), "")
}

// A peer all of whose keys are blocked is blocked.
func TestBlockedKey(t *testing.T) {
	key := func(reason string) v1beta1.PublicKey {
		k := v1beta1.PublicKey{ObjectMeta: about("rome")}
		k.Status.Conditions = []metav1.Condition{{Type: "Accepted", Reason: reason, Message: "its key is blocked by anna"}}
		return k
	}
	for _, tt := range []struct {
		keys []v1beta1.PublicKey
		want string
	}{
		{[]v1beta1.PublicKey{key("Accepted")}, ""},
		{[]v1beta1.PublicKey{key(v1beta1.ReasonBlocked)}, "its key is blocked by anna"},
		{[]v1beta1.PublicKey{key(v1beta1.ReasonBlocked), key("Accepted")}, ""},
	} {
		p := List(Objects{PublicKeys: tt.keys})[0]
		assert.Equal(t, p.Block, tt.want)
		assert.Equal(t, p.Blocked, tt.want != "")
	}
}

// What the peer has only told is listed behind what is written.
func TestFollowed(t *testing.T) {
	c := v1beta1.Configuration{ObjectMeta: about("rome", "kubectl-create")}
	c.Spec.Remote.CIDR.Pod = []v1beta1.CIDR{"10.0.0.0/16"}
	c.Status.Follow = &v1beta1.ConfigurationFollow{Networks: []v1beta1.FollowedNetwork{{Type: "pod", CIDR: "10.64.0.0/16"}}}
	assert.DeepEqual(t, List(Objects{Configurations: []v1beta1.Configuration{c}})[0].Networks,
		[]Network{{Kind: "pod", CIDR: "10.0.0.0/16"}, {Kind: "pod", CIDR: "10.64.0.0/16", Here: "10.64.0.0/16"}})
}
