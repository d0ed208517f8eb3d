package plan

import (
	"net/netip"
	"testing"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"

	"github.com/isthmus-net/isthmus/appliance/cluster"
)

// What would be refused is known before it is made.
func TestPeerProblem(t *testing.T) {
	meta := func(kind, id, name string) cluster.Meta {
		return cluster.Meta{Ref: cluster.Ref{Kind: kind, Namespace: "liqo-tenant-" + id, Name: name}}
	}
	prefixes := func(texts ...string) (out []netip.Prefix) {
		for _, s := range texts {
			out = append(out, netip.MustParsePrefix(s))
		}
		return out
	}
	taken := cluster.Snapshot{
		ID: "milan", Namespace: "liqo",
		Namespaces:     []cluster.Namespace{{Meta: cluster.Meta{Ref: cluster.Ref{Kind: "Namespace", Name: "liqo-tenant-oslo"}, Labels: map[string]string{"liqo.io/remote-cluster-id": "oslo"}}}},
		Configurations: []cluster.Configuration{{Meta: meta("Configuration", "lima", "lima"), RemoteID: "lima", Remote: cluster.CIDRs{Pod: prefixes("10.9.0.0/16"), External: prefixes("10.79.0.0/16")}}},
		Secrets:        []cluster.KeySecret{{PublicKey: key32(5)}},
	}
	for _, c := range []struct {
		name, id      string
		pod, external string
		key           byte
		want          string
	}{
		{"sound", "rome", "10.1.0.0/16", "10.71.0.0/16", 1, ""},
		{"overlapping networks are remapped, not refused", "rome", "10.9.0.0/16", "10.79.0.0/16", 1, ""},
		{"own ID", "milan", "10.1.0.0/16", "10.71.0.0/16", 1, "is the ID of this cluster"},
		{"a peering there is", "lima", "10.1.0.0/16", "10.71.0.0/16", 1, "already describes cluster lima"},
		{"networks that overlap each other", "rome", "10.1.0.0/16", "10.1.8.0/24", 1, "overlaps"},
		{"the network of nobody", "rome", "127.0.0.0/8", "10.71.0.0/16", 1, "127.0.0.0/8"},
		{"own key", "rome", "10.1.0.0/16", "10.71.0.0/16", 5, "of a gateway of this cluster"},
	} {
		got := PeerProblem(taken,
			cluster.Configuration{Meta: meta("Configuration", c.id, c.id), RemoteID: c.id, Remote: cluster.CIDRs{Pod: prefixes(c.pod), External: prefixes(c.external)}},
			cluster.PublicKey{Meta: meta("PublicKey", c.id, c.id), RemoteID: c.id, Key: key32(c.key)})
		if c.want == "" {
			assert.Check(t, is.Equal(got, ""), c.name)
		} else {
			assert.Check(t, is.Contains(got, c.want), c.name)
		}
	}
	assert.Equal(t, len(taken.Configurations), 1)
}

func key32(b byte) []byte {
	k := make([]byte, keySize)
	k[0] = b
	return k
}
