package pods

import (
	"context"
	"fmt"
	"net"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/isthmus-net/isthmus/lab/internal/netns"
)

// probeGRPC asks the program in the container how it is.
func (c *container) probeGRPC(ctx context.Context, action *corev1.GRPCAction) error {
	address, err := c.address("", intstr.FromInt32(action.Port))
	if err != nil {
		return err
	}
	service := ""
	if action.Service != nil {
		service = *action.Service
	}
	return askHealth(ctx, address, service, func(ctx context.Context, address string) (net.Conn, error) {
		return netns.DialContext(ctx, c.pod.node.cfg.NetNS, "tcp", address)
	})
}

// askHealth asks the standard service of gRPC (grpc.health.v1), as the kubelet does
// (pkg/probe/grpc).
func askHealth(ctx context.Context, address, service string, dial func(ctx context.Context, address string) (net.Conn, error)) error {
	conn, err := grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithUserAgent("kube-probe/lab"), grpc.WithContextDialer(dial))
	if err != nil {
		return err
	}
	defer conn.Close()
	answer, err := healthpb.NewHealthClient(conn).Check(ctx, &healthpb.HealthCheckRequest{Service: service})
	if err != nil {
		return err
	}
	if answer.Status != healthpb.HealthCheckResponse_SERVING {
		return fmt.Errorf("service unhealthy (responded with %q)", answer.Status)
	}
	return nil
}
