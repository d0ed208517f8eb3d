package kubelet

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"strings"
	"text/template"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/isthmus-net/isthmus/lab/internal/pods"
)

// Files and sockets of a node.
const (
	configDir        = "/etc/kubernetes"
	containerdSocket = "/run/containerd/containerd.sock"
	subnetFile       = "/run/flannel/subnet.env" // where flanneld writes it and its plug-in reads it
	// PauseImage is what holds the namespaces of a pod.
	PauseImage = "docker.io/isthmus-lab/pause:dev"
)

// configs are the node's configuration files, as a template (text/template).
const configs = `
{{define "/etc/containerd/config.toml"}}version = 3
root = "/var/lib/containerd"
state = "/run/containerd"
disabled_plugins = ["io.containerd.nri.v1.nri", "io.containerd.snapshotter.v1.blockfile", "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.erofs", "io.containerd.snapshotter.v1.zfs", "io.containerd.tracing.processor.v1.otlp"]
[plugins.'io.containerd.cri.v1.images'.pinned_images]
  sandbox = "{{.Pause}}"
[plugins.'io.containerd.cri.v1.runtime']
  # Root of a machine in a machine may not lower it.
  restrict_oom_score_adj = true
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
  SystemdCgroup = false
[plugins.'io.containerd.cri.v1.runtime'.cni]
  bin_dirs = ["{{.Plugins}}"]
  conf_dir = "{{.Networks}}"
{{end}}
{{define "/etc/kubernetes/kubelet.yaml"}}apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: {{.Addr}}
authentication: {anonymous: {enabled: false}, webhook: {enabled: true}, x509: {clientCAFile: /etc/kubernetes/ca.crt}}
authorization: {mode: Webhook}
tlsCertFile: /etc/kubernetes/kubelet.crt
tlsPrivateKeyFile: /etc/kubernetes/kubelet.key
containerRuntimeEndpoint: unix://{{.Socket}}
clusterDNS: [{{.DNS}}]
clusterDomain: cluster.local
podLogsDir: {{.PodLogs}}
cgroupDriver: cgroupfs
cgroupRoot: /{{.Cgroup}}
# Version 1 is what this machine may have.
failCgroupV1: false
failSwapOn: false
readOnlyPort: 0
# The machine's disk and memory belong to others, too.
evictionHard: {memory.available: "0%", nodefs.available: "0%", nodefs.inodesFree: "0%", imagefs.available: "0%"}
imageGCHighThresholdPercent: 100
# The lab wants to see soon what happens.
nodeStatusUpdateFrequency: 5s
syncFrequency: 10s
{{end}}
{{define "10-flannel.conflist"}}{
  "name": "cbr0",
  "cniVersion": "0.3.1",
  "plugins": [
    {"type": "flannel", "delegate": {"hairpinMode": true, "isDefaultGateway": true}},
    {"type": "portmap", "capabilities": {"portMappings": true}}
  ]
}
{{end}}`

func (n *node) config(name string) ([]byte, error) {
	all, err := template.New("").Parse(configs)
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	err = all.ExecuteTemplate(&out, name, map[string]any{
		"Pause": PauseImage, "Plugins": cniPlugins, "Networks": cniConfigs, "Addr": n.cfg.Addr, "Socket": containerdSocket, "DNS": n.cfg.ClusterDNS,
		"PodLogs": podLogs, "Cgroup": n.cfg.Cgroup,
	})
	return out.Bytes(), err
}

// write puts a file into the node's root directory.
func (n *node) write(name string, content []byte) error {
	if err := os.MkdirAll(n.path(path.Dir(name)), 0o755); err != nil {
		return err
	}
	return os.WriteFile(n.path(name), content, 0o600)
}

// start starts the node's daemons in the order in which they need each other,
// and returns when ctx ends.
func (n *node) start(ctx context.Context) error {
	files := map[string][]byte{
		configDir + "/ca.crt":                n.cfg.ClientCA,
		configDir + "/kubelet.crt":           n.cfg.ServingCert,
		configDir + "/kubelet.key":           n.cfg.ServingKey,
		configDir + "/kubelet.kubeconfig":    n.cfg.Kubeconfig,
		configDir + "/kube-proxy.kubeconfig": n.cfg.KubeProxyKubeconfig,
		configDir + "/flannel.kubeconfig":    n.cfg.FlannelKubeconfig,
		configDir + "/net-conf.json":         pods.FlannelConfig(n.cfg.ClusterCIDR, n.cfg.KubeProxy),
	}
	for _, name := range []string{"/etc/containerd/config.toml", configDir + "/kubelet.yaml"} {
		content, err := n.config(name)
		if err != nil {
			return err
		}
		files[name] = content
	}
	for name, content := range files {
		if err := n.write(name, content); err != nil {
			return err
		}
	}
	n.keep(ctx, "containerd", nil, "containerd", "--config", "/etc/containerd/config.toml", "--log-level", "info")
	cri, err := dialCRI(n.path(containerdSocket))
	if err != nil {
		return err
	}
	defer cri.Close()
	if err := n.wait(ctx, "containerd", cri.ready); err != nil {
		return err
	}
	for _, archive := range n.cfg.Archives {
		if err := n.load(ctx, archive); err != nil {
			return err
		}
	}
	w := newWatcher(n, cri)
	defer w.close()
	n.wg.Go(func() { w.followContainers(ctx) })
	n.wg.Go(func() { w.followPods(ctx) })
	n.keep(ctx, "kubelet", nil, "kubernetes", "kubelet", "--config="+configDir+"/kubelet.yaml", "--kubeconfig="+configDir+"/kubelet.kubeconfig",
		"--hostname-override="+n.cfg.Name, "--node-ip="+n.cfg.Addr.String(), "--v=2")
	if err := n.startNetwork(ctx); err != nil {
		return err
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-n.gone:
		return errors.New("its first process has ended")
	}
}

// startNetwork starts what the Node object has to be there for: flanneld, whose
// subnet makes the node ready, and kube-proxy.
func (n *node) startNetwork(ctx context.Context) error {
	if err := n.waitPodCIDR(ctx); err != nil {
		return err
	}
	n.keep(ctx, "flanneld", []string{"NODE_NAME=" + n.cfg.Name}, "flanneld", "--kube-subnet-mgr", "--kubeconfig-file="+configDir+"/flannel.kubeconfig",
		"--net-config-path="+configDir+"/net-conf.json", "--subnet-file="+subnetFile, "--iface=eth0", "--ip-masq")
	if n.cfg.KubeProxy != "" {
		n.keep(ctx, "kube-proxy", nil, "kube-proxy", n.cfg.KubeProxyFlags(configDir+"/kube-proxy.kubeconfig")...)
	}
	// Without its subnet the plug-in fails, and pods are tried again later and
	// later. A node that has booted once has the file, and its kubelet waits for
	// nobody.
	if err := n.wait(ctx, "flanneld to write "+subnetFile, func(context.Context) error {
		_, err := os.Stat(n.path(subnetFile))
		if errors.Is(err, fs.ErrNotExist) {
			return errors.New("it has not yet; its log is " + n.logDir() + "/flanneld.log")
		}
		return err
	}); err != nil {
		return err
	}
	const name = "10-flannel.conflist"
	content, err := n.config(name)
	if err != nil {
		return err
	}
	return n.write(path.Join(cniConfigs, name), content)
}

// load puts the images of an archive into containerd, unless the node's disk
// has them from before.
func (n *node) load(ctx context.Context, archive string) error {
	name := strings.TrimSuffix(path.Base(archive), ".tar")
	marker := n.path("/var/lib/containerd", "loaded-"+name)
	if _, err := os.Stat(marker); err == nil {
		return nil
	}
	text, err := os.ReadFile(archive)
	if err == nil {
		err = n.write("/tmp/"+name+".tar", text)
	}
	if err == nil {
		_, err = n.output(ctx, "ctr", "--address", containerdSocket, "--namespace", "k8s.io", "images", "import", "/tmp/"+name+".tar")
	}
	if err == nil {
		err = os.WriteFile(marker, nil, 0o644)
	}
	if err == nil {
		err = os.Remove(n.path("/tmp", name+".tar"))
	}
	if err != nil {
		return fmt.Errorf("image %s: %w", archive, err)
	}
	return nil
}

// ready tells that containerd can run containers.
func (c *cri) ready(ctx context.Context) error {
	_, err := c.runtime.Version(ctx, &runtimeapi.VersionRequest{})
	return err
}
