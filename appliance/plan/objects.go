package plan

import (
	"net/netip"
	"strconv"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
)

// apiVersions of the objects that are planned or written to.
const (
	networkingVersion = "networking.liqo.io/v1beta1"
	ipamVersion       = "ipam.liqo.io/v1alpha1"
	coreVersion       = "core.liqo.io/v1beta1"
	rbacVersion       = "rbac.authorization.k8s.io/v1"
)

// typeMeta returns the type of an object of networking.liqo.io.
func typeMeta(kind string) metav1.TypeMeta {
	return metav1.TypeMeta{APIVersion: networkingVersion, Kind: kind}
}

// existing returns the metadata by which an object that exists is found.
func existing(m cluster.Meta) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: m.Namespace, Name: m.Name, UID: types.UID(m.UID), Generation: m.Generation}
}

// owned returns the metadata of an object of a peering in the namespace of its
// owner.
func owned(name, remoteID string, owner cluster.Meta) metav1.ObjectMeta {
	o := ownedBy(owner, name)
	o.Labels = map[string]string{v1beta1.LabelRemoteClusterID: remoteID}
	return o
}

// ownedBy returns the metadata of an object in the namespace of its owner.
func ownedBy(owner cluster.Meta, name string) metav1.ObjectMeta {
	o := metav1.ObjectMeta{Namespace: owner.Namespace, Name: name}
	if owner.UID != "" {
		o.OwnerReferences = []metav1.OwnerReference{ownerReference(owner.Ref)}
	}
	return o
}

func ownerReference(r cluster.Ref) metav1.OwnerReference {
	controller := true
	return metav1.OwnerReference{APIVersion: r.APIVersion, Kind: r.Kind, Name: r.Name, UID: types.UID(r.UID), Controller: &controller}
}

func field(path string, index int) string { return path + "[" + strconv.Itoa(index) + "]" }

func apiCIDR(p netip.Prefix) v1beta1.CIDR { return v1beta1.CIDR(p.String()) }

func apiCIDRs(list []netip.Prefix) []v1beta1.CIDR {
	out := make([]v1beta1.CIDR, 0, len(list))
	for _, p := range list {
		out = append(out, apiCIDR(p))
	}
	return out
}

func apiIP(a netip.Addr) v1beta1.IP { return v1beta1.IP(a.String()) }

// host returns the network that is one address.
func host(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

func ptr[T any](v T) *T { return &v }
