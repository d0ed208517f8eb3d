package plan

import (
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
)

// GatewayRole is the name of the ClusterRole, and of the Role in the system
// namespace, that say what every gateway may read outside its own namespace.
const GatewayRole = "liqo-gateway"

// access plans what g may do: read the network objects of its peering, and
// write its own Connection and report, and the two Secrets of its invitation and of its
// changes of keys. Events about
// what it reports are the controller's. It reads its keys from a volume, not from the API. The binding
// of GatewayRole, and that in the system namespace, are not in g's namespace,
// so they have no owner; their names tell them from those of gateways of the
// same name elsewhere.
func (p *planner) access(g *cluster.Gateway) {
	name := GatewayName(g.Name)
	outside := Name(g.Namespace, name)
	subject := []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: g.Namespace, Name: name}}
	labels := func() map[string]string { return map[string]string{v1beta1.LabelRemoteClusterID: g.RemoteID} }

	p.add(&corev1.ServiceAccount{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "ServiceAccount"}, ObjectMeta: owned(name, g.RemoteID, g.Meta)})

	role := &rbacv1.Role{TypeMeta: metav1.TypeMeta{APIVersion: rbacVersion, Kind: "Role"}, ObjectMeta: owned(name, g.RemoteID, g.Meta)}
	group := []string{v1beta1.GroupVersion.Group}
	role.Rules = []rbacv1.PolicyRule{
		{APIGroups: group, Verbs: []string{"get", "list", "watch"}, Resources: []string{
			"configurations", "connections", "firewallconfigurations", "gatewayclients", "gatewayreports", "gatewayservers",
			"genevetunnels", "internalfabrics", "publickeies", "routeconfigurations",
		}},
		{APIGroups: group, Verbs: []string{"update", "patch"}, Resources: []string{"connections/status", "gatewayreports/status"}, ResourceNames: []string{name}},
		// Not in a status, for it is secret: its part in an invitation, and in a change of keys.
		{APIGroups: []string{""}, Verbs: []string{"list", "watch", "update"}, Resources: []string{"secrets"}, ResourceNames: []string{HandoverName(g.Name), RotationName(g.Name)}},
	}
	p.add(role)

	binding := &rbacv1.RoleBinding{TypeMeta: metav1.TypeMeta{APIVersion: rbacVersion, Kind: "RoleBinding"}, ObjectMeta: owned(name, g.RemoteID, g.Meta)}
	binding.Subjects, binding.RoleRef = subject, rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: name}
	p.add(binding)

	system := &rbacv1.RoleBinding{TypeMeta: metav1.TypeMeta{APIVersion: rbacVersion, Kind: "RoleBinding"}}
	system.ObjectMeta = metav1.ObjectMeta{Namespace: p.s.Namespace, Name: outside, Labels: labels()}
	system.Subjects, system.RoleRef = subject, rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: GatewayRole}
	p.add(system)

	everywhere := &rbacv1.ClusterRoleBinding{TypeMeta: metav1.TypeMeta{APIVersion: rbacVersion, Kind: "ClusterRoleBinding"}}
	everywhere.ObjectMeta = metav1.ObjectMeta{Name: outside, Labels: labels()}
	everywhere.Subjects, everywhere.RoleRef = subject, rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: GatewayRole}
	p.add(everywhere)
}

// Levels of the PodSecurity admission.
const (
	podSecurityLabel      = "pod-security.kubernetes.io/enforce"
	podSecurityPrivileged = "privileged"
)

// podSecurity returns the level that the namespace enforces; empty: none.
func (p *planner) podSecurity(namespace string) string {
	for _, ns := range p.s.Namespaces {
		if ns.Name == namespace {
			return ns.Labels[podSecurityLabel]
		}
	}
	return ""
}

// namespaces lets gateways have NET_ADMIN where the cluster's default level
// would refuse it. A level that somebody chose is not changed; the gateway's
// condition says so.
func (p *planner) namespaces() {
	done := map[string]bool{}
	for _, peer := range p.peerings {
		if peer.gateway == nil || done[peer.gateway.Namespace] {
			continue
		}
		namespace := peer.gateway.Namespace
		done[namespace] = true
		if level := p.podSecurity(namespace); level == "" || level == podSecurityPrivileged {
			p.out.Applies = append(p.out.Applies, &corev1.Namespace{
				TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Namespace"},
				ObjectMeta: metav1.ObjectMeta{Name: namespace, Labels: map[string]string{podSecurityLabel: podSecurityPrivileged}},
			})
		}
	}
}
