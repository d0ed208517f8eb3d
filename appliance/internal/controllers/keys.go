package controllers

import (
	"context"
	"fmt"

	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/plan"
)

// Of Secrets it reads and writes those with networking.liqo.io/gateway-resource
// only, of keys and of invitations, and deletes none: they go with the gateway that owns
// them.
//
// +kubebuilder:rbac:groups="",resources=secrets,verbs=create;update

// keySecret makes a Secret with a key pair exist. A key that is there is never
// touched: the peer knows its public half.
func (w *writer) keySecret(ctx context.Context, k plan.KeySecret) error {
	key := objectKey{schema.GroupVersionKind{Version: "v1", Kind: "Secret"}, client.ObjectKey{Namespace: k.Namespace, Name: k.Name}}
	if err := w.makeKeys(ctx, key, k); err != nil {
		return fmt.Errorf("%v: %w", key, err)
	}
	return nil
}

func (w *writer) makeKeys(ctx context.Context, key objectKey, k plan.KeySecret) error {
	live, err := w.live(ctx, key)
	if err != nil {
		return err
	}
	want := &corev1.Secret{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Secret"},
		ObjectMeta: metav1.ObjectMeta{Namespace: k.Namespace, Name: k.Name, Labels: k.Labels},
		Type:       corev1.SecretTypeOpaque,
	}
	if k.Owner.UID != "" {
		want.OwnerReferences = []metav1.OwnerReference{k.Owner}
	}
	if live != nil {
		return w.completeKeys(ctx, key, want, live.(*corev1.Secret))
	}
	if want.Data, err = newKeys(); err != nil {
		return err
	}
	if err := w.cache.Create(ctx, want, client.FieldOwner(name)); err != nil {
		return err
	}
	w.log.Info("created", "object", key.String())
	w.metrics.wrote(key.Kind, "create")
	w.wrote(key, want, "")
	return nil
}

// completeKeys gives keys to a Secret that has none, and labels and an owner
// to one that lost them.
func (w *writer) completeKeys(ctx context.Context, key objectKey, want, live *corev1.Secret) error {
	if live.DeletionTimestamp != nil {
		return errDeleting
	}
	private, public := live.Data[v1beta1.PrivateKeyField], live.Data[v1beta1.PublicKeyField]
	out := live.DeepCopy()
	switch {
	case len(private) == 0 && len(public) == 0:
		data, err := newKeys()
		if err != nil {
			return err
		}
		if out.Data == nil {
			out.Data = map[string][]byte{}
		}
		for field, value := range data {
			out.Data[field] = value
		}
	case len(private) == 0 || len(public) == 0:
		return fmt.Errorf("it has only one of %s and %s: write both, or remove both to have new ones made", v1beta1.PrivateKeyField, v1beta1.PublicKeyField)
	case containsAll(live.Labels, want.Labels) && ownersIncluded(want.OwnerReferences, live.OwnerReferences):
		return nil
	}
	out.Labels = over(out.Labels, want.Labels)
	if len(want.OwnerReferences) > 0 {
		out.OwnerReferences = want.OwnerReferences
	}
	if err := w.cache.Update(ctx, out, client.FieldOwner(name)); err != nil {
		return err
	}
	w.log.Info("updated", "object", key.String())
	w.metrics.wrote(key.Kind, "update")
	w.wrote(key, out, "")
	return nil
}

// newKeys returns a key pair as the fields of a Secret.
func newKeys() (map[string][]byte, error) {
	private, err := wgtypes.GeneratePrivateKey()
	if err != nil {
		return nil, fmt.Errorf("key pair: %w", err)
	}
	public := private.PublicKey()
	return map[string][]byte{v1beta1.PrivateKeyField: private[:], v1beta1.PublicKeyField: public[:]}, nil
}
