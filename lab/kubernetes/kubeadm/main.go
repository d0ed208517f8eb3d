// Command kubeadm is the real kubeadm and, when it is called etcd, the real
// etcd: what the images of kind's nodes have besides the components of command
// kubernetes. Its etcd takes all flags that kubeadm gives to etcd; the one of
// command kubernetes has those only that the lab's own control planes need, and
// does not write to the disk before it answers.
package main

import (
	"os"
	"path/filepath"

	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/kubernetes/cmd/kubeadm/app"
	"k8s.io/kubernetes/cmd/kubeadm/app/util/errors"
)

func main() {
	if filepath.Base(os.Args[0]) == "etcd" {
		etcdmain.Main(os.Args)
		return
	}
	errors.HandleError(app.Run())
}
