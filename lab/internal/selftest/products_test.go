package selftest

import (
	"encoding/json"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"gotest.tools/v3/assert"

	"github.com/isthmus-net/isthmus/lab/internal/report"
	"github.com/isthmus-net/isthmus/lab/internal/scenario"
)

// An edit breaks a source file of the appliance: the text old, which must be
// there once, becomes new, and more is added at the end.
type edit struct{ file, old, new, more string }

// A brokenProduct is a wrong isthmus, and the rows that must notice.
type brokenProduct struct {
	name  string
	edits []edit
	// down is why the lab may not even come up, as a regular expression; empty: it
	// must, and each row says by itself what is wrong.
	down string
	rows []brokenRow
}

// A brokenRow is a row of the repository's scenarios and where it must fail.
type brokenRow struct {
	name, step string
	want       reason
}

func brokenProducts() []brokenProduct {
	return []brokenProduct{
		{
			// It leads its own pods' packets into the tunnel, so that kubelets reach neither them nor
			// the gateway; which of the two the lab waits for depends on which came first. It takes
			// longest, so it begins first.
			name: "a controller that remaps no network of pods",
			edits: []edit{{
				"appliance/plan/network.go",
				"cidr, ok := ipam.Remap(x.cidr, avoid, pools)",
				"cidr, ok := ipam.Remap(x.cidr, avoid, pools)\n\t\tif x.kind == v1beta1.CIDRTypePod {\n\t\t\tcidr = x.cidr.Masked()\n\t\t}", "",
			}},
			down: `the appliance did not come up: .*(pod default/(web|probe) is not ready: .*its readiness probe fails|has no status\.|has had no answer from)`,
			rows: []brokenRow{{name: "overlapping-cidrs/vxlan/tcp/milan-web/rome-web"}},
		},
		{
			name: "node daemons that do nothing and say that they did",
			edits: []edit{{
				"appliance/internal/daemon/node.go",
				"Target:  watched{n.ns, n.health},\n\t\tDesired: desired.Node,",
				"Target:  idle{watched{n.ns, n.health}},\n\t\tDesired: desired.Node,",
				"\ntype idle struct{ watched }\n\nfunc (idle) Apply(context.Context, netstate.Changes) error { return nil }\n",
			}},
			down: `the appliance did not come up: .*(has had no answer from|has no status\.)`,
			rows: []brokenRow{{name: "pod-to-pod/vxlan/tcp/milan-web/rome-web"}},
		},
		{
			name: "gateways that bring up their tunnel and do nothing else",
			edits: []edit{{
				"appliance/internal/daemon/gateway.go",
				"Target:  tunnelTarget{watched{gw.ns, gw.health}, gw},",
				"Target:  tunnelOnly{watched{gw.ns, gw.health}},",
				`
type tunnelOnly struct{ watched }

func (t tunnelOnly) Apply(ctx context.Context, c netstate.Changes) error {
	return t.watched.Apply(ctx, netstate.Changes{
		AddLinks: c.AddLinks, ChangeLinks: c.ChangeLinks, RecreateLinks: c.RecreateLinks,
		SetWireGuard: c.SetWireGuard, AddAddresses: c.AddAddresses,
	})
}
`,
			}},
			down: `the appliance did not come up: .*has had no answer from`,
			rows: []brokenRow{{name: "pod-to-pod/vxlan/udp/rome-probe/milan-probe"}},
		},
		{
			name: "a controller that remaps no external network",
			edits: []edit{{
				"appliance/plan/network.go",
				"cidr, ok := ipam.Remap(x.cidr, avoid, pools)",
				"cidr, ok := ipam.Remap(x.cidr, avoid, pools)\n\t\tif x.kind == v1beta1.CIDRTypeExternal {\n\t\t\tcidr = x.cidr.Masked()\n\t\t}", "",
			}},
			rows: []brokenRow{
				{"mapped-ip/vxlan/true/tcp", "a pod of the other cluster reaches it", reason{"milan/web reaches external", "which overlaps its own external CIDR"}},
				{"mapped-ip/vxlan/false/icmp", "a pod of the other cluster reaches it", reason{"milan/web reaches external", "which overlaps its own external CIDR"}},
			},
		},
		{
			// What comes out of a tunnel for a pod by UDP goes to a pod in the network
			// of node-1, and so does what is for the host of an IP object. The marks of
			// connections are those of the next node.
			name: "gateways that lead to somebody else",
			edits: []edit{{
				"appliance/plan/translation.go",
				"o := firewallConfiguration(forPeerGateway(m, peer.id), \"unknown-source\", v6)\n\to.Spec.Table.Chains = []v1beta1.Chain{c}",
				`o := firewallConfiguration(forPeerGateway(m, peer.id), "unknown-source", v6)
	wrong := chain("wrong", v1beta1.ChainTypeNAT, v1beta1.ChainHookPrerouting, v1beta1.ChainPriorityNATDest)
	for _, l := range p.localPods(v6) {
		wrong.Rules.NatRules = append(wrong.Rules.NatRules, translate(v1beta1.NatTypeDestination, ruleName("wrong", l.String()), p.nodeOne(),
			append(toPort(v1beta1.L4ProtoUDP, 8080), by(v1beta1.TunnelInterface), to(l))...))
	}
	o.Spec.Table.Chains = []v1beta1.Chain{c, wrong}`,
				`
func (p *planner) nodeOne() netip.Addr {
	for _, n := range p.s.Nodes {
		if n.Name == "node-1" && len(n.Addresses) > 0 {
			return n.Addresses[0]
		}
	}
	return netip.Addr{}
}
`,
			}, {
				"appliance/plan/translation.go",
				"Value: ptr(strconv.FormatUint(uint64(number), 10)),",
				"Value: ptr(strconv.FormatUint(uint64(number)+1, 10)),", "",
			}, {
				"appliance/plan/ipmapping.go",
				"translate(v1beta1.NatTypeDestination, ruleName(x.Name), x.IP.IP, to(host(x.given))),",
				"translate(v1beta1.NatTypeDestination, ruleName(x.Name), p.nodeOne(), to(host(x.given))),", "",
			}, { // nodes refuse what peers send to them
				"appliance/plan/peeraccess.go",
				"out := slices.Clone(p.local.ofType(v1beta1.NetworkTypeService))",
				"out := append(slices.Clone(p.local.ofType(v1beta1.NetworkTypeService)), host(p.nodeOne()))", "",
			}},
			rows: []brokenRow{
				{"overlapping-cidrs/vxlan/udp/milan-web/rome-probe", "the pod is reached at its remapped address, and sees the sender's", reason{"milan/web reaches rome/probe", `got .*rome/hostprobe.* answered`}},
				{"overlapping-cidrs/vxlan/udp/rome-web/milan-web", "the pod is reached at its remapped address, and sees the sender's", reason{"rome/web reaches milan/web", `got .*milan/hostprobe.* answered`}},
				{"mapped-ip/vxlan/true/tcp", "a pod of the other cluster reaches it", reason{"milan/web reaches external", `got .*rome/hostprobe.* answered`}},
				{"nodeport-return-path/vxlan/rome/Cluster/tcp", "web is reached by the gateway's node, and answers by it", reason{"user reaches milan/web at rome/gateway.node:30080 by tcp", "got no answer within .*reply .*rome/gateway"}},
			},
		},
	}
}

// TestProductsCanBeBroken: what breaks the products is there to be broken, and so
// are the rows that must notice.
func TestProductsCanBeBroken(t *testing.T) {
	all, err := scenario.LoadAll(filepath.Join(repository(t), "scenarios"), filepath.Join(repository(t), "topologies"))
	assert.NilError(t, err)
	steps := map[string][]string{}
	for _, s := range all {
		for _, r := range s.Rows {
			for _, st := range s.Build(r) {
				steps[r.Name] = append(steps[r.Name], st.Name)
			}
		}
	}
	for _, p := range brokenProducts() {
		for _, e := range p.edits {
			text, err := os.ReadFile(filepath.Join(repository(t), e.file))
			assert.NilError(t, err)
			assert.Check(t, strings.Count(string(text), e.old) == 1, "%s: %s has this text no more, or more than once; change what breaks it, too:\n%s", p.name, e.file, e.old)
		}
		for _, r := range p.rows {
			assert.Check(t, steps[r.name] != nil, "%s: there is no row %s", p.name, r.name)
			assert.Check(t, r.step == "" || slices.Contains(steps[r.name], r.step), "%s: row %s has no step %q", p.name, r.name, r.step)
		}
	}
}

// TestBrokenProducts: each row that must notice a broken product fails, for the
// reason that is meant.
func TestBrokenProducts(t *testing.T) {
	needLab(t)
	t.Parallel()
	for _, p := range brokenProducts() {
		t.Run(p.name, func(t *testing.T) {
			t.Parallel()
			root := p.build(t)
			var names []string
			for _, r := range p.rows {
				names = append(names, r.name)
			}
			run := runLab(t, root, names...)
			rows, _ := rowsOf(run)
			for _, r := range p.rows {
				row, ok := rows[r.name]
				assert.Assert(t, ok, "there is no row %s", r.name)
				if p.down == "" {
					failsFor(t, row, r.step, r.want)
					continue
				}
				assert.Equal(t, row.Verdict, report.Fail, row.Reason)
				assert.Check(t, matches(t, p.down, row.Reason), "the reason is %q", row.Reason)
			}
			for _, l := range run.Labs {
				assert.Check(t, len(l.Retried) == 0, "the lab was built again: %q", l.Retried)
				assert.Equal(t, l.Error == "", p.down == "", l.Error)
			}
		})
	}
}

// build makes a folder like the repository's, with all that the lab needs, and the
// broken isthmus in it.
func (p brokenProduct) build(t *testing.T) (root string) {
	t.Helper()
	repo := repository(t)
	// Of the file system that the programs are on: they are not copied.
	root, err := os.MkdirTemp(filepath.Join(repo, "bin"), ".selftest-")
	assert.NilError(t, err)
	t.Cleanup(func() { assert.Check(t, os.RemoveAll(root)) })
	for _, dir := range []string{"topologies", "scenarios", "k8s"} {
		assert.NilError(t, os.Symlink(filepath.Join(repo, dir), filepath.Join(root, dir)))
	}
	bin := filepath.Join(root, "bin")
	linkAll(t, filepath.Join(repo, "bin"), bin)
	isthmus := filepath.Join(bin, "isthmus")
	assert.NilError(t, os.Remove(isthmus))

	replace := map[string]string{}
	for _, e := range p.edits {
		original := filepath.Join(repo, e.file)
		broken, ok := replace[original]
		from := broken
		if !ok {
			broken, from = filepath.Join(root, strings.ReplaceAll(e.file, "/", "_")), original
			replace[original] = broken
		}
		text, err := os.ReadFile(from)
		assert.NilError(t, err)
		assert.Equal(t, strings.Count(string(text), e.old), 1, "what breaks %s: %s", e.file, e.old)
		assert.NilError(t, os.WriteFile(broken, []byte(strings.Replace(string(text), e.old, e.new, 1)+e.more), 0o644))
	}
	overlay, err := json.Marshal(map[string]any{"Replace": replace})
	assert.NilError(t, err)
	overlayFile := filepath.Join(root, "overlay.json")
	assert.NilError(t, os.WriteFile(overlayFile, overlay, 0o644))
	build := exec.CommandContext(t.Context(), "go", "build", "-ldflags", "-s -w", "-overlay", overlayFile, "-o", isthmus, "./appliance/cmd/isthmus")
	build.Dir = repo
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	out, err := build.CombinedOutput()
	assert.NilError(t, err, "%s", out)
	return root
}

// linkAll makes a folder with the same files as another one.
func linkAll(t *testing.T, from, to string) {
	t.Helper()
	assert.NilError(t, filepath.WalkDir(from, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, err := filepath.Rel(from, path)
		switch {
		case err != nil:
			return err
		case d.IsDir() && strings.HasPrefix(name, ".selftest-"):
			return filepath.SkipDir
		case d.IsDir():
			return os.MkdirAll(filepath.Join(to, name), 0o755)
		}
		return os.Link(path, filepath.Join(to, name))
	}))
}
