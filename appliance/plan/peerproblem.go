package plan

import (
	"slices"
	"strings"

	"github.com/isthmus-net/isthmus/appliance/cluster"
)

// PeerProblem returns why a Configuration and a PublicKey that are not there yet would be
// refused; empty: they would not be.
func PeerProblem(s cluster.Snapshot, c cluster.Configuration, k cluster.PublicKey) string {
	c.Created, k.Created = s.Now, s.Now // the youngest
	s.Configurations = append(slices.Clone(s.Configurations), c)
	s.PublicKeys = append(slices.Clone(s.PublicKeys), k)
	p := newPlanner(s)
	p.readProblems()
	p.tunnelEndpoints()
	p.configurations()
	p.publicKeys()
	var out []string
	for _, m := range []cluster.Meta{c.Meta, k.Meta} {
		if !p.sound(m) {
			out = append(out, p.verdict(m).messages...)
		}
	}
	return strings.Join(out, "; ")
}
