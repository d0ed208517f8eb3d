// Package k8s tests the manifests below it: the chart and the CRDs. There is no
// Go code to import here.
package k8s
