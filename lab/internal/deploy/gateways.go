package deploy

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	networkingv1beta1 "github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
)

// gatewaysTime is how long the controller may take to replace all gateways
// after an upgrade: it starts anew itself.
const gatewaysTime = 2 * time.Minute

// gatewayKinds are the kinds of gateways, with where they name their template.
var gatewayKinds = map[string]string{"GatewayServer": "serverTemplateRef", "GatewayClient": "clientTemplateRef"}

// waitGateways waits until the pods of every gateway of a cluster are made of
// the present template and run, and none of the old ones is left. isthmusctl
// does not: it waits for what the chart installs.
func waitGateways(ctx context.Context, cl client.Client) error {
	return poll(ctx, gatewaysTime, func(ctx context.Context) (string, error) {
		for kind, field := range gatewayKinds {
			list := newList(networkingAPI, kind)
			if err := cl.List(ctx, list); err != nil {
				return err.Error(), nil
			}
			for _, g := range list.Items {
				why, err := gatewayIsOld(ctx, cl, &g, field)
				if why != "" || err != nil {
					return why, err
				}
			}
		}
		return "", nil
	})
}

// gatewayIsOld says why a gateway's pods are not those of its template.
func gatewayIsOld(ctx context.Context, cl client.Client, g *unstructured.Unstructured, field string) (string, error) {
	ref, _, _ := unstructured.NestedStringMap(g.Object, "spec", field)
	template := newUnstructured(networkingAPI, ref["kind"])
	if err := cl.Get(ctx, client.ObjectKey{Namespace: ref["namespace"], Name: ref["name"]}, template); err != nil {
		return err.Error(), nil
	}
	var d appsv1.Deployment
	key := client.ObjectKey{Namespace: g.GetNamespace(), Name: networkingv1beta1.GatewayNamePrefix + g.GetName()}
	if err := cl.Get(ctx, key, &d); apierrors.IsNotFound(err) {
		return fmt.Sprintf("there is no Deployment %s", key), nil
	} else if err != nil {
		return err.Error(), nil
	}
	if why := differs(template, &d); why != "" {
		return fmt.Sprintf("Deployment %s %s", key, why), nil
	}
	want := int32(1)
	if d.Spec.Replicas != nil {
		want = *d.Spec.Replicas
	}
	st := d.Status
	if st.ObservedGeneration < d.Generation || st.UpdatedReplicas < want || st.AvailableReplicas < want || st.Replicas > want || st.TerminatingReplicas != nil && *st.TerminatingReplicas > 0 {
		return fmt.Sprintf("Deployment %s: %d of %d pods are new, %d of them available, %d there", key, st.UpdatedReplicas, want, st.AvailableReplicas, st.Replicas), nil
	}
	return "", nil
}

// differs says what of a gateway's containers is not as in its template: the
// image and the arguments. What the controller fills in is not compared.
func differs(template *unstructured.Unstructured, d *appsv1.Deployment) string {
	containers, found, err := unstructured.NestedSlice(template.Object, "spec", "template", "spec", "deployment", "spec", "template", "spec", "containers")
	if !found || err != nil || len(containers) == 0 {
		return "can't be compared: its template has no containers"
	}
	for _, c := range containers {
		want, _ := c.(map[string]any)
		name, image := want["name"], want["image"]
		i := slices.IndexFunc(d.Spec.Template.Spec.Containers, func(have corev1.Container) bool { return have.Name == name })
		if i < 0 {
			return fmt.Sprintf("has no container %v", name)
		}
		have := d.Spec.Template.Spec.Containers[i]
		if have.Image != image {
			return fmt.Sprintf("runs %s, not %v", have.Image, image)
		}
		args, _, _ := unstructured.NestedStringSlice(want, "args")
		for _, arg := range args {
			if !strings.Contains(arg, "{{") && !slices.Contains(have.Args, arg) {
				return "lacks the argument " + arg
			}
		}
	}
	return ""
}
