package kubeconfig

import (
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp/cmpopts"
	"gotest.tools/v3/assert"
	"gotest.tools/v3/poll"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	ipamv1alpha1 "github.com/isthmus-net/isthmus/appliance/api/ipam/v1alpha1"
	netv1beta1 "github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/nettest"
	"github.com/isthmus-net/isthmus/lab/internal/controlplane"
	"github.com/isthmus-net/isthmus/lab/internal/controlplane/controlplanetest"
	"github.com/isthmus-net/isthmus/lab/internal/deploy"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// TestRead: a cluster says itself what it is, and what it lacks.
func TestRead(t *testing.T) {
	ctx := t.Context()
	files, err := filepath.Glob("../../../k8s/crds/*.yaml")
	assert.NilError(t, err)
	var crds [][]byte
	for _, f := range files {
		b, err := os.ReadFile(f)
		assert.NilError(t, err)
		crds = append(crds, b)
	}
	cp, err := controlplane.Start(ctx, controlplane.Config{
		Name: "far", Dir: t.TempDir(), Binary: nettest.Built(t, "kubernetes"), Address: netip.MustParseAddr("127.0.0.1"), Ports: controlplanetest.FreePorts(t),
		ServiceCIDR: netip.MustParsePrefix("10.96.0.0/16"), PodCIDR: netip.MustParsePrefix("10.20.0.0/16"), CRDs: crds,
	})
	assert.NilError(t, err)
	t.Cleanup(func() { assert.Check(t, cp.Close()) })
	text, err := cp.Kubeconfig("admin")
	assert.NilError(t, err)
	file := filepath.Join(t.TempDir(), "far.yaml")
	assert.NilError(t, os.WriteFile(file, text, 0o600))
	cl, err := client.New(cp.RESTConfig(), client.Options{Scheme: deploy.Scheme()})
	assert.NilError(t, err)
	create := func(o client.Object, status func()) {
		t.Helper()
		assert.NilError(t, cl.Create(ctx, o))
		if status != nil {
			status()
			assert.NilError(t, cl.Status().Update(ctx, o))
		}
	}
	read := func(names ...string) ([]Cluster, error) {
		var all []Access
		for _, n := range names {
			all = append(all, Access{Name: n, File: file})
		}
		return Read(ctx, all)
	}

	_, err = read("milan")
	assert.ErrorContains(t, err, "--kubeconfig milan="+file+": Isthmus is not installed in this cluster: it has no ConfigMap")

	create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: deploy.Namespace}}, nil)
	create(&corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: deploy.Namespace, Name: "id", Labels: map[string]string{netv1beta1.LabelAppName: netv1beta1.ClusterIDConfigMap}},
		Data:       map[string]string{netv1beta1.ClusterIDKey: "eu-1"},
	}, nil)
	_, err = read("milan")
	assert.ErrorContains(t, err, "has an address range in its status: is the controller running")

	for kind, cidr := range map[string]string{
		netv1beta1.NetworkTypePod: "10.20.0.0/16", netv1beta1.NetworkTypeService: "10.96.0.0/16",
		netv1beta1.NetworkTypeExternal: "10.70.0.0/16", netv1beta1.NetworkTypeInternal: "10.80.0.0/16", netv1beta1.NetworkTypeReserved: "10.99.0.0/16",
	} {
		n := &ipamv1alpha1.Network{ObjectMeta: metav1.ObjectMeta{Namespace: deploy.Namespace, Name: kind, Labels: map[string]string{netv1beta1.LabelNetworkType: kind}}}
		n.Spec.CIDR = netv1beta1.CIDR(cidr)
		create(n, func() { n.Status.CIDR = netv1beta1.CIDR(cidr) })
	}
	_, err = read("milan")
	assert.ErrorContains(t, err, "no node is ready for pods")

	node := func(name, addr string, ready corev1.ConditionStatus, taints ...corev1.Taint) {
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{corev1.LabelHostname: name + ".local"}}, Spec: corev1.NodeSpec{Taints: taints}}
		create(n, nil)
		n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeHostName, Address: name}, {Type: corev1.NodeInternalIP, Address: addr}}
		n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: ready, LastHeartbeatTime: metav1.Now()}}
		patch := client.MergeFrom(&corev1.Node{ObjectMeta: n.ObjectMeta})
		assert.NilError(t, cl.Status().Patch(ctx, n, patch))
	}
	node("worker-b", "172.18.0.3", corev1.ConditionTrue)
	node("worker-a", "172.18.0.2", corev1.ConditionTrue)
	node("control-plane", "172.18.0.4", corev1.ConditionTrue, corev1.Taint{Key: "node-role.kubernetes.io/control-plane", Effect: corev1.TaintEffectNoSchedule})
	node("broken", "172.18.0.5", corev1.ConditionFalse)
	peer := &netv1beta1.Configuration{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "us-1", Labels: map[string]string{netv1beta1.LabelRemoteClusterID: "us-1"}}}
	peer.Spec.Remote.CIDR = netv1beta1.ClusterConfigCIDR{Pod: []netv1beta1.CIDR{"10.1.0.0/16"}, External: []netv1beta1.CIDR{"10.71.0.0/16"}}
	create(peer, nil)
	in := &netv1beta1.InternalNode{ObjectMeta: metav1.ObjectMeta{Name: "worker-a"}}
	in.Spec.Interface.Gateway.Name, in.Spec.Interface.Node.IP = "gw", "10.80.0.9"
	create(in, func() { in.Status.VTEP = &netv1beta1.VTEP{IP: "172.18.0.2", MAC: "02:00:00:00:00:01"} })

	fabric := &netv1beta1.InternalFabric{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "us-1", Labels: map[string]string{netv1beta1.LabelRemoteClusterID: "us-1"}}}
	fabric.Spec.Interface.Node.Name, fabric.Spec.GatewayNode = "gw", "control-plane"
	fabric.Spec.GatewayIP, fabric.Spec.Interface.Gateway.IP = "10.20.0.9", "10.80.0.10"
	create(fabric, nil)

	var got []Cluster
	poll.WaitOn(t, func(poll.LogT) poll.Result { // the controller-manager takes its taints from nodes that are ready
		if got, err = read("milan"); err != nil || len(got[0].Spec.Nodes) < 2 {
			return poll.Continue("%v", err)
		}
		return poll.Success()
	}, poll.WithTimeout(time.Minute))
	c := got[0]
	assert.Equal(t, c.Spec.Name+" "+c.Spec.ID, "milan eu-1")
	assert.Equal(t, c.Spec.PodCIDR.String()+" "+c.Spec.InternalCIDR.String(), "10.20.0.0/16 10.80.0.0/16")
	assert.DeepEqual(t, c.Spec.Nodes, []world.NodeSpec{
		{Name: "node-1", Object: "worker-a", Addr: netip.MustParseAddr("172.18.0.2")}, {Name: "node-2", Object: "worker-b", Addr: netip.MustParseAddr("172.18.0.3")},
	}, compareAddrs)
	assert.Equal(t, c.Overlay, netv1beta1.OverlayVXLAN)
	assert.DeepEqual(t, c.Peers, []string{"us-1"})
	assert.DeepEqual(t, c.Gateways, map[string]string{"us-1": "control-plane"})

	_, err = read("milan", "rome")
	assert.ErrorContains(t, err, "both clusters have the ID eu-1: are they one?")
	_, err = read("milan", "milan")
	assert.ErrorContains(t, err, "milan is given twice")

	// The lab's pods are named for what scenarios call the nodes.
	s := parse(t, "two-clusters", "steps: [ { name: that, expect: { reach: { from: milan/web, to: rome/web } } } ]")
	l := newLab(Spec{Name: "run-1", Topology: s.Topology, Clusters: got, Image: "registry.example.com/probe:1"})
	var names []string
	for _, p := range append(l.labPods("milan"), l.hostPodOf(c, 2)) {
		assert.NilError(t, cl.Create(ctx, p))
		pod := &corev1.Pod{}
		assert.NilError(t, cl.Get(ctx, client.ObjectKeyFromObject(p), pod))
		names = append(names, pod.Name+" on "+pod.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms[0].MatchFields[0].Values[0])
		assert.Equal(t, pod.Labels[deploy.ProbeLabel]+pod.Labels["app"], "run-1")
		assert.Check(t, pod.Spec.ActiveDeadlineSeconds != nil)
		assert.Equal(t, pod.Spec.Containers[0].Image, "registry.example.com/probe:1")
	}
	assert.DeepEqual(t, names, []string{
		"web on worker-a", "probe on worker-b", "hostprobe on worker-a", "isthmus-lab-node-2 on worker-b",
	})
}

var compareAddrs = cmpopts.EquateComparable(netip.Addr{})
