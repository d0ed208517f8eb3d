package deploy

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"strings"

	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/storage"
	"helm.sh/helm/v3/pkg/storage/driver"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/yaml"

	networkingv1beta1 "github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/lab/internal/topology"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// Program is what an Operator runs, one of the lab's own binaries.
const Program = "isthmusctl"

// An ExecFunc runs a command on a host of a lab, as *world.Client does.
type ExecFunc func(ctx context.Context, req world.ExecRequest) (world.ExecResult, error)

// An Operator installs, upgrades and removes the appliance as the
// administrators of the clusters do: by isthmusctl, beside the API server. All
// fields are required.
type Operator struct {
	Topology *topology.Topology
	Overlay  networkingv1beta1.Overlay
	Clusters Clusters
	Exec     ExecFunc
}

// A CommandError is a command that ended with an exit code other than 0.
type CommandError struct {
	Command string
	Code    int
	Output  string // both streams
}

// Error has all that the command printed.
func (e *CommandError) Error() string {
	return fmt.Sprintf("%s: exit code %d: %s", e.Command, e.Code, e.Output)
}

// Install runs isthmusctl install with the values of the lab, and with those
// given over them.
func (o Operator) Install(ctx context.Context, cluster string, values map[string]any) error {
	c, ok := o.Topology.Cluster(cluster)
	if !ok {
		return fmt.Errorf("topology %s has no cluster %s", o.Topology.Name, cluster)
	}
	return o.apply(ctx, cluster, "install", mergeValues(Values(o.Topology, o.Overlay, c), values))
}

// Upgrade runs isthmusctl upgrade with values that are to change. It returns
// when the gateways are those of the templates that are there then, or says
// which is not.
func (o Operator) Upgrade(ctx context.Context, cluster string, values map[string]any) error {
	return o.apply(ctx, cluster, "upgrade", values)
}

// Uninstall runs isthmusctl uninstall; with purge, --purge.
func (o Operator) Uninstall(ctx context.Context, cluster string, purge bool) error {
	argv := []string{Program, "uninstall"}
	if purge {
		argv = append(argv, "--purge")
	}
	return o.run(ctx, cluster, nil, argv...)
}

func (o Operator) apply(ctx context.Context, cluster, command string, values map[string]any) error {
	text, err := yaml.Marshal(values)
	if err != nil {
		return err
	}
	return o.run(ctx, cluster, text, Program, command, "--values", "-")
}

func (o Operator) run(ctx context.Context, cluster string, stdin []byte, argv ...string) error {
	res, err := o.Exec(ctx, world.ExecRequest{Target: cluster + "/" + world.ControlPlaneHost, Argv: argv, Stdin: stdin})
	if err != nil {
		return fmt.Errorf("%s in %s: %w", strings.Join(argv, " "), cluster, err)
	}
	if res.Code != 0 {
		return &CommandError{strings.Join(argv, " "), res.Code, strings.TrimSpace(string(res.Stdout) + string(res.Stderr))}
	}
	return nil
}

// mergeValues returns a with b written over it, as Helm does with several
// files of values.
func mergeValues(a, b map[string]any) map[string]any {
	return chartutil.CoalesceTables(maps.Clone(b), a)
}

// An Installation is whether there is one, and by what values.
type Installation struct {
	There  bool
	Values map[string]any // that the operator gave, those of the chart left out
}

// Installation reads the release that isthmusctl made.
func (o Operator) Installation(ctx context.Context, cluster string) (Installation, error) {
	cfg, err := o.Clusters.RESTConfig(cluster)
	if err != nil {
		return Installation{}, fmt.Errorf("cluster %s: %w", cluster, err)
	}
	api, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		return Installation{}, fmt.Errorf("cluster %s: %w", cluster, err)
	}
	last, err := storage.Init(driver.NewSecrets(api.CoreV1().Secrets(Namespace))).Last(Release)
	switch {
	case errors.Is(err, driver.ErrReleaseNotFound):
		return Installation{}, ctx.Err()
	case err != nil:
		return Installation{}, fmt.Errorf("cluster %s: release %s: %w", cluster, Release, err)
	}
	return Installation{There: true, Values: last.Config}, ctx.Err()
}

// Restore makes an installation what it was. One that was not there is removed
// with its kinds.
func (o Operator) Restore(ctx context.Context, cluster string, was Installation) error {
	if !was.There {
		return o.Uninstall(ctx, cluster, true)
	}
	now, err := o.Installation(ctx, cluster)
	switch {
	case err != nil:
		return err
	case !now.There:
		return o.apply(ctx, cluster, "install", was.Values)
	case reflect.DeepEqual(now.Values, was.Values):
		return nil
	}
	return o.Upgrade(ctx, cluster, restoring(now.Values, was.Values))
}

// restoring are the values that make those that are given now what they were:
// those of then, and null for what was not given. Helm takes null for the
// chart's own value.
func restoring(now, was map[string]any) map[string]any {
	out := maps.Clone(was)
	if out == nil {
		out = map[string]any{}
	}
	for key, value := range now {
		before, given := was[key]
		if !given {
			out[key] = nil
			continue
		}
		nowMap, isMap := value.(map[string]any)
		wasMap, wasIsMap := before.(map[string]any)
		if isMap && wasIsMap {
			out[key] = restoring(nowMap, wasMap)
		}
	}
	return out
}
