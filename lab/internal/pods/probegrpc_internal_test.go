package pods

import (
	"context"
	"net"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/test/bufconn"
	"gotest.tools/v3/assert"
)

// TestAskHealth: only a service that says that it serves is healthy.
func TestAskHealth(t *testing.T) {
	l := bufconn.Listen(1 << 16)
	services := health.NewServer()
	services.SetServingStatus("ill", healthpb.HealthCheckResponse_NOT_SERVING)
	server := grpc.NewServer()
	healthpb.RegisterHealthServer(server, services)
	go func() { _ = server.Serve(l) }()
	t.Cleanup(server.Stop)
	dial := func(ctx context.Context, _ string) (net.Conn, error) { return l.DialContext(ctx) }
	assert.NilError(t, askHealth(t.Context(), "10.0.0.2:6000", "", dial))
	assert.Error(t, askHealth(t.Context(), "10.0.0.2:6000", "ill", dial), `service unhealthy (responded with "NOT_SERVING")`)
	assert.ErrorContains(t, askHealth(t.Context(), "10.0.0.2:6000", "nobody's", dial), "NotFound")
	server.Stop()
	assert.ErrorContains(t, askHealth(t.Context(), "10.0.0.2:6000", "", dial), "closed")
}
