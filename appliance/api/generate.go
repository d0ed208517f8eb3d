// Package api has nothing but the commands that generate the deep copies and
// the CRDs from the types below it: go generate ./appliance/api
package api

//go:generate go run sigs.k8s.io/controller-tools/cmd/controller-gen@v0.21.0 object crd:generateEmbeddedObjectMeta=true paths=./... output:crd:dir=../../k8s/crds
//go:generate go run ../internal/crdgen ../../k8s/crds
