package daemon

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/internal/invitation"
	"github.com/isthmus-net/isthmus/appliance/internal/rotation"
	"github.com/isthmus-net/isthmus/appliance/nettest"
)

// TestRepair has a gateway lose the key pair that it has changed to, and agree on another one
// by the key before, which the other side has kept; one that was compromised is not.
func TestRepair(t *testing.T) {
	nettest.Need(t, "ip")
	for _, c := range []struct {
		mode        string // of the gateway that loses its key
		compromised bool
		restarts    bool
	}{{cluster.Server, false, false}, {cluster.Client, false, true}, {cluster.Client, true, true}} {
		t.Run(fmt.Sprint(c.mode, c.compromised), func(t *testing.T) {
			p := newRotatingPair(t)
			loses, keeps := p.server, p.client
			if c.mode == cluster.Client {
				loses, keeps = keeps, loses
			}
			p.connected()
			private := invitation.Key(p.private[c.mode])
			loses.secret.set(func(s *rotation.Secret) {
				s.Order = &rotation.Order{ID: "00000000000000aa", At: time.Now(), From: private, To: invitation.Key{8, 9}, Manner: rotation.Manner{Compromised: c.compromised}}
			})
			within(t, 30*time.Second, func() error {
				if s := keeps.secret.get(); s.Theirs == nil || s.Theirs.Phase != rotation.Committed {
					return fmt.Errorf("%+v", s)
				}
				return nil
			})
			keeps.secret.set(func(s *rotation.Secret) { s.Recorded = rotation.Recorded{Theirs: "00000000000000aa"} })
			assert.Equal(t, keeps.secret.get().Former == nil, c.compromised)

			// What was restored is from before that, under the gateway or before it starts.
			if c.restarts {
				loses.stop()
			}
			loses.secret.set(func(s *rotation.Secret) { s.Order, s.State = nil, rotation.State{} })
			if c.restarts {
				assert.NilError(t, loses.conn.write(t.Context(), ConnectionStatus{}))
				loses.start(t)
			}
			within(t, 30*time.Second, func() error {
				if st := loses.conn.get(); st.Value == "" || st.Value == "Connected" {
					return fmt.Errorf("%+v", st)
				}
				return nil
			})
			const id = "00000000000000bb"
			loses.secret.set(func(s *rotation.Secret) {
				s.Order = &rotation.Order{ID: id, At: time.Now(), From: private, To: invitation.Key{16, 9}, PresharedKey: &invitation.Key{7}, Manner: rotation.Manner{Repair: true}}
			})
			if c.compromised {
				within(t, 10*time.Second, func() error {
					if s := loses.secret.get(); s.Own == nil || s.Own.Phase != rotation.Waiting {
						return fmt.Errorf("%+v", s.Own)
					}
					return nil
				})
				// Once it has tried, and in vain.
				within(t, 10*time.Second, func() error {
					if !strings.Contains(loses.log.String(), "repair: failed, trying again") {
						return errors.New("it has not been tried")
					}
					return nil
				})
				assert.Assert(t, keeps.secret.get().Theirs.ID != id)
				return
			}
			within(t, 30*time.Second, func() error {
				if a, b := loses.secret.get(), keeps.secret.get(); a.Own == nil || a.Own.Phase != rotation.Committed || b.Theirs.ID != id || b.Theirs.Phase != rotation.Committed {
					return fmt.Errorf("%+v, %+v", a.Own, b.Theirs)
				}
				return nil
			})
			p.connected()
		})
	}
}
