package prober

import "fmt"

// A Server is who answers probes: the pod or the host that a process runs in,
// as whoever started it says, and the process itself. It is comparable.
type Server struct {
	Cluster string `json:"cluster,omitempty"` // empty: a host outside of the clusters
	// Pod is its name, and UID that of the API: a pod that takes another one's
	// place has its name, too.
	Pod string `json:"pod,omitempty"`
	UID string `json:"uid,omitempty"`
	// Node is the name of the node that the pod runs on. With HostNetwork the
	// server answers for the node as well.
	Node        string `json:"node,omitempty"`
	HostNetwork bool   `json:"hostNetwork,omitempty"`
	Host        string `json:"host,omitempty"` // name of a host outside of the clusters
	// Process is different for every start of a server.
	Process string `json:"process,omitempty"`
}

// String is the server's name as scenarios write it: milan/web, or user.
func (s Server) String() string {
	switch {
	case s.Cluster != "" && s.Pod != "":
		return s.Cluster + "/" + s.Pod
	case s.Cluster == "" && s.Host != "":
		return s.Host
	case s.Process == "":
		return "a server that does not say who it is"
	}
	return fmt.Sprintf("a server without a name (process %s)", s.Process)
}
