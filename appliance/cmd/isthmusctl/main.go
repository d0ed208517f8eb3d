// Command isthmusctl is the user's hand on an installation of Isthmus:
//
//	isthmusctl install
//	isthmusctl upgrade
//	isthmusctl uninstall
//	isthmusctl network init|connect|disconnect|reset
//
// Installed as kubectl-isthmus it is also "kubectl isthmus".
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"github.com/isthmus-net/isthmus/appliance/internal/cli"
)

// version is what this was built from. Set by the linker.
var version = "devel"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second Ctrl-C ends what does not end by itself
	code := cli.Run(ctx, version, os.Args[1:], os.Stdin, os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}
