package access_test

import (
	"slices"
	"testing"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/appliance/internal/access"
)

func TestRight(t *testing.T) {
	list := []access.Right{
		{Verb: "update", Group: "apps", Resource: "deployments", Subresource: "scale", Namespace: "liqo"},
		{Verb: "create", Resource: "namespaces"},
		{Verb: "list", Group: "networking.liqo.io", Resource: "connections", Name: "any"},
	}
	slices.SortFunc(list, access.Compare)
	var text []string
	for _, r := range list {
		text = append(text, r.String())
	}
	assert.DeepEqual(t, text, []string{"create namespaces", "list connections.networking.liqo.io", "update deployments.apps/scale in namespace liqo"})
}
