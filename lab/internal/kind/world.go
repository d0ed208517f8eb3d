package kind

import (
	"context"
	"errors"
	"fmt"

	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// Status says what there is. Where a cluster does not answer the error says why,
// and the rest of the status is right.
func (l *Lab) Status(ctx context.Context) (world.Status, error) {
	s := world.Status{Name: l.record.Name, World: World, Phase: world.PhaseReady, Started: l.record.Started, RunDir: l.dir, Spec: l.record.Spec}
	switch {
	case l.leaving():
		s.Phase = world.PhaseStopping
	case !l.record.Ready:
		s.Phase = world.PhaseStarting
	}
	var errs []error
	if l.record.Lost && s.Phase != world.PhaseStopping {
		s.Phase = world.PhaseFailed
		errs = append(errs, fmt.Errorf("it %w: lab down %s removes it", ErrLost, l.record.Name))
	}
	for _, c := range l.record.Clusters {
		cs := world.ClusterStatus{Name: c.Name}
		spec, _ := l.record.Spec.Cluster(c.Name)
		for _, n := range spec.Nodes {
			cs.Nodes = append(cs.Nodes, n.Name)
		}
		if s.Phase == world.PhaseReady {
			var err error
			if cs.Pods, err = l.PodStatus(ctx, c.Name); err != nil {
				errs = append(errs, fmt.Errorf("cluster %s: %w", c.Name, err))
			}
		}
		if cfg, err := l.RESTConfig(ctx, c.Name); err == nil {
			cs.Server = cfg.Host
		}
		s.Clusters = append(s.Clusters, cs)
	}
	err := errors.Join(errs...)
	if err != nil {
		s.Phase, s.Error = world.PhaseFailed, err.Error()
	}
	return s, err
}

// StopComponent is what other worlds have: probes go by the API server, which
// is one of the components.
func (l *Lab) StopComponent(_ context.Context, cluster, component string) error {
	return fmt.Errorf("stop %s of %s: the world %s can't", component, cluster, World)
}

// StartComponent is what other worlds have.
func (l *Lab) StartComponent(_ context.Context, cluster, component string) error {
	return fmt.Errorf("start %s of %s: the world %s can't", component, cluster, World)
}

// JoinNode is what other worlds have: kind makes the nodes of a cluster at once.
func (l *Lab) JoinNode(_ context.Context, cluster, node string) error {
	return fmt.Errorf("%s/%s joins: nodes of the world %s can't", cluster, node, World)
}

// RebootNode is what other worlds have: kind's library starts no node again.
func (l *Lab) RebootNode(_ context.Context, cluster, node string) error {
	return fmt.Errorf("%s/%s reboots: nodes of the world %s can't", cluster, node, World)
}

// Impair is what other worlds have: kind has no routers.
func (l *Lab) Impair(_ context.Context, req world.ImpairRequest) error {
	return fmt.Errorf("impair the link of %s: the world %s has no routers", req.Host, World)
}

// LoseNode is what other worlds have: kind's library takes no power from a node.
func (l *Lab) LoseNode(_ context.Context, cluster, node string) error {
	return fmt.Errorf("%s/%s loses its power: nodes of the world %s can't", cluster, node, World)
}

// LeaveNode is what other worlds have.
func (l *Lab) LeaveNode(_ context.Context, cluster, node string) error {
	return fmt.Errorf("%s/%s leaves: nodes of the world %s can't", cluster, node, World)
}
