package kube

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"reflect"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	v1beta1 "github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/plan"
)

// Field managers of server-side apply. What one of them wrote and no longer
// writes goes away; what others wrote into the same status stays.
const (
	NodeManager    = "isthmus-node"
	GatewayManager = "isthmus-gateway"
)

// A NodeStatus is what a node says of itself.
type NodeStatus struct {
	// Local and Remote are the sources of what the node sends to gateways
	// on itself and elsewhere; invalid: not known.
	Local, Remote netip.Addr
	Kernel        string
	Overlays      []cluster.Overlay // that the kernel has
	WireGuard     *bool             // whether the kernel has it; nil: not known
	VTEP          cluster.VTEP      // zero: there is none
	Needs         []cluster.Needed  // addresses of other hosts that it can't do without
	Addresses     []netip.Addr      // that it has
	Applied       []cluster.Applied
	Conditions    []metav1.Condition // only those that the node itself writes
}

// Of the InternalNodes a policy of the chart (isthmus-node-writes-itself) leaves
// a node its own.
//
// +kubebuilder:rbac:roleName=isthmus-node,groups=networking.liqo.io,resources=internalnodes,verbs=get
// +kubebuilder:rbac:roleName=isthmus-node,groups=networking.liqo.io,resources=internalnodes/status,verbs=patch

// WriteStatus writes the status of the node's InternalNode, if it differs from
// what is known to be there. Times alone are no difference.
func (s *NodeSource) WriteStatus(ctx context.Context, want NodeStatus) error {
	var have v1beta1.InternalNode
	if err := s.known(ctx, client.ObjectKey{Name: s.cfg.Node}, &have); err != nil {
		return fmt.Errorf("InternalNode %s: %w", s.cfg.Node, err)
	}
	status := v1beta1.InternalNodeStatus{
		NodeIP:    v1beta1.InternalNodeStatusNodeIP{Local: ip(want.Local), Remote: ip(want.Remote)},
		Kernel:    want.Kernel,
		WireGuard: want.WireGuard,
	}
	status.Applied, want.Conditions = appliedStatus(want.Applied, have.Status.Applied, want.Conditions)
	status.Conditions = conditions(want.Conditions, have.Status.Conditions, have.Generation)
	for _, o := range want.Overlays {
		status.Overlays = append(status.Overlays, v1beta1.Overlay(o))
	}
	if v := want.VTEP; v.IP.IsValid() {
		status.VTEP = &v1beta1.VTEP{IP: *ip(v.IP), MAC: net.HardwareAddr(v.MAC[:]).String()}
	}
	for _, x := range want.Needs {
		status.Needs = append(status.Needs, v1beta1.NeededAddress{IP: *ip(x.IP), For: v1beta1.NeededFor(x.For)})
	}
	for _, a := range want.Addresses {
		status.Addresses = append(status.Addresses, *ip(a))
	}
	if equality.Semantic.DeepEqual(status.NodeIP, have.Status.NodeIP) && status.Kernel == have.Status.Kernel &&
		slices.Equal(status.Overlays, have.Status.Overlays) && equality.Semantic.DeepEqual(status.WireGuard, have.Status.WireGuard) && equality.Semantic.DeepEqual(status.VTEP, have.Status.VTEP) &&
		slices.Equal(status.Needs, have.Status.Needs) && slices.Equal(status.Addresses, have.Status.Addresses) && equality.Semantic.DeepEqual(status.Applied, sortedApplied(have.Status.Applied)) &&
		holds(have.Status.Conditions, status.Conditions) && s.said.last("InternalNode", status) {
		return nil
	}
	return s.apply(ctx, "InternalNode", "", s.cfg.Node, NodeManager, &status)
}

// A ConnectionStatus is what a gateway says of the connection to its peer.
type ConnectionStatus struct {
	Value   v1beta1.ConnectionStatusValue
	Latency string                  // "N/A" where it is not known
	At      time.Time               // when the latency was measured
	Peer    *v1beta1.ConnectionPeer // nil: it has told nothing
	// Conditions are those of the Connection, Connected among them.
	Conditions []metav1.Condition
	// Rotation is the last change of keys; nil: there was none.
	Rotation *v1beta1.RotationStatus
}

// WriteConnection writes the status of the gateway's Connection, if it differs
// from what is known to be there. How often a new latency is worth a write is
// the caller's decision.
func (s *GatewaySource) WriteConnection(ctx context.Context, want ConnectionStatus) error {
	var have v1beta1.Connection
	name := plan.GatewayName(s.cfg.Name)
	if err := s.known(ctx, client.ObjectKey{Namespace: s.cfg.Namespace, Name: name}, &have); err != nil {
		return fmt.Errorf("Connection %s/%s: %w", s.cfg.Namespace, name, err)
	}
	status := v1beta1.ConnectionStatus{
		Value: want.Value, Latency: v1beta1.ConnectionLatency{Value: want.Latency, Timestamp: stamp(want.At)},
		Peer: want.Peer, Conditions: conditions(want.Conditions, have.Status.Conditions, have.Generation), Rotation: want.Rotation,
	}
	if have.Status.Value == status.Value && have.Status.Latency.Value == status.Latency.Value &&
		have.Status.Latency.Timestamp.Equal(&status.Latency.Timestamp) && equality.Semantic.DeepEqual(have.Status.Rotation, status.Rotation) &&
		equality.Semantic.DeepEqual(have.Status.Peer, status.Peer) && holds(have.Status.Conditions, status.Conditions) &&
		s.said.last("Connection", status) {
		return nil
	}
	return s.apply(ctx, "Connection", s.cfg.Namespace, name, GatewayManager, &status)
}

// A ReportStatus is what a gateway says of itself.
type ReportStatus struct {
	Implementation string // kernel or userspace
	MTU            int
	Endpoint       string    // of the peer, as WireGuard knows it now
	LastHandshake  time.Time // zero: none yet
	Applied        []cluster.Applied
	Conditions     []metav1.Condition // only those that the gateway itself writes
}

// WriteReport writes the status of the gateway's GatewayReport, if it differs
// from what is known to be there. The time of the last handshake alone is no
// difference: there is one every two minutes.
func (s *GatewaySource) WriteReport(ctx context.Context, want ReportStatus) error {
	var have v1beta1.GatewayReport
	name := plan.GatewayName(s.cfg.Name)
	if err := s.known(ctx, client.ObjectKey{Namespace: s.cfg.Namespace, Name: name}, &have); err != nil {
		return fmt.Errorf("GatewayReport %s/%s: %w", s.cfg.Namespace, name, err)
	}
	status := v1beta1.GatewayReportStatus{
		ObservedGeneration: have.Generation,
		Implementation:     want.Implementation,
		MTU:                want.MTU,
		Endpoint:           want.Endpoint,
	}
	status.Applied, want.Conditions = appliedStatus(want.Applied, have.Status.Applied, want.Conditions)
	status.Conditions = conditions(want.Conditions, have.Status.Conditions, have.Generation)
	if !want.LastHandshake.IsZero() {
		t := stamp(want.LastHandshake)
		status.LastHandshake = &t
	}
	h := have.Status
	if h.ObservedGeneration == status.ObservedGeneration && h.Implementation == status.Implementation &&
		h.MTU == status.MTU && h.Endpoint == status.Endpoint &&
		(h.LastHandshake == nil) == (status.LastHandshake == nil) &&
		equality.Semantic.DeepEqual(status.Applied, sortedApplied(h.Applied)) &&
		holds(h.Conditions, status.Conditions) && s.said.last("GatewayReport", status) {
		return nil
	}
	return s.apply(ctx, "GatewayReport", s.cfg.Namespace, name, GatewayManager, &status)
}

// known reads an object from the informers, or, where they do not have it
// yet, from the API server.
func (s *source) known(ctx context.Context, key client.ObjectKey, o client.Object) error {
	err := s.cache.Get(ctx, key, o)
	if apierrors.IsNotFound(err) {
		err = s.client.Get(ctx, key, o)
	}
	return err
}

// apply writes the status of an object by server-side apply. The object is not
// created.
func (s *source) apply(ctx context.Context, kind, namespace, name, manager string, status any) error {
	fields, err := runtime.DefaultUnstructuredConverter.ToUnstructured(status)
	if err != nil {
		return fmt.Errorf("status of %s %s: %w", kind, name, err)
	}
	s.said.begin(kind)
	u := &unstructured.Unstructured{Object: map[string]any{"status": fields}}
	u.SetGroupVersionKind(v1beta1.GroupVersion.WithKind(kind))
	u.SetNamespace(namespace)
	u.SetName(name)
	err = s.client.Status().Apply(ctx, client.ApplyConfigurationFromUnstructured(u), client.FieldOwner(manager), client.ForceOwnership)
	if err != nil {
		return fmt.Errorf("write the status of %s %s: %w", kind, name, err)
	}
	s.said.end(kind, reflect.ValueOf(status).Elem().Interface())
	return nil
}

// said is what a daemon has written last into its own statuses, by kind. Informers learn
// of a write a moment later. A daemon that compared with them alone would take an old
// status for the present one, and would not take back a report.
type said struct {
	mu     sync.Mutex
	status map[string]any // a nil value: a write was begun, and nobody knows what came of it
}

// last reports whether a status is what was written last, or nothing was written yet.
func (s *said) last(kind string, status any) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	was, wrote := s.status[kind]
	return !wrote || equality.Semantic.DeepEqual(lasting(was), lasting(status))
}

// begin notes that a status is about to be written: whatever comes of it.
func (s *said) begin(kind string) { s.end(kind, nil) }

func (s *said) end(kind string, status any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.status == nil {
		s.status = map[string]any{}
	}
	s.status[kind] = status
}

// lasting returns a status without what is no difference by itself.
func lasting(status any) any {
	if r, is := status.(v1beta1.GatewayReportStatus); is {
		r.LastHandshake = nil
		return r
	}
	return status
}

// stamp returns a time as the API server keeps it.
func stamp(t time.Time) metav1.Time { return metav1.NewTime(t.Truncate(time.Second)) }

func ip(a netip.Addr) *v1beta1.IP {
	if !a.IsValid() {
		return nil
	}
	text := v1beta1.IP(a.Unmap().String())
	return &text
}

// conditions returns conditions with their times: one whose status has not
// changed keeps it.
func conditions(want, have []metav1.Condition, generation int64) []metav1.Condition {
	var out []metav1.Condition
	for _, c := range want {
		if c.ObservedGeneration == 0 {
			c.ObservedGeneration = generation
		}
		if c.Reason == "" {
			c.Reason = c.Type // the API requires one
		}
		if old := apimeta.FindStatusCondition(have, c.Type); old != nil && old.Status == c.Status {
			c.LastTransitionTime = old.LastTransitionTime
		}
		if c.LastTransitionTime.IsZero() {
			c.LastTransitionTime = stamp(time.Now())
		}
		out = append(out, c)
	}
	return out
}

// holds reports whether all wanted conditions are there. That one of ours is
// there and no longer wanted shows in nothing, so the callers always write the
// same types, but for conditionAppliedListed.
func holds(have, want []metav1.Condition) bool {
	if apimeta.FindStatusCondition(want, conditionAppliedListed) == nil && apimeta.FindStatusCondition(have, conditionAppliedListed) != nil {
		return false
	}
	for _, c := range want {
		old := apimeta.FindStatusCondition(have, c.Type)
		if old == nil || !equality.Semantic.DeepEqual(*old, c) {
			return false
		}
	}
	return true
}
