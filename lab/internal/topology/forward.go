package topology

import (
	"github.com/isthmus-net/isthmus/lab/internal/yamlfile"
)

// icmpDrop is the only value of a cluster's key icmp.
const icmpDrop = "drop"

// checkForward fills in the node that a port forwarding leads to and reports
// what can't be meant. out is the peering with its defaults.
func (t *Topology) checkForward(f *yamlfile.File, in *peeringFile, out Peering) {
	fw := in.Forward
	if fw == nil {
		return
	}
	if f.At(&fw.Node).Line == 0 {
		fw.Node = 1
	}
	if out.Service != ServiceNodePort || out.Objects != ObjectsConfiguration {
		f.Problem(f.At(fw), "write service: NodePort and objects: Configuration, which are the defaults", "only a gateway at a NodePort that a GatewayServer chooses can be behind a port forwarding")
	}
	c, ok := t.Cluster(out.Server)
	if !ok {
		return
	}
	if fw.Node > c.Nodes && c.Nodes > 0 {
		f.Problem(f.At(&fw.Node), "", "cluster %s has nodes 1 to %d, not %d", c.Name, c.Nodes, fw.Node)
	}
	for _, p := range t.Peerings {
		if p.Server != out.Server || p.Forward == nil {
			continue
		}
		if p.Forward.Port == fw.Port {
			f.Problem(f.At(&fw.Port), "take another one", "port %d of the router of %s leads to the gateway for %s already", fw.Port, c.Name, p.Client)
		}
		if p.Forward.NodePort == fw.NodePort {
			f.Problem(f.At(&fw.NodePort), "take another one", "nodePort %d of %s is that of the gateway for %s already", fw.NodePort, c.Name, p.Client)
		}
	}
}
