package controllers

import (
	"context"
	"testing"

	"gotest.tools/v3/assert"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// pods is what informers have of pods, by name.
type pods map[string]metav1.ObjectMeta

func (p pods) Get(_ context.Context, key client.ObjectKey, into client.Object, _ ...client.GetOption) error {
	meta, ok := p[key.Name]
	if !ok {
		return apierrors.NewNotFound(corev1.Resource("pods"), key.Name)
	}
	into.(*corev1.Pod).ObjectMeta = meta
	return nil
}

func (pods) List(context.Context, client.ObjectList, ...client.ListOption) error { return nil }

// TestSeen: when the informers have seen a write. What somebody else made and
// is not there any more needs not be waited for; what was just created does.
func TestSeen(t *testing.T) {
	version := func(v string) *corev1.Pod { return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{ResourceVersion: v}} }
	now := metav1.Now()
	for _, tc := range []struct {
		name  string
		write func(w *writes, key objectKey)
		have  pods
		want  bool
	}{
		{"created, not there yet", func(w *writes, key objectKey) { w.expect(clientgoscheme.Scheme, key, version("7")) }, pods{}, false},
		{"created and there", func(w *writes, key objectKey) { w.expect(clientgoscheme.Scheme, key, version("7")) }, pods{"a": {ResourceVersion: "7"}}, true},
		{"an older version", func(w *writes, key objectKey) { w.expect(clientgoscheme.Scheme, key, version("10")) }, pods{"a": {ResourceVersion: "9"}}, false},
		{"somebody else's, older", func(w *writes, key objectKey) { w.expectOthers(clientgoscheme.Scheme, key, version("10")) }, pods{"a": {ResourceVersion: "9"}}, false},
		{"somebody else's, seen", func(w *writes, key objectKey) { w.expectOthers(clientgoscheme.Scheme, key, version("10")) }, pods{"a": {ResourceVersion: "11"}}, true},
		{"somebody else's, deleted since", func(w *writes, key objectKey) { w.expectOthers(clientgoscheme.Scheme, key, version("10")) }, pods{}, true},
		{"created, and deleted by somebody since", func(w *writes, key objectKey) {
			w.expect(clientgoscheme.Scheme, key, version("7"))
			w.deleted(key, "8")
		}, pods{}, true},
		{"made again after somebody had deleted it", func(w *writes, key objectKey) {
			w.expect(clientgoscheme.Scheme, key, version("7"))
			w.deleted(key, "6")
		}, pods{}, false},
		{"one of another name deleted", func(w *writes, key objectKey) {
			w.expect(clientgoscheme.Scheme, key, version("7"))
			key.Name = "b"
			w.deleted(key, "8")
		}, pods{}, false},
		{"deleted, still there", func(w *writes, key objectKey) { w.expectGone(clientgoscheme.Scheme, key, "x") }, pods{"a": {UID: "x"}}, false},
		{"deleted, ends", func(w *writes, key objectKey) { w.expectGone(clientgoscheme.Scheme, key, "x") }, pods{"a": {UID: "x", DeletionTimestamp: &now}}, true},
		{"deleted and made again", func(w *writes, key objectKey) { w.expectGone(clientgoscheme.Scheme, key, "x") }, pods{"a": {UID: types.UID("y")}}, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var w writes
			key := objectKey{corev1.SchemeGroupVersion.WithKind("Pod"), client.ObjectKey{Namespace: "liqo", Name: "a"}}
			tc.write(&w, key)
			assert.Equal(t, w.allSeen(t.Context(), tc.have), tc.want)
		})
	}
}
