//go:build tools

// Package public pins the daemons of the public system, which a cluster of the lab runs in
// place of Isthmus so that both meet on the wire. They are a module of their own because they
// need an older version of the library of netlink than flanneld does.
package public

import (
	_ "github.com/liqotech/liqo/cmd/fabric"
	_ "github.com/liqotech/liqo/cmd/gateway"
	_ "github.com/liqotech/liqo/cmd/gateway/geneve"
	_ "github.com/liqotech/liqo/cmd/gateway/wireguard"
	_ "github.com/liqotech/liqo/cmd/ipam"
	_ "github.com/liqotech/liqo/cmd/liqo-controller-manager"
	_ "github.com/liqotech/liqo/cmd/webhook"
)
