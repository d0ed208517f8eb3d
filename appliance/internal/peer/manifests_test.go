package peer

import (
	"bytes"
	"crypto/rand"
	"errors"
	"strings"
	"testing"

	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"
	"gotest.tools/v3/assert"
	corev1 "k8s.io/api/core/v1"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
)

// TestNewKeys: a key pair is what WireGuard's own tools make of the same private key.
func TestNewKeys(t *testing.T) {
	for range 10 {
		k, err := NewKeys(rand.Reader)
		assert.NilError(t, err)
		private, err := wgtypes.NewKey(k.Private)
		assert.NilError(t, err)
		public := private.PublicKey()
		assert.DeepEqual(t, k.Public, public[:])
		assert.Check(t, k.Private[0]&7 == 0 && k.Private[31]&0xc0 == 0x40, "not clamped: %v", k.Private)
		again, err := KeysOf(k.Private)
		assert.NilError(t, err)
		assert.DeepEqual(t, again, k)
	}
	_, err := NewKeys(strings.NewReader("short"))
	assert.ErrorContains(t, err, "random bytes")
	_, err = KeysOf([]byte("short"))
	assert.ErrorContains(t, err, "has 32 bytes")
}

func ends() [2]End {
	return [2]End{
		Local:  {ID: "rome", Pod: []v1beta1.CIDR{"10.1.0.0/16"}, External: []v1beta1.CIDR{"10.70.0.0/16"}, System: "liqo"},
		Remote: {ID: "milan", Pod: []v1beta1.CIDR{"10.0.0.0/16", "10.2.0.0/16"}, External: []v1beta1.CIDR{"10.70.0.0/16"}, System: "isthmus"},
	}
}

func dialOptions() Options {
	return Options{
		Server:      Template{APIVersion: "networking.liqo.io/v1beta1", Kind: "WgGatewayServerTemplate", Name: DefaultServerTemplate},
		Client:      Template{APIVersion: "networking.liqo.io/v1beta1", Kind: "WgGatewayClientTemplate", Name: DefaultClientTemplate},
		ServiceType: corev1.ServiceTypeNodePort, Port: DefaultPort, NodePort: 31840, Address: "192.0.2.7", DialPort: 31840,
	}
}

// TestWrite: either side has all that it needs of the other, and keys are apart.
func TestWrite(t *testing.T) {
	keys := [2]Keys{{bytes.Repeat([]byte{1}, 32), bytes.Repeat([]byte{2}, 32)}, {bytes.Repeat([]byte{3}, 32), bytes.Repeat([]byte{4}, 32)}}
	both, err := Write(ends(), keys, dialOptions())
	assert.NilError(t, err)
	for on, want := range []string{
		Local:  "v1 Namespace /liqo-tenant-milan, networking.liqo.io/v1beta1 Configuration liqo-tenant-milan/milan, networking.liqo.io/v1beta1 GatewayClient liqo-tenant-milan/milan, networking.liqo.io/v1beta1 PublicKey liqo-tenant-milan/milan",
		Remote: "v1 Namespace /liqo-tenant-rome, networking.liqo.io/v1beta1 Configuration liqo-tenant-rome/rome, networking.liqo.io/v1beta1 GatewayServer liqo-tenant-rome/rome, networking.liqo.io/v1beta1 PublicKey liqo-tenant-rome/rome",
	} {
		var got []string
		for _, o := range both[on].Objects {
			version, kind := o.GetObjectKind().GroupVersionKind().ToAPIVersionAndKind()
			got = append(got, version+" "+kind+" "+o.GetNamespace()+"/"+o.GetName())
			assert.Equal(t, o.GetLabels()[v1beta1.LabelRemoteClusterID], ends()[1-on].ID)
		}
		assert.Equal(t, strings.Join(got, ", "), want)
	}
	rome, milan := both[Local], both[Remote]
	assert.Equal(t, rome.ID+" "+milan.ID, "rome milan")
	assert.DeepEqual(t, rome.Objects[1].(*v1beta1.Configuration).Spec.Remote.CIDR.Pod, ends()[Remote].Pod)
	client, server := rome.Objects[2].(*v1beta1.GatewayClient), milan.Objects[2].(*v1beta1.GatewayServer)
	assert.DeepEqual(t, client.Spec.Endpoint.Addresses, []string{"192.0.2.7"})
	assert.Equal(t, *client.Spec.Endpoint.Port, int32(31840))
	assert.Equal(t, *server.Spec.Endpoint.NodePort, int32(31840))
	assert.Equal(t, *server.Spec.Endpoint.Port, int32(DefaultPort))
	assert.Equal(t, client.Spec.ClientTemplateRef.Namespace+" "+server.Spec.ServerTemplateRef.Namespace, "liqo isthmus")
	// Each gateway has its own pair, and the other's public key.
	for on, side := range both {
		assert.Equal(t, side.Secret.Namespace, side.Objects[1].GetNamespace())
		assert.DeepEqual(t, side.Secret.Data, map[string][]byte{v1beta1.PrivateKeyField: keys[on].Private, v1beta1.PublicKeyField: keys[on].Public})
		assert.DeepEqual(t, side.Objects[3].(*v1beta1.PublicKey).Spec.PublicKey, keys[1-on].Public)
	}
	assert.Equal(t, client.Spec.SecretRef.Name+" "+server.Spec.SecretRef.Name, rome.Secret.Name+" "+milan.Secret.Name)
}

// TestWriteRefuses: what nobody could apply is not written.
func TestWriteRefuses(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(*[2]End, *Options)
		want   string
	}{
		{"one cluster", func(e *[2]End, _ *Options) { e[Local].ID = "milan" }, "cluster milan: the two sides have the same ID"},
		{"no address", func(_ *[2]End, o *Options) { o.Address = "" }, "where rome has to dial is not known"},
		{"no such type", func(_ *[2]End, o *Options) { o.ServiceType = "Magic" }, `"Magic" is not LoadBalancer`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			e, o := ends(), dialOptions()
			tt.change(&e, &o)
			_, err := Write(e, [2]Keys{}, o)
			var refused *RefusedError
			assert.Assert(t, errors.As(err, &refused))
			assert.ErrorContains(t, err, tt.want)
		})
	}
}

// TestFollow: either side's Configuration says what it lets the other side add, and one that
// is there and says something else is named.
func TestFollow(t *testing.T) {
	o := dialOptions()
	o.Annotations = map[string]string{"team": "7"}
	o.Follow[Remote] = Follow{Ranges: []string{"10.64.0.0/10", "fd64::/16"}, Max: 2}
	both, err := Write(ends(), [2]Keys{{make([]byte, 32), make([]byte, 32)}, {make([]byte, 32), make([]byte, 32)}}, o)
	assert.NilError(t, err)
	for on, want := range []map[string]string{
		Local:  {"team": "7"},
		Remote: {"team": "7", v1beta1.AnnotationFollow: "10.64.0.0/10,fd64::/16", v1beta1.AnnotationFollowMax: "2"},
	} {
		for _, object := range append(both[on].Objects, both[on].Secret) {
			if _, is := object.(*v1beta1.Configuration); is {
				assert.DeepEqual(t, object.GetAnnotations(), want)
			} else {
				assert.DeepEqual(t, object.GetAnnotations(), map[string]string{"team": "7"})
			}
		}
	}

	var b Both
	b[Local].Identity, b[Remote].Identity = Identity{ID: "rome"}, Identity{ID: "milan"}
	b[Remote].Cluster.Isthmusctl = "isthmusctl --context milan"
	c := &v1beta1.Configuration{}
	for _, tt := range []struct{ has, want string }{
		{"10.64.0.0/10", ""},
		{"", "leave the flag out and run isthmusctl --context milan peer follow rome --range 10.64.0.0/10"},
		{"10.65.0.0/16", "peer follow rome"},
	} {
		c.Annotations = map[string]string{v1beta1.AnnotationFollow: tt.has}
		var s Step
		b.follow(Remote, c, Follow{Ranges: []string{"10.64.0.0/10"}}, &s)
		b.follow(Remote, c, Follow{}, &s)
		assert.Equal(t, len(s.Problems) == 0, tt.want == "", tt.has)
		if tt.want != "" {
			assert.Assert(t, strings.Contains(s.Problems[0].Fix, tt.want), s.Problems[0].Fix)
		}
	}

	// Only the number is another one, and the command says it.
	var s Step
	c.Annotations = map[string]string{v1beta1.AnnotationFollow: "10.64.0.0/10", v1beta1.AnnotationFollowMax: "9"}
	b.follow(Remote, c, Follow{Ranges: []string{"10.64.0.0/10"}, Max: 2}, &s)
	assert.Equal(t, len(s.Problems), 1)
	assert.Assert(t, strings.HasSuffix(s.Problems[0].Fix, " --range 10.64.0.0/10 --max 2"), s.Problems[0].Fix)

	flags := []string{FlagFollow, FlagRemoteFollow}
	assert.ErrorContains(t, CheckMax(2, FlagFollowMax, flags, Follow{}, Follow{}), "--follow-max 2 is about networks that a side may add, and none may: give --follow or --remote-follow")
	assert.NilError(t, CheckMax(2, FlagFollowMax, flags, Follow{}, Follow{Ranges: []string{"10.64.0.0/10"}}))
	assert.NilError(t, CheckMax(0, FlagFollowMax, flags, Follow{}, Follow{}))
}
