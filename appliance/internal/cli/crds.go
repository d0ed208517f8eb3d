package cli

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/discovery"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// fieldOwner is isthmusctl in the managed fields of CRDs.
const fieldOwner = client.FieldOwner("isthmusctl")

// crd returns the CRD of a document.
func (d document) crd() (*apiextensionsv1.CustomResourceDefinition, error) {
	out := &apiextensionsv1.CustomResourceDefinition{}
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(d.object.Object, out); err != nil {
		return nil, fmt.Errorf("%s: %w", d.object.GetName(), err)
	}
	return out, nil
}

// lacks returns what a CRD that is in a cluster lacks of the one that is wanted:
// a version that is not served, or a field; empty: nothing. More is no fault.
func lacks(have, want *apiextensionsv1.CustomResourceDefinition) string {
	for _, w := range want.Spec.Versions {
		i := slices.IndexFunc(have.Spec.Versions, func(h apiextensionsv1.CustomResourceDefinitionVersion) bool { return h.Name == w.Name })
		if i < 0 || !have.Spec.Versions[i].Served {
			return "the version " + w.Name
		}
		h := have.Spec.Versions[i]
		if w.Schema == nil || w.Schema.OpenAPIV3Schema == nil {
			continue
		}
		if h.Schema == nil || h.Schema.OpenAPIV3Schema == nil {
			return "a schema"
		}
		if field := lacksField(h.Schema.OpenAPIV3Schema, w.Schema.OpenAPIV3Schema); field != "" {
			return "the field " + strings.TrimPrefix(field, ".")
		}
		if w.Subresources != nil && w.Subresources.Status != nil && (h.Subresources == nil || h.Subresources.Status == nil) {
			return "the subresource status"
		}
	}
	return ""
}

// lacksField returns the first field of want that have would drop.
func lacksField(have, want *apiextensionsv1.JSONSchemaProps) string {
	if have == nil || (have.XPreserveUnknownFields != nil && *have.XPreserveUnknownFields) {
		return ""
	}
	for _, name := range slices.Sorted(maps.Keys(want.Properties)) {
		w := want.Properties[name]
		h, ok := have.Properties[name]
		if !ok {
			return "." + name
		}
		if deeper := lacksField(&h, &w); deeper != "" {
			return "." + name + deeper
		}
	}
	if want.Items != nil && want.Items.Schema != nil && have.Items != nil {
		if deeper := lacksField(have.Items.Schema, want.Items.Schema); deeper != "" {
			return "[]" + deeper
		}
	}
	return ""
}

// olderCRDs returns the problems with CRDs that are there already.
func (c *cluster) olderCRDs(ctx context.Context, crds []document, how string) ([]Problem, error) {
	var list apiextensionsv1.CustomResourceDefinitionList
	if err := c.client.List(ctx, &list); err != nil {
		if apierrors.IsForbidden(err) {
			return nil, nil // said by the check of permissions
		}
		return nil, fmt.Errorf("list CRDs: %w", err)
	}
	var out []Problem
	for _, d := range crds {
		want, err := d.crd()
		if err != nil {
			return nil, err
		}
		for _, have := range list.Items {
			if have.Name != want.Name {
				continue
			}
			if missing := lacks(&have, want); missing != "" {
				out = append(out, Problem{
					Check: "CRDs", Object: "CustomResourceDefinition " + want.Name,
					Message: "it is older than this program: it lacks " + missing, Fix: how,
				})
			}
		}
	}
	return out, nil
}

// applyCRDs makes the CRDs what this program carries along, and waits until the
// API server serves them. Objects stay.
func (c *cluster) applyCRDs(ctx context.Context, crds []document) error {
	for _, d := range crds {
		u := d.object.DeepCopy()
		if err := c.client.Apply(ctx, client.ApplyConfigurationFromUnstructured(u), fieldOwner, client.ForceOwnership); err != nil {
			return fmt.Errorf("apply CRD %s: %w", u.GetName(), err)
		}
	}
	return c.untilServed(ctx, crds)
}

// createCRDs creates the CRDs that are not there, and waits until the API server
// serves all. Those that are there stay as they are.
//
// Helm would create them, too, but reads the lists of kinds once afterwards: an
// API server that is slow has not listed all of them by then, and the
// installation ends with "no matches for kind".
func (c *cluster) createCRDs(ctx context.Context, crds []document) error {
	for _, d := range crds {
		if err := c.client.Create(ctx, d.object.DeepCopy(), fieldOwner); err != nil && !apierrors.IsAlreadyExists(err) {
			return fmt.Errorf("create CRD %s: %w", d.object.GetName(), err)
		}
	}
	return c.untilServed(ctx, crds)
}

// crdTime is how long an API server may take to serve new kinds.
const crdTime = time.Minute

// untilServed waits until all CRDs are established and the API server lists their
// kinds, which it does a moment later: Helm finds kinds by these lists.
func (c *cluster) untilServed(ctx context.Context, crds []document) error {
	missing := "no answer yet"
	err := wait.PollUntilContextTimeout(ctx, 500*time.Millisecond, crdTime, true, func(ctx context.Context) (bool, error) {
		var have apiextensionsv1.CustomResourceDefinitionList
		if err := c.client.List(ctx, &have); err != nil {
			missing = err.Error()
			return false, nil
		}
		// An error is that of an API server behind this one; the lists are there.
		_, lists, err := c.clients.Discovery().ServerGroupsAndResources()
		if err != nil && !discovery.IsGroupDiscoveryFailedError(err) {
			missing = err.Error()
			return false, nil
		}
		for _, d := range crds {
			want, err := d.crd()
			if err != nil {
				return false, err
			}
			if missing = notServed(want, have.Items, lists); missing != "" {
				return false, nil
			}
		}
		return true, nil
	})
	if wait.Interrupted(err) && ctx.Err() == nil {
		return fmt.Errorf("the API server does not serve all kinds after %v: %s", crdTime, missing)
	}
	return err
}

// notServed says what an API server with these CRDs and lists of kinds does not
// serve of a CRD yet; empty: nothing.
func notServed(want *apiextensionsv1.CustomResourceDefinition, have []apiextensionsv1.CustomResourceDefinition, lists []*metav1.APIResourceList) string {
	i := slices.IndexFunc(have, func(h apiextensionsv1.CustomResourceDefinition) bool { return h.Name == want.Name })
	if i < 0 {
		return "there is no CRD " + want.Name
	}
	if have[i].DeletionTimestamp != nil {
		return "CRD " + want.Name + " is being deleted"
	}
	established := slices.ContainsFunc(have[i].Status.Conditions, func(cond apiextensionsv1.CustomResourceDefinitionCondition) bool {
		return cond.Type == apiextensionsv1.Established && cond.Status == apiextensionsv1.ConditionTrue
	})
	if !established {
		return "CRD " + want.Name + " is not established"
	}
	for _, v := range want.Spec.Versions {
		gv := schema.GroupVersion{Group: want.Spec.Group, Version: v.Name}.String()
		listed := slices.ContainsFunc(lists, func(l *metav1.APIResourceList) bool {
			return l.GroupVersion == gv && slices.ContainsFunc(l.APIResources, func(r metav1.APIResource) bool { return r.Name == want.Spec.Names.Plural })
		})
		if v.Served && !listed {
			return fmt.Sprintf("%s of %s are not listed", want.Spec.Names.Plural, gv)
		}
	}
	return ""
}

// deleteCRDs deletes the CRDs with all their objects, and waits until they are
// gone.
func (c *cluster) deleteCRDs(ctx context.Context, crds []document) error {
	for _, d := range crds {
		if err := c.client.Delete(ctx, d.object.DeepCopy()); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("delete CRD %s: %w", d.object.GetName(), err)
		}
	}
	for _, d := range crds {
		err := wait.PollUntilContextTimeout(ctx, 100*time.Millisecond, time.Minute, true, func(ctx context.Context) (bool, error) {
			err := c.client.Get(ctx, client.ObjectKeyFromObject(d.object), &apiextensionsv1.CustomResourceDefinition{})
			return apierrors.IsNotFound(err), client.IgnoreNotFound(err)
		})
		if err != nil {
			return fmt.Errorf("CRD %s is still there: %w: an object of that kind may have a finalizer whose owner is gone (kubectl get %s -A -o yaml)", d.object.GetName(), err, d.object.GetName())
		}
	}
	return nil
}
