package apitest

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
)

// TestNetwork connects two clusters by isthmusctl, as operators do, and
// disconnects them; ends it in the middle; and tries what has to be refused.
func TestNetwork(t *testing.T) {
	t.Parallel()
	inTurn(t, []step{
		{"refused before anything is changed", (*pair).refusals},
		{"connected, and a second time there is nothing to do", (*pair).connects},
		{"another's objects are taken as they are", (*pair).adopts},
		{"a peer is blocked, and let in again", (*pair).blocks},
		{"a peer is followed", (*pair).follows},
		{"a key is blocked, whatever has it", (*pair).blocksKey},
		{"killed after any write, the next run ends in the same objects", (*pair).killed},
		{"what can't be done is taken back, and nothing else", (*pair).takesBack},
	})
}

// TestInvitations connects two clusters by invitations, and by users who may do no more
// than it takes.
func TestInvitations(t *testing.T) {
	t.Parallel()
	inTurn(t, []step{
		{"where there is no load balancer, what was begun is taken back", (*pair).invitesInVain},
		{"by an invitation, of which nothing has to be copied back", (*pair).invites},
		{"by a user with the rights that the role names, and no others", (*pair).leastRights},
		{"by an invitation, with the rights that the two roles name, and no others", (*pair).leastInvitations},
	})
}

func (p *pair) installs() {
	p.says([]string{"connect"}, "Isthmus is not installed in namespace liqo", "local cluster at https://127.0.0.1", "isthmusctl --kubeconfig "+p.milan.kubeconfig+" install", "remote cluster at https://127.0.0.2")
	p.install(p.milan, "milan", "10.0.0.0/16")
	p.says([]string{"connect"}, "Isthmus is not installed in namespace liqo", "remote cluster at https://127.0.0.2", "isthmusctl --kubeconfig "+p.rome.kubeconfig+" install")
	p.install(p.rome, "rome", "10.1.0.0/16")
}

func (p *pair) refusals() {
	same := *p
	same.rome = p.milan
	same.says(connectArgs, "refused, nothing was changed", "they are the same cluster, milan", "--remote-kubeconfig or --remote-context")

	for _, bad := range []struct {
		args  []string
		wants []string
	}{
		{[]string{"connect", "--gw-server-service-type", "ExternalName"}, []string{"--gw-server-service-type", `"ExternalName" is not LoadBalancer, NodePort or ClusterIP`}},
		{[]string{"connect", "--mtu", "9"}, []string{"--mtu", "9 is not an MTU"}},
		{[]string{"connect", "--gw-server-template-name", "fast"}, []string{"WgGatewayServerTemplate liqo/fast in rome: it does not exist", "there are liqo/wireguard-server", "--gw-server-template-name"}},
		{[]string{"connect", "--gw-client-template-namespace", "elsewhere"}, []string{"WgGatewayClientTemplate elsewhere/wireguard-client in milan", "liqo/wireguard-client"}},
		{[]string{"connect", "--gw-server-type", "templates"}, []string{"group/version/resource"}},
		{[]string{"connect", "--remote-liqo-namespace", "kube-system"}, []string{"Isthmus is not installed in namespace kube-system", "remote cluster"}},
		{[]string{"connect", "--remote-context", "none"}, []string{"which remote cluster", "--remote-kubeconfig"}},
	} {
		p.says(bad.args, bad.wants...)
	}

	// Somebody who may not do it, and may read.
	o := p.rome
	o.kubectl(`
{apiVersion: rbac.authorization.k8s.io/v1, kind: ClusterRole, metadata: {name: reader}, rules: [{apiGroups: ["*"], resources: ["*"], verbs: [get, list]}]}
---
{apiVersion: rbac.authorization.k8s.io/v1, kind: ClusterRoleBinding, metadata: {name: reader}, roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: reader}, subjects: [{kind: User, name: somebody}]}
`, "apply", "-f", "-")
	admin, err := o.cp.Kubeconfig("admin")
	assert.NilError(p.t, err)
	reader := *p
	theirs := *o
	theirs.kubeconfig = o.file("somebody", []byte(strings.Replace(string(admin), "user:\n", "user:\n    as: somebody\n", 1)))
	reader.rome = &theirs
	// An API server learns of new rights a moment later.
	hears := func(text string) {
		p.t.Helper()
		until(p.t, "somebody hears: "+text, func() bool {
			_, errs, err := reader.network(connectArgs...)
			return err != nil && strings.Contains(errs, text)
		})
	}
	hears("refused, nothing was changed")
	reader.says(connectArgs, "refused, nothing was changed", "rome: you may not create namespaces", "create publickeies.networking.liqo.io in namespace liqo-tenant-milan", "auth whoami")
	o.kubectl("", "delete", "clusterrolebinding", "reader")
	hears("cannot list resource")
	reader.says(connectArgs, "remote cluster at", `User "somebody" cannot list resource`, "ask an administrator of that cluster")

	// Nobody there.
	gone := *p
	away := *o
	away.kubeconfig = o.file("away", []byte(strings.Replace(string(admin), fmt.Sprintf(":%d", o.cp.Address().Port()), ":1", 1)))
	gone.rome = &away
	gone.says(connectArgs, "remote cluster at https://127.0.0.2:1: the API server does not answer", "connection refused")
	p.nothing()
}

func (p *pair) connects() {
	r := p.does(connectArgs...)
	assert.Equal(p.t, r.Changed, 8, "%v", r.Objects)
	assert.Assert(p.t, r.Connected)
	p.wired()
	objects := p.objects()

	out, errs, err := p.network(connectArgs...)
	assert.NilError(p.t, err, errs)
	assert.Equal(p.t, out, "milan and rome are connected already: nothing to do.\n")
	assert.Equal(p.t, errs, "")
	assert.DeepEqual(p.t, p.objects(), objects)
	// Two contexts of one kubeconfig are the same two clusters.
	both := p.contexts()
	assert.Equal(p.t, both.run("network", "connect", "--context", "milan", "--remote-context", "rome", "--gw-server-service-type", "ClusterIP", "--wait"), out)
	dir := filepath.Join(p.t.TempDir(), "peerings")
	both.run("peer", "manifests", "--server-context", "rome", "--client-context", "milan", "--server-service-type", "NodePort", "--server-address", "203.0.113.10", "--server-port", "31840", "--out", dir)
	for of, pods := range map[string]string{"milan": "10.1.0.0/16", "rome": "10.0.0.0/16"} {
		text, err := os.ReadFile(filepath.Join(dir, of, "peering.yaml"))
		assert.NilError(p.t, err)
		assert.Check(p.t, is.Contains(string(text), pods), of)
	}
	// From the other side it is the same peering.
	back := &pair{p.t, p.rome, p.milan, p.hear}
	assert.Equal(p.t, back.does("connect", "--wait").Changed, 0)
	assert.DeepEqual(p.t, p.objects(), objects)

	// What is on its way out is not mixed up with what comes.
	p.does("disconnect")
	p.does(connectArgs...)
	p.wired()
	assert.DeepEqual(p.t, p.objects(), objects)

	// What isthmusctl wrote, it changes when asked to.
	r = p.does(append(connectArgs, "--mtu", "1400")...)
	assert.Equal(p.t, r.Changed, 2, "%v", r.Objects)
	assert.Equal(p.t, p.does(connectArgs...).Changed, 0) // a flag that is not given changes nothing

	// Another peering is none of ours.
	p.milan.kubectl(`
{apiVersion: v1, kind: Namespace, metadata: {name: liqo-tenant-oslo, labels: {liqo.io/remote-cluster-id: oslo, liqo.io/tenant-namespace: "true"}}}
---
{apiVersion: networking.liqo.io/v1beta1, kind: Configuration, metadata: {namespace: liqo-tenant-oslo, name: oslo, labels: {liqo.io/remote-cluster-id: oslo}}, spec: {remote: {cidr: {pod: [10.5.0.0/16], external: [10.75.0.0/16]}}}}
---
{apiVersion: networking.liqo.io/v1beta1, kind: PublicKey, metadata: {namespace: liqo-tenant-oslo, name: oslo, labels: {liqo.io/remote-cluster-id: oslo}}, spec: {publicKey: AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAE=}}
`, "apply", "-f", "-")
	oslo := p.milan.kubectl("", "get", "namespace,configuration,publickeies", "-n", "liqo-tenant-oslo", "-l", "liqo.io/remote-cluster-id=oslo", "-o", "jsonpath={range .items[*]}{.kind} {.metadata.uid} {.metadata.labels}{end}")

	p.does("disconnect", "--wait")
	for _, kind := range []string{"GatewayServer", "GatewayClient", "Connection"} { // a controller that is behind makes a Connection again, for a moment
		until(p.t, "there is no "+kind, func() bool { return len(p.milan.list(p.t.Context(), kind))+len(p.rome.list(p.t.Context(), kind)) == 0 })
	}
	assert.Equal(p.t, p.does("disconnect", "--wait").Changed, 0)
	assert.Equal(p.t, len(p.rome.list(p.t.Context(), "Configuration")), 1)

	// A namespace that somebody uses stays. What liqoctl peer leaves in it, when it
	// waits for modules that there are not, is no use of it.
	p.rome.kubectl("", "create", "configmap", "-n", "liqo-tenant-milan", "mine")
	p.rome.kubectl(`{apiVersion: v1, kind: Secret, metadata: {namespace: liqo-tenant-milan, name: liqo-nonce, labels: {liqo.io/nonce: "true", liqo.io/remote-cluster-id: milan}}}`, "apply", "-f", "-")
	r = p.does("reset", "--wait")
	assert.DeepEqual(p.t, r.Notes, []string{"Namespace liqo-tenant-milan in rome stays, for not all of it is of the peering: ConfigMap mine"})
	assert.Equal(p.t, p.does("reset", "--wait").Changed, 0)
	p.rome.kubectl("", "delete", "configmap", "-n", "liqo-tenant-milan", "mine")
	p.does("reset", "--wait")
	out, errs, err = p.network("reset")
	assert.NilError(p.t, err, errs)
	assert.Equal(p.t, out, "milan and rome do not know each other: nothing to do.\n")

	assert.Equal(p.t, p.milan.kubectl("", "get", "namespace,configuration,publickeies", "-n", "liqo-tenant-oslo", "-l", "liqo.io/remote-cluster-id=oslo", "-o", "jsonpath={range .items[*]}{.kind} {.metadata.uid} {.metadata.labels}{end}"), oslo)
	p.milan.kubectl("", "delete", "namespace", "liqo-tenant-oslo")
	p.nothing()
}

func (p *pair) adopts() {
	p.does("init")
	p.does("reset", "--wait")
	// By hand, without an MTU, the port in a list, and no label on the namespace
	// that the public CLI sets.
	p.rome.kubectl(`
{apiVersion: v1, kind: Namespace, metadata: {name: liqo-tenant-milan, labels: {liqo.io/remote-cluster-id: milan, liqo.io/tenant-namespace: "true"}}}
---
{apiVersion: networking.liqo.io/v1beta1, kind: Configuration, metadata: {namespace: liqo-tenant-milan, name: of-milan, labels: {liqo.io/remote-cluster-id: milan}}, spec: {remote: {cidr: {pod: [10.0.0.0/16], external: [10.70.0.0/16]}}}}
---
{apiVersion: networking.liqo.io/v1beta1, kind: GatewayServer, metadata: {namespace: liqo-tenant-milan, name: to-milan, labels: {liqo.io/remote-cluster-id: milan}}, spec: {endpoint: {serviceType: ClusterIP, ports: [51840]}}}
`, "apply", "-f", "-")
	by := p.objects()
	p.says(append(connectArgs, "--mtu", "1400"), "refused, nothing was changed", "GatewayServer liqo-tenant-milan/to-milan in rome: spec.mtu is 0, written by kubectl-client-side-apply, and --mtu asks for 1400", "kubectl --kubeconfig "+p.rome.kubeconfig+" edit gatewayserver -n liqo-tenant-milan to-milan")
	assert.DeepEqual(p.t, p.objects(), by)
	r := p.does("connect", "--wait", "--timeout", "4m")
	assert.Equal(p.t, r.Changed, 5, "%v", r.Objects) // a namespace, a Configuration, the client, two keys
	p.wired()
	for _, have := range by {
		assert.Check(p.t, slices.Contains(p.objects(), have), have)
	}

	// The key is another one, and not by us.
	p.rome.kubectl("", "patch", "publickeies", "-n", "liqo-tenant-milan", "milan", "--type=merge", "-p", `{"spec": {"publicKey": "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAE="}}`)
	p.says(connectArgs[:1], "PublicKey liqo-tenant-milan/milan in rome: spec.publicKey is another key, written by kubectl-patch", "delete publickeies -n liqo-tenant-milan milan")
	p.rome.kubectl("", "delete", "publickeies", "-n", "liqo-tenant-milan", "milan")
	assert.Equal(p.t, p.does("connect", "--wait").Changed, 1)

	// The networks are those of another cluster.
	p.milan.kubectl("", "patch", "configuration", "-n", "liqo-tenant-rome", "rome", "--type=merge", "-p", `{"spec": {"remote": {"cidr": {"pod": ["10.9.0.0/16"]}}}}`)
	p.says(connectArgs[:1], "Configuration liqo-tenant-rome/rome in milan: spec.remote.cidr.pod is 10.9.0.0/16, written by kubectl-patch, and the other cluster says 10.1.0.0/16", "another cluster with the ID rome")
	p.does("reset", "--wait")
	p.nothing()
}

func (p *pair) leastRights() {
	role, err := os.ReadFile("../../../k8s/peering-role.yaml")
	assert.NilError(p.t, err)
	for _, o := range []*operator{p.milan, p.rome} {
		o.kubectl(string(role), "apply", "-f", "-")
		o.kubectl("", "create", "clusterrolebinding", "peering", "--clusterrole=isthmus-peering", "--user=operator")
	}
	user := p.as("operator")
	until(p.t, "the authorizer knows of the role", func() bool { _, _, err := user.network("disconnect"); return err == nil })
	assert.Equal(p.t, user.does(connectArgs...).Changed, 8)
	user.wired()
	r := user.does("reset", "--wait")
	assert.Assert(p.t, is.Len(r.Notes, 2))
	assert.Check(p.t, is.Contains(r.Notes[0], "Namespace liqo-tenant-rome in milan stays, for not all of it is of the peering: "))
	assert.Check(p.t, is.Contains(r.Notes[0], "(which you may not list)"))
	p.does("reset", "--wait")
	p.nothing()
}

// rolledBack waits until the objects are as they were: what a run has made is on its way out.
func (p *pair) rolledBack(before []string) {
	p.t.Helper()
	until(p.t, "what the run has made is gone", func() bool { return slices.Equal(p.objects(), before) })
}

func (p *pair) killed() {
	p.does(connectArgs...)
	want := p.objects()
	p.does("reset", "--wait")
	resumes := func(writes, all int) {
		p.t.Helper()
		assert.Assert(p.t, p.killedAfter(writes, connectArgs...))
		r := p.does(connectArgs...)
		assert.Equal(p.t, r.Changed, all-writes, "killed after %d writes: %v", writes, r.Objects)
		p.wired()
		assert.DeepEqual(p.t, p.objects(), want)
		p.does("reset", "--wait")
	}
	const namespaces, others = 2, 6
	for writes := 1; writes <= namespaces; writes++ {
		resumes(writes, namespaces+others)
		p.nothing()
	}
	// Namespaces take seconds to go. From here on they stay, because somebody uses
	// them.
	p.does(connectArgs...)
	p.milan.kubectl("", "create", "configmap", "-n", "liqo-tenant-rome", "mine")
	p.rome.kubectl("", "create", "configmap", "-n", "liqo-tenant-milan", "mine")
	p.does("reset", "--wait")
	for writes := 1; writes <= others; writes++ {
		resumes(writes, others)
	}
	assert.Assert(p.t, !p.killedAfter(others+1, connectArgs...), "there are more writes")
	assert.DeepEqual(p.t, p.objects(), want)

	// The same of a reset, of which two writes are of keys that may be gone already.
	for writes := 1; p.killedAfter(writes, "reset", "--wait"); writes++ {
		assert.Assert(p.t, writes <= others)
		p.does("reset", "--wait")
		assert.Equal(p.t, len(p.objects()), namespaces)
		p.does(connectArgs...)
		assert.DeepEqual(p.t, p.objects(), want)
	}
	p.milan.kubectl("", "delete", "configmap", "-n", "liqo-tenant-rome", "mine")
	p.rome.kubectl("", "delete", "configmap", "-n", "liqo-tenant-milan", "mine")
	p.does("reset", "--wait")
	p.nothing()
}

func (p *pair) takesBack() {
	// Nobody is a load balancer here.
	p.hear.Store(false)
	defer p.hear.Store(true)
	errs := p.inVain([]string{"connect", "--atomic"}, "GatewayServer liqo-tenant-milan/milan in rome to have an endpoint: no load balancer has given Service gw-milan an address",
		"if the cluster has none", "--gw-server-service-type NodePort", "what this run had made was taken back")
	assert.Check(p.t, !strings.Contains(errs, "stays done"), errs)
	p.nothing()

	// What was there before stays.
	p.does("init")
	before := p.objects()
	p.lacksTunnel([]string{"connect", "--gw-server-service-type", "ClusterIP", "--wait", "--atomic"}, "Connection liqo-tenant-rome/gw-rome in milan is", "the gateway of milan dials", "UDP has to reach it", "Service liqo-tenant-milan/gw-milan in rome: ClusterIP, port 51840", "get connections,services,pods -n liqo-tenant-milan")
	p.rolledBack(before)

	// The controller refuses, and says why.
	p.rome.kubectl(`{apiVersion: v1, kind: Service, metadata: {namespace: default, name: games}, spec: {type: NodePort, ports: [{port: 1, nodePort: 31840, protocol: UDP}]}}`, "apply", "-f", "-")
	p.says([]string{"connect", "--gw-server-service-type", "NodePort", "--gw-server-service-nodeport", "31840", "--atomic"},
		"GatewayServer liqo-tenant-milan/milan in rome can't be used: spec.endpoint.nodePort 31840 is that of Service default/games", "describe configurations,gatewayservers,gatewayclients -n liqo-tenant-milan", "taken back")
	p.rolledBack(before)

	// A program hears of it, too.
	out, _, err := p.network("connect", "--gw-server-service-type", "NodePort", "--gw-server-service-nodeport", "31840", "--atomic", "--json")
	assert.Assert(p.t, err != nil)
	var answer struct {
		Problems []struct{ Check, Object string }
		Result   struct {
			RolledBack bool
			Objects    []struct{ Kind, Action string }
		}
	}
	assert.NilError(p.t, json.Unmarshal([]byte(out), &answer), out)
	assert.Assert(p.t, is.Len(answer.Problems, 1))
	assert.Equal(p.t, answer.Problems[0].Object, "rome")
	assert.Assert(p.t, answer.Result.RolledBack)
	p.rome.kubectl("", "delete", "service", "games")

	// Ctrl-C.
	cmd := exec.CommandContext(p.t.Context(), p.milan.isthmusctl, "network", "--kubeconfig", p.milan.kubeconfig, "--remote-kubeconfig", p.rome.kubeconfig, "connect", "--atomic")
	stderr := &log{}
	cmd.Stdout, cmd.Stderr = stderr, stderr
	assert.NilError(p.t, cmd.Start())
	until(p.t, "it waits for a load balancer", func() bool { return strings.Contains(stderr.String(), "waiting for GatewayServer") })
	assert.NilError(p.t, cmd.Process.Signal(os.Interrupt))
	assert.ErrorContains(p.t, cmd.Wait(), "exit status 1")
	assert.Check(p.t, is.Contains(stderr.String(), "isthmusctl: interrupted\nwhat this run had made was taken back (--atomic)"))
	p.rolledBack(before)

	// Without --atomic it stays, and is gone on with.
	p.lacksTunnel([]string{"connect", "--gw-server-service-type", "ClusterIP", "--wait"}, "what is done stays done")
	p.hear.Store(true)
	r := p.does(connectArgs...)
	assert.Equal(p.t, r.Changed, 0)
	assert.Assert(p.t, r.Connected)

	// An object that was changed has its old spec again.
	p.hear.Store(false)
	before = p.objects()
	p.milan.kubectl("", "delete", "connections", "--all", "-A")
	p.inVain([]string{"connect", "--mtu", "1280", "--wait", "--atomic"}, "taken back")
	p.rolledBack(before)
	p.overtaken("connect", "--mtu", "1280", "--wait", "--atomic")
	p.rolledBack(before)
	p.hear.Store(true)
	p.does("reset", "--wait")
	p.nothing()
}
