// Package cli is isthmusctl: what an operator does with an installation, from
// outside of the cluster. It installs the chart that it carries along with
// Helm's SDK, so that helm finds the release, and looks before it leaps: what
// would fail halfway is refused before anything is changed.
package cli

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/client-go/rest"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/internal/peer"
)

// release is the name of the Helm release.
const release = "isthmus"

// A program is one run of isthmusctl.
type program struct {
	in      io.Reader
	out     io.Writer // results
	err     io.Writer // progress and errors
	version string
	cluster *genericclioptions.ConfigFlags
	json    bool
	lines   *bufio.Reader // of in, once something was asked
}

// Run runs a command line and returns the exit status: 0, or 1 after an error,
// which it has printed.
func Run(ctx context.Context, version string, args []string, in io.Reader, out, errs io.Writer) int {
	p := &program{in: in, out: out, err: errs, version: version, cluster: genericclioptions.NewConfigFlags(true)}
	namespace := v1beta1.DefaultNamespace
	p.cluster.Namespace = &namespace
	p.cluster.WrapConfigFn = func(c *rest.Config) *rest.Config {
		c.UserAgent = "isthmusctl/" + version
		c.QPS = -1 // the API server's own fairness is enough
		c.WarningHandler = rest.NewWarningWriter(errs, rest.WarningWriterOptions{Deduplicate: true})
		return c
	}
	cmd := p.root()
	cmd.SetArgs(args)
	cmd.SetIn(in)
	cmd.SetOut(out)
	cmd.SetErr(errs)
	if err := cmd.ExecuteContext(ctx); err != nil {
		p.fail(err)
		return 1
	}
	return 0
}

// fail prints an error, for a program to read where that was asked for.
func (p *program) fail(err error) {
	if !p.json {
		fmt.Fprintf(p.err, "isthmusctl: %v\n", err)
		return
	}
	answer := struct {
		Error    string    `json:"error"`
		Problems []Problem `json:"problems,omitempty"`
		Gateway  *ref      `json:"gateway,omitempty"` // that is not replaced
		// Result is what was done before.
		Result *peer.Result `json:"result,omitempty"`
	}{Error: err.Error()}
	var refused *RefusedError
	if errors.As(err, &refused) {
		answer.Problems = refused.Problems
	}
	var late *GatewayError
	if errors.As(err, &late) {
		answer.Gateway = &late.Gateway
	}
	var network *networkError
	if errors.As(err, &network) {
		answer.Result = &network.result
	}
	_ = p.print(answer) // the exit status tells, too
}

// print writes a result as JSON.
func (p *program) print(v any) error {
	e := json.NewEncoder(p.out)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

func (p *program) root() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "isthmusctl",
		Short: "Install Isthmus, and connect clusters",
		Long: `Isthmus connects the pods of Kubernetes clusters. isthmusctl installs it in the
cluster of the current context, brings it up to date, and removes it without a
trace; and it connects two clusters that have it. As kubectl-isthmus in the PATH it is also "kubectl isthmus".`,
		Version:       p.version,
		SilenceErrors: true, // Run prints them
		SilenceUsage:  true,
	}
	p.addClusterFlags(cmd)
	cmd.AddCommand(p.installCommand(), p.upgradeCommand(), p.uninstallCommand(), p.networkCommand(), p.peerCommand())
	return cmd
}

// addClusterFlags adds the flags that say which cluster, with the names that
// kubectl gives them.
func (p *program) addClusterFlags(cmd *cobra.Command) {
	f := cmd.PersistentFlags()
	f.StringVar(p.cluster.KubeConfig, "kubeconfig", "", "`file` that says where clusters are (default $KUBECONFIG, or ~/.kube/config)")
	f.StringVar(p.cluster.Context, "context", "", "`name` of the context in it (default its current one)")
	f.StringVarP(p.cluster.Namespace, "namespace", "n", *p.cluster.Namespace, "`namespace` of the installation")
	f.BoolVar(&p.json, "json", false, "print the result as JSON")
}

// example is the text of help, without the indentation of the source.
func example(lines ...string) string {
	return "  " + strings.Join(lines, "\n  ")
}

// values are the flags that say what to install.
type values struct {
	files []string
	set   []string
}

func (v *values) add(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringSliceVarP(&v.files, "values", "f", nil, "`file` with values of the chart; several: the later ones win; -: standard input")
	f.StringArrayVar(&v.set, "set", nil, "`path=value` of the chart, such as networking.overlay=auto; several are separated by commas")
}

// merged returns the values of all flags, those of --set over those of files.
func (v *values) merged(in io.Reader) (map[string]any, error) {
	var out map[string]any
	for _, file := range v.files {
		name := file
		if name != "-" {
			name = filepath.Clean(name)
		}
		part, err := readValues(name, in)
		if err != nil {
			return nil, fmt.Errorf("--values %s: %w", file, err)
		}
		out = mergeValues(out, part)
	}
	if out == nil {
		out = map[string]any{}
	}
	for _, s := range v.set {
		if err := setValue(s, out); err != nil {
			return nil, fmt.Errorf("--set %s: %w: write path=value, such as networking.overlay=auto", s, err)
		}
	}
	return out, nil
}
