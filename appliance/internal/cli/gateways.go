package cli

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	model "github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/internal/kube"
	"github.com/isthmus-net/isthmus/appliance/internal/teardown"
	"github.com/isthmus-net/isthmus/appliance/plan"
)

// A GatewayError says which gateway is not what its template makes of it, after
// everything else of an installation runs.
type GatewayError struct {
	Gateway ref
	Waited  time.Duration // of --timeout
	Why     string
}

// Error names the gateway and what to do.
func (e *GatewayError) Error() string {
	name, namespace := e.Gateway.Name, e.Gateway.Namespace
	return fmt.Sprintf("%s %s/%s is not replaced after %v: %s; all else is installed: see kubectl get %s %s -n %s -o yaml and kubectl describe pods -n %s, "+
		"and wait again by isthmusctl upgrade, with a longer --timeout where it only takes its time",
		e.Gateway.Kind, namespace, name, e.Waited.Round(time.Second), e.Why, strings.ToLower(e.Gateway.Kind), name, namespace, namespace)
}

// A gateway is one of a peering, and what runs it.
type gateway struct {
	model.Gateway
	refused    *metav1.Condition  // what the controller says against it; nil: nothing
	held       *metav1.Condition  // why it is not replaced yet; nil: it is, or nobody says so
	deployment *appsv1.Deployment // its own; nil: there is none
	pods       []corev1.Pod       // of the Deployment
}

// idle reports whether the controller runs nothing for it, and would not because
// of any template: there are two of a peering, or its object is wrong.
func (g *gateway) idle() bool {
	return g.deployment == nil && g.refused != nil && g.refused.Reason != plan.ReasonNoTemplate && g.refused.Reason != plan.ReasonBadTemplate
}

// lag says why g is not what the present controller makes of its template;
// empty: it is, and runs.
func (g *gateway) lag(system string, templates []model.Template, controller string) string {
	why := g.behind(plan.TemplateRef(&g.Gateway, system), templates, controller)
	switch {
	case why == "":
		return g.starting()
	case g.refused != nil:
		return why + "; the controller says: " + g.refused.Message
	case g.held != nil:
		return why + "; the controller says: " + g.held.Message
	}
	return why
}

// behind says why the Deployment of g is not that of its template.
func (g *gateway) behind(from model.Ref, templates []model.Template, controller string) string {
	i := slices.IndexFunc(templates, func(t model.Template) bool {
		return t.Kind == from.Kind && t.Namespace == from.Namespace && t.Name == from.Name
	})
	switch d := g.deployment; {
	case i < 0:
		return fmt.Sprintf("there is no %s %s/%s", from.Kind, from.Namespace, from.Name)
	case d == nil:
		return fmt.Sprintf("the controller has not made Deployment %s of it yet", plan.GatewayName(g.Name))
	case d.Annotations[v1beta1.AnnotationTemplate] != plan.TemplateVersion(templates[i].Meta):
		return fmt.Sprintf("Deployment %s is not that of %s %s/%s as it is now", d.Name, from.Kind, from.Namespace, from.Name)
	case d.Annotations[v1beta1.AnnotationController] != controller:
		return fmt.Sprintf("Deployment %s is that of the controller before", d.Name)
	}
	return ""
}

// starting says why the pods of g's Deployment are not there and ready, or that
// older ones are.
func (g *gateway) starting() string {
	why := kube.DeploymentTrouble(g.deployment)
	if why == "" {
		return ""
	}
	for _, pod := range g.pods {
		if t := kube.PodTrouble(pod); t != "" {
			return fmt.Sprintf("%s: pod %s: %s", why, pod.Name, t)
		}
	}
	return why
}

// gatewayPoll is the time between two looks at all gateways.
const gatewayPoll = 500 * time.Millisecond

// awaitGateways waits until every gateway is what its template makes of it, and
// returns them. They are the controller's to replace, which learns of templates
// when Helm is through with its own.
func (c *cluster) awaitGateways(ctx context.Context, start time.Time, timeout time.Duration, p *progress) ([]ref, error) {
	begun := time.Now()
	tick := time.NewTicker(gatewayPoll)
	defer tick.Stop()
	for {
		runs, late, err := c.lookAtGateways(ctx)
		switch {
		case err != nil && (apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err)):
			return nil, fmt.Errorf("%w: ask an administrator for it, or do not wait for gateways (--wait=false)", err)
		case err == nil && late == nil:
			return runs, nil
		case time.Since(start) >= timeout && err != nil:
			return nil, fmt.Errorf("look at the gateways, after %v: %w: all else is installed; look again by isthmusctl upgrade", timeout, err)
		case time.Since(start) >= timeout:
			late.Waited = timeout
			return nil, late
		case time.Since(begun) < patience:
		case err != nil:
			p.say("look at the gateways: %v", err)
		default:
			p.say("waiting for %s %s/%s: %s", late.Gateway.Kind, late.Gateway.Namespace, late.Gateway.Name, late.Why)
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-tick.C:
		}
	}
}

// lookAtGateways returns the gateways that run, and the first that is not yet
// what its template makes of it; nil: there is none.
func (c *cluster) lookAtGateways(ctx context.Context) (runs []ref, late *GatewayError, err error) {
	list, err := c.gateways(ctx)
	if err != nil || len(list) == 0 {
		return nil, nil, err
	}
	templates, err := c.templates(ctx)
	if err != nil {
		return nil, nil, err
	}
	controller, err := c.controllerRevision(ctx)
	if err != nil {
		return nil, nil, err
	}
	for _, g := range list {
		if g.idle() {
			continue
		}
		r := ref{APIVersion: g.APIVersion, Kind: g.Kind, Namespace: g.Namespace, Name: g.Name}
		if why := g.lag(c.namespace, templates, controller); why != "" {
			return nil, &GatewayError{Gateway: r, Why: why}, nil
		}
		runs = append(runs, r)
	}
	return runs, nil, nil
}

// gateways reads all gateways of all peerings, servers first.
func (c *cluster) gateways(ctx context.Context) ([]gateway, error) {
	var servers v1beta1.GatewayServerList
	if err := c.client.List(ctx, &servers); err != nil {
		return nil, fmt.Errorf("list GatewayServers: %w", err)
	}
	var clients v1beta1.GatewayClientList
	if err := c.client.List(ctx, &clients); err != nil {
		return nil, fmt.Errorf("list GatewayClients: %w", err)
	}
	var out []gateway
	add := func(g model.Gateway, conditions []metav1.Condition) {
		one := gateway{Gateway: g}
		if meta.IsStatusConditionFalse(conditions, plan.ConditionAccepted) {
			one.refused = meta.FindStatusCondition(conditions, plan.ConditionAccepted)
		}
		if meta.IsStatusConditionFalse(conditions, plan.ConditionRolledOut) {
			one.held = meta.FindStatusCondition(conditions, plan.ConditionRolledOut)
		}
		if !g.Deleting {
			out = append(out, one)
		}
	}
	for i := range servers.Items {
		g, _ := kube.GatewayServer(&servers.Items[i]) // what does not parse the controller refuses
		add(g, servers.Items[i].Status.Conditions)
	}
	for i := range clients.Items {
		g, _ := kube.GatewayClient(&clients.Items[i])
		add(g, clients.Items[i].Status.Conditions)
	}
	for i := range out {
		if err := c.readWorkload(ctx, &out[i]); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// readWorkload adds what runs g.
func (c *cluster) readWorkload(ctx context.Context, g *gateway) error {
	var d appsv1.Deployment
	key := client.ObjectKey{Namespace: g.Namespace, Name: plan.GatewayName(g.Name)}
	if err := c.client.Get(ctx, key, &d); apierrors.IsNotFound(err) {
		return nil
	} else if err != nil {
		return fmt.Errorf("Deployment %s: %w", key, err)
	}
	if owner := metav1.GetControllerOf(&d); owner == nil || string(owner.UID) != g.UID {
		return nil // that of a gateway of the same name
	}
	selector, err := metav1.LabelSelectorAsSelector(d.Spec.Selector)
	if err != nil {
		return fmt.Errorf("Deployment %s: spec.selector: %w", key, err)
	}
	var pods corev1.PodList
	if err := c.client.List(ctx, &pods, client.InNamespace(g.Namespace), client.MatchingLabelsSelector{Selector: selector}); err != nil {
		return fmt.Errorf("list the pods of Deployment %s: %w", key, err)
	}
	g.deployment, g.pods = &d, pods.Items
	return nil
}

// templates reads all templates of gateways.
func (c *cluster) templates(ctx context.Context) ([]model.Template, error) {
	var servers v1beta1.WgGatewayServerTemplateList
	if err := c.client.List(ctx, &servers); err != nil {
		return nil, fmt.Errorf("list WgGatewayServerTemplates: %w", err)
	}
	var clients v1beta1.WgGatewayClientTemplateList
	if err := c.client.List(ctx, &clients); err != nil {
		return nil, fmt.Errorf("list WgGatewayClientTemplates: %w", err)
	}
	var out []model.Template
	for i := range servers.Items {
		t, _ := kube.ServerTemplate(&servers.Items[i])
		out = append(out, t)
	}
	for i := range clients.Items {
		t, _ := kube.ClientTemplate(&clients.Items[i])
		out = append(out, t)
	}
	return out, nil
}

// revisionOf is what the Deployment controller numbers ReplicaSets by, and on a
// Deployment the number of the present one.
const revisionOf = "deployment.kubernetes.io/revision"

// controllerRevision returns the pod-template-hash of the present controller.
func (c *cluster) controllerRevision(ctx context.Context) (string, error) {
	var d appsv1.Deployment
	key := client.ObjectKey{Namespace: c.namespace, Name: teardown.Controller}
	if err := c.client.Get(ctx, key, &d); err != nil {
		return "", fmt.Errorf("Deployment %s: %w", key, err)
	}
	var sets appsv1.ReplicaSetList
	if err := c.client.List(ctx, &sets, client.InNamespace(c.namespace), client.MatchingLabels(d.Spec.Selector.MatchLabels)); err != nil {
		return "", fmt.Errorf("list the ReplicaSets of Deployment %s: %w", key, err)
	}
	for _, s := range sets.Items {
		if metav1.IsControlledBy(&s, &d) && s.Annotations[revisionOf] == d.Annotations[revisionOf] && d.Status.ObservedGeneration >= d.Generation {
			return s.Labels[appsv1.DefaultDeploymentUniqueLabelKey], nil
		}
	}
	return "", fmt.Errorf("Deployment %s: its present ReplicaSet is not there yet", key)
}
