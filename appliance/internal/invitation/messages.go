package invitation

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"
	"time"
	"unicode"
)

// MaxMessage is the longest message between gateways, in bytes.
const MaxMessage = 4 << 10

// MaxNetworks is how many networks of a kind an answer or a reply may name.
const MaxNetworks = 32

// maxReason is the longest reason, in characters.
const maxReason = 600

// Networks are those of a cluster, as it calls them itself.
type Networks struct {
	Pod      []netip.Prefix `json:"pod"`
	External []netip.Prefix `json:"external"`
}

// An Offer is what a gateway needs for the temporary tunnel.
type Offer struct {
	// ID is that of the invitation.
	ID string `json:"id"`
	// Key is the public key of the other end: of the temporary peer for the gateway of
	// who invites, of that gateway for who is invited.
	Key Key `json:"key"`
	// PrivateKey is that of the temporary peer, for who is invited only.
	PrivateKey *Key `json:"privateKey,omitempty"`
}

// An Answer is what the invited side hands in.
type Answer struct {
	// ID is that of the invitation; From and To are the IDs of the cluster that answers
	// and of the one that has invited.
	ID   string `json:"id"`
	From string `json:"from"`
	To   string `json:"to"`
	// Key is the public key of its gateway, the one that lasts.
	Key Key `json:"key"`
	Networks
}

// A Verdict is what became of an answer.
type Verdict string

// The verdicts.
const (
	// Waiting: somebody has to say yes first; ask again.
	Waiting Verdict = "waiting"
	Refused Verdict = "refused"
	// Accepted: the peering is made.
	Accepted Verdict = "accepted"
)

// A Reply is what the inviting side says to an answer.
type Reply struct {
	ID      string  `json:"id"`
	Verdict Verdict `json:"verdict"`
	Reason  string  `json:"reason,omitempty"` // unless accepted
	// PresharedKey is that of the peering, and Networks those of the inviting side, when
	// it is accepted.
	PresharedKey *Key `json:"presharedKey,omitempty"`
	Networks
}

// A Receipt says that an accepted reply has come to stay.
type Receipt struct {
	ID       string `json:"id"`
	Received bool   `json:"received"`
}

// A message is one of those.
type message interface {
	Offer | Answer | Reply | Receipt
}

// versioned is how a message is written.
type versioned[M message] struct {
	Version int `json:"version"`
	Message M   `json:"message"`
}

// Encode returns a message as one line of JSON.
func Encode[M message](m M) ([]byte, error) {
	b, err := json.Marshal(versioned[M]{Version, m})
	if err != nil {
		return nil, err
	}
	if len(b) >= MaxMessage {
		return nil, fmt.Errorf("a message of %d bytes is longer than %d", len(b), MaxMessage)
	}
	return append(b, '\n'), nil
}

// Decode returns the message that [Encode] has written. Unknown fields, other versions
// and what can't be are refused.
func Decode[M message](b []byte) (M, error) {
	var none M
	if len(b) > MaxMessage {
		return none, fmt.Errorf("a message of %d bytes is longer than %d", len(b), MaxMessage)
	}
	var v versioned[M]
	if err := strict(b, &v); err != nil {
		return none, err
	}
	if v.Version != Version {
		return none, fmt.Errorf("the message is of version %d, and %d is known here: use the same version of Isthmus on both sides", v.Version, Version)
	}
	var err error
	switch m := any(v.Message).(type) {
	case Offer:
		err = m.check()
	case Answer:
		err = m.check()
	case Reply:
		err = m.check()
	case Receipt:
		if !m.Received || !hexID.MatchString(m.ID) {
			err = errors.New("a receipt that confirms nothing")
		}
	}
	if err != nil {
		return none, err
	}
	return v.Message, nil
}

// Read reads one message and no more than [MaxMessage] bytes.
func Read[M message](r io.Reader) (M, error) {
	line, err := bufio.NewReader(io.LimitReader(r, MaxMessage)).ReadBytes('\n')
	if err != nil {
		var none M
		return none, fmt.Errorf("a message that ends too soon, or is longer than %d bytes: %w", MaxMessage, err)
	}
	return Decode[M](line)
}

func strict(b []byte, into any) error {
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(into); err != nil {
		return err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("there is more after its end")
	}
	return nil
}

func (o Offer) check() error {
	if !hexID.MatchString(o.ID) || o.Key == (Key{}) || o.PrivateKey != nil && *o.PrivateKey == (Key{}) {
		return errors.New("an offer without ID or key")
	}
	return nil
}

func (a Answer) check() error {
	switch {
	case !hexID.MatchString(a.ID):
		return errors.New("id: is none of an invitation")
	case !clusterID.MatchString(a.From) || !clusterID.MatchString(a.To):
		return errors.New("from, to: are no cluster IDs")
	case a.Key == Key{}:
		return errors.New("key: is missing")
	}
	return a.Networks.check()
}

func (r Reply) check() error {
	if !hexID.MatchString(r.ID) {
		return errors.New("id: is none of an invitation")
	}
	switch r.Verdict {
	case Accepted:
		if r.PresharedKey == nil || *r.PresharedKey == (Key{}) {
			return errors.New("presharedKey: is missing")
		}
		return r.Networks.check()
	case Waiting, Refused:
		if r.PresharedKey != nil || len(r.Pod)+len(r.External) > 0 {
			return fmt.Errorf("verdict: is %s, and there is more than a reason", r.Verdict)
		}
		if r.Reason == "" || len(r.Reason) > maxReason || strings.ContainsFunc(r.Reason, func(c rune) bool { return !unicode.IsPrint(c) }) {
			return errors.New("reason: is missing, or no text")
		}
		return nil
	}
	return fmt.Errorf("verdict: is none of %s, %s and %s", Accepted, Waiting, Refused)
}

func (n Networks) check() error {
	for _, list := range []struct {
		name     string
		prefixes []netip.Prefix
	}{{"pod", n.Pod}, {"external", n.External}} {
		if len(list.prefixes) == 0 || len(list.prefixes) > MaxNetworks {
			return fmt.Errorf("%s: there are %d networks, and 1 to %d can be", list.name, len(list.prefixes), MaxNetworks)
		}
		if slices.ContainsFunc(list.prefixes, func(p netip.Prefix) bool { return !p.IsValid() || p != p.Masked() }) {
			return fmt.Errorf("%s: has what is no network", list.name)
		}
	}
	return nil
}

// Open is what the inviting side knows of its invitation.
type Open struct {
	// ID is that of the invitation, From the own cluster ID, To that of who is invited.
	ID, From, To string
	Expires      time.Time
	// Used is the answer that it was used by; nil: none yet.
	Used *Answer
}

// Judge returns why an answer is refused; empty: it is not. The same answer again is
// none that is refused.
func (o Open) Judge(a Answer, now time.Time) string {
	switch {
	case a.ID != o.ID:
		return "it is another invitation that is open: use the text that was printed last, or ask for a new one"
	case a.To != o.From:
		return fmt.Sprintf("the answer is for cluster %s, and this is %s", a.To, o.From)
	case a.From != o.To:
		return fmt.Sprintf("the invitation is for cluster %s, and %s has answered: ask for one that names %s", o.To, a.From, a.From)
	case o.Used != nil && !o.Used.Equal(a):
		return fmt.Sprintf("the invitation was used already, by a gateway with the fingerprint %s: ask for a new one, and whether it was you", Fingerprint(o.Used.Key))
	case o.Used == nil && !now.Before(o.Expires):
		return fmt.Sprintf("the invitation has expired at %s by the clock of %s: ask for a new one", o.Expires.UTC().Format(time.RFC3339), o.From)
	}
	return ""
}

// Equal reports whether two answers say the same.
func (a Answer) Equal(b Answer) bool {
	return a.ID == b.ID && a.From == b.From && a.To == b.To && a.Key == b.Key && slices.Equal(a.Pod, b.Pod) && slices.Equal(a.External, b.External)
}
