package apitest

import (
	"slices"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"

	"github.com/isthmus-net/isthmus/lab/internal/scenario"
)

// What clusters say of their networks, as those who set them up write it.
const (
	kubeadmConfig = `
apiVersion: v1
kind: ConfigMap
metadata: {namespace: kube-system, name: kubeadm-config}
data:
  ClusterConfiguration: |
    apiServer: {}
    apiVersion: kubeadm.k8s.io/v1beta4
    caCertificateValidityPeriod: 87600h0m0s
    certificatesDir: /etc/kubernetes/pki
    clusterName: kubernetes
    kind: ClusterConfiguration
    kubernetesVersion: v1.36.3
    networking:
      dnsDomain: cluster.local
      podSubnet: 10.244.0.0/16
      serviceSubnet: 10.110.0.0/16
    proxy: {}
    scheduler: {}
`
	controllerManager = `
apiVersion: v1
kind: Pod
metadata: {namespace: kube-system, name: kube-controller-manager-cp-1, labels: {component: kube-controller-manager, tier: control-plane}}
spec:
  automountServiceAccountToken: false
  containers:
    - name: kube-controller-manager
      image: registry.k8s.io/kube-controller-manager:v1.36.3
      command: [kube-controller-manager, --allocate-node-cidrs=true, --cluster-cidr=10.201.0.0/16, --leader-elect=true]
`
	flannelConfig = `
apiVersion: v1
kind: ConfigMap
metadata: {namespace: kube-flannel, name: kube-flannel-cfg, labels: {app: flannel, k8s-app: flannel, tier: node}}
data:
  cni-conf.json: |
    {"name": "cbr0", "cniVersion": "0.3.1", "plugins": []}
  net-conf.json: |
    {
      "Network": "10.202.0.0/16",
      "EnableNFTables": false,
      "Backend": {
        "Type": "vxlan"
      }
    }
`
	flannelTwoFamilies = `
apiVersion: v1
kind: ConfigMap
metadata: {namespace: kube-system, name: kube-flannel-cfg}
data:
  net-conf.json: |
    {"Network": "10.203.0.0/16", "EnableIPv6": true, "IPv6Network": "fd00:203::/64", "Backend": {"Type": "vxlan"}}
`
	ciliumConfig = `
apiVersion: v1
kind: ConfigMap
metadata: {namespace: kube-system, name: cilium-config}
data: {ipam: cluster-pool, cluster-pool-ipv4-cidr: 10.204.0.0/16, cluster-pool-ipv4-mask-size: "24"}
`
)

// finds installs nothing: it prints what would be installed where the cluster
// says this or that of its networks.
func (o *operator) finds() {
	const namespace = `{apiVersion: v1, kind: Namespace, metadata: {name: kube-flannel, labels: {k8s-app: flannel, pod-security.kubernetes.io/enforce: privileged}}}`
	o.kubectl(namespace, "apply", "--server-side", "-f", "-")
	defer o.kubectl(namespace, "delete", "-f", "-")
	without := func(text, field string) string { return strings.ReplaceAll(text, field, "") }
	for _, tc := range []struct {
		name  string
		given string // in the API
		args  []string
		pods  []string // CIDRs that are found
		fails string   // instead
	}{
		{name: "kubeadm", given: kubeadmConfig, pods: []string{"10.244.0.0/16"}},
		{name: "kubeadm with two families", given: strings.ReplaceAll(kubeadmConfig, "10.244.0.0/16", "10.244.0.0/16,fd00:244::/56"), pods: []string{"10.244.0.0/16", "fd00:244::/56"}},
		{name: "kubeadm comes first", given: kubeadmConfig + "---" + flannelConfig, pods: []string{"10.244.0.0/16"}},
		{name: "kubeadm was told nothing", given: without(kubeadmConfig, "podSubnet: 10.244.0.0/16") + "---" + flannelConfig, pods: []string{"10.202.0.0/16"}},
		{name: "the flags of kube-controller-manager", given: controllerManager, pods: []string{"10.201.0.0/16"}},
		{name: "flannel", given: flannelConfig, pods: []string{"10.202.0.0/16"}},
		{name: "flannel with two families, of an old manifest", given: flannelTwoFamilies, pods: []string{"10.203.0.0/16", "fd00:203::/64"}},
		{name: "flannel with another key", given: strings.ReplaceAll(flannelConfig, "net-conf.json", "net-conf"), fails: "ipam.podCIDRs: the networks of the pods are not given, and were not found"},
		{name: "Cilium", given: ciliumConfig, pods: []string{"10.204.0.0/16"}},
		{name: "what is given counts", given: flannelConfig, args: []string{"--set", "ipam.podCIDRs={10.9.0.0/16}"}, pods: []string{"10.9.0.0/16"}},
		{name: "nobody says", fails: "set ipam.podCIDRs, for example ipam.podCIDRs={10.244.0.0/16}"},
	} {
		o.t.Run(tc.name, func(t *testing.T) {
			o := &operator{t, o.cp, o.kubernetes, o.isthmusctl, o.isthmus, o.kubeconfig, o.client}
			if tc.given != "" {
				o.kubectl(tc.given, "apply", "--server-side", "-f", "-")
				defer o.kubectl(tc.given, "delete", "-f", "-")
			}
			args := append([]string{"install", "--set", "discovery.config.clusterID=milan"}, tc.args...)
			if tc.fails != "" {
				_, errs, err := o.try(args...)
				assert.Assert(t, err != nil, "it was installed")
				assert.Assert(t, is.Contains(errs, tc.fails))
				return
			}
			found := map[string][]string{}
			objects, err := scenario.ParseObjects(o.run(append(args, "--output", "yaml", "--crds", "skip")...))
			assert.NilError(t, err)
			for _, obj := range objects {
				if obj.GetKind() == "Network" {
					typ := obj.GetLabels()["ipam.liqo.io/network-type"]
					found[typ] = append(found[typ], obj.Object["spec"].(map[string]any)["cidr"].(string))
				}
			}
			slices.Sort(found["pod-cidr"])
			assert.DeepEqual(t, found["pod-cidr"], tc.pods)
			// The API server's own answer, whatever kubeadm says.
			assert.DeepEqual(t, found["service-cidr"], []string{"10.96.0.0/16"})
		})
	}
}
