package daemon

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/isthmus-net/isthmus/appliance/agent"
	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/kernel"
	"github.com/isthmus-net/isthmus/appliance/netstate"
)

// UndoConfig is what UndoNode needs. The zero value is enough.
type UndoConfig struct {
	// HealthAddress is that of Serving. There are no metrics: who may see them
	// only the API server knows, which is not asked.
	HealthAddress string
	Logger        *slog.Logger // optional
}

// UndoNode takes back what RunNode has made in the kernel, and what gateways in
// namespaces of the node have left behind, and keeps it away until ctx is done.
// It is ready when nothing is left, so that a DaemonSet shows when all nodes are
// done. It does not ask the API server: whoever starts it has decided.
func UndoNode(ctx context.Context, cfg UndoConfig) error {
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	// A kernel that is too old for RunNode has nothing of ours.
	h, err := newHost(kernel.Config{}, cfg.Logger)
	if err != nil {
		return err
	}
	defer h.ns.Close()
	g, ctx := newGroup(ctx)
	if err := h.serve(ctx, g, Serving{Health: cfg.HealthAddress}); err != nil {
		return err
	}
	everything := func(string) bool { return true }
	g.run("undo", func() error {
		return agent.Run(ctx, agent.Config[struct{}]{
			Source:  source[struct{}]{make(chan struct{}), func(context.Context) (struct{}, error) { return struct{}{}, nil }},
			Target:  watched{h.ns, h.health},
			Desired: func(struct{}) (netstate.State, []cluster.Applied) { return netstate.State{}, nil },
			Report: func(r agent.Result[struct{}]) {
				h.health.At("removing the links of gateways")
				defer h.health.At("") // the pass is over
				o := outcomeOf(r)
				err := o.err
				if err == nil {
					_, err = h.ns.RemovePeers(everything)
				}
				if err != nil {
					h.health.waiting(fmt.Sprintf("not everything could be taken back: %v", err))
					return
				}
				if !h.health.isReady() {
					cfg.Logger.Info("nothing of Isthmus is left in the kernel of this node")
				}
				h.health.setReady()
			},
			Logger: cfg.Logger,
			// What a pass does not see (the links of gateways) is looked for
			// this often.
			Resync: 5 * time.Second,
		})
	})
	return g.wait(ctx)
}
