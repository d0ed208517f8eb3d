package plan

import (
	"bytes"
	"cmp"
	"maps"
	"slices"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
)

// keySize is the size of a Curve25519 key (RFC 7748).
const keySize = 32

// publicKeys judges the keys of peers.
func (p *planner) publicKeys() {
	list := make([]*cluster.PublicKey, 0, len(p.s.PublicKeys))
	for i := range p.s.PublicKeys {
		list = append(list, &p.s.PublicKeys[i])
	}
	slices.SortStableFunc(list, func(a, b *cluster.PublicKey) int {
		return cmp.Or(compareMade(a.Meta, b.Meta), compareAge(a.Meta, b.Meta))
	})
	p.keys = map[string]*cluster.PublicKey{}
	for _, k := range list {
		if made(k.Meta) && p.keys[k.RemoteID] != nil {
			p.supersede(k.Meta)
			continue
		}
		p.checkRemoteID(k.Meta, k.RemoteID)
		p.checkKey(k)
		if p.keys[k.RemoteID] == nil && p.sound(k.Meta) {
			p.keys[k.RemoteID] = k
		}
		o := &v1beta1.PublicKey{TypeMeta: typeMeta("PublicKey"), ObjectMeta: existing(k.Meta)}
		o.Status.Conditions = p.accepted(k.Meta)
		if k.Learned {
			o.Status.Learned = &v1beta1.LearnedKey{ObservedGeneration: k.Generation, PublicKey: k.Key, PresharedKey: k.PresharedKey}
		}
		p.out.Statuses = append(p.out.Statuses, o)
	}
}

// checkKey refuses k if it can't be the key of the remote gateway, is blocked, or is
// another one than an older PublicKey has.
func (p *planner) checkKey(k *cluster.PublicKey) {
	const write = "write the base64 of field " + v1beta1.PublicKeyField + " of the remote gateway's Secret"
	for _, e := range p.fieldErrors(k.Meta) {
		p.refuse(k.Meta, ReasonBadKey, "%s: %s", e.Message(), write)
	}
	if !p.sound(k.Meta) {
		return
	}
	if blocked, is := p.s.BlockedKeys.Of(k.Key); is {
		p.refuse(k.Meta, v1beta1.ReasonBlocked, "spec.publicKey is %s", blocked)
		return
	}
	for _, s := range p.s.Secrets {
		if bytes.Equal(s.PublicKey, k.Key) {
			p.refuse(k.Meta, ReasonBadKey, "spec.publicKey is that of Secret %s/%s, of a gateway of this cluster: %s", s.Namespace, s.Name, write)
			return
		}
	}
	if first := p.keys[k.RemoteID]; first != nil && !bytes.Equal(first.Key, k.Key) {
		p.refuse(k.Meta, ReasonDuplicate, "spec.publicKey is another key of cluster %s than PublicKey %s/%s has, which is older and counts: delete one of the two", k.RemoteID, first.Namespace, first.Name)
		return
	}
	for _, id := range slices.Sorted(maps.Keys(p.keys)) {
		if other := p.keys[id]; id != k.RemoteID && bytes.Equal(other.Key, k.Key) {
			p.remark(k.Meta, Warning, ReasonContradicts, "spec.publicKey is the key of cluster %s too, as PublicKey %s/%s says: who has its private key can pass for both, so see which of the two is right", id, other.Namespace, other.Name)
			return
		}
	}
}
