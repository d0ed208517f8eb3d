package peer

import (
	"crypto/ecdh"
	"fmt"
	"io"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
)

// An End is one side of a peering that is written to files.
type End struct {
	ID            string
	Pod, External []v1beta1.CIDR // the cluster's own networks
	System        string         // namespace of the installation, where templates are
}

// Keys are a key pair of WireGuard (RFC 7748, X25519).
type Keys struct{ Private, Public []byte }

// keySize is that of either key, in bytes.
const keySize = 32

// NewKeys makes a key pair from random bytes. The private key is clamped, as the
// kernel keeps it (RFC 7748, section 5: decodeScalar25519): a gateway that finds
// another one than it has set would set it again and again.
func NewKeys(random io.Reader) (Keys, error) {
	private := make([]byte, keySize)
	if _, err := io.ReadFull(random, private); err != nil {
		return Keys{}, fmt.Errorf("random bytes for a key: %w", err)
	}
	private[0] &= 248
	private[31] = private[31]&127 | 64
	return KeysOf(private)
}

// KeysOf returns the pair of a private key.
func KeysOf(private []byte) (Keys, error) {
	key, err := ecdh.X25519().NewPrivateKey(private)
	if err != nil {
		return Keys{}, fmt.Errorf("a private key of WireGuard has %d bytes: %w", keySize, err)
	}
	return Keys{private, key.PublicKey().Bytes()}, nil
}

// Manifests are the objects of one side, to be kept in files. Nobody has to read them
// from the other side, so it does not matter in which order they are applied.
type Manifests struct {
	ID      string          // of the cluster that they are for
	Objects []client.Object // the namespace first
	Secret  *corev1.Secret  // the key pair of its gateway
}

// Write returns the objects of both sides. The remote side is the server, which the
// local one dials at o.Address and o.DialPort: these have to be known beforehand. It
// returns a RefusedError.
func Write(ends [2]End, keys [2]Keys, o Options) ([2]Manifests, error) {
	var b Both
	for on, e := range ends {
		b[on].Identity = Identity{ID: e.ID, Pod: e.Pod, External: e.External}
		b[on].Cluster = Cluster{Name: "cluster " + e.ID, System: e.System}
		b[on].Namespace.Name = v1beta1.TenantNamespacePfx + ends[1-on].ID
	}
	s := Step{Problems: o.Check()}
	if ends[Local].ID == ends[Remote].ID {
		s.problem("clusters", "cluster "+ends[Local].ID, "give one of them another ID", "the two sides have the same ID")
	}
	endpoint := dialled(nil, &o)
	if endpoint == nil {
		s.problem("flags", "--server-address, --server-port", "name the address of a load balancer, a name of the DNS, or an address of a node, and the port",
			"where %s has to dial is not known", ends[Local].ID)
	}
	if len(s.Problems) > 0 {
		return [2]Manifests{}, &RefusedError{Problems: s.Problems}
	}
	var out [2]Manifests
	add := func(on Side, objects ...client.Object) { out[on].Objects = append(out[on].Objects, objects...) }
	for on := range b {
		out[on].ID = b[on].ID
		namespace(&b, Side(on), &o, &s)
	}
	s.Changes = append(s.Changes, configure(&b, &o, &s)...)
	for _, c := range s.Changes {
		add(c.On, c.Object)
	}
	server, dialler := b.newServer(Remote, &o), b.newClient(Local, &o, endpoint)
	server.Spec.SecretRef.Name, dialler.Spec.SecretRef.Name = b.secretName(Remote), b.secretName(Local)
	add(Remote, server)
	add(Local, dialler)
	for on := range b {
		add(Side(on), b.newKey(Side(on), &o, keys[1-on].Public))
		out[on].Secret = b.newSecret(Side(on), &o, keys[on])
	}
	for on := range out {
		for _, object := range append(out[on].Objects, out[on].Secret) {
			object.GetObjectKind().SetGroupVersionKind(schema.FromAPIVersionAndKind(kindOf(object)))
		}
	}
	return out, nil
}

// secretName is the name of the Secret with the keys of a side's gateway: another one
// than that of the Secret that the controller makes.
func (b *Both) secretName(on Side) string { return b[on.other()].ID + "-keys" }

func (b *Both) newSecret(on Side, o *Options, k Keys) *corev1.Secret {
	m := b.meta(on, o)
	m.Name = b.secretName(on)
	m.Labels[v1beta1.LabelGatewayResource] = "true"
	return &corev1.Secret{
		ObjectMeta: m, Type: corev1.SecretTypeOpaque,
		Data: map[string][]byte{v1beta1.PrivateKeyField: k.Private, v1beta1.PublicKeyField: k.Public},
	}
}

func (b *Both) newClient(on Side, o *Options, endpoint *v1beta1.EndpointStatus) *v1beta1.GatewayClient {
	c := &v1beta1.GatewayClient{ObjectMeta: b.meta(on, o)}
	c.Spec = v1beta1.GatewayClientSpec{MTU: o.MTU, ClientTemplateRef: o.Client.of(&b[on].Cluster).ref(), Endpoint: *endpoint}
	return c
}

// newKey is the PublicKey by which a side knows the other's gateway.
func (b *Both) newKey(on Side, o *Options, public []byte) *v1beta1.PublicKey {
	k := &v1beta1.PublicKey{ObjectMeta: b.meta(on, o)}
	k.Labels[v1beta1.LabelGatewayResource] = "true"
	k.Spec.PublicKey = public
	return k
}
