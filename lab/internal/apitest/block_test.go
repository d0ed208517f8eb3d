package apitest

import (
	"strings"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
)

// blocks cuts a peer off and ends that, twice each, and tries what has to be refused.
func (p *pair) blocks() {
	p.does("init")
	defer p.does("reset", "--wait")
	_, errs, err := p.milan.try("peer", "block", "oslo")
	assert.Assert(p.t, err != nil)
	assert.Check(p.t, is.Contains(errs, `is of a peer "oslo": those that have one are: rome`))

	p.milan.kubectl("", "create", "clusterrole", "looks", "--verb=get,list", "--resource=configurations.networking.liqo.io")
	p.milan.kubectl("", "create", "clusterrolebinding", "looks", "--clusterrole=looks", "--user=looker")
	admin, err := p.milan.cp.Kubeconfig("admin")
	assert.NilError(p.t, err)
	looker := *p.milan
	looker.kubeconfig = p.milan.file("looker", []byte(strings.Replace(string(admin), "user:\n", "user:\n    as: looker\n", 1)))
	until(p.t, "a missing right is named", func() bool {
		_, errs, err := looker.try("peer", "block", "rome")
		return err != nil && strings.Contains(errs, "nothing was changed: you may not patch configurations")
	})
	_, errs, err = looker.try("peer", "block", "rome", "--wait")
	assert.Assert(p.t, err != nil)
	assert.Check(p.t, is.Contains(errs, "nothing was changed: you may not "))
	assert.Equal(p.t, p.blocked(), "")

	assert.Check(p.t, is.Contains(p.milan.run("peer", "block", "rome", "--reason", "key leaked"), "rome is blocked: "))
	text := p.blocked()
	assert.Check(p.t, is.Contains(text, ": key leaked"))
	assert.Check(p.t, is.Contains(p.milan.run("peer", "list"), "blocked"))
	assert.Check(p.t, is.Contains(p.milan.run("peer", "block", "rome", "--reason", "another"), "rome is blocked already ("+text+"): nothing to do."))
	assert.Equal(p.t, p.blocked(), text)

	// There are no gateways here.
	_, errs, err = p.milan.try("peer", "block", "rome", "--wait", "--timeout", "1s")
	assert.Assert(p.t, err != nil)
	assert.Check(p.t, is.Contains(errs, "rome is blocked in its Configuration, but the gateway has not said so after 1s: there is no Connection: no gateway of this peer is running: see isthmusctl peer list"))

	assert.Check(p.t, is.Contains(p.milan.run("peer", "unblock", "rome"), "rome is no longer blocked: "))
	assert.Equal(p.t, p.blocked(), "")
	assert.Check(p.t, is.Contains(p.milan.run("peer", "unblock", "rome"), "rome is not blocked: nothing to do."))
}

// blocked returns the annotation of the Configuration of rome in milan.
func (p *pair) blocked() string {
	return p.milan.list(p.t.Context(), "Configuration")[0].GetAnnotations()["networking.liqo.io/blocked"]
}
