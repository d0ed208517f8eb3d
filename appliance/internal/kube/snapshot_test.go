package kube_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v1beta1 "github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/internal/kube"
)

func names[T any](list []T, name func(T) cluster.Meta) string {
	var out []string
	for _, v := range list {
		out = append(out, name(v).Name)
	}
	return strings.Join(out, " ")
}

func TestPodsThatMatter(t *testing.T) {
	node := func(name string, cidrs ...string) corev1.Node {
		return corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.NodeSpec{PodCIDRs: cidrs}}
	}
	virtual := node("virtual", "10.9.0.0/24")
	virtual.Labels = map[string]string{v1beta1.LabelNodeType: "virtual-node"}
	windows, linux := node("windows", "10.8.0.0/24"), node("node-1", "10.1.1.0/24")
	windows.Labels, linux.Labels = map[string]string{corev1.LabelOSStable: "windows"}, map[string]string{corev1.LabelOSStable: "linux"}
	pod := func(name, node, ip string, change ...func(*corev1.Pod)) corev1.Pod {
		p := corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
			Spec:       corev1.PodSpec{NodeName: node},
			Status:     corev1.PodStatus{Phase: corev1.PodRunning, PodIP: ip},
		}
		if ip != "" {
			p.Status.PodIPs = []corev1.PodIP{{IP: ip}}
		}
		for _, c := range change {
			c(&p)
		}
		return p
	}
	gateway := func(p *corev1.Pod) {
		p.Labels = map[string]string{v1beta1.LabelComponent: v1beta1.ComponentGateway, v1beta1.LabelActive: "true"}
	}
	o := kube.Objects{
		Namespace: "liqo",
		Nodes:     []corev1.Node{node("node-2", "10.1.2.0/24", "fd00:2::/64"), linux, node("bare"), virtual, windows},
		Pods: []corev1.Pod{
			pod("inside", "node-1", "10.1.1.5"),
			pod("outside", "node-1", "10.1.2.5"),
			pod("dual", "node-2", "10.1.2.5", func(p *corev1.Pod) { p.Status.PodIPs = append(p.Status.PodIPs, corev1.PodIP{IP: "fd00:2::5"}) }),
			pod("dual-outside", "node-2", "10.1.2.6", func(p *corev1.Pod) { p.Status.PodIPs = append(p.Status.PodIPs, corev1.PodIP{IP: "fd00:3::5"}) }),
			pod("on-bare", "bare", "10.1.7.5"),
			pod("host", "node-1", "172.18.1.11", func(p *corev1.Pod) { p.Spec.HostNetwork = true }),
			pod("over", "node-1", "10.1.2.7", func(p *corev1.Pod) { p.Status.Phase = corev1.PodSucceeded }),
			pod("shadow", "virtual", "10.1.2.8"), pod("window", "windows", "10.1.2.9"),
			pod("unscheduled", "", ""),
			pod("gw", "node-1", "10.1.1.9", gateway),
			pod("gw-pending", "", "", gateway, func(p *corev1.Pod) { p.Status.Phase = corev1.PodPending }),
			pod("nowhere", "node-9", "10.1.2.10"),
			pod("daemon", "node-1", "172.18.1.11", func(p *corev1.Pod) {
				p.Spec.HostNetwork, p.Namespace, p.Labels = true, "liqo", map[string]string{v1beta1.LabelAppName: v1beta1.NodeDaemonName}
			}),
		},
	}
	s := kube.Snapshot(o)
	for i := range o.Pods {
		var on *corev1.Node
		for j := range o.Nodes {
			if o.Nodes[j].Name == o.Pods[i].Spec.NodeName {
				on = &o.Nodes[j]
			}
		}
		matters := slices.ContainsFunc(slices.Concat(s.Pods, s.NodeDaemons), func(p cluster.Pod) bool { return p.Name == o.Pods[i].Name })
		assert.Equal(t, kube.PodMatters(&o.Pods[i], on, "liqo"), matters, o.Pods[i].Name)
	}
	var nodes []string
	for _, n := range s.Nodes {
		nodes = append(nodes, n.Name)
	}
	slices.Sort(nodes)
	assert.DeepEqual(t, nodes, []string{"bare", "node-1", "node-2"})
	assert.Equal(t, names(s.Nodes, func(n cluster.Node) cluster.Meta { return n.Meta }), "bare node-1 node-2")
	assert.Equal(t, names(s.Pods, func(p cluster.Pod) cluster.Meta { return p.Meta }), "dual-outside gw gw-pending on-bare outside")
}

func TestSecretsKeepTheirPrivateKey(t *testing.T) {
	s := kube.Snapshot(kube.Objects{Secrets: []corev1.Secret{
		{
			ObjectMeta: metav1.ObjectMeta{Namespace: "t", Name: "gw-rome", Labels: map[string]string{v1beta1.LabelGatewayResource: "true"}},
			Data:       map[string][]byte{"privateKey": []byte("hush-hush"), "publicKey": []byte("loud")},
		},
		{ObjectMeta: metav1.ObjectMeta{Namespace: "t", Name: "other"}, Data: map[string][]byte{"privateKey": []byte("hush-hush")}},
	}})
	assert.Equal(t, len(s.Secrets), 1)
	assert.Equal(t, string(s.Secrets[0].PublicKey), "loud")
	assert.Assert(t, s.Secrets[0].HasPrivate)
	text := fmt.Sprintf("%+v", s)
	assert.Assert(t, !strings.Contains(text, "hush") && !strings.Contains(text, fmt.Sprint([]byte("hush"))[1:10]))
}

func TestServices(t *testing.T) {
	service, invalid := kube.Service(&corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "t", Name: "gw-rome"},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeLoadBalancer, ClusterIPs: []string{"10.2.0.9", "fd02::9"},
			Ports: []corev1.ServicePort{{Protocol: corev1.ProtocolUDP, Port: 51840, NodePort: 30840}},
		},
		Status: corev1.ServiceStatus{LoadBalancer: corev1.LoadBalancerStatus{Ingress: []corev1.LoadBalancerIngress{
			{Hostname: "lb.example.org"}, {IP: "203.0.113.7"},
		}}},
	})
	assert.Equal(t, len(invalid), 0)
	assert.DeepEqual(t, service.Ingress, []string{"203.0.113.7", "lb.example.org"})
	assert.Equal(t, service.ClusterIPs[1].String(), "fd02::9")
	assert.Equal(t, service.Ports[0], cluster.ServicePort{Protocol: "UDP", Port: 51840, NodePort: 30840})

	headless, _ := kube.Service(&corev1.Service{Spec: corev1.ServiceSpec{ClusterIPs: []string{"None"}}})
	assert.Equal(t, len(headless.ClusterIPs), 0)
}

func TestDeployments(t *testing.T) {
	mount := func(name string) corev1.Volume {
		return corev1.Volume{Name: name, VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: name}}}
	}
	o := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{OwnerReferences: []metav1.OwnerReference{
		{Kind: "Other", UID: "somebody"}, {Kind: "GatewayServer", UID: "rome", Controller: new(true)},
	}}}
	o.Spec.Template.Spec.Volumes = []corev1.Volume{{Name: "tmp"}, mount("keys"), mount("tls")}
	d, invalid := kube.Deployment(o)
	assert.Equal(t, len(invalid), 0)
	assert.Equal(t, d.Owner, "rome")
	assert.DeepEqual(t, d.Secrets, []string{"keys", "tls"})
	assert.Equal(t, d.Replicas, int32(1)) // the API's default

	d, _ = kube.Deployment(&appsv1.Deployment{Spec: appsv1.DeploymentSpec{Replicas: new(int32(2))}})
	assert.Equal(t, d.Owner, "")
	assert.Equal(t, d.Replicas, int32(2))
}

func TestInvalidAndNotes(t *testing.T) {
	s := kube.Snapshot(kube.Objects{Configurations: []v1beta1.Configuration{{
		ObjectMeta: metav1.ObjectMeta{Namespace: "liqo-tenant-rome", Name: "rome"},
		Spec:       v1beta1.ConfigurationSpec{Remote: v1beta1.ClusterConfig{CIDR: v1beta1.ClusterConfigCIDR{Pod: []v1beta1.CIDR{"10.0.0.7/16", "x"}}}},
	}}})
	assert.Equal(t, len(s.Configurations), 1)
	assert.Equal(t, len(s.Configurations[0].Remote.Pod), 1)
	assert.Equal(t, s.Configurations[0].Remote.Pod[0].String(), "10.0.0.0/16")
	assert.Equal(t, s.Notes[0].Error(), `Configuration liqo-tenant-rome/rome: spec.remote.cidr.pod[0]: "10.0.0.7/16" has host bits; it is read as 10.0.0.0/16`)
	assert.Equal(t, s.Invalid[0].Error(), `Configuration liqo-tenant-rome/rome: spec.remote.cidr.pod[1]: "x" is not a CIDR; write one such as 10.0.0.0/16 or fd00::/64`)
}

func TestConfigured(t *testing.T) {
	for _, tt := range []struct {
		name       string
		status     metav1.ConditionStatus
		generation int64
		want       bool
	}{
		{"true", metav1.ConditionTrue, 2, true},
		{"of an older generation", metav1.ConditionTrue, 1, false},
		{"false", metav1.ConditionFalse, 2, false},
	} {
		c, _ := kube.Configuration(&v1beta1.Configuration{
			ObjectMeta: metav1.ObjectMeta{Generation: 2},
			Status: v1beta1.ConfigurationStatus{Conditions: []metav1.Condition{{
				Type: v1beta1.ConditionNetworkCIDRsConfigured, Status: tt.status, ObservedGeneration: tt.generation,
			}}},
		})
		assert.Equal(t, c.Configured, tt.want, tt.name)
	}
}
