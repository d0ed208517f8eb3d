package main

// fitMachine makes a node get along with the machine whose kernel it shares.
//
// Where containers may not lower a score for the kernel's out-of-memory killer,
// runc would start none of those for which the kubelet asks that, among them the
// first one of each pod: containerd then asks for as much as it may itself.
//
// A kubelet writes settings of the whole machine, unless it finds them as it
// wants them (pkg/kubelet/cm/container_manager_linux.go, setupKernelTunables).
// It finds them so.
//
// iptables writes to nftables, like that in the image of kube-proxy: kind's
// entrypoint takes the older kind where neither has rules yet.
const fitMachine = `#!/bin/sh
set -eu
for family in iptables ip6tables; do
	update-alternatives --set $family /usr/sbin/$family-nft
done
if ! (echo -999 >/proc/self/oom_score_adj) 2>/dev/null; then
	sed -i 's/restrict_oom_score_adj = false/restrict_oom_score_adj = true/' /etc/containerd/config.toml
fi
mkdir -p /run/settings
for setting in vm/overcommit_memory=1 vm/panic_on_oom=0 kernel/panic=10 kernel/panic_on_oops=1 \
	kernel/keys/root_maxkeys=1000000 kernel/keys/root_maxbytes=25000000; do
	name=${setting%=*}
	file=/run/settings/$(echo "$name" | tr / .)
	[ -e "/proc/sys/$name" ] && [ ! -e "$file" ] || continue
	echo "${setting#*=}" >"$file"
	mount --bind "$file" "/proc/sys/$name"
done
`

const fitMachineDropIn = `[Service]
ExecStartPre=/usr/local/bin/fit-machine
`

// loadImages gives the images of a node to its containerd. Those of the control
// plane are for the container that kind has named so.
const loadImages = `#!/bin/sh
set -eu
ctr --namespace k8s.io images import /kind/images/node.tar
case $(hostname) in
*-control-plane) ctr --namespace k8s.io images import /kind/images/control-plane.tar ;;
esac
`

// Neither it nor the kubelet, which waits for it, is to keep multi-user.target back, as
// what a target wants does by default (systemd.target(5), "Default Dependencies"): with cgroup
// version 2 kind gives a node 30 seconds to reach that target.
const loadImagesUnit = `[Unit]
Description=Images of Kubernetes
DefaultDependencies=no
After=containerd.service
Requires=containerd.service
Before=kubelet.service shutdown.target
Conflicts=shutdown.target

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/local/bin/load-images

[Install]
WantedBy=multi-user.target
`

// kubeletDropIn keeps the kubelet from asking a registry for images that are
// about to be loaded.
const kubeletDropIn = `[Unit]
DefaultDependencies=no
After=load-images.service
Requires=load-images.service
Before=shutdown.target
Conflicts=shutdown.target
`
