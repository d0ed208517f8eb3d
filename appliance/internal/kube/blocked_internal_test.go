package kube

import (
	"testing"

	"gotest.tools/v3/assert"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v1beta1 "github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
)

// A block changes neither the generation nor the status, and has to wake the gateway.
func TestBlockMatters(t *testing.T) {
	of := func(annotations map[string]string) *v1beta1.Configuration {
		return &v1beta1.Configuration{ObjectMeta: metav1.ObjectMeta{Name: "rome", Annotations: annotations}}
	}
	empty, text := map[string]string{v1beta1.AnnotationBlocked: ""}, map[string]string{v1beta1.AnnotationBlocked: "by milan"}
	for _, tt := range []struct {
		old, updated map[string]string
		want         bool
	}{
		{nil, empty, true},
		{empty, nil, true},
		{empty, text, true},
		{text, text, false},
		{nil, map[string]string{"other": "x"}, false},
	} {
		assert.Equal(t, matters(of(tt.old), of(tt.updated)), tt.want, "%v %v", tt.old, tt.updated)
	}
	for _, annotations := range []map[string]string{nil, empty, text} {
		c, _ := Configuration(of(annotations))
		assert.Equal(t, c.Blocked, annotations != nil)
		assert.Equal(t, c.Block, annotations[v1beta1.AnnotationBlocked])
	}
}
