package pods_test

import (
	"strings"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// review asks the API server what it thinks of a token.
func (w *world) review(t *testing.T, token string) (*authenticationv1.TokenReview, error) {
	t.Helper()
	return w.client.AuthenticationV1().TokenReviews().Create(t.Context(),
		&authenticationv1.TokenReview{Spec: authenticationv1.TokenReviewSpec{Token: token}}, metav1.CreateOptions{})
}

func flatten(extra map[string]authenticationv1.ExtraValue) map[string]string {
	out := map[string]string{}
	for k, v := range extra {
		out[k] = strings.Join(v, ",")
	}
	return out
}
