package apitest

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/lab/internal/deploy"
	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
	"gotest.tools/v3/poll"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
)

// nodeName is where the API server tells on which node a bound token's pod is.
const nodeName = "authentication.kubernetes.io/node-name"

// translationPolicy shows that nobody but the controller may say that an object
// translates the networks of a remote cluster. What has the label may be written
// otherwise, by who takes away a finalizer for one.
func translationPolicy(t *testing.T, a *api) {
	as := func(user string) dynamic.NamespaceableResourceInterface {
		rc := rest.CopyConfig(a.cp.RESTConfig())
		rc.Impersonate = rest.ImpersonationConfig{UserName: user, Groups: []string{"system:masters"}}
		c, err := dynamic.NewForConfig(rc)
		assert.NilError(t, err)
		return c.Resource(v1beta1.GroupVersion.WithResource("firewallconfigurations"))
	}
	user, controller := as("anna"), as("system:serviceaccount:liqo:isthmus-controller")
	object := func(name string, labels map[string]string) *unstructured.Unstructured {
		o := a.valid["firewallconfiguration"].DeepCopy()
		o.SetNamespace("default")
		o.SetName(name)
		o.SetLabels(labels)
		o.SetResourceVersion("")
		return o
	}
	labels := map[string]string{v1beta1.LabelPrefixTranslation: "true"}
	poll.WaitOn(t, func(poll.LogT) poll.Result {
		_, err := user.Namespace("default").Create(t.Context(), object("labelled", labels), metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		if err == nil {
			return poll.Continue("a user may still set the label")
		}
		assert.Assert(t, apierrors.IsForbidden(err), "%v", err)
		assert.Assert(t, is.Contains(err.Error(), "is for what the controller writes to translate the networks of a remote cluster; remove it"))
		return poll.Success()
	}, poll.WithTimeout(2*time.Minute))
	plain, err := user.Namespace("default").Create(t.Context(), object("plain", nil), metav1.CreateOptions{})
	assert.NilError(t, err)
	plain.SetLabels(labels)
	_, err = user.Namespace("default").Update(t.Context(), plain, metav1.UpdateOptions{})
	assert.Assert(t, apierrors.IsForbidden(err), "%v", err)
	own, err := controller.Namespace("default").Create(t.Context(), object("own", labels), metav1.CreateOptions{})
	assert.NilError(t, err)
	own.SetAnnotations(map[string]string{"changed": "by a user"})
	own, err = user.Namespace("default").Update(t.Context(), own, metav1.UpdateOptions{})
	assert.NilError(t, err)
	own.SetLabels(map[string]string{v1beta1.LabelPrefixTranslation: "false"})
	_, err = user.Namespace("default").Update(t.Context(), own, metav1.UpdateOptions{})
	assert.Assert(t, apierrors.IsForbidden(err), "%v", err)
}

// policies shows that the shipped ValidatingAdmissionPolicies hold a node to
// its own object. The node daemon's rights are those of the chart; who it is, is
// what the API server learns from a bound token.
func policies(t *testing.T, a *api) {
	_, err := a.cp.Client().CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "liqo"}}, metav1.CreateOptions{})
	assert.NilError(t, err)
	m, err := deploy.Render("../../../k8s/chart", "isthmus", "liqo", map[string]any{
		"discovery": map[string]any{"config": map[string]any{"clusterID": "milan"}},
		"ipam":      map[string]any{"podCIDRs": []any{"10.0.0.0/16"}, "serviceCIDR": "10.96.0.0/16"},
	})
	assert.NilError(t, err)
	kinds := []string{"ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding", "FirewallConfiguration", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"}
	policies := 0
	for _, o := range m.Objects {
		if !slices.Contains(kinds, o.GetKind()) {
			continue
		}
		_, err := a.create(t.Context(), o)
		assert.NilError(t, err, "%s %s", o.GetKind(), o.GetName())
		if o.GetKind() == "ValidatingAdmissionPolicy" {
			policies++
		}
	}
	assert.Assert(t, policies > 0, "the chart has no policy")
	translationPolicy(t, a)

	a.store(t, a.valid["internalnode"].DeepCopy()) // worker-4
	write := func(extra map[string][]string) error {
		rc := rest.CopyConfig(a.cp.RESTConfig())
		rc.Impersonate = rest.ImpersonationConfig{
			UserName: "system:serviceaccount:liqo:isthmus-node",
			Groups:   []string{"system:serviceaccounts", "system:serviceaccounts:liqo", "system:authenticated"},
			Extra:    extra,
		}
		c, err := dynamic.NewForConfig(rc)
		assert.NilError(t, err)
		r, err := a.resource(a.valid["internalnode"])
		assert.NilError(t, err)
		got, err := r.Get(t.Context(), "worker-4", metav1.GetOptions{})
		assert.NilError(t, err)
		gvk := got.GroupVersionKind()
		// Nodes apply their status and may not write it otherwise.
		report := &unstructured.Unstructured{Object: map[string]any{"status": map[string]any{"kernel": time.Now().String()}}}
		report.SetGroupVersionKind(gvk)
		report.SetName(got.GetName())
		mapping, err := a.mapper.RESTMapping(gvk.GroupKind(), gvk.Version)
		assert.NilError(t, err)
		_, err = c.Resource(mapping.Resource).ApplyStatus(t.Context(), got.GetName(), report, metav1.ApplyOptions{FieldManager: "apitest", Force: true})
		return err
	}
	// A policy is in force a moment after it is created.
	const ofAnother = "a node may write the status of its own InternalNode only; this token is of node worker-5"
	poll.WaitOn(t, func(poll.LogT) poll.Result { // the API server learns of a role a moment later, too
		if err := write(map[string][]string{nodeName: {"worker-5"}}); err == nil || !strings.Contains(err.Error(), ofAnother) {
			return poll.Continue("another node: %v", err)
		}
		return poll.Success()
	}, poll.WithTimeout(2*time.Minute))
	for _, tc := range []struct {
		name  string
		extra map[string][]string
		want  string
	}{
		{"its own", map[string][]string{nodeName: {"worker-4"}}, ""},
		{"another's", map[string][]string{nodeName: {"worker-5"}}, ofAnother},
		{"a token that is not bound to a pod", nil, "this token is of no node"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			err := write(tc.extra)
			if tc.want == "" {
				assert.NilError(t, err)
				return
			}
			assert.Assert(t, apierrors.IsForbidden(err), "%v", err)
			assert.Assert(t, is.Contains(err.Error(), tc.want))
		})
	}
}
