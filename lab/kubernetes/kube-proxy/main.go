// Command kube-proxy is the real kube-proxy and nothing else. It runs on every
// node of a lab, also in an emulated machine, where the packages of all other
// components cost more time to initialize than its own.
package main

import (
	"os"

	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
)

func main() {
	os.Exit(cli.Run(proxy.NewProxyCommand()))
}
