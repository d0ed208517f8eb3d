package main

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/internal/daemon"
	"github.com/isthmus-net/isthmus/appliance/internal/kube"
	"github.com/isthmus-net/isthmus/appliance/kernel"
)

// newGatewayCommand returns the command that runs in the pod of a gateway.
func newGatewayCommand(g *globals) *cobra.Command {
	var cfg daemon.GatewayConfig
	var podName, podIP, system, implementation string
	cmd := &cobra.Command{
		Use:   "gateway",
		Short: "Join the nodes of this cluster and the gateway of a peer",
		Long: `Join the nodes of this cluster and the gateway of a peer: a Geneve link to
every node, WireGuard to the peer, and what leads from one to the other.

Runs in the network namespace of its pod and needs CAP_NET_ADMIN, and
/dev/net/tun where the kernel has no WireGuard. What it has made in the kernel
stays when it ends.

With --netns it runs in the network of the node, and works in a namespace that
"isthmus netns" has made. It needs CAP_SYS_ADMIN to enter that, and gives it up
then.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if podIP != "" {
				addr, err := netip.ParseAddr(podIP)
				if err != nil {
					return fmt.Errorf("--pod-ip %q is not an IP address: %w", podIP, err)
				}
				cfg.PodIP = addr.Unmap()
			}
			cfg.Implementation = kernel.Implementation(implementation)
			log := g.log.With("gateway", cfg.Name, "peer", cfg.RemoteID)
			config, err := g.restConfig("isthmus-gateway")
			if err != nil {
				return err
			}
			about := kube.GatewaySourceConfig{
				Config: config, Name: cfg.Name, Namespace: cfg.Namespace, System: system,
				RemoteID: cfg.RemoteID, Node: cfg.NodeName, Mode: cfg.Mode, StateDir: cfg.StateDir, Logger: log,
			}
			source, err := kube.NewGatewaySource(about)
			if err != nil {
				return fmt.Errorf("%w (see --name, --namespace, --system-namespace, --remote-cluster-id, --mode)", err)
			}
			if cfg.Knock, err = kube.NewKnock(config); err != nil {
				return err
			}
			cfg.API = source
			if cfg.Handover, err = kube.NewHandoverSource(about); err != nil {
				return err
			}
			if cfg.Rotation, err = kube.NewRotationSource(about); err != nil {
				return err
			}
			if cfg.Serving.Guard, err = kube.NewGuard(config, log); err != nil {
				return fmt.Errorf("who may see metrics: %w", err)
			}
			cfg.Logger, cfg.Version = log, version
			cfg.WriteConnection = func(ctx context.Context, st daemon.ConnectionStatus) error {
				return source.WriteConnection(ctx, kube.ConnectionStatus{
					Value: v1beta1.ConnectionStatusValue(st.Value), Latency: st.Latency, At: st.At,
					Peer: st.Peer.API(), Conditions: conditions(st.Conditions()), Rotation: rotationStatus(st.Rotation),
				})
			}
			cfg.WriteReport = func(ctx context.Context, st daemon.ReportStatus) error {
				endpoint := ""
				if st.Endpoint.IsValid() {
					endpoint = st.Endpoint.String()
				}
				return source.WriteReport(ctx, kube.ReportStatus{
					Implementation: st.Implementation, MTU: st.MTU, Endpoint: endpoint, LastHandshake: st.LastHandshake,
					Applied: st.Applied, Conditions: conditions(st.Conditions),
				})
			}
			log.Info("gateway daemon", "version", version, "mode", cfg.Mode, "pod", podName)
			return daemon.RunGateway(cmd.Context(), cfg)
		},
	}
	f := cmd.Flags()
	f.StringVar(&cfg.Name, "name", "", "`name` of the GatewayServer or GatewayClient (required)")
	f.StringVar(&cfg.Namespace, "namespace", "", "`namespace` of the tenant (required)")
	f.StringVar(&system, "system-namespace", v1beta1.DefaultNamespace, "`namespace` of the installation")
	f.StringVar(&cfg.RemoteID, "remote-cluster-id", "", "`ID` of the peer's cluster (required)")
	f.StringVar(&cfg.Mode, "mode", "", "`mode`: server, which is dialled, or client, which dials (required)")
	f.StringVar(&cfg.NodeName, "node-name", "", "`name` of the Node that the pod runs on")
	f.StringVar(&podName, "pod-name", "", "`name` of the pod, for the log")
	f.StringVar(&podIP, "pod-ip", "", "`address` of the pod (default: the source of its default route)")
	f.Uint16Var(&cfg.ListenPort, "listen-port", 0, "UDP `port` of a server (default 51840)")
	f.IntVar(&cfg.MTU, "mtu", 0, "MTU of the links in `bytes`; 0: derive it from the network below")
	f.StringSliceVar(&cfg.EndpointHosts, "endpoint-address", nil, "addresses or names of the `hosts` that a client dials: the first, and the others when nobody answers there")
	f.Uint16Var(&cfg.EndpointPort, "endpoint-port", 0, "UDP `port` that a client dials")
	f.StringVar(&cfg.KeysDir, "keys-dir", "/etc/wireguard/keys", "`directory` with the files privateKey and publicKey")
	f.StringVar(&cfg.StateDir, "state-dir", "/run/isthmus", "`directory` for what the next process has to know: where the peer was, and the objects that were known last")
	f.StringVar(&cfg.NetNS, "netns", "", "`file` of the network namespace to work in (default: that of the process)")
	f.StringVar(&cfg.HostInterface, "host-interface", "", "with --netns: `name` of the node's end of the link to that namespace")
	f.StringVar(&implementation, "implementation", string(kernel.Auto), "`who` encrypts: kernel, userspace, or auto for the kernel where it can")
	f.Uint16Var(&cfg.GenevePort, "geneve-port", 0, "UDP `port` of the links to nodes (default 6091)")
	f.Uint32Var(&cfg.RulePriority, "rule-priority", 0, "first of the 100 `priorities` of policy rules that are ours (default 300)")
	f.Uint16Var(&cfg.PingPort, "ping-port", 0, "UDP `port` of the probe through the tunnel (default 12345)")
	f.DurationVar(&cfg.PingInterval, "ping-interval", 0, "`time` between probes (default 2s)")
	f.IntVar(&cfg.PingThreshold, "ping-loss-threshold", 0, "`number` of intervals without an answer after which the peer is gone (default 5)")
	f.DurationVar(&cfg.StatusInterval, "ping-update-status-interval", 0, "longest `time` between two writes of the latency (default 10s)")
	addServing(cmd, &cfg.Serving)
	return cmd
}

// rotationStatus returns the field of the Connection; nil: there was no change of keys.
func rotationStatus(st daemon.RotationStatus) *v1beta1.RotationStatus {
	if st == (daemon.RotationStatus{}) {
		return nil
	}
	out := &v1beta1.RotationStatus{ID: st.ID, By: v1beta1.RotationByUs, Phase: st.Phase, Message: st.Message}
	if st.ByPeer {
		out.By = v1beta1.RotationByPeer
	}
	if st.Silence > 0 {
		out.Silence = st.Silence.Round(time.Millisecond).String()
	}
	return out
}
