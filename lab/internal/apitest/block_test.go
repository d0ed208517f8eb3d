package apitest

import (
	"encoding/json"
	"strings"

	"gotest.tools/v3/assert"
	is "gotest.tools/v3/assert/cmp"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
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
	looker := p.milan.as("looker")
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

// follows lets a peer add networks, looks at that, and takes it back.
func (p *pair) follows() {
	p.does("init")
	defer p.does("reset", "--wait")
	annotations := func() map[string]string { return p.milan.list(p.t.Context(), "Configuration")[0].GetAnnotations() }
	for _, args := range [][]string{{"--max", "2"}, {"--none", "--forget"}, {"--range", "10.64.0.0/10", "--none"}} {
		_, errs, err := p.milan.try(append([]string{"peer", "follow", "rome"}, args...)...)
		assert.Check(p.t, err != nil)
		assert.Check(p.t, is.Contains(errs, "give --range, with or without --max"))
	}
	_, errs, err := p.milan.try("peer", "follow", "rome", "--range", "10.64.0.1/10")
	assert.Check(p.t, err != nil)
	assert.Check(p.t, is.Contains(errs, `--range "10.64.0.1/10" is not a range`))
	assert.Check(p.t, is.Contains(p.milan.run("peer", "follow", "rome"), "rome adds no networks by telling them."))
	assert.Check(p.t, is.Contains(p.milan.run("peer", "follow", "rome", "--range", "10.64.0.0/10,fd64::/16", "--max", "2"), "rome may add 2 networks in 10.64.0.0/10,fd64::/16"))
	assert.Equal(p.t, annotations()["networking.liqo.io/follow"], "10.64.0.0/10,fd64::/16")
	assert.Equal(p.t, annotations()["networking.liqo.io/follow-max"], "2")
	until(p.t, "the controller has read it", func() bool {
		_, is, _ := unstructured.NestedMap(p.milan.list(p.t.Context(), "Configuration")[0].Object, "status", "follow")
		return is
	})
	assert.Check(p.t, is.Contains(p.milan.run("peer", "follow", "rome", "--forget"), "rome has withdrawn nothing"))
	// Another run of the same keeps it.
	p.does("init")
	assert.Equal(p.t, annotations()["networking.liqo.io/follow-max"], "2")
	assert.Check(p.t, is.Contains(p.milan.run("peer", "follow", "rome", "--none"), "rome adds no networks"))
	assert.Equal(p.t, annotations()["networking.liqo.io/follow"], "")
	p.milan.kubectl("", "annotate", "configuration", "rome", "-n", "liqo-tenant-rome", "networking.liqo.io/follow=everything")
	until(p.t, "what can't be read is told", func() bool {
		return strings.Contains(p.milan.kubectl("", "get", "configuration", "rome", "-n", "liqo-tenant-rome", "-o", "jsonpath={.status.conditions[?(@.type==\"NetworkCIDRsConfigured\")]}"), `\"everything\" has a part`)
	})
}

// blocksKey blocks a key, which stays blocked when the peering is made anew.
func (p *pair) blocksKey() {
	const none = "No key is blocked.\n"
	assert.Equal(p.t, p.milan.run("peer", "block", "--list"), none)
	for _, args := range [][]string{{"block"}, {"block", "rome", "--key", "x"}, {"unblock"}, {"block", "rome", "oslo"}} {
		_, errs, err := p.milan.try(append([]string{"peer"}, args...)...)
		assert.Check(p.t, err != nil)
		assert.Check(p.t, is.Contains(errs, "name the peer by its ID, or give --key and no ID"))
	}
	_, errs, err := p.milan.try("peer", "block", "--key", "rome")
	assert.Check(p.t, err != nil && strings.Contains(errs, `--key "rome": is no fingerprint of a key`), errs)
	_, errs, err = p.milan.try("peer", "block", "--key", "01d0-fabd-251f-cbbe", "--namespace", "default")
	assert.Check(p.t, err != nil && strings.Contains(errs, "nothing was changed: Isthmus is not installed in namespace default"), errs)
	_, errs, err = p.milan.as("looker").try("peer", "block", "--key", "01d0-fabd-251f-cbbe")
	assert.Check(p.t, err != nil && strings.Contains(errs, "nothing was changed: you may not create configmaps in namespace liqo"), errs)

	p.does(connectArgs...)
	key, _, _ := unstructured.NestedString(p.milan.list(p.t.Context(), "PublicKey")[0].Object, "spec", "publicKey")
	f := p.milan.run("peer", "block", "--key", key, "--reason", "key leaked", "--json")
	var made struct {
		Fingerprint string
		PublicKeys  []string
		Changed     bool
	}
	assert.NilError(p.t, json.Unmarshal([]byte(f), &made))
	assert.Assert(p.t, made.Changed)
	assert.DeepEqual(p.t, made.PublicKeys, []string{"liqo-tenant-rome/rome"})
	isBlocked := func(want string) func() bool {
		return func() bool {
			keys := p.milan.list(p.t.Context(), "PublicKey")
			return len(keys) == 1 && condition(&keys[0], "Accepted") == want
		}
	}
	until(p.t, "its PublicKey is refused", isBlocked("Blocked"))
	for _, args := range [][]string{{"peer", "list"}, {"peer", "block", "--list"}} {
		assert.Check(p.t, is.Contains(p.milan.run(args...), made.Fingerprint+"   liqo-tenant-rome/rome   by "))
	}
	assert.Check(p.t, is.Contains(p.milan.run("peer", "block", "--key", made.Fingerprint), "is blocked already (by "))
	until(p.t, "an event says so", func() bool {
		return strings.Contains(p.milan.kubectl("", "get", "events", "-n", "liqo-tenant-rome"), "Blocked")
	})

	// Its keys are others when a gateway is made anew. Who has the old one still can write it.
	p.does("reset", "--wait")
	p.does("init")
	p.milan.kubectl(`{apiVersion: networking.liqo.io/v1beta1, kind: PublicKey, metadata: {namespace: liqo-tenant-rome, name: another-name, labels: {liqo.io/remote-cluster-id: rome}}, spec: {publicKey: "`+key+`"}}`, "apply", "-f", "-")
	until(p.t, "the key is refused under another name", isBlocked("Blocked"))
	assert.Check(p.t, is.Contains(p.milan.run("peer", "unblock", "--key", key), "is no longer blocked. PublicKeys that have it: liqo-tenant-rome/another-name."))
	until(p.t, "the key is used again", isBlocked("Accepted"))
	assert.Equal(p.t, p.milan.run("peer", "block", "--list"), none)
	assert.Check(p.t, is.Contains(p.milan.run("peer", "unblock", "--key", key), "is not blocked: nothing to do."))
	p.does("reset", "--wait")
	p.nothing()
}

// condition returns the reason of a condition, empty if the object does not have it.
func condition(o *unstructured.Unstructured, kind string) string {
	list, _, _ := unstructured.NestedSlice(o.Object, "status", "conditions")
	for _, c := range list {
		if c, ok := c.(map[string]any); ok && c["type"] == kind {
			reason, _ := c["reason"].(string)
			return reason
		}
	}
	return ""
}

// blocked returns the annotation of the Configuration of rome in milan.
func (p *pair) blocked() string {
	return p.milan.list(p.t.Context(), "Configuration")[0].GetAnnotations()["networking.liqo.io/blocked"]
}
