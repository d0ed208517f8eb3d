package cli

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/internal/access"
	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// A Problem is something for which isthmusctl refuses to begin.
type Problem struct {
	Check   string `json:"check"`
	Object  string `json:"object"`
	Message string `json:"message"`
	Fix     string `json:"fix"`
}

// A RefusedError is returned when nothing has been changed, and says why.
type RefusedError struct {
	Problems []Problem
	text     string // of somebody who has said it already
}

// Error lists the problems, one a line.
func (e *RefusedError) Error() string {
	if e.text != "" {
		return e.text
	}
	var out strings.Builder
	fmt.Fprintf(&out, "refused, nothing was changed:")
	for _, p := range e.Problems {
		fmt.Fprintf(&out, "\n  %s: %s: %s", p.Object, p.Message, p.Fix)
	}
	return out.String()
}

func refuse(problems []Problem) error {
	if len(problems) == 0 {
		return nil
	}
	return &RefusedError{Problems: problems}
}

// valueOf are the values that the Networks of the chart come from, by type.
var valueOf = map[string]string{
	v1beta1.NetworkTypePod: "ipam.podCIDRs", v1beta1.NetworkTypeService: "ipam.serviceCIDR",
	v1beta1.NetworkTypeExternal: "ipam.externalCIDR", v1beta1.NetworkTypeInternal: "ipam.internalCIDR",
	v1beta1.NetworkTypeReserved: "ipam.reservedSubnets",
}

// checkNetworks finds networks that are none, and those of our own that
// overlap what is in use.
func checkNetworks(objects []document) []Problem {
	type network struct {
		value string
		cidr  netip.Prefix
		own   bool // for addresses that are given out, not in use already
	}
	var list []network
	var out []Problem
	problem := func(value, format string, args ...any) {
		out = append(out, Problem{Check: "values", Object: value, Message: fmt.Sprintf(format, args...), Fix: "correct the value, or leave it out to have one found"})
	}
	for _, d := range objects {
		if d.object.GetKind() != "Network" {
			continue
		}
		labels := d.object.GetLabels()
		typ := labels[v1beta1.LabelNetworkType]
		value := cmp.Or(valueOf[typ], d.object.GetName())
		text, _, _ := unstructured.NestedString(d.object.Object, "spec", "cidr")
		cidr, err := netip.ParsePrefix(text)
		if err != nil {
			problem(value, "%q is not a network; write one such as 10.70.0.0/16", text)
			continue
		}
		own := (typ == v1beta1.NetworkTypeExternal || typ == v1beta1.NetworkTypeInternal) && labels[v1beta1.LabelNotRemapped] == "true"
		list = append(list, network{value, cidr.Masked(), own})
	}
	for i, a := range list {
		for _, b := range list[i+1:] {
			if (a.own || b.own) && a.cidr.Overlaps(b.cidr) && a.value != b.value {
				problem(b.value, "%v overlaps %s (%v)", b.cidr, a.value, a.cidr)
			}
		}
	}
	return out
}

// checkNodes finds nodes that can't take part.
func checkNodes(nodes []corev1.Node) []Problem {
	var out []Problem
	for _, n := range nodes {
		info := n.Status.NodeInfo
		if info.KernelVersion == "" || (info.OperatingSystem != "" && info.OperatingSystem != "linux") {
			continue // not known, or no node for the daemon
		}
		// The node daemon refuses the same kernels. A release that it does not
		// understand it will tell of itself.
		if old, err := netstate.KernelTooOld(info.KernelVersion); err == nil && old {
			out = append(out, Problem{
				Check: "kernel", Object: "Node " + n.Name, Message: fmt.Sprintf("it runs Linux %s, and %s is needed", info.KernelVersion, netstate.LeastKernel),
				Fix: "update its kernel, or remove the node from the cluster",
			})
		}
	}
	return out
}

// checkPublicSystem finds the network module of the public system. Its other
// modules may run beside Isthmus.
func checkPublicSystem(daemons []appsv1.DaemonSet, deployments []appsv1.Deployment) []Problem {
	var out []Problem
	add := func(kind string, o metav1.ObjectMeta) {
		out = append(out, Problem{
			Check: "public system", Object: fmt.Sprintf("%s %s/%s", kind, o.Namespace, o.Name),
			Message: "it is of the network of Liqo, which would fight Isthmus for the same routes and objects",
			Fix:     "disconnect its peerings (liqoctl network reset), then switch its network off (networking.enabled=false) or remove it (liqoctl uninstall), and try again; its objects can be taken over",
		})
	}
	for _, d := range daemons {
		if d.Labels[labelPartOf] == "liqo" && d.Labels[v1beta1.LabelAppName] == "fabric" || d.Name == "liqo-fabric" {
			add("DaemonSet", d.ObjectMeta)
		}
	}
	for _, d := range deployments {
		gateway := d.Labels[v1beta1.LabelComponent] == v1beta1.ComponentGateway && d.Labels[v1beta1.LabelManagedBy] != v1beta1.ManagedBy
		if gateway || d.Labels[labelPartOf] == "liqo" && d.Labels[v1beta1.LabelAppName] == "ipam" || d.Name == "liqo-ipam" {
			add("Deployment", d.ObjectMeta)
		}
	}
	return out
}

const labelPartOf = "app.kubernetes.io/part-of"

// rights returns what it takes to do verbs to the objects, and to keep the
// release; what the roles among them grant, the user has to hold.
func (c *cluster) rights(m manifest, verbs ...string) (ours, granted []access.Right) {
	set, grants := map[access.Right]bool{}, map[access.Right]bool{}
	for _, verb := range []string{"create", "get", "list", "update", "delete"} {
		set[access.Right{Verb: verb, Resource: "secrets", Namespace: c.namespace}] = true // the release
	}
	set[access.Right{Verb: "create", Resource: "namespaces"}] = true
	set[access.Right{Verb: "list", Resource: "nodes"}] = true
	for _, verb := range []string{"list", "create", "patch"} {
		set[access.Right{Verb: verb, Group: "apiextensions.k8s.io", Resource: "customresourcedefinitions"}] = true
	}
	for _, d := range m.objects {
		gvk := d.object.GroupVersionKind()
		plural, _ := meta.UnsafeGuessKindToResource(gvk)
		for _, verb := range verbs {
			set[access.Right{Verb: verb, Group: gvk.Group, Resource: plural.Resource, Namespace: d.object.GetNamespace()}] = true
		}
		for _, rule := range rulesOf(d.object) {
			for _, group := range rule.APIGroups {
				for _, resource := range rule.Resources {
					for _, verb := range rule.Verbs {
						resource, sub, _ := strings.Cut(resource, "/")
						for _, name := range append(rule.ResourceNames, "")[:max(1, len(rule.ResourceNames))] {
							grants[access.Right{Verb: verb, Group: group, Resource: resource, Subresource: sub, Namespace: d.object.GetNamespace(), Name: name}] = true
						}
					}
				}
			}
		}
	}
	return slices.SortedFunc(maps.Keys(set), access.Compare), slices.SortedFunc(maps.Keys(grants), access.Compare)
}

// rulesOf are the rules of a role; nil of anything else.
func rulesOf(o *unstructured.Unstructured) []rbacv1.PolicyRule {
	if o.GroupVersionKind().Group != rbacv1.GroupName {
		return nil
	}
	var role rbacv1.ClusterRole // a Role has the same fields
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(o.Object, &role); err != nil {
		return nil
	}
	return role.Rules
}

// checkRights finds what the user is not allowed to do.
func (c *cluster) checkRights(ctx context.Context, m manifest, verbs ...string) ([]Problem, error) {
	ours, granted := c.rights(m, verbs...)
	lacking, err := access.Missing(ctx, c.client, ours)
	if err != nil {
		return nil, err
	}
	// Who may escalate needs to hold nothing of what roles grant.
	escalate, err := access.Missing(ctx, c.client, []access.Right{
		{Verb: "escalate", Group: rbacv1.GroupName, Resource: "clusterroles"}, {Verb: "escalate", Group: rbacv1.GroupName, Resource: "roles", Namespace: c.namespace},
	})
	if err != nil {
		return nil, err
	}
	if len(escalate) > 0 {
		more, err := access.Missing(ctx, c.client, granted)
		if err != nil {
			return nil, err
		}
		lacking = append(lacking, more...)
	}
	var out []Problem
	for _, r := range lacking {
		out = append(out, Problem{Check: "permission", Object: "permission", Message: "you may not " + r.String(),
			Fix: "ask an administrator for the ClusterRole cluster-admin, or use a kubeconfig that has it"})
	}
	return out, nil
}

// checkNamespace finds a level of Pod Security that would refuse the node
// daemon.
func checkNamespace(ns *corev1.Namespace) []Problem {
	const label = "pod-security.kubernetes.io/enforce"
	if ns == nil || ns.Labels[label] == "" || ns.Labels[label] == "privileged" {
		return nil
	}
	return []Problem{{
		Check: "namespace", Object: "Namespace " + ns.Name, Message: fmt.Sprintf("its label %s is %q, which refuses a host network and NET_ADMIN", label, ns.Labels[label]),
		Fix: fmt.Sprintf("kubectl label namespace %s %s=privileged --overwrite, or choose another by --namespace", ns.Name, label),
	}}
}

// checkOwners finds objects that are there already and belong to somebody else.
func (c *cluster) checkOwners(ctx context.Context, objects []document) ([]Problem, error) {
	var out []Problem
	for _, d := range objects {
		have := &unstructured.Unstructured{}
		have.SetGroupVersionKind(d.object.GroupVersionKind())
		err := c.client.Get(ctx, client.ObjectKeyFromObject(d.object), have)
		if apierrors.IsNotFound(err) || meta.IsNoMatchError(err) || apierrors.IsForbidden(err) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("%s %s: %w", d.object.GetKind(), d.object.GetName(), err)
		}
		a := have.GetAnnotations()
		if a["meta.helm.sh/release-name"] == release && a["meta.helm.sh/release-namespace"] == c.namespace {
			continue
		}
		p := Problem{Check: "objects", Object: strings.TrimSpace(fmt.Sprintf("%s %s", have.GetKind(), strings.TrimPrefix(have.GetNamespace()+"/"+have.GetName(), "/")))}
		switch {
		case a["meta.helm.sh/release-name"] != "":
			p.Message = fmt.Sprintf("it belongs to the Helm release %s in namespace %s", a["meta.helm.sh/release-name"], a["meta.helm.sh/release-namespace"])
			p.Fix = "remove that release first, or install into its namespace"
		case have.GetLabels()[labelPartOf] == "isthmus":
			p.Message, p.Fix = "it was applied without Helm", "go on with kubectl, or make it part of the release by --take-ownership"
		default:
			p.Message, p.Fix = "somebody else made it", "delete or rename it, or make it part of the release by --take-ownership"
		}
		out = append(out, p)
	}
	return out, nil
}

// preflight looks for everything that would make an installation or an upgrade
// fail, or would do damage.
func (c *cluster) preflight(ctx context.Context, m manifest, upgrade, takeOwnership, replaceCRDs bool) error {
	out := checkNetworks(m.objects)
	verbs := []string{"get", "create", "patch"}
	if upgrade {
		verbs = append(verbs, "delete")
	}
	problems, err := c.checkRights(ctx, m, verbs...)
	if err != nil {
		return err
	}
	if out = append(out, problems...); len(problems) > 0 {
		return refuse(out) // the other checks have to read
	}
	if !upgrade && !replaceCRDs {
		if problems, err = c.olderCRDs(ctx, m.crds, "bring it up to date by --replace-crds, which keeps its objects, or remove what installed it"); err != nil {
			return err
		}
		out = append(out, problems...)
	}
	nodes, err := c.clients.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return fmt.Errorf("list Nodes: %w", err)
	}
	out = append(out, checkNodes(nodes.Items)...)
	daemons, err := c.clients.AppsV1().DaemonSets(metav1.NamespaceAll).List(ctx, metav1.ListOptions{})
	if err != nil {
		return fmt.Errorf("list DaemonSets: %w", err)
	}
	deployments, err := c.clients.AppsV1().Deployments(metav1.NamespaceAll).List(ctx, metav1.ListOptions{})
	if err != nil {
		return fmt.Errorf("list Deployments: %w", err)
	}
	out = append(out, checkPublicSystem(daemons.Items, deployments.Items)...)
	ns, err := c.clients.CoreV1().Namespaces().Get(ctx, c.namespace, metav1.GetOptions{})
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("Namespace %s: %w", c.namespace, err)
	}
	if err == nil {
		out = append(out, checkNamespace(ns)...)
	}
	if !takeOwnership {
		if problems, err = c.checkOwners(ctx, m.objects); err != nil {
			return err
		}
		out = append(out, problems...)
	}
	return refuse(out)
}
