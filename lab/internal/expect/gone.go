package expect

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/isthmus-net/isthmus/lab/internal/topology"
)

// Gone expects that nothing is left of what the scenario did: the objects of
// our kinds and the kernel state of all hosts are as they were before.
type Gone struct{}

// Lint has nothing to check.
func (*Gone) Lint(*Linter) {}

// String is the expectation on one line.
func (*Gone) String() string { return "nothing is left over" }

// Check compares.
func (*Gone) Check(ctx context.Context, row *Row) (Result, error) {
	now, err := Observe(ctx, row.World, row.API, row.Topology)
	if err != nil {
		return Result{}, err
	}
	more, less := row.Before.Compare(now)
	res := Result{OK: len(more) == 0 && len(less) == 0, Want: "everything as it was before the scenario"}
	if !res.OK {
		res.Got = fmt.Sprintf("%d things more, %d fewer", len(more), len(less))
		var lines []string
		for _, m := range more {
			lines = append(lines, "+ "+m)
		}
		for _, l := range less {
			lines = append(lines, "- "+l)
		}
		const enough = 12
		if len(lines) > enough {
			lines = append(lines[:enough], fmt.Sprintf("… and %d more", len(lines)-enough))
		}
		res.Why = strings.Join(lines, "\n")
	}
	return res, nil
}

// Leftovers are the things that a scenario could leave behind, a line each, and
// how many there are of each.
type Leftovers map[string]int

// ourKinds are the kinds whose objects scenarios and the appliance make.
var ourKinds = []string{
	"configurations", "connections", "gatewayservers", "gatewayclients", "wggatewayservers", "wggatewayclients", "publickeies",
	"internalfabrics", "internalnodes", "genevetunnels", "routeconfigurations", "firewallconfigurations", "gatewayreports",
}

// Observe lists them.
func Observe(ctx context.Context, w World, api *API, t *topology.Topology) (Leftovers, error) {
	out := Leftovers{}
	for _, c := range t.Clusters {
		var kinds []string
		for _, k := range ourKinds {
			kinds = append(kinds, k+".networking.liqo.io")
		}
		kinds = append(kinds, "ips.ipam.liqo.io", "networks.ipam.liqo.io", "foreignclusters.core.liqo.io",
			"validatingadmissionpolicies.admissionregistration.k8s.io", "namespaces")
		if t.OfOthers {
			kinds = rowsKinds()
		}
		for _, k := range kinds {
			objects, err := api.List(ctx, c.Name, k)
			if NotServed(err) && t.Install == topology.InstallNone {
				continue // at present the appliance is not installed
			}
			if err != nil {
				return nil, err
			}
			for _, o := range objects {
				out[c.Name+": "+objectName(o)]++
			}
		}
	}
	kernels, err := observeKernels(ctx, w, api, t)
	if err != nil {
		return nil, err
	}
	for _, line := range kernels {
		out[line]++
	}
	return out, nil
}

// rowsKinds are the kinds that come and go with what rows create. In clusters of others
// all else may change at any time.
func rowsKinds() []string {
	return []string{"ips.ipam.liqo.io", "firewallconfigurations.networking.liqo.io", "routeconfigurations.networking.liqo.io"}
}

// observeKernels lists what somebody has put into the kernels of all hosts, each
// line with its host, and with names for addresses that move.
func observeKernels(ctx context.Context, w World, api *API, t *topology.Topology) ([]string, error) {
	movable, err := movableAddresses(ctx, w, api, t)
	if err != nil {
		return nil, err
	}
	hosts, err := w.Inventory(ctx)
	if err != nil {
		return nil, err
	}
	var out []string
	for _, h := range hosts {
		// The controller and CoreDNS touch no network, and are other pods where
		// their node was taken away.
		if strings.Contains(h.Host, "/isthmus-controller-") || strings.Contains(h.Host, "/kube-system/coredns-") {
			continue
		}
		cluster, _, _ := strings.Cut(h.Host, "/")
		for _, line := range h.Lines {
			out = append(out, h.Host+": "+movable[cluster].name(line))
		}
	}
	return out, nil
}

func objectName(o unstructured.Unstructured) string {
	if o.GetNamespace() == "" {
		return o.GetKind() + " " + o.GetName()
	}
	return o.GetKind() + " " + o.GetNamespace() + "/" + o.GetName()
}

// Compare returns what there is more and what there is less than before.
func (l Leftovers) Compare(now Leftovers) (more, less []string) {
	return now.without(l), l.without(now)
}

// without are the lines that there are more of than in others.
func (l Leftovers) without(others Leftovers) []string {
	var out []string
	for _, line := range slices.Sorted(maps.Keys(l)) {
		out = append(out, slices.Repeat([]string{line}, max(0, l[line]-others[line]))...)
	}
	return out
}
