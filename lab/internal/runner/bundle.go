package runner

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	networkingv1beta1 "github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/lab/internal/deploy"
	"github.com/isthmus-net/isthmus/lab/internal/expect"
	"github.com/isthmus-net/isthmus/lab/internal/report"
	"github.com/isthmus-net/isthmus/lab/internal/topology"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// Evidence writes everything that may explain a failure into a directory:
// packets, the state of every host, logs, API objects, and the command that
// runs the row again. It writes what it can get; the error says what not.
func (r *Runner) Evidence(ctx context.Context, dir string, t *topology.Topology, row *report.Row, again string) error {
	r.setup()
	return errors.Join(
		r.writePackets(ctx, filepath.Join(dir, "capture.pcapng"), row),
		r.writeState(ctx, filepath.Join(dir, "state")),
		r.writeLogs(ctx, filepath.Join(dir, "logs")),
		r.writeObjects(ctx, filepath.Join(dir, "objects"), t),
		writeFile(filepath.Join(dir, "row.json"), func(f *os.File) error {
			e := json.NewEncoder(f)
			e.SetIndent("", "  ")
			return e.Encode(row)
		}),
		os.WriteFile(filepath.Join(dir, "repro.sh"), []byte("#!/bin/sh\n# Runs the row again and leaves the lab up.\n"+again+"\n"), 0o755),
	)
}

func writeFile(path string, write func(*os.File) error) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	if err := write(f); err != nil {
		f.Close()
		return fmt.Errorf("%s: %w", filepath.Base(path), err)
	}
	return f.Close()
}

// writePackets writes what was captured; a world without captures has no file.
func (r *Runner) writePackets(ctx context.Context, path string, row *report.Row) error {
	err := writeFile(path, func(f *os.File) error { return r.World.WritePcap(ctx, f) })
	if row.NoPackets = errors.Is(err, world.ErrNoCaptures); row.NoPackets {
		return os.Remove(path)
	}
	return err
}

func (r *Runner) writeState(ctx context.Context, dir string) error {
	state, err := r.World.State(ctx)
	if err != nil {
		return fmt.Errorf("state: %w", err)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for _, h := range state {
		var b strings.Builder
		for _, s := range h.Sections {
			fmt.Fprintf(&b, "# %s\n%s\n", s.Command, s.Output)
		}
		if err := os.WriteFile(filepath.Join(dir, fileName(h.Host)+".txt"), []byte(b.String()), 0o644); err != nil {
			return err
		}
	}
	return nil
}

func (r *Runner) writeLogs(ctx context.Context, dir string) error {
	logs, err := r.World.Logs(ctx, nil)
	if err != nil {
		return fmt.Errorf("logs: %w", err)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for _, l := range logs {
		if err := os.WriteFile(filepath.Join(dir, fileName(l.Name)+".log"), []byte(l.Text), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// dumped are the kinds whose objects explain what the appliance did. Secrets
// are not among them.
var dumped = []string{
	"nodes", "pods", "services", "deployments.apps", "daemonsets.apps", "events",
	"configurations.networking.liqo.io", "connections.networking.liqo.io", "gatewayservers.networking.liqo.io", "gatewayclients.networking.liqo.io",
	"wggatewayservers.networking.liqo.io", "wggatewayclients.networking.liqo.io", "publickeies.networking.liqo.io",
	"internalfabrics.networking.liqo.io", "internalnodes.networking.liqo.io", "genevetunnels.networking.liqo.io",
	"routeconfigurations.networking.liqo.io", "firewallconfigurations.networking.liqo.io", "gatewayreports.networking.liqo.io",
	"networks.ipam.liqo.io", "ips.ipam.liqo.io",
}

func (r *Runner) writeObjects(ctx context.Context, dir string, t *topology.Topology) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	var errs []error
	for _, c := range t.Clusters {
		all := map[string]any{}
		for _, kind := range dumped {
			objects, err := r.api.List(ctx, c.Name, kind)
			if expect.NotServed(err) && t.Install == topology.InstallNone {
				continue // at present the appliance is not installed
			}
			if err != nil {
				errs = append(errs, fmt.Errorf("objects of %s: %w", c.Name, err))
				break // the other kinds would fail in the same way
			}
			if t.OfOthers { // what is not of the appliance is nobody's business
				objects = slices.DeleteFunc(objects, func(o unstructured.Unstructured) bool {
					return o.GetNamespace() != deploy.Namespace && !strings.HasPrefix(o.GetNamespace(), networkingv1beta1.TenantNamespacePfx) && !strings.Contains(kind, "liqo.io")
				})
			}
			for i := range objects {
				objects[i].SetManagedFields(nil)
			}
			all[kind] = objects
		}
		errs = append(errs, writeFile(filepath.Join(dir, c.Name+".json"), func(f *os.File) error {
			e := json.NewEncoder(f)
			e.SetIndent("", "  ")
			return e.Encode(all)
		}))
	}
	return errors.Join(errs...)
}

func fileName(s string) string { return strings.ReplaceAll(s, "/", "_") }
