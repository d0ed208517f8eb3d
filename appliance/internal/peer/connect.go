package peer

import (
	"bytes"
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/internal/invitation"
	"github.com/isthmus-net/isthmus/appliance/plan"
)

// connect returns what is next on the way to a peering, or with Init to
// Configurations on both sides.
func connect(b *Both, action Action, o *Options) Step {
	var s Step
	checkPair(b, &s)
	if s.busy() {
		return s
	}
	checkTunnelEndpoints(b, &s)
	checkTwice(b, &s)
	if action == Connect {
		checkInvitations(b, o, &s)
	}
	server := serverSide(b)
	if action == Connect && !o.SkipValidation {
		checkTemplate(b, server, o.Server, "--"+FlagServerTemplate, &s)
		checkTemplate(b, server.other(), o.Client, "--"+FlagClientTemplate, &s)
		checkService(b, server, o, &s)
	}
	// All that contradicts is said before the first object is made.
	configurations := configure(b, o, &s)
	var gateways []Change
	if action == Connect {
		gateways = adoptGateways(b, server, o, &s)
	}
	if len(s.Problems) > 0 {
		return s
	}
	for on := range b {
		namespace(b, Side(on), o, &s)
	}
	if s.busy() {
		return s
	}
	for on := range b {
		if b[on].Pending != "" {
			s.wait(Side(on), false, "%s of %s to have a network", b[on].Pending, b[on].ID)
		}
	}
	if s.busy() {
		return s
	}
	if s.Changes = configurations; s.busy() {
		return s
	}
	for on := range b {
		configured(b, Side(on), &s)
	}
	if s.busy() || action == Init {
		return s
	}
	if s.Changes = gateways; s.busy() {
		return s
	}
	exchange(b, server, o, &s)
	return s
}

// checkInvitations finds invitations that are open: their gateways take nobody but who has the
// text, until they end.
func checkInvitations(b *Both, o *Options, s *Step) {
	now := time.Now()
	if o.Now != nil {
		now = o.Now()
	}
	for on := range b {
		f := &b[on]
		if f.Invitation != nil && !f.Record.Done && now.Before(f.Record.Expires.Add(invitation.Grace)) {
			f.unfinished(b[Side(on).other()].ID, now, s)
		}
	}
}

// serverSide returns the side that is dialled: the remote one, unless there are
// gateways already that say otherwise.
func serverSide(b *Both) Side {
	if len(b[Local].Servers) > 0 || len(b[Remote].Clients) > 0 {
		return Local
	}
	return Remote
}

// checkTemplate finds templates that are not there.
func checkTemplate(b *Both, on Side, t Template, flag string, s *Step) {
	f := &b[on]
	t = t.of(&f.Cluster)
	if f.Template != nil {
		return
	}
	there := "there are none in this cluster"
	if len(f.Templates) > 0 {
		there = "there are " + strings.Join(f.Templates, ", ")
	}
	s.problem("template", fmt.Sprintf("%s %s/%s in %s", t.Kind, t.Namespace, t.Name, f.ID), fmt.Sprintf("name one by %s and %s-namespace", flag, strings.TrimSuffix(flag, "-name")),
		"it does not exist; %s", there)
}

// checkService finds what was asked for of a Service whose template has no
// place for it.
func checkService(b *Both, on Side, o *Options, s *Step) {
	t := b[on].Template
	if t == nil {
		return
	}
	lacks := func(flag, field string) {
		s.problem("template", fmt.Sprintf("%s %s/%s in %s", t.GetKind(), t.GetNamespace(), t.GetName(), b[on].ID), "add the field to it, or leave the flag out",
			"it has no spec.template.spec.service.spec.%s, which --%s is to fill", field, flag)
	}
	spec, _, _ := unstructured.NestedMap(t.Object, "spec", "template", "spec", "service", "spec")
	has := func(m map[string]any, field string) bool {
		_, plain := m[field]
		_, optional := m["?"+field]
		return plain || optional
	}
	if o.NodePort != 0 {
		var port map[string]any
		if ports, _ := spec["ports"].([]any); len(ports) > 0 {
			port, _ = ports[0].(map[string]any)
		}
		if !has(port, "nodePort") {
			lacks(FlagNodePort, "ports[0].nodePort")
		}
	}
	if o.LoadBalancerIP != "" && !has(spec, "loadBalancerIP") {
		lacks(FlagLoadBalancerIP, "loadBalancerIP")
	}
}

// namespace plans the namespace of a side.
func namespace(b *Both, on Side, o *Options, s *Step) {
	f := &b[on]
	switch {
	case f.Namespace.UID == "":
		n := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: f.Namespace.Name, Labels: map[string]string{}, Annotations: o.Annotations}}
		for _, labels := range []map[string]string{o.Labels, tenantLabels(b[on.other()].ID)} {
			for k, v := range labels {
				n.Labels[k] = v
			}
		}
		s.Changes = append(s.Changes, Change{On: on, Deed: Create, Object: n})
	case f.Namespace.DeletionTimestamp != nil:
		s.wait(on, false, "the end of Namespace %s in %s, which is being deleted", f.Namespace.Name, f.ID)
	default:
		s.InPlace = append(s.InPlace, b.ref(on, &f.Namespace))
	}
}

// configure plans the Configurations: each side has one that describes the other.
func configure(b *Both, o *Options, s *Step) []Change {
	var out []Change
	for i := range b {
		on, f, other := Side(i), &b[i], &b[1-i]
		if other.Pending != "" {
			continue
		}
		want := v1beta1.ClusterConfigCIDR{Pod: other.Pod, External: other.External}
		if len(f.Configurations) == 0 {
			c := &v1beta1.Configuration{ObjectMeta: b.meta(on, o)}
			for k, v := range o.Follow[on].Annotations() {
				metav1.SetMetaDataAnnotation(&c.ObjectMeta, k, v)
			}
			c.Spec.Remote.CIDR = want
			out = append(out, Change{On: on, Deed: Create, Object: c})
			continue
		}
		c := f.Configurations[0].DeepCopy()
		d := differences{object: c, ref: b.ref(on, c), kubectl: f.Cluster.Kubectl,
			hint: fmt.Sprintf("is it of another cluster with the ID %s? If not, delete it: %s delete configuration -n %s %s, and connect again", other.ID, f.Cluster.Kubectl, c.Namespace, c.Name)}
		d.add("spec.remote.cidr.pod", join(c.Spec.Remote.CIDR.Pod), join(want.Pod), func() { c.Spec.Remote.CIDR.Pod = want.Pod })
		d.add("spec.remote.cidr.external", join(c.Spec.Remote.CIDR.External), join(want.External), func() { c.Spec.Remote.CIDR.External = want.External })
		out = append(out, d.resolve(on, s)...)
		b.follow(on, c, o.Follow[on], s)
	}
	return out
}

func join(list []v1beta1.CIDR) string {
	var out []string
	for _, c := range list {
		out = append(out, string(c))
	}
	return strings.Join(out, ", ")
}

// configured waits until a side knows by which networks it reaches the other.
func configured(b *Both, on Side, s *Step) {
	if len(b[on].Configurations) == 0 {
		return
	}
	c := &b[on].Configurations[0]
	known := meta.FindStatusCondition(c.Status.Conditions, v1beta1.ConditionNetworkCIDRsConfigured)
	ref := b.ref(on, c)
	switch {
	case known == nil || known.ObservedGeneration != c.Generation:
		s.wait(on, false, "%s to be looked at by the controller of %s", ref, b[on].ID)
	case known.Status == metav1.ConditionTrue && c.Status.Remote != nil:
		s.InPlace = append(s.InPlace, ref)
	default:
		s.wait(on, known.Reason != plan.ReasonWaiting, "%s has no networks yet: %s", ref, cmp.Or(known.Message, known.Reason))
	}
}

// adoptGateways plans the GatewayServer where there is none, and brings both
// gateways to what was asked for by flags.
func adoptGateways(b *Both, server Side, o *Options, s *Step) []Change {
	var out []Change
	f := &b[server]
	if len(f.Servers) == 0 {
		out = append(out, Change{On: server, Deed: Create, Object: b.newServer(server, o)})
	} else if len(f.Servers) == 1 {
		g := f.Servers[0].DeepCopy()
		d := differences{object: g, ref: b.ref(server, g), kubectl: f.Cluster.Kubectl}
		e := &g.Spec.Endpoint
		d.flag(o, FlagMTU, "spec.mtu", fmt.Sprint(g.Spec.MTU), fmt.Sprint(o.MTU), func() { g.Spec.MTU = o.MTU })
		d.flag(o, FlagServiceType, "spec.endpoint.serviceType", string(cmp.Or(e.ServiceType, corev1.ServiceTypeClusterIP)), string(o.ServiceType), func() { e.ServiceType = o.ServiceType })
		d.flag(o, FlagServicePort, field("spec.endpoint.port", len(e.Ports) > 0), fmt.Sprint(first(e.Port, e.Ports)), fmt.Sprint(o.Port), func() { e.Port, e.Ports = setPort(e.Ports, o.Port) })
		d.flag(o, FlagNodePort, field("spec.endpoint.nodePort", len(e.NodePorts) > 0), fmt.Sprint(first(e.NodePort, e.NodePorts)), fmt.Sprint(o.NodePort), func() { e.NodePort, e.NodePorts = setPort(e.NodePorts, o.NodePort) })
		d.flag(o, FlagLoadBalancerIP, "spec.endpoint.loadBalancerIP", value(e.LoadBalancerIP), o.LoadBalancerIP, func() { e.LoadBalancerIP = optional(o.LoadBalancerIP) })
		d.template(o, FlagServerTemplate, FlagServerTemplateNamespace, "spec.serverTemplateRef", &g.Spec.ServerTemplateRef, o.Server)
		out = append(out, d.resolve(server, s)...)
	}
	on := server.other()
	if len(b[on].Clients) != 1 {
		return out
	}
	g := b[on].Clients[0].DeepCopy()
	d := differences{object: g, ref: b.ref(on, g), kubectl: b[on].Cluster.Kubectl}
	d.flag(o, FlagMTU, "spec.mtu", fmt.Sprint(g.Spec.MTU), fmt.Sprint(o.MTU), func() { g.Spec.MTU = o.MTU })
	d.flag(o, FlagClientAddress, "spec.endpoint.addresses", strings.Join(g.Spec.Endpoint.Addresses, ", "), o.Address, func() { g.Spec.Endpoint.Addresses = []string{o.Address} })
	d.flag(o, FlagClientPort, field("spec.endpoint.port", len(g.Spec.Endpoint.Ports) > 0), fmt.Sprint(first(g.Spec.Endpoint.Port, g.Spec.Endpoint.Ports)), fmt.Sprint(o.DialPort),
		func() { g.Spec.Endpoint.Port, g.Spec.Endpoint.Ports = setPort(g.Spec.Endpoint.Ports, o.DialPort) })
	d.template(o, FlagClientTemplate, FlagClientTemplateNamespace, "spec.clientTemplateRef", &g.Spec.ClientTemplateRef, o.Client)
	return append(out, d.resolve(on, s)...)
}

func (b *Both) newServer(on Side, o *Options) *v1beta1.GatewayServer {
	g := &v1beta1.GatewayServer{ObjectMeta: b.meta(on, o)}
	g.Spec.MTU, g.Spec.ServerTemplateRef = o.MTU, o.Server.of(&b[on].Cluster).ref()
	g.Spec.Endpoint = v1beta1.Endpoint{ServiceType: o.ServiceType, Port: &o.Port, LoadBalancerIP: optional(o.LoadBalancerIP)}
	if o.NodePort != 0 {
		g.Spec.Endpoint.NodePort = &o.NodePort
	}
	return g
}

func (t Template) ref() corev1.ObjectReference {
	return corev1.ObjectReference{APIVersion: t.APIVersion, Kind: t.Kind, Namespace: t.Namespace, Name: t.Name}
}

// exchange plans what one side has to learn of the other: where to dial, and the
// keys.
func exchange(b *Both, server Side, o *Options, s *Step) {
	on := server.other()
	g := &b[server].Servers[0]
	if accepted(b, server, g, g.Status.Conditions, s); s.busy() {
		return
	}
	s.InPlace = append(s.InPlace, b.ref(server, g))
	endpoint := dialled(g.Status.Endpoint, o)
	if endpoint == nil {
		s.wait(server, false, "%s to have an endpoint: %s", b.ref(server, g), noEndpoint(g))
		return
	}
	if len(b[on].Clients) == 0 {
		s.Changes = append(s.Changes, Change{On: on, Deed: Create, Object: b.newClient(on, o, endpoint)})
		return
	}
	c := &b[on].Clients[0]
	if s.Changes = redial(b, on, c, endpoint, o, s); s.busy() {
		return
	}
	if accepted(b, on, c, c.Status.Conditions, s); s.busy() {
		return
	}
	s.InPlace = append(s.InPlace, b.ref(on, c))
	if !o.KeepKeys {
		giveKey(b, server, g, o, s)
		giveKey(b, on, c, o, s)
	}
	if s.busy() || !o.Wait {
		return
	}
	for on := range b {
		// What a Connection says may be of the pod before.
		if why := b[on].Starting; why != "" {
			s.wait(Side(on), false, "the gateway of %s to run: %s", b[on].ID, why)
		}
	}
	if s.busy() {
		return
	}
	for on := range b {
		if why, ok := b[on].connected(); !ok {
			s.wait(Side(on), false, "the tunnel: %s", why)
		}
	}
}

// accepted waits until the controller has looked at a gateway as it is now. One
// of the public system says nothing of the kind.
func accepted(b *Both, on Side, g client.Object, conditions []metav1.Condition, s *Step) {
	c := meta.FindStatusCondition(conditions, plan.ConditionAccepted)
	switch {
	case c == nil:
	case c.ObservedGeneration != g.GetGeneration():
		s.wait(on, false, "%s to be looked at by the controller of %s", b.ref(on, g), b[on].ID)
	case c.Status == metav1.ConditionFalse:
		s.wait(on, true, "%s can't be used: %s", b.ref(on, g), cmp.Or(c.Message, c.Reason))
	}
}

// dialled is where a client is to dial; nil: that is not known yet.
func dialled(e *v1beta1.EndpointStatus, o *Options) *v1beta1.EndpointStatus {
	udp := corev1.ProtocolUDP
	out := &v1beta1.EndpointStatus{Protocol: &udp}
	if e != nil {
		out.Addresses, out.Port = e.Addresses, e.Port
		if len(e.Ports) > 0 {
			out.Port = &e.Ports[0]
		}
		if e.Protocol != nil {
			out.Protocol = e.Protocol
		}
	}
	if o.Address != "" {
		out.Addresses = []string{o.Address}
	}
	if o.DialPort != 0 {
		out.Port = &o.DialPort
	}
	if len(out.Addresses) == 0 || out.Port == nil || *out.Port == 0 {
		return nil
	}
	return out
}

// noEndpoint says what a server lacks to be dialled.
func noEndpoint(g *v1beta1.GatewayServer) string {
	switch g.Spec.Endpoint.ServiceType {
	case corev1.ServiceTypeLoadBalancer:
		return fmt.Sprintf("no load balancer has given Service %s an address", plan.GatewayName(g.Name))
	case corev1.ServiceTypeNodePort:
		return fmt.Sprintf("Service %s has no port of the nodes yet, or the gateway's pod is on no node", plan.GatewayName(g.Name))
	}
	return fmt.Sprintf("Service %s is not there yet", plan.GatewayName(g.Name))
}

// redial brings a client that isthmusctl wrote to where its server is now, unless
// they hear each other: an endpoint that works stays, and so does another's.
func redial(b *Both, on Side, g *v1beta1.GatewayClient, to *v1beta1.EndpointStatus, o *Options, s *Step) []Change {
	_, here := b[on].connected()
	_, there := b[on.other()].connected()
	have := g.Spec.Endpoint
	if here && there {
		return nil
	}
	c := g.DeepCopy()
	d := differences{object: c, ref: b.ref(on, g), kubectl: b[on].Cluster.Kubectl}
	if !o.Given[FlagClientAddress] {
		d.add("spec.endpoint.addresses", strings.Join(have.Addresses, ", "), strings.Join(to.Addresses, ", "), func() { c.Spec.Endpoint.Addresses = to.Addresses })
	}
	if !o.Given[FlagClientPort] {
		d.add(field("spec.endpoint.port", len(have.Ports) > 0), fmt.Sprint(first(have.Port, have.Ports)), fmt.Sprint(*to.Port),
			func() { c.Spec.Endpoint.Port, c.Spec.Endpoint.Ports = setPort(have.Ports, *to.Port) })
	}
	if by := d.others(); len(d.list) > 0 && by != "" {
		s.Notes = append(s.Notes, fmt.Sprintf("%s, written by %s, dials %s, and the server is at %s: it stays", d.ref, by,
			place(have.Addresses, first(have.Port, have.Ports)), place(to.Addresses, *to.Port)))
		return nil
	}
	return d.resolve(on, s)
}

func place(addresses []string, port int32) string {
	return fmt.Sprintf("%s port %d", strings.Join(addresses, ", "), port)
}

// giveKey plans that the other side has the public key of this side's gateway,
// as a PublicKey that goes when the gateway there does.
func giveKey(b *Both, from Side, g client.Object, o *Options, s *Step) {
	on, key := from.other(), b[from].PublicKey
	if len(key) == 0 {
		s.wait(from, false, "%s to have keys", b.ref(from, g))
		return
	}
	f := &b[on]
	if len(f.Keys) == 0 {
		k := b.newKey(on, o, key)
		var owner client.Object
		if len(f.Servers) > 0 {
			owner = &f.Servers[0]
		} else {
			owner = &f.Clients[0]
		}
		version, kind := kindOf(owner)
		k.OwnerReferences = []metav1.OwnerReference{{APIVersion: version, Kind: kind, Name: owner.GetName(), UID: owner.GetUID()}}
		s.Changes = append(s.Changes, Change{On: on, Deed: Create, Object: k})
		return
	}
	k := f.Keys[0].DeepCopy()
	d := differences{object: k, ref: b.ref(on, k), kubectl: f.Cluster.Kubectl,
		hint: fmt.Sprintf("delete it, and connect again: %s delete publickeies -n %s %s", f.Cluster.Kubectl, k.Namespace, k.Name)}
	if has, _, _ := k.Current(); !bytes.Equal(has, key) {
		d.add("spec.publicKey", "another key", "that of the gateway of "+b[from].ID, func() { k.Spec.PublicKey = key })
	}
	changes := d.resolve(on, s)
	if len(changes) == 0 {
		s.InPlace = append(s.InPlace, d.ref)
	}
	s.Changes = append(s.Changes, changes...)
}

// connected reports whether a side's gateway hears the other, or says why not.
func (f *Facts) connected() (why string, ok bool) {
	if len(f.Connections) == 0 {
		return fmt.Sprintf("the gateway of %s has not started", f.ID), false
	}
	i := max(0, slices.IndexFunc(f.Connections, func(c v1beta1.Connection) bool {
		return len(f.Servers) == 1 && c.Name == plan.GatewayName(f.Servers[0].Name) || len(f.Clients) == 1 && c.Name == plan.GatewayName(f.Clients[0].Name)
	}))
	c := f.Connections[i]
	if c.Status.Value == v1beta1.Connected {
		return "", true
	}
	why = fmt.Sprintf("Connection %s/%s in %s is %s", c.Namespace, c.Name, f.ID, cmp.Or(c.Status.Value, v1beta1.Connecting))
	if said := meta.FindStatusCondition(c.Status.Conditions, v1beta1.ConditionConnected); said != nil && said.Message != "" {
		why += ": " + said.Message
	}
	return why, false
}
