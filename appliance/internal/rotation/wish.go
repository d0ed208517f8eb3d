package rotation

import (
	"encoding/json"
	"errors"
	"fmt"
	"time"
)

// A Wish is what an administrator writes on a gateway to have its keys changed.
type Wish struct {
	ID string `json:"id"`
	// By and At say who has it and since when.
	By string    `json:"by"`
	At time.Time `json:"at"`
	// Share says that the peering is to have a pre-shared key, also if it has none yet.
	// One that it has is changed with the key pair anyway.
	Share bool `json:"share,omitempty"`
	// Alone says that the key pair is changed without asking the peer, which then has to
	// be told by other means.
	Alone bool `json:"alone,omitempty"`
	Manner
}

// Text returns the wish as the annotation has it.
func (w Wish) Text() (string, error) {
	b, err := json.Marshal(w)
	return string(b), err
}

// ParseWish reads the annotation.
func ParseWish(text string) (Wish, error) {
	var w Wish
	if err := json.Unmarshal([]byte(text), &w); err != nil {
		return Wish{}, fmt.Errorf("is not what isthmusctl peer rotate writes: remove it, and run that: %w", err)
	}
	if !hexID.MatchString(w.ID) || w.At.IsZero() {
		return Wish{}, errors.New("one of its fields id and at is missing, or can't be right: remove it, and run isthmusctl peer rotate")
	}
	return w, nil
}
