package v1beta1

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TableFamily is the family of an nftables table (nft(8), "ADDRESS FAMILIES").
// +kubebuilder:validation:Enum=INET;IPV4;IPV6;ARP;NETDEV;BRIDGE
// +kubebuilder:validation:XValidation:rule="self != 'NETDEV'",message="chains of family NETDEV are each at a device, and a chain has no field that names one; write INET, IPV4, IPV6, ARP or BRIDGE"
type TableFamily string

// Values of TableFamily.
const (
	TableFamilyINet   TableFamily = "INET"
	TableFamilyIPv4   TableFamily = "IPV4"
	TableFamilyIPv6   TableFamily = "IPV6"
	TableFamilyARP    TableFamily = "ARP"
	TableFamilyNetdev TableFamily = "NETDEV"
	TableFamilyBridge TableFamily = "BRIDGE"
)

// ChainType is the type of a base chain.
// +kubebuilder:validation:Enum=filter;route;nat
type ChainType string

// Values of ChainType.
const (
	ChainTypeFilter ChainType = "filter"
	ChainTypeRoute  ChainType = "route"
	ChainTypeNAT    ChainType = "nat"
)

// ChainHook is where in a packet's way a chain is called.
// +kubebuilder:validation:Enum=prerouting;input;forward;output;postrouting;ingress
// +kubebuilder:validation:XValidation:rule="self != 'ingress'",message="ingress is the hook of one device, and a chain has no field that names it; write prerouting, or input in a table of family ARP"
type ChainHook string

// Values of ChainHook.
const (
	ChainHookPrerouting  ChainHook = "prerouting"
	ChainHookInput       ChainHook = "input"
	ChainHookForward     ChainHook = "forward"
	ChainHookOutput      ChainHook = "output"
	ChainHookPostrouting ChainHook = "postrouting"
	ChainHookIngress     ChainHook = "ingress"
)

// ChainPolicy is what happens to a packet that no rule decides.
// +kubebuilder:validation:Enum=drop;accept
type ChainPolicy string

// Values of ChainPolicy.
const (
	ChainPolicyDrop   ChainPolicy = "drop"
	ChainPolicyAccept ChainPolicy = "accept"
)

// ChainPriority orders the chains of a hook; lower is called first.
type ChainPriority int32

// Priorities that other users of netfilter have in the families of IP.
const (
	ChainPriorityFirst           ChainPriority = -1 << 31
	ChainPriorityConntrackDefrag ChainPriority = -400
	ChainPriorityRaw             ChainPriority = -300
	ChainPrioritySELinuxFirst    ChainPriority = -225
	ChainPriorityConntrack       ChainPriority = -200
	ChainPriorityMangle          ChainPriority = -150
	ChainPriorityNATDest         ChainPriority = -100
	ChainPriorityFilter          ChainPriority = 0
	ChainPrioritySecurity        ChainPriority = 50
	ChainPriorityNATSource       ChainPriority = 100
	ChainPrioritySELinuxLast     ChainPriority = 225
	ChainPriorityConntrackHelper ChainPriority = 300
	ChainPriorityLast            ChainPriority = 1<<31 - 1
)

// MatchOperation compares a field of the packet with a value.
// +kubebuilder:validation:Enum=eq;neq
type MatchOperation string

// Values of MatchOperation.
const (
	MatchOperationEq  MatchOperation = "eq"
	MatchOperationNeq MatchOperation = "neq"
)

// MatchPosition is the side of a packet that a match looks at.
// +kubebuilder:validation:Enum=src;dst
type MatchPosition string

// Values of MatchPosition.
const (
	MatchPositionSrc MatchPosition = "src"
	MatchPositionDst MatchPosition = "dst"
)

// MatchDevPosition is the link that a match looks at.
// +kubebuilder:validation:Enum=in;out
type MatchDevPosition string

// Values of MatchDevPosition.
const (
	MatchDevPositionIn  MatchDevPosition = "in"
	MatchDevPositionOut MatchDevPosition = "out"
)

// L4Proto is a transport protocol.
// +kubebuilder:validation:Enum=tcp;udp
type L4Proto string

// Values of L4Proto.
const (
	L4ProtoTCP L4Proto = "tcp"
	L4ProtoUDP L4Proto = "udp"
)

// MatchIP compares an address.
type MatchIP struct {
	// Value is an address, a network, or a range written with a hyphen.
	// +kubebuilder:validation:MinLength=2
	// +kubebuilder:validation:MaxLength=91
	// +kubebuilder:validation:Pattern=`^[0-9a-fA-F:.]+(/[0-9]{1,3}|-[0-9a-fA-F:.]+)?$`
	Value string `json:"value"`
	// Position is src or dst.
	Position MatchPosition `json:"position"`
}

// MatchPort compares a port.
type MatchPort struct {
	// Value is a port, or a range written with a hyphen.
	// +kubebuilder:validation:MaxLength=11
	// +kubebuilder:validation:Pattern=`^[0-9]{1,5}(-[0-9]{1,5})?$`
	Value string `json:"value"`
	// Position is src or dst.
	Position MatchPosition `json:"position"`
}

// MatchProto compares the transport protocol.
type MatchProto struct {
	// Value is tcp or udp.
	Value L4Proto `json:"value"`
}

// MatchDev compares the name of a link.
type MatchDev struct {
	// Value is the name of the link.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=15
	Value string `json:"value"`
	// Position is in or out.
	Position MatchDevPosition `json:"position"`
}

// Match is one condition of a rule.
type Match struct {
	// Op is eq or neq.
	Op MatchOperation `json:"op"`
	// IP compares an address.
	// +optional
	IP *MatchIP `json:"ip,omitempty"`
	// Port compares a port.
	// +optional
	Port *MatchPort `json:"port,omitempty"`
	// Proto compares the transport protocol.
	// +optional
	Proto *MatchProto `json:"proto,omitempty"`
	// Dev compares the name of a link.
	// +optional
	Dev *MatchDev `json:"dev,omitempty"`
}

// NatType is what a NAT rule does.
// +kubebuilder:validation:Enum=dnat;snat;masquerade
type NatType string

// Values of NatType.
const (
	NatTypeDestination NatType = "dnat"
	NatTypeSource      NatType = "snat"
	NatTypeMasquerade  NatType = "masquerade"
)

// NatRule translates the address of the packets that match.
//
// +kubebuilder:validation:XValidation:rule="self.natType == 'masquerade' ? !has(self.to) : has(self.to)",message="to is required for dnat and snat, and can't be given for masquerade"
type NatRule struct {
	// Name of the rule, unique in its chain. A rule without one is called by its place in
	// the list.
	// +optional
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name,omitempty"`
	// Match lists the conditions, all of which must hold.
	// +kubebuilder:validation:MaxItems=8
	Match []Match `json:"match"`
	// NatType is dnat, snat or masquerade.
	NatType NatType `json:"natType"`
	// To is the new address, or the new network, in which case host bits are kept.
	// +optional
	// +kubebuilder:validation:MinLength=2
	// +kubebuilder:validation:MaxLength=43
	// +kubebuilder:validation:Pattern=`^[0-9a-fA-F:.]+(/[0-9]{1,3})?$`
	To *string `json:"to,omitempty"`
	// TargetRef is the object that the rule stands for.
	// +optional
	TargetRef *corev1.ObjectReference `json:"targetRef,omitempty"`
}

// FilterAction is what a filter rule does.
// +kubebuilder:validation:Enum=ctmark;metamarkfromctmark;tcpmssclamp;accept;drop;reject;notrack
type FilterAction string

// Values of FilterAction.
const (
	ActionCtMark             FilterAction = "ctmark"
	ActionMetaMarkFromCtMark FilterAction = "metamarkfromctmark"
	ActionTCPMssClamp        FilterAction = "tcpmssclamp"
	ActionAccept             FilterAction = "accept"
	ActionDrop               FilterAction = "drop"
	ActionReject             FilterAction = "reject"
	ActionNotrack            FilterAction = "notrack"
)

// FilterRule decides on the packets that match.
//
// +kubebuilder:validation:XValidation:rule="self.action != 'tcpmssclamp' || self.match.exists(m, has(m.proto) && m.op == 'eq' && m.proto.value == 'tcp')",message="tcpmssclamp needs a match on proto tcp"
type FilterRule struct {
	// Name of the rule, unique in its chain. A rule without one is called by its place in
	// the list.
	// +optional
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name,omitempty"`
	// Match lists the conditions, all of which must hold.
	// +kubebuilder:validation:MaxItems=8
	Match []Match `json:"match"`
	// Action to take.
	Action FilterAction `json:"action"`
	// Value that the action needs: a mark, or a segment size.
	// +optional
	// +kubebuilder:validation:MaxLength=64
	Value *string `json:"value,omitempty"`
	// Counter is true when matching packets are counted.
	// +optional
	// +kubebuilder:default=true
	Counter bool `json:"counter"`
}

// RouteRule is a rule of a route chain. Such rules have no action yet.
type RouteRule struct {
	// Name of the rule, unique in its chain. A rule without one is called by its place in
	// the list.
	// +optional
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name,omitempty"`
}

// RulesSet has the rules of a chain, in the list of its type.
//
// +kubebuilder:validation:MaxProperties=1
type RulesSet struct {
	// NatRules of a nat chain.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=5000
	NatRules []NatRule `json:"natRules,omitempty"`
	// FilterRules of a filter chain.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=5000
	FilterRules []FilterRule `json:"filterRules,omitempty"`
	// RouteRules of a route chain.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=5000
	RouteRules []RouteRule `json:"routeRules,omitempty"`
}

// Chain is a base chain of a table.
//
// +kubebuilder:validation:XValidation:rule="self.type == 'nat' ? has(self.rules.natRules) : (self.type == 'filter' ? has(self.rules.filterRules) : has(self.rules.routeRules))",message="the rules must be of the chain's type: natRules in a nat chain, filterRules in a filter chain, routeRules in a route chain"
// +kubebuilder:validation:XValidation:rule="self.type != 'nat' || self.hook in ['prerouting', 'input', 'output', 'postrouting']",message="a nat chain can hook only into prerouting, input, output and postrouting"
// +kubebuilder:validation:XValidation:rule="self.type != 'route' || self.hook == 'output'",message="a route chain can hook only into output"
// +kubebuilder:validation:XValidation:rule="!has(self.rules.natRules) || self.hook in ['postrouting', 'input'] || self.rules.natRules.all(r, r.natType == 'dnat')",message="snat and masquerade rules can be only in a chain that hooks into postrouting or input"
// +kubebuilder:validation:XValidation:rule="!has(self.rules.natRules) || self.hook in ['prerouting', 'output'] || self.rules.natRules.all(r, r.natType != 'dnat')",message="dnat rules can be only in a chain that hooks into prerouting or output"
// +kubebuilder:validation:XValidation:rule="!has(self.rules.natRules) || self.hook != 'input' || self.rules.natRules.all(r, r.natType != 'masquerade')",message="masquerade rules can be only in a chain that hooks into postrouting"
type Chain struct {
	// Name of the chain, unique in its table.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=128
	Name string `json:"name"`
	// Rules of the chain, in the list of its type.
	Rules RulesSet `json:"rules"`
	// Type is filter, nat or route.
	Type ChainType `json:"type"`
	// Hook is where in a packet's way the chain is called. The hook ingress is
	// refused: it is one of a device, and a chain has no field that names it.
	Hook ChainHook `json:"hook"`
	// Policy is what happens to a packet that no rule decides.
	Policy ChainPolicy `json:"policy"`
	// Priority among the chains of the hook; lower is called first. On bridges others
	// are elsewhere than in IP: destination NAT at -300, filters at -200, source NAT at 300.
	// +optional
	// +kubebuilder:default=0
	Priority ChainPriority `json:"priority"`
}

// Table is an nftables table.
//
// +kubebuilder:validation:XValidation:rule="!has(self.chains) || self.family != 'ARP' || self.chains.all(c, c.hook in ['input', 'output'] && c.type == 'filter')",message="a table of family ARP can have only filter chains that hook into input or output"
// +kubebuilder:validation:XValidation:rule="!has(self.chains) || self.family != 'BRIDGE' || self.chains.all(c, c.type == 'filter')",message="a table of family BRIDGE can have only filter chains"
type Table struct {
	// Name of the table.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="the name of the table can't be changed; delete the object and create it anew"
	Name string `json:"name"`
	// Family of the table. In one of family ARP, rules accept or drop, by the IPv4
	// addresses in a packet of ARP and by its device. One of family BRIDGE is about
	// what goes through bridges, and knows what those of IP know but for routes and
	// NAT. NETDEV is refused: its chains are each at a device, and a chain has no
	// field that names one.
	Family TableFamily `json:"family"`
	// Chains of the table.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=16
	Chains []Chain `json:"chains,omitempty"`
}

// FirewallConfigurationSpec has one nftables table.
type FirewallConfigurationSpec struct {
	// Table to set up.
	Table Table `json:"table"`
}

// FirewallConfigurationStatus says which hosts have applied the object.
type FirewallConfigurationStatus struct {
	// Conditions, one per host.
	// +optional
	Conditions []HostCondition `json:"conditions,omitempty"`
}

// FirewallConfiguration is an nftables table for the hosts that its labels
// address.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:categories=liqo,shortName=fw;fwconfig;fwcfg
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type FirewallConfiguration struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   FirewallConfigurationSpec   `json:"spec"`
	Status FirewallConfigurationStatus `json:"status,omitempty"`
}

// FirewallConfigurationList is a list of FirewallConfigurations.
//
// +kubebuilder:object:root=true
type FirewallConfigurationList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []FirewallConfiguration `json:"items"`
}
