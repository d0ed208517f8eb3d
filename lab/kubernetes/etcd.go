package main

import (
	"fmt"
	"net/url"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/embed"
	"go.etcd.io/etcd/server/v3/storage/wal"
)

// newEtcdCommand serves a one-member etcd until SIGTERM or SIGINT. It prints
// "etcd ready" on stderr once it can be written to.
func newEtcdCommand() *cobra.Command {
	var dir, client, peer, level string
	c := &cobra.Command{
		Use:          "etcd",
		Short:        "one etcd member, embedded",
		Args:         cobra.NoArgs,
		SilenceUsage: true,
		RunE:         func(*cobra.Command, []string) error { return runEtcd(dir, client, peer, level) },
	}
	f := c.Flags()
	f.StringVar(&dir, "data-dir", "etcd", "directory of the data, created when absent")
	f.StringVar(&client, "listen-client-urls", "http://127.0.0.1:2379", "URL for clients, http:// or unix://")
	f.StringVar(&peer, "listen-peer-urls", "http://127.0.0.1:2380", "URL for peers, http:// or unix://")
	f.StringVar(&level, "log-level", "warn", "debug, info, warn or error")
	return c
}

func runEtcd(dir, client, peer, level string) error {
	clientURL, err := url.Parse(client)
	if err != nil {
		return fmt.Errorf("--listen-client-urls: %w", err)
	}
	peerURL, err := url.Parse(peer)
	if err != nil {
		return fmt.Errorf("--listen-peer-urls: %w", err)
	}
	cfg := embed.NewConfig()
	cfg.Name = "lab"
	cfg.Dir = dir
	cfg.ListenClientUrls = []url.URL{*clientURL}
	cfg.AdvertiseClientUrls = []url.URL{*clientURL}
	cfg.ListenPeerUrls = []url.URL{*peerURL}
	cfg.AdvertisePeerUrls = []url.URL{*peerURL}
	cfg.InitialCluster = cfg.InitialClusterFromName(cfg.Name)
	cfg.LogLevel = level
	// The lab's clusters live for minutes: a crash of the machine may take
	// them along, and fsync on a shared disk may stall for seconds.
	cfg.UnsafeNoFsync = true
	// embed's zero value logs every request as slow.
	cfg.WarningUnaryRequestDuration = 300 * time.Millisecond
	// A single member has nobody to wait for before it elects itself.
	cfg.TickMs = 10
	cfg.ElectionMs = 100
	// Two segments of the log are allocated in advance, of 64 MB each: in a
	// tmpfs that is memory.
	wal.SegmentSizeBytes = 4 << 20
	start := time.Now()
	e, err := embed.StartEtcd(cfg)
	if err != nil {
		return err
	}
	defer e.Close()
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM, syscall.SIGINT)
	select {
	case <-e.Server.ReadyNotify():
		fmt.Fprintf(os.Stderr, "etcd ready after %v\n", time.Since(start).Round(time.Millisecond))
	case <-stop:
		return nil
	case err := <-e.Err():
		return err
	}
	select {
	case <-stop:
		return nil
	case err := <-e.Err():
		return err
	}
}
