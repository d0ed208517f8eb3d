package world

import (
	"errors"
	"fmt"
	"net/netip"
	"time"
)

// Phases of a lab.
const (
	PhaseStarting = "starting"
	PhaseReady    = "ready"
	PhaseFailed   = "failed"
	PhaseStopping = "stopping"
)

// KubeconfigsVariable is a variable of commands on control planes: the directory that
// has NAME/admin.kubeconfig for each cluster of the lab, since whoever connects two
// clusters reaches both API servers.
const KubeconfigsVariable = "KUBECONFIGS"

// A Status is what there is of a lab.
type Status struct {
	Name     string          `json:"name"`
	World    string          `json:"world"` // native, vm or kind
	Phase    string          `json:"phase"`
	Error    string          `json:"error,omitempty"` // why it failed
	Started  time.Time       `json:"started"`
	PID      int             `json:"pid"` // of the supervisor, as the host counts
	RunDir   string          `json:"runDir"`
	Clusters []ClusterStatus `json:"clusters"`
	VM       *VMStatus       `json:"vm,omitempty"`
	// CPU is the processor time that the lab's programs have taken, by their
	// names: those of a virtual machine count as qemu's.
	CPU  map[string]time.Duration `json:"cpu,omitempty"`
	Spec Spec                     `json:"spec"`
}

// A ClusterStatus is what there is of a cluster.
type ClusterStatus struct {
	Name       string            `json:"name"`
	Server     string            `json:"server"`     // URL, inside the lab
	Components map[string]string `json:"components"` // name → "running" or "stopped"
	Nodes      []string          `json:"nodes"`      // that are there
	// Took is how long each component took to be ready, and the CRDs.
	Took map[string]time.Duration `json:"took,omitempty"`
	Pods []PodStatus              `json:"pods,omitempty"`
}

// A PodStatus is a pod that runs in the world.
type PodStatus struct {
	Namespace  string            `json:"namespace"`
	Name       string            `json:"name"`
	UID        string            `json:"uid,omitempty"`
	Node       string            `json:"node"`
	IP         netip.Addr        `json:"ip"`
	Labels     map[string]string `json:"labels,omitempty"`
	HostNet    bool              `json:"hostNetwork,omitempty"`
	Containers []ContainerStatus `json:"containers,omitempty"`
}

// A ContainerStatus is a container of a pod.
type ContainerStatus struct {
	Name     string `json:"name"`
	PID      int    `json:"pid,omitempty"` // 0 when it does not run
	Restarts int    `json:"restarts"`
}

// A VMStatus says how the virtual machine came up.
type VMStatus struct {
	Accelerator string        `json:"accelerator"` // tcg or kvm
	Kernel      string        `json:"kernel"`
	Boot        time.Duration `json:"boot"`               // from QEMU's start to the agent's first answer
	Restored    bool          `json:"restored,omitempty"` // from a snapshot, rather than booted
	Retries     int           `json:"retries"`            // boots that got stuck before
	Warnings    []string      `json:"warnings,omitempty"`
}

// A SnapshotRequest says what a lab of the vm world shall be saved as.
type SnapshotRequest struct {
	Key      string `json:"key"`
	Topology string `json:"topology"`
	Overlay  string `json:"overlay"`
}

// A SnapshotAnswer says what was saved.
type SnapshotAnswer struct {
	Size  int64         `json:"size"`  // bytes
	Pause time.Duration `json:"pause"` // for which the world stood still
}

// A Progress is one line of what is happening while a lab comes up.
type Progress struct {
	Time    time.Time     `json:"time"`
	Message string        `json:"message"`
	Took    time.Duration `json:"took,omitempty"` // of the step that the message ends, when it ends one
	Error   string        `json:"error,omitempty"`
	Done    bool          `json:"done,omitempty"` // no more will follow
}

// An ExecRequest runs a command in a target: a node, a router, a control
// plane, an outside host, the WAN, or a container of a pod. An empty argv is
// an error.
type ExecRequest struct {
	Target    string   `json:"target"` // "milan/node-1", "milan/web", "milan/gateway", "user"
	Container string   `json:"container,omitempty"`
	Argv      []string `json:"argv"`
	Stdin     []byte   `json:"stdin,omitempty"`
	Env       []string `json:"env,omitempty"` // added to the target's
	TTY       bool     `json:"tty,omitempty"` // ExecStream only
	Rows      uint16   `json:"rows,omitempty"`
	Cols      uint16   `json:"cols,omitempty"`
	// Host runs the lab's own binary and tools in the network namespace of a
	// pod rather than inside its container.
	Host bool `json:"host,omitempty"`
}

// An ExecResult is how a command ended. Code is its exit code, or 128 plus the
// signal that ended it.
type ExecResult struct {
	Stdout []byte `json:"stdout,omitempty"`
	Stderr []byte `json:"stderr,omitempty"`
	Code   int    `json:"code"`
}

// A Direction is how a packet passed an interface.
type Direction string

// Directions, as the host of the interface sees them.
const (
	In  Direction = "in"
	Out Direction = "out"
)

// Encapsulations that a Sighting may be found in.
const (
	OuterNone   = ""
	OuterGeneve = "geneve"
	OuterVXLAN  = "vxlan"
)

// A Sighting is one packet with a token in its innermost payload, seen on one
// interface.
type Sighting struct {
	Time      time.Time      `json:"time"`
	Host      string         `json:"host"`      // "milan/node-1", "milan/web", "milan/gateway", "milan/router", "wan"
	Interface string         `json:"interface"` // its name when the packet passed
	Direction Direction      `json:"direction"`
	Outer     string         `json:"outer,omitempty"` // encapsulation around the innermost packet
	OuterSrc  netip.Addr     `json:"outerSrc,omitzero"`
	OuterDst  netip.Addr     `json:"outerDst,omitzero"`
	Src       netip.AddrPort `json:"src"` // innermost; port 0 for ICMP
	Dst       netip.AddrPort `json:"dst"`
	Proto     string         `json:"proto"`            // tcp, udp, icmp, icmpv6
	Marker    string         `json:"marker,omitempty"` // the byte after the token: '>' request, '<' reply, as the sender wrote it; of ICMP: as its type says
	Length    int            `json:"length"`           // of the frame as captured
	MSS       int            `json:"mss,omitempty"`    // of a SYN; 0: it says none
}

// String is the sighting on one line.
func (s Sighting) String() string {
	outer := ""
	if s.Outer != "" {
		outer = fmt.Sprintf(" in %s %s → %s", s.Outer, s.OuterSrc, s.OuterDst)
	}
	return fmt.Sprintf("%s %s:%s %s %s %s → %s%s", s.Time.Format("15:04:05.000000"), s.Host, s.Interface, s.Direction, s.Proto, s.Src, s.Dst, outer)
}

// A SightingQuery asks for packets with a token, or for those that began a TCP
// connection.
type SightingQuery struct {
	Token string `json:"token,omitempty"`
	// SYN is the address and port that a connection comes from.
	SYN   netip.AddrPort `json:"syn,omitzero"`
	Since time.Time      `json:"since,omitzero"`
	Until time.Time      `json:"until,omitzero"`
}

// A WireQuery asks what passed between the hosts of a network.
type WireQuery struct {
	On       string    `json:"on"` // a host whose interfaces count: "wan", "milan/router", …; for "wan" only the WAN's ports
	Since    time.Time `json:"since,omitzero"`
	Until    time.Time `json:"until,omitzero"`
	Contains []string  `json:"contains,omitempty"` // byte strings to look for anywhere in the frames
}

// A WireReport is what passed.
type WireReport struct {
	Packets int        `json:"packets"`
	Bytes   int        `json:"bytes"`
	Flows   []WireFlow `json:"flows"` // sorted, most packets first
	// Found has, for each string asked for, the number of frames with it.
	Found []int `json:"found"`
	// Lost is the number of packets of that host which were no longer in the
	// ring: when it is not 0 an absence proves nothing.
	Lost int `json:"lost"`
}

// A WireFlow is a number of packets of one kind.
type WireFlow struct {
	Proto   string     `json:"proto"` // tcp, udp, icmp, icmpv6, arp, …
	Src     netip.Addr `json:"src,omitzero"`
	Dst     netip.Addr `json:"dst,omitzero"`
	SrcPort uint16     `json:"srcPort,omitempty"`
	DstPort uint16     `json:"dstPort,omitempty"`
	Packets int        `json:"packets"`
	Bytes   int        `json:"bytes"`
}

// A HostState is what the tools say about one host.
type HostState struct {
	Host     string         `json:"host"`
	Sections []StateSection `json:"sections"`
}

// A StateSection is what one command printed.
type StateSection struct {
	Command string `json:"command"`
	Output  string `json:"output"`
}

// Errors that callers tell apart.
var (
	// ErrNotRunning: nothing answers on the control socket.
	ErrNotRunning = errors.New("the lab is not running")
	// ErrNoAnswer: the supervisor or the agent does not answer any more.
	ErrNoAnswer = errors.New("the lab does not answer")
	// ErrNoTarget: no host or pod has that name.
	ErrNoTarget = errors.New("no such target")
	// ErrNoCaptures: nobody captures packets in that world.
	ErrNoCaptures = errors.New("no packets are captured here")
)
