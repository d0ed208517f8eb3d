//go:build tools

// Package tools pins the versions of programs of others that the lab runs: flanneld, and the
// tool liqoctl. overlay.sh says what they are built from. They are built with the libraries of the
// main module, which are compiled once like this; the public releases have older ones.
package tools

import _ "github.com/flannel-io/flannel"
