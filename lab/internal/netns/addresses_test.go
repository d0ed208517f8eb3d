package netns

import (
	"fmt"
	"net/netip"
	"os/exec"
	"slices"
	"testing"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/appliance/nettest"
)

func TestAddresses(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.Need(t, "ip")
	ns, err := New()
	assert.NilError(t, err)
	defer ns.Close()
	for _, a := range []string{"192.0.2.1/32", "2001:db8::1/128"} {
		assert.NilError(t, Do(ns, func() error { return exec.Command("ip", "address", "add", a, "dev", "lo").Run() }))
	}
	got, err := Addresses(ns)
	assert.NilError(t, err)
	slices.SortFunc(got, func(a, b netip.Addr) int { return a.Compare(b) })
	assert.Equal(t, fmt.Sprint(got), "[192.0.2.1 2001:db8::1]")
}
