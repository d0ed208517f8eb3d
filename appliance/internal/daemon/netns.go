package daemon

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/isthmus-net/isthmus/appliance/kernel"
)

// NetNSConfig is what the holder of a gateway's network namespace needs.
type NetNSConfig struct {
	// Path is where the namespace is mounted, such as /run/netns/liqo-netns.
	Path string
	// StateDir is a directory of the pod that it shares with the gateway. It
	// holds the number of the namespace of this pod: another one at Path is
	// what an earlier pod has left behind.
	StateDir string
	Logger   *slog.Logger // optional
}

// netnsInterval is how often the name of the namespace is looked at, by who
// holds it and by the gateway in it.
const netnsInterval = 500 * time.Millisecond

// HoldNetNS makes the network namespace of a gateway, and mounts it again if
// somebody takes its name away. When ctx is done, the name goes; the namespace
// ends with the gateway.
func HoldNetNS(ctx context.Context, cfg NetNSConfig) error {
	if cfg.Path == "" || cfg.StateDir == "" {
		return errors.New("daemon: NetNSConfig.Path and StateDir are required")
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	mine, err := netnsOfPod(cfg.StateDir)
	if err != nil {
		return err
	}
	held, err := kernel.HoldNetNS(cfg.Path, mine)
	if err != nil {
		return err
	}
	id, err := held.ID()
	if err == nil {
		err = os.WriteFile(filepath.Join(cfg.StateDir, netnsFile), []byte(strconv.FormatUint(id, 10)), 0o600)
	}
	if err != nil {
		return errors.Join(err, held.Remove())
	}
	cfg.Logger.Info("network namespace", "path", cfg.Path, "id", id, "was there", id == mine)
	tick := time.NewTicker(netnsInterval)
	defer tick.Stop()
	once := newOnce(cfg.Logger)
	for {
		select {
		case <-ctx.Done():
			return held.Remove()
		case <-tick.C:
			once.report("mount the network namespace", held.Keep())
		}
	}
}

// netnsFile is the file in the pod's directory with the number of its
// namespace.
const netnsFile = "netns"

// netnsOfPod returns the number of the namespace that was made for this pod; 0:
// none was made yet.
func netnsOfPod(dir string) (uint64, error) {
	b, err := os.ReadFile(filepath.Join(dir, netnsFile))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return 0, nil
	case err != nil:
		return 0, err
	}
	n, err := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", filepath.Join(dir, netnsFile), err)
	}
	return n, nil
}

// enterHost waits for the gateway's namespace and opens the one of its node,
// for what the gateway needs to know of the network below. It returns nil for a
// gateway in the namespace of its pod.
func (gw *gateway) enterHost(ctx context.Context) (*kernel.NetNS, error) {
	if gw.cfg.NetNS == "" {
		return nil, nil
	}
	const patience = 30 * time.Second
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		err := gw.sameNetNS()
		if err == nil {
			break
		}
		if ctx.Err() != nil {
			return nil, fmt.Errorf("%w: \"isthmus netns\" beside this container makes it; see its log", err)
		}
		pause(ctx, 50*time.Millisecond)
	}
	return kernel.Open(kernel.Config{Logger: gw.cfg.Logger})
}

// sameNetNS says what is wrong with the namespace at the gateway's path: it is
// not there, or not the one that was made for this pod.
func (gw *gateway) sameNetNS() error {
	mine, err := netnsOfPod(gw.cfg.StateDir)
	if err != nil {
		return err
	}
	if mine == 0 {
		return fmt.Errorf("network namespace %s has not been made yet", gw.cfg.NetNS)
	}
	id, err := kernel.NetNSID(gw.cfg.NetNS)
	if err != nil {
		return err
	}
	if id != mine {
		return fmt.Errorf("network namespace %s is not the one of this pod", gw.cfg.NetNS)
	}
	return nil
}

// watchNetNS ends the gateway when its namespace was replaced by another one:
// the next process enters that.
func (gw *gateway) watchNetNS(ctx context.Context) error {
	was, err := netnsOfPod(gw.cfg.StateDir)
	if err != nil {
		return err
	}
	tick := time.NewTicker(netnsInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		if now, err := netnsOfPod(gw.cfg.StateDir); err == nil && now != was {
			return fmt.Errorf("%s is another one than this gateway is in: starting again", gw.cfg.NetNS)
		}
	}
}
