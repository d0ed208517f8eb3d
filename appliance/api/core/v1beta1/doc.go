// Package v1beta1 has the network part of core.liqo.io/v1beta1: the remote
// clusters as users see them. Fields of other modules stay untouched, so its
// objects are written by server-side apply only.
//
// +kubebuilder:object:generate=true
// +groupName=core.liqo.io
package v1beta1
