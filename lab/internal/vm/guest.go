package vm

// Marks on the console by which the host sees how far the guest has come.
const (
	markInit  = "lab: initramfs"
	markReady = "lab: waits for its orders"
)

// initScript is the guest's first program: it brings up the devices in this
// order, mounts the disk and hands over to guestInit on it.
func initScript(modules string) string {
	return `#!/bin/busybox sh
b=/bin/busybox
$b mount -t proc proc /proc
$b mount -t sysfs sys /sys
$b mount -t devtmpfs dev /dev
echo "` + markInit + `"
for m in ` + modules + `; do $b insmod /m/$m || echo "lab: no module $m"; done
n=0
while [ ! -b /dev/vda ] && [ $n -lt 500 ]; do $b usleep 20000; n=$((n+1)); done
$b mount -t ext4 -o ro /dev/vda /root || { echo "lab: no root file system"; $b poweroff -f; }
for d in proc sys dev; do $b mount --move /$d /root/$d; done
exec $b switch_root /root /opt/lab/init
`
}

// agentModules are what kube-proxy, the CNI plugins and the daemons make the
// kernel load, and what ends connections after a restore. What is missing here
// is loaded when it is asked for.
const agentModules = "bridge veth tun geneve vxlan wireguard nf_conntrack_netlink nf_tables nft_chain_nat nft_ct nft_fib_inet " +
	"nft_fib_ipv4 nft_fib_ipv6 nft_masq nft_nat nft_numgen nft_reject_inet nft_reject_ipv4 nft_reject_ipv6 tcp_diag"

// guestInit is PID 1 on the disk. The shell collects orphans while it waits
// for the program, and the machine ends with it. What to run stands on the
// kernel's command line: lab.mode=run takes a tar archive from the disk
// lab.payload and answers by three ports (their numbers are ours, their
// device's is not); otherwise lab.agent has the agent's address.
//
// Half-way it waits for its orders: a line on the first port, "go SECONDS
// MICROSECONDS SEED". There a snapshot is taken, so that everything before is
// the same in every machine that is restored from it, and everything after is
// not. The clock and the random pool are set in between, by a program that
// runs before any other that might want them: seconds and microseconds go to
// settimeofday (164), the seed to RNDADDENTROPY, and RNDRESEEDCRNG makes the
// kernel use it at once (random(4)). Nothing before has asked for the secrets of
// TCP or of conntrack, which the kernel makes when they are first needed. The
// disks but the first have no driver while it waits, so that another content,
// and another size, is no surprise.
const guestInit = `#!/bin/sh
export PATH=` + GuestBinDir + `:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TERM=linux
mkdir -p /dev/pts /dev/shm
mount -t devpts -o ptmxmode=666 devpts /dev/pts
mount -t tmpfs -o mode=1777 shm /dev/shm
mount -t tmpfs -o mode=755 run /run
mount -t tmpfs -o mode=1777 tmp /tmp
mount -t tmpfs -o mode=755 var /var
mount -t tmpfs -o mode=700 root /root
ln -sf /proc/self/fd /dev/fd
# Devices whose modules are loaded when they are opened; elsewhere udev makes them.
mkdir -p /dev/net
[ -c /dev/net/tun ] || mknod -m 666 /dev/net/tun c 10 200
mkdir -p /var/lib /var/log /var/run /run/netns /run/lock
hostname lab
mount -t debugfs debugfs /sys/kernel/debug && echo 1048576 >/sys/kernel/debug/fault_around_bytes
mode=agent agent= binaries= payload=
for w in $(cat /proc/cmdline); do
	case $w in
	lab.mode=*) mode=${w#*=};;
	lab.agent=*) agent=${w#*=};;
	lab.binaries=*) binaries=${w#*=};;
	lab.payload=*) payload=${w#*=};;
	esac
done
if [ $mode = agent ]; then
	# At once, before many ask for the same ones: the kernel runs modprobe for
	# each request until the module is there, 143 times in a lab of two clusters.
	modprobe -a -q ` + agentModules + `
fi

late=
for d in $binaries $payload; do
	v=$(readlink /sys/block/$d/device)
	late="$late ${v##*/}"
	echo ${v##*/} >/sys/bus/virtio/drivers/virtio_blk/unbind
done
control=$(echo /dev/vport*p1)
echo "` + markReady + `"
read -r go seconds microseconds seed <$control
perl -e '
	my ($s, $us, $seed) = ($ARGV[0], $ARGV[1], pack("H*", $ARGV[2]));
	my $time = pack("qq", $s, $us);
	syscall(164, $time, 0) == 0 or die "clock: $!";
	open(my $pool, "+<", "/dev/urandom") or die "random pool: $!";
	my $entropy = pack("ii", 8 * length $seed, length $seed) . $seed;
	ioctl($pool, 0x40085203, $entropy) or die "add entropy: $!";
	ioctl($pool, 0x5207, 0) or die "reseed: $!";
' $seconds $microseconds $seed || { echo "lab: neither clock nor random pool are set"; busybox poweroff -f; }
for v in $late; do echo $v >/sys/bus/virtio/drivers/virtio_blk/bind; done
# Big programs start from a slow disk in an emulated machine: fewer and larger
# reads (and more pages mapped by each fault, above).
for d in vda $binaries; do echo 4096 >/sys/block/$d/queue/read_ahead_kb; done
[ -z "$binaries" ] || mount -t ext4 -o ro /dev/$binaries ` + GuestBinDir + ` || { echo "lab: no binaries"; busybox poweroff -f; }
echo ok >$control

if [ $mode = run ]; then
	mkdir -p /run/payload
	tar xf /dev/$payload -C /run/payload
	out=$(echo /dev/vport*p2) err=$(echo /dev/vport*p3) exit=$(echo /dev/vport*p4)
	sh /run/payload/run.sh >$out 2>$err </dev/null &
	wait $!
	echo $? >$exit
else
	mkdir -p /var/lab
	lab agent --machine --listen $agent --dir /var/lab --bin-dir ` + GuestBinDir + ` &
	wait $!
	echo "lab: the agent ended with exit code $?"
fi
busybox poweroff -f
`
