package desired

import "github.com/isthmus-net/isthmus/appliance/netstate"

// PlainNode and PlainGateway return the state with the rules as they are
// written in the objects, before they are made fewer.
func PlainNode(in NodeInput) netstate.State       { return compileNode(in).state.Normalized() }
func PlainGateway(in GatewayInput) netstate.State { return compileGateway(in).state.Normalized() }

// FewerRules makes the rules of a state fewer. The routes of the numbered tables
// are not all known, and the rules of explicit priorities stay where they are.
func FewerRules(s netstate.State, numbered, explicit []uint32) netstate.State {
	h := newHost(0, nil)
	for _, n := range numbered {
		h.numbered[n] = true
	}
	for _, n := range explicit {
		h.explicit[n] = true
	}
	return h.fewerRules(s.Normalized()).Normalized()
}

// NodesAtOnce lets one rule stand for those of all links to nodes.
func NodesAtOnce(s netstate.State, numbered []uint32, least int) netstate.State {
	h := newHost(0, nil)
	h.gateway = true
	for _, n := range numbered {
		h.numbered[n] = true
	}
	return h.nodesAtOnce(s.Normalized(), least).Normalized()
}
