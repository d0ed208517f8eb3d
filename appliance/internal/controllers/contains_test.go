package controllers

import (
	"testing"

	"gotest.tools/v3/assert"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

func TestContains(t *testing.T) {
	yes, no := true, false
	limits := func(cpu string) corev1.Container {
		return corev1.Container{Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{"cpu": resource.MustParse(cpu)}}}
	}
	security := func(privileged *bool) corev1.Container {
		return corev1.Container{SecurityContext: &corev1.SecurityContext{Privileged: privileged}}
	}
	for _, tt := range []struct {
		name       string
		live, want corev1.Container
		yes        bool
	}{
		{"filled in", corev1.Container{Name: "a", ImagePullPolicy: "Always"}, corev1.Container{Name: "a"}, true},
		{"other text", corev1.Container{Name: "a"}, corev1.Container{Name: "b"}, false},
		{"argument added", corev1.Container{Args: []string{"a", "b"}}, corev1.Container{Args: []string{"a"}}, false},
		{"arguments not planned", corev1.Container{Args: []string{"a", "b"}}, corev1.Container{}, true},
		{"quantity written otherwise", limits("0.1"), limits("100m"), true},
		{"other quantity", limits("200m"), limits("100m"), false},
		{"false is not true", security(&yes), security(&no), false},
		{"not said", security(&yes), security(nil), true},
		{"gone", security(nil), security(&no), false},
		{"structure gone", corev1.Container{}, security(&no), false},
	} {
		t.Run(tt.name, func(t *testing.T) { assert.Equal(t, contains(tt.live, tt.want), tt.yes) })
	}
}
