package peer

import (
	"bytes"
	"cmp"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"
)

// A difference is a field of an object that is not as it is to be.
type difference struct {
	field, have, want string
	flag              string // that asks for it; empty: the other side does
	set               func() // sets it in the object
}

// differences are those of one object that is there.
type differences struct {
	object  client.Object
	ref     Ref
	kubectl string
	hint    string // what to do about them, where it is not an edit
	list    []difference
}

func (d *differences) add(field, have, want string, set func()) {
	if have != want {
		d.list = append(d.list, difference{field: field, have: have, want: want, set: set})
	}
}

// flag adds a difference from what a flag asks for, if it was given.
func (d *differences) flag(o *Options, flag, field, have, want string, set func()) {
	if o.Given[flag] && have != want {
		d.list = append(d.list, difference{field, have, want, flag, set})
	}
}

// template adds a difference from the template that flags ask for.
func (d *differences) template(o *Options, name, namespace, field string, ref *corev1.ObjectReference, want Template) {
	d.flag(o, name, field+".name", ref.Name, want.Name, func() { ref.Name = want.Name })
	d.flag(o, namespace, field+".namespace", ref.Namespace, want.Namespace, func() { ref.Namespace = want.Namespace })
}

// others names who else wrote one of the fields that differ; empty: nobody did.
func (d *differences) others() string {
	for _, x := range d.list {
		if by := writer(d.object, x.field); by != "" {
			return by
		}
	}
	return ""
}

// resolve plans the update of an object that isthmusctl wrote, and refuses that
// of what somebody else did.
func (d *differences) resolve(on Side, s *Step) []Change {
	if len(d.list) == 0 {
		return nil
	}
	var why []string
	for _, x := range d.list {
		by := writer(d.object, x.field)
		if by == "" {
			x.set()
			why = append(why, fmt.Sprintf("%s: %s → %s", x.field, cmp.Or(x.have, "none"), cmp.Or(x.want, "none")))
			continue
		}
		wanted, fix := "the other cluster says "+x.want, d.hint
		if x.flag != "" {
			wanted, fix = fmt.Sprintf("--%s asks for %s", x.flag, cmp.Or(x.want, "none")), "leave the flag out to take it as it is"
		}
		edit := fmt.Sprintf("%s edit %s -n %s %s", d.kubectl, plural(d.ref.Kind), d.ref.Namespace, d.ref.Name)
		s.problem("objects", d.ref.String(), cmp.Or(fix+", or change it: "+edit), "%s is %s, written by %s, and %s", x.field, cmp.Or(x.have, "not set"), by, wanted)
	}
	if len(why) == 0 {
		return nil
	}
	return []Change{{On: on, Deed: Update, Object: d.object, Why: strings.Join(why, ", ")}}
}

// writer names who, other than isthmusctl, wrote a field of an object; of one that
// nobody wrote, who wrote the rest of its spec. It is empty for our own.
func writer(o client.Object, field string) string {
	path := fieldpath.MakePathOrDie()
	for _, name := range strings.Split(field, ".") {
		path = append(path, fieldpath.PathElement{FieldName: &name})
	}
	var of, rest []string // managers of the field, and of others of the spec
	for _, m := range o.GetManagedFields() {
		if m.Subresource != "" || m.FieldsV1 == nil {
			continue
		}
		set := &fieldpath.Set{}
		if err := set.FromJSON(bytes.NewReader(m.FieldsV1.GetRawBytes())); err != nil {
			continue // a newer form: who wrote what is not known
		}
		if wrote(set, path) {
			of = append(of, m.Manager)
		} else if set.Has(path[:1]) || !set.WithPrefix(path[0]).Empty() {
			rest = append(rest, m.Manager)
		}
	}
	if len(of) == 0 {
		of = rest
	}
	if i := slices.IndexFunc(of, func(m string) bool { return m != string(FieldOwner) }); i >= 0 {
		return of[i]
	}
	if len(of) == 0 {
		return "somebody else"
	}
	return ""
}

// wrote reports whether a set of fields has a path, the whole that it is part of,
// or a part of it.
func wrote(set *fieldpath.Set, path fieldpath.Path) bool {
	for i := len(path); i > 1; i-- {
		if set.Has(path[:i]) {
			return true
		}
	}
	for _, e := range path {
		set = set.WithPrefix(e)
	}
	return !set.Empty()
}

// field is the name of one that is in the plural where it is a list.
func field(name string, list bool) string {
	if list {
		return name + "s"
	}
	return name
}

// first is the port of a pair of fields of which one is a list.
func first(one *int32, many []int32) int32 {
	if one != nil {
		return *one
	}
	if len(many) > 0 {
		return many[0]
	}
	return 0
}

// setPort sets that field of such a pair that is in use.
func setPort(many []int32, port int32) (*int32, []int32) {
	if len(many) > 0 {
		return nil, []int32{port}
	}
	return &port, nil
}

func value(p *string) string {
	if p == nil {
		return ""
	}
	return *p
}

func optional(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}
