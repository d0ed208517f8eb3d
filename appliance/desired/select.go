package desired

import "github.com/isthmus-net/isthmus/appliance/cluster"

// Labels that say which host an object is addressed to. They are those of
// appliance/api/networking/v1beta1, which this package may not import; a test
// of internal/kube holds them together.
const (
	labelRouteCategory       = "networking.liqo.io/route-category"
	labelRouteSubcategory    = "networking.liqo.io/route-subcategory"
	labelRouteUnique         = "networking.liqo.io/route-unique"
	labelFirewallCategory    = "networking.liqo.io/firewall-category"
	labelFirewallSubcategory = "networking.liqo.io/firewall-subcategory"
	labelFirewallUnique      = "networking.liqo.io/firewall-unique"

	categoryFabric        = "fabric"
	categoryGateway       = "gateway"
	subcategoryFabric     = "fabric"
	subcategoryFabricNode = "fabric-node"
	subcategoryAllNodes   = "all-nodes"
	subcategorySingleNode = "single-node"
	subcategoryAllGateway = "all-gateways"
	subcategoryIPMapping  = "ip-mapping"

	// On what the controller has made.
	labelManagedBy = "app.kubernetes.io/managed-by"
	managedBy      = "isthmus"
)

// LabelPrefixTranslation is "true" on what the controller writes to translate the
// networks of a remote cluster.
const LabelPrefixTranslation = "networking.liqo.io/prefix-translation"

// OfUser reports whether an object is one that somebody else than the controller has
// written, and that is to stay.
func OfUser(m cluster.Meta) bool { return !m.Deleting && m.Labels[labelManagedBy] != managedBy }

// NodeSelects reports whether a RouteConfiguration or FirewallConfiguration
// with these labels is addressed to the node.
func NodeSelects(labels map[string]string, node string) bool {
	return nodeSelectsRoute(labels, node) || nodeSelectsFirewall(labels, node)
}

// GatewaySelects reports whether a RouteConfiguration or
// FirewallConfiguration with these labels is addressed to the gateway of the
// remote cluster, whose pod runs on the node.
func GatewaySelects(labels map[string]string, remoteID, node string) bool {
	return gatewaySelectsRoute(labels, remoteID, node) || gatewaySelectsFirewall(labels, remoteID)
}

func nodeSelectsRoute(labels map[string]string, node string) bool {
	if labels[labelRouteCategory] != categoryFabric {
		return false
	}
	return labels[labelRouteSubcategory] != subcategorySingleNode || node != "" && labels[labelRouteUnique] == node
}

func nodeSelectsFirewall(labels map[string]string, node string) bool {
	if labels[labelFirewallCategory] != categoryFabric {
		return false
	}
	switch labels[labelFirewallSubcategory] {
	case subcategoryAllNodes, subcategoryIPMapping:
		return true
	case subcategorySingleNode:
		return node != "" && labels[labelFirewallUnique] == node
	}
	return false
}

func gatewaySelectsRoute(labels map[string]string, remoteID, node string) bool {
	if labels[labelRouteCategory] != categoryGateway {
		return false
	}
	unique := labels[labelRouteUnique]
	return remoteID != "" && unique == remoteID ||
		labels[labelRouteSubcategory] == subcategoryFabric ||
		labels[labelRouteSubcategory] == subcategoryFabricNode && node != "" && unique == node
}

func gatewaySelectsFirewall(labels map[string]string, remoteID string) bool {
	if labels[labelFirewallCategory] != categoryGateway {
		return false
	}
	switch labels[labelFirewallSubcategory] {
	case subcategoryAllGateway, subcategoryFabric, subcategoryIPMapping:
		return true
	}
	return remoteID != "" && labels[labelFirewallUnique] == remoteID
}
