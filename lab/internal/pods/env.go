package pods

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/isthmus-net/isthmus/lab/internal/containerinit"
)

// objects reads the Secrets and ConfigMaps of a pod's namespace.
type objects interface {
	secret(name string) (*corev1.Secret, error)
	configMap(name string) (*corev1.ConfigMap, error)
}

// environment resolves the variables of a container.
type environment struct {
	pod     *corev1.Pod // its status carries the addresses
	image   Image
	service string // address of the service kubernetes
	objects objects
}

// of returns the environment of a container as NAME=value, sorted.
func (e environment) of(c *corev1.Container) (map[string]string, error) {
	env := map[string]string{
		"PATH": containerinit.DefaultPath, "HOSTNAME": hostname(e.pod), "HOME": "/root",
		"KUBERNETES_SERVICE_HOST": e.service, "KUBERNETES_SERVICE_PORT": "443", "KUBERNETES_SERVICE_PORT_HTTPS": "443",
	}
	for _, kv := range e.image.Env {
		k, v, _ := strings.Cut(kv, "=")
		env[k] = v
	}
	for _, from := range c.EnvFrom {
		values, err := e.from(from)
		if err != nil {
			return nil, err
		}
		for k, v := range values {
			env[from.Prefix+k] = v
		}
	}
	for _, v := range c.Env {
		if v.ValueFrom == nil {
			env[v.Name] = expand(v.Value, env)
			continue
		}
		value, ok, err := e.value(c, v.ValueFrom)
		if err != nil {
			return nil, fmt.Errorf("env %s: %w", v.Name, err)
		}
		if ok {
			env[v.Name] = value
		}
	}
	return env, nil
}

func (e environment) from(from corev1.EnvFromSource) (map[string]string, error) {
	switch {
	case from.ConfigMapRef != nil:
		cm, err := e.objects.configMap(from.ConfigMapRef.Name)
		if err != nil {
			return nil, optionally(from.ConfigMapRef.Optional, err)
		}
		return cm.Data, nil
	case from.SecretRef != nil:
		s, err := e.objects.secret(from.SecretRef.Name)
		if err != nil {
			return nil, optionally(from.SecretRef.Optional, err)
		}
		out := map[string]string{}
		for k, v := range s.Data {
			out[k] = string(v)
		}
		return out, nil
	}
	return nil, nil
}

// value returns what a variable's source says, or false when it is optional
// and absent.
func (e environment) value(c *corev1.Container, from *corev1.EnvVarSource) (string, bool, error) {
	switch {
	case from.FieldRef != nil:
		v, err := fieldPath(e.pod, from.FieldRef.FieldPath)
		return v, err == nil, err
	case from.ResourceFieldRef != nil:
		v, err := resourceField(e.pod, c, from.ResourceFieldRef)
		return v, err == nil, err
	case from.ConfigMapKeyRef != nil:
		ref := from.ConfigMapKeyRef
		cm, err := e.objects.configMap(ref.Name)
		if err != nil {
			return "", false, optionally(ref.Optional, err)
		}
		if v, ok := cm.Data[ref.Key]; ok {
			return v, true, nil
		}
		if ref.Optional != nil && *ref.Optional {
			return "", false, nil
		}
		return "", false, fmt.Errorf("couldn't find key %s in ConfigMap %s/%s", ref.Key, e.pod.Namespace, ref.Name)
	case from.SecretKeyRef != nil:
		ref := from.SecretKeyRef
		s, err := e.objects.secret(ref.Name)
		if err != nil {
			return "", false, optionally(ref.Optional, err)
		}
		if v, ok := s.Data[ref.Key]; ok {
			return string(v), true, nil
		}
		if ref.Optional != nil && *ref.Optional {
			return "", false, nil
		}
		return "", false, fmt.Errorf("couldn't find key %s in Secret %s/%s", ref.Key, e.pod.Namespace, ref.Name)
	}
	return "", false, fmt.Errorf("its source is not supported by the lab's kubelet")
}

// optionally forgives that an object is absent.
func optionally(optional *bool, err error) error {
	if optional != nil && *optional && isNotFound(err) {
		return nil
	}
	return err
}

// expand replaces $(NAME) by the variable's value; $$(NAME) is $(NAME), and an
// unknown name stays as it is.
func expand(s string, env map[string]string) string {
	var b strings.Builder
	for {
		i := strings.IndexByte(s, '$')
		if i < 0 || i+1 == len(s) {
			b.WriteString(s)
			return b.String()
		}
		b.WriteString(s[:i])
		s = s[i:]
		switch s[1] {
		case '$':
			b.WriteByte('$')
			s = s[2:]
		case '(':
			end := strings.IndexByte(s, ')')
			if end < 0 {
				b.WriteString(s)
				return b.String()
			}
			if v, ok := env[s[2:end]]; ok {
				b.WriteString(v)
			} else {
				b.WriteString(s[:end+1])
			}
			s = s[end+1:]
		default:
			b.WriteByte('$')
			s = s[1:]
		}
	}
}

func expandAll(in []string, env map[string]string) []string {
	out := make([]string, len(in))
	for i, s := range in {
		out[i] = expand(s, env)
	}
	return out
}

func environ(env map[string]string) []string {
	out := make([]string, 0, len(env))
	for _, k := range slices.Sorted(maps.Keys(env)) {
		out = append(out, k+"="+env[k])
	}
	return out
}

// fieldPath returns a field of the pod as the downward API names it.
func fieldPath(pod *corev1.Pod, path string) (string, error) {
	if name, key, ok := strings.Cut(path, "['"); ok {
		key = strings.TrimSuffix(key, "']")
		switch name {
		case "metadata.labels":
			return pod.Labels[key], nil
		case "metadata.annotations":
			return pod.Annotations[key], nil
		}
	}
	switch path {
	case "metadata.name":
		return pod.Name, nil
	case "metadata.namespace":
		return pod.Namespace, nil
	case "metadata.uid":
		return string(pod.UID), nil
	case "metadata.labels":
		return formatMap(pod.Labels), nil
	case "metadata.annotations":
		return formatMap(pod.Annotations), nil
	case "spec.nodeName":
		return pod.Spec.NodeName, nil
	case "spec.serviceAccountName":
		return pod.Spec.ServiceAccountName, nil
	case "status.hostIP":
		return pod.Status.HostIP, nil
	case "status.hostIPs":
		ips := make([]string, 0, len(pod.Status.HostIPs))
		for _, ip := range pod.Status.HostIPs {
			ips = append(ips, ip.IP)
		}
		return strings.Join(ips, ","), nil
	case "status.podIP":
		return pod.Status.PodIP, nil
	case "status.podIPs":
		ips := make([]string, 0, len(pod.Status.PodIPs))
		for _, ip := range pod.Status.PodIPs {
			ips = append(ips, ip.IP)
		}
		return strings.Join(ips, ","), nil
	}
	return "", fmt.Errorf("fieldPath %q is not supported", path)
}

func formatMap(m map[string]string) string {
	var b strings.Builder
	for _, k := range slices.Sorted(maps.Keys(m)) {
		fmt.Fprintf(&b, "%s=%q\n", k, m[k])
	}
	return strings.TrimSuffix(b.String(), "\n")
}

// resourceField returns a request or limit, or for a limit that is not set
// what the node has.
func resourceField(pod *corev1.Pod, c *corev1.Container, ref *corev1.ResourceFieldSelector) (string, error) {
	if ref.ContainerName != "" {
		for i := range pod.Spec.Containers {
			if pod.Spec.Containers[i].Name == ref.ContainerName {
				c = &pod.Spec.Containers[i]
			}
		}
	}
	kind, name, _ := strings.Cut(ref.Resource, ".")
	list := c.Resources.Limits
	if kind == "requests" {
		list = c.Resources.Requests
	}
	q, ok := list[corev1.ResourceName(name)]
	if !ok && kind == "limits" {
		q, ok = capacity()[corev1.ResourceName(name)]
	}
	if !ok && kind != "requests" {
		return "", fmt.Errorf("resource %q is not supported", ref.Resource)
	}
	divisor := ref.Divisor
	if divisor.IsZero() {
		divisor = resource.MustParse("1")
	}
	if name == "cpu" {
		return strconv.FormatInt((q.MilliValue()+divisor.MilliValue()-1)/divisor.MilliValue(), 10), nil
	}
	return strconv.FormatInt((q.Value()+divisor.Value()-1)/divisor.Value(), 10), nil
}

func hostname(pod *corev1.Pod) string {
	switch {
	case pod.Spec.HostNetwork:
		return pod.Spec.NodeName
	case pod.Spec.Hostname != "":
		return pod.Spec.Hostname
	}
	return pod.Name[:min(len(pod.Name), 63)]
}
