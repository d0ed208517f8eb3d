package plan_test

import (
	"slices"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
	corev1 "k8s.io/api/core/v1"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
)

// withTUN adds the device to the template of clients.
func withTUN(w *world) {
	if !strings.Contains(string(get[*v1beta1.WgGatewayClientTemplate](w, "liqo", "wireguard-client").Spec.Template.Raw), "--implementation=") {
		w.change(`"--mode=client"`, `"--mode=client","--implementation=auto"`)
	}
	w.change(`"volumes":[`, `"volumes":[{"name":"tun","hostPath":{"path":"/dev/net/tun","type":"CharDevice"}},`)
	w.change(`"containers":[{`, `"containers":[{"volumeMounts":[{"name":"tun","mountPath":"/dev/net/tun"},{"name":"keys","mountPath":"/keys"}],`)
}

// reports does what node daemons do: they say whether their kernels have WireGuard.
func (w *world) reports(has map[string]bool) {
	w.t.Helper()
	for name, yes := range has {
		get[*v1beta1.InternalNode](w, "", name).Status.WireGuard = &yes
	}
}

// devices says which of the clients' pods have the device.
func (w *world) devices() string {
	w.t.Helper()
	var out []string
	for _, remote := range []string{"oslo", "paris", "rome"} {
		spec := clientDeployment(w, remote).Spec.Template.Spec
		has := slices.ContainsFunc(spec.Volumes, func(v corev1.Volume) bool { return v.HostPath != nil })
		assert.Check(w.t, slices.ContainsFunc(spec.Volumes, func(v corev1.Volume) bool { return v.Secret != nil }), "the keys of %s", remote)
		mounts := slices.ContainsFunc(spec.Containers[0].VolumeMounts, func(m corev1.VolumeMount) bool { return m.Name == "tun" })
		assert.Check(w.t, has == mounts, "%s", remote)
		if has {
			out = append(out, remote)
		}
	}
	return strings.Join(out, " ")
}

// TestTUN: gateways have no /dev/net/tun where every node that they may run on says
// that its kernel has WireGuard. What they have stays while nodes come and go, but
// for a node that says that it has none: then they get it, one after the other.
func TestTUN(t *testing.T) {
	both := map[string]bool{"node-1": true, "node-2": true}
	started := func(t *testing.T, reports map[string]bool) *world {
		w := connected(t)
		for _, node := range []string{"node-1", "node-2"} {
			get[*corev1.Node](w, "", node).Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
		}
		w.reports(reports)
		withTUN(w)
		for _, remote := range []string{"oslo", "paris", "rome"} { // a new template: each in its turn
			w.settle()
			w.replacePod(remote, "node-1")
			w.tunnel(remote, v1beta1.Connected)
		}
		w.settle()
		assert.Equal(t, w.rollouts(), "RolledOut RolledOut RolledOut")
		return w
	}
	const all = "oslo paris rome"

	t.Run("all have it", func(t *testing.T) {
		w := started(t, both)
		assert.Equal(t, w.devices(), "")
		w.node("node-3", "192.168.0.3", "10.10.3.0/24")
		w.settle()
		assert.Check(t, is.Equal(w.devices(), ""), "a node has joined and has not said yet what it has")
		w.reports(map[string]bool{"node-3": true})
		w.settle()
		assert.Check(t, is.Equal(w.devices(), ""))
		assert.Check(t, is.Equal(w.rollouts(), "RolledOut RolledOut RolledOut"))

		w.reports(map[string]bool{"node-3": false})
		w.settle()
		assert.Check(t, is.Equal(w.devices(), "oslo"), "one after the other")
		assert.Check(t, is.Equal(w.rollouts(), "WaitingForConnection WaitingForTurn WaitingForTurn"))
		for _, remote := range []string{"oslo", "paris", "rome"} {
			w.replacePod(remote, "node-1")
			w.tunnel(remote, v1beta1.Connected)
			w.settle()
		}
		assert.Check(t, is.Equal(w.devices(), all))

		w.reports(map[string]bool{"node-3": true}) // the module was loaded
		w.settle()
		assert.Check(t, is.Equal(w.devices(), all), "that alone is no reason to replace pods")
		oslo := get[*v1beta1.GatewayClient](w, "liqo-tenant-oslo", "oslo")
		oslo.Spec.Endpoint.Addresses = []string{"203.0.113.99"}
		oslo.Generation++
		w.settle()
		assert.Check(t, is.Equal(w.devices(), "paris rome"), "its pod is replaced anyway")
	})
	t.Run("one has not said", func(t *testing.T) {
		assert.Equal(t, started(t, map[string]bool{"node-1": true}).devices(), all)
	})
	t.Run("one that is not ready has not said", func(t *testing.T) {
		w := connected(t)
		w.reports(map[string]bool{"node-1": true})
		withTUN(w)
		w.settle()
		assert.Check(t, is.Equal(w.devices(), ""))
	})
	t.Run("one has none", func(t *testing.T) {
		assert.Equal(t, started(t, map[string]bool{"node-1": true, "node-2": false}).devices(), all)
	})
	t.Run("one that has none is not for gateways", func(t *testing.T) {
		w := connected(t)
		w.reports(map[string]bool{"node-1": true, "node-2": false})
		get[*corev1.Node](w, "", "node-1").Labels = map[string]string{"gateways": "here"}
		w.change(`"containers":[{`, `"nodeSelector":{"gateways":"here"},"containers":[{`)
		withTUN(w)
		w.settle()
		assert.Check(t, is.Equal(w.devices(), ""))
	})
	t.Run("somebody else needs it, too", func(t *testing.T) {
		w := connected(t)
		w.reports(both)
		withTUN(w)
		w.change(`"containers":[{`, `"initContainers":[{"name":"other","image":"isthmus:dev","volumeMounts":[{"name":"tun","mountPath":"/dev/net/tun"}]}],"containers":[{`)
		w.settle()
		assert.Check(t, is.Contains(w.devices(), "oslo"))
	})
	t.Run("userspace", func(t *testing.T) {
		w := connected(t)
		w.reports(both)
		w.change(`"--mode=client"`, `"--mode=client","--implementation=userspace"`)
		withTUN(w)
		w.settle()
		assert.Check(t, strings.HasPrefix(w.devices(), "oslo"), "%s", w.devices())
	})
}
