package cli

import (
	"testing"
	"time"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/internal/peer"
)

func TestFollowFlags(t *testing.T) {
	for _, tt := range []struct {
		name string
		f    follow
		want string // the error; empty: none
	}{
		{"to look", follow{}, ""},
		{"ranges", follow{Follow: peer.Follow{Ranges: []string{"10.64.0.0/10", "fd64::/16"}, Max: 2}}, ""},
		{"none", follow{none: true}, ""},
		{"host bits", follow{Follow: peer.Follow{Ranges: []string{"10.64.0.1/10"}}}, `--range "10.64.0.1/10" is not a range`},
		{"mapped", follow{Follow: peer.Follow{Ranges: []string{"::ffff:10.64.0.0/112"}}}, `is not a range`},
		{"too many", follow{Follow: peer.Follow{Ranges: []string{"10.64.0.0/10"}, Max: 65}}, "--max 65: write how many networks the peer may add, 1 to 64"},
		{"negative", follow{Follow: peer.Follow{Ranges: []string{"10.64.0.0/10"}, Max: -1}}, "--max -1"},
		{"no range", follow{Follow: peer.Follow{Max: 1}}, "give --range"},
		{"two things", follow{none: true, forget: true}, "give --range"},
		{"all of it", follow{none: true, forget: true, Follow: peer.Follow{Ranges: []string{"10.64.0.0/10"}}}, "give --range"},
	} {
		err := tt.f.check()
		if tt.want == "" {
			assert.Check(t, err, tt.name)
			continue
		}
		assert.Check(t, is.ErrorContains(err, tt.want), tt.name)
	}
}

func TestFollowChange(t *testing.T) {
	at := func(second int) *metav1.Time {
		return &metav1.Time{Time: time.Date(2026, 3, 14, 12, 0, second, 0, time.UTC)}
	}
	status := &v1beta1.ConfigurationFollow{
		Networks: []v1beta1.FollowedNetwork{
			{Type: "pod", CIDR: "10.64.0.0/16"}, {Type: "pod", CIDR: "10.65.0.0/16", WithdrawnAt: at(7)}, {Type: "pod", CIDR: "10.66.0.0/16", WithdrawnAt: at(5)},
		},
		Refused: []v1beta1.RefusedNetwork{{CIDR: "10.0.0.0/16", Message: "overlaps Network liqo/pod-cidr (10.0.0.0/16)"}},
	}
	some := map[string]string{v1beta1.AnnotationFollow: "10.64.0.0/10", "other": "x"}
	for _, tt := range []struct {
		name     string
		f        follow
		has      map[string]string
		want     map[string]string
		changed  bool
		contains string
	}{
		{"ranges", follow{Follow: peer.Follow{Ranges: []string{"10.64.0.0/10", "10.32.0.0/16"}, Max: 2}}, nil,
			map[string]string{v1beta1.AnnotationFollow: "10.64.0.0/10,10.32.0.0/16", v1beta1.AnnotationFollowMax: "2"}, true, "rome may add 2 networks in 10.64.0.0/10,10.32.0.0/16 by telling them.\n"},
		{"the same again", follow{Follow: peer.Follow{Ranges: []string{"10.64.0.0/10"}}}, some, some, false, "rome may add 4 networks in 10.64.0.0/10"},
		{"without a number, which was another one", follow{Follow: peer.Follow{Ranges: []string{"10.64.0.0/10"}}},
			map[string]string{v1beta1.AnnotationFollow: "10.64.0.0/10", v1beta1.AnnotationFollowMax: "64"}, map[string]string{v1beta1.AnnotationFollow: "10.64.0.0/10"}, true, "rome may add 4 networks"},
		{"none", follow{none: true}, some, map[string]string{"other": "x"}, true, "rome adds no networks by telling them."},
		{"none of none", follow{none: true}, nil, nil, false, "rome adds no networks"},
		{"forget", follow{forget: true}, some, map[string]string{v1beta1.AnnotationFollow: "10.64.0.0/10", "other": "x", v1beta1.AnnotationForget: "2026-03-14T12:00:07Z"}, true,
			"What rome has withdrawn is not followed any longer: [10.65.0.0/16 10.66.0.0/16].\n"},
		{"to look", follow{}, some, some, false,
			"rome may add 4 networks in 10.64.0.0/10 by telling them.\n  pod 10.64.0.0/16\n  pod 10.65.0.0/16, withdrawn at 2026-03-14T12:00:07Z\n  pod 10.66.0.0/16, withdrawn at 2026-03-14T12:00:05Z\n  ✗ 10.0.0.0/16 overlaps Network"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			o := &v1beta1.Configuration{Status: v1beta1.ConfigurationStatus{Follow: status}}
			for k, v := range tt.has {
				metav1.SetMetaDataAnnotation(&o.ObjectMeta, k, v)
			}
			r := followResult{ID: "rome", Was: status}
			assert.Check(t, is.Equal(tt.f.change(o, &r), tt.changed))
			assert.Check(t, is.Equal(r.Changed, tt.changed))
			assert.Check(t, is.Equal(len(o.Annotations), len(tt.want)))
			for k, v := range tt.want {
				assert.Check(t, is.Equal(o.Annotations[k], v), k)
			}
			assert.Check(t, is.Contains(tt.f.text(r), tt.contains))
		})
	}
	var r followResult
	assert.Check(t, !(&follow{forget: true}).change(&v1beta1.Configuration{}, &r))
	assert.Check(t, is.Contains((&follow{forget: true}).text(r), "has withdrawn nothing"))
}
