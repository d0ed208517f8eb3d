// Package access asks an API server what its user may do, so that what would be
// forbidden halfway is known before anything is changed.
package access

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"
	authorizationv1 "k8s.io/api/authorization/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// A Right is something that a user has to be allowed to do. An empty Namespace
// is that of cluster-scoped resources, or all.
type Right struct{ Verb, Group, Resource, Subresource, Namespace, Name string }

// String names the verb and the resource, as kubectl auth can-i takes them.
func (r Right) String() string {
	what := r.Resource
	if r.Group != "" {
		what += "." + r.Group
	}
	if r.Subresource != "" {
		what += "/" + r.Subresource
	}
	if r.Namespace != "" {
		what += " in namespace " + r.Namespace
	}
	return r.Verb + " " + what
}

// Compare orders rights as people read them.
func Compare(a, b Right) int { return strings.Compare(a.String(), b.String()) }

// atATime is how many questions are asked at once.
const atATime = 16

// Missing returns those of the rights that the user of the client does not have.
// An error is one of asking.
func Missing(ctx context.Context, c client.Client, list []Right) ([]Right, error) {
	var mu sync.Mutex
	var out []Right
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(atATime)
	for _, r := range list {
		g.Go(func() error {
			review := &authorizationv1.SelfSubjectAccessReview{
				Spec: authorizationv1.SelfSubjectAccessReviewSpec{ResourceAttributes: &authorizationv1.ResourceAttributes{
					Verb: r.Verb, Group: r.Group, Resource: r.Resource, Subresource: r.Subresource, Namespace: r.Namespace, Name: r.Name,
				}},
			}
			if err := c.Create(ctx, review); err != nil {
				return fmt.Errorf("ask whether you may %s: %w", r, err)
			}
			if !review.Status.Allowed {
				mu.Lock()
				defer mu.Unlock()
				out = append(out, r)
			}
			return nil
		})
	}
	err := g.Wait()
	slices.SortFunc(out, Compare)
	return out, err
}
