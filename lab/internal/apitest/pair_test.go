package apitest

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/appliance/nettest"
	"github.com/isthmus-net/isthmus/lab/internal/controlplane"
	"github.com/isthmus-net/isthmus/lab/internal/controlplane/controlplanetest"
)

// A pair are two clusters with the appliance's controller in each, and no nodes.
type pair struct {
	t     *testing.T
	milan *operator // whose kubeconfig is --kubeconfig
	rome  *operator
	// hear makes gateways hear each other, which nobody here does.
	hear *atomic.Bool
}

func (p *pair) of(t *testing.T) *pair {
	milan, rome := *p.milan, *p.rome
	milan.t, rome.t = t, t
	return &pair{t, &milan, &rome, p.hear}
}

// A step is part of a test of two clusters, and leaves them as it found them.
type step struct {
	name string
	run  func(*pair)
}

// inTurn installs the appliance in two clusters, and runs steps there one after the other.
func inTurn(t *testing.T, steps []step) {
	nettest.Slow(t, "starts two control planes")
	p := &pair{t: t, hear: &atomic.Bool{}}
	for i, c := range []struct {
		name          string
		operator      **operator
		pods, service string
	}{{"milan", &p.milan, "10.0.0.0/16", "10.96.0.0/16"}, {"rome", &p.rome, "10.1.0.0/16", "10.97.0.0/16"}} {
		o := &operator{t: t, kubernetes: nettest.Built(t, "kubernetes"), isthmusctl: nettest.Built(t, "isthmusctl"), isthmus: nettest.Built(t, "isthmus")}
		*c.operator = o
		var err error
		o.cp, err = controlplane.Start(t.Context(), controlplane.Config{
			Name: c.name, Dir: t.TempDir(), Binary: o.kubernetes, Address: netip.AddrFrom4([4]byte{127, 0, 0, byte(1 + i)}), Ports: controlplanetest.FreePorts(t),
			ServiceCIDR: netip.MustParsePrefix(c.service), PodCIDR: netip.MustParsePrefix(c.pods),
		})
		assert.NilError(t, err)
		o.connect(c.name)
	}

	t.Run("installed on one side only", func(t *testing.T) { p.of(t).installs() })
	assert.Assert(t, !t.Failed())
	p.hear.Store(true)
	ctx, cancel := context.WithCancel(t.Context())
	var gateways sync.WaitGroup
	gateways.Go(func() { p.gateways(ctx) })
	var run atomic.Bool
	run.Store(true)
	gateways.Go(func() { p.milan.readyPods(ctx, &run) })
	gateways.Go(func() { p.rome.readyPods(ctx, &run) })
	defer gateways.Wait()
	defer cancel()
	defer p.milan.withAccount().controller()()
	defer p.rome.withAccount().controller()()

	for _, step := range steps {
		if !t.Run(step.name, func(t *testing.T) { step.run(p.of(t)) }) {
			t.FailNow()
		}
	}
}

func (p *pair) install(o *operator, id, pods string) {
	o.run("install", "--wait=false", "--set", fmt.Sprintf("discovery.config.clusterID=%s,ipam.podCIDRs={%s}", id, pods))
}

// withAccount is o with the controller's account, by which the policies of the chart
// know it.
func (o *operator) withAccount() *operator {
	return o.as("system:serviceaccount:liqo:isthmus-controller")
}

// as is o with the rights of a user.
func (o *operator) as(user string) *operator {
	admin, err := o.cp.Kubeconfig("admin")
	assert.NilError(o.t, err)
	theirs := *o
	theirs.kubeconfig = o.file(user, []byte(strings.Replace(string(admin), "user:\n", "user:\n    as: "+user+"\n", 1)))
	return &theirs
}

// as is the pair with the rights of a user of both clusters.
func (p *pair) as(user string) *pair {
	out := *p
	out.milan, out.rome = p.milan.as(user), p.rome.as(user)
	return &out
}

// contexts is milan with a kubeconfig that has both clusters, as contexts of their names.
func (p *pair) contexts() *operator {
	both := clientcmdapi.NewConfig()
	for name, o := range map[string]*operator{"milan": p.milan, "rome": p.rome} {
		one, err := clientcmd.LoadFromFile(o.kubeconfig)
		assert.NilError(p.t, err)
		of := one.Contexts[one.CurrentContext]
		both.Clusters[name], both.AuthInfos[name] = one.Clusters[of.Cluster], one.AuthInfos[of.AuthInfo]
		both.Contexts[name] = &clientcmdapi.Context{Cluster: name, AuthInfo: name}
	}
	text, err := clientcmd.Write(*both)
	assert.NilError(p.t, err)
	out := *p.milan
	out.kubeconfig = out.file("contexts", text)
	return &out
}

// gateways has all Connections say that they are connected, until ctx is done.
func (p *pair) gateways(ctx context.Context) {
	every(ctx, 50*time.Millisecond, func() {
		if !p.hear.Load() {
			return
		}
		for _, o := range []*operator{p.milan, p.rome} {
			for _, c := range o.list(ctx, "Connection") {
				if value, _, _ := unstructured.NestedString(c.Object, "status", "value"); value == "Connected" {
					continue
				}
				_ = unstructured.SetNestedField(c.Object, "Connected", "status", "value")
				if err := o.client.Status().Update(ctx, &c); err != nil && ctx.Err() == nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
					p.t.Errorf("Connection %s: %v", c.GetName(), err)
				}
			}
		}
	})
}

// list returns the objects of a kind of ours in all namespaces.
func (o *operator) list(ctx context.Context, kind string) []unstructured.Unstructured {
	list := &unstructured.UnstructuredList{}
	list.SetAPIVersion("networking.liqo.io/v1beta1")
	list.SetKind(kind + "List")
	if err := o.client.List(ctx, list); err != nil && ctx.Err() == nil {
		o.t.Errorf("list %s: %v", kind, err)
	}
	return list.Items
}

// network runs isthmusctl network for the two.
func (p *pair) network(args ...string) (stdout, stderr string, err error) {
	return p.milan.try(append([]string{"network", "--remote-kubeconfig", p.rome.kubeconfig}, args...)...)
}

// does is network for what has to work.
func (p *pair) does(args ...string) networkResult {
	p.t.Helper()
	out, errs, err := p.network(append(args, "--json")...)
	assert.NilError(p.t, err, "isthmusctl network %v:\n%s%s", args, out, errs)
	var r networkResult
	assert.NilError(p.t, json.Unmarshal([]byte(out), &r), out)
	p.t.Logf("isthmusctl network %s: %d changes in %.2f s\n%s", args[0], r.Changed, r.Seconds, errs)
	return r
}

// says runs what has to fail, and checks what it says.
func (p *pair) says(args []string, wants ...string) string {
	p.t.Helper()
	out, errs, err := p.network(args...)
	assert.Assert(p.t, err != nil, "isthmusctl network %v did it:\n%s%s", args, out, errs)
	for _, want := range wants {
		assert.Check(p.t, is.Contains(errs, want), "isthmusctl network %v", args)
	}
	return errs
}

// timeouts are how long a command may wait in vain, one after the other, until it has come to what
// it waits for: a busy machine takes longer until then.
var timeouts = []string{"4s", "15s", "1m"}

// inVain runs a command that waits in vain for something, and checks what it says. It gives the command more
// time until all that is wanted was said, in one try or in several. It returns what all tries said.
func (p *pair) inVain(args []string, wants ...string) string {
	p.t.Helper()
	return saysInVain(p.t, fmt.Sprint("isthmusctl network ", args), wants, func(timeout string) string {
		return p.says(append(slices.Clone(args), "--timeout", timeout))
	})
}

// saysInVain gives a command more and more time, until its tries have said all that is wanted.
func saysInVain(t *testing.T, command string, wants []string, try func(timeout string) string) (said string) {
	t.Helper()
	lacks := func(want string) bool { return !strings.Contains(said, want) }
	for _, timeout := range timeouts {
		said += try(timeout)
		if !slices.ContainsFunc(wants, lacks) {
			return said
		}
	}
	for _, want := range wants {
		assert.Check(t, is.Contains(said, want), command)
	}
	return said
}

// lacksTunnel is inVain for connect between gateways that do not hear each other.
func (p *pair) lacksTunnel(args []string, wants ...string) {
	p.t.Helper()
	p.inVain(args, append(wants, "the tunnel: Connection")...)
}

type networkResult struct {
	Changed   int
	Connected bool
	Seconds   float64
	Notes     []string
	Objects   []struct{ Cluster, Kind, Namespace, Name, Action string }
}

// objects are those of peerings in both clusters, without what is new each time,
// keys and addresses, which are compared with where they come from, and without what
// the controller adds.
func (p *pair) objects() []string {
	p.t.Helper()
	var out []string
	for _, o := range []*operator{p.milan, p.rome} {
		var namespaces corev1.NamespaceList
		assert.NilError(p.t, o.client.List(p.t.Context(), &namespaces, client.HasLabels{"liqo.io/tenant-namespace"}))
		for _, n := range namespaces.Items {
			maps.DeleteFunc(n.Labels, func(label, _ string) bool { return strings.HasPrefix(label, "pod-security.") })
			out = append(out, fmt.Sprintf("Namespace %s %v %v", n.Name, n.Labels, n.DeletionTimestamp != nil))
		}
		for _, kind := range []string{"Configuration", "GatewayServer", "GatewayClient", "PublicKey"} {
			for _, u := range o.list(p.t.Context(), kind) {
				switch kind {
				case "Configuration":
					unstructured.RemoveNestedField(u.Object, "spec", "local")
				case "GatewayClient":
					unstructured.RemoveNestedField(u.Object, "spec", "endpoint", "addresses")
				case "PublicKey":
					unstructured.RemoveNestedField(u.Object, "spec")
				}
				owners := u.GetOwnerReferences()
				for i := range owners {
					owners[i].UID = ""
				}
				u.SetOwnerReferences(owners)
				out = append(out, kind+" "+spec(p.t, &u))
			}
		}
	}
	slices.Sort(out)
	return out
}

// wired checks that each side has what the other says of itself.
func (p *pair) wired() {
	p.t.Helper()
	ctx := p.t.Context()
	server, dialler := p.rome.list(ctx, "GatewayServer"), p.milan.list(ctx, "GatewayClient")
	assert.Equal(p.t, len(server), 1)
	assert.Equal(p.t, len(dialler), 1)
	at, _, _ := unstructured.NestedStringSlice(server[0].Object, "status", "endpoint", "addresses")
	dials, _, _ := unstructured.NestedStringSlice(dialler[0].Object, "spec", "endpoint", "addresses")
	assert.DeepEqual(p.t, dials, at)
	for _, x := range []struct{ of, at *operator }{{p.milan, p.rome}, {p.rome, p.milan}} {
		keys := x.at.list(ctx, "PublicKey")
		assert.Equal(p.t, len(keys), 1)
		var secrets corev1.SecretList
		assert.NilError(p.t, x.of.client.List(ctx, &secrets, client.MatchingLabels{"networking.liqo.io/gateway-resource": "true"}))
		// The other one is that of changes of keys.
		secrets.Items = slices.DeleteFunc(secrets.Items, func(s corev1.Secret) bool { return s.Type != corev1.SecretTypeOpaque })
		assert.Equal(p.t, len(secrets.Items), 1)
		text, _, _ := unstructured.NestedString(keys[0].Object, "spec", "publicKey")
		want, err := json.Marshal(secrets.Items[0].Data["publicKey"])
		assert.NilError(p.t, err)
		assert.Equal(p.t, `"`+text+`"`, string(want))
	}
}

// nothing checks that no cluster has anything of a peering.
func (p *pair) nothing() {
	p.t.Helper()
	until(p.t, "nothing is left of the peering", func() bool { return len(p.objects()) == 0 })
}

var connectArgs = []string{"connect", "--gw-server-service-type", "ClusterIP", "--wait", "--timeout", "4m"}
