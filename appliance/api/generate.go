// Package api has nothing but the commands that generate the deep copies and
// the CRDs from the types below it, and the roles of the chart from the markers on
// the code that needs them: go generate ./appliance/api
package api

//go:generate go run sigs.k8s.io/controller-tools/cmd/controller-gen@v0.21.0 object crd:generateEmbeddedObjectMeta=true paths=./... output:crd:dir=../../k8s/crds
//go:generate go run ../internal/crdgen ../../k8s/crds
//go:generate go run sigs.k8s.io/controller-tools/cmd/controller-gen@v0.21.0 rbac:roleName=isthmus-controller paths=../internal/controllers paths=../internal/kube paths=../internal/teardown output:rbac:dir=../../k8s/chart/rbac
