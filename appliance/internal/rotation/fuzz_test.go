package rotation

import (
	"encoding/json"
	"testing"
	"time"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"

	"github.com/isthmus-net/isthmus/appliance/internal/invitation"
)

func TestMessageRefused(t *testing.T) {
	zero := invitation.Key{}
	for _, c := range []struct {
		message Message
		want    string
	}{
		{Message{}, ""},
		{Message{Offer: offer(first, 1), Ready: second, Committed: first, Ended: start, Refused: &Refusal{first, "why"}}, ""},
		{Message{Ready: "x"}, "ready: is not the ID"},
		{Message{Committed: "../../etc"}, "committed: is not the ID"},
		{Message{Offer: &Offer{ID: "1", At: start, Key: invitation.Key{1}}}, "offer.id"},
		{Message{Offer: &Offer{ID: first, Key: invitation.Key{1}}}, "offer.at"},
		{Message{Offer: &Offer{ID: first, At: start}}, "offer.key"},
		{Message{Offer: &Offer{ID: first, At: start, Key: invitation.Key{1}, PresharedKey: &zero}}, "offer.presharedKey"},
		{Message{Refused: &Refusal{first, "\x1b[2J"}}, "refused.reason"},
		{Message{Refused: &Refusal{first, ""}}, "refused.reason"},
		{Message{Refused: &Refusal{"", "why"}}, "refused.id"},
	} {
		err := c.message.Check()
		if c.want == "" {
			assert.Check(t, err)
			continue
		}
		assert.Check(t, is.ErrorContains(err, c.want))
	}
}

// Whatever a peer sends, what is acted on can be stored and read again, and only an offer
// that was stored adds a key.
func FuzzMessage(f *testing.F) {
	for _, m := range []Message{{}, {Offer: offer(first, 1)}, {Ready: first, Committed: second, Ended: start}, {Refused: &Refusal{first, "why"}}} {
		b, err := json.Marshal(m)
		assert.NilError(f, err)
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var m Message
		if json.Unmarshal(b, &m) != nil || m.Check() != nil {
			return
		}
		s := State{Own: &Attempt{ID: first, At: start, Phase: Waiting, Since: start, Over: over}}
		s = s.Next(Facts{Now: start.Add(time.Second), Order: order(first, 1), Accept: true, Yields: true, Over: over, Heard: &m})
		fields, err := Secret{Order: order(first, 1), State: s}.Fields()
		if err != nil {
			return // a time that JSON can't hold
		}
		_, err = ReadSecret(fields)
		assert.NilError(t, err)
		if m.Offer == nil {
			assert.Assert(t, s.Candidate(over) == nil)
		}
	})
}
