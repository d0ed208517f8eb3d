package kube

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/fields"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/appliance/internal/invitation"
	"github.com/isthmus-net/isthmus/appliance/plan"
)

// A namedSecret knows one Secret that a gateway shares with its controller. It is apart from
// a [GatewaySource]: nothing of the gateway's work depends on it for long, and what is in it
// is remembered nowhere.
type namedSecret struct {
	*source
	key client.ObjectKey
}

func newNamedSecret(cfg GatewaySourceConfig, name string) (*namedSecret, error) {
	s, err := newSource(cfg.Config, map[client.Object]cache.ByObject{
		&corev1.Secret{}: {Namespaces: map[string]cache.Config{cfg.Namespace: {}}, Field: fields.OneTermEqualSelector("metadata.name", name)},
	}, nil, cfg.Logger)
	if err != nil {
		return nil, err
	}
	return &namedSecret{s, client.ObjectKey{Namespace: cfg.Namespace, Name: name}}, nil
}

// read returns the Secret; nil while there is none, or it has not been read.
func (s *namedSecret) read(ctx context.Context) (*corev1.Secret, error) {
	if !s.isSynced() {
		return nil, nil
	}
	var list corev1.SecretList
	if err := s.cache.List(ctx, &list, client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("read Secret %s: %w", s.key, err)
	}
	if len(list.Items) == 0 {
		return nil, nil
	}
	return &list.Items[0], nil
}

// write writes what data makes of the data that was read last, over that version; a
// conflict says that somebody else was faster.
func (s *namedSecret) write(ctx context.Context, data func(map[string][]byte) (map[string][]byte, error)) error {
	o, err := s.read(ctx)
	if err != nil {
		return err
	}
	if o == nil {
		return fmt.Errorf("Secret %s is not there any more", s.key)
	}
	o = o.DeepCopy()
	if o.Data, err = data(o.Data); err != nil {
		return fmt.Errorf("Secret %s: %w", s.key, err)
	}
	if err := s.client.Update(ctx, o); err != nil {
		return fmt.Errorf("Secret %s: %w", s.key, err)
	}
	return nil
}

// A HandoverSource knows the one Secret by which a gateway takes part in an invitation.
type HandoverSource struct{ *namedSecret }

// NewHandoverSource returns the source of a gateway, which needs what plan's Role of the
// gateway says of Secrets.
func NewHandoverSource(cfg GatewaySourceConfig) (*HandoverSource, error) {
	s, err := newNamedSecret(cfg, plan.HandoverName(cfg.Name))
	if err != nil {
		return nil, err
	}
	return &HandoverSource{s}, nil
}

// Read returns what the Secret says; the zero value while there is none, or it has not
// been read.
func (s *HandoverSource) Read(ctx context.Context) (invitation.Handover, error) {
	o, err := s.read(ctx)
	if o == nil || err != nil {
		return invitation.Handover{}, err
	}
	h, err := invitation.ReadHandover(o.Data)
	if err != nil {
		err = fmt.Errorf("Secret %s: %w", s.key, err)
	}
	return h, err
}

// Write writes what the Secret is to say, over the version that was read last; a conflict
// says that somebody else was faster.
func (s *HandoverSource) Write(ctx context.Context, h invitation.Handover) error {
	return s.write(ctx, func(map[string][]byte) (map[string][]byte, error) { return h.Fields() })
}
