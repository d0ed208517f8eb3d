// Command liqo is the daemons of the public system's networking in one static program: its
// controller manager, its IPAM, its webhook, the fabric of a node, and the three programs of a gateway. The
// name by which it is called selects which, as /usr/bin/liqo-fabric; everything after it are the
// daemon's own flags.
//
// Their sources are those of the Go module, as overlay.sh gives them to go build; nothing
// of them is here.
package main

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/isthmus-net/isthmus/lab/public/fabric"
	"github.com/isthmus-net/isthmus/lab/public/gateway"
	"github.com/isthmus-net/isthmus/lab/public/geneve"
	"github.com/isthmus-net/isthmus/lab/public/ipam"
	"github.com/isthmus-net/isthmus/lab/public/manager"
	"github.com/isthmus-net/isthmus/lab/public/webhook"
	"github.com/isthmus-net/isthmus/lab/public/wireguard"
)

var daemons = map[string]func(){
	"ipam":                    ipam.Main,
	"liqo-controller-manager": manager.Main,
	"liqo-fabric":             fabric.Main,
	"liqo-gateway":            gateway.Main,
	"liqo-geneve":             geneve.Main,
	"liqo-wireguard":          wireguard.Main,
	"webhook":                 webhook.Main,
}

func main() {
	daemon, ok := daemons[filepath.Base(os.Args[0])]
	if !ok {
		fmt.Fprintf(os.Stderr, "%s: call it by the name of a daemon: %s\n", os.Args[0], strings.Join(slices.Sorted(maps.Keys(daemons)), ", "))
		os.Exit(1)
	}
	daemon()
}
