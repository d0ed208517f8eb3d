package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"sync"

	"github.com/spf13/cobra"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/isthmus-net/isthmus/lab/internal/report"
	"github.com/isthmus-net/isthmus/lab/internal/rundir"
	"github.com/isthmus-net/isthmus/lab/internal/yamlfile"
)

func newKubectlCommand(a *app, root *string) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "kubectl CLUSTER -- ARGS...",
		Short: "run kubectl as a cluster's administrator",
		Example: `  lab kubectl milan -- get nodes -o wide
  lab kubectl rome -- get configurations,connections -A
  lab kubectl milan -- apply -f mine.yaml`,
		Args: cobra.MinimumNArgs(1),
	}
	name := labFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		p, err := findPlace(*root)
		if err != nil {
			return err
		}
		c, _, err := running(*name)
		if err != nil {
			return err
		}
		return a.kubectl(cmd.Context(), c, filepath.Join(p.bin(), "kubernetes"), args[0], args[1:])
	}
	return cmd
}

// kubectl runs the real one here, with the files that are here, and passes
// its connections on into the lab.
func (a *app) kubectl(ctx context.Context, c labClient, binary, cluster string, args []string) error {
	status, err := c.Status(ctx)
	if err != nil {
		return infraError(err)
	}
	var names []string
	known := false
	for _, cs := range status.Clusters {
		names = append(names, cs.Name)
		known = known || cs.Name == cluster
	}
	if !known {
		return usageError("there is no cluster %q: %s", cluster, yamlfile.DidYouMean(cluster, names))
	}
	cfg, err := c.RESTConfig(ctx, cluster)
	if err != nil {
		return infraError(err)
	}
	server, err := url.Parse(cfg.Host)
	if err != nil {
		return infraError(fmt.Errorf("address of the API server: %w", err))
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return infraError(err)
	}
	var passing sync.WaitGroup
	defer passing.Wait()
	defer l.Close()
	passing.Go(func() { passOn(ctx, l, c, cluster, server.Host) })

	dir, remove, err := rundir.Temporary()
	if err != nil {
		return infraError(err)
	}
	defer remove()
	kubeconfig := filepath.Join(dir, "kubeconfig")
	if err := writeKubeconfig(kubeconfig, cfg, cluster, l.Addr().String(), server.Hostname()); err != nil {
		return infraError(err)
	}
	run := exec.CommandContext(ctx, binary, append([]string{"kubectl"}, args...)...)
	// The API server is at another port each time: what kubectl would keep of it in the
	// home directory nobody finds again.
	run.Env = append(os.Environ(), "KUBECONFIG="+kubeconfig, "KUBECACHEDIR="+filepath.Join(dir, "cache"))
	run.Stdin, run.Stdout, run.Stderr = a.stdin, a.stdout, a.stderr
	err = run.Run()
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit):
		return exitError{code: max(exit.ExitCode(), 1)}
	case errors.Is(err, os.ErrNotExist):
		return exitError{report.ExitInfra, fmt.Sprintf("lab: %s does not exist: make kubernetes builds it", binary)}
	}
	return infraError(err)
}

// writeKubeconfig writes a private file for the administrator.
func writeKubeconfig(file string, cfg *rest.Config, cluster, address, serverName string) error {
	tls := cfg.TLSClientConfig
	if tls.ServerName != "" {
		serverName = tls.ServerName
	}
	return clientcmd.WriteToFile(clientcmdapi.Config{
		CurrentContext: cluster,
		Clusters:       map[string]*clientcmdapi.Cluster{cluster: {Server: "https://" + address, TLSServerName: serverName, CertificateAuthorityData: tls.CAData, CertificateAuthority: tls.CAFile}},
		AuthInfos: map[string]*clientcmdapi.AuthInfo{"admin": {
			ClientCertificateData: tls.CertData, ClientKeyData: tls.KeyData, ClientCertificate: tls.CertFile, ClientKey: tls.KeyFile, Token: cfg.BearerToken,
		}},
		Contexts: map[string]*clientcmdapi.Context{cluster: {Cluster: cluster, AuthInfo: "admin"}},
	}, file)
}

// passOn passes connections on to an address in the lab until the listener is
// closed.
func passOn(ctx context.Context, l net.Listener, c labClient, cluster, address string) {
	for {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer conn.Close()
			far, err := c.Dial(ctx, cluster, "tcp", address)
			if err != nil {
				return // kubectl reports the closed connection
			}
			defer far.Close()
			done := make(chan struct{}, 2)
			pipe := func(to, from net.Conn) {
				_, _ = io.Copy(to, from) // either end may close when it likes
				done <- struct{}{}
			}
			go pipe(far, conn)
			go pipe(conn, far)
			<-done
		}()
	}
}
