package main

import (
	"time"

	"github.com/spf13/cobra"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/appliance/api/networking/v1beta1"
	"github.com/isthmus-net/isthmus/appliance/internal/kube"
	"github.com/isthmus-net/isthmus/appliance/internal/teardown"
)

// newTeardownCommand returns the command of the chart's pre-delete hook.
func newTeardownCommand(g *globals) *cobra.Command {
	var cfg teardown.Config
	cmd := &cobra.Command{
		Use:   "teardown",
		Short: "Take back what an installation does, before it is removed",
		Long: `Take back what an installation does, before it is removed: stop the controller,
delete what it has made, and have every node undo what is in its kernel. Helm
runs it before it uninstalls the chart; isthmusctl uninstall does the same
itself.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			config, err := g.restConfig("isthmus-teardown")
			if err != nil {
				return err
			}
			if cfg.Client, err = client.New(config, client.Options{Scheme: kube.Scheme()}); err != nil {
				return err
			}
			cfg.Progress = func(text string) { g.log.Info(text) }
			return teardown.Run(cmd.Context(), cfg)
		},
	}
	f := cmd.Flags()
	f.StringVar(&cfg.Namespace, "namespace", v1beta1.DefaultNamespace, "`namespace` of the installation")
	f.DurationVar(&cfg.Timeout, "timeout", 2*time.Minute, "longest `time` that a step may take")
	f.BoolVar(&cfg.Force, "force", false, "go on without nodes that do not answer in time")
	return cmd
}
