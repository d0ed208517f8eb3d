package plan

import (
	"fmt"
	"slices"
	"time"

	"github.com/isthmus-net/isthmus/appliance/cluster"
)

// invitation returns the open invitation between this cluster and the cluster id, whichever of
// the two has invited the other; nil: there is none.
func (p *planner) invitation(id string) *cluster.Invitation {
	i := slices.IndexFunc(p.s.Invitations, func(i cluster.Invitation) bool { return i.RemoteID == id })
	if i < 0 {
		return nil
	}
	return &p.s.Invitations[i]
}

// invited says how far an invitation has come, and what to do next. The Configuration is made
// when it has been answered, so a missing one is no mistake before.
func (p *planner) invited(i *cluster.Invitation) (reason, message string) {
	id, ends := i.RemoteID, i.Expires.UTC().Format(time.RFC3339)
	expired := !p.s.Now.IsZero() && !p.s.Now.Before(i.Expires)
	if !expired && !i.Used {
		p.again(i.Expires)
	}
	switch {
	case i.Used:
		return "InvitationUsed", fmt.Sprintf("cluster %s has answered the invitation, and the gateways are exchanging keys", id)
	case expired && i.Accepting:
		return "InvitationExpired", fmt.Sprintf("cluster %s has not let this cluster in, and by the clock of this cluster its invitation has expired at %s: isthmusctl peer accept with the same text tries it all the same, isthmusctl peer remove %s takes back what was made for it", id, ends, id)
	case expired:
		return "InvitationExpired", fmt.Sprintf("nobody was let in by the invitation of cluster %s, which has expired at %s: isthmusctl peer invite %s --revoke takes it back, then invite again; where this cluster can't be reached from outside, let %s invite", id, ends, id, id)
	case i.Accepting:
		return "InvitationAccepted", fmt.Sprintf("cluster %s has not let this cluster in yet, and its invitation expires at %s: isthmusctl peer accept with the same text goes on and says why, isthmusctl peer remove %s gives up", id, ends, id)
	case i.Asks:
		return "InvitationAnswered", fmt.Sprintf("somebody has answered the invitation of cluster %s, and nobody has said yes yet: isthmusctl peer invite %s --approve shows who it is and asks", id, id)
	}
	return "InvitationOpen", fmt.Sprintf("nobody has been let in by the invitation of cluster %s yet, which expires at %s: isthmusctl peer invite %s --revoke takes it back", id, ends, id)
}
