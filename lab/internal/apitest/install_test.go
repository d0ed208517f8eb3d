package apitest

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/appliance/nettest"
	"github.com/isthmus-net/isthmus/lab/internal/controlplane"
	"github.com/isthmus-net/isthmus/lab/internal/controlplane/controlplanetest"
	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
	"gotest.tools/v3/poll"
	"helm.sh/helm/v3/pkg/action"
	"helm.sh/helm/v3/pkg/chart/loader"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"
)

// An operator works on a control plane without nodes, with the programs that
// users have.
type operator struct {
	t          *testing.T
	cp         *controlplane.ControlPlane
	kubernetes string
	isthmusctl string
	isthmus    string
	kubeconfig string
	client     client.Client
}

// installArgs are values of which the cluster itself knows no more than the
// network of its Services.
var installArgs = []string{"--set", "discovery.config.clusterID=milan,ipam.podCIDRs={10.0.0.0/16}"}

// TestInstall installs by all three ways, compares what they made, and removes
// it; and tries what has to be refused.
func TestInstall(t *testing.T) {
	t.Parallel()
	nettest.Slow(t, "starts a control plane")
	o := &operator{t: t, kubernetes: nettest.Built(t, "kubernetes"), isthmusctl: nettest.Built(t, "isthmusctl"), isthmus: nettest.Built(t, "isthmus")}
	var err error
	o.cp, err = controlplane.Start(t.Context(), controlplane.Config{
		Name: "install", Dir: t.TempDir(), Binary: o.kubernetes, Address: netip.MustParseAddr("127.0.0.1"), Ports: controlplanetest.FreePorts(t),
		ServiceCIDR: netip.MustParsePrefix("10.96.0.0/16"), PodCIDR: netip.MustParsePrefix("10.0.0.0/16"),
	})
	assert.NilError(t, err)
	o.connect("admin")

	for _, step := range []struct {
		name string
		run  func(*operator)
	}{
		{"refused before anything is changed", (*operator).refusals},
		{"networks are found, or asked for by name", (*operator).finds},
		{"three ways make the same objects", (*operator).threeWays},
		{"what users wrote stays, and what others made is restored", (*operator).keeps},
		{"an upgrade keeps values and brings CRDs up to date", (*operator).upgrades},
		{"an upgrade waits for gateways, and says which it waits for in vain", (*operator).replaces},
	} {
		if !t.Run(step.name, func(t *testing.T) {
			step.run(&operator{t, o.cp, o.kubernetes, o.isthmusctl, o.isthmus, o.kubeconfig, o.client})
		}) {
			t.FailNow()
		}
	}
}

// file writes a file of this test.
func (o *operator) file(name string, text []byte) string {
	o.t.Helper()
	path := filepath.Join(o.t.TempDir(), name)
	assert.NilError(o.t, os.WriteFile(path, text, 0o600))
	return path
}

// connect connects to the control plane as its administrator, until the test ends; name is
// that of the kubeconfig's file.
func (o *operator) connect(name string) {
	o.t.Helper()
	o.t.Cleanup(func() { assert.Check(o.t, o.cp.Close()) })
	config := o.cp.RESTConfig()
	config.QPS, config.WarningHandler = -1, rest.NoWarnings{}
	var err error
	o.client, err = client.New(config, client.Options{})
	assert.NilError(o.t, err)
	admin, err := o.cp.Kubeconfig("admin")
	assert.NilError(o.t, err)
	o.kubeconfig = o.file(name, admin)
}

// try runs isthmusctl.
func (o *operator) try(args ...string) (stdout, stderr string, err error) {
	ctx, cancel := context.WithTimeout(o.t.Context(), 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, o.isthmusctl, append([]string{"--kubeconfig", o.kubeconfig}, args...)...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err = cmd.Run()
	return out.String(), errs.String(), err
}

// run is try for what has to work.
func (o *operator) run(args ...string) string {
	o.t.Helper()
	start := time.Now()
	out, errs, err := o.try(args...)
	assert.NilError(o.t, err, "isthmusctl %v:\n%s%s", args, out, errs)
	o.t.Logf("isthmusctl %s: %v", args[0], time.Since(start).Round(10*time.Millisecond))
	return out
}

// kubectl runs kubectl, with text as its input.
func (o *operator) kubectl(text string, args ...string) string {
	o.t.Helper()
	cmd := exec.CommandContext(o.t.Context(), o.kubernetes, append([]string{"kubectl", "--kubeconfig", o.kubeconfig}, args...)...)
	cmd.Stdin = strings.NewReader(text)
	out, err := cmd.CombinedOutput()
	assert.NilError(o.t, err, "kubectl %v:\n%s", args, out)
	return string(out)
}

// objects returns everything in the API but what comes and goes by itself, by
// kind, namespace and name.
func (o *operator) objects() map[string]*unstructured.Unstructured {
	o.t.Helper()
	lists, err := o.cp.Client().Discovery().ServerPreferredResources()
	assert.NilError(o.t, err)
	out := map[string]*unstructured.Unstructured{}
	for _, l := range lists {
		for _, r := range l.APIResources {
			if !slices.Contains(r.Verbs, "list") || slices.Contains([]string{"Event", "Lease", "APIService", "ComponentStatus"}, r.Kind) {
				continue
			}
			list := &unstructured.UnstructuredList{}
			list.SetAPIVersion(l.GroupVersion)
			list.SetKind(r.Kind + "List")
			assert.NilError(o.t, client.IgnoreNotFound(o.client.List(o.t.Context(), list)), "%s %s", l.GroupVersion, r.Kind)
			for _, item := range list.Items {
				out[fmt.Sprintf("%s %s/%s", r.Kind, item.GetNamespace(), item.GetName())] = &item
			}
		}
	}
	return out
}

// spec is what somebody wanted of an object: without what the API server, Helm
// and kubectl keep for themselves.
func spec(t *testing.T, u *unstructured.Unstructured) string {
	t.Helper()
	u = u.DeepCopy()
	delete(u.Object, "status")
	metadata := u.Object["metadata"].(map[string]any)
	for _, field := range []string{"uid", "resourceVersion", "generation", "creationTimestamp", "managedFields", "deletionTimestamp"} {
		delete(metadata, field)
	}
	a := u.GetAnnotations()
	for key := range a {
		if strings.HasPrefix(key, "meta.helm.sh/") || strings.HasPrefix(key, "kubectl.kubernetes.io/") || strings.HasPrefix(key, "deprecated.daemonset") || strings.HasPrefix(key, "deployment.kubernetes.io/") {
			delete(a, key)
		}
	}
	if u.SetAnnotations(a); len(a) == 0 {
		delete(metadata, "annotations")
	}
	text, err := json.Marshal(u.Object)
	assert.NilError(t, err)
	return string(text)
}

// installed returns what the chart has brought, and its CRDs.
func (o *operator) installed() map[string]string {
	o.t.Helper()
	out := map[string]string{}
	for name, u := range o.objects() {
		labels := u.GetLabels()
		if strings.HasPrefix(name, "CustomResourceDefinition ") || labels["app.kubernetes.io/part-of"] == "isthmus" && labels["app.kubernetes.io/managed-by"] == "Helm" {
			out[name] = spec(o.t, u)
		}
	}
	return out
}

// names are the objects that there are.
func (o *operator) names() []string {
	o.t.Helper()
	return slices.DeleteFunc(slices.Sorted(maps.Keys(o.objects())), func(name string) bool {
		// What Kubernetes makes by itself comes when it comes.
		for _, own := range []string{"EndpointSlice default/kubernetes", "Endpoints default/kubernetes"} {
			if strings.HasPrefix(name, own) {
				return true
			}
		}
		return strings.HasSuffix(name, "/kube-root-ca.crt") || strings.HasPrefix(name, "ServiceAccount ") && strings.HasSuffix(name, "/default")
	})
}

// served waits until the API server lists the kinds of all CRDs, which is a moment after they are established.
func (o *operator) served() {
	o.t.Helper()
	crds := strings.Fields(o.kubectl("", "get", "crd", "-o", "name"))
	until(o.t, "all kinds of CRDs are served", func() bool {
		kinds := strings.Fields(o.kubectl("", "api-resources", "-o", "name", "--cached=false"))
		return !slices.ContainsFunc(crds, func(crd string) bool {
			return !slices.Contains(kinds, strings.TrimPrefix(crd, "customresourcedefinition.apiextensions.k8s.io/"))
		})
	})
}

// same waits until the API has exactly these objects again.
func (o *operator) same(before []string) {
	o.t.Helper()
	poll.WaitOn(o.t, func(poll.LogT) poll.Result {
		if diff := is.DeepEqual(o.names(), before)(); !diff.Success() {
			return poll.Continue("%s", diff.(interface{ FailureMessage() string }).FailureMessage())
		}
		return poll.Success()
	}, poll.WithTimeout(2*time.Minute), poll.WithDelay(200*time.Millisecond))
}

func (o *operator) threeWays() {
	before := o.names()
	first := o.run(append([]string{"install", "--wait=false", "--json"}, installArgs...)...)
	var result struct {
		ClusterID string
		Revision  int
		Objects   []struct{ Kind, Name string }
	}
	assert.NilError(o.t, json.Unmarshal([]byte(first), &result), first)
	assert.Equal(o.t, result.ClusterID, "milan")
	assert.Equal(o.t, result.Revision, 1)
	isthmusctl := o.installed()
	assert.Equal(o.t, len(isthmusctl), len(result.Objects)+19, "%v", slices.Sorted(maps.Keys(isthmusctl)))
	// The network of the Services was found.
	assert.Check(o.t, is.Contains(isthmusctl["Network liqo/service-cidr"], `"cidr":"10.96.0.0/16"`))

	_, errs, err := o.try(append([]string{"install", "--wait=false"}, installArgs...)...)
	assert.Assert(o.t, err != nil)
	assert.Check(o.t, is.Contains(errs, "use isthmusctl upgrade"))
	o.run("uninstall", "--purge")
	o.same(before)

	// What `helm install --create-namespace` runs.
	getter := genericclioptions.NewConfigFlags(false)
	getter.KubeConfig = &o.kubeconfig
	getter.WrapConfigFn = func(c *rest.Config) *rest.Config {
		c.QPS = -1
		return c
	}
	cfg := new(action.Configuration)
	assert.NilError(o.t, cfg.Init(getter, "liqo", "secret", func(string, ...any) {}))
	chart, err := loader.Load("../../../k8s/chart")
	assert.NilError(o.t, err)
	install := action.NewInstall(cfg)
	install.ReleaseName, install.Namespace, install.CreateNamespace = "isthmus", "liqo", true
	var values map[string]any
	assert.NilError(o.t, yaml.Unmarshal([]byte("discovery: {config: {clusterID: milan}}\nipam: {podCIDRs: [10.0.0.0/16]}"), &values))
	_, err = install.RunWithContext(o.t.Context(), chart, values)
	if err != nil && strings.Contains(err.Error(), "no matches for kind") { // Helm asks once for the kinds: a busy API server lists them later
		o.served()
		_, err = install.RunWithContext(o.t.Context(), chart, values)
	}
	assert.NilError(o.t, err)
	assert.DeepEqual(o.t, o.installed(), isthmusctl)
	o.run("uninstall", "--purge")
	o.kubectl("", "delete", "namespace", "liqo")
	o.same(before)

	yaml := append([]string{"install", "--output", "yaml"}, installArgs...)
	o.kubectl(o.run(append(yaml, "--crds", "only")...), "apply", "--server-side", "-f", "-")
	o.served()
	o.kubectl(o.run(append(yaml, "--crds", "skip")...), "apply", "-f", "-")
	assert.DeepEqual(o.t, o.installed(), isthmusctl)
	_, errs, err = o.try(append([]string{"install", "--dry-run"}, installArgs...)...)
	assert.Assert(o.t, err != nil)
	assert.Check(o.t, is.Contains(errs, "it was applied without Helm"))
	o.run("uninstall", "--purge")
	o.same(before)
}

// refusals are tried on a cluster that nothing of ours is in, and leave it so.
func (o *operator) refusals() {
	admin, err := os.ReadFile(o.kubeconfig)
	assert.NilError(o.t, err)
	node := `{apiVersion: v1, kind: Node, metadata: {name: old}, status: {nodeInfo: {kernelVersion: 4.18.0-553.el8, operatingSystem: linux, architecture: "", bootID: "", containerRuntimeVersion: "", kubeProxyVersion: "", kubeletVersion: "", machineID: "", osImage: "", systemUUID: ""}}}`
	crd, err := os.ReadFile("../../../k8s/crds/networking.liqo.io_publickeies.yaml")
	assert.NilError(o.t, err)
	older := strings.ReplaceAll(strings.ReplaceAll(string(crd), "publicKey:", "key:"), "- publicKey\n", "- key\n")
	for _, tc := range []struct {
		name   string
		given  string // applied before
		status bool   // of it, too
		args   []string
		want   []string
	}{
		{"a text that is not a network", "", false, []string{"--set", "ipam.externalCIDR=10.270.0.0/16"}, []string{"ipam.externalCIDR", "is not a network"}},
		{"an unknown value", "", false, []string{"--set", "networking.mtu=9000"}, []string{"values:", "mtu"}},
		{"no name for the cluster", "", false, []string{"--set", "discovery.config.clusterID="}, []string{"clusterID"}},
		{"networks of pods that are none", "", false, []string{"--set", "ipam.podCIDRs={}"}, []string{"values:", "/ipam/podCIDRs"}},
		{"an old kernel", node, true, nil, []string{"Node old: it runs Linux 4.18.0-553.el8, and 5.10 is needed"}},
		{"an older CRD", older, false, nil, []string{"CustomResourceDefinition publickeies.networking.liqo.io", "it lacks the field", "--replace-crds"}},
		{"the public system", `{apiVersion: apps/v1, kind: DaemonSet, metadata: {namespace: default, name: liqo-fabric}, spec: {selector: {matchLabels: {a: b}}, template: {metadata: {labels: {a: b}}, spec: {containers: [{name: c, image: i}]}}}}`,
			false, nil, []string{"DaemonSet default/liqo-fabric", "networking.enabled=false"}},
		{"a namespace that refuses the node daemon", `{apiVersion: v1, kind: Namespace, metadata: {name: strict, labels: {pod-security.kubernetes.io/enforce: baseline}}}`,
			false, []string{"--namespace", "strict"}, []string{"Namespace strict", "kubectl label namespace strict"}},
		{"somebody else's object", `{apiVersion: v1, kind: ServiceAccount, metadata: {namespace: default, name: isthmus-node}}`,
			false, []string{"--namespace", "default"}, []string{"ServiceAccount default/isthmus-node: somebody else made it"}},
	} {
		o.t.Run(tc.name, func(t *testing.T) {
			o := &operator{t, o.cp, o.kubernetes, o.isthmusctl, o.isthmus, o.kubeconfig, o.client}
			if tc.given != "" {
				o.kubectl(tc.given, "apply", "--server-side", "-f", "-")
				if tc.status {
					o.kubectl(tc.given, "apply", "--server-side", "--subresource=status", "-f", "-")
				}
			}
			before := o.names()
			_, errs, err := o.try(slices.Concat([]string{"install", "--wait=false"}, installArgs, tc.args)...)
			assert.Assert(t, err != nil, "it was installed")
			for _, want := range tc.want {
				assert.Check(t, is.Contains(errs, want))
			}
			assert.DeepEqual(t, o.names(), before)
			if tc.given != "" {
				o.kubectl(tc.given, "delete", "-f", "-")
			}
		})
	}
	o.t.Run("somebody who may do little", func(t *testing.T) {
		somebody := strings.Replace(string(admin), "user:\n", "user:\n    as: somebody\n", 1)
		o := &operator{t, o.cp, o.kubernetes, o.isthmusctl, o.isthmus, o.kubeconfig, o.client}
		before := o.names()
		o.kubeconfig = o.file("somebody", []byte(somebody))
		out, _, err := o.try(append([]string{"install", "--json", "--set", "ipam.serviceCIDR=10.96.0.0/16"}, installArgs...)...)
		assert.Assert(t, err != nil, "it was installed")
		assert.Check(t, is.Contains(out, "you may not"))
		assert.DeepEqual(t, o.names(), before)
	})
}

// keeps installs, writes what a user and the controller would, and uninstalls.
func (o *operator) keeps() {
	o.run(append([]string{"install", "--wait=false"}, installArgs...)...)
	const theirs = `
{apiVersion: v1, kind: Namespace, metadata: {name: liqo-tenant-rome, labels: {liqo.io/remote-cluster-id: rome}}}
---
{apiVersion: networking.liqo.io/v1beta1, kind: Configuration, metadata: {namespace: liqo-tenant-rome, name: rome, labels: {liqo.io/remote-cluster-id: rome}}, spec: {remote: {cidr: {pod: [10.1.0.0/16], external: [10.71.0.0/16]}}}}
`
	const ours = `
{apiVersion: networking.liqo.io/v1beta1, kind: RouteConfiguration, metadata: {namespace: liqo-tenant-rome, name: rome-node-gw, labels: {app.kubernetes.io/managed-by: isthmus}}, spec: {table: {name: rome, rules: [{dst: 10.9.0.0/16, routes: [{dst: 10.9.0.0/16, dev: eth0, scope: link}]}]}}}
---
{apiVersion: rbac.authorization.k8s.io/v1, kind: Role, metadata: {namespace: liqo-tenant-rome, name: gw-rome, labels: {app.kubernetes.io/managed-by: isthmus}}, rules: []}
---
{apiVersion: coordination.k8s.io/v1, kind: Lease, metadata: {namespace: liqo, name: isthmus-controller}, spec: {holderIdentity: x}}
`
	o.kubectl(theirs, "apply", "-f", "-")
	o.kubectl(ours, "apply", "-f", "-")
	o.kubectl(`{apiVersion: v1, kind: Namespace, metadata: {name: liqo-tenant-rome, labels: {pod-security.kubernetes.io/enforce: privileged}}}`,
		"apply", "--server-side", "--field-manager=isthmus-controller", "-f", "-")
	dry := o.run("uninstall", "--dry-run")
	assert.Check(o.t, is.Contains(dry, "DaemonSet isthmus-node"))
	assert.Check(o.t, is.Contains(dry, "Nothing was changed"))
	out := o.run("uninstall")
	assert.Check(o.t, is.Contains(out, "1 objects that you wrote stay"))
	have := o.objects()
	assert.Check(o.t, have["Configuration liqo-tenant-rome/rome"] != nil)
	assert.Check(o.t, have["RouteConfiguration liqo-tenant-rome/rome-node-gw"] == nil)
	assert.Check(o.t, have["Role liqo-tenant-rome/gw-rome"] == nil)
	assert.Check(o.t, have["DaemonSet liqo/isthmus-node"] == nil)
	_, privileged := have["Namespace /liqo-tenant-rome"].GetLabels()["pod-security.kubernetes.io/enforce"]
	assert.Check(o.t, !privileged, "the label that the controller set is still there")
	assert.Check(o.t, is.Equal(o.kubectl("", "get", "lease", "-n", "liqo", "-o", "name"), ""))

	out = o.run("uninstall", "--purge")
	assert.Check(o.t, is.Contains(out, "gone"))
	o.kubectl("", "delete", "namespace", "liqo-tenant-rome")
}

func (o *operator) upgrades() {
	o.run(append([]string{"install", "--wait=false"}, installArgs...)...)
	before := o.installed()
	// A CRD of the time before.
	o.kubectl("", "patch", "crd", "internalnodes.networking.liqo.io", "--type=json",
		"-p", `[{"op": "remove", "path": "/spec/versions/0/schema/openAPIV3Schema/properties/status/properties/overlays"}]`)
	assert.Check(o.t, o.installed()["CustomResourceDefinition /internalnodes.networking.liqo.io"] != before["CustomResourceDefinition /internalnodes.networking.liqo.io"])
	o.run("upgrade", "--wait=false", "--set", "logLevel=debug")
	after := o.installed()
	assert.Check(o.t, is.Contains(after["Deployment liqo/isthmus-controller"], "--log-level=debug"))
	assert.Check(o.t, is.Contains(after["ConfigMap liqo/clusterid-configmap"], `"CLUSTER_ID":"milan"`))
	assert.Check(o.t, is.Equal(after["CustomResourceDefinition /internalnodes.networking.liqo.io"], before["CustomResourceDefinition /internalnodes.networking.liqo.io"]))
	o.run("uninstall", "--purge")
}
