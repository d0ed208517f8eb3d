#!/bin/sh
# Makes the root directories of Debian that the images of kind's nodes begin with:
# one for the nodes, and one that has no more than nft and iptables, for kube-proxy.
#
#	debian.sh DIRECTORY
#
# The packages are what kind's own Dockerfile installs (images/base), without those
# for network storage, and runc, which kind builds; wireguard-tools, tcpdump,
# busybox and ping are what scenarios and people look with.
set -eu
out=$1
suite=bookworm mirror=http://deb.debian.org/debian
node=systemd,conntrack,iptables,nftables,iproute2,ethtool,util-linux,mount,kmod,libseccomp2,jq,procps,runc,wireguard-tools,tcpdump,busybox,iputils-ping

command -v mmdebstrap >/dev/null || { echo "debian.sh: mmdebstrap is not installed; run: apt-get install mmdebstrap" >&2; exit 1; }
mkdir -p "$out"
hook=$(mktemp)
trap 'rm -f "$hook" "$out"/*.part.tar' EXIT
trap 'exit 130' INT TERM # of which dash does not make an EXIT by itself
# As kind's Dockerfile: a container has no udev, and starts nothing by itself.
cat >"$hook" <<'EOF'
#!/bin/sh
set -eu
units=$1/lib/systemd/system
rm -f "$units"/sysinit.target.wants/systemd-tmpfiles-setup.service "$units"/multi-user.target.wants/* "$1"/etc/systemd/system/*.wants/* \
	"$units"/local-fs.target.wants/* "$units"/sockets.target.wants/*udev* "$units"/sockets.target.wants/*initctl* "$units"/basic.target.wants/*
echo ReadKMsg=no >>"$1/etc/systemd/journald.conf"
ln -sf /lib/systemd/systemd "$1/sbin/init"
EOF
chmod +x "$hook"

make() { # NAME OPTIONS...: whole, or not at all
	name=$1
	shift
	mmdebstrap --quiet "$@" "$suite" "$out/$name.part.tar" "$mirror"
	mv "$out/$name.part.tar" "$out/$name.tar"
}
make firewall --variant=extract --include=nftables,iptables
make base --variant=minbase --include="$node" --customize-hook="$hook" \
	--dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/locale/*'
