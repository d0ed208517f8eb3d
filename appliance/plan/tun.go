package plan

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
)

// tunDevice is what WireGuard in userspace needs of its node.
const tunDevice = "/dev/net/tun"

// chooseTUN leaves the device out of r's pods where WireGuard is the kernel's on every
// node that they may run on. It sets r's digest, and reports whether they get the
// device back because of a node.
//
// A gateway keeps what it has until its pods are replaced for another reason. So a node
// that has just joined, and has not reported yet, costs no connection. A node that
// reports that it has no WireGuard does cost one: a gateway that came there without the
// device would not work.
func (p *planner) chooseTUN(r *rendered, live *cluster.Deployment) (back bool) {
	with := r.deployment.Spec.Template
	r.digest = podDigest(with)
	without := withoutTUN(with)
	if without == nil {
		return false
	}
	digest := podDigest(*without)
	has := p.kernelWireGuard(&with.Spec)
	switch was := annotation(live, v1beta1.AnnotationPodTemplate); {
	case was == digest && has != wireGuardMissing:
	case was == digest:
		return true
	case was == r.digest, live != nil && was == "", has != wireGuardEverywhere: // empty: made by a controller that did not say of what
		return false
	}
	r.deployment.Spec.Template, r.digest = *without, digest
	return false
}

func annotation(d *cluster.Deployment, key string) string {
	if d == nil {
		return ""
	}
	return d.Annotations[key]
}

// What the nodes of a gateway say of the kernel's WireGuard.
const (
	wireGuardUnknown    = iota // at least one has not said yet, and none says that it has none
	wireGuardEverywhere        // all have it
	wireGuardMissing           // at least one says that it has none
)

// kernelWireGuard says what is known of the nodes that a pod may run on.
func (p *planner) kernelWireGuard(pod *corev1.PodSpec) int {
	may := nodeaffinity.GetRequiredNodeAffinity(&corev1.Pod{Spec: *pod})
	nodes, unknown := 0, false
	for _, n := range p.s.Nodes {
		if ok, err := may.Match(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: n.Name, Labels: n.Labels}}); err == nil && !ok {
			continue
		}
		nodes++
		switch i := p.internalNode(n.Name); {
		case i == nil || i.WireGuard == nil:
			unknown = unknown || n.Ready // one that is not may be away for long
		case !*i.WireGuard:
			return wireGuardMissing
		}
	}
	if nodes == 0 || unknown {
		return wireGuardUnknown
	}
	return wireGuardEverywhere
}

// withoutTUN returns a template of pods without the device; nil if it has none, or
// if it is not clear that the one container that mounts it asks for WireGuard by
// --implementation=auto, from the kernel of its node.
func withoutTUN(t corev1.PodTemplateSpec) *corev1.PodTemplateSpec {
	device := func(v corev1.Volume) bool { return v.HostPath != nil && v.HostPath.Path == tunDevice }
	i := slices.IndexFunc(t.Spec.Volumes, device)
	if i < 0 || t.Spec.RuntimeClassName != nil { // whose kernel that is, nobody here knows
		return nil
	}
	of := func(m corev1.VolumeMount) bool { return m.Name == t.Spec.Volumes[i].Name }
	mounts := func(c corev1.Container) bool { return slices.ContainsFunc(c.VolumeMounts, of) }
	out := t.DeepCopy()
	n := slices.IndexFunc(out.Spec.Containers, mounts)
	if n < 0 || slices.ContainsFunc(out.Spec.InitContainers, mounts) || slices.ContainsFunc(out.Spec.Containers[n+1:], mounts) {
		return nil
	}
	c := &out.Spec.Containers[n]
	if !slices.Contains(c.Args, "--implementation=auto") {
		return nil
	}
	c.VolumeMounts = slices.DeleteFunc(c.VolumeMounts, of)
	out.Spec.Volumes = slices.Delete(out.Spec.Volumes, i, i+1)
	return out
}
