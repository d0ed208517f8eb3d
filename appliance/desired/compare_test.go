package desired_test

import (
	"net/netip"

	"github.com/google/go-cmp/cmp"
)

// comparers let assert.DeepEqual look at addresses.
var comparers = cmp.Options{
	cmp.Comparer(func(a, b netip.Addr) bool { return a == b }),
	cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }),
	cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b }),
}
