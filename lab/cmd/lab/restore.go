package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/isthmus-net/isthmus/lab/internal/report"
	"github.com/isthmus-net/isthmus/lab/internal/snapshot"
	"github.com/isthmus-net/isthmus/lab/internal/supervisor"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// snapshotKey is the key of the snapshot of such a lab.
func (b builder) snapshotKey(ctx context.Context, c labConfig, from origin) (string, error) {
	return supervisor.SnapshotKey(ctx, b.config(c), append(from.parts(), c.overlay)...)
}

// restore restores the lab from the snapshot with that key and waits until it
// has converged. There is no lab and no error when there is no such snapshot,
// or one that is of no use and has been removed.
func (b builder) restore(ctx context.Context, c labConfig, key string) (*builtLab, error) {
	store, err := openSnapshots()
	if err != nil {
		return nil, err
	}
	snap, ok := store.Find(snapshot.Converged, key)
	if !ok {
		return nil, nil
	}
	start := time.Now()
	lab, err := b.start(ctx, c, key)
	if err == nil {
		if err = b.convergedAgain(ctx, lab); err == nil {
			b.phase(lab, "restored from a snapshot of "+snap.Created.Local().Format("02 Jan 15:04"), time.Since(start))
			b.processorTime(ctx, lab)
			return lab, nil
		}
		if ctx.Err() == nil {
			err = errors.Join(err, takeDown(ctx, c, lab))
		}
	}
	if ctx.Err() != nil {
		return lab, err
	}
	fmt.Fprintf(b.out, "   the snapshot of this lab is of no use and is removed; the lab is built anew: %v\n", err)
	return nil, infraError(store.Remove(snap))
}

// convergedAgain waits until all that a lab says when it has converged is true
// of a lab that was restored. Statuses say so from the start: they are what was
// saved. The supervisor has seen that every node reports and that everything is
// watched again, and packets tell the rest: each peering is tried both ways.
func (b builder) convergedAgain(ctx context.Context, lab *builtLab) error {
	start := time.Now()
	if err := lab.podsReachEachOther(ctx); err != nil {
		return err
	}
	b.phase(lab, "pods reach each other", time.Since(start))
	start = time.Now()
	if err := lab.saysConverged(ctx); err != nil {
		return err
	}
	b.phase(lab, "converged", time.Since(start))
	return nil
}

// takeDown ends a lab whatever its kind.
func takeDown(ctx context.Context, c labConfig, lab *builtLab) error {
	if c.ephemeral {
		return lab.client.Close()
	}
	return lab.client.Down(ctx)
}

// save keeps a lab that has just converged for the next time. In CI it does
// not: a runner starts with an empty cache and builds each lab once, so that
// nobody would ever restore it, and half a gigabyte is written for nothing. A
// lab that cannot be saved is as good as one that can.
func (b builder) save(ctx context.Context, c labConfig, lab *builtLab, key string) {
	if os.Getenv("CI") != "" {
		return
	}
	client, err := supervisor.Find(lab.name)
	if err != nil {
		fmt.Fprintf(b.out, "   no snapshot: %v\n", err)
		return
	}
	answer, err := client.SaveSnapshot(ctx, world.SnapshotRequest{Key: key, Topology: c.topology.Name, Overlay: c.overlay})
	if err != nil {
		fmt.Fprintf(b.out, "   no snapshot: %v\n", err)
		return
	}
	fmt.Fprintf(b.out, "   snapshot saved (%d MB, %s)\n", answer.Size/1e6, report.Duration(answer.Pause))
}
