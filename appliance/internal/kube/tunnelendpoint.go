package kube

import (
	"cmp"
	"encoding/base64"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"

	netv1alpha1 "github.com/isthmus-net/isthmus/appliance/api/net/v1alpha1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
)

// TunnelEndpoint reads a TunnelEndpoint.
func TunnelEndpoint(o *netv1alpha1.TunnelEndpoint) (cluster.TunnelEndpoint, []cluster.InvalidError) {
	m := metaOf(o, netv1alpha1.GroupVersion, "TunnelEndpoint")
	r := &reader{object: m.Ref}
	s := o.Spec
	e := cluster.TunnelEndpoint{
		Meta:     m,
		RemoteID: s.ClusterID,
		Pod: cluster.Mapping{
			Local:     r.prefix("spec.localPodCIDR", s.LocalPodCIDR),
			LocalNAT:  r.nat("spec.localNATPodCIDR", s.LocalNATPodCIDR),
			Remote:    r.prefix("spec.remotePodCIDR", s.RemotePodCIDR),
			RemoteNAT: r.nat("spec.remoteNATPodCIDR", s.RemoteNATPodCIDR),
		},
		External: cluster.Mapping{
			Local:     r.prefix("spec.localExternalCIDR", s.LocalExternalCIDR),
			LocalNAT:  r.nat("spec.localNATExternalCIDR", s.LocalNATExternalCIDR),
			Remote:    r.prefix("spec.remoteExternalCIDR", s.RemoteExternalCIDR),
			RemoteNAT: r.nat("spec.remoteNATExternalCIDR", s.RemoteNATExternalCIDR),
		},
		Address: s.EndpointIP,
	}
	if id := s.ClusterIdentity; id != nil {
		e.RemoteID = cmp.Or(id.ClusterID, s.ClusterID)
		if s.ClusterID != "" && s.ClusterID != e.RemoteID {
			r.complain("spec.clusterID", s.ClusterID, "is not what spec.clusterIdentity.clusterID says (%q); leave clusterID out", e.RemoteID)
		}
	}
	if s.EndpointIP != "" && !r.dialled("spec.endpointIP", s.EndpointIP) {
		e.Address = ""
	}
	if s.BackendType != "" && s.BackendType != netv1alpha1.BackendWireGuard {
		r.complain("spec.backendType", s.BackendType, "is not known; write %s", netv1alpha1.BackendWireGuard)
	}
	r.backend(s.BackendConfig, &e)
	return e, r.invalid
}

// nat reads a CIDR that may be None.
func (r *reader) nat(field, text string) netip.Prefix {
	if text == netv1alpha1.None {
		return netip.Prefix{}
	}
	before := len(r.invalid)
	p := r.prefix(field, text)
	for i := before; i < len(r.invalid); i++ {
		if !r.invalid[i].Note {
			r.invalid[i].Reason += ", or " + netv1alpha1.None
		}
	}
	return p
}

// backend reads spec.backend_config. Keys that are not known are no fault:
// older installations write some of their own.
func (r *reader) backend(config map[string]string, e *cluster.TunnelEndpoint) {
	field := func(key string) string { return "spec.backend_config." + key }
	if text := config[netv1alpha1.BackendPort]; text != "" {
		port, err := strconv.ParseUint(text, 10, 16)
		if err != nil || port == 0 {
			r.complain(field(netv1alpha1.BackendPort), text, "is not a port; write 1 to 65535")
		}
		e.Port = uint16(port)
	}
	if text := config[netv1alpha1.BackendPublicKey]; text != "" {
		key, err := base64.StdEncoding.DecodeString(strings.TrimSpace(text))
		if err == nil && len(key) == keySize {
			e.Key = key
		} else {
			// The value is not repeated: it may be a private key by mistake.
			r.complain(field(netv1alpha1.BackendPublicKey), "", "is not a WireGuard public key; write its %d bytes in base64, as wg pubkey prints them", keySize)
		}
	}
	services := []string{string(corev1.ServiceTypeLoadBalancer), string(corev1.ServiceTypeNodePort), string(corev1.ServiceTypeClusterIP)}
	e.ServiceType = cmp.Or(config[netv1alpha1.BackendServiceType], services[0])
	if !slices.Contains(services, e.ServiceType) {
		r.complain(field(netv1alpha1.BackendServiceType), e.ServiceType, "is not a type of Service; write one of %s", strings.Join(services, ", "))
	}
}

// keySize is that of a Curve25519 key (RFC 7748).
const keySize = 32
