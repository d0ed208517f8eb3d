package v1beta1

import (
	"bytes"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// PublicKeySpec holds a key.
type PublicKeySpec struct {
	// PublicKey of the remote gateway, 32 bytes.
	// +optional
	PublicKey []byte `json:"publicKey,omitempty"`
}

// LearnedKey is what the gateways have agreed on since somebody wrote the key (see
// [PublicKey.Current]).
type LearnedKey struct {
	// ObservedGeneration of the PublicKey, for which it counts in place of the spec.
	ObservedGeneration int64 `json:"observedGeneration"`
	// PublicKey of the remote gateway, 32 bytes.
	PublicKey []byte `json:"publicKey"`
	// PresharedKey is the fingerprint of the key that both gateways have besides: 16
	// hexadecimal digits of its SHA-256. Empty: they have none.
	// +optional
	PresharedKey string `json:"presharedKey,omitempty"`
}

// PublicKeyStatus says whether the key is of use.
type PublicKeyStatus struct {
	// Learned is the key in use, where it is not that of the spec any more.
	// +optional
	Learned *LearnedKey `json:"learned,omitempty"`
	// Conditions of the key.
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// PublicKey is the public key of the gateway of a remote cluster.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:path=publickeies,categories=liqo,shortName=pk;pkies;pkey
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type PublicKey struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   PublicKeySpec   `json:"spec,omitempty"`
	Status PublicKeyStatus `json:"status,omitempty"`
}

// Current returns the key of the remote gateway, and the fingerprint of the pre-shared one,
// which is empty where the peering has none. What the gateways have agreed on (status.learned)
// counts until somebody writes another key into the spec. The same key in the spec is no other
// one: that is what connecting the clusters again writes. A pre-shared key that was agreed on
// counts on, for it is in the Secrets of both gateways until they agree on the next. learned
// reports whether anything of status.learned counts.
func (k *PublicKey) Current() (key []byte, presharedKey string, learned bool) {
	l := k.Status.Learned
	switch {
	case l != nil && (l.ObservedGeneration == k.Generation || bytes.Equal(l.PublicKey, k.Spec.PublicKey)):
		return l.PublicKey, l.PresharedKey, true
	case l != nil && l.PresharedKey != "":
		return k.Spec.PublicKey, l.PresharedKey, true
	}
	return k.Spec.PublicKey, k.Annotations[AnnotationPresharedKey], false
}

// PublicKeyList is a list of PublicKeys.
//
// +kubebuilder:object:root=true
type PublicKeyList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []PublicKey `json:"items"`
}
