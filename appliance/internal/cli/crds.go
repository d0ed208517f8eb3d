package cli

import (
	"context"
	"errors"
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
	for _, d := range crds {
		var have apiextensionsv1.CustomResourceDefinition
		err := wait.PollUntilContextTimeout(ctx, 100*time.Millisecond, time.Minute, true, func(ctx context.Context) (bool, error) {
			if err := c.client.Get(ctx, client.ObjectKeyFromObject(d.object), &have); err != nil {
				return false, err
			}
			return slices.ContainsFunc(have.Status.Conditions, func(cond apiextensionsv1.CustomResourceDefinitionCondition) bool {
				return cond.Type == apiextensionsv1.Established && cond.Status == apiextensionsv1.ConditionTrue
			}), nil
		})
		if err != nil {
			return fmt.Errorf("CRD %s is not established: %w", d.object.GetName(), err)
		}
		if err := c.untilListed(ctx, &have); err != nil {
			return err
		}
	}
	return nil
}

// untilListed waits until the API server lists a kind: Helm finds kinds by its
// lists, which come a moment after the CRD is established.
func (c *cluster) untilListed(ctx context.Context, crd *apiextensionsv1.CustomResourceDefinition) error {
	for _, v := range crd.Spec.Versions {
		if !v.Served {
			continue
		}
		gv := schema.GroupVersion{Group: crd.Spec.Group, Version: v.Name}
		var last error
		err := wait.PollUntilContextTimeout(ctx, 100*time.Millisecond, time.Minute, true, func(context.Context) (bool, error) {
			list, err := c.clients.Discovery().ServerResourcesForGroupVersion(gv.String())
			if last = err; err != nil {
				return false, nil
			}
			return slices.ContainsFunc(list.APIResources, func(r metav1.APIResource) bool { return r.Name == crd.Spec.Names.Plural }), nil
		})
		if err != nil {
			return fmt.Errorf("the API server does not list %s of %s: %w", crd.Spec.Names.Plural, gv, errors.Join(err, last))
		}
	}
	return nil
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
