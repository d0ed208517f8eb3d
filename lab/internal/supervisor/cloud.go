package supervisor

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/isthmus-net/isthmus/lab/internal/controlplane"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// allowFlannel grants flanneld what its manifest does.
func allowFlannel(ctx context.Context, client kubernetes.Interface) error {
	name := metav1.ObjectMeta{Name: "flannel"}
	_, err := client.RbacV1().ClusterRoles().Create(ctx, &rbacv1.ClusterRole{ObjectMeta: name, Rules: []rbacv1.PolicyRule{
		{APIGroups: []string{""}, Resources: []string{"pods"}, Verbs: []string{"get"}},
		{APIGroups: []string{""}, Resources: []string{"nodes"}, Verbs: []string{"get", "list", "watch"}},
		{APIGroups: []string{""}, Resources: []string{"nodes/status"}, Verbs: []string{"patch"}},
	}}, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return err
	}
	_, err = client.RbacV1().ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{
		ObjectMeta: name,
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: name.Name},
		Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: controlplane.FlannelUser}},
	}, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		return nil
	}
	return err
}

// balanceLoads gives Services of type LoadBalancer an address each, as a cloud
// does, until ctx ends. The cluster's router has the routes already.
func (l *lab) balanceLoads(ctx context.Context, c *cluster) {
	said := ""
	for ctx.Err() == nil {
		err := watchServices(ctx, c.cp.Client(), c.spec)
		if err == nil || ctx.Err() != nil {
			continue
		}
		// Once: an API server may be away for as long as a scenario wants.
		if err.Error() != said {
			said = err.Error()
			l.logger.Warn("load balancers get no addresses", "cluster", c.spec.Name, "err", err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(500 * time.Millisecond):
		}
	}
}

// watchServices lists and watches until the watch ends.
func watchServices(ctx context.Context, client kubernetes.Interface, c world.ClusterSpec) error {
	services := client.CoreV1().Services(metav1.NamespaceAll)
	list, err := services.List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	w, err := services.Watch(ctx, metav1.ListOptions{ResourceVersion: list.ResourceVersion})
	if err != nil {
		return err
	}
	defer w.Stop()
	for {
		for _, s := range unbalanced(list.Items, c) {
			if _, err := client.CoreV1().Services(s.Namespace).UpdateStatus(ctx, s, metav1.UpdateOptions{}); err != nil && !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) {
				return fmt.Errorf("service %s/%s: %w", s.Namespace, s.Name, err)
			}
		}
		e, ok := <-w.ResultChan()
		if !ok {
			return nil
		}
		s, isService := e.Object.(*corev1.Service)
		if !isService { // the version is too old: list again
			return nil
		}
		list.Items = slices.DeleteFunc(list.Items, func(old corev1.Service) bool { return old.UID == s.UID })
		if e.Type != "DELETED" {
			list.Items = append(list.Items, *s)
		}
	}
}

// unbalanced are the Services that are to have an address and have none, with
// the one that they get. With no address left they get none, as in a cloud.
func unbalanced(all []corev1.Service, c world.ClusterSpec) []*corev1.Service {
	taken := map[netip.Addr]bool{}
	for _, s := range all {
		for _, i := range s.Status.LoadBalancer.Ingress {
			if a, err := netip.ParseAddr(i.IP); err == nil {
				taken[a] = true
			}
		}
	}
	var out []*corev1.Service
	for _, s := range all {
		if s.Spec.Type != corev1.ServiceTypeLoadBalancer || len(s.Status.LoadBalancer.Ingress) > 0 || s.DeletionTimestamp != nil {
			continue
		}
		for i := 1; ; i++ {
			a, ok := c.LoadBalancerAddress(i)
			if !ok {
				break
			}
			if !taken[a] {
				taken[a] = true
				given := s.DeepCopy()
				given.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: a.String()}}
				out = append(out, given)
				break
			}
		}
	}
	return out
}
