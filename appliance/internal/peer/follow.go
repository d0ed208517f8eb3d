package peer

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
)

// A Follow says which networks a peer may add to those of its Configuration, by telling
// them through the tunnel.
type Follow struct {
	Ranges []string // that they have to be in; empty: it may add none
	Max    int      // how many; 0: v1beta1.DefaultFollowMax
}

// Check says what is wrong with what was given by two flags.
func (f Follow) Check(flag, maxFlag string) error {
	for _, text := range f.Ranges {
		if p, err := netip.ParsePrefix(text); err != nil || p != p.Masked() || p.Addr().Is4In6() {
			return fmt.Errorf("--%s %q is not a range: write one such as 10.64.0.0/10 or fd64::/16", flag, text)
		}
	}
	if f.Max < 0 || f.Max > v1beta1.MaxFollowMax {
		return fmt.Errorf("--%s %d: write how many networks the peer may add, 1 to %d", maxFlag, f.Max, v1beta1.MaxFollowMax)
	}
	return nil
}

// Annotations are those of a Configuration that say so.
func (f Follow) Annotations() map[string]string {
	out := map[string]string{}
	if len(f.Ranges) > 0 {
		out[v1beta1.AnnotationFollow] = strings.Join(f.Ranges, ",")
		if f.Max > 0 {
			out[v1beta1.AnnotationFollowMax] = strconv.Itoa(f.Max)
		}
	}
	return out
}

// CheckMax says what is wrong with a number that was given for several sides: it has to be for
// one that may add networks at all.
func CheckMax(limit int, maxFlag string, flags []string, sides ...Follow) error {
	if limit == 0 || slices.ContainsFunc(sides, func(f Follow) bool { return len(f.Ranges) > 0 }) {
		return nil
	}
	return fmt.Errorf("--%s %d is about networks that a side may add, and none may: give --%s", maxFlag, limit, strings.Join(flags, " or --"))
}

// follow finds where a Configuration that is there says something else.
func (b *Both) follow(on Side, c *v1beta1.Configuration, f Follow, s *Step) {
	command := "leave the flag out and run " + b.followCommand(on, f)
	asked := f.Annotations()
	for _, k := range slices.Sorted(maps.Keys(asked)) {
		if have := c.Annotations[k]; have != asked[k] {
			s.problem("objects", b.ref(on, c).String(), command, "it is there, and its annotation %s is %q, while %q was asked for", k, have, asked[k])
		}
	}
}

// followCommand is what makes a side let the other one add these networks.
func (b *Both) followCommand(on Side, f Follow) string {
	command := fmt.Sprintf("%s peer follow %s --range %s", b[on].Cluster.Isthmusctl, b[on.other()].ID, strings.Join(f.Ranges, ","))
	if f.Max > 0 {
		command += fmt.Sprintf(" --max %d", f.Max)
	}
	return command
}
