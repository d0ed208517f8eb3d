package plan

import (
	"fmt"
	"strconv"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/cluster"
)

// checkMarks remarks where users' objects for gateways use the mark of a node:
// answers of peers would be sent to that node, or past it.
func (p *planner) checkMarks() {
	nodes := map[uint32]string{}
	for _, n := range p.s.Nodes {
		if mark := p.nodeMark(n.Name); mark != 0 {
			nodes[mark] = n.Name
		}
	}
	check := func(m cluster.Meta, at string, mark uint32) {
		if node, taken := nodes[mark]; taken {
			p.remark(m, Warning, ReasonContradicts, "%s: %d is the mark of connections of node %s in gateways: choose one above those of all nodes, 65536 for instance", at, mark, node)
		}
	}
	for _, o := range p.s.Routes {
		if made(o.Meta) || o.Labels[v1beta1.LabelRouteCategory] != v1beta1.CategoryGateway || len(p.fieldErrors(o.Meta)) > 0 {
			continue
		}
		for i, r := range o.Rules {
			check(o.Meta, field("spec.table.rules", i)+".fwmark", r.Mark)
		}
	}
	for _, o := range p.s.Firewalls {
		if made(o.Meta) || o.Labels[v1beta1.LabelFirewallCategory] != v1beta1.CategoryGateway || len(p.fieldErrors(o.Meta)) > 0 {
			continue
		}
		for i, c := range o.Chains {
			for j, r := range c.Filter {
				if mark, err := strconv.ParseUint(r.Value, 0, 32); err == nil && r.Action == string(v1beta1.ActionCtMark) {
					check(o.Meta, fmt.Sprintf("spec.table.chains[%d].rules.filterRules[%d].value", i, j), uint32(mark))
				}
			}
		}
	}
}
