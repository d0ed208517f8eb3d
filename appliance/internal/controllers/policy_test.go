package controllers

import (
	"strings"
	"time"

	"gotest.tools/v3/assert"
	"gotest.tools/v3/poll"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
)

// forbidden checks that a policy refused something, with these words.
func (w *world) forbidden(err error, words, what string) {
	w.t.Helper()
	assert.Check(w.t, apierrors.IsForbidden(err) && strings.Contains(err.Error(), words), "%s: %v", what, err)
}

// inForce waits until a policy refuses something: that is a moment after it is
// there.
func (w *world) inForce(try func() error) {
	w.t.Helper()
	poll.WaitOn(w.t, func(poll.LogT) poll.Result {
		if err := try(); err == nil {
			return poll.Continue("there is no policy yet")
		}
		return poll.Success()
	}, poll.WithTimeout(waitTime), poll.WithDelay(50*time.Millisecond))
}

// testKeysOnly tries, as the controller, to write Secrets that are no keys of
// gateways.
func (w *world) testKeysOnly(own client.Client) {
	const words = "no Secrets but those with the keys of gateways"
	secret := func(name string, change func(*corev1.Secret)) *corev1.Secret {
		o := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "liqo", Name: name, Labels: map[string]string{v1beta1.LabelGatewayResource: "true"}}}
		if change != nil {
			change(o)
		}
		return o
	}
	noLabel := func(o *corev1.Secret) { o.Labels = nil }
	w.inForce(func() error { return own.Create(w.t.Context(), secret("new", noLabel), client.DryRunAll) })
	for what, change := range map[string]func(*corev1.Secret){
		"no label":    noLabel,
		"other label": func(o *corev1.Secret) { o.Labels = map[string]string{v1beta1.LabelGatewayResource: "false"} },
		"the token of a ServiceAccount": func(o *corev1.Secret) {
			o.Type, o.Annotations = corev1.SecretTypeServiceAccountToken, map[string]string{corev1.ServiceAccountNameKey: "isthmus-node"}
		},
	} {
		w.forbidden(own.Create(w.t.Context(), secret("new", change)), words, what)
	}
	others, keys := secret("others", noLabel), secret("keys", nil)
	w.create(others, keys)
	others.Labels, others.Data = map[string]string{v1beta1.LabelGatewayResource: "true"}, map[string][]byte{"password": []byte("changed")}
	w.forbidden(own.Update(w.t.Context(), others), words, "the Secret of somebody else, which gets the label")
	keys.Labels[v1beta1.LabelManagedBy] = v1beta1.ManagedBy
	assert.NilError(w.t, own.Update(w.t.Context(), keys), "keys that the user has labelled")
	w.delete(others)
	w.delete(keys)
}

// testGatewaysOnly tries, as the controller, to write and delete Deployments that
// are of no gateway, or have the rights of somebody else.
func (w *world) testGatewaysOnly(own client.Client) {
	const words, names = "no Deployments but those of gateways", "runs as the ServiceAccount of the same name"
	deployment := func(name string, change func(*appsv1.Deployment)) *appsv1.Deployment {
		labels := map[string]string{v1beta1.LabelManagedBy: v1beta1.ManagedBy}
		o := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: "liqo", Name: name, Labels: labels}}
		o.Spec.Selector = &metav1.LabelSelector{MatchLabels: labels}
		o.Spec.Template.Labels = labels
		o.Spec.Template.Spec = corev1.PodSpec{ServiceAccountName: name, Containers: []corev1.Container{{Name: "gateway", Image: "isthmus:dev"}}}
		if change != nil {
			change(o)
		}
		return o
	}
	noLabel := func(o *appsv1.Deployment) { o.Labels = nil }
	w.inForce(func() error { return own.Create(w.t.Context(), deployment("gw-new", noLabel), client.DryRunAll) })
	for what, tt := range map[string]struct {
		name, words string
		change      func(*appsv1.Deployment)
	}{
		"no label":                     {"gw-new", words, noLabel},
		"the rights of somebody else":  {"gw-new", names, func(o *appsv1.Deployment) { o.Spec.Template.Spec.ServiceAccountName = "isthmus-node" }},
		"the name of somebody else":    {"isthmus-node", names, nil},
		"the rights of its namespace":  {"gw-new", names, func(o *appsv1.Deployment) { o.Spec.Template.Spec.ServiceAccountName = "" }},
		"the label of somebody else's": {"gw-new", words, func(o *appsv1.Deployment) { o.Labels[v1beta1.LabelManagedBy] = "Helm" }},
	} {
		w.forbidden(own.Create(w.t.Context(), deployment(tt.name, tt.change)), tt.words, what)
	}
	others := deployment("gw-others", noLabel)
	lost := deployment("gw-lost", func(o *appsv1.Deployment) {
		o.Labels = nil
		o.OwnerReferences = []metav1.OwnerReference{{APIVersion: v1beta1.GroupVersion.String(), Kind: "GatewayServer", Name: "lost", UID: "of-a-gateway"}}
	})
	w.create(others, lost)
	w.forbidden(own.Delete(w.t.Context(), others), words, "the Deployment of somebody else goes")
	for _, o := range []*appsv1.Deployment{others, lost} {
		o.Labels = map[string]string{v1beta1.LabelManagedBy: v1beta1.ManagedBy}
	}
	w.forbidden(own.Update(w.t.Context(), others), words, "the Deployment of somebody else, which gets the label")
	assert.NilError(w.t, own.Update(w.t.Context(), lost), "that of a gateway, which lost the label")
	assert.NilError(w.t, own.Delete(w.t.Context(), lost))
	w.delete(others)
}
