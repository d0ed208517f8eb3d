package invitation

import (
	"encoding/json"
	"errors"
	"fmt"
	"time"
)

// fieldRecord is the field of the Secret of an invitation.
const fieldRecord = "invitation"

// A Record is what a cluster keeps of an invitation, in a Secret that no gateway may write.
// The inviting cluster has nothing of the temporary private key, which is in the text alone.
type Record struct {
	// Accepting says that this is the cluster that was invited. Of what follows it has ID,
	// From, To, Expires, Follow, Done and the two keys.
	Accepting bool   `json:"accepting,omitempty"`
	ID        string `json:"id"`
	From      string `json:"from"`
	To        string `json:"to"`
	// Key is the public key of the temporary peer, for who accepts that of the inviting
	// gateway. PrivateKey is that of the temporary peer, until it is done.
	Key        Key       `json:"key"`
	PrivateKey *Key      `json:"privateKey,omitempty"`
	Expires    time.Time `json:"expires"`
	// Follow are the annotations of the Configuration that the peering gets here: which
	// networks the peer may add by telling them, and how many.
	Follow map[string]string `json:"follow,omitempty"`
	// Approve says that somebody has to say yes to the answer; Approved is the public key
	// of the gateway of whom that was said, and Rejected that of whom no was.
	Approve  bool `json:"approve,omitempty"`
	Approved *Key `json:"approved,omitempty"`
	Rejected *Key `json:"rejected,omitempty"`
	// Asks is the answer that waits for that.
	Asks *Answer `json:"asks,omitempty"`
	// Used is the answer by which the invitation was used up, PresharedKey the fresh key of
	// the peering until both sides have it, and Done says that they do.
	Used         *Answer `json:"used,omitempty"`
	PresharedKey *Key    `json:"presharedKey,omitempty"`
	Done         bool    `json:"done,omitempty"`
}

// State is one word about an invitation: open, asks, used, done or expired.
func (r Record) State(now time.Time) string {
	switch {
	case r.Done:
		return "done"
	case r.Used != nil:
		return "used"
	case !now.Before(r.Expires):
		return "expired"
	case r.Undecided():
		return "asks"
	}
	return "open"
}

// Undecided reports whether an answer waits for a yes or a no: another gateway may answer
// after one that was told either.
func (r Record) Undecided() bool {
	said := func(k *Key) bool { return k != nil && *k == r.Asks.Key }
	return r.Asks != nil && !said(r.Approved) && !said(r.Rejected)
}

// Fields returns the data of the Secret.
func (r Record) Fields() (map[string][]byte, error) {
	b, err := json.Marshal(struct {
		Version int    `json:"version"`
		Record  Record `json:"record"`
	}{Version, r})
	return map[string][]byte{fieldRecord: b}, err
}

// ReadRecord reads the data of the Secret.
func ReadRecord(data map[string][]byte) (Record, error) {
	var v struct {
		Version int    `json:"version"`
		Record  Record `json:"record"`
	}
	if err := strict(data[fieldRecord], &v); err != nil {
		return Record{}, fmt.Errorf("%s: %w", fieldRecord, err)
	}
	if v.Version != Version {
		return Record{}, fmt.Errorf("%s: is of version %d, and %d is known here", fieldRecord, v.Version, Version)
	}
	r := v.Record
	if !hexID.MatchString(r.ID) || !clusterID.MatchString(r.From) || !clusterID.MatchString(r.To) || r.Key == (Key{}) || r.Expires.IsZero() {
		return Record{}, errors.New(fieldRecord + ": one of its fields id, from, to, key and expires is missing, or can't be right")
	}
	return r, nil
}

// Judge returns what becomes of an answer: a reply, and the record as it is then, which is
// to be written before the reply is given. problem returns why the peering can't be made,
// empty if it can; fresh makes a key. It returns no reply of [Accepted] without own
// networks.
func (r Record) Judge(a Answer, now time.Time, own Networks, problem func(Answer) string, fresh func() (Key, error)) (Reply, Record, error) {
	refuse := func(reason string) (Reply, Record, error) {
		return Reply{ID: a.ID, Verdict: Refused, Reason: printable(reason)}, r, nil
	}
	if why := r.refusal(a, now); why != "" {
		return refuse(why)
	}
	if r.Used == nil {
		if r.Rejected != nil && *r.Rejected == a.Key {
			return refuse("somebody in cluster " + r.From + " has said no to the gateway with the fingerprint " + Fingerprint(a.Key))
		}
		if why := problem(a); why != "" {
			return refuse("cluster " + r.From + " can't be your peer: " + why)
		}
		if r.Approve && (r.Approved == nil || *r.Approved != a.Key) {
			r.Asks = &a
			return Reply{ID: a.ID, Verdict: Waiting, Reason: fmt.Sprintf("somebody in cluster %s has to say yes; tell them the fingerprint of your gateway, %s", r.From, Fingerprint(a.Key))}, r, nil
		}
		key, err := fresh()
		if err != nil {
			return Reply{}, r, err
		}
		r.Used, r.PresharedKey, r.Asks = &a, &key, nil
	}
	if r.PresharedKey == nil {
		return refuse("the invitation was used, and both sides had the reply: remove the peering on both sides, and ask for a new one")
	}
	return Reply{ID: a.ID, Verdict: Accepted, PresharedKey: r.PresharedKey, Networks: own}, r, nil
}

// refusal returns why an answer is refused, whatever the cluster is like; empty: it is not
// refused. The answer that the invitation was used by is not refused when it comes again.
func (r Record) refusal(a Answer, now time.Time) string {
	switch {
	case a.ID != r.ID:
		return "it is another invitation that is open: use the text that was printed last, or ask for a new one"
	case a.To != r.From:
		return fmt.Sprintf("the answer is for cluster %s, and this is %s", a.To, r.From)
	case a.From != r.To:
		return fmt.Sprintf("the invitation is for cluster %s, and %s has answered: ask for one that names %s", r.To, a.From, a.From)
	case r.Used != nil && !r.Used.Equal(a):
		return fmt.Sprintf("the invitation was used already, by a gateway with the fingerprint %s: ask for a new one; if that is not your gateway, somebody else has read the text", Fingerprint(r.Used.Key))
	case r.Used == nil && !now.Before(r.Expires):
		return fmt.Sprintf("the invitation has expired at %s by the clock of %s, where it is %s: ask for a new one", r.Expires.UTC().Format(time.RFC3339), r.From, now.UTC().Format(time.RFC3339))
	}
	return ""
}

// printable makes a text one that a reply may have.
func printable(s string) string {
	out := []rune(s)
	for i, c := range out {
		if c < ' ' || c == 0x7f {
			out[i] = ' '
		}
	}
	for len(string(out)) > maxReason {
		out = out[:len(out)-1]
	}
	return string(out)
}
