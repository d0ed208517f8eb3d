package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/isthmus-net/isthmus/appliance/cluster"
	"github.com/isthmus-net/isthmus/appliance/desired"
	"github.com/isthmus-net/isthmus/appliance/internal/kube"
)

const (
	// confirmEvery is how often the API server is asked while something is tried.
	confirmEvery = time.Second
	// confirmBefore is how long it may take to answer before something is tried. A
	// pass waits for it, so it is less than while nobody does.
	confirmBefore = 3 * time.Second
	// maxAPIServers is how many addresses of the API server are remembered.
	maxAPIServers = 16
)

// confirmFile has what a process must know of the trials of the one before it.
const confirmFile = "confirm.json"

// A confirmation is what is in that file. What was being tried when a process
// ended, it may have ended with: the next one goes on with the trial.
type confirmation struct {
	APIServers []netip.AddrPort `json:"apiServers,omitempty"`
	Held       []version        `json:"held,omitempty"`
	Trying     []version        `json:"trying,omitempty"`
	Again      bool             `json:"again,omitempty"` // for the second time
	Known      []version        `json:"known,omitempty"`
}

// A confirmer tries new objects of users on a host, see [trial]: it asks the API
// server, and says which objects are not to be used.
type confirmer struct {
	knock   kube.Knock // nil: nobody is asked, nothing is tried
	file    string     // empty: nothing is remembered
	log     *slog.Logger
	changed chan struct{} // yields when other objects are to be in force
	passed  chan struct{} // yields after a pass

	mu      sync.Mutex
	trial   *trial
	servers []netip.AddrPort // where the API server answers, the latest last
	taken   bool             // that the last pass was told
	wrote   string           // the file
	// The versions of objects that were in force for good, by UID: they are in force
	// again where a later one is not.
	routes    map[string]cluster.RouteConfiguration
	firewalls map[string]cluster.FirewallConfiguration
}

// newConfirmer returns one that goes on where the process before has ended. The file is in
// the directory, unless that is empty.
func newConfirmer(knock kube.Knock, dir string, log *slog.Logger) *confirmer {
	c := &confirmer{
		knock: knock, log: log, changed: make(chan struct{}, 1), passed: make(chan struct{}, 1), trial: newTrial(),
		routes: map[string]cluster.RouteConfiguration{}, firewalls: map[string]cluster.FirewallConfiguration{},
	}
	if dir == "" || knock == nil {
		return c
	}
	c.file = filepath.Join(dir, confirmFile)
	text, err := os.ReadFile(c.file)
	var was confirmation
	if err == nil {
		err = json.Unmarshal(text, &was)
	}
	if err != nil {
		if !errors.Is(err, fs.ErrNotExist) {
			log.Warn("it is not known which objects were taken back; they are tried again", "file", c.file, "err", err)
		}
		return c
	}
	set := func(list []version) versions {
		out := versions{}
		for _, v := range list {
			out[v] = true
		}
		return out
	}
	c.servers, c.trial.held = was.APIServers, set(was.Held)
	c.trial.accept(set(was.Known))
	c.trial.resume(set(was.Trying), was.Again)
	return c
}

// users are the objects of users that a host's state is computed from.
type users struct {
	routes    []cluster.RouteConfiguration
	firewalls []cluster.FirewallConfiguration
}

// usersOf returns those of the objects that are addressed to a host and that the
// controller did not make.
func usersOf(routes []cluster.RouteConfiguration, firewalls []cluster.FirewallConfiguration, addressed func(map[string]string) bool) users {
	theirs := func(m cluster.Meta) bool { return desired.OfUser(m) && addressed(m.Labels) }
	var out users
	for _, o := range routes {
		if theirs(o.Meta) {
			out.routes = append(out.routes, o)
		}
	}
	for _, o := range firewalls {
		if theirs(o.Meta) {
			out.firewalls = append(out.firewalls, o)
		}
	}
	return out
}

func (u users) metas() []cluster.Meta {
	var out []cluster.Meta
	for _, o := range u.routes {
		out = append(out, o.Meta)
	}
	for _, o := range u.firewalls {
		out = append(out, o.Meta)
	}
	return out
}

func versionOf(m cluster.Meta) version { return version{m.UID, m.Generation} }

// inForce takes from the report of the process before which objects were in force:
// they need no trial.
func (c *confirmer) inForce(u users, applied []cluster.Applied) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, m := range u.metas() {
		for _, a := range applied {
			if a.OK && a.Object.Kind == m.Kind && a.Object.Namespace == m.Namespace && a.Object.Name == m.Name &&
				a.ObservedGeneration == m.Generation && !m.Created.After(a.Since) && !c.trial.decided(versionOf(m)) {
				c.trial.accept(versions{versionOf(m): true})
			}
		}
	}
}

// choose returns which versions of users' objects are left out of a pass, and the
// earlier ones that take their places. New ones are tried if the API server answers
// now.
func (c *confirmer) choose(ctx context.Context, u users) (left []desired.LeftOut, instead users) {
	if c.knock == nil {
		return nil, users{}
	}
	there, fresh := versions{}, versions{}
	c.mu.Lock()
	for _, m := range u.metas() {
		v := versionOf(m)
		there[v] = true
		if !c.trial.decided(v) {
			fresh[v] = true
		}
	}
	c.trial.keep(there)
	ask := len(fresh) > 0 && !c.trial.taken
	c.mu.Unlock()
	answers := ask && c.ask(ctx, confirmBefore)
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case answers:
		c.trial.begin(fresh)
	case ask:
		c.trial.accept(fresh)
	}
	instead.routes = earlier(c.trial, u.routes, func(o cluster.RouteConfiguration) cluster.Meta { return o.Meta }, c.routes)
	instead.firewalls = earlier(c.trial, u.firewalls, func(o cluster.FirewallConfiguration) cluster.Meta { return o.Meta }, c.firewalls)
	for _, m := range u.metas() {
		if c.trial.out(versionOf(m)) {
			left = append(left, desired.LeftOut{Object: m.Ref, Generation: m.Generation, Why: c.why(versionOf(m))})
		}
	}
	c.taken = c.trial.taken
	c.save()
	return left, instead
}

// earlier keeps the objects that are in force for good, by UID, and returns the kept
// ones of those whose present version is out.
func earlier[T any](t *trial, objects []T, meta func(T) cluster.Meta, kept map[string]T) []T {
	there := map[string]bool{}
	var out []T
	for _, o := range objects {
		m := meta(o)
		there[m.UID] = true
		if t.known[versionOf(m)] {
			kept[m.UID] = o
		} else if was, ok := kept[m.UID]; ok && t.out(versionOf(m)) {
			out = append(out, was)
		}
	}
	maps.DeleteFunc(kept, func(uid string, _ T) bool { return !there[uid] })
	return out
}

// why says why a version is not in force. The caller holds the lock.
func (c *confirmer) why(v version) string {
	earlier := ""
	_, route := c.routes[v.UID]
	if _, firewall := c.firewalls[v.UID]; route || firewall {
		earlier = ", and the object is in force as it was before"
	}
	if c.trial.held[v] {
		return "it is taken back" + earlier + ": the API server did not answer any more when it was in force, and answered again without it, twice. " +
			"Look for what it does to connections to the API server, translation and notrack among it; a changed object is tried again"
	}
	then := "If the API server answers without it, it is tried once more"
	if c.trial.again {
		then = "If the API server answers without it, it stays out"
	}
	return fmt.Sprintf("it is taken back%s: the API server does not answer since it is in force. %s; if not, it is in force again after %s", earlier, then, trialBack)
}

// apiServers returns where the API server answers, sorted.
func (c *confirmer) apiServers() []netip.AddrPort {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := slices.Clone(c.servers)
	slices.SortFunc(out, netip.AddrPort.Compare)
	return out
}

// ask reports whether the API server answers in a time, and remembers where.
func (c *confirmer) ask(ctx context.Context, within time.Duration) bool {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	servers, err := c.knock(ctx)
	if err != nil {
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, a := range servers {
		c.servers = append(slices.DeleteFunc(c.servers, func(x netip.AddrPort) bool { return x == a }), a)
	}
	c.servers = c.servers[max(0, len(c.servers)-maxAPIServers):]
	return true
}

// pass notes what a pass has done.
func (c *confirmer) pass(o outcome) {
	c.mu.Lock()
	if o.computed() {
		c.trial.passed(time.Now(), c.taken, !o.changes.Empty())
		c.save()
	}
	c.mu.Unlock()
	notify(c.passed)
}

// run asks the API server as long as something is tried.
func (c *confirmer) run(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-c.passed:
		}
		for c.running() {
			asked := time.Now()
			answers := c.ask(ctx, trialSilence)
			if ctx.Err() != nil {
				return nil
			}
			c.late(time.Since(asked) - trialSilence)
			if c.hear(answers) {
				notify(c.changed)
			}
			paused := time.Now()
			pause(ctx, confirmEvery)
			c.late(time.Since(paused) - confirmEvery)
		}
	}
}

// late tells how much longer something took than it can. A busy machine is late by less
// than confirmEvery; what is later was not running.
func (c *confirmer) late(by time.Duration) {
	if by < confirmEvery {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.trial.excuse(time.Now(), by)
	c.log.Info("this process did not run for a while: the API server may not have been silent", "for", by.Round(time.Millisecond))
}

func (c *confirmer) running() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.trial.running()
}

// hear passes on what the API server was asked, and reports whether another pass
// is needed.
func (c *confirmer) hear(answers bool) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	taken, again, tried := c.trial.taken, c.trial.again, len(c.trial.trying)
	if !c.trial.hear(time.Now(), answers) {
		return false
	}
	switch {
	case !taken && c.trial.taken:
		c.log.Warn("the API server does not answer any more after a change: taking it back", "objects", tried, "for", trialBack)
	case taken && !again && c.trial.again:
		c.log.Info("the API server answers without the change: it is tried once more", "objects", tried)
	case taken && c.trial.running():
		c.log.Info("the API server answers by itself, with the change in force", "objects", tried)
	case taken && answers:
		c.log.Warn("the API server answers again without the change, which stays taken back", "objects", tried)
	case taken:
		c.log.Info("the API server does not answer without the change either: it is in force again", "objects", tried)
	}
	c.save()
	return true
}

// save writes down what the next process must know, if that has changed. The caller
// holds the lock.
func (c *confirmer) save() {
	if c.file == "" {
		return
	}
	list := func(set versions) []version {
		var out []version
		for v := range set {
			out = append(out, v)
		}
		slices.SortFunc(out, compareVersions)
		return out
	}
	text, err := json.Marshal(confirmation{c.servers, list(c.trial.held), list(c.trial.trying), c.trial.again, list(c.trial.known)})
	if err != nil || string(text) == c.wrote {
		return
	}
	// Whole or not at all.
	err = os.WriteFile(c.file+".new", text, 0o600)
	if err == nil {
		err = os.Rename(c.file+".new", c.file)
	}
	if err != nil {
		c.log.Warn("what is tried is not remembered: objects that were taken back are tried again after a restart", "file", c.file, "err", err)
		return
	}
	c.wrote = string(text)
}
