package kube

import (
	"bytes"
	"testing"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v1beta1 "github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
)

// What was learned counts until somebody writes another key, and wakes who uses it.
func TestLearnedKey(t *testing.T) {
	first, second, third := bytes.Repeat([]byte{1}, keySize), bytes.Repeat([]byte{2}, keySize), bytes.Repeat([]byte{3}, keySize)
	of := func(spec []byte, l *v1beta1.LearnedKey) *v1beta1.PublicKey {
		return &v1beta1.PublicKey{
			ObjectMeta: metav1.ObjectMeta{Generation: 2, Annotations: map[string]string{v1beta1.AnnotationPresharedKey: "written"}},
			Spec:       v1beta1.PublicKeySpec{PublicKey: spec}, Status: v1beta1.PublicKeyStatus{Learned: l},
		}
	}
	learned := func(generation int64) *v1beta1.LearnedKey {
		return &v1beta1.LearnedKey{ObservedGeneration: generation, PublicKey: second, PresharedKey: "agreed on"}
	}
	for _, c := range []struct {
		name   string
		key    *v1beta1.PublicKey
		want   []byte
		shared string
	}{
		{"nothing was learned", of(first, nil), first, "written"},
		{"of this generation", of(first, learned(2)), second, "agreed on"},
		{"somebody has written another key", of(third, learned(1)), third, "agreed on"},
		{"and nothing else was agreed on", of(third, &v1beta1.LearnedKey{ObservedGeneration: 1, PublicKey: second}), third, "written"},
		{"somebody has written the same", of(second, learned(1)), second, "agreed on"},
	} {
		k, invalid := PublicKey(c.key)
		assert.Check(t, is.Len(invalid, 0), c.name)
		assert.Check(t, is.DeepEqual(k.Key, c.want), c.name)
		assert.Check(t, is.Equal(k.PresharedKey, c.shared), c.name)
		assert.Check(t, is.Equal(k.Learned, c.shared == "agreed on"), c.name)
	}
	assert.Check(t, matters(of(first, nil), of(first, learned(2))))
	assert.Check(t, !matters(of(first, learned(2)), of(first, learned(2))))
}
