package kind

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"time"

	"sigs.k8s.io/kind/pkg/apis/config/v1alpha4"
	"sigs.k8s.io/kind/pkg/cluster"
	"sigs.k8s.io/kind/pkg/exec"

	"github.com/isthmus-net/isthmus/lab/internal/topology"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// createCluster makes one cluster, and gives it what the topology says. spec learns
// the addresses.
func (l *Lab) createCluster(ctx context.Context, s Spec, c topology.Cluster, image string, spec *world.ClusterSpec) error {
	p, err := provider(s.Engine.Name, progressLogger{c.Name, s.Progress})
	if err != nil {
		return err
	}
	cfg := Config(s.Name, image, l.shared(), c)
	start := time.Now()
	if err := l.make(ctx, s, p, cfg, c.Name); err != nil {
		return fmt.Errorf("%s: kind create: %w", cfg.Name, err)
	}
	s.say("cluster "+c.Name+" created", start)
	start = time.Now()
	if err := l.setUp(ctx, s, c, spec); err != nil {
		return err
	}
	s.say("network, images and nodes of "+c.Name+" ready", start)
	return nil
}

// whole is an error of kind's library with the end of what the command said that
// failed: kubeadm says a line for each time that it asks for an API server.
func whole(err error) error {
	run := exec.RunErrorForError(err)
	if run == nil || len(run.Output) == 0 {
		return err
	}
	const last = 12
	lines := strings.Split(strings.TrimSpace(string(run.Output)), "\n")
	return fmt.Errorf("%w: %s", err, strings.Join(lines[max(0, len(lines)-last):], "\n"))
}

// existsText is in kind's error where there is a cluster of that name. It touches nothing then.
const existsText = "already exist for a cluster with the name"

// A takenError is the error where somebody else has made a cluster of that name since it was
// entered in the record.
type takenError struct{ error }

// makeTries is how often kind is asked for a cluster.
const makeTries = 3

// transient are errors of kind after which a second try helps: systemd in a node did not say within
// 30 seconds that it has started (waitUntilLogRegExpMatches of kind's providers), which happens where
// two cores start six nodes; or another program has taken the port in between that kind had drawn.
// Or a node of the try before was made later than was waited for.
var transient = regexp.MustCompile(`could not find a log line that matches|address already in use|port is already allocated|` + existsText)

// make has kind make a cluster.
func (l *Lab) make(ctx context.Context, s Spec, p *cluster.Provider, cfg *v1alpha4.Cluster, name string) error {
	unlock, err := l.lockNetwork(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	if err := l.refuseExisting(cfg.Name); err != nil {
		return takenError{err}
	}
	for try := 1; ; try++ {
		start := time.Now()
		err := l.makeOnce(ctx, p, cfg, name)
		if err == nil {
			return nil
		}
		err = whole(err)
		switch {
		case try == 1 && strings.Contains(err.Error(), existsText): // later, they are the lab's own
			return takenError{err}
		case ctx.Err() != nil:
			return errors.Join(ctx.Err(), err)
		case !transient.MatchString(err.Error()):
			return err
		case try == makeTries:
			return fmt.Errorf("tried %d times: %w", try, err)
		}
		s.say(fmt.Sprintf("cluster %s is tried again: %v", name, err), start)
		if left := l.clear(ctx, p, cfg.Name, name); left != nil || ctx.Err() != nil {
			return errors.Join(ctx.Err(), err, left)
		}
	}
}

// clear takes away what is left of a try that failed. Kind has taken away what there was when the
// first node failed, and did not wait for those that it was making besides.
func (l *Lab) clear(ctx context.Context, p *cluster.Provider, kindName, name string) error {
	l.awaitClientsOf(ctx, kindName)
	if err := p.Delete(kindName, l.kubeconfig(name)); err != nil {
		return fmt.Errorf("kind delete %s: %w", kindName, whole(err))
	}
	return nil
}

// makeOnce has kind make a cluster. Kind's library knows no contexts: where ctx ends before it is
// done, its nodes are killed until it has noticed.
func (l *Lab) makeOnce(ctx context.Context, p *cluster.Provider, cfg *v1alpha4.Cluster, name string) error {
	made := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		again := time.NewTicker(time.Second)
		defer again.Stop()
		for {
			l.kill(clusterRecord{Kind: cfg.Name})
			select {
			case <-made:
				return
			case <-again.C:
			}
		}
	})
	defer close(made)
	defer stop()
	return p.Create(cfg.Name, cluster.CreateWithV1Alpha4Config(cfg), cluster.CreateWithKubeconfigPath(l.kubeconfig(name)))
}
