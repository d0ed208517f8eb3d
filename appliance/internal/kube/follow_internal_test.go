package kube

import (
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v1beta1 "github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
)

var cmpPrefix = cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })

// What is wrong with the annotations is told, and does not end the peering.
func TestFollowAnnotations(t *testing.T) {
	ranges := []netip.Prefix{netip.MustParsePrefix("10.64.0.0/10"), netip.MustParsePrefix("fd64::/16")}
	for _, tt := range []struct {
		name             string
		follow, max, end string // -: not there
		want             *cluster.Follow
		problem          string
	}{
		{"none", "-", "3", "x", nil, ""},
		{"ranges", "10.64.0.0/10, fd64::/16", "-", "-", &cluster.Follow{Ranges: ranges, Max: v1beta1.DefaultFollowMax}, ""},
		{"all", "10.64.0.0/10,fd64::/16", "64", "2026-01-31T12:00:00Z", &cluster.Follow{Ranges: ranges, Max: 64, Forget: time.Date(2026, 1, 31, 12, 0, 0, 0, time.UTC)}, ""},
		{"empty", "", "-", "-", nil, `metadata.annotations[networking.liqo.io/follow]: "" has a part "" that is not a range: write ranges with commas between`},
		{"host bits", "10.64.0.0/10,10.64.0.1/16", "-", "-", nil, `has a part "10.64.0.1/16" that is not a range`},
		{"mapped", "::ffff:10.64.0.0/112", "-", "-", nil, "is not a range"},
		{"no number", "10.64.0.0/10", "many", "-", nil, `metadata.annotations[networking.liqo.io/follow-max]: "many" is not how many networks the peer may add: write 1 to 64`},
		{"nought", "10.64.0.0/10", "0", "-", nil, "write 1 to 64"},
		{"too many", "10.64.0.0/10", "65", "-", nil, "write 1 to 64"},
		{"no time", "10.64.0.0/10", "-", "yesterday", nil, `metadata.annotations[networking.liqo.io/forget-withdrawn-by]: "yesterday" is not a time`},
	} {
		o := &v1beta1.Configuration{}
		for k, v := range map[string]string{v1beta1.AnnotationFollow: tt.follow, v1beta1.AnnotationFollowMax: tt.max, v1beta1.AnnotationForget: tt.end} {
			if v != "-" {
				metav1.SetMetaDataAnnotation(&o.ObjectMeta, k, v)
			}
		}
		c, invalid := Configuration(o)
		assert.Check(t, is.Len(invalid, 0), tt.name)
		if tt.problem == "" {
			assert.Check(t, is.DeepEqual(c.Follow, tt.want, cmpPrefix), tt.name)
			continue
		}
		assert.Check(t, c.Follow != nil && len(c.Follow.Ranges) == 0, tt.name)
		assert.Check(t, is.Contains(c.Follow.Problem, tt.problem), tt.name)
	}
}

// What has come of them counts for the gateway, and wakes it although the spec is the same.
func TestFollowed(t *testing.T) {
	at := metav1.NewTime(time.Date(2026, 1, 31, 12, 0, 0, 0, time.UTC))
	was := &v1beta1.Configuration{Spec: v1beta1.ConfigurationSpec{Remote: v1beta1.ClusterConfig{CIDR: v1beta1.ClusterConfigCIDR{
		Pod: []v1beta1.CIDR{"10.1.0.0/16"}, External: []v1beta1.CIDR{"10.70.0.0/16"},
	}}}}
	o := was.DeepCopy()
	o.Status.Follow = &v1beta1.ConfigurationFollow{
		Networks: []v1beta1.FollowedNetwork{
			{Type: "external", CIDR: "10.71.0.0/16", ObservedGeneration: 3},
			{Type: "pod", CIDR: "10.64.0.0/16", WithdrawnAt: &at},
			{Type: "pod", CIDR: "x"},
		},
		Refused: []v1beta1.RefusedNetwork{{CIDR: "10.0.0.0/16", Message: "overlaps"}, {CIDR: "x"}},
	}
	assert.Check(t, matters(was, o) && matters(o, was) && !matters(o, o.DeepCopy()))
	c, invalid := Configuration(o)
	assert.Check(t, is.Len(invalid, 2))
	assert.Check(t, is.DeepEqual(c.Peer(), cluster.CIDRs{
		Pod:      []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16"), netip.MustParsePrefix("10.64.0.0/16")},
		External: []netip.Prefix{netip.MustParsePrefix("10.70.0.0/16"), netip.MustParsePrefix("10.71.0.0/16")},
	}, cmpPrefix))
	assert.Check(t, is.DeepEqual(c.Remote.Pod, []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16")}, cmpPrefix))
	assert.Check(t, c.Followed[0].External && c.Followed[0].Generation == 3 && c.Followed[0].Withdrawn.IsZero())
	assert.Check(t, c.Followed[1].Withdrawn.Equal(at.Time))
	assert.Check(t, is.Equal(c.Refused[0].Why, "overlaps"))

	local := was.DeepCopy()
	local.Status.Local = &v1beta1.ClusterConfig{CIDR: v1beta1.ClusterConfigCIDR{Pod: []v1beta1.CIDR{"10.2.0.0/16"}}}
	assert.Check(t, matters(was, local))
	c, _ = Configuration(local)
	assert.Check(t, is.DeepEqual(c.Own.Pod, []netip.Prefix{netip.MustParsePrefix("10.2.0.0/16")}, cmpPrefix))
}
