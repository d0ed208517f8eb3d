package kube

import (
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/isthmus-net/isthmus/appliance/cluster"
)

// BlockedKeys reads the ConfigMap of the keys that are blocked. One on its way out counts
// until it is gone.
func BlockedKeys(o *corev1.ConfigMap) (cluster.BlockedKeys, []cluster.InvalidError) {
	by := metaOf(o, corev1.SchemeGroupVersion, "ConfigMap").Ref
	var out cluster.BlockedKeys
	var invalid []cluster.InvalidError
	for _, text := range slices.Sorted(maps.Keys(o.Data)) {
		f, err := cluster.ParseFingerprint(text)
		if err != nil {
			invalid = append(invalid, cluster.InvalidError{Object: by, Field: "data", Value: text, Reason: err.Error()})
			continue
		}
		out = append(out, cluster.BlockedKey{Fingerprint: f, By: by, Why: o.Data[text]})
	}
	return out, invalid
}
