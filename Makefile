# Isthmus. `make help` lists the targets; README.md says what for.

SHELL       := /bin/bash -o pipefail
GO          ?= go
KUBERNETES  := v1.36.3
FLANNEL_CNI := v0.9.1
VERSION     := $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)

# What the lab needs of Debian: QEMU and a kernel with its tools for the vm
# world; nft and iptables for kube-proxy; the rest to look at what happens.
PACKAGES := qemu-system-x86 nftables iptables conntrack ipset iproute2 wireguard-tools tcpdump \
            busybox-static kmod e2fsprogs lz4 cpio runc util-linux jq

export CGO_ENABLED := 0

# Neither programs nor tests of this file have debugging information (-s -w; go test leaves it out
# of what it runs), so compilers need not make it: k8s.io/api/core/v1 took 4.1 s in place of 4.9,
# five times each in turn.
NO_DWARF := -gcflags=all=-dwarf=false
export GOFLAGS := $(filter-out $(NO_DWARF),$(shell $(GO) env GOFLAGS)) $(NO_DWARF)

# Compilers, tests and the lab's own programs collect garbage when there is five times as much as is in
# use, not twice as much. Packages of client-go compiled in 33.7 s in place of 39.4, three times each in
# turn, with 340 MB in place of 260; bin/kubernetes was linked with 2.2 GB in place of 2.0; the plan's
# tests took a quarter less processor time. Pods of a lab have the environment that they have anywhere.
GOGC ?= 400
export GOGC

# $(call timed,what,command) runs a command and prints how long it took. It is a
# line of the table with which make test ends.
TIMES :=
timed = @printf '==> %s\n' '$(1)'; s=$$(date +%s%N); ( $(2) ); rc=$$?; \
	t=$$(( ($$(date +%s%N) - s) / 100000000 )); printf '    %s: %d.%d s\n' '$(1)' $$((t / 10)) $$((t % 10)); \
	[ -z '$(TIMES)' ] || printf '%s\t%s\t%s\n' $$t $$rc '$(1)' >>'$(TIMES)'; exit $$rc

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: lab
lab: deps build kubernetes cni ## build what it takes and run the scenarios that take seconds: the main job
	bin/lab run pod-to-pod symmetric geneve-ping internal-node drift user-firewall

# A test of what this machine lacks fails, as in CI: a skip would look like proof. With CI= make test
# it is skipped. Nor are labs saved for later.
.PHONY: test
test: export CI ?= 1
test: ## what CI runs: unit, kernel and API tests, a row of each scenario, sabotages while there is time (test-all: all of them); ends with a table of times
	@mkdir -p bin && rm -f bin/times; $(if $(QUICK),echo 'Further rows with Geneve are drawn each time$(comma) this time those of $(DRAWN): make test DRAWN=$(DRAWN) runs them again.',echo 'This machine is slow: half of the scenarios with Geneve and those in kind are left to make test-all and make test-kind.'); \
	began=$$(date +%s); $(MAKE) --no-print-directory test-parts BEGAN=$$began QUICK=$(QUICK) DRAWN=$(DRAWN) TIMES=$(CURDIR)/bin/times; rc=$$?; \
	printf '\nmake test took (tests of the API and of the lab run beside other tests on a quick machine)\n'; awk -F '\t' -v all=$$(($$(date +%s) - began)) '{ printf "  %6.1f s  %s%s\n", $$1 / 10, $$3, $$2 == 0 ? "" : "  FAILED" } \
		END { printf "  %6.1f s  = %.1f minutes in all\n", all, all / 60 }' bin/times; \
	if awk -F '\t' '$$3 == "scenarios" { ran = 1 } END { exit !ran }' bin/times; then cat runs/latest/summary.txt; fi; exit $$rc

# Whether the machine is quick: at best of three times a program starts within 2 ms. On one where
# that took 0.7 ms (a page fault 1.6 µs), tests of the API took 218 s with three of them at a time and
# 354 s with two, and with two labs at a time more than half of the processors' time was left. On one
# where it took 3.5 ms (a page fault 13 µs), two processors do little that one does not: 300 programs
# started in 1.2 s, and two times 300 beside one another in 3.0 s. Four labs took 195 s one after
# another and 285 s two at a time; but most rows wait for clocks: one after another, labs had done 63
# of 90 rows after 35 minutes, and two at a time all of them after 39. Tests of the API took 589 s with
# one of them at a time, 410 with two and no less with four. All of make test took more than an hour
# there: what other targets have as well is left to them.
QUICK := $(shell for i in 1 2 3; do s=$$(date +%s%N); for j in {1..50}; do /bin/true; done; echo $$((($$(date +%s%N) - s) / 50)); done | sort -n | awk 'NR == 1 && $$1 < 2000000 { print "yes" }')

# On a quick machine make test draws one of these lines each time, with Geneve: a lab of a further
# topology takes three to five minutes with its rows and sabotages. test-all has them all.
# gateway-nodeport runs in the VXLAN overlay only: with Geneve a row of it takes three minutes in an
# emulated machine.
GENEVE_DRAWN.same-ranges := client-behind-nat strict-cni
GENEVE_DRAWN.far-apart   := far-apart ipvs
GENEVE_DRAWN.jumbo       := jumbo-frames
GENEVE_DRAWN.public      := public-peer/rome
DRAWN        := $(shell shuf -n 1 -e same-ranges far-apart jumbo public)
GENEVE_DRAWN = $(or $(GENEVE_DRAWN.$(DRAWN)),$(error DRAWN=$(DRAWN) is no line of rows: say same-ranges, far-apart, jumbo or public))
public       := $(if $(QUICK),$(if $(filter public,$(DRAWN)),liqo))

# TestEngine makes a cluster of kind, and so do scenarios in kind: Podman is installed for them, if
# it is missing. WITH_KIND= leaves them out.
WITH_KIND := 1

.PHONY: test-parts
test-parts: deps $(if $(WITH_KIND),kind) build kubernetes cni flannel liqoctl $(public) nodes verify lint test-kernel test-unit $(if $(QUICK),$(if $(WITH_KIND),test-lab-kind)) test-lab

# A skip is a failure in CI. What this machine's own kernel lacks (geneve and
# WireGuard, or a tun device without root) is tested in the virtual machine,
# where nothing may be skipped. A cluster of kind is made by TestEngine, unless
# WITH_KIND= says that there is no Podman.
comma        := ,
NATIVE_SKIPS := geneve,wireguard,tun$(if $(WITH_KIND),,$(comma)kind)

# The packages whose tests can start control planes and labs come one at a time, and some
# tests of each: on a slow machine twelve of them had no API server within four minutes, and
# the first of them took 7 minutes alone and 23 beside the second one. No emulated machine is
# beside them: its kernel tests took one minute alone, and were not done after fifteen beside these.
PLANES        := $(if $(QUICK),3,2)
LAB_PACKAGES  := github.com/isthmus-net/isthmus/lab/internal
DEPENDENTS    := {{$$p := .ForTest}}{{if $$p}}{{range .Deps}}{{if eq . "$(LAB_PACKAGES)/controlplane"}}{{$$p}}{{"\n"}}{{end}}{{end}}{{end}}
long_planes   := $(LAB_PACKAGES)/apitest $(LAB_PACKAGES)/selftest
with_planes   := $$({ echo $(LAB_PACKAGES)/controlplane; $(GO) list -test -f '$(DEPENDENTS)' ./...; } | awk 'NF && !had[$$0]++')
short_planes  := $$(echo "$(with_planes)" | grep -vxF "$$(printf '%s\n' $(long_planes))")
# In make test, lint has vetted the tests, too.
GO_TEST       := ISTHMUS_ACCEPT_SKIPS=$(NATIVE_SKIPS) $(GO) test $(if $(TIMES),-vet=off) -timeout 40m

# All of them wait for clocks most of the time, so on a quick machine those that take longest run beside
# the others: 10 minutes in place of 16. What has been made is not made again then. On a slow one nothing is won: all
# of them beside one another took twice as long each, with not a moment of the processors' time left.
.PHONY: test-unit
test-unit: $(if $(QUICK),build kubernetes cni flannel,test-packages test-planes) ## tests of the packages, against this machine's kernel and a real API server
	$(if $(QUICK),@$(MAKE) --no-print-directory --jobs 2 BUILT=yes QUICK=$(QUICK) TIMES=$(TIMES) test-long-planes test-short-planes)

BUILT :=
built = $(if $(BUILT),,build kubernetes cni flannel)

# One package more at a time than there are processors: those with daemons wait for clocks.
.PHONY: test-packages
test-packages: $(built)
	$(call timed,unit tests,$(GO_TEST) -p $$(($$(nproc) + 1)) $$($(GO) list ./... | grep -vxF "$(with_planes)"))

.PHONY: test-planes
test-planes: test-long-planes test-short-planes

.PHONY: test-long-planes
test-long-planes: $(built)
	$(call timed,tests of the API and of the lab,$(GO_TEST) -p 1 -parallel $(PLANES) $(long_planes))

.PHONY: test-short-planes
test-short-planes: $(built) $(if $(BUILT),test-packages)
	$(call timed,other tests with control planes,$(GO_TEST) -p 1 -parallel $(PLANES) $(short_planes))

# Writes 40,000 elements, which takes minutes in an emulated machine; test-unit
# runs it as root on this kernel.
SLOW_KERNEL_TESTS := ^TestLargeMaps$$
KERNEL_IN_VM := bin/lab vm test --module tun bin/kernel.test -- -test.short -test.skip '$(SLOW_KERNEL_TESTS)'

# The machine is emulated where there is no KVM, and takes 30 times as long: it runs the tests
# of which this kernel skips a part. test-all runs them all in its kernel, too.
.PHONY: test-kernel
test-kernel: build ## kernel tests: without root, and in the virtual machine's kernel those that lack something in this one
	$(call timed,build kernel tests,$(GO) test -c -o bin/kernel.test ./appliance/kernel)
	$(call timed,kernel tests without root,dir=$$(mktemp -d) && cp -r appliance/kernel/testdata bin/kernel.test $$dir && chmod -R a+rX $$dir && \
		(cd $$dir && ISTHMUS_ACCEPT_SKIPS=$(NATIVE_SKIPS) setpriv --reuid=65534 --regid=65534 --clear-groups ./kernel.test -test.short -test.skip '$(SLOW_KERNEL_TESTS)'); \
		rc=$$?; rm -rf $$dir; [ $$rc = 0 ])
	$(call timed,kernel tests of which this kernel skips a part,(cd appliance/kernel && \
		ISTHMUS_ACCEPT_SKIPS=$(NATIVE_SKIPS) ../../bin/kernel.test -test.v -test.short -test.skip '$(SLOW_KERNEL_TESTS)') >bin/kernel.txt || { cat bin/kernel.txt; false; })
	$(call timed,kernel tests in the virtual machine,tests=$$(sed -nE 's,^ *--- SKIP: ([^/ ]+).*,\1,p' bin/kernel.txt | sort -u | paste -sd'|'); \
		if [ "$$tests" ]; then $(KERNEL_IN_VM) -test.run "^($$tests)$$"; else echo 'this kernel skips none'; fi)

# One row and at most one sabotage of each scenario run here; test-all runs all of them.
# Each lab runs its rows, then a sabotage, and further ones until its sabotages have taken
# SABOTAGE_TIME. The seed draws whose, so that each run makes others; the last lines say how many
# were not made. Two labs run at a time, and on a quick machine a third one while processors have
# nothing to do.
.PHONY: test-lab
test-lab: build kubernetes cni flannel liqoctl $(public) nodes ## a row of each scenario in the VXLAN overlay, and of those of GENEVE with Geneve and the kernel's WireGuard; a sabotage of each while there is time
	$(if $(late),@echo 'More than $(LATE_AFTER) minutes are over. Left to make test-all: $(LATE).')
	$(call timed,scenarios,bin/lab run --fresh --sabotage=after --rows 1 --sabotages 1 --sabotage-time $(SABOTAGE_TIME) $(if $(QUICK),$(SABOTAGED:%=--sabotage-time '%@geneve=0')) --jobs $(LABS) \
		$(if $(BEGAN),--time $$((t = $(ENOUGH) * 60 - $$(date +%s) + $(BEGAN), t > 300 ? t : 300))s) '*@vxlan' $(GENEVE:%='%@geneve') $(if $(QUICK),$(GENEVE_QUICK:%='%@geneve') $(GENEVE_DRAWN:%='%@geneve')) $(TOO_LONG:%='!%') $(if $(late),$(LATE:%='!%')))

LABS          := $(if $(QUICK),3,2)
SABOTAGE_TIME := 5s

# What test-all has for itself: the lab of nodes with the real kubelet takes longest, and
# these two rows wait for two minutes each.
TOO_LONG := real-nodes-* upgrade-under-traffic lock-out restart-without-api

# What is left out as well where so many minutes are over when scenarios begin, as on a slow machine
# that had to build everything: there these took 12 minutes of two labs at a time, and all of make test some 87 of CI's 90.
LATE_AFTER := 42
LATE  := peer-blocked networks-change atomic-update reset-clean keys-rotate endpoint-changes endpoint-withdrawn disconnect-clean
BEGAN :=
# And so many minutes after it began make test begins no further row: CI ends at 90, and would lose
# all that the others have shown.
ENOUGH := 78
late   = $(and $(BEGAN),$(shell [ $$(($$(date +%s) - $(BEGAN))) -gt $$(($(LATE_AFTER) * 60)) ] && echo late))

# What runs with Geneve and the kernel's WireGuard, which need the virtual machine where this
# kernel has neither: what depends on the overlay or on the kernel's WireGuard, in two topologies.
GENEVE := \
	pod-to-pod geneve-ping internal-node notrack user-firewall daemon-restart/geneve/milan-gateway drift/geneve/*/routes peer-knocks/geneve/rome \
	nodeport-return-path/geneve/milan/Cluster/tcp nodeport-from-pod/geneve/*/tcp nodeport-tuple-collision/geneve/tcp loadbalancer/geneve/*/tcp \
	overlapping-cidrs/geneve/tcp mapped-ip/geneve/*/tcp address-of-the-gateway/geneve/own masquerade-bypass/geneve/tcp

# And on a quick machine what else the seeds tell of; the last two lines are two more topologies.
GENEVE_QUICK := api-server-gone host-sources clusterip-remote-endpoint \
	mss-clamp path-mtu gateway-clusterip gateway-loadbalancer hostnetwork-source-ip \
	node-added node-removed upgrade

# Of these a sabotage with Geneve is made each time on a quick machine, whatever SABOTAGE_TIME says: in
# the emulated machine, beside other labs, these 17 took 7m40, and those of all 27 of its scenarios 13m40.
SABOTAGED := nodeport-return-path nodeport-tuple-collision host-sources hostnetwork-source-ip overlapping-cidrs mapped-ip \
	mss-clamp path-mtu masquerade-bypass gateway-clusterip gateway-loadbalancer node-added node-removed \
	drift daemon-restart api-server-gone upgrade

# What runs in clusters of kind: what real kubelets, kubeadm's control planes and
# nodes that are containers may do differently: test-kind runs them with all of their sabotages.
KIND := install-uninstall/vxlan \
	overlapping-cidrs/vxlan/tcp/*-web nodeport-return-path/vxlan/*/Local/tcp masquerade-bypass/vxlan/tcp/*-web host-sources/vxlan \
	pod-to-pod/vxlan/*/milan-*/rome-web

# One row of each: of install-uninstall the one in which Helm installs and upgrades it, of
# host-sources the one of a pod in its node's network. A sabotage of install-uninstall takes as long as
# its row, nearly two minutes; test-lab has one of it, and test-kind all of them. pod-to-pod's topology would
# be a third lab, a minute and 40 s: install-uninstall says the same of a packet's path, source and secrecy.
# Two labs of kind beside each other took as long as one after the other: two processors have nothing left.
IN_KIND = bin/lab run --fresh --world kind --rows 1 --jobs 1
.PHONY: test-lab-kind
test-lab-kind: kind
	$(call timed,installation in kind,$(IN_KIND) install-uninstall/vxlan '!install-uninstall/vxlan/removed')
	$(call timed,scenarios in kind,$(IN_KIND) --sabotage=after --sabotages 1 --sabotage-time $(SABOTAGE_TIME) \
		$(patsubst %,'%',$(filter-out install-uninstall/% pod-to-pod/%,$(KIND))) '!host-sources/*/*-gateway.*')

.PHONY: test-kind
test-kind: kind ## scenarios in clusters of kind, with Podman: installation, paths and sources on kubeadm's own nodes
	$(call timed,a cluster of kind,CI=1 $(GO) test -count=1 -timeout 20m -run '^TestEngine$$' ./lab/internal/kind)
	$(call timed,all scenarios in kind,bin/lab run --fresh --world kind --sabotage=after --jobs 1 $(KIND:%='%'))

.PHONY: test-all
test-all: build kubernetes cni flannel liqoctl liqo nodes ## every scenario in every overlay, with its sabotages, and the README's commands (hours on two cores without KVM)
	$(call timed,all kernel tests in the virtual machine,$(GO) test -c -o bin/kernel.test ./appliance/kernel && $(KERNEL_IN_VM))
	bin/lab run --fresh --sabotage=after
	$(MAKE) --no-print-directory test-readme

.PHONY: test-readme
test-readme: build kubernetes cni flannel nodes ## the README's commands of installing and peering, as they are written
	$(call timed,commands of the README,lab/readme.sh)

.PHONY: bench
bench: export GOGC := 100
bench: ## benchmarks of the plan and of the kernel
	$(GO) test -run '^$$' -bench . -benchmem ./appliance/plan ./appliance/netstate ./appliance/kernel

.PHONY: build
build: ## bin/isthmus, bin/isthmusctl, bin/lab and bin/probe
	$(call timed,bin/isthmus,$(GO) build -ldflags '-s -w -X main.version=$(VERSION)' -o bin/isthmus ./appliance/cmd/isthmus)
	$(call timed,bin/isthmusctl,$(GO) build -ldflags '-s -w -X main.version=$(VERSION)' -o bin/isthmusctl ./appliance/cmd/isthmusctl)
	$(call timed,bin/lab,$(GO) build -ldflags '-s -w -X main.version=$(VERSION)' -o bin/lab ./lab/cmd/lab)
	$(call timed,bin/probe,$(GO) build -ldflags '-s -w' -o bin/probe ./lab/cmd/probe)

# The image has the chart's version, so that the chart finds it.
IMAGE         := ghcr.io/isthmus-net/isthmus
IMAGE_VERSION := $(shell sed -n 's/^appVersion: "\(.*\)"/\1/p' k8s/chart/Chart.yaml)
IMAGE_ARCHS   := amd64 arm64

.PHONY: image
image: $(IMAGE_ARCHS:%=image-%) ## bin/image: the container image, without a container engine, as an OCI layout and as archives for "ctr images import"
	$(call timed,bin/image,$(GO) run ./appliance/internal/imagegen -name $(IMAGE):$(IMAGE_VERSION) -version $(IMAGE_VERSION) -out bin/image \
		$(foreach arch,$(IMAGE_ARCHS),$(arch)=bin/image/$(arch)/isthmus))

.PHONY: $(IMAGE_ARCHS:%=image-%)
$(IMAGE_ARCHS:%=image-%): image-%:
	$(call timed,isthmus for $*,GOOS=linux GOARCH=$* $(GO) build -buildvcs=false -trimpath \
		-ldflags '-s -w -X main.version=$(VERSION)' -o bin/image/$*/isthmus ./appliance/cmd/isthmus)

.PHONY: kubernetes
kubernetes: bin/kubernetes bin/kube-proxy ## the lab's control plane and kube-proxy (7 minutes the first time)

V := k8s.io/component-base/version
KUBERNETES_LDFLAGS := -s -w -X $V.gitVersion=$(KUBERNETES) -X $V.gitMajor=1 -X $V.gitMinor=36 -X $V.gitCommit=lab -X $V.gitTreeState=clean
bin/kubernetes: $(wildcard lab/kubernetes/*.go) lab/kubernetes/go.mod
	$(call timed,bin/kubernetes $(KUBERNETES) (some 5 minutes from empty caches),cd lab/kubernetes && \
		$(GO) build -ldflags '$(KUBERNETES_LDFLAGS)' -o ../../bin/kubernetes .)
bin/kube-proxy: $(wildcard lab/kubernetes/kube-proxy/*.go) lab/kubernetes/go.mod | bin/kubernetes
	$(call timed,bin/kube-proxy $(KUBERNETES),cd lab/kubernetes && \
		$(GO) build -ldflags '$(KUBERNETES_LDFLAGS)' -o ../../bin/kube-proxy ./kube-proxy)
bin/coredns: $(wildcard lab/kubernetes/coredns/*.go) lab/kubernetes/go.mod | bin/kubernetes
	$(call timed,bin/coredns,cd lab/kubernetes && $(GO) build -ldflags '-s -w' -o ../../bin/coredns ./coredns)

.PHONY: cni
cni: bin/cni/.tools ## bin/cni, the CNI plugins

# Tools of go.mod.
CNI_PLUGINS := main/bridge main/ptp main/loopback ipam/host-local meta/portmap
bin/cni/.tools: go.mod
	@mkdir -p bin/cni
	$(call timed,CNI plugins,$(GO) build -ldflags '-s -w' -o bin/cni/ $(CNI_PLUGINS:%=github.com/containernetworking/plugins/plugins/%) && touch $@)

.PHONY: flannel
flannel: bin/cni/flannel bin/flanneld ## flanneld and its CNI plugin, for topologies with cni: flannel and for real nodes

# The plug-in of flannel moved out of the reference plugins after this release,
# and its new home is not on the module proxy.
bin/cni/flannel: | bin/cni/.tools
	$(call timed,CNI plugin flannel $(FLANNEL_CNI),GOBIN=$(CURDIR)/bin/cni $(GO) install -ldflags '-s -w' \
		github.com/containernetworking/plugins/plugins/meta/flannel@$(FLANNEL_CNI))

# Their module and lab/kubernetes require the versions of libraries that ours requires: what they
# have in common is compiled once for all programs.
TOOLS := lab/tools/go.mod lab/tools/overlay.sh

bin/flanneld: $(TOOLS)
	$(call timed,bin/flanneld,GO=$(GO) lab/tools/overlay.sh flanneld $(CURDIR)/bin/.tools && cd lab/tools && \
		$(GO) build -ldflags '-s -w' -overlay ../../bin/.tools/flanneld.json -o ../../bin/flanneld ./flanneld)

.PHONY: liqoctl
liqoctl: bin/liqoctl ## the public liqoctl without install, move and test; a scenario connects clusters with it

# It is told its version at build time, as its releases are.
bin/liqoctl: $(TOOLS)
	$(call timed,bin/liqoctl,GO=$(GO) lab/tools/overlay.sh liqoctl $(CURDIR)/bin/.tools && cd lab/tools && \
		$(GO) build -overlay ../../bin/.tools/liqoctl.json -o ../../bin/liqoctl \
			-ldflags "-s -w -X github.com/liqotech/liqo/pkg/liqoctl/version.LiqoctlVersion=$$($(GO) list -m -f '{{.Version}}' github.com/liqotech/liqo)" ./liqoctl)

.PHONY: liqo
liqo: bin/liqo bin/helm ## daemons of the public system and their chart; a scenario connects a cluster of theirs with one of ours

bin/liqo bin/liqo-chart/Chart.yaml &: lab/public/_liqo/main.go lab/public/go.mod lab/public/overlay.sh
	$(call timed,bin/liqo (some 3 minutes from empty caches),GO=$(GO) lab/public/overlay.sh $(CURDIR)/bin/.tools $(CURDIR)/bin/liqo-chart && cd lab/public && \
		$(GO) build -ldflags '-s -w' -overlay ../../bin/.tools/public.json -o ../../bin/liqo ./liqo)

ARCH := $(shell $(GO) env GOARCH)

CONTAINERD := v2.4.2

.PHONY: nodes
nodes: bin/.containerd-$(CONTAINERD) bin/helm node-images ## containerd and the images that the lab's nodes with a real kubelet run, and helm

# A tool of go.mod, so of the version of the SDK that isthmusctl is made with.
bin/helm: go.mod
	$(call timed,bin/helm,$(GO) build -ldflags '-s -w' -o bin/helm helm.sh/helm/v3/cmd/helm)

bin/.containerd-$(CONTAINERD):
	$(call timed,containerd $(CONTAINERD),GOBIN=$(CURDIR)/bin $(GO) install -ldflags '-s -w -X github.com/containerd/containerd/v2/version.Version=$(CONTAINERD)' \
		$(foreach p,containerd-shim-runc-v2 ctr containerd,github.com/containerd/containerd/v2/cmd/$p@$(CONTAINERD)) && touch $@)

# What clusters of kind need of Debian besides: Podman, and what makes the root
# directory of their nodes.
KIND_PACKAGES := podman runc netavark aardvark-dns conmon mmdebstrap

.PHONY: kind
kind: deps kind-deps kind-base build cni flannel liqoctl nodes kind-image ## Podman and the image of kind's nodes, for lab up --world kind

.PHONY: kind-deps
kind-deps:
	$(call install,$(KIND_PACKAGES))

# Debian's packages are fetched and unpacked while a compiler has the processors.
.PHONY: kind-base
kind-base: kind-deps
	@$(MAKE) --no-print-directory --jobs 2 TIMES=$(TIMES) bin/kubernetes bin/kind/base.tar

bin/kubeadm: $(wildcard lab/kubernetes/kubeadm/*.go) lab/kubernetes/go.mod | bin/kubernetes
	$(call timed,bin/kubeadm $(KUBERNETES),cd lab/kubernetes && \
		$(GO) build -ldflags '$(KUBERNETES_LDFLAGS)' -o ../../bin/kubeadm ./kubeadm)
bin/crictl: lab/kubernetes/go.mod | bin/kubernetes
	$(call timed,bin/crictl,cd lab/kubernetes && $(GO) build -ldflags '-s -w' -o ../../bin/crictl sigs.k8s.io/cri-tools/cmd/crictl)

NODE_IMAGE := lab/internal/kind/nodeimage

.PHONY: kind-image
kind-image: flannel node-images bin/helm bin/kind/node-$(ARCH).tar
bin/kind/base.tar bin/kind/firewall.tar &: $(NODE_IMAGE)/debian.sh
	$(call timed,bin/kind/base.tar (Debian),$(NODE_IMAGE)/debian.sh bin/kind)
bin/kind/node-$(ARCH).tar: $(wildcard $(NODE_IMAGE)/*.go) bin/kind/base.tar bin/kind/firewall.tar bin/kubernetes bin/kube-proxy bin/kubeadm bin/crictl bin/coredns bin/.containerd-$(CONTAINERD) bin/cni/.tools go.mod
	$(call timed,$@,$(GO) run ./$(NODE_IMAGE) -base bin/kind/base.tar -firewall bin/kind/firewall.tar -bin bin -version $(KUBERNETES) \
		-kind "$$($(GO) mod download sigs.k8s.io/kind && $(GO) list -m -f '{{.Dir}}' sigs.k8s.io/kind)" -out $@)

.PHONY: node-images
node-images: build bin/coredns
	@mkdir -p bin/images
	$(call timed,bin/images,$(GO) build -o bin/imagegen ./appliance/internal/imagegen && \
		bin/imagegen -archives -out bin/images -name $(IMAGE):$(IMAGE_VERSION) -version $(VERSION) $(ARCH)=bin/isthmus && \
		bin/imagegen -archives -out bin/images -name docker.io/isthmus-lab/probe:dev -path /bin/probe -user 0:0 $(ARCH)=bin/probe && \
		bin/imagegen -archives -out bin/images -name docker.io/isthmus-lab/pause:dev -path /bin/pause -argument pause $(ARCH)=bin/probe && \
		bin/imagegen -archives -out bin/images -name docker.io/isthmus-lab/coredns:dev -path /coredns $(ARCH)=bin/coredns)

# $(call install,packages) installs those that are missing.
install = @if missing=$$(for p in $(1); do dpkg-query -W -f '$${Status}' $$p 2>/dev/null | grep -q 'ok installed' || echo $$p; done) && [ -n "$$missing" ]; then \
		echo "==> apt-get install" $$missing; \
		if [ "$$(id -u)" != 0 ]; then echo "make $@: run as root: apt-get install" $$missing; exit 1; fi; \
		(apt-get install -y -q --no-install-recommends $$missing || (apt-get update -q && apt-get install -y -q --no-install-recommends $$missing)) >/dev/null; \
	fi

.PHONY: deps
deps: ## install what the lab needs of Debian (root; does nothing when it is there)
	$(call install,$(PACKAGES))

.PHONY: generate
generate: ## deep copies, CRDs and roles from the types and their markers
	$(GO) generate ./appliance/api

.PHONY: verify
verify: generate ## fail when a generated file is out of date
	@[ -z "$$(git status --porcelain -- appliance/api k8s)" ] || { git --no-pager diff --stat -- appliance/api k8s; echo "make verify: run make generate and commit"; exit 1; }

.PHONY: lint
lint: build ## gofmt, vet, and the topologies and scenarios
	@out=$$(gofmt -l $$(git ls-files '*.go')); [ -z "$$out" ] || { echo "not gofmt'ed:" $$out; exit 1; }
	$(call timed,go vet,$(GO) vet ./...)
	$(call timed,topologies and scenarios,bin/lab lint)

.PHONY: clean
clean: ## remove bin/ and runs/
	[ "$$(findmnt -n -o SOURCE -M '$(CURDIR)/bin')" != isthmus-bin ] || umount -l bin # of a .ci/run that was killed
	rm -rf bin runs
