package plan

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
)

// gateways decides which gateways are sound, one at most per remote cluster,
// and plans what they need to run. One that runs and is no longer sound goes
// on as it was last made.
func (p *planner) gateways() {
	p.carries = map[objectKey]*peering{}
	p.gatewayNames = map[objectKey]*cluster.Gateway{}
	for i := range p.s.GatewayServers {
		p.allGateways = append(p.allGateways, &p.s.GatewayServers[i])
	}
	for i := range p.s.GatewayClients {
		p.allGateways = append(p.allGateways, &p.s.GatewayClients[i])
	}
	slices.SortStableFunc(p.allGateways, func(a, b *cluster.Gateway) int {
		// What users wrote first. Of the same age: server before client.
		return cmp.Or(compareMade(a.Meta, b.Meta), a.Created.Compare(b.Created), -strings.Compare(a.Role, b.Role), compareAge(a.Meta, b.Meta))
	})
	p.numberHosts()
	var ready []rendered
	var renamed []*cluster.Gateway // those that run for another cluster than they say now
	for _, g := range p.allGateways {
		w := p.checkGateway(g)
		if p.sound(g.Meta) {
			reason, problem := p.claim(g)
			switch {
			case problem == "":
				ready = append(ready, rendered{Gateway: g, workload: w})
				continue
			case made(g.Meta) && reason == ReasonDuplicate:
				p.supersede(g.Meta)
				continue
			}
			p.refuse(g.Meta, reason, "%s", problem)
		}
		switch was := p.lastMade(g); {
		case was == nil:
		case was.RemoteID == g.RemoteID:
			p.keep(was)
		default:
			renamed = append(renamed, was) // whoever says so has the better right
		}
	}
	for _, g := range renamed {
		p.keep(g)
	}
	p.rollOut(ready)
	p.allGateways = slices.DeleteFunc(p.allGateways, func(g *cluster.Gateway) bool { return p.superseded[keyOf(g.Ref)] })
}

// claim makes g the gateway of its peering, or says why it can't be.
func (p *planner) claim(g *cluster.Gateway) (reason, problem string) {
	name := objectKey{"", g.Namespace, GatewayName(g.Name)}
	peer := p.peering(g.RemoteID)
	if first := peer.gateway; first != nil {
		return ReasonDuplicate, fmt.Sprintf("%s %s/%s already connects cluster %s: a peering has one gateway per cluster, either a GatewayServer or a GatewayClient; delete one of the two",
			first.Kind, first.Namespace, first.Name, g.RemoteID)
	}
	if first := p.gatewayNames[name]; first != nil {
		return ReasonNameTaken, fmt.Sprintf("%s %s has the same name: its Deployment and this one's would both be %s; give this object another name", first.Kind, first.Name, name.name)
	}
	peer.gateway, peer.pod = g, p.activePod(g)
	p.gatewayNames[name], p.carries[keyOf(g.Ref)] = g, peer
	return "", ""
}

// lastMade returns g as its Deployment was made: for which remote cluster, with
// which keys and MTU. It returns nil if there is no such Deployment.
func (p *planner) lastMade(g *cluster.Gateway) *cluster.Gateway {
	i := slices.IndexFunc(p.s.Deployments, func(d cluster.Deployment) bool {
		return d.Namespace == g.Namespace && d.Name == GatewayName(g.Name) && d.Owner != "" && d.Owner == g.UID
	})
	if i < 0 || !clusterID.MatchString(p.s.Deployments[i].Labels[v1beta1.LabelRemoteClusterID]) {
		return nil
	}
	d, was := p.s.Deployments[i], *g
	was.RemoteID, was.SecretName = d.Labels[v1beta1.LabelRemoteClusterID], ""
	if len(d.Secrets) > 0 && !slices.Contains(d.Secrets, d.Name) {
		usable := slices.IndexFunc(d.Secrets, func(name string) bool { return p.usableSecret(g.Namespace, name) })
		was.SecretName = d.Secrets[max(0, usable)]
	}
	if f := p.existingFabric(&was); f != nil {
		was.MTU = f.MTU
	}
	return &was
}

// keep lets g, which runs, go on as it was last made, although what its object
// says now can't be: a slip of the pen does not stop traffic. What the template
// made of it stays as it is; all else is planned, for nodes come and go
// meanwhile.
func (p *planner) keep(g *cluster.Gateway) {
	if _, problem := p.claim(g); problem != "" {
		return // somebody else does its work by now
	}
	p.verdict(g.Meta).messages = append(p.verdict(g.Meta).messages, "until then its gateway runs on as it was made before")
	p.stays(g)
	p.belongings(g, g.SecretName != "")
}

// stays plans that what the template made of g is as it is.
func (p *planner) stays(g *cluster.Gateway) {
	name := GatewayName(g.Name)
	stays := func(version, kind, name string) {
		p.out.Keep = append(p.out.Keep, cluster.Ref{APIVersion: version, Kind: kind, Namespace: g.Namespace, Name: name})
	}
	if g.Role == cluster.Client {
		stays(networkingVersion, "WgGatewayClient", g.Name)
	} else {
		stays(networkingVersion, "WgGatewayServer", g.Name)
		stays("v1", "Service", name)
	}
	stays("apps/v1", "Deployment", name)
	stays("v1", "Service", metricsName(name))
}

// checkGateway refuses g if it contradicts itself or what it refers to is not
// there, and renders its template.
func (p *planner) checkGateway(g *cluster.Gateway) workload {
	p.checkFields(g.Meta)
	p.checkRemoteID(g.Meta, g.RemoteID)
	if peer := p.lookup(g.RemoteID); peer != nil && peer.config != nil && peer.config.Namespace != g.Namespace {
		p.refuse(g.Meta, ReasonNamespace, "Configuration %s/%s of cluster %s is in another namespace: move one of the two, both belong into the tenant namespace", peer.config.Namespace, peer.config.Name, g.RemoteID)
	}
	if g.Role == cluster.Client && (len(g.Addresses) == 0 || g.Port == 0) {
		p.refuse(g.Meta, ReasonNoEndpoint, "spec.endpoint has no address or no port: write what status.endpoint of the remote cluster's GatewayServer says")
	}
	w := workload{secret: GatewayName(g.Name)}
	if g.SecretName != "" {
		w.secret, w.ownKeys = g.SecretName, true
		p.checkSecret(g)
	}
	if level := p.podSecurity(g.Namespace); level != "" && level != podSecurityPrivileged {
		p.remark(g.Meta, Warning, ReasonPodSecurity, "namespace %s has the label %s=%s, which does not let gateways have NET_ADMIN: set it to %s", g.Namespace, podSecurityLabel, level, podSecurityPrivileged)
	}
	if name := GatewayName(g.Name); name != v1beta1.GatewayNamePrefix+g.Name {
		p.remark(g.Meta, Normal, ReasonNameShortened, "what belongs to it is called %s, because %s%s is longer than %d characters", name, v1beta1.GatewayNamePrefix, g.Name, maxLabel)
	}
	p.renderWorkload(g, &w)
	return w
}

// checkSecret refuses g if the Secret with the user's own keys is no use.
func (p *planner) checkSecret(g *cluster.Gateway) {
	s := p.secret(g.Namespace, g.SecretName)
	switch {
	case s == nil:
		p.refuse(g.Meta, ReasonNoSecret, "spec.secretRef: there is no Secret %s/%s with the label %s=true: create it with the fields %s and %s, or remove spec.secretRef to have keys made",
			g.Namespace, g.SecretName, v1beta1.LabelGatewayResource, v1beta1.PrivateKeyField, v1beta1.PublicKeyField)
	case !s.HasPrivate || len(s.PublicKey) != keySize:
		p.refuse(g.Meta, ReasonBadSecret, "spec.secretRef: Secret %s/%s must have %s and %s, each a Curve25519 key of %d bytes", g.Namespace, g.SecretName, v1beta1.PrivateKeyField, v1beta1.PublicKeyField, keySize)
	}
}

// usableSecret reports whether there is a Secret of this name with a key pair.
func (p *planner) usableSecret(namespace, name string) bool {
	s := p.secret(namespace, name)
	return s != nil && s.HasPrivate && len(s.PublicKey) == keySize
}

func (p *planner) secret(namespace, name string) *cluster.KeySecret {
	for i := range p.s.Secrets {
		if s := &p.s.Secrets[i]; s.Namespace == namespace && s.Name == name {
			return s
		}
	}
	return nil
}

// activePod returns the pod that carries the traffic of g. The one that nodes
// lead to now stays, unless it is not ready and another one is.
func (p *planner) activePod(g *cluster.Gateway) *cluster.Pod {
	var current netip.Addr
	if f := p.existingFabric(g); f != nil {
		current = f.GatewayIP
	}
	var best *cluster.Pod
	rank := func(x *cluster.Pod) int {
		r := 0
		if x.Ready {
			r += 2
		}
		if current.IsValid() && slices.Contains(x.IPs, current) {
			r++
		}
		return r
	}
	for i := range p.s.Pods {
		x := &p.s.Pods[i]
		if x.Namespace != g.Namespace || !x.Running || len(x.IPs) == 0 || x.Labels[v1beta1.LabelAppName] != GatewayName(g.Name) ||
			x.Labels[v1beta1.LabelComponent] != v1beta1.ComponentGateway || x.Labels[v1beta1.LabelActive] != "true" {
			continue
		}
		if best == nil || rank(x) > rank(best) || rank(x) == rank(best) && compareAge(x.Meta, best.Meta) < 0 {
			best = x
		}
	}
	return best
}

// existingFabric returns the InternalFabric of g, as it is now.
func (p *planner) existingFabric(g *cluster.Gateway) *cluster.InternalFabric {
	for i := range p.s.Fabrics {
		if f := &p.s.Fabrics[i]; f.Namespace == g.Namespace && f.Name == g.RemoteID {
			return f
		}
	}
	return nil
}

// gatewayStatus tells what became of g: to people, and to who sets up the
// other end. The reference to the WireGuard gateway comes with the one to its keys: "liqoctl
// create gatewayclient --wait" waits for the former, and "generate publickey" then takes the
// latter for granted.
func (p *planner) gatewayStatus(g *cluster.Gateway) {
	var ref, secret *corev1.ObjectReference
	var endpoint *v1beta1.EndpointStatus
	var internal *v1beta1.InternalGatewayEndpoint
	if peer := p.carries[keyOf(g.Ref)]; peer != nil {
		ref = &corev1.ObjectReference{APIVersion: networkingVersion, Kind: "WgGatewayServer", Namespace: g.Namespace, Name: g.Name}
		name := cmp.Or(peer.gateway.SecretName, GatewayName(g.Name))
		if p.usableSecret(g.Namespace, name) {
			secret = &corev1.ObjectReference{APIVersion: "v1", Kind: "Secret", Namespace: g.Namespace, Name: name}
		}
		if pod := peer.pod; pod != nil {
			internal = &v1beta1.InternalGatewayEndpoint{IP: ptr(apiIP(pod.IPs[0])), Node: ptr(pod.Node)}
		}
		if g.Role == cluster.Server {
			endpoint = p.endpoint(g, peer.pod)
		}
	}
	if g.Role == cluster.Client {
		o := &v1beta1.GatewayClient{TypeMeta: typeMeta("GatewayClient"), ObjectMeta: existing(g.Meta)}
		if ref != nil {
			ref.Kind = "WgGatewayClient"
			wg := &v1beta1.WgGatewayClient{TypeMeta: typeMeta("WgGatewayClient"), ObjectMeta: metav1.ObjectMeta{Namespace: g.Namespace, Name: g.Name}}
			wg.Status = v1beta1.WgGatewayClientStatus{SecretRef: secret, InternalEndpoint: internal}
			p.out.Statuses = append(p.out.Statuses, wg.DeepCopy())
		}
		if secret == nil {
			ref = nil
		}
		o.Status = v1beta1.GatewayClientStatus{ClientRef: ref, SecretRef: secret, InternalEndpoint: internal, Conditions: append(p.accepted(g.Meta), p.rolledOut(g)...)}
		p.out.Statuses = append(p.out.Statuses, o)
		return
	}
	o := &v1beta1.GatewayServer{TypeMeta: typeMeta("GatewayServer"), ObjectMeta: existing(g.Meta)}
	if ref != nil {
		wg := &v1beta1.WgGatewayServer{TypeMeta: typeMeta("WgGatewayServer"), ObjectMeta: metav1.ObjectMeta{Namespace: g.Namespace, Name: g.Name}}
		wg.Status = v1beta1.WgGatewayServerStatus{SecretRef: secret, Endpoint: endpoint, InternalEndpoint: internal}
		p.out.Statuses = append(p.out.Statuses, wg.DeepCopy())
	}
	if secret == nil {
		ref = nil
	}
	o.Status = v1beta1.GatewayServerStatus{ServerRef: ref, Endpoint: endpoint, SecretRef: secret, InternalEndpoint: internal, Conditions: append(p.accepted(g.Meta), p.rolledOut(g)...)}
	p.out.Statuses = append(p.out.Statuses, o)
}

// maxEndpointAddresses is how many addresses an endpoint can have (its CRD).
const maxEndpointAddresses = 64

// gatewayService returns the Service of a gateway; nil if there is none.
func (p *planner) gatewayService(g *cluster.Gateway) *cluster.Service {
	i := slices.IndexFunc(p.s.Services, func(s cluster.Service) bool {
		return s.Namespace == g.Namespace && s.Name == GatewayName(g.Name)
	})
	if i < 0 {
		return nil
	}
	return &p.s.Services[i]
}

// endpoint returns where the peer has to dial to reach g, which runs in pod;
// nil as long as that is not known.
func (p *planner) endpoint(g *cluster.Gateway, pod *cluster.Pod) *v1beta1.EndpointStatus {
	s := p.gatewayService(g)
	if s == nil || len(s.Ports) == 0 {
		return nil
	}
	port, addresses := s.Ports[0].Port, []string(nil)
	number, inHost := uint32(0), false
	if pod != nil && pod.HostNetwork {
		number, inHost = hostNumber(pod.Labels[v1beta1.LabelHostInterface])
	}
	switch s.Type {
	case string(corev1.ServiceTypeNodePort), string(corev1.ServiceTypeClusterIP):
		if inHost { // WireGuard listens on the node: no need to go by the Service
			port, addresses = uint16(listenPort+number), p.nodeAddresses(pod)
			break
		}
		if s.Type == string(corev1.ServiceTypeClusterIP) {
			for _, a := range s.ClusterIPs {
				addresses = append(addresses, a.String())
			}
			break
		}
		port, addresses = s.Ports[0].NodePort, p.nodePortAddresses(pod)
	case string(corev1.ServiceTypeLoadBalancer):
		addresses = s.Ingress
	}
	if len(addresses) == 0 || port == 0 {
		return nil
	}
	return &v1beta1.EndpointStatus{
		Addresses: slices.Clone(addresses[:min(len(addresses), maxEndpointAddresses)]), Port: ptr(int32(port)),
		Protocol: ptr(corev1.Protocol(cmp.Or(s.Ports[0].Protocol, string(corev1.ProtocolUDP)))),
	}
}

// nodeAddresses returns the best name or address of the node that pod runs on.
func (p *planner) nodeAddresses(pod *cluster.Pod) []string {
	if pod == nil {
		return nil
	}
	for _, n := range p.s.Nodes {
		if n.Name == pod.Node && len(n.Reached) > 0 {
			return []string{n.Reached[0]}
		}
	}
	return nil
}

// nodePortNodes is how many nodes are told to a peer that dials a NodePort. It
// survives the loss of all of them but one; more would be tried one after the
// other, a second each.
const nodePortNodes = 3

// nodePortAddresses returns the address of the node that pod runs on, and then
// those of other ready nodes, by name: with the traffic policy Cluster they
// answer as well, and with Local that one does which the pod moves to.
func (p *planner) nodePortAddresses(pod *cluster.Pod) []string {
	addresses := p.nodeAddresses(pod)
	if len(addresses) == 0 {
		return nil
	}
	nodes := slices.SortedFunc(slices.Values(p.s.Nodes), func(a, b cluster.Node) int { return cmp.Compare(a.Name, b.Name) })
	for _, n := range nodes {
		if n.Name != pod.Node && n.Ready && len(n.Reached) > 0 && len(addresses) < nodePortNodes {
			addresses = append(addresses, n.Reached[0])
		}
	}
	return addresses
}
