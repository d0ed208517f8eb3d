package kube

import (
	"reflect"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// Each calls do for every object, in the order of the lists.
func (o *Objects) Each(do func(client.Object)) {
	o.lists(func(list reflect.Value) {
		for i := range list.Len() {
			do(list.Index(i).Addr().Interface().(client.Object))
		}
	})
}

// Without returns all objects but those with these UIDs. It leaves o as it is.
func (o Objects) Without(uids map[types.UID]bool) Objects {
	if len(uids) == 0 {
		return o
	}
	o.lists(func(list reflect.Value) {
		rest := reflect.MakeSlice(list.Type(), 0, list.Len())
		for i := range list.Len() {
			if !uids[list.Index(i).Addr().Interface().(client.Object).GetUID()] {
				rest = reflect.Append(rest, list.Index(i))
			}
		}
		list.Set(rest)
	})
	return o
}

// lists calls do for every list of objects.
func (o *Objects) lists(do func(list reflect.Value)) {
	v := reflect.ValueOf(o).Elem()
	for i := range v.NumField() {
		if f := v.Field(i); f.Kind() == reflect.Slice && reflect.PointerTo(f.Type().Elem()).Implements(reflect.TypeFor[client.Object]()) {
			do(f)
		}
	}
}
