package plan_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	ipamv1alpha1 "github.com/isthmus-net/isthmus/appliance/api/ipam/v1alpha1"
	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/internal/exchange"
	"github.com/isthmus-net/isthmus/appliance/plan"
)

// following returns a cluster whose peer rome may add networks, and what its gateway tells.
func following(t *testing.T, annotations map[string]string) (*world, func(pod ...v1beta1.CIDR)) {
	w := peered(t)
	get[*v1beta1.Configuration](w, "liqo-tenant-rome", "rome").Annotations = annotations
	return w, func(pod ...v1beta1.CIDR) {
		c := get[*v1beta1.Connection](w, "liqo-tenant-rome", "gw-rome")
		c.Status.Peer = &v1beta1.ConnectionPeer{Version: "v1", Networks: &v1beta1.ClusterConfigCIDR{Pod: pod, External: []v1beta1.CIDR{"10.71.0.0/16"}}}
	}
}

// follows returns what has come of it: networks, with a minus before those that the peer has
// withdrawn, and what is refused.
func follows(w *world) (networks string, refused string) {
	f := get[*v1beta1.Configuration](w, "liqo-tenant-rome", "rome").Status.Follow
	if f == nil {
		return "nothing", ""
	}
	var has, not []string
	for _, n := range f.Networks {
		text := string(n.CIDR)
		if n.WithdrawnAt != nil {
			text = "-" + text
		}
		has = append(has, text)
	}
	for _, r := range f.Refused {
		not = append(not, fmt.Sprintf("%s %s", r.CIDR, r.Message))
	}
	return strings.Join(has, " "), strings.Join(not, "; ")
}

func allowed(ranges string, more ...string) map[string]string {
	out := map[string]string{v1beta1.AnnotationFollow: ranges}
	for i := 0; i+1 < len(more); i += 2 {
		out[more[i]] = more[i+1]
	}
	return out
}

// What a peer tells counts within the ranges and the number that are allowed, and never
// where somebody else is.
func TestFollow(t *testing.T) {
	const written = v1beta1.CIDR("10.20.0.0/16")
	for _, tt := range []struct {
		name        string
		annotations map[string]string
		tells       []v1beta1.CIDR
		want        string
		refused     string // part of it; empty: nothing
	}{
		{"not asked for", nil, []v1beta1.CIDR{written, "10.64.0.0/16"}, "nothing", ""},
		{"what is written", allowed("10.64.0.0/10"), []v1beta1.CIDR{written}, "", ""},
		{"one more", allowed("10.64.0.0/10"), []v1beta1.CIDR{written, "10.64.0.0/16"}, "10.64.0.0/16", ""},
		{"the whole range", allowed("10.64.0.0/16"), []v1beta1.CIDR{"10.64.0.0/16"}, "10.64.0.0/16", ""},
		{"another range", allowed("10.64.0.0/14,192.168.0.0/16"), []v1beta1.CIDR{"192.168.4.0/24", "10.68.0.0/16"}, "192.168.4.0/24", "10.68.0.0/16 is in none of the ranges [10.64.0.0/14 192.168.0.0/16]"},
		{"wider than the range", allowed("10.64.0.0/16"), []v1beta1.CIDR{"10.64.0.0/15"}, "", "10.64.0.0/15 is in none of the ranges"},
		{"another family", allowed("fd00::/8"), []v1beta1.CIDR{written, "fd64::/64"}, "", ""},
		{"too many", allowed("10.0.0.0/8", v1beta1.AnnotationFollowMax, "2"), []v1beta1.CIDR{"10.64.0.0/16", "10.65.0.0/16", "10.66.0.0/16"}, "10.64.0.0/16 10.65.0.0/16", "10.66.0.0/16 is one more than the 2"},
		{"what is refused does not count", allowed("10.0.0.0/8", v1beta1.AnnotationFollowMax, "1"), []v1beta1.CIDR{"10.10.0.0/24", "10.65.0.0/16"}, "10.65.0.0/16", "10.10.0.0/24 overlaps Network liqo/pod-cidr"},
		{"local pods", allowed("0.0.0.0/0"), []v1beta1.CIDR{"10.10.128.0/24"}, "", "overlaps Network liqo/pod-cidr (10.10.0.0/16)"},
		{"Services", allowed("0.0.0.0/0"), []v1beta1.CIDR{"10.96.0.0/12"}, "", "overlaps Network liqo/service-cidr"},
		{"the internal CIDR", allowed("0.0.0.0/0"), []v1beta1.CIDR{"10.80.1.0/24"}, "", "overlaps Network liqo/internal-cidr"},
		{"reserved", allowed("0.0.0.0/0"), []v1beta1.CIDR{"172.30.1.0/24"}, "", "overlaps Network liqo/reserved"},
		{"a node", allowed("0.0.0.0/0"), []v1beta1.CIDR{"172.18.1.0/24"}, "", "overlaps an address of Node node-1"},
		{"the API server", allowed("0.0.0.0/0"), []v1beta1.CIDR{"192.0.2.0/24"}, "", "overlaps the API server (192.0.2.1)"},
		{"another peer", allowed("0.0.0.0/0"), []v1beta1.CIDR{"10.30.7.0/24"}, "", "overlaps the network of cluster paris (10.30.0.0/16)"},
		{"nobody's", allowed("0.0.0.0/0"), []v1beta1.CIDR{"169.254.18.0/24", "0.0.0.0/0"}, "", "169.254.18.0/24 overlaps 169.254.0.0/16, where no pod"},
		{"its own", allowed("0.0.0.0/0"), []v1beta1.CIDR{"10.20.1.0/24"}, "", "overlaps spec.remote.cidr.pod[0] 10.20.0.0/16"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w, tells := following(t, tt.annotations)
			w.network(v1beta1.NetworkTypeReserved, "172.30.0.0/16")
			w.namespace("paris")
			w.configure("paris", "10.30.0.0/16", "10.73.0.0/16")
			w.yaml(`
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {namespace: default, name: kubernetes, labels: {kubernetes.io/service-name: kubernetes}}
addressType: IPv4
endpoints: [{addresses: [192.0.2.1]}]
`)
			w.settle()
			tells(tt.tells...)
			r := w.settle()
			got, refused := follows(w)
			assert.Check(t, is.Equal(got, tt.want))
			assert.Check(t, is.Contains(refused, tt.refused))
			assert.Check(t, is.Equal(refused == "", tt.refused == ""), refused)
			assert.Check(t, is.Equal(len(warnings(r, "Configuration", "liqo-tenant-rome", "rome")) > 0, refused != ""))
			c := get[*v1beta1.Configuration](w, "liqo-tenant-rome", "rome")
			assert.Check(t, is.DeepEqual(c.Spec.Remote.CIDR.Pod, []v1beta1.CIDR{written}))
			assert.Check(t, is.DeepEqual(c.Status.Remote.CIDR.Pod, []v1beta1.CIDR{written}))
			assert.Check(t, is.Equal(condition(t, c.Status.Conditions, v1beta1.ConditionNetworkCIDRsConfigured).Status, metav1.ConditionTrue))
			fabric := get[*v1beta1.InternalFabric](w, "liqo-tenant-rome", "rome")
			for _, text := range strings.Fields(strings.ReplaceAll(tt.want, "nothing", "")) {
				assert.Check(t, slices.Contains(fabric.Spec.RemoteCIDRs, v1beta1.CIDR(text)), "%v has no %s", fabric.Spec.RemoteCIDRs, text)
			}
			assert.Check(t, is.Equal(len(fabric.Spec.RemoteCIDRs), 2+len(strings.Fields(strings.ReplaceAll(tt.want, "nothing", "")))))
		})
	}
}

// What a peer withdraws is there for ten minutes more, and no silence and no restart of a
// peer takes anything away.
func TestFollowWithdrawn(t *testing.T) {
	w, tells := following(t, allowed("10.64.0.0/10", v1beta1.AnnotationFollowMax, "2"))
	configuration := func() *v1beta1.Configuration { return get[*v1beta1.Configuration](w, "liqo-tenant-rome", "rome") }
	var r plan.Result
	want := func(step, want string) {
		t.Helper()
		r = w.settle()
		got, _ := follows(w)
		assert.Equal(t, got, want, step)
	}
	wait := func(d time.Duration) { w.clock = w.clock.Add(d) }
	tells("10.20.0.0/16", "10.64.0.0/16", "10.65.0.0/16")
	want("told", "10.64.0.0/16 10.65.0.0/16")
	network := get[*ipamv1alpha1.Network](w, "liqo-tenant-rome", "rome-pod-10-64-0-0-16")
	assert.Equal(t, network.Status.CIDR, v1beta1.CIDR("10.64.0.0/16"))

	get[*v1beta1.Connection](w, "liqo-tenant-rome", "gw-rome").Status.Peer = nil
	wait(time.Hour)
	want("the peer is silent", "10.64.0.0/16 10.65.0.0/16")
	assert.Assert(t, r.Due.IsZero())

	tells("10.20.0.0/16", "10.66.0.0/16", "10.65.0.0/16")
	want("one in place of another", "10.65.0.0/16 10.66.0.0/16 -10.64.0.0/16")
	end := configuration().Status.Follow.Networks[2].WithdrawnAt.Add(10 * time.Minute)
	assert.Assert(t, r.Due.Equal(end), "%v", r.Due)
	w.clock = end.Add(-time.Second)
	want("not yet", "10.65.0.0/16 10.66.0.0/16 -10.64.0.0/16")
	tells("10.20.0.0/16", "10.64.0.0/16", "10.65.0.0/16")
	want("it has been mistaken", "10.65.0.0/16 10.64.0.0/16 -10.66.0.0/16")
	wait(10 * time.Minute)
	want("time is over", "10.65.0.0/16 10.64.0.0/16")
	assert.Assert(t, r.Due.IsZero())

	tells("10.20.0.0/16", "10.65.0.0/16")
	want("withdrawn", "10.65.0.0/16 -10.64.0.0/16")
	withdrawn := configuration().Status.Follow.Networks[1].WithdrawnAt
	configuration().Annotations[v1beta1.AnnotationForget] = withdrawn.Add(-time.Second).UTC().Format(time.RFC3339)
	want("an earlier command", "10.65.0.0/16 -10.64.0.0/16")
	configuration().Annotations[v1beta1.AnnotationForget] = withdrawn.UTC().Format(time.RFC3339)
	want("a command", "10.65.0.0/16")
	_, there := w.objects[key("Network", "liqo-tenant-rome", "rome-pod-10-64-0-0-16")]
	assert.Assert(t, !there)

	wait(time.Minute)
	tells("10.20.0.0/16", "10.64.0.0/15")
	want("a wider one in its place", "10.64.0.0/15")
	wait(time.Minute)
	tells("10.20.0.0/16")
	want("withdrawn", "-10.64.0.0/15")
	configuration().Generation++
	want("the spec is another one", "")

	for i := range 9 { // each time something else
		wait(time.Second)
		tells("10.20.0.0/16", v1beta1.CIDR(fmt.Sprintf("10.%d.0.0/16", 100+i)))
		w.settle()
	}
	want("the newest two of those withdrawn", "10.108.0.0/16 -10.107.0.0/16 -10.106.0.0/16")

	configuration().Annotations[v1beta1.AnnotationFollow] = "10.64.0.0/99"
	want("a wrong annotation changes nothing", "10.108.0.0/16 -10.107.0.0/16 -10.106.0.0/16")
	assert.DeepEqual(t, warnings(r, "Configuration", "liqo-tenant-rome", "rome"), []string{plan.ReasonInvalidField +
		`: metadata.annotations[networking.liqo.io/follow]: "10.64.0.0/99" has a part "10.64.0.0/99" that is not a range: write ranges with commas between, such as 10.64.0.0/10,fd64::/16, or remove the annotation; until then cluster rome adds no networks by telling them`})
	configuration().Annotations[v1beta1.AnnotationFollow] = "10.107.0.0/16"
	want("other ranges", "-10.107.0.0/16")
	delete(configuration().Annotations, v1beta1.AnnotationFollow)
	want("not any more", "nothing")
}

// What is followed gives way also while nothing can be read of what is allowed.
func TestFollowUnread(t *testing.T) {
	w, tells := following(t, allowed("10.64.0.0/10"))
	tells("10.20.0.0/16", "10.64.0.0/16", "10.65.0.0/16", "10.66.0.0/16")
	w.settle()
	c := get[*v1beta1.Configuration](w, "liqo-tenant-rome", "rome")
	c.Annotations[v1beta1.AnnotationFollow] = "all"
	c.Spec.Remote.CIDR.Pod = append(c.Spec.Remote.CIDR.Pod, "10.64.0.0/16")
	c.Generation++
	more := get[*ipamv1alpha1.Network](w, "liqo", v1beta1.NetworkTypePod).DeepCopy()
	more.Name, more.Spec.CIDR, more.Status = "pod-cidr-2", "10.65.128.0/17", ipamv1alpha1.NetworkStatus{}
	w.create(more)
	w.settle()
	got, _ := follows(w)
	assert.Equal(t, got, "10.66.0.0/16")
	assert.DeepEqual(t, get[*v1beta1.Configuration](w, "liqo-tenant-rome", "rome").Status.Remote.CIDR.Pod, []v1beta1.CIDR{"10.20.0.0/16", "10.64.0.0/16"})
}

// While this cluster does not know its own networks, all that is followed stays.
func TestFollowWaits(t *testing.T) {
	w, tells := following(t, allowed("10.64.0.0/10"))
	tells("10.20.0.0/16", "10.64.0.0/16", "10.65.0.0/16")
	w.settle()
	tells("10.20.0.0/16", "10.64.0.0/16")
	w.settle()
	internal := get[*ipamv1alpha1.Network](w, "liqo", v1beta1.NetworkTypeInternal).DeepCopy()
	w.remove("Network", "liqo", v1beta1.NetworkTypeInternal)
	w.clock = w.clock.Add(time.Hour)
	w.settle()
	got, _ := follows(w)
	assert.Equal(t, got, "10.64.0.0/16 -10.65.0.0/16")
	get[*ipamv1alpha1.Network](w, "liqo-tenant-rome", "rome-pod-10-64-0-0-16")
	w.create(internal)
	w.settle()
	got, _ = follows(w)
	assert.Equal(t, got, "10.64.0.0/16")
}

// A network of this cluster's own that comes later takes the place of one that is followed.
func TestFollowGivesWay(t *testing.T) {
	w, tells := following(t, allowed("10.64.0.0/10"))
	tells("10.20.0.0/16", "10.64.0.0/16")
	w.settle()
	more := get[*ipamv1alpha1.Network](w, "liqo", v1beta1.NetworkTypePod).DeepCopy()
	more.Name, more.Spec.CIDR, more.Status = "pod-cidr-2", "10.64.128.0/17", ipamv1alpha1.NetworkStatus{}
	w.create(more)
	w.settle()
	got, refused := follows(w)
	assert.Equal(t, got, "")
	assert.Assert(t, is.Contains(refused, "10.64.0.0/16 overlaps Network liqo/pod-cidr-2"))
	// And the gateway tells the peer of it.
	assert.DeepEqual(t, get[*v1beta1.Configuration](w, "liqo-tenant-rome", "rome").Status.Local.CIDR.Pod, []v1beta1.CIDR{"10.10.0.0/16", "10.64.128.0/17"})
	assert.DeepEqual(t, get[*v1beta1.Configuration](w, "liqo-tenant-rome", "rome").Spec.Local.CIDR.Pod, []v1beta1.CIDR{"10.10.0.0/16"})
}

// More networks than a gateway can tell are not told, and that is said.
func TestTooManyToTell(t *testing.T) {
	w := peered(t)
	for i := range exchange.MaxNetworks {
		more := get[*ipamv1alpha1.Network](w, "liqo", v1beta1.NetworkTypePod).DeepCopy()
		more.Name, more.Spec.CIDR, more.Status = fmt.Sprint("pod-cidr-", i), v1beta1.CIDR(fmt.Sprintf("10.65.%d.0/24", i)), ipamv1alpha1.NetworkStatus{}
		if i == exchange.MaxNetworks-1 {
			r := w.settle()
			assert.Assert(t, !slices.ContainsFunc(r.Events, func(e plan.Event) bool { return e.Reason == plan.ReasonNotTold }))
		}
		w.create(more)
	}
	r := w.settle()
	i := slices.IndexFunc(r.Events, func(e plan.Event) bool { return e.Reason == plan.ReasonNotTold })
	assert.Assert(t, i >= 0, "%v", r.Events)
	assert.Assert(t, is.Contains(r.Events[i].Message, "status.local.cidr.pod: has 33 networks; it can have 32, so the gateway tells cluster rome none of them"))
}

// TestFollowKeepsOff: a peer can't take over single addresses that this cluster has, or reaches
// by another way, by telling a network around them.
func TestFollowKeepsOff(t *testing.T) {
	w, tells := following(t, allowed("0.0.0.0/0"))
	w.namespace("paris")
	w.configure("paris", "10.30.0.0/16", "10.73.0.0/16")
	w.client("paris").Spec.Endpoint.Addresses = []string{"203.0.113.7"}
	w.ip("nas", "192.168.7.7", false)
	w.settle()
	get[*v1beta1.InternalNode](w, "", "node-1").Status.Addresses = []v1beta1.IP{"192.168.50.1"}
	for _, tt := range []struct{ tells, refused string }{
		{"192.168.50.0/24", "overlaps an address of node node-1 (192.168.50.1)"},
		{"192.168.7.0/24", "overlaps spec.ip of IP default/nas (192.168.7.7)"},
		{"203.0.113.0/24", "overlaps the endpoint of cluster paris (203.0.113.7)"},
		{"192.168.60.0/24", ""},
	} {
		tells(v1beta1.CIDR(tt.tells))
		w.settle()
		got, refused := follows(w)
		assert.Check(t, is.Contains(refused, tt.refused))
		assert.Check(t, is.Equal(strings.Contains(got, tt.tells), tt.refused == ""), got)
	}
}
