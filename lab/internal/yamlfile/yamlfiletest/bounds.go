// Package yamlfiletest helps to test the structs that package yamlfile reads
// files into.
package yamlfiletest

import (
	"reflect"
	"time"

	"github.com/isthmus-net/isthmus/lab/internal/yamlfile"
)

// Unbounded names the fields of a struct, and of the structs in it, that are a
// number or a duration of a file and lack a bound (the tags min and max).
// Fields that are not part of the file are not looked at, nor those of a type
// that reads its value itself and knows its bounds, such as a share of 0 to 100 %.
func Unbounded(of any) []string {
	w := walk{seen: map[reflect.Type]bool{}}
	w.structure(reflect.TypeOf(of))
	return w.found
}

type walk struct {
	seen  map[reflect.Type]bool
	found []string
}

func (w *walk) structure(t reflect.Type) {
	for t.Kind() == reflect.Pointer || t.Kind() == reflect.Slice || t.Kind() == reflect.Map {
		if t.Kind() == reflect.Map && numeric(t.Elem()) { // no tag reaches its values
			w.found = append(w.found, t.String())
		}
		t = t.Elem()
	}
	if t.Kind() != reflect.Struct || w.seen[t] {
		return
	}
	w.seen[t] = true
	for i := range t.NumField() {
		f := t.Field(i)
		if _, ok := f.Tag.Lookup("lab"); !ok {
			continue
		}
		if numeric(f.Type) && (f.Tag.Get("min") == "" || f.Tag.Get("max") == "") {
			w.found = append(w.found, t.String()+"."+f.Name)
		}
		w.structure(f.Type)
	}
}

// numeric tells whether values of a type are numbers or durations, or lists of
// them.
func numeric(t reflect.Type) bool {
	for t.Kind() == reflect.Pointer || t.Kind() == reflect.Slice {
		t = t.Elem()
	}
	if t == reflect.TypeFor[time.Duration]() {
		return true
	}
	if reflect.PointerTo(t).Implements(reflect.TypeFor[yamlfile.Unmarshaler]()) {
		return false
	}
	switch t.Kind() {
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64,
		reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64,
		reflect.Float32, reflect.Float64:
		return true
	}
	return false
}
