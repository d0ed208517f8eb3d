package kube

import (
	"log/slog"
	"net/http"

	"github.com/go-logr/logr"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/metrics/filters"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
)

// The API server is asked once for each token that it does not know yet, and
// anybody may send any number of them. A Prometheus, or two, ask for two
// answers a minute: what they may ask for costs one a minute and one in five.
const (
	guardQPS   = 2
	guardBurst = 10
)

// MetricsFilter returns a filter for controller-runtime's server of metrics: it
// lets through whoever has a token of the API server (TokenReview), and with it the
// right to get the path that is asked for (SubjectAccessReview). What the API
// server has said of a token holds for a minute, of a right for five, of a
// refusal for half a minute.
//
// It needs to create TokenReviews and SubjectAccessReviews, with transport.
func MetricsFilter(config *rest.Config, transport *http.Client) (metricsserver.Filter, error) {
	config = rest.CopyConfig(config)
	config.QPS, config.Burst, config.RateLimiter = guardQPS, guardBurst, nil
	return filters.WithAuthenticationAndAuthorization(config, transport)
}

// Every daemon asks for itself, with the rights of its own role. So each may ask
// for anybody's rights, and for nothing more.
//
// +kubebuilder:rbac:roleName=isthmus-node,groups=authentication.k8s.io,resources=tokenreviews,verbs=create
// +kubebuilder:rbac:roleName=isthmus-node,groups=authorization.k8s.io,resources=subjectaccessreviews,verbs=create
// +kubebuilder:rbac:roleName=liqo-gateway,groups=authentication.k8s.io,resources=tokenreviews,verbs=create
// +kubebuilder:rbac:roleName=liqo-gateway,groups=authorization.k8s.io,resources=subjectaccessreviews,verbs=create

// NewGuard returns what puts a handler behind [MetricsFilter].
func NewGuard(config *rest.Config, log *slog.Logger) (func(http.Handler) (http.Handler, error), error) {
	transport, err := rest.HTTPClientFor(config)
	if err != nil {
		return nil, err
	}
	filter, err := MetricsFilter(config, transport)
	if err != nil {
		return nil, err
	}
	return func(h http.Handler) (http.Handler, error) { return filter(logr.FromSlogHandler(log.Handler()), h) }, nil
}
