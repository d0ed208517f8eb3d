// Package v1alpha1 has the one kind of net.liqo.io/v1alpha1 that is still
// read: the TunnelEndpoint, in which older installations keep everything about
// a peering. It holds types only.
//
// +kubebuilder:object:generate=true
// +groupName=net.liqo.io
package v1alpha1
