package deploy

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"strings"
	"time"

	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/storage"
	"helm.sh/helm/v3/pkg/storage/driver"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	networkingv1beta1 "github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/lab/internal/topology"
	"github.com/isthmus-net/isthmus/lab/internal/world"
)

// Programs by which an Operator installs; both are in the lab's directory of
// programs.
const (
	ByIsthmusctl = "isthmusctl"
	ByHelm       = "helm"
)

// An ExecFunc runs a command on a host of a lab, as *world.Client does.
type ExecFunc func(ctx context.Context, req world.ExecRequest) (world.ExecResult, error)

// An Operator installs, upgrades and removes the appliance as the
// administrators of the clusters do: by isthmusctl or by helm, beside the API
// server. All fields are required, those aside that say otherwise.
type Operator struct {
	Topology *topology.Topology
	Overlay  networkingv1beta1.Overlay
	Clusters Clusters
	ChartDir string // for helm; isthmusctl carries the chart along
	Exec     ExecFunc
	By       string // ByIsthmusctl, which is the default, or ByHelm
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

// Install installs with the values of the lab, and with those given over them.
func (o Operator) Install(ctx context.Context, cluster string, values map[string]any) error {
	c, ok := o.Topology.Cluster(cluster)
	if !ok {
		return fmt.Errorf("topology %s has no cluster %s", o.Topology.Name, cluster)
	}
	return o.apply(ctx, cluster, "install", mergeValues(Values(o.Topology, o.Overlay, c), values))
}

// Upgrade upgrades with values that are to change. By isthmusctl it returns when
// the gateways are those of the templates that are there then, or says which is
// not; helm does not know of them.
func (o Operator) Upgrade(ctx context.Context, cluster string, values map[string]any) error {
	return o.apply(ctx, cluster, "upgrade", values)
}

// Uninstall removes the appliance; with purge its kinds, which only isthmusctl
// does.
func (o Operator) Uninstall(ctx context.Context, cluster string, purge bool) error {
	if o.By == ByHelm {
		if purge {
			return errors.New("helm leaves the kinds: uninstall without purge, and delete them")
		}
		return o.run(ctx, cluster, nil, ByHelm, "uninstall", Release, "--namespace", Namespace, "--wait", "--timeout", installTime)
	}
	argv := []string{ByIsthmusctl, "uninstall", "--timeout", installTime}
	if purge {
		argv = append(argv, "--purge")
	}
	return o.run(ctx, cluster, nil, argv...)
}

// installTime is how long isthmusctl and helm wait for what they have installed, or take
// away. Their defaults of 2 and 5 minutes are for machines of a cluster's size; here all nodes of
// all clusters share two processors with other labs.
const installTime = "15m"

// apply runs the command install or upgrade. An upgrade keeps the values that
// were given before, which helm has to be told.
func (o Operator) apply(ctx context.Context, cluster, command string, values map[string]any) error {
	text, err := yaml.Marshal(values)
	if err != nil {
		return err
	}
	if o.By != ByHelm {
		return o.run(ctx, cluster, text, ByIsthmusctl, command, "--values", "-", "--timeout", installTime)
	}
	also := map[string]string{"install": "--create-namespace", "upgrade": "--reset-then-reuse-values"}[command]
	return o.run(ctx, cluster, text, ByHelm, command, Release, o.ChartDir, "--namespace", Namespace, also, "--wait", "--timeout", installTime, "--values", "-")
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
	There     bool
	Values    map[string]any // that the operator gave, those of the chart left out
	Namespace bool           // whether there is the namespace that it is, or would be, in
}

// Installation reads the release, which isthmusctl and helm keep alike.
func (o Operator) Installation(ctx context.Context, cluster string) (Installation, error) {
	cfg, err := o.Clusters.RESTConfig(cluster)
	if err != nil {
		return Installation{}, fmt.Errorf("cluster %s: %w", cluster, err)
	}
	api, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		return Installation{}, fmt.Errorf("cluster %s: %w", cluster, err)
	}
	_, err = api.CoreV1().Namespaces().Get(ctx, Namespace, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return Installation{}, nil
	case err != nil:
		return Installation{}, fmt.Errorf("cluster %s: Namespace %s: %w", cluster, Namespace, err)
	}
	last, err := storage.Init(driver.NewSecrets(api.CoreV1().Secrets(Namespace))).Last(Release)
	switch {
	case errors.Is(err, driver.ErrReleaseNotFound):
		return Installation{Namespace: true}, ctx.Err()
	case err != nil:
		return Installation{}, fmt.Errorf("cluster %s: release %s: %w", cluster, Release, err)
	}
	return Installation{There: true, Values: last.Config, Namespace: true}, ctx.Err()
}

// Restore makes an installation what it was, by isthmusctl. One that was not
// there is removed with its kinds, and with its namespace, which isthmusctl
// leaves when helm has made it.
func (o Operator) Restore(ctx context.Context, cluster string, was Installation) error {
	o.By = ByIsthmusctl
	if !was.There {
		if err := o.Uninstall(ctx, cluster, true); err != nil || was.Namespace {
			return err
		}
		return o.deleteNamespace(ctx, cluster)
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

// deleteNamespace deletes the namespace of the installation and waits for its end.
func (o Operator) deleteNamespace(ctx context.Context, cluster string) error {
	cl, err := NewClient(o.Clusters, cluster)
	if err != nil {
		return err
	}
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: Namespace}}
	if err := cl.Delete(ctx, ns); err != nil {
		return client.IgnoreNotFound(err)
	}
	return Poll(ctx, 3*time.Minute, func(ctx context.Context) (string, error) {
		err := cl.Get(ctx, client.ObjectKeyFromObject(ns), ns)
		if apierrors.IsNotFound(err) {
			return "", nil
		}
		return "Namespace " + Namespace + " of cluster " + cluster + " is still there", err
	})
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
