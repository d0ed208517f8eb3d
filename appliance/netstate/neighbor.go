package netstate

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
)

func (e FDBEntry) normal() FDBEntry {
	e.Remote = e.Remote.Unmap()
	return e
}

func (n Neighbor) normal() Neighbor {
	n.Addr = n.Addr.Unmap()
	return n
}

// An fdbKey is what the kernel allows only once: one host for a station, and
// any number of them for a group of stations or for all that are not known.
type fdbKey struct {
	dev    string
	mac    MAC
	remote netip.Addr
}

func (e FDBEntry) key() fdbKey {
	k := fdbKey{dev: e.Dev, mac: e.MAC}
	if !e.MAC.station() {
		k.remote = e.Remote
	}
	return k
}

// A neighborKey is what the kernel allows only once.
type neighborKey struct {
	dev  string
	addr netip.Addr
}

func (n Neighbor) key() neighborKey { return neighborKey{n.Dev, n.Addr} }

// HasNeighbors reports whether neighbours on links of this kind can be ours.
func (k LinkKind) HasNeighbors() bool { return k == KindGeneve || k == KindVXLAN }

// station reports whether the address is that of one station: neither of a
// group nor nobody's.
func (m MAC) station() bool { return m[0]&1 == 0 && m != MAC{} }

func compareSettings(a, b Setting) int { return cmp.Compare(a.Dev, b.Dev) }

func compareFDB(a, b FDBEntry) int {
	return cmp.Or(cmp.Compare(a.Dev, b.Dev), slices.Compare(a.MAC[:], b.MAC[:]), a.Remote.Compare(b.Remote))
}

func compareNeighbors(a, b Neighbor) int {
	return cmp.Or(cmp.Compare(a.Dev, b.Dev), a.Addr.Compare(b.Addr), slices.Compare(a.MAC[:], b.MAC[:]))
}

// diffSettings finds the settings that are not as desired. Those that nobody
// desires are nobody's.
func diffSettings(c *Changes, observed, desired []Setting) {
	have := make(map[string]Setting, len(observed))
	for _, s := range observed {
		have[s.Dev] = s
	}
	for _, want := range desired {
		if got, ok := have[want.Dev]; !ok || got != want {
			c.SetSettings = append(c.SetSettings, want)
			have[want.Dev] = want
		}
	}
	slices.SortFunc(c.SetSettings, compareSettings)
}

func diffFDB(c *Changes, observed, desired []FDBEntry) {
	add, replace, del := diffKeyed(observed, desired, FDBEntry.normal, FDBEntry.key)
	c.SetFDB, c.DeleteFDB = append(add, replace...), del
	slices.SortFunc(c.SetFDB, compareFDB)
	slices.SortFunc(c.DeleteFDB, compareFDB)
}

func diffNeighbors(c *Changes, observed, desired []Neighbor) {
	add, replace, del := diffKeyed(observed, desired, Neighbor.normal, Neighbor.key)
	c.SetNeighbors, c.DeleteNeighbors = append(add, replace...), del
	slices.SortFunc(c.SetNeighbors, compareNeighbors)
	slices.SortFunc(c.DeleteNeighbors, compareNeighbors)
}

func (v VXLAN) validate() error {
	switch {
	case v.VNI >= 1<<24:
		return fmt.Errorf("vxlan id %d: must be less than %d", v.VNI, 1<<24)
	case !unicast(v.Local):
		return fmt.Errorf("vxlan local %s: must be a unicast address of this host", v.Local)
	case v.Port == 0:
		return errors.New("vxlan dstport: must not be 0")
	}
	return nil
}

// unicast reports whether the address can be that of one host.
func unicast(a netip.Addr) bool { return a.IsValid() && !a.IsUnspecified() && !a.IsMulticast() }

// validateStations says what of the settings, the forwarding entries and the
// neighbours no kernel could apply.
func (s State) validateStations() []error {
	links := make(map[string]Link, len(s.Links))
	for _, l := range s.Links {
		links[l.Name] = l
	}
	var errs []error
	set := make(map[string]bool, len(s.Settings))
	for _, v := range s.Settings {
		if _, ok := links[v.Dev]; ok {
			errs = append(errs, fmt.Errorf("setting %s: dev is a link of this state; say it of the link", v))
		}
		if set[v.Dev] {
			errs = append(errs, fmt.Errorf("setting %s: there is another of this dev", v))
		}
		set[v.Dev] = true
		if v.Dev == "" || len(v.Dev) > maxName {
			errs = append(errs, fmt.Errorf("setting %s: a link's name has 1 to %d bytes", v, maxName))
		}
	}
	entries := make(map[fdbKey]FDBEntry, len(s.FDB))
	for _, e := range s.FDB {
		e = e.normal()
		if other, ok := entries[e.key()]; ok && other != e {
			errs = append(errs, fmt.Errorf("fdb %s: contradicts %s", e, other))
		}
		entries[e.key()] = e
		errs = wrap(errs, "fdb "+e.String(), e.validate(links[e.Dev]))
	}
	neighbors := make(map[neighborKey]Neighbor, len(s.Neighbors))
	for _, n := range s.Neighbors {
		n = n.normal()
		if other, ok := neighbors[n.key()]; ok && other != n {
			errs = append(errs, fmt.Errorf("neigh %s: contradicts %s", n, other))
		}
		neighbors[n.key()] = n
		errs = wrap(errs, "neigh "+n.String(), n.validate(links[n.Dev]))
	}
	return errs
}

// validate says what is wrong with an entry of the link, which is zero if
// there is none.
func (e FDBEntry) validate(l Link) error {
	switch {
	case l.Kind != KindVXLAN:
		return errors.New("dev is not a vxlan link of this state")
	case !e.MAC.station():
		return errors.New("the MAC must be that of one station: what is for others is not sent")
	case !unicast(e.Remote):
		return errors.New("dst must be the unicast address of a host")
	case e.Remote.Is4() != l.VXLAN.Local.Unmap().Is4():
		return fmt.Errorf("dst is not of the family of the link's local address %s", l.VXLAN.Local)
	}
	return nil
}

// validate says what is wrong with a neighbour on the link, which is zero if
// there is none.
func (n Neighbor) validate(l Link) error {
	switch {
	case !l.Kind.HasNeighbors():
		return errors.New("dev is not a geneve or vxlan link of this state")
	case !unicast(n.Addr):
		return errors.New("must be a unicast address")
	case !n.MAC.station():
		return errors.New("lladdr must be that of one station")
	}
	return nil
}

// String returns the setting as ip-netconf(8) shows it.
func (s Setting) String() string {
	forwarding := "off"
	if s.Forwarding {
		forwarding = "on"
	}
	return "dev " + s.Dev + " forwarding " + forwarding
}

// String returns the entry in the notation of bridge(8) "fdb".
func (e FDBEntry) String() string {
	return fmt.Sprintf("%s dev %s dst %s self permanent", e.MAC, e.Dev, e.Remote)
}

// String returns the neighbour in the notation of ip-neighbour(8).
func (n Neighbor) String() string {
	return fmt.Sprintf("%s dev %s lladdr %s nud permanent", n.Addr, n.Dev, n.MAC)
}
