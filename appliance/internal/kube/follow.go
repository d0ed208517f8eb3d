package kube

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
)

// follow reads the annotations that say what a peer may tell of its networks; nil: nothing.
// What is wrong with them is in the value: it must not end the peering, as a wrong field does.
func follow(annotations map[string]string) *cluster.Follow {
	text, is := annotations[v1beta1.AnnotationFollow]
	if !is {
		return nil
	}
	f := &cluster.Follow{Max: v1beta1.DefaultFollowMax}
	wrong := func(annotation, format string, args ...any) *cluster.Follow {
		return &cluster.Follow{Problem: fmt.Sprintf("metadata.annotations[%s]: %q %s", annotation, annotations[annotation], fmt.Sprintf(format, args...))}
	}
	for _, part := range strings.Split(text, ",") {
		p, err := netip.ParsePrefix(strings.TrimSpace(part))
		if err != nil || p != p.Masked() || p.Addr().Is4In6() {
			return wrong(v1beta1.AnnotationFollow, "has a part %q that is not a range: write ranges with commas between, such as 10.64.0.0/10,fd64::/16, or remove the annotation", strings.TrimSpace(part))
		}
		f.Ranges = append(f.Ranges, p)
	}
	if text, is := annotations[v1beta1.AnnotationFollowMax]; is {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 || n > v1beta1.MaxFollowMax {
			return wrong(v1beta1.AnnotationFollowMax, "is not how many networks the peer may add: write 1 to %d, or remove the annotation", v1beta1.MaxFollowMax)
		}
		f.Max = n
	}
	if text, is := annotations[v1beta1.AnnotationForget]; is {
		at, err := time.Parse(time.RFC3339, text)
		if err != nil {
			return wrong(v1beta1.AnnotationForget, "is not a time: write one such as 2026-01-31T12:00:00Z, or remove the annotation")
		}
		f.Forget = at
	}
	return f
}

// followed reads what has come of it.
func followed(r *reader, f *v1beta1.ConfigurationFollow) (networks []cluster.Followed, refused []cluster.Refused) {
	for i, n := range f.Networks {
		x := cluster.Followed{
			External: n.Type == v1beta1.CIDRTypeExternal, CIDR: r.prefix(fmt.Sprintf("status.follow.networks[%d].cidr", i), string(n.CIDR)), Generation: n.ObservedGeneration,
		}
		if n.WithdrawnAt != nil {
			x.Withdrawn = n.WithdrawnAt.Time
		}
		if x.CIDR.IsValid() {
			networks = append(networks, x)
		}
	}
	for i, n := range f.Refused {
		if p := r.prefix(fmt.Sprintf("status.follow.refused[%d].cidr", i), string(n.CIDR)); p.IsValid() {
			refused = append(refused, cluster.Refused{CIDR: p, Why: n.Message})
		}
	}
	return networks, refused
}
