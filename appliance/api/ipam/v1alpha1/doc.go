// Package v1alpha1 has the kinds of ipam.liqo.io/v1alpha1: which networks and
// addresses are in use. It holds types only.
//
// +kubebuilder:object:generate=true
// +groupName=ipam.liqo.io
package v1alpha1
