package pods

import (
	"context"
	"errors"
)

type node struct{ cfg NodeConfig }

func newNode(cfg NodeConfig) (*node, error) { return &node{cfg}, nil }

func (n *node) run(context.Context) error { return errors.ErrUnsupported }

// ContainerInit turns this process, started by the kubelet in new namespaces,
// into a container. It returns only when that failed, with the exit code.
func ContainerInit(args []string) int { return 1 }
