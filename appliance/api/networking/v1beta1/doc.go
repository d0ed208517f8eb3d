// Package v1beta1 has the kinds of networking.liqo.io/v1beta1: what connects
// a cluster to its peers, from the networks of the remote cluster down to the
// routes and firewall tables of single hosts. It holds types only; the CRDs in
// k8s/crds and the deep copies are generated from it.
//
// +kubebuilder:object:generate=true
// +groupName=networking.liqo.io
package v1beta1
