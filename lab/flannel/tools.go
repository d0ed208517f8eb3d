//go:build tools

// Package flannel pins the version of flanneld. The program is its own main.go
// without the backend udp, which is the only part that needs cgo on amd64: see
// bin/flanneld in the Makefile.
package flannel

import _ "github.com/flannel-io/flannel"
