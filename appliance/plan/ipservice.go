package plan

import (
	"encoding/json"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation"
	fieldpath "k8s.io/apimachinery/pkg/util/validation/field"

	ipamv1alpha1 "github.com/isthmus-net/isthmus/appliance/api/ipam/v1alpha1"
	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
)

// ipServices plans the Services that IPs ask for. What is wrong with one shows
// in the condition of its IP, whose address works all the same.
func (p *planner) ipServices() {
	type name struct{ namespace, name string }
	taken := map[name]string{} // by whom
	for _, s := range p.s.OtherServices {
		taken[name{s.Namespace, s.Name}] = "is there, and not of this IP"
	}
	for _, o := range p.out.Objects {
		if s, ok := o.(*corev1.Service); ok {
			taken[name{s.Namespace, s.Name}] = "is that of a gateway"
		}
	}
	for _, x := range p.ips {
		if x.ServiceTemplate == nil || !p.sound(x.Meta) {
			continue
		}
		var t ipamv1alpha1.ServiceTemplate
		if err := json.Unmarshal(x.ServiceTemplate, &t); err != nil {
			p.refuse(x.Meta, ReasonBadTemplate, "spec.serviceTemplate: %v", err)
			continue
		}
		service := shorten(x.Name, maxLabel)
		if len(validation.IsDNS1035Label(service)) > 0 {
			p.refuse(x.Meta, ReasonBadTemplate, "spec.serviceTemplate: %q can't be the name of a Service: create the IP anew with one of lower-case letters, digits and hyphens that begins with a letter, or remove the template", x.Name)
			continue
		}
		if by := taken[name{x.Namespace, service}]; by != "" {
			p.refuse(x.Meta, ReasonNameTaken, "spec.serviceTemplate: Service %s/%s %s: delete that, or create the IP anew with another name", x.Namespace, service, by)
			continue
		}
		at := fieldpath.NewPath("spec", "serviceTemplate", "metadata")
		if p.checkMetadata(x.Meta, ReasonBadTemplate, at.Child("labels"), t.Metadata.Labels, at.Child("annotations"), t.Metadata.Annotations); !p.sound(x.Meta) {
			continue
		}
		ports, problem := servicePorts(&t.Spec)
		if problem != "" {
			p.refuse(x.Meta, ReasonBadTemplate, "spec.serviceTemplate.spec.%s", problem)
			continue
		}
		if service != x.Name {
			p.remark(x.Meta, Normal, ReasonNameShortened, "its Service is called %s, because the name of the IP is longer than %d characters", service, maxLabel)
		}
		if t.Metadata.Name != "" && t.Metadata.Name != service {
			p.remark(x.Meta, Warning, ReasonNotUsed, "spec.serviceTemplate.metadata.name %q is not used: its Service is called %s, as the IP is", t.Metadata.Name, service)
		}
		if t.Metadata.Namespace != "" && t.Metadata.Namespace != x.Namespace {
			p.remark(x.Meta, Warning, ReasonNotUsed, "spec.serviceTemplate.metadata.namespace %q is not used: its Service is in namespace %s, as the IP is", t.Metadata.Namespace, x.Namespace)
		}
		if len(t.Metadata.Finalizers) > 0 {
			p.remark(x.Meta, Warning, ReasonNotUsed, "spec.serviceTemplate.metadata.finalizers is not used, for nobody would remove them from Service %s: remove it", service)
		}
		p.ipService(x, service, t, ports)
	}
}

// ipService plans the Service of an IP and its endpoint, which is where the IP
// stands for: whoever reflects the Service to a peer writes the IP's address in
// its place.
func (p *planner) ipService(x *address, name string, t ipamv1alpha1.ServiceTemplate, ports []discoveryv1.EndpointPort) {
	family, kind := corev1.IPv4Protocol, discoveryv1.AddressTypeIPv4
	if x.IP.IP.Is6() {
		family, kind = corev1.IPv6Protocol, discoveryv1.AddressTypeIPv6
	}
	s := &corev1.Service{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Service"}, ObjectMeta: ownedBy(x.Meta, name)}
	s.Spec = t.Spec
	if len(s.Spec.IPFamilies) == 0 {
		s.Spec.IPFamilies = []corev1.IPFamily{family}
	}
	decorate(&s.ObjectMeta, t.Metadata, nil)
	p.add(s)

	e := &discoveryv1.EndpointSlice{TypeMeta: metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"}, ObjectMeta: ownedBy(x.Meta, name)}
	e.Labels = map[string]string{discoveryv1.LabelServiceName: name, discoveryv1.LabelManagedBy: v1beta1.ManagedBy}
	if s.Spec.ClusterIP == corev1.ClusterIPNone {
		e.Labels[corev1.IsHeadlessService] = ""
	}
	e.AddressType, e.Ports = kind, ports
	e.Endpoints = []discoveryv1.Endpoint{{
		Addresses: []string{x.IP.IP.String()}, Conditions: discoveryv1.EndpointConditions{Ready: ptr(true)},
	}}
	p.add(e)
}

// servicePorts returns the ports of the endpoint of a Service without pods. The
// problem says what the API server, or nobody, would object to, and what to do.
func servicePorts(s *corev1.ServiceSpec) (ports []discoveryv1.EndpointPort, problem string) {
	switch {
	case len(s.Selector) > 0:
		return nil, "selector: pods would take the place of spec.ip: remove it"
	case s.Type == corev1.ServiceTypeExternalName:
		return nil, "type: ExternalName has no endpoint: write ClusterIP, NodePort or LoadBalancer"
	case len(s.Ports) == 0 && s.ClusterIP != corev1.ClusterIPNone:
		return nil, "ports is empty: list the ports of the host"
	}
	names, numbers := map[string]bool{}, map[string]bool{}
	for i, port := range s.Ports {
		at := field("ports", i)
		protocol := port.Protocol
		if protocol == "" {
			protocol = corev1.ProtocolTCP
		}
		number := fmt.Sprintf("%d/%s", port.Port, protocol)
		target := int(port.Port)
		if port.TargetPort != (intstr.IntOrString{}) {
			target = port.TargetPort.IntValue()
		}
		switch {
		case port.Port < 1 || port.Port > 65535:
			return nil, fmt.Sprintf("%s.port: %d is not a port; write 1 to 65535", at, port.Port)
		case port.TargetPort.Type == intstr.String && target == 0:
			return nil, fmt.Sprintf("%s.targetPort: %q is the name of a port of pods, and there are none: write a number", at, port.TargetPort.StrVal)
		case target < 1 || target > 65535:
			return nil, fmt.Sprintf("%s.targetPort: %d is not a port; write 1 to 65535", at, target)
		case protocol != corev1.ProtocolTCP && protocol != corev1.ProtocolUDP && protocol != corev1.ProtocolSCTP:
			return nil, fmt.Sprintf("%s.protocol: %q is not a protocol of Services; write TCP, UDP or SCTP", at, port.Protocol)
		case port.Name == "" && len(s.Ports) > 1:
			return nil, at + ".name is empty: give each of several ports a name"
		case port.Name != "" && len(validation.IsDNS1123Label(port.Name)) > 0:
			return nil, fmt.Sprintf("%s.name: %q is not a name for a port; write lower-case letters, digits and hyphens", at, port.Name)
		case names[port.Name] || numbers[number]:
			return nil, fmt.Sprintf("%s: %s %s is there twice: remove one", at, port.Name, number)
		}
		names[port.Name], numbers[number] = true, true
		ports = append(ports, discoveryv1.EndpointPort{Name: ptr(port.Name), Protocol: ptr(protocol), Port: ptr(int32(target))})
	}
	return ports, ""
}
