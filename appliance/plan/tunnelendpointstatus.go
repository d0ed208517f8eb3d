package plan

import (
	"cmp"
	"encoding/base64"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	netv1alpha1 "github.com/isthmus-net/isthmus/appliance/api/net/v1alpha1"
	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/desired"
)

// writeTunnelEndpoints gives every TunnelEndpoint its status, as the users of
// older installations know it.
func (p *planner) writeTunnelEndpoints() {
	for i := range p.s.TunnelEndpoints {
		e := &p.s.TunnelEndpoints[i]
		o := &netv1alpha1.TunnelEndpoint{
			TypeMeta:   metav1.TypeMeta{APIVersion: netv1alpha1.GroupVersion.String(), Kind: "TunnelEndpoint"},
			ObjectMeta: existing(e.Meta),
		}
		switch current := p.endpoints[e.RemoteID]; {
		case current == e, current == nil && p.keeps(e):
			p.endpointStatus(e, &o.Status)
		default:
			o.Status.Connection.Status = netv1alpha1.ConnectionError
		}
		o.Status.Conditions = p.accepted(e.Meta)
		if !p.sound(e.Meta) {
			o.Status.Phase = netv1alpha1.PhaseError
			if o.Status.Connection.Status != netv1alpha1.Connected {
				o.Status.Connection.StatusMessage = o.Status.Conditions[0].Message
			}
		}
		p.out.Statuses = append(p.out.Statuses, o)
	}
}

// keeps reports whether something that was made from e is still there.
func (p *planner) keeps(e *cluster.TunnelEndpoint) bool {
	return slices.ContainsFunc(p.out.Keep, func(r cluster.Ref) bool {
		return r.Kind == "Configuration" && r.Namespace == e.Namespace && r.Name == e.Name
	})
}

// endpointStatus fills in what is known of the peering that e stands for.
func (p *planner) endpointStatus(e *cluster.TunnelEndpoint, status *netv1alpha1.TunnelEndpointStatus) {
	status.Phase = netv1alpha1.PhaseNew
	status.Connection.Status = netv1alpha1.Connecting
	peer := p.lookup(e.RemoteID)
	if peer == nil || !peer.ready || peer.gateway == nil {
		status.Connection.StatusMessage = p.waitsFor(e, peer)
		return
	}
	g := peer.gateway
	own, other := desired.TunnelAddresses(g.Role)
	status.LocalTunnelPrivateIP, status.RemoteTunnelPrivateIP = own.Addr().String(), other.String()
	status.TunnelIFaceName = v1beta1.TunnelInterface
	configuration := map[string]string{netv1alpha1.PeerAllowedIPs: joined(peer.remote.All())}
	if g.Role == cluster.Client {
		status.RemoteTunnelPublicIP = g.Addresses[0]
		configuration[netv1alpha1.PeerEndpointIP] = g.Addresses[0]
		configuration[netv1alpha1.BackendPort] = strconv.Itoa(int(g.Port))
	} else if endpoint := p.endpoint(g, peer.pod); endpoint != nil {
		status.LocalTunnelPublicIP = endpoint.Addresses[0]
	}
	if k := p.keys[e.RemoteID]; k != nil {
		configuration[netv1alpha1.BackendPublicKey] = base64.StdEncoding.EncodeToString(k.Key)
	}
	status.Connection.PeerConfiguration = configuration
	if peer.pod != nil {
		status.Phase = netv1alpha1.PhaseProcessed
		status.GatewayIP = peer.pod.IPs[0].String()
	}
	value, _ := p.connection(g)
	status.Connection.Status = netv1alpha1.ConnectionStatus(cmp.Or(value, string(netv1alpha1.Connecting)))
	status.Connection.StatusMessage = p.waitsFor(e, peer)
	if status.Connection.Status == netv1alpha1.Connected {
		status.Connection.StatusMessage = "the gateway of cluster " + e.RemoteID + " answers"
	}
}

// waitsFor says why a peering is not connected, and what to do.
func (p *planner) waitsFor(e *cluster.TunnelEndpoint, peer *peering) string {
	switch {
	case peer == nil || peer.config == nil || !peer.ready:
		return "the networks are not known yet: see the condition of the Configuration in namespace " + e.Namespace
	case peer.gateway == nil:
		return "there is no gateway yet: see the condition of the GatewayServer or GatewayClient in namespace " + e.Namespace
	case peer.pod == nil:
		return fmt.Sprintf("no pod of Deployment %s/%s runs yet", peer.gateway.Namespace, GatewayName(peer.gateway.Name))
	case p.keys[e.RemoteID] == nil:
		return fmt.Sprintf("spec.backend_config.%s is missing: write the %s of the remote gateway's Secret", netv1alpha1.BackendPublicKey, v1beta1.PublicKeyField)
	case peer.gateway.Role == cluster.Client:
		return fmt.Sprintf("dials %s port %d; if the TunnelEndpoint in cluster %s has an endpointIP too, remove it there: one of the two has to wait", peer.gateway.Addresses[0], peer.gateway.Port, e.RemoteID)
	}
	return "waits for cluster " + e.RemoteID + " to dial"
}

func joined(list []netip.Prefix) string {
	var out []string
	for _, cidr := range list {
		out = append(out, cidr.String())
	}
	return strings.Join(out, ", ")
}
