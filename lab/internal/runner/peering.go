package runner

import (
	"context"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	netv1beta1 "github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/lab/internal/deploy"
	"github.com/isthmus-net/isthmus/lab/internal/expect"
	"github.com/isthmus-net/isthmus/lab/internal/scenario"
)

// connect connects a peering. At the end of the row its objects are deleted.
func (r *Runner) connect(ctx context.Context, a *scenario.Connect, undo *undoList) error {
	if r.Connect == nil {
		return fmt.Errorf("connect clusters: %w", errNotTold)
	}
	p := a.Peering
	undo.add(func(ctx context.Context) error {
		return errors.Join(r.disconnect(ctx, p.Client, p.Server), r.disconnect(ctx, p.Server, p.Client))
	})
	return r.Connect(ctx, p)
}

// written are the kinds of the objects of a peering that a user writes, in the
// order in which he deletes them.
var written = []string{"GatewayServer", "GatewayClient", "PublicKey", "Configuration"}

// disconnect deletes what leads from a cluster to its peer. What is not there
// needs not be deleted.
func (r *Runner) disconnect(ctx context.Context, cluster, peer string) error {
	namespace := deploy.TenantNamespace(peer)
	for _, kind := range written {
		m, err := r.api.MappingOf(ctx, cluster, netv1beta1.GroupVersion.WithKind(kind))
		if expect.NotServed(err) {
			continue // it went with the appliance
		}
		if err != nil {
			return err
		}
		if err := r.remove(ctx, cluster, m, namespace, peer); err != nil {
			return err
		}
	}
	m, err := r.api.MappingOf(ctx, cluster, corev1.SchemeGroupVersion.WithKind("Namespace"))
	if err != nil {
		return err
	}
	return r.remove(ctx, cluster, m, metav1.NamespaceNone, namespace)
}
