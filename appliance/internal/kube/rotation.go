package kube

import (
	"context"
	"fmt"

	"github.com/isthmus-net/isthmus/appliance/internal/rotation"
	"github.com/isthmus-net/isthmus/appliance/plan"
)

// A RotationSource knows the one Secret by which a gateway takes part in changes of keys.
type RotationSource struct{ *namedSecret }

// NewRotationSource returns the source of a gateway, which needs what plan's Role of the
// gateway says of Secrets.
func NewRotationSource(cfg GatewaySourceConfig) (*RotationSource, error) {
	s, err := newNamedSecret(cfg, plan.RotationName(cfg.Name))
	if err != nil {
		return nil, err
	}
	return &RotationSource{s}, nil
}

// Read returns what the Secret says; nil while there is none, or it has not been read.
func (s *RotationSource) Read(ctx context.Context) (*rotation.Secret, error) {
	o, err := s.read(ctx)
	if o == nil || err != nil {
		return nil, err
	}
	r, err := rotation.ReadSecret(o.Data)
	if err != nil {
		return nil, fmt.Errorf("Secret %s: %w", s.key, err)
	}
	return &r, nil
}

// Write writes the part of the Secret that is the gateway's, over the version that was read
// last; a conflict says that somebody else was faster.
func (s *RotationSource) Write(ctx context.Context, state rotation.State) error {
	return s.write(ctx, func(data map[string][]byte) (map[string][]byte, error) {
		r, err := rotation.ReadSecret(data)
		if err != nil {
			return nil, err
		}
		r.State = state
		return r.Fields()
	})
}
