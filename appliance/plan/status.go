package plan

import (
	"cmp"
	"fmt"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	corev1beta1 "github.com/isthmus-net/isthmus/appliance/api/core/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
)

// writeStatuses adds the statuses that are known only at the end.
func (p *planner) writeStatuses() {
	p.writeConfigurations()
	p.tellOfBlocks()
	p.writeTunnelEndpoints()
	p.writeIPs()
	for _, g := range p.allGateways {
		p.gatewayStatus(g)
	}
}

// foreignClusters plans the remote clusters, as users see them, and the state
// of our part of them. One that somebody else made stays theirs.
func (p *planner) foreignClusters() {
	ids := map[string]bool{}
	for _, c := range p.s.Configurations {
		ids[c.RemoteID] = true
	}
	for _, g := range slices.Concat(p.s.GatewayServers, p.s.GatewayClients) {
		ids[g.RemoteID] = true
	}
	for _, peer := range p.peerings {
		if peer.gateway != nil {
			ids[peer.id] = true
		}
	}
	known := map[string]bool{}         // by cluster ID: made by somebody else
	named := map[string]cluster.Meta{} // the same by name
	for _, fc := range p.s.ForeignClusters {
		id := cmp.Or(fc.ClusterID, fc.Name)
		ours := fc.Labels[v1beta1.LabelManagedBy] == v1beta1.ManagedBy
		if !ours {
			p.checkForeignCluster(fc, id, known[id])
			p.foreignCluster(existing(fc.Meta), id, ids[id])
			named[fc.Name] = fc.Meta
		}
		known[id] = known[id] || !ours
	}
	for id := range ids {
		if !clusterID.MatchString(id) || id == p.s.ID || known[id] {
			continue
		}
		if m, taken := named[id]; taken {
			p.remark(m, Warning, ReasonDuplicate, "metadata.name: %q is the ID of another remote cluster than the one in spec.clusterID. That cluster gets no ForeignCluster as long as this one has its name: create this one anew with the name of its own cluster", id)
			continue
		}
		o := &corev1beta1.ForeignCluster{TypeMeta: metav1.TypeMeta{APIVersion: coreVersion, Kind: "ForeignCluster"}}
		o.Name, o.Labels = id, map[string]string{v1beta1.LabelRemoteClusterID: id}
		o.Spec.ClusterID = corev1beta1.ClusterID(id)
		p.add(o)
		p.foreignCluster(metav1.ObjectMeta{Name: id}, id, true)
	}
}

// checkForeignCluster remarks what is odd about one that somebody else made.
// Only an event says so: its conditions are those of modules.
func (p *planner) checkForeignCluster(fc cluster.ForeignCluster, id string, twice bool) {
	switch {
	case id == p.s.ID:
		p.remark(fc.Meta, Warning, ReasonRemoteIsLocal, "spec.clusterID: %q is the ID of this cluster: delete the ForeignCluster, or create it anew with that of the remote one", id)
	case twice:
		p.remark(fc.Meta, Warning, ReasonDuplicate, "spec.clusterID: %q is that of another ForeignCluster, too: delete one of the two", id)
	}
}

// foreignCluster gives one its status.
func (p *planner) foreignCluster(m metav1.ObjectMeta, id string, enabled bool) {
	o := &corev1beta1.ForeignCluster{TypeMeta: metav1.TypeMeta{APIVersion: coreVersion, Kind: "ForeignCluster"}, ObjectMeta: m}
	module := &corev1beta1.Module{Enabled: enabled}
	if enabled {
		module.Conditions = p.moduleConditions(id)
	}
	o.Status.Modules.Networking = module
	p.out.Statuses = append(p.out.Statuses, o)
}

// moduleConditions says how far the peering with a remote cluster has come.
func (p *planner) moduleConditions(id string) []corev1beta1.Condition {
	condition := func(kind corev1beta1.ConditionType, status corev1beta1.ConditionStatusType, reason, format string, args ...any) corev1beta1.Condition {
		return corev1beta1.Condition{Type: kind, Status: status, Reason: reason, Message: fmt.Sprintf(format, args...)}
	}
	peer := p.lookup(id)
	if peer == nil {
		peer = &peering{id: id}
	}
	var out []corev1beta1.Condition
	switch {
	case peer.ready:
		out = append(out, condition(corev1beta1.NetworkConfigurationStatus, corev1beta1.ConditionStatusReady, "ConfigurationReady", "Configuration %s/%s is in use", peer.config.Namespace, peer.config.Name))
	case peer.config != nil:
		out = append(out, condition(corev1beta1.NetworkConfigurationStatus, corev1beta1.ConditionStatusNotReady, "ConfigurationNotReady", "see the condition of Configuration %s/%s", peer.config.Namespace, peer.config.Name))
	case p.invitation(id) != nil && !slices.ContainsFunc(p.s.Configurations, func(c cluster.Configuration) bool { return c.RemoteID == id }):
		reason, message := p.invited(p.invitation(id))
		out = append(out, condition(corev1beta1.NetworkConfigurationStatus, corev1beta1.ConditionStatusNotReady, reason, "%s", message))
	default:
		out = append(out, condition(corev1beta1.NetworkConfigurationStatus, corev1beta1.ConditionStatusNotReady, "ConfigurationMissing", "there is no usable Configuration of cluster %s", id))
	}
	g := peer.gateway
	if g == nil {
		return append(out,
			condition(corev1beta1.NetworkGatewayPresence, corev1beta1.ConditionStatusNotReady, "GatewayMissing", "there is no usable GatewayServer or GatewayClient for cluster %s", id),
			condition(corev1beta1.NetworkConnectionStatus, corev1beta1.ConditionStatusNotReady, "ConnectionMissing", "there is no gateway"))
	}
	out = append(out, condition(corev1beta1.NetworkGatewayPresence, corev1beta1.ConditionStatusReady, "GatewayPresent", "%s %s/%s", g.Kind, g.Namespace, g.Name))

	kind, name := corev1beta1.NetworkGatewayServerStatus, GatewayName(g.Name)
	if g.Role == cluster.Client {
		kind = corev1beta1.NetworkGatewayClientStatus
	}
	status, ready, replicas := corev1beta1.ConditionStatusNotReady, int32(0), int32(0)
	for _, d := range p.s.Deployments {
		if d.Namespace == g.Namespace && d.Name == name {
			ready, replicas = d.ReadyReplicas, d.Replicas
		}
	}
	switch {
	case ready > 0 && ready >= replicas:
		status = corev1beta1.ConditionStatusReady
	case ready > 0:
		status = corev1beta1.ConditionStatusSomeNotReady
	}
	out = append(out, condition(kind, status, "Gateway"+string(status), "%d of %d pods of Deployment %s/%s are ready", ready, replicas, g.Namespace, name))

	value, why := p.connection(g)
	status = corev1beta1.ConditionStatusNotReady
	switch v1beta1.ConnectionStatusValue(value) {
	case v1beta1.Connected:
		status = corev1beta1.ConditionStatusEstablished
	case v1beta1.Connecting:
		status = corev1beta1.ConditionStatusPending
	case v1beta1.ConnectionError:
		status = corev1beta1.ConditionStatusError
	}
	return append(out, condition(corev1beta1.NetworkConnectionStatus, status, "Connection"+string(status), "Connection %s/%s is %s%s", g.Namespace, name, cmp.Or(value, "not reported yet"), why))
}

// connection returns what the gateway g reported: Connected, Connecting or
// Error; empty: nothing yet. why is to follow it in a sentence, unless all is well.
func (p *planner) connection(g *cluster.Gateway) (value, why string) {
	i := slices.IndexFunc(p.s.Connections, func(c cluster.Connection) bool {
		return c.Namespace == g.Namespace && c.Name == GatewayName(g.Name)
	})
	if i < 0 {
		return "", ""
	}
	c := p.s.Connections[i]
	if c.Why != "" && v1beta1.ConnectionStatusValue(c.Value) != v1beta1.Connected {
		why = ": " + c.Why
	}
	return c.Value, why
}

// tellOfBlocks warns of peers that gateways have cut off. That a block is over needs no
// event of its own: the Connection says so.
func (p *planner) tellOfBlocks() {
	for _, c := range p.s.Connections {
		if c.Blocked {
			p.event(c.Ref, Warning, v1beta1.ReasonBlocked, c.Why)
		}
	}
}
