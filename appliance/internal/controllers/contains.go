package controllers

import (
	"reflect"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/resource"
)

var quantity = reflect.TypeFor[resource.Quantity]()

// contains reports whether live has everything that want sets. What want
// leaves at its zero value may be anything: the API server fills it in. A list
// that want sets must be as long, so that what somebody added to it shows;
// what want sets by a pointer must be the same even if it is zero.
func contains(live, want any) bool {
	return covers(reflect.ValueOf(live), reflect.ValueOf(want), false)
}

func covers(live, want reflect.Value, explicit bool) bool {
	if want.Type() == quantity {
		return !explicit && want.IsZero() || equality.Semantic.DeepEqual(live.Interface(), want.Interface())
	}
	switch want.Kind() {
	case reflect.Pointer, reflect.Interface:
		if want.IsNil() {
			return true
		}
		return !live.IsNil() && live.Elem().Type() == want.Elem().Type() && covers(live.Elem(), want.Elem(), true)
	case reflect.Struct:
		for i := range want.NumField() {
			if want.Type().Field(i).IsExported() && !covers(live.Field(i), want.Field(i), false) {
				return false
			}
		}
		return true
	case reflect.Slice:
		if want.Len() == 0 {
			return true
		}
		if live.Len() != want.Len() {
			return false
		}
		for i := range want.Len() {
			if !covers(live.Index(i), want.Index(i), true) {
				return false
			}
		}
		return true
	case reflect.Map:
		for _, key := range want.MapKeys() {
			v := live.MapIndex(key)
			if !v.IsValid() || !covers(v, want.MapIndex(key), true) {
				return false
			}
		}
		return true
	}
	return !explicit && want.IsZero() || reflect.DeepEqual(live.Interface(), want.Interface())
}
