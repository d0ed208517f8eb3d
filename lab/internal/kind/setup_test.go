package kind

import (
	"os"
	"path/filepath"
	"testing"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// TestInstalls: who installs beside the API server finds the chart there.
func TestInstalls(t *testing.T) {
	const cluster = "{ nodes: 1, podCIDR: 10.0.0.0/16, serviceCIDR: 10.96.0.0/16 }"
	const two = "clusters: { milan: " + cluster + ", rome: " + cluster + " }\n"
	for _, tt := range []struct {
		name, topology string
		want           bool
	}{
		{"installed and connected from the start", two + "peerings: [ { server: milan, client: rome } ]", false},
		{"connected later", two + "peerings: [ { server: milan, client: rome, absent: true } ]", true},
		{"installed by isthmusctl", "install: isthmusctl\n" + two, true},
		{"installed later", "install: none\n" + two, true},
	} {
		assert.Equal(t, installs(parse(t, tt.topology)), tt.want, tt.name)
	}
}

// TestGiven: programs that only scenarios require are given where they were built, but for the
// daemons of the public system, of which nodes of kind have no images.
func TestGiven(t *testing.T) {
	bin := t.TempDir()
	programs, err := given(bin)
	assert.NilError(t, err)
	assert.DeepEqual(t, programs, operatorPrograms)
	for _, p := range world.Programs() {
		assert.NilError(t, os.WriteFile(filepath.Join(bin, p), nil, 0o755))
	}
	programs, err = given(bin)
	assert.NilError(t, err)
	assert.DeepEqual(t, programs, append(operatorPrograms[:len(operatorPrograms):len(operatorPrograms)], "liqoctl"))
}
