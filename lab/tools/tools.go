//go:build tools

// Package tools pins the versions of programs of others that the lab runs: flanneld, and the
// tool liqoctl. overlay.sh says what they are built from. They are in one module because both
// need one older version of Kubernetes' libraries, which is compiled once like this.
package tools

import _ "github.com/flannel-io/flannel"
