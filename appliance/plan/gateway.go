package plan

import (
	"bytes"
	"cmp"
	"encoding/json"
	"maps"
	"net/netip"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
)

// gateways decides which gateways are sound, one at most per remote cluster,
// and plans what they need to run.
func (p *planner) gateways() {
	var list []*cluster.Gateway
	for i := range p.s.GatewayServers {
		list = append(list, &p.s.GatewayServers[i])
	}
	for i := range p.s.GatewayClients {
		list = append(list, &p.s.GatewayClients[i])
	}
	slices.SortStableFunc(list, func(a, b *cluster.Gateway) int {
		// Of the same age: server before client.
		return cmp.Or(a.Created.Compare(b.Created), -strings.Compare(a.Role, b.Role), compareAge(a.Meta, b.Meta))
	})
	names := map[objectKey]*cluster.Gateway{}
	for _, g := range list {
		w := p.checkGateway(g)
		name := objectKey{"", g.Namespace, GatewayName(g.Name)}
		if p.sound(g.Meta) {
			if first := p.peering(g.RemoteID).gateway; first != nil {
				p.refuse(g.Meta, ReasonDuplicate, "%s %s/%s already connects cluster %s: a peering has one gateway per cluster, either a GatewayServer or a GatewayClient; delete one of the two",
					first.Kind, first.Namespace, first.Name, g.RemoteID)
			} else if first := names[name]; first != nil {
				p.refuse(g.Meta, ReasonNameTaken, "%s %s has the same name: its Deployment and this one's would both be %s; give this object another name", first.Kind, first.Name, name.name)
			} else {
				peer := p.peering(g.RemoteID)
				peer.gateway, names[name] = g, g
				peer.pod = p.activePod(g)
			}
		}
		if p.sound(g.Meta) {
			p.workload(g, w)
		}
	}
	p.allGateways = list
}

// A workload is what a template made of a gateway.
type workload struct {
	metadata   v1beta1.ObjectMeta
	deployment v1beta1.DeploymentTemplate
	service    v1beta1.ServiceTemplate // of a server
	metrics    *v1beta1.Metrics
	secret     string
	ownKeys    bool // the Secret is the user's
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

func (p *planner) secret(namespace, name string) *cluster.KeySecret {
	for i := range p.s.Secrets {
		if s := &p.s.Secrets[i]; s.Namespace == namespace && s.Name == name {
			return s
		}
	}
	return nil
}

// renderWorkload fills the template of g in.
func (p *planner) renderWorkload(g *cluster.Gateway, w *workload) {
	templates, kind, makes, fallback := p.s.ServerTemplates, "WgGatewayServerTemplate", "WgGatewayServer", "wireguard-server"
	if g.Role == cluster.Client {
		templates, kind, makes, fallback = p.s.ClientTemplates, "WgGatewayClientTemplate", "WgGatewayClient", "wireguard-client"
	}
	reference := "spec." + g.Role + "TemplateRef"
	if g.TemplateRef.Kind != "" && g.TemplateRef.Kind != kind {
		p.refuse(g.Meta, ReasonNoTemplate, "%s.kind: %q: use %s", reference, g.TemplateRef.Kind, kind)
		return
	}
	namespace, name := cmp.Or(g.TemplateRef.Namespace, p.s.Namespace), cmp.Or(g.TemplateRef.Name, fallback)
	i := slices.IndexFunc(templates, func(t cluster.Template) bool { return t.Namespace == namespace && t.Name == name })
	if i < 0 {
		p.refuse(g.Meta, ReasonNoTemplate, "%s: there is no %s %s/%s: create it, or name %s in namespace %s", reference, kind, namespace, name, fallback, p.s.Namespace)
		return
	}
	t := templates[i]
	if t.ObjectKind != makes || t.ObjectAPIVersion != networkingVersion {
		p.refuse(g.Meta, ReasonBadTemplate, "%s %s/%s: spec.objectKind: %s %s can't be made here: use %s %s", kind, namespace, name, t.ObjectAPIVersion, t.ObjectKind, networkingVersion, makes)
		return
	}
	values := templateValues{
		Name: GatewayName(g.Name), GatewayName: g.Name, Namespace: g.Namespace, GatewayUID: g.UID, ClusterID: g.RemoteID, SecretName: w.secret,
	}
	var err error
	if g.Role == cluster.Server {
		var object v1beta1.GatewayServer
		if err = json.Unmarshal(g.Raw, &object); err == nil {
			values.Spec = object.Spec
			var wg v1beta1.WgGatewayServer
			if err = render(t.JSON, values, &wg); err == nil {
				w.metadata, w.deployment, w.service, w.metrics = meta(wg.ObjectMeta), wg.Spec.Deployment, wg.Spec.Service, wg.Spec.Metrics
				mergeInto(&w.service.Metadata.Annotations, object.Spec.ServiceAnnotations)
				mergeInto(&w.service.Metadata.Labels, object.Spec.ServiceLabels)
				if len(w.service.Spec.Ports) == 0 {
					p.refuse(g.Meta, ReasonBadTemplate, "%s %s/%s: spec.template.spec.service.spec.ports is empty: add the port of WireGuard", kind, namespace, name)
				}
			}
		}
	} else {
		var object v1beta1.GatewayClient
		if err = json.Unmarshal(g.Raw, &object); err == nil {
			values.Spec = object.Spec
			var wg v1beta1.WgGatewayClient
			if err = render(t.JSON, values, &wg); err == nil {
				w.metadata, w.deployment, w.metrics = meta(wg.ObjectMeta), wg.Spec.Deployment, wg.Spec.Metrics
			}
		}
	}
	if err != nil {
		p.refuse(g.Meta, ReasonBadTemplate, "%s %s/%s can't be filled in: %v", kind, namespace, name, err)
	} else if len(w.deployment.Spec.Template.Spec.Containers) == 0 {
		p.refuse(g.Meta, ReasonBadTemplate, "%s %s/%s: spec.template.spec.deployment.spec.template.spec.containers is empty: add the gateway", kind, namespace, name)
	}
}

func meta(o metav1.ObjectMeta) v1beta1.ObjectMeta {
	return v1beta1.ObjectMeta{Labels: o.Labels, Annotations: o.Annotations}
}

// mergeInto adds from to the map at to; from wins.
func mergeInto(to *map[string]string, from map[string]string) {
	if len(from) == 0 {
		return
	}
	if *to == nil {
		*to = map[string]string{}
	}
	maps.Copy(*to, from)
}

// podLabels are the labels of a gateway's pod.
func podLabels(g *cluster.Gateway) map[string]string {
	return map[string]string{
		v1beta1.LabelAppName:          GatewayName(g.Name),
		v1beta1.LabelComponent:        v1beta1.ComponentGateway,
		v1beta1.LabelGatewayName:      Label(g.Name),
		v1beta1.LabelGatewayNamespace: g.Namespace,
		v1beta1.LabelActive:           "true",
		v1beta1.LabelRemoteClusterID:  g.RemoteID,
	}
}

// selectLabels returns those of all by which a Deployment or Service finds a
// gateway's pod.
func selectLabels(all map[string]string, names ...string) map[string]string {
	out := map[string]string{}
	for _, name := range names {
		out[name] = all[name]
	}
	return out
}

// workload plans what g needs to run.
func (p *planner) workload(g *cluster.Gateway, w workload) {
	name, labels := GatewayName(g.Name), podLabels(g)
	pod := completePod(&w.deployment.Spec, name, labels)
	p.wgGateway(g, w)

	d := &appsv1.Deployment{TypeMeta: metav1.TypeMeta{APIVersion: "apps/v1", Kind: "Deployment"}, ObjectMeta: owned(name, g.RemoteID, g.Meta)}
	w.deployment.Spec.DeepCopyInto(&d.Spec)
	decorate(&d.ObjectMeta, w.deployment.Metadata, labels, v1beta1.LabelGatewayName, v1beta1.LabelGatewayNamespace)
	p.add(d)

	if g.Role == cluster.Server {
		p.service(g, name, w.service, pod)
	}
	if w.metrics != nil && w.metrics.Enabled && w.metrics.Service != nil {
		p.service(g, shorten(name+"-metrics", maxLabel), *w.metrics.Service, pod)
	}
	if !w.ownKeys {
		k := KeySecret{Namespace: g.Namespace, Name: name, Labels: map[string]string{
			v1beta1.LabelRemoteClusterID: g.RemoteID, v1beta1.LabelGatewayResource: "true", v1beta1.LabelManagedBy: v1beta1.ManagedBy,
		}}
		if g.UID != "" {
			k.Owner = ownerReference(g.Ref)
		}
		p.out.Keys = append(p.out.Keys, k)
	}
	p.access(g, w.secret)

	connection := &v1beta1.Connection{TypeMeta: typeMeta("Connection"), ObjectMeta: owned(name, g.RemoteID, g.Meta)}
	connection.Spec.Type, connection.Spec.GatewayRef = v1beta1.ConnectionTypeServer, corev1.ObjectReference{
		APIVersion: networkingVersion, Kind: "WgGatewayServer", Namespace: g.Namespace, Name: g.Name,
	}
	if g.Role == cluster.Client {
		connection.Spec.Type, connection.Spec.GatewayRef.Kind = v1beta1.ConnectionTypeClient, "WgGatewayClient"
	}
	p.add(connection)
	p.add(&v1beta1.GatewayReport{TypeMeta: typeMeta("GatewayReport"), ObjectMeta: owned(name, g.RemoteID, g.Meta)})
}

// completePod adds to the Deployment of a template what makes its pods those
// of a gateway, and returns their labels.
func completePod(d *appsv1.DeploymentSpec, name string, labels map[string]string) map[string]string {
	pod := &d.Template
	if pod.Labels == nil {
		pod.Labels = map[string]string{}
	}
	for k, v := range labels {
		if _, has := pod.Labels[k]; !has || k == v1beta1.LabelAppName || k == v1beta1.LabelRemoteClusterID {
			pod.Labels[k] = v
		}
	}
	pod.Labels[v1beta1.LabelManagedBy] = v1beta1.ManagedBy
	if d.Selector == nil {
		d.Selector = &metav1.LabelSelector{MatchLabels: selectLabels(pod.Labels, v1beta1.LabelAppName, v1beta1.LabelComponent)}
	}
	for k, v := range d.Selector.MatchLabels {
		pod.Labels[k] = v
	}
	pod.Spec.ServiceAccountName, pod.Spec.DeprecatedServiceAccount = name, ""
	return pod.Labels
}

// wgGateway plans the object that shows what the template made of g.
func (p *planner) wgGateway(g *cluster.Gateway, w workload) {
	if g.Role == cluster.Client {
		o := &v1beta1.WgGatewayClient{TypeMeta: typeMeta("WgGatewayClient"), ObjectMeta: owned(g.Name, g.RemoteID, g.Meta)}
		decorate(&o.ObjectMeta, w.metadata, nil)
		o.Spec.Deployment, o.Spec.Metrics, o.Spec.SecretRef.Name = w.deployment, w.metrics, w.secret
		p.add(o.DeepCopy())
		return
	}
	o := &v1beta1.WgGatewayServer{TypeMeta: typeMeta("WgGatewayServer"), ObjectMeta: owned(g.Name, g.RemoteID, g.Meta)}
	decorate(&o.ObjectMeta, w.metadata, nil)
	o.Spec.Deployment, o.Spec.Service, o.Spec.Metrics, o.Spec.SecretRef.Name = w.deployment, w.service, w.metrics, w.secret
	p.add(o.DeepCopy())
}

// decorate adds to o the labels and annotations of a template and those of
// ours that are named; ours win.
func decorate(o *metav1.ObjectMeta, from v1beta1.ObjectMeta, ours map[string]string, names ...string) {
	labels := maps.Clone(from.Labels)
	mergeInto(&labels, o.Labels)
	mergeInto(&labels, selectLabels(ours, names...))
	o.Labels = labels
	mergeInto(&o.Annotations, from.Annotations)
}

// service plans a Service in front of the gateway's pod.
func (p *planner) service(g *cluster.Gateway, name string, from v1beta1.ServiceTemplate, labels map[string]string) {
	o := &corev1.Service{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Service"}, ObjectMeta: owned(name, g.RemoteID, g.Meta)}
	from.Spec.DeepCopyInto(&o.Spec)
	decorate(&o.ObjectMeta, from.Metadata, labels, v1beta1.LabelGatewayName, v1beta1.LabelGatewayNamespace)
	if len(o.Spec.Selector) == 0 {
		o.Spec.Selector = selectLabels(labels, v1beta1.LabelAppName, v1beta1.LabelComponent, v1beta1.LabelActive)
	}
	p.add(o)
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
// other end.
func (p *planner) gatewayStatus(g *cluster.Gateway) {
	var ref, secret *corev1.ObjectReference
	var endpoint *v1beta1.EndpointStatus
	var internal *v1beta1.InternalGatewayEndpoint
	if peer := p.lookup(g.RemoteID); peer != nil && peer.gateway == g {
		ref = &corev1.ObjectReference{APIVersion: networkingVersion, Kind: "WgGatewayServer", Namespace: g.Namespace, Name: g.Name}
		name := cmp.Or(g.SecretName, GatewayName(g.Name))
		if s := p.secret(g.Namespace, name); s != nil && s.HasPrivate && len(s.PublicKey) == keySize {
			secret = &corev1.ObjectReference{APIVersion: "v1", Kind: "Secret", Namespace: g.Namespace, Name: name}
		}
		if pod := peer.pod; pod != nil {
			internal = &v1beta1.InternalGatewayEndpoint{IP: ptr(apiIP(pod.IPs[0])), Node: ptr(pod.Node)}
		}
		if g.Role == cluster.Server {
			endpoint = p.endpoint(g)
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
		o.Status = v1beta1.GatewayClientStatus{ClientRef: ref, SecretRef: secret, InternalEndpoint: internal, Conditions: p.accepted(g.Meta)}
		p.out.Statuses = append(p.out.Statuses, o)
		return
	}
	o := &v1beta1.GatewayServer{TypeMeta: typeMeta("GatewayServer"), ObjectMeta: existing(g.Meta)}
	if ref != nil {
		wg := &v1beta1.WgGatewayServer{TypeMeta: typeMeta("WgGatewayServer"), ObjectMeta: metav1.ObjectMeta{Namespace: g.Namespace, Name: g.Name}}
		wg.Status = v1beta1.WgGatewayServerStatus{SecretRef: secret, Endpoint: endpoint, InternalEndpoint: internal}
		p.out.Statuses = append(p.out.Statuses, wg.DeepCopy())
	}
	o.Status = v1beta1.GatewayServerStatus{ServerRef: ref, Endpoint: endpoint, SecretRef: secret, InternalEndpoint: internal, Conditions: p.accepted(g.Meta)}
	p.out.Statuses = append(p.out.Statuses, o)
}

// endpoint returns where the peer has to dial; nil as long as that is not
// known.
func (p *planner) endpoint(g *cluster.Gateway) *v1beta1.EndpointStatus {
	i := slices.IndexFunc(p.s.Services, func(s cluster.Service) bool {
		return s.Namespace == g.Namespace && s.Name == GatewayName(g.Name)
	})
	if i < 0 || len(p.s.Services[i].Ports) == 0 {
		return nil
	}
	s := p.s.Services[i]
	port, addresses := s.Ports[0].Port, []string(nil)
	switch s.Type {
	case string(corev1.ServiceTypeNodePort):
		port, addresses = s.Ports[0].NodePort, p.nodeAddresses(p.lookup(g.RemoteID).pod)
	case string(corev1.ServiceTypeLoadBalancer):
		addresses = s.Ingress
	default:
		for _, a := range s.ClusterIPs {
			addresses = append(addresses, a.String())
		}
	}
	if len(addresses) == 0 || port == 0 {
		return nil
	}
	return &v1beta1.EndpointStatus{
		Addresses: slices.Clone(addresses), Port: ptr(int32(port)),
		Protocol: ptr(corev1.Protocol(cmp.Or(s.Ports[0].Protocol, string(corev1.ProtocolUDP)))),
	}
}

// nodeAddresses returns the address of the node that pod runs on.
func (p *planner) nodeAddresses(pod *cluster.Pod) []string {
	if pod == nil {
		return nil
	}
	for _, n := range p.s.Nodes {
		if n.Name == pod.Node && len(n.Addresses) > 0 {
			return []string{n.Addresses[0].String()}
		}
	}
	return nil
}

// keySize is the size of a Curve25519 key (RFC 7748).
const keySize = 32

// publicKeys judges the keys of peers.
func (p *planner) publicKeys() {
	list := make([]*cluster.PublicKey, 0, len(p.s.PublicKeys))
	for i := range p.s.PublicKeys {
		list = append(list, &p.s.PublicKeys[i])
	}
	slices.SortStableFunc(list, func(a, b *cluster.PublicKey) int { return compareAge(a.Meta, b.Meta) })
	for _, k := range list {
		p.checkRemoteID(k.Meta, k.RemoteID)
		if errs := p.fieldErrors(k.Meta); len(errs) > 0 {
			for _, e := range errs {
				p.refuse(k.Meta, ReasonBadKey, "%s: write the base64 of field %s of the remote gateway's Secret", e.Message(), v1beta1.PublicKeyField)
			}
		} else if len(k.Key) != keySize {
			p.refuse(k.Meta, ReasonBadKey, "spec.publicKey has %d bytes instead of %d: write the base64 of field %s of the remote gateway's Secret", len(k.Key), keySize, v1beta1.PublicKeyField)
		} else if bytes.Count(k.Key, []byte{0}) == keySize {
			p.refuse(k.Meta, ReasonBadKey, "spec.publicKey is all zeros: write the base64 of field %s of the remote gateway's Secret", v1beta1.PublicKeyField)
		}
		o := &v1beta1.PublicKey{TypeMeta: typeMeta("PublicKey"), ObjectMeta: existing(k.Meta)}
		o.Status.Conditions = p.accepted(k.Meta)
		p.out.Statuses = append(p.out.Statuses, o)
	}
}
