package plan

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
)

// A workload is what a template made of a gateway.
type workload struct {
	metadata   v1beta1.ObjectMeta
	deployment v1beta1.DeploymentTemplate
	service    v1beta1.ServiceTemplate // of a server
	metrics    *v1beta1.Metrics
	version    string // of the template
	secret     string
	ownKeys    bool // the Secret is the user's
}

// TemplateRef returns the template that g is to be made from: the one that its
// object names, or the chart's in the namespace of the installation.
func TemplateRef(g *cluster.Gateway, system string) cluster.Ref {
	kind, fallback := "WgGatewayServerTemplate", "wireguard-server"
	if g.Role == cluster.Client {
		kind, fallback = "WgGatewayClientTemplate", "wireguard-client"
	}
	return cluster.Ref{
		APIVersion: networkingVersion, Kind: kind,
		Namespace: cmp.Or(g.TemplateRef.Namespace, system), Name: cmp.Or(g.TemplateRef.Name, fallback),
	}
}

// TemplateVersion tells a template from what it was before: it is what the
// Deployment of a gateway made from it has as v1beta1.AnnotationTemplate.
func TemplateVersion(m cluster.Meta) string { return fmt.Sprintf("%s.%d", m.UID, m.Generation) }

// renderWorkload fills the template of g in.
func (p *planner) renderWorkload(g *cluster.Gateway, w *workload) {
	templates, makes := p.s.ServerTemplates, "WgGatewayServer"
	if g.Role == cluster.Client {
		templates, makes = p.s.ClientTemplates, "WgGatewayClient"
	}
	from := TemplateRef(g, p.s.Namespace)
	kind, namespace, name := from.Kind, from.Namespace, from.Name
	reference := "spec." + g.Role + "TemplateRef"
	if g.TemplateRef.Kind != "" && g.TemplateRef.Kind != kind {
		p.refuse(g.Meta, ReasonNoTemplate, "%s.kind: %q: use %s", reference, g.TemplateRef.Kind, kind)
		return
	}
	if group, _, _ := strings.Cut(g.TemplateRef.APIVersion, "/"); group != "" && group != v1beta1.GroupVersion.Group {
		p.refuse(g.Meta, ReasonNoTemplate, "%s.apiVersion: %q: use %s", reference, g.TemplateRef.APIVersion, networkingVersion)
		return
	}
	i := slices.IndexFunc(templates, func(t cluster.Template) bool { return t.Namespace == namespace && t.Name == name })
	if i < 0 {
		p.refuse(g.Meta, ReasonNoTemplate, "%s: there is no %s %s/%s: create it, or name %s in namespace %s", reference, kind, namespace, name, TemplateRef(&cluster.Gateway{Role: g.Role}, p.s.Namespace).Name, p.s.Namespace)
		return
	}
	t := templates[i]
	w.version = TemplateVersion(t.Meta)
	if t.ObjectKind != makes || t.ObjectAPIVersion != networkingVersion {
		p.refuse(g.Meta, ReasonBadTemplate, "%s %s/%s: spec.objectKind: %s %s can't be made here: use %s %s", kind, namespace, name, t.ObjectAPIVersion, t.ObjectKind, networkingVersion, makes)
		return
	}
	values := templateValues{
		Name: GatewayName(g.Name), GatewayName: g.Name, Namespace: g.Namespace, GatewayUID: g.UID, ClusterID: g.RemoteID, SecretName: w.secret,
	}
	number, _ := p.hostNumberOf(g)
	values.HostInterface, values.NetNS = hostInterfaceOf(number), netnsOf(number)
	values.ListenPort, values.HealthPort, values.MetricsPort = listenPort+number, hostHealthPort+number, hostMetricsPort+number
	var err error
	var unknown []string
	if g.Role == cluster.Server {
		var object v1beta1.GatewayServer
		if err = json.Unmarshal(g.Raw, &object); err == nil {
			p.checkExposure(g, object.Spec)
			values.Spec = object.Spec
			var wg v1beta1.WgGatewayServer
			if unknown, err = render(t.JSON, values, &wg); err == nil {
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
			p.checkDialled(g, object.Spec.Endpoint)
			values.Spec = object.Spec
			var wg v1beta1.WgGatewayClient
			if unknown, err = render(t.JSON, values, &wg); err == nil {
				w.metadata, w.deployment, w.metrics = meta(wg.ObjectMeta), wg.Spec.Deployment, wg.Spec.Metrics
			}
		}
	}
	if err != nil {
		p.refuse(g.Meta, ReasonBadTemplate, "%s %s/%s can't be filled in: %v", kind, namespace, name, err)
	} else if len(w.deployment.Spec.Template.Spec.Containers) == 0 {
		p.refuse(g.Meta, ReasonBadTemplate, "%s %s/%s: spec.template.spec.deployment.spec.template.spec.containers is empty: add the gateway", kind, namespace, name)
	} else {
		p.notUsed(g, w, fmt.Sprintf("%s %s/%s", kind, namespace, name), unknown)
		p.onePod(g, w, fmt.Sprintf("%s %s/%s", kind, namespace, name))
		p.checkHostNetwork(g, w, fmt.Sprintf("%s %s/%s", kind, namespace, name))
	}
}

// notUsed says what of a template is not in the objects that are made from it.
func (p *planner) notUsed(g *cluster.Gateway, w *workload, template string, unknown []string) {
	if len(unknown) > 0 {
		instead := "correct the name, or remove it"
		if slices.ContainsFunc(unknown, func(path string) bool { return strings.HasSuffix(path, ".workloadRef") }) { // alpha in 1.35, gone in 1.36
			instead += "; Kubernetes 1.36 has schedulingGroup in place of workloadRef"
		}
		p.remark(g.Meta, Warning, ReasonNotUsed, "%s: what is made from it has no such fields, and they are not used; %s: %s", template, instead, strings.Join(unknown, ", "))
	}
	finalizers := func(path string, m v1beta1.ObjectMeta) {
		if len(m.Finalizers) > 0 {
			p.remark(g.Meta, Warning, ReasonNotUsed, "%s: spec.template.%s.finalizers is not used, for nobody would remove them: remove it", template, path)
		}
	}
	finalizers("metadata", w.metadata)
	finalizers("spec.deployment.metadata", w.deployment.Metadata)
	finalizers("spec.service.metadata", w.service.Metadata)
	if m := w.metrics; m != nil && m.Service != nil {
		finalizers("spec.metrics.service.metadata", m.Service.Metadata)
	}
	if m := w.metrics; m != nil && m.ServiceMonitor != nil {
		finalizers("spec.metrics.serviceMonitor.metadata", m.ServiceMonitor.Metadata)
	}
}

// onePod makes a template's Deployment one of a single pod: two of them would have
// one key, and the peer would send to whichever it heard last.
func (p *planner) onePod(g *cluster.Gateway, w *workload, template string) {
	n := w.deployment.Spec.Replicas
	if n == nil || *n <= 1 {
		return
	}
	p.remark(g.Meta, Warning, ReasonNotUsed, "%s: spec.template.spec.deployment.spec.replicas: %d is taken as 1, for two pods would have one key, and the remote cluster would send to whichever it has heard last: write 1", template, *n)
	w.deployment.Spec.Replicas = ptr(int32(1))
}

func meta(o metav1.ObjectMeta) v1beta1.ObjectMeta {
	return v1beta1.ObjectMeta{Labels: o.Labels, Annotations: o.Annotations, Finalizers: o.Finalizers}
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

// workload plans what r needs to run.
func (p *planner) workload(r *rendered, s step) {
	g, w, name, pod := r.Gateway, r.workload, GatewayName(r.Name), r.labels
	p.wgGateway(g, w)
	p.add(p.newDeployment(r, s))
	if g.Role == cluster.Server {
		p.service(g, name, w.service, pod)
	}
	if w.metrics != nil && w.metrics.Enabled && w.metrics.Service != nil {
		p.service(g, metricsName(name), *w.metrics.Service, pod)
	}
	p.belongings(g, w.ownKeys)
}

// metricsName returns the name of the Service in front of a gateway's metrics.
func metricsName(gateway string) string { return shorten(gateway+"-metrics", maxLabel) }

// belongings plans what g needs besides the workload that its template makes:
// its keys, unless they are the user's, its rights, and the objects that it
// reports in.
func (p *planner) belongings(g *cluster.Gateway, ownKeys bool) {
	name := GatewayName(g.Name)
	if !ownKeys {
		k := KeySecret{Namespace: g.Namespace, Name: name, Labels: map[string]string{
			v1beta1.LabelRemoteClusterID: g.RemoteID, v1beta1.LabelGatewayResource: "true", v1beta1.LabelManagedBy: v1beta1.ManagedBy,
		}}
		if g.UID != "" {
			k.Owner = ownerReference(g.Ref)
		}
		p.out.Keys = append(p.out.Keys, k)
	}
	p.access(g)

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
