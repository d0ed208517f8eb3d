package deploy

import (
	"context"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// leaseAPI is that of Leases.
const leaseAPI = "coordination.k8s.io/v1"

// waitLeader returns why no controller leads at present; empty: one does. After an outage of
// the API server a node's kube-proxy may learn of it a minute later, and what is on that node
// can't reach it until then.
func waitLeader(ctx context.Context, cl client.Client) string {
	lease := newUnstructured(leaseAPI, "Lease")
	err := cl.Get(ctx, client.ObjectKey{Namespace: Namespace, Name: "isthmus-controller"}, lease)
	if apierrors.IsNotFound(err) {
		return "" // what is installed has none
	} else if err != nil {
		return err.Error()
	}
	nodes := newList(leaseAPI, "Lease")
	if err := cl.List(ctx, nodes, client.InNamespace("kube-node-lease")); err != nil {
		return err.Error()
	}
	return staleLease(lease, nodes.Items)
}

// behind is how much older than the newest lease of a node that of the controller may be,
// which is renewed every 1 to 2.2 s, and given up after 8 s.
const behind = 10 * time.Second

// staleLease holds the lease of the controller against those of the nodes, which the same
// clock has written.
func staleLease(lease *unstructured.Unstructured, nodes []unstructured.Unstructured) string {
	if holder, _, _ := unstructured.NestedString(lease.Object, "spec", "holderIdentity"); holder == "" {
		return "no controller has the lease " + lease.GetName()
	}
	renewed := renewTime(lease)
	for i := range nodes {
		if by := renewTime(&nodes[i]).Sub(renewed); by > behind {
			return fmt.Sprintf("the lease %s was renewed %v before that of node %s", lease.GetName(), by.Round(time.Second), nodes[i].GetName())
		}
	}
	return ""
}

func renewTime(lease *unstructured.Unstructured) time.Time {
	text, _, _ := unstructured.NestedString(lease.Object, "spec", "renewTime")
	t, _ := time.Parse(time.RFC3339Nano, text)
	return t
}
