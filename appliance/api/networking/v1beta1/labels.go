package v1beta1

// Labels and annotations of the API. Their values are part of the contract
// with the users of the public system.
const (
	// LabelRemoteClusterID is on every object of a peering.
	LabelRemoteClusterID = "liqo.io/remote-cluster-id"
	// LabelManagedBy with the value ManagedBy marks objects that the
	// controller made and may delete.
	LabelManagedBy = "app.kubernetes.io/managed-by"
	ManagedBy      = "isthmus"

	LabelTenantNamespace = "liqo.io/tenant-namespace" // "true"
	LabelNodeType        = "liqo.io/type"             // "virtual-node" on nodes that are not real
	// LabelNonce is "true" on the Secret with which liqoctl peer and liqoctl
	// authenticate ask the authentication of the public system, which is not here, for
	// a number.
	LabelNonce = "liqo.io/nonce"

	LabelGatewayResource  = "networking.liqo.io/gateway-resource" // "true" on keys and Secrets
	LabelGatewayName      = "networking.liqo.io/gateway-name"
	LabelGatewayNamespace = "networking.liqo.io/gateway-namespace"
	LabelComponent        = "networking.liqo.io/component" // ComponentGateway on pods
	ComponentGateway      = "gateway"
	// ComponentGatewayPull is the component of pods that pull the images of a
	// gateway before its own is replaced.
	ComponentGatewayPull = "gateway-pull"
	LabelActive          = "networking.liqo.io/active"          // "true"
	LabelGatewayTemplate = "networking.liqo.io/gatewaytemplate" // "true" on the CRDs of templates

	// LabelHostInterface is on the Deployment and the pods of a gateway in a
	// network namespace of its node: the link that leads there.
	LabelHostInterface = "networking.liqo.io/host-interface"

	LabelFabricName = "networking.liqo.io/internal-fabric-name"
	LabelNodeName   = "networking.liqo.io/internal-node-name"

	LabelRouteCategory       = "networking.liqo.io/route-category"
	LabelRouteSubcategory    = "networking.liqo.io/route-subcategory"
	LabelRouteUnique         = "networking.liqo.io/route-unique"
	LabelFirewallCategory    = "networking.liqo.io/firewall-category"
	LabelFirewallSubcategory = "networking.liqo.io/firewall-subcategory"
	LabelFirewallUnique      = "networking.liqo.io/firewall-unique"
	// LabelPrefixTranslation is "true" on what translates networks of a remote cluster.
	// Gateways do that without connection tracking, where the tunnel ends. An admission
	// policy lets only the controller set it.
	LabelPrefixTranslation = "networking.liqo.io/prefix-translation"

	// CategoryFabric addresses nodes, CategoryGateway gateways.
	CategoryFabric        = "fabric"
	CategoryGateway       = "gateway"
	SubcategoryFabric     = "fabric"       // routes and firewall of every gateway
	SubcategoryFabricNode = "fabric-node"  // of the gateways on one node
	SubcategoryAllNodes   = "all-nodes"    // firewall of every node
	SubcategorySingleNode = "single-node"  // routes and firewall of one node
	SubcategoryAllGateway = "all-gateways" // firewall of every gateway
	SubcategoryIPMapping  = "ip-mapping"

	LabelCIDRType       = "configuration.liqo.io/cidr-type" // CIDRTypePod, CIDRTypeExternal
	CIDRTypePod         = "pod"
	CIDRTypeExternal    = "external"
	LabelNetworkType    = "ipam.liqo.io/network-type" // pod-cidr, service-cidr, external-cidr, internal-cidr, reserved
	NetworkTypePod      = "pod-cidr"
	NetworkTypeService  = "service-cidr"
	NetworkTypeExternal = "external-cidr"
	NetworkTypeInternal = "internal-cidr"
	NetworkTypeReserved = "reserved"
	// LabelNotRemapped: the network must get exactly the CIDR it asks for.
	LabelNotRemapped = "ipam.liqo.io/network-not-remapped"
	LabelShared      = "ipam.liqo.io/network-shared"
	// LabelHostUnreachable on an IP: gateways do not translate its address.
	LabelHostUnreachable = "networking.liqo.io/host-unreachable"

	AnnotationPreinstalled = "liqo.io/preinstalled"
	// AnnotationBlocked is on a Configuration whose peer is cut off: whatever its value
	// is, which says by whom, when and why.
	AnnotationBlocked = "networking.liqo.io/blocked"
	// AnnotationFollow is on a Configuration whose peer may have networks besides those of
	// spec.remote, as its gateway tells them: the ranges that these have to be in, with
	// commas between. AnnotationFollowMax is how many it may have (default
	// DefaultFollowMax). What the peer had withdrawn by the time of AnnotationForget
	// (RFC 3339) is not followed any longer. They are no fields, for a client that does
	// not know a field drops it when it updates an object.
	AnnotationFollow    = "networking.liqo.io/follow"
	AnnotationFollowMax = "networking.liqo.io/follow-max"
	AnnotationForget    = "networking.liqo.io/forget-withdrawn-by"
	// AnnotationInvitation is on a GatewayClient that isthmusctl peer accept has made: the ID
	// of the invitation. A run that was ended goes on with it.
	AnnotationInvitation = "networking.liqo.io/invitation-id"
	// AnnotationNetNS is on the pod of a gateway in a network namespace of its
	// node: what "ip netns" calls that namespace.
	AnnotationNetNS = "networking.liqo.io/netns"
	// AnnotationVTEPMAC is on the pod of a node's daemon: the address of the
	// node's VXLAN link.
	AnnotationVTEPMAC = "net.liqo.io/vxlan.mac.address"
	// AnnotationTemplate is on the Deployment of a gateway: the version of the
	// template that it was made from, and AnnotationController the
	// pod-template-hash of the controller that made it. Who has changed a
	// template, or upgraded the controller, sees by them what was made since.
	AnnotationTemplate   = "networking.liqo.io/template"
	AnnotationController = "networking.liqo.io/controller"
	// AnnotationPodTemplate is on the Deployment of a gateway: a digest of what its
	// template made of its pods, without AnnotationPinned. AnnotationGeneration is
	// the generation of the GatewayServer or GatewayClient that it was made from.
	AnnotationPodTemplate = "networking.liqo.io/pod-template"
	AnnotationGeneration  = "networking.liqo.io/gateway-generation"
	// AnnotationPinned is on the Deployment of a gateway: the node that its pod was on
	// when a rollout replaced it, which its new pod prefers.
	AnnotationPinned = "networking.liqo.io/pinned-to-node"
	// AnnotationPresharedKey is on a PublicKey whose gateway shares a key with the one
	// here besides: its fingerprint, 16 hexadecimal digits of its SHA-256. Without that key
	// there is no tunnel to it.
	AnnotationPresharedKey = "networking.liqo.io/preshared-key"
	// AnnotationRotate is on a GatewayServer or GatewayClient: the wish for new keys, as
	// isthmusctl peer rotate writes it (package rotation).
	AnnotationRotate = "networking.liqo.io/rotate"
	// AnnotationRotated is on the Secret with a gateway's keys that were made without asking
	// the peer: the ID of the wish for them.
	AnnotationRotated = "networking.liqo.io/rotated"
	// AnnotationRolled is on the Deployment of a gateway that was Connected when a
	// rollout replaced its pod, and has not been since: when that was (RFC 3339).
	AnnotationRolled = "networking.liqo.io/rolled-while-connected"
)

// How many networks of a peer are followed: if nothing else is written, and at most, which
// is what a gateway can tell (package exchange).
const (
	DefaultFollowMax = 4
	MaxFollowMax     = 64
)

// Names of the cluster-ID ConfigMap (label and key), as the public CLI finds it.
const (
	LabelAppName        = "app.kubernetes.io/name"
	NodeDaemonName      = "isthmus-node" // LabelAppName of the pods of nodes' daemons
	ClusterIDConfigMap  = "clusterid-configmap"
	ClusterIDKey        = "CLUSTER_ID"
	TenantNamespacePfx  = "liqo-tenant-"
	DefaultNamespace    = "liqo"
	GatewayNamePrefix   = "gw-"
	TunnelInterface     = "liqo-tunnel"
	VXLANInterface      = "liqo.vxlan" // of nodes
	PodInterface        = "eth0"       // of a gateway's pod, as every kubelet names it
	VXLANTable          = "18952"      // routing table of the VXLAN overlay
	HostInterface       = "liqo.host"  // of a node, to the gateway in GatewayNetNS
	GatewayInterface    = "liqo.gateway"
	GatewayNetNS        = "liqo-netns"
	InterfaceNamePrefix = "liqo."
	PrivateKeyField     = "privateKey"
	PublicKeyField      = "publicKey"
	// PresharedKeyField is the third field of a Secret with the keys of a gateway, where
	// it shares a key with its peer.
	PresharedKeyField = "presharedKey"
)

// BlockedKeysConfigMap is the name of the ConfigMap, in the system namespace, of the keys of
// gateways that this cluster has nothing to do with, and its LabelAppName. The keys of its
// data are fingerprints, the values say by whom, when and why; whatever they say blocks.
const BlockedKeysConfigMap = "isthmus-blocked-keys"

// Types of Secrets of invitations (package invitation). The type of a Secret never changes,
// so what a gateway writes into the one of a handover is never taken for anything else.
const (
	SecretTypeInvitation = "networking.liqo.io/invitation"
	SecretTypeHandover   = "networking.liqo.io/handover"
	// SecretTypeRotation is that of a Secret by which a gateway takes part in changes of
	// keys (package rotation).
	SecretTypeRotation = "networking.liqo.io/rotation"
)

// Conditions of a Connection.
const (
	// ConditionConnected says why the value is what it is.
	ConditionConnected = "Connected"
	// ConditionPeerTells says whether the gateway of the peer tells of its cluster.
	ConditionPeerTells = "PeerTells"
	// ConditionNetworksMatch says whether the networks that the peer tells are those of
	// the Configuration.
	ConditionNetworksMatch = "NetworksMatch"
)

// ReasonBlocked is its reason when this cluster has cut the peer off, and that of the
// condition Accepted of a PublicKey with a key that is blocked.
const ReasonBlocked = "Blocked"

// Conditions of a Configuration.
const (
	// ConditionNetworkCIDRsConfigured says whether all networks of the peer have
	// one by which this cluster reaches them.
	ConditionNetworkCIDRsConfigured = "NetworkCIDRsConfigured"
	// ConditionHostsUndisturbed says whether these networks leave alone what this
	// cluster's nodes need: the API server, DNS servers, routers.
	ConditionHostsUndisturbed = "HostsUndisturbed"
)
