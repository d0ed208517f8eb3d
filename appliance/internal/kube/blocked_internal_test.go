package kube

import (
	"testing"

	"gotest.tools/v3/assert"
	corev1 "k8s.io/api/core/v1"
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

// Neither has a ConfigMap a generation.
func TestBlockedKeysMatter(t *testing.T) {
	of := func(data, annotations map[string]string) *corev1.ConfigMap {
		return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: v1beta1.BlockedKeysConfigMap, Annotations: annotations}, Data: data}
	}
	data := map[string]string{"01d0-fabd-251f-cbbe": "by anna", "rome": ""}
	assert.Assert(t, matters(of(nil, nil), of(data, nil)))
	assert.Assert(t, matters(of(data, nil), of(nil, nil)))
	assert.Assert(t, !matters(of(data, nil), of(data, map[string]string{"other": "x"})))
	keys, invalid := BlockedKeys(of(data, nil))
	assert.Equal(t, len(keys), 1)
	assert.Equal(t, keys[0].Fingerprint.String()+" "+keys[0].Why, "01d0-fabd-251f-cbbe by anna")
	assert.Equal(t, len(invalid), 1)
}
