package peers

import (
	"context"

	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"

	corev1beta1 "github.com/isthmus-net/isthmus/appliance/api/core/v1beta1"
	netv1alpha1 "github.com/isthmus-net/isthmus/appliance/api/net/v1alpha1"
	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
)

// Read reads the objects of all peerings. Of kinds that the cluster does not serve,
// as those of the older API where it is not installed, there are none; without
// Configurations nothing is installed, which is an error that meta.IsNoMatchError
// knows.
func Read(ctx context.Context, c client.Client) (Objects, error) {
	var o Objects
	var (
		configurations v1beta1.ConfigurationList
		servers        v1beta1.GatewayServerList
		clients        v1beta1.GatewayClientList
		keys           v1beta1.PublicKeyList
		connections    v1beta1.ConnectionList
		foreign        corev1beta1.ForeignClusterList
		tunnels        netv1alpha1.TunnelEndpointList
	)
	for _, list := range []client.ObjectList{&configurations, &servers, &clients, &keys, &connections, &foreign, &tunnels} {
		err := c.List(ctx, list)
		if list != &configurations && meta.IsNoMatchError(err) {
			continue
		}
		if err != nil {
			return o, err
		}
	}
	o.Configurations, o.GatewayServers, o.GatewayClients = configurations.Items, servers.Items, clients.Items
	o.PublicKeys, o.Connections, o.ForeignClusters, o.TunnelEndpoints = keys.Items, connections.Items, foreign.Items, tunnels.Items
	return o, nil
}
