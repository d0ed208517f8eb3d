package rotation

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/isthmus-net/isthmus/appliance/internal/invitation"
)

// version is that of the fields of the Secret.
const version = 1

// Fields of the Secret of rotations.
const (
	fieldRules    = "rules"
	fieldOrder    = "order"
	fieldState    = "state"
	fieldRecorded = "recorded"
)

// A Secret is what a gateway and the controller of its cluster tell each other about
// rotations. The gateway writes State, and the controller the rest.
type Secret struct {
	Rules    Rules
	Order    *Order // nil: there is none
	State    State
	Recorded Recorded
}

// Rules are the installation's.
type Rules struct {
	// Accept says that the peer may change its key, and the pre-shared one.
	Accept bool `json:"accept"`
}

// Recorded is what the controller has done.
type Recorded struct {
	// Wish is the ID of the last wish for a rotation that was read.
	Wish string `json:"wish,omitempty"`
	// Own and Theirs are the IDs of the last rotations whose end was told, and, where they
	// were committed, written into the Secret with the gateway's keys and the status of
	// the peer's PublicKey.
	Own    string `json:"own,omitempty"`
	Theirs string `json:"theirs,omitempty"`
	// Begun is when a change of this side's key pair was begun last.
	Begun time.Time `json:"begun,omitzero"`
}

// retry is how long after one that failed the next rotation comes that nobody has wished for.
const retry = time.Hour

// Due returns in how long the gateway's key pair is to be changed that was made at a time and
// is to be in use for a period; not positive: now.
func (s Secret) Due(period time.Duration, made, now time.Time) time.Duration {
	since := made
	if s.Recorded.Begun.After(since) {
		since = s.Recorded.Begun
	}
	if own := s.State.Own; own != nil && own.Phase == Aborted && !own.At.Before(s.Recorded.Begun) {
		period = min(period, retry)
	}
	return since.Add(period).Sub(now)
}

// Fields returns the data of the Secret.
func (s Secret) Fields() (map[string][]byte, error) {
	out := map[string][]byte{}
	for _, f := range []struct {
		name  string
		value any
		skip  bool
	}{
		{fieldRules, s.Rules, false}, {fieldOrder, s.Order, s.Order == nil},
		{fieldState, s.State, s.State == State{}}, {fieldRecorded, s.Recorded, s.Recorded == Recorded{}},
	} {
		if f.skip {
			continue
		}
		b, err := json.Marshal(versioned[any]{version, f.value})
		if err != nil {
			return nil, fmt.Errorf("%s: %w", f.name, err)
		}
		out[f.name] = b
	}
	return out, nil
}

type versioned[T any] struct {
	Version int `json:"version"`
	Value   T   `json:"value"`
}

// ReadSecret reads the data of the Secret.
func ReadSecret(data map[string][]byte) (s Secret, err error) {
	var order Order
	err = errors.Join(read(data, fieldRules, &s.Rules), read(data, fieldOrder, &order), read(data, fieldState, &s.State), read(data, fieldRecorded, &s.Recorded))
	if err != nil {
		return Secret{}, err
	}
	if _, ok := data[fieldOrder]; ok {
		if !hexID.MatchString(order.ID) || order.At.IsZero() || order.From == (invitation.Key{}) || order.To == (invitation.Key{}) {
			return Secret{}, errors.New(fieldOrder + ": one of its fields id, at, from and to is missing, or can't be right")
		}
		s.Order = &order
	}
	return s, s.State.check()
}

// check returns what can't be right in a state.
func (s State) check() error {
	switch {
	case s.Own != nil && (!hexID.MatchString(s.Own.ID) || s.Own.At.IsZero()):
		return errors.New(fieldState + ": own: one of its fields id and at is missing, or can't be right")
	case s.Theirs != nil && (!hexID.MatchString(s.Theirs.ID) || s.Theirs.Key == (invitation.Key{})):
		return errors.New(fieldState + ": theirs: one of its fields id and key is missing, or can't be right")
	}
	return nil
}

func read[T any](data map[string][]byte, field string, into *T) error {
	b, ok := data[field]
	if !ok {
		return nil
	}
	var v versioned[T]
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(&v); err != nil {
		return fmt.Errorf("%s: %w", field, err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return fmt.Errorf("%s: there is more after its end", field)
	}
	if v.Version != version {
		return fmt.Errorf("%s: is of version %d, and %d is known here", field, v.Version, version)
	}
	*into = v.Value
	return nil
}
